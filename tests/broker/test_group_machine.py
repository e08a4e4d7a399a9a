"""Many members join, leave, fall silent and come back at random; what must hold always, holds.

The invariants: a waiter is answered exactly once and never lost; the generation only grows, and each generation has one
leader, who alone is told the members; a member of a generation that syncs gets exactly the bytes its leader gave it, or
an error; nothing is told as assigned that is not durable; a group loaded from its newest record is that group.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.examples import examples
from tests.support.group_driver import Driver
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.groups.messages import JoinResult
from tidelog.broker.groups.records import GroupValue, encode_group_value, parse_group_value
from tidelog.broker.groups.state import ClassicGroup
from tidelog.broker.groups.state import GroupState as S

SLOTS = st.integers(0, 5)
PROTOCOLS = st.sampled_from([("range",), ("range", "sticky"), ("sticky", "range")])


class Client:
    """A client library's view of its membership. It may die at any time: then it just says nothing more."""

    def __init__(self, slot: int) -> None:
        self.instance = f"i-{slot}" if slot >= 4 else None
        self.member_id = ""
        self.generation = -1
        self.joined: JoinResult | None = None
        self.join_waiter: int | None = None
        self.sync_waiter: int | None = None


class Groups(RuleBasedStateMachine):
    @initialize(delay_ms=st.sampled_from([0, 3_000]), auto_persist=st.booleans(), max_size=st.sampled_from([3, 100]))
    def begin(self, delay_ms: int, auto_persist: bool, max_size: int) -> None:
        self.d = Driver(delay_ms=delay_ms, auto_persist=auto_persist, max_size=max_size)
        self.clients = [Client(slot) for slot in range(6)]
        self.asked: set[int] = set()
        self.leaders: dict[int, str] = {}
        """Who was told, in which generation, to lead: by the id the member had when the round completed."""
        self.told: dict[int, set[str]] = {}
        """Members that were told a generation."""
        self.given: dict[int, list[dict[str, bytes]]] = {}
        """What leaders gave, by generation."""
        self.generation = 0

    # --- clients ---

    @rule(slot=SLOTS, protocols=PROTOCOLS, metadata=st.sampled_from([b"", b"m"]))
    def join(self, slot: int, protocols: tuple[str, ...], metadata: bytes) -> None:
        client = self.clients[slot]
        self.learn()
        if client.join_waiter is not None or client.sync_waiter is not None:
            return  # its connection is busy
        waiter = self.d.join(
            client.member_id, instance=client.instance, protocols=dict.fromkeys(protocols, metadata), session_ms=9_000
        )
        self.asked.add(waiter)
        client.join_waiter = waiter
        self.learn()

    @rule(slot=SLOTS)
    def sync(self, slot: int) -> None:
        client = self.clients[slot]
        self.learn()
        if client.joined is None or client.join_waiter is not None or client.sync_waiter is not None:
            return
        assignments = None
        if client.joined.members and not client.joined.skip_assignment:
            assignments = {
                one.member_id: f"{client.generation}/{one.member_id}".encode() for one in client.joined.members
            }
            self.given.setdefault(client.generation, []).append(assignments)
        waiter = self.d.sync(client.member_id, client.generation, assignments, instance=client.instance)
        self.asked.add(waiter)
        client.sync_waiter = waiter
        self.learn()

    @rule(slot=SLOTS)
    def heartbeat(self, slot: int) -> None:
        client = self.clients[slot]
        error = self.d.heartbeat(client.member_id, client.generation, client.instance)
        if error in (E.UNKNOWN_MEMBER_ID, E.FENCED_INSTANCE_ID) and client.join_waiter is None:
            self.restart(slot)

    @rule(slot=SLOTS)
    def leave(self, slot: int) -> None:
        client = self.clients[slot]
        if client.member_id:
            self.d.leave((client.member_id, client.instance))
            self.learn()

    @rule(slot=SLOTS)
    def restart(self, slot: int) -> None:
        """The process dies, connection and all, and a new one takes its place."""
        self.clients[slot] = Client(slot)

    @rule(slots=st.sets(SLOTS, min_size=1), ms=st.sampled_from([0, 3_000, 6_000]))
    def several_form_a_generation(self, slots: set[int], ms: int) -> None:
        """The usual course, as far as it goes: join (twice), wait, sync, durable."""
        for _ in range(2):
            for slot in slots:
                self.join(slot, ("range",), b"m")
        self.d.advance(ms)
        self.learn()
        for slot in range(6):
            self.sync(slot)
        while self.d.persists:
            self.d.persist()
        self.learn()

    @rule()
    def all_sync(self) -> None:
        for slot in range(6):
            self.sync(slot)

    # --- the world ---

    @rule(ms=st.sampled_from([0, 1, 500, 3_000, 9_000, 30_000]))
    def time_passes(self, ms: int) -> None:
        self.d.advance(ms)
        self.learn()

    @rule(error=st.sampled_from([E.NONE, E.NONE, E.NONE, E.COORDINATOR_NOT_AVAILABLE]))
    def disk_answers(self, error: E) -> None:
        if self.d.persists:
            self.d.persist(error)
            self.learn()

    @rule(chance=st.integers(0, 2))
    def coordinator_restarts(self, chance: int) -> None:
        """Only what is durable survives; every connection breaks."""
        if not self.d.log or chance:
            return
        value = parse_group_value(encode_group_value(self.d.log[-1]))
        unanswered = self.asked - self.d.answers.keys()
        self.d.group.shut(E.NOT_COORDINATOR)
        self.d.collect()
        assert unanswered <= self.d.answers.keys(), "a waiter was lost with the coordinator"
        self.d.persists.clear()
        self.d.group = ClassicGroup.load("g", value, self.d.limits, self.d.rng, self.d.now)
        self.check_loaded(value)
        self.generation = value.generation
        for later in [generation for generation in self.told if generation > value.generation]:
            del self.told[later]
            self.leaders.pop(later, None)
            self.given.pop(later, None)
        self.learn()

    def check_loaded(self, value: GroupValue) -> None:
        group = self.d.group
        assert group.state is (S.STABLE if value.members else S.EMPTY)
        assert group.durable == value
        assert group.members.values(group.protocol) == value.members

    # --- what clients learn from answers ---

    def learn(self) -> None:
        for client in self.clients:
            if client.join_waiter in self.d.answers:
                self.learn_join(client, self.d.join_answer(client.join_waiter))
                client.join_waiter = None
            if client.sync_waiter in self.d.answers:
                self.learn_sync(client, client.sync_waiter)
                client.sync_waiter = None

    def learn_join(self, client: Client, answer: JoinResult) -> None:
        client.joined = None
        if answer.error is E.MEMBER_ID_REQUIRED:
            client.member_id = answer.member_id
            return
        if answer.error is not E.NONE:
            if answer.error in (E.UNKNOWN_MEMBER_ID, E.FENCED_INSTANCE_ID, E.GROUP_MAX_SIZE_REACHED):
                client.member_id = ""
            return
        client.member_id, client.generation, client.joined = answer.member_id, answer.generation, answer
        self.told.setdefault(answer.generation, set()).add(answer.member_id)
        if answer.members:
            assert answer.leader == answer.member_id, "a follower was told the members"
            if not answer.skip_assignment:
                assert self.leaders.setdefault(answer.generation, answer.member_id) == answer.member_id
            assert answer.member_id in {one.member_id for one in answer.members}

    def learn_sync(self, client: Client, waiter: int) -> None:
        answer = self.d.sync_answer(waiter)
        if answer.error is not E.NONE:
            assert answer.assignment == b""
            client.joined = None
            return
        durable = self.d.group.durable
        if durable is None or durable.generation != client.generation:
            return  # a coordinator's restart came between
        mine = [one for one in durable.members if one.member_id == client.member_id]
        assert [one.assignment for one in mine] == [answer.assignment], "told what is not durable"
        given = {data for assignments in self.given.get(client.generation, []) for data in assignments.values()}
        assert answer.assignment == b"" or answer.assignment in given

    # --- what holds always ---

    @invariant()
    def every_waiter_is_answered_or_held(self) -> None:
        if not hasattr(self, "d"):
            return
        held: list[Any] = []
        for member in self.d.group.members:
            held += [waiter for waiter in (member.join_waiter, member.sync_waiter) if waiter is not None]
        assert len(held) == len(set(held))
        assert self.asked == self.d.answers.keys() | set(held)
        assert not self.d.answers.keys() & set(held)

    @invariant()
    def the_generation_only_grows(self) -> None:
        if hasattr(self, "d"):
            assert self.d.group.generation >= self.generation
            self.generation = self.d.group.generation

    @invariant()
    def the_group_is_consistent(self) -> None:
        if not hasattr(self, "d"):
            return
        group = self.d.group
        assert (group.members.leader is None) == (len(group.members) == 0)
        assert group.members.leader is None or group.members.leader in group.members
        if group.state is S.EMPTY:
            assert not len(group.members)
        if group.state is S.STABLE:
            assert group.durable is not None
            assert group.durable.generation == group.generation
        for member in group.members:
            assert member.sync_waiter is None or group.state is S.COMPLETING, "waits for a round that is over"
            assert member.join_waiter is None or group.state is S.PREPARING or member.instance_id is not None
        if group.state is not S.EMPTY or group.members.pending:
            assert group.next_deadline_ms() is not None or self.d.persists, "nothing would ever end this state"

    def teardown(self) -> None:
        """When everybody goes silent and the disk works, the group empties and nobody waits any more."""
        if not hasattr(self, "d"):
            return
        for _ in range(20):
            while self.d.persists:
                self.d.persist()
            self.d.advance(400_000)
        assert self.d.group.state is S.EMPTY
        assert self.asked == self.d.answers.keys()
        assert self.d.group.next_deadline_ms() is None


Groups.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=50, deadline=None)
test_groups = Groups.TestCase
