"""The state machine of a classic consumer group (KIP-62, KIP-134, KIP-345, KIP-394, KIP-559, KIP-814). Sans-I/O.

Theory of operation. A group passes through generations. Members *join* and wait until the round is complete or has
timed out; then each gets the new generation, and only the leader gets the list of members. All members *sync* and wait
until the leader has sent the assignments and these are durable; then each gets its own, and the group is Stable. A
member that joins, leaves, or times out after that starts the next round.

    state                  left when
    Empty                  a member joins (after the initial delay, which further joins extend)
    PreparingRebalance     all known members joined, or the rebalance timeout is up → Completing (Empty if none is left)
    CompletingRebalance    the leader's assignment is durable → Stable; a join, leave or time-out → Preparing
    Stable                 a join with a change, a leave or a time-out → Preparing
    Dead                   being deleted, or moved to another broker; every request fails with a retriable error

Events are method calls with the current time. Deferred results and records to persist are effects, which the caller
fetches with `take_effects` after every call; it calls `tick` when `next_deadline_ms` is reached, and `persisted` when a
record is durable or has failed.

Invariants: every waiter is completed exactly once; a generation only grows; a follower gets no member list; an
assignment is returned only after it is durable, and is the leader's bytes unchanged.

Entry: `ClassicGroup`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from tidelog.broker.coordinators.timers import Now, TimerTable
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import (
    CONSUMER_PROTOCOL_TYPE,
    Member,
    MemberIdentity,
    Members,
    generate_member_id,
    subscribed_topics,
)
from tidelog.broker.groups.messages import (
    Effect,
    JoinedMember,
    JoinRequest,
    JoinResult,
    Limits,
    Persist,
    Reply,
    SyncRequest,
    SyncResult,
)
from tidelog.broker.groups.offsets import Expiry
from tidelog.broker.groups.records import NO_TIMESTAMP, GroupValue

NEW_MEMBER_JOIN_TIMEOUT_MS = 300_000
"""Session time-out of a joining member that does not know its id yet and cannot send heartbeats; Kafka's value."""


