"""`Master`: what a master knows of its followers; the confirm offset; the configuration that it wants. Sans-IO.

Confirm offset (hot-tier A16): the offset up to which every configuration that may be in force has its quorum, the
master's own durable end counted as its acknowledgement. It moves only once that covers the start record of the current
epoch: bytes of an older epoch are never confirmed by counting alone (the Raft paper, section 5.4.2, figure 8).

An acknowledged offset is a fact about the follower's disk, which lasts when its connection ends. A follower that comes
back says anew where it ends, and that replaces what was known.

Configuration (A12 to A15, B6): a member leaves when its connection ends, or when it has not caught up, since it
connected, for `ReplicationPolicy.max_behind_s`; a follower joins once it has caught up and holds the start of the
current epoch; the quorum follows the policy. A change takes two steps. First the wanted configuration is *prepared*:
bytes are confirmed only as it allows, too. Once its own quorum holds everything that may be confirmed already, the
controller is asked for it: before, its elections could miss a byte that the present one protects. That is the confirm
offset and, for a new master, all that it began with: an earlier one may have confirmed that. (Without the first
step a follower could not join a master of one under load: whatever it acknowledges, the master has confirmed more by
then.) Until the outcome of a request is known, both configurations count; what is only prepared may be given up at any
time.

Invariants: the confirm offset never decreases and never passes the master's durable end; the master is in every
configuration.

Times are monotonic seconds of the master's own clock. They decide who is asked to leave, not what is confirmed.

Entry: `Master`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.storage.replication.configuration import SetConfiguration, WalReplica, confirmable
from tidelog.storage.replication.policy import ReplicationPolicy


@dataclass(slots=True)
class FollowerState:
    """What the master knows of one follower."""

    replica: WalReplica
    learner: bool
    end_offset: int = -1
    """Up to where it has the master's bytes durably; -1: not known."""
    connected: bool = False
    caught_up_at: float = -math.inf
    """When it last had everything that the master had."""
    attached_at: float = -math.inf
    """When it connected last: a member is not asked to leave before it could catch up."""
    sent_end: int = -1
    """The end that it must acknowledge to have caught up at `sent_at`; -1: nothing is awaited."""
    sent_at: float = 0.0


class FollowerLag(NamedTuple):
    """How far a follower is behind its master."""

    gap_bytes: int
    """Bytes of the WAL that it is not known to have durably."""
    caught_up_s: float | None
    """Seconds since it had everything that the master had then; 0: now; None: never in this term."""


