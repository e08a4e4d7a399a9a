"""Drives one `ClassicGroup` without I/O: time by hand, answers and records collected."""

from __future__ import annotations

import random

from tidelog.broker.coordinators.timers import Now
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import (
    JoinRequest,
    JoinResult,
    Limits,
    Persist,
    Reply,
    SyncRequest,
    SyncResult,
)
from tidelog.broker.groups.records import GroupValue
from tidelog.broker.groups.state import ClassicGroup

SESSION_MS = 10_000
REBALANCE_MS = 30_000
DELAY_MS = 3_000
WALL_MS = 1_000_000_000


class Driver:
    """A group and its clients. `auto_persist`: records are durable at once."""

    def __init__(self, *, max_size: int = 100, delay_ms: int = DELAY_MS, auto_persist: bool = True) -> None:
        self.limits = Limits(delay_ms, max_size)
        self.rng = random.Random(1)
        self.group = ClassicGroup("g", self.limits, self.rng)
        self.now_ms = 0
        self.auto_persist = auto_persist
        self.answers: dict[int, JoinResult | SyncResult] = {}
        self.persists: list[Persist] = []
        """Not durable yet, oldest first."""
        self.log: list[GroupValue] = []
        """Durable records."""
        self._waiters = 0

    @property
    def now(self) -> Now:
        return Now(self.now_ms, WALL_MS + self.now_ms)

    # --- requests ---

    def join(
        self,
        member_id: str = "",
        *,
        instance: str | None = None,
        protocols: dict[str, bytes] | None = None,
        protocol_type: str = "consumer",
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
        version: int = 9,
        client: str = "client",
    ) -> int:
        """Send a join; returns the waiter. `answers` has it once it is answered."""
        request = JoinRequest(
            MemberIdentity(member_id, instance),
            client,
            "/1.2.3.4",
            session_ms,
            rebalance_ms,
            protocol_type,
            tuple(({"range": b"meta"} if protocols is None else protocols).items()),
            needs_member_id=version >= 4,
            can_skip_assignment=version >= 9,
        )
        waiter = self._waiter()
        self.group.join(waiter, request, self.now)
        self.collect()
        return waiter

    def enter(self, **how: object) -> tuple[str, int]:
        """Join as a new dynamic member, with the second request that v4+ needs; returns member id and waiter."""
        first = self.join_answer(self.join(**how))  # type: ignore[arg-type]
        assert first.error is GroupError.MEMBER_ID_REQUIRED, first
        return first.member_id, self.join(first.member_id, **how)  # type: ignore[arg-type]

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: dict[str, bytes] | None = None,
        *,
        instance: str | None = None,
        protocol_type: str | None = None,
        protocol: str | None = None,
    ) -> int:
        waiter = self._waiter()
        identity = MemberIdentity(member_id, instance)
        self.group.sync(waiter, SyncRequest(identity, generation, protocol_type, protocol, assignments or {}))
        self.collect()
        return waiter

    def heartbeat(self, member_id: str, generation: int, instance: str | None = None) -> GroupError:
        return self.group.heartbeat(MemberIdentity(member_id, instance), generation, self.now)

    def leave(self, *identities: tuple[str, str | None] | str) -> list[GroupError]:
        named = [MemberIdentity(one) if isinstance(one, str) else MemberIdentity(*one) for one in identities]
        errors = self.group.leave(named, self.now)
        self.collect()
        return errors

    def commit(self, member_id: str = "", generation: int = -1, instance: str | None = None) -> GroupError:
        return self.group.check_commit(MemberIdentity(member_id, instance), generation, self.now)

    # --- time and disk ---

    def advance(self, ms: int) -> None:
        """Let time pass, firing every timer when it is due."""
        end = self.now_ms + ms
        while (due := self.group.next_deadline_ms()) is not None and due <= end:
            self.now_ms = max(self.now_ms, due)
            self.group.tick(self.now)
            self.collect()
        self.now_ms = end

    def persist(self, error: GroupError = GroupError.NONE) -> None:
        """The oldest record becomes durable, or fails."""
        effect = self.persists.pop(0)
        if error is GroupError.NONE:
            self.log.append(effect.value)
        self.group.persisted(effect.ticket, error, self.now)
        self.collect()

    # --- answers ---

    def join_answer(self, waiter: int) -> JoinResult:
        answer = self.answers[waiter]
        assert isinstance(answer, JoinResult)
        return answer

    def sync_answer(self, waiter: int) -> SyncResult:
        answer = self.answers[waiter]
        assert isinstance(answer, SyncResult)
        return answer

    def _waiter(self) -> int:
        self._waiters += 1
        return self._waiters

    def collect(self) -> None:
        """Take what the group wants done: note answers, queue records."""
        for effect in self.group.take_effects():
            if isinstance(effect, Reply):
                assert effect.waiter not in self.answers, "answered twice"
                self.answers[effect.waiter] = effect.result
            else:
                self.persists.append(effect)
        while self.auto_persist and self.persists:
            self.persist()

    # --- whole groups ---

    def stable(self, count: int = 2, **how: object) -> list[str]:
        """A Stable group of `count` dynamic members, the leader first; each is assigned its own id."""
        joined = [self.enter(**how) for _ in range(count)]
        self.advance(self.limits.initial_rebalance_delay_ms * (count + 1))
        ids = [member_id for member_id, _ in joined]
        self.sync_all(ids)
        return ids

    def sync_all(self, ids: list[str]) -> None:
        generation = self.group.generation
        leader = self.group.members.leader
        for member_id in ids:
            static = self.group.members.get(member_id)
            assert static is not None
            assignments = {one: one.encode() for one in ids} if member_id == leader else None
            waiter = self.sync(member_id, generation, assignments, instance=static.instance_id)
            assert member_id == leader or waiter not in self.answers or self.group.state.value == "Stable"