class GroupState(Enum):
    """The states, with the names used by DescribeGroups."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


_PREVIOUS = {
    GroupState.EMPTY: {GroupState.PREPARING, GroupState.DEAD},  # from Dead: the deletion could not be persisted
    GroupState.PREPARING: {GroupState.EMPTY, GroupState.COMPLETING, GroupState.STABLE},
    GroupState.COMPLETING: {GroupState.PREPARING},
    GroupState.STABLE: {GroupState.COMPLETING},
    GroupState.DEAD: set(GroupState),
}


class _GroupTimer(Enum):
    JOIN = "join"
    SYNC = "sync"


class _Write(NamedTuple):
    """A pending record: the action once it is durable."""

    value: GroupValue
    assignments: dict[str, bytes] | None = None
    swapped: tuple[str, int, JoinResult] | None = None
    """A static member that rejoined a Stable group: its id, its waiter, its result."""


class ClassicGroup:
    """One group."""

    def __init__(self, group_id: str, limits: Limits, rng: random.Random) -> None:
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.generation = 0
        self.protocol_type = ""
        """Empty for a group that only has offsets."""
        self.protocol: str | None = None
        self.members = Members()
        self.durable: GroupValue | None = None
        """The latest durable record of this group; None if there is none."""
        self.counted_bytes = 0
        """What its members count for in `GroupStore.members_bytes`."""
        self.subscribed: frozenset[str] | None = frozenset()
        """Topics the members of a `consumer` group subscribe to; None if a subscription cannot be parsed."""
        self._limits = limits
        self._rng = rng
        self._state_since_ms = NO_TIMESTAMP
        self._timers: TimerTable[_GroupTimer | str] = TimerTable()
        """`_GroupTimer.JOIN`, `_GroupTimer.SYNC`, and sessions by member id."""
        self._initial_remaining_ms: int | None = None
        """Set in the first round of an Empty group: the time by which joins may still extend the delay."""
        self._extend_initial = False
        self._pending_sync: set[str] = set()
        self._effects: list[Effect] = []
        self._writes: dict[int, _Write] = {}
        self._last_ticket = 0

    @classmethod
    def load(cls, group_id: str, value: GroupValue, limits: Limits, rng: random.Random, now: Now) -> ClassicGroup:
        """Restore a group from its durable record; sessions restart."""
        group = cls(group_id, limits, rng)
        group.members = Members.load(value)
        group.state = GroupState.STABLE if value.members else GroupState.EMPTY
        group.generation = value.generation
        group.protocol_type = value.protocol_type
        group.protocol = value.protocol if value.members else None
        group.durable = value
        group._state_since_ms = value.state_since_ms
        group.subscribed = group._subscription()
        for member in group.members:
            group._watch(member, now)
        return group

    # --- driving the state machine -------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        """Return and clear the pending effects, in order."""
        effects, self._effects = self._effects, []
        return effects

    def next_deadline_ms(self) -> int | None:
        """The time of the next `tick` (monotonic clock), or None. May be early, never late."""
        return self._timers.next_ms()

    def tick(self, now: Now) -> None:
        """Handle all expired deadlines."""
        while (timer := self._timers.pop(now.mono_ms)) is not None:
            if timer is _GroupTimer.JOIN:
                self._join_time_is_up(now)
            elif timer is _GroupTimer.SYNC:
                self._sync_time_is_up(now)
            else:
                self._session_is_over(timer, now)

    def persisted(self, ticket: int, error: GroupError, now: Now) -> None:
        """Report that a `Persist` effect is durable (`NONE`) or has failed."""
        write = self._writes.pop(ticket)
        if error is GroupError.NONE:
            self.durable = write.value
        if write.assignments is not None:
            self._assignment_persisted(ticket, write, error, now)
        elif write.swapped is not None:
            self._swap_persisted(write.swapped, error, now)

    def shut(self, error: GroupError) -> None:
        """Become Dead because this broker no longer coordinates the group: complete all waiting requests."""
        for member in self.members:
            self._release(member, error)
        self._become_dead()

    def begin_delete(self) -> None:
        """Begin the deletion of an Empty group: requests fail with a retriable error from now on."""
        assert self.state is GroupState.EMPTY and not len(self.members)
        self._become_dead()

    def undo_delete(self) -> None:
        """Return to Empty because the deletion could not be persisted."""
        self._enter(GroupState.EMPTY)

    @property
    def is_blank(self) -> bool:
        """Whether the group can be dropped without loss: no members, no assigned ids, no record."""
        return (
            self.state is GroupState.EMPTY
            and self.durable is None
            and not len(self.members)
            and not self.members.pending
            and not self._writes
        )

    @property
    def is_deletable(self) -> bool:
        """Whether the group is Empty and no member is joining."""
        return self.state is GroupState.EMPTY and not self.members.pending and not self._writes

    # --- requests ------------------------------------------------------------------------------------------------

    def join(self, waiter: int, request: JoinRequest, now: Now) -> None:
        """JoinGroup. The result is a `Reply` to `waiter`, now or later."""
        error = self._join_error(request)
        if error is not GroupError.NONE:
            self._effects.append(Reply(waiter, JoinResult(error, request.identity.member_id)))
            if error is GroupError.GROUP_MAX_SIZE_REACHED:
                self._go_on_without(self._remove(request.identity.member_id), now)
            return
        if request.identity.member_id:
            self._join_known(waiter, request, now)
        else:
            self._join_unknown(waiter, request, now)

    def sync(self, waiter: int, request: SyncRequest) -> None:
        """SyncGroup. The result is a `Reply` to `waiter`, now or later."""
        error = self._sync_error(request)
        member = self.members.get(request.identity.member_id)
        if error is not GroupError.NONE or member is None:
            self._effects.append(Reply(waiter, SyncResult(error)))
            return
        self._synced(member.member_id)
        if self.state is GroupState.STABLE:
            self._effects.append(Reply(waiter, self._sync_result(member)))
            return
        if member.sync_waiter is not None:  # repeated on another connection; the first response is not read
            self._effects.append(Reply(member.sync_waiter, SyncResult(GroupError.REBALANCE_IN_PROGRESS)))
        member.sync_waiter = waiter
        if member.member_id == self.members.leader:
            assignments = {one.member_id: request.assignments.get(one.member_id, b"") for one in self.members}
            value = self._value(assignments)
            self._persist(_Write(value, assignments=assignments))

    def heartbeat(self, identity: MemberIdentity, generation: int, now: Now) -> GroupError:
        """Heartbeat: extends the session, and reports a rebalance to the member."""
        if self.state is GroupState.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        error = self._check(identity, generation)
        if error is not GroupError.NONE:
            return error
        self._touch(identity.member_id, now)
        return GroupError.REBALANCE_IN_PROGRESS if self.state is GroupState.PREPARING else GroupError.NONE

    def leave(self, identities: Sequence[MemberIdentity], now: Now) -> list[GroupError]:
        """LeaveGroup, returns an error per member; starts one rebalance for all of them."""
        errors = []
        gone = False
        for identity in identities:
            member_id = identity.member_id
            if self.state is GroupState.DEAD:
                error = GroupError.UNKNOWN_MEMBER_ID
            elif not member_id:  # an administrator removes a static member
                member_id = self.members.static_member_id(identity.instance_id) or ""
                error = GroupError.NONE if member_id else GroupError.UNKNOWN_MEMBER_ID
            elif member_id in self.members.pending:
                error = GroupError.NONE
            else:
                error = self.members.check(identity)
            if error is GroupError.NONE:
                gone = self._remove(member_id) or gone
            errors.append(error)
        if self.state is not GroupState.DEAD:
            self._go_on_without(gone, now)
        return errors

    def check_commit(self, identity: MemberIdentity, generation: int, now: Now) -> GroupError:
        """Check an offset commit; a valid commit by a member counts as a heartbeat."""
        if self.state is GroupState.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.state is GroupState.EMPTY:
            return GroupError.NONE  # an administrator, or a consumer that assigns its own partitions
        if generation < 0 and not identity.member_id and identity.instance_id is None:
            return GroupError.UNKNOWN_MEMBER_ID
        error = self._check(identity, generation)
        if error is not GroupError.NONE:
            return error
        if self.state is GroupState.COMPLETING:
            return GroupError.REBALANCE_IN_PROGRESS  # the member must sync first
        self._touch(identity.member_id, now)
        return GroupError.NONE

    def check_txn_commit(self, identity: MemberIdentity, generation: int) -> GroupError:
        """Check a transaction's offset commit (KIP-447). It is no heartbeat, and allowed while a rebalance completes.

        A producer of before TxnOffsetCommit v3 says nothing of its member: then nothing of it is checked.
        """
        if self.state is GroupState.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.state is GroupState.EMPTY:
            return GroupError.NONE
        if generation < 0 and not identity.member_id and identity.instance_id is None:
            return GroupError.NONE
        return self._check(identity, generation)

    def expiry(self) -> Expiry | None:
        """The expiry conditions of the group's offsets; None: no expiry in the current state (KIP-211)."""
        if not self.protocol_type:
            return Expiry(None)
        if self.state is GroupState.EMPTY:
            return Expiry(self._state_since_ms if self._state_since_ms >= 0 else None)
        if self.state is GroupState.STABLE and self.subscribed is not None and self.is_consumer:
            return Expiry(None, self.subscribed)
        return None

    def is_subscribed(self, topic: str) -> bool:
        """Whether members consume this topic; True if unknown."""
        return self.subscribed is None or topic in self.subscribed

    @property
    def is_consumer(self) -> bool:
        """Whether the metadata is a subscription of Kafka's consumer protocol."""
        return self.protocol_type == CONSUMER_PROTOCOL_TYPE

    # --- joining -------------------------------------------------------------------------------------------------

    def _join_error(self, request: JoinRequest) -> GroupError:
        if self.state is GroupState.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        member_id, instance_id = request.identity
        if self._is_full_for(member_id or self.members.static_member_id(instance_id)):
            return GroupError.GROUP_MAX_SIZE_REACHED
        if not self._supports(request):
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        if member_id in self.members.pending:  # the id was assigned to a dynamic member
            return GroupError.NONE if instance_id is None else GroupError.UNKNOWN_MEMBER_ID
        return self.members.check(request.identity) if member_id else GroupError.NONE

    def _is_full_for(self, member_id: str | None) -> bool:
        member = self.members.get(member_id) if member_id else None
        if self.state is GroupState.PREPARING:  # first come, first served: absent members have no reserved place
            joined = member is not None and member.join_waiter is not None
            return not joined and self.members.awaiting_join >= self._limits.max_size
        return member is None and len(self.members) >= self._limits.max_size

    def _supports(self, request: JoinRequest) -> bool:
        if not request.protocol_type or not request.protocols:
            return False
        if not len(self.members):
            return True
        return request.protocol_type == self.protocol_type and not self.members.common_protocols().isdisjoint(
            name for name, _ in request.protocols
        )

    def _join_unknown(self, waiter: int, request: JoinRequest, now: Now) -> None:
        instance_id = request.identity.instance_id
        member_id = generate_member_id(request.client_id if instance_id is None else instance_id, self._rng)
        current = self.members.static_member_id(instance_id)
        if current is not None:
            self._swap_static(waiter, current, member_id, request, now)
        elif instance_id is None and request.needs_member_id:
            self.members.assign_id(member_id)
            self._timers.set(member_id, now.mono_ms + request.session_timeout_ms)
            self._effects.append(Reply(waiter, JoinResult(GroupError.MEMBER_ID_REQUIRED, member_id)))
        else:
            self._add(waiter, member_id, request, now)

    def _join_known(self, waiter: int, request: JoinRequest, now: Now) -> None:
        member = self.members.get(request.identity.member_id)
        if member is None:
            self._add(waiter, request.identity.member_id, request, now)
            return
        nothing_new = member.protocols == request.protocols
        leads = member.member_id == self.members.leader
        answered = self.state is GroupState.COMPLETING or (self.state is GroupState.STABLE and not leads)
        if nothing_new and answered:  # the response was lost, or a redundant join: same generation
            self._effects.append(Reply(waiter, self._join_result(member)))
            return
        self._update(waiter, member, request)
        self._rebalance_or_complete(now)

    def _add(self, waiter: int, member_id: str, request: JoinRequest, now: Now) -> None:
        if not len(self.members):
            self.protocol_type = request.protocol_type
        member = Member(
            member_id,
            request.identity.instance_id,
            request.client_id,
            request.client_host,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            request.protocols,
            join_waiter=waiter,
            is_new=True,
        )
        self.members.add(member)
        self._extend_initial = self._initial_remaining_ms is not None
        self._timers.set(member_id, now.mono_ms + NEW_MEMBER_JOIN_TIMEOUT_MS)
        self._rebalance_or_complete(now)

    def _update(self, waiter: int, member: Member, request: JoinRequest) -> None:
        if member.join_waiter is not None:  # repeated on another connection; the first response is not read
            result = JoinResult(GroupError.REBALANCE_IN_PROGRESS, member.member_id)
            self._effects.append(Reply(member.join_waiter, result))
        member.protocols = request.protocols
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.client_id = request.client_id
        member.client_host = request.client_host
        member.join_waiter = waiter
        self.members.count(member)

    def _swap_static(self, waiter: int, old_id: str, new_id: str, request: JoinRequest, now: Now) -> None:
        """Replace a restarted static member: the new process takes its place, and the old process is fenced."""
        member = self.members.get(old_id)
        assert member is not None
        told_leader = self.members.leader
        self._release(member, GroupError.FENCED_INSTANCE_ID)
        self._timers.cancel(old_id)
        self.members.rename(member, new_id)
        member.is_new = False
        if old_id in self._pending_sync:
            self._pending_sync.remove(old_id)
            self._pending_sync.add(new_id)
        self._update(waiter, member, request)
        self._watch(member, now)
        if self.state is not GroupState.STABLE or self.protocol != self.members.select_protocol():
            self._rebalance_or_complete(now)
            return
        self.subscribed = self._subscription()
        result = self._join_result(member)
        if not request.can_skip_assignment:
            # An older client that is the leader would assign. It gets its previous id as leader, so that it acts as a
            # follower.
            result = result._replace(leader=told_leader or "", members=())
        else:
            result = result._replace(skip_assignment=bool(result.members))
        self._persist(_Write(self._value(None), swapped=(new_id, waiter, result)))

    def _swap_persisted(self, swapped: tuple[str, int, JoinResult], error: GroupError, now: Now) -> None:
        member_id, waiter, result = swapped
        member = self.members.get(member_id)
        if member is None or member.join_waiter != waiter:
            return  # completed since: removed, fenced by a third process, or included in a rebalance
        if error is not GroupError.NONE:
            result = JoinResult(error, "")
        elif self.state is not GroupState.STABLE or self.generation != result.generation:
            return  # a rebalance has begun, and the member counts as joined
        self._answer_join(member, result, now)

    # --- rounds --------------------------------------------------------------------------------------------------

    def _rebalance_or_complete(self, now: Now) -> None:
        if self.state is not GroupState.PREPARING:
            self._prepare_rebalance(now)
        else:
            self._maybe_complete_join(now)

    def _prepare_rebalance(self, now: Now) -> None:
        if self.state is GroupState.COMPLETING:
            self._answer_syncs(GroupError.REBALANCE_IN_PROGRESS, now)
        self._timers.cancel(_GroupTimer.SYNC)
        self._pending_sync.clear()
        first_round = self.state is GroupState.EMPTY
        self._enter(GroupState.PREPARING, now)
        if first_round:
            delay_ms = min(self._limits.initial_rebalance_delay_ms, self.members.rebalance_timeout_ms)
            self._initial_remaining_ms = self.members.rebalance_timeout_ms - delay_ms
            self._extend_initial = False
            self._timers.set(_GroupTimer.JOIN, now.mono_ms + delay_ms)
        else:
            self._timers.set(_GroupTimer.JOIN, now.mono_ms + self.members.rebalance_timeout_ms)
            self._maybe_complete_join(now)

    def _maybe_complete_join(self, now: Now) -> None:
        """Complete the round if all members have joined. A first round waits for its delay."""
        if self.state is not GroupState.PREPARING or self._initial_remaining_ms is not None or self.members.pending:
            return
        if self.members.awaiting_join == len(self.members):
            self._complete_join(now)

    def _join_time_is_up(self, now: Now) -> None:
        if self._initial_remaining_ms and self._extend_initial:
            delay_ms = min(self._limits.initial_rebalance_delay_ms, self._initial_remaining_ms)
            self._initial_remaining_ms -= delay_ms
            self._extend_initial = False
            self._timers.set(_GroupTimer.JOIN, now.mono_ms + delay_ms)
            return
        self._complete_join(now)

    def _complete_join(self, now: Now) -> None:
        """Complete the round: remove dynamic members that did not rejoin; the others form the next generation."""
        self._timers.cancel(_GroupTimer.JOIN)
        self._initial_remaining_ms = None
        for member in self.members:
            if member.join_waiter is None and member.instance_id is None:
                self._remove(member.member_id)
        if len(self.members) and not self.members.elect_joined_leader():
            # Only static members, and none has joined yet: wait for one, or for the end of their sessions.
            self._timers.set(_GroupTimer.JOIN, now.mono_ms + self.members.rebalance_timeout_ms)
            return
        self.generation += 1
        if not len(self.members):
            self.protocol = None
            self._enter(GroupState.EMPTY, now)
            self.subscribed = self._subscription()
            self._persist(_Write(self._value(None)))
            return
        self.protocol = self.members.select_protocol()
        self._enter(GroupState.COMPLETING, now)
        self.subscribed = self._subscription()
        self._timers.set(_GroupTimer.SYNC, now.mono_ms + self.members.rebalance_timeout_ms)
        for member in self.members:
            self._pending_sync.add(member.member_id)
            if member.join_waiter is not None:
                self._answer_join(member, self._join_result(member), now)

    def _sync_time_is_up(self, now: Now) -> None:
        silent = list(self._pending_sync)
        for member_id in silent:
            self._remove(member_id)
        self._go_on_without(bool(silent), now)

    def _session_is_over(self, member_id: str, now: Now) -> None:
        member = self.members.get(member_id)
        if member is not None:
            waiting = member.join_waiter is not None or member.sync_waiter is not None
            if waiting and not member.is_new:
                return  # its connection is busy with the waiting request; the session restarts when that completes
        elif member_id not in self.members.pending:
            return
        self._go_on_without(self._remove(member_id), now)

    def _go_on_without(self, member_gone: bool, now: Now) -> None:
        """Continue after removals. If only assigned ids were removed, other members are not affected."""
        if self.state is GroupState.PREPARING:
            self._maybe_complete_join(now)
        elif member_gone:
            self._prepare_rebalance(now)

    # --- syncing -------------------------------------------------------------------------------------------------

    def _sync_error(self, request: SyncRequest) -> GroupError:
        if self.state is GroupState.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        error = self._check(request.identity, request.generation)
        if error is not GroupError.NONE:
            return error
        if request.protocol_type is not None and request.protocol_type != self.protocol_type:
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        if request.protocol is not None and self.protocol is not None and request.protocol != self.protocol:
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        return GroupError.REBALANCE_IN_PROGRESS if self.state is GroupState.PREPARING else GroupError.NONE

    def _assignment_persisted(self, ticket: int, write: _Write, error: GroupError, now: Now) -> None:
        newest = all(later.assignments is None for later in self._writes.values())
        if self.state is not GroupState.COMPLETING or write.value.generation != self.generation or not newest:
            return  # a new round has begun meanwhile, and the waiting requests were completed
        assert write.assignments is not None
        if error is not GroupError.NONE:
            self._answer_syncs(error, now)
            self._prepare_rebalance(now)
            return
        for member in self.members:
            member.assignment = write.assignments[member.member_id]
            self.members.count(member)
        self._enter(GroupState.STABLE, now)
        self._answer_syncs(GroupError.NONE, now)

    def _answer_syncs(self, error: GroupError, now: Now) -> None:
        for member in self.members:
            if error is not GroupError.NONE:
                member.assignment = b""
                self.members.count(member)
            if member.sync_waiter is not None:
                result = self._sync_result(member) if error is GroupError.NONE else SyncResult(error)
                self._effects.append(Reply(member.sync_waiter, result))
                member.sync_waiter = None
                self._watch(member, now)

    def _synced(self, member_id: str) -> None:
        self._pending_sync.discard(member_id)
        if not self._pending_sync:
            self._timers.cancel(_GroupTimer.SYNC)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _enter(self, state: GroupState, now: Now | None = None) -> None:
        assert self.state in _PREVIOUS[state], f"group {self.group_id}: {self.state} → {state}"
        self.state = state
        if now is not None:
            self._state_since_ms = now.wall_ms

    def _become_dead(self) -> None:
        self._enter(GroupState.DEAD)
        self._timers = TimerTable()

    def _check(self, identity: MemberIdentity, generation: int) -> GroupError:
        error = self.members.check(identity)
        if error is GroupError.NONE and generation != self.generation:
            return GroupError.ILLEGAL_GENERATION
        return error

    def _touch(self, member_id: str, now: Now) -> None:
        member = self.members.get(member_id)
        if member is not None and not member.is_new:
            self._watch(member, now)

    def _watch(self, member: Member, now: Now) -> None:
        """Start or restart the session of a member."""
        self._timers.set(member.member_id, now.mono_ms + member.session_timeout_ms)

    def _remove(self, member_id: str) -> bool:
        """Remove a member or an assigned id. Returns whether it was a member."""
        member = self.members.remove(member_id)
        self._timers.cancel(member_id)
        self._pending_sync.discard(member_id)
        if member is None:
            return False
        self._release(member, GroupError.UNKNOWN_MEMBER_ID)
        return True

    def _release(self, member: Member, error: GroupError) -> None:
        """Complete a member's waiting requests with an error."""
        if member.join_waiter is not None:
            self._effects.append(Reply(member.join_waiter, JoinResult(error, member.member_id)))
            member.join_waiter = None
        if member.sync_waiter is not None:
            self._effects.append(Reply(member.sync_waiter, SyncResult(error)))
            member.sync_waiter = None

    def _answer_join(self, member: Member, result: JoinResult, now: Now) -> None:
        assert member.join_waiter is not None
        self._effects.append(Reply(member.join_waiter, result))
        member.join_waiter = None
        member.is_new = False
        self._watch(member, now)

    def _join_result(self, member: Member) -> JoinResult:
        members: tuple[JoinedMember, ...] = ()
        if member.member_id == self.members.leader:
            members = tuple(
                JoinedMember(one.member_id, one.instance_id, one.metadata(self.protocol)) for one in self.members
            )
        return JoinResult(
            GroupError.NONE,
            member.member_id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.members.leader or "",
            members,
        )

    def _sync_result(self, member: Member) -> SyncResult:
        return SyncResult(GroupError.NONE, self.protocol_type, self.protocol, member.assignment)

    def _subscription(self) -> frozenset[str] | None:
        if not self.is_consumer:
            return frozenset()
        return subscribed_topics([member.metadata(self.protocol) for member in self.members])

    def _value(self, assignments: dict[str, bytes] | None) -> GroupValue:
        return GroupValue(
            self.protocol_type,
            self.generation,
            self.protocol,
            self.members.leader,
            self._state_since_ms,
            self.members.values(self.protocol, assignments),
        )

    def _persist(self, write: _Write) -> None:
        self._last_ticket += 1
        self._writes[self._last_ticket] = write
        self._effects.append(Persist(self._last_ticket, write.value))