class Master:
    """The replication state of one master, for one epoch."""

    def __init__(
        self,
        replica: WalReplica,
        policy: ReplicationPolicy,
        configuration: SetConfiguration,
        *,
        epoch_confirmable_at: int,
        durable_offset: int,
        confirm_offset: int,
    ) -> None:
        """`epoch_confirmable_at`: WAL offset after the start record of the current epoch.

        `confirm_offset`: up to which the master's WAL proves confirmation; the bytes after it are its unconfirmed tail.
        """
        assert replica in configuration.members, (replica, configuration)
        assert confirm_offset <= epoch_confirmable_at
        self.replica = replica
        self.policy = policy
        self.leaving: frozenset[int] = frozenset()
        """Ids of brokers that shall leave: no configuration with them is asked for, if the policy allows that."""
        self.configuration = configuration.check()
        """The one that the controller has told last."""
        self.pending: SetConfiguration | None = None
        """The one that was asked for, while the outcome is not known."""
        self.prepared: SetConfiguration | None = None
        """The one that is wanted and was not asked for yet."""
        self.confirm_offset = confirm_offset
        """WAL offset (int64 bytes); nothing past it is visible or uploaded."""
        self._epoch_confirmable_at = epoch_confirmable_at
        self._durable = durable_offset
        self._end = durable_offset
        self._followers: dict[WalReplica, FollowerState] = {}
        self._advance()

    # --- events --------------------------------------------------------------------------------------------------

    def appended(self, end_offset: int) -> None:
        """Note the end of the WAL, which may not be durable yet."""
        self._end = max(self._end, end_offset)

    def durable(self, offset: int) -> None:
        """Note that the master's own WAL is durable up to `offset`."""
        self._durable = max(self._durable, offset)
        self._end = max(self._end, offset)
        self._advance()

    def attached(self, replica: WalReplica, end_offset: int, now: float, *, learner: bool = False) -> None:
        """A follower has matched its WAL with the master's and ends at `end_offset`, durably."""
        assert replica.broker_id != self.replica.broker_id
        assert end_offset <= self._end, f"{replica} ends at {end_offset}, the master at {self._end}"
        one = self._followers.setdefault(replica, FollowerState(replica, learner))
        for other in self._followers.values():
            if other.replica.broker_id == replica.broker_id:
                other.connected = False  # the broker's earlier copy of the WAL
        one.learner, one.connected, one.end_offset, one.sent_end = learner, True, end_offset, -1
        one.attached_at = now
        if end_offset >= self._end:
            one.caught_up_at = now
        self._advance()

    def sent(self, replica: WalReplica, now: float) -> None:
        """Everything up to the end of the WAL is on its way to a follower, or it has it already."""
        one = self._followers[replica]
        if one.end_offset >= self._end:
            one.caught_up_at = now
        elif one.sent_end < 0:
            one.sent_end, one.sent_at = self._end, now

    def acknowledged(self, replica: WalReplica, end_offset: int, now: float) -> None:
        """A follower has the WAL durably up to `end_offset`. An older acknowledgement changes nothing."""
        one = self._followers[replica]
        assert end_offset <= self._end, f"{replica} acknowledges {end_offset}, the master ends at {self._end}"
        if end_offset <= one.end_offset and end_offset < self._end:
            return
        one.end_offset = end_offset
        if end_offset >= self._end:
            one.caught_up_at, one.sent_end = now, -1
        elif 0 <= one.sent_end <= end_offset:
            one.caught_up_at, one.sent_end = max(one.caught_up_at, one.sent_at), -1
        self._advance()

    def detached(self, replica: WalReplica) -> None:
        """A follower's connection has ended."""
        self._followers[replica].connected = False

    def told(self, configuration: SetConfiguration) -> None:
        """The controller's configuration is this one. An older one than the known one is ignored."""
        if configuration.number < self.configuration.number:
            return
        assert self.replica in configuration.members
        if configuration.number > self.configuration.number:
            self.pending = self.prepared = (
                None  # whatever was asked for names the number before, and can take effect no more
            )
        self.configuration = configuration.check()
        self._advance()

    def refused(self) -> None:
        """The controller has refused what was asked for, for good."""
        self.pending = None
        self._advance()

    # --- decisions -----------------------------------------------------------------------------------------------

    def change(self, now: float) -> SetConfiguration | None:
        """Return the configuration to ask the controller for, or None; from now on it counts, too.

        While an outcome is awaited it is that request again: asked twice, it takes effect once.
        """
        if self.pending is not None:
            return self.pending
        wanted = self._wanted(now)
        self.prepared = None if wanted.same_terms(self.configuration) else wanted
        if self.prepared is not None and wanted.held_by_quorum(self.held()) >= self._may_be_confirmed:
            self.pending, self.prepared = wanted, None
        self._advance()
        return self.pending

    def in_sync(self, now: float) -> frozenset[WalReplica]:
        """Return the members of the SyncStateSet that are in sync (`policy`), the master included."""
        members = self.configuration.members
        near = (one.replica for one in self._followers.values() if one.replica in members and self._is_near(one, now))
        return frozenset([self.replica, *near])

    def refusal(self, now: float) -> str:
        """Return why nothing may be appended now (RIP-34; Kafka: NOT_ENOUGH_REPLICAS), or an empty string."""
        policy, members = self.policy, self.configuration.members
        if policy.all_ack_in_sync_state_set:
            if len(members) >= policy.min_in_sync_replicas:
                return ""
            return (
                f"the sync-state set has {len(members)} members; min_in_sync_replicas is {policy.min_in_sync_replicas}"
            )
        count = len(self.in_sync(now))
        needed = policy.quorum(count, len(members))
        return "" if count >= needed else f"{count} replicas are in sync, and {needed} must be"

    @property
    def is_degraded(self) -> bool:
        """Return whether fewer members confirm than the policy asks for."""
        policy = self.policy
        normal = policy.total_replicas if policy.all_ack_in_sync_state_set else policy.in_sync_replicas
        return self.configuration.quorum < normal

    def needed(self, now: float) -> int:
        """Return how many members must be in sync for a write to be taken, as the policy has it now (`refusal`)."""
        policy, size = self.policy, len(self.configuration.members)
        if policy.all_ack_in_sync_state_set:
            return policy.min_in_sync_replicas
        return policy.quorum(len(self.in_sync(now)), size)

    def lag(self, one: FollowerState, now: float) -> FollowerLag:
        """Return how far behind a follower is."""
        behind = max(0, self._end - max(0, one.end_offset))
        age_s = now - one.caught_up_at if one.caught_up_at > -math.inf else None
        if behind == 0 and one.connected:
            age_s = 0.0
        return FollowerLag(behind, age_s)

    def held(self) -> dict[WalReplica, int]:
        """Return the WAL offset up to which each replica has this WAL durably, as far as it is known; no learners."""
        held = {one.replica: one.end_offset for one in self._followers.values() if not one.learner}
        held[self.replica] = self._durable
        return held

    def followers(self) -> list[FollowerState]:
        """Return what is known of each follower, by id, for operators."""
        return sorted(self._followers.values(), key=lambda one: one.replica)

    def brokers(self) -> list[FollowerState]:
        """Return the same, for each broker the copy of the WAL with which it has connected last."""
        newest: dict[int, FollowerState] = {}
        for one in sorted(self._followers.values(), key=lambda one: one.attached_at):
            newest[one.replica.broker_id] = one
        return [newest[each] for each in sorted(newest)]

    @property
    def _may_be_confirmed(self) -> int:
        """Return the end of what this master has confirmed, or an earlier one may have: it began with all of that."""
        return max(self.confirm_offset, self._epoch_confirmable_at)

    # --- inside --------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        in_force = (self.configuration, self.pending, self.prepared)
        counted = [configuration for configuration in in_force if configuration is not None]
        offset = min(confirmable(counted, self.held()), self._durable)
        if offset >= self._epoch_confirmable_at and offset > self.confirm_offset:
            self.confirm_offset = offset

    def _wanted(self, now: float) -> SetConfiguration:
        present = self.configuration
        connected = [
            one
            for one in self._followers.values()
            if one.connected and not one.learner and one.replica.broker_id not in self.leaving
        ]
        patience_s = self.policy.max_behind_s
        stay = {one.replica for one in connected if now - max(one.caught_up_at, one.attached_at) <= patience_s}
        join = {one.replica for one in connected if self._has_caught_up(one, now)}
        members = frozenset({self.replica} | (present.members & stay) | join)
        near = sum(one.replica in members and self._is_near(one, now) for one in connected)
        quorum = self.policy.quorum(1 + near, len(members))
        if len(members) < quorum:
            # The quorum stays what the policy asks for. Those who are away stay members, unless they have come back
            # with another WAL: nothing is confirmed without enough of them, and each may be elected as now.
            back = {one.broker_id for one in members}
            members |= {one for one in present.members if one.broker_id not in back}
            quorum = min(quorum, len(members))
        return SetConfiguration(present.number, members, quorum).check()

    def _has_caught_up(self, one: FollowerState, now: float) -> bool:
        """Return whether a follower may join: it had all that the master had, a moment ago, and the epoch's start."""
        return one.end_offset >= self._epoch_confirmable_at and now - one.caught_up_at <= self.policy.slave_timeout_s

    def _is_near(self, one: FollowerState, now: float) -> bool:
        """Return whether a follower is in sync, as `policy` defines it."""
        if not one.connected or one.learner:
            return False
        behind = self._end - one.end_offset
        return behind < self.policy.max_gap_bytes or now - one.caught_up_at <= self.policy.slave_timeout_s
