"""`HotReplica`: a broker's replica of one set. It promises, follows, or leads; it does one of these at a time.

The controllers decide who does what, and in which epoch; what they have decided is told here, in whatever order it
arrives, and what is older than the WAL's promise changes nothing.

Promotion (`lead`) takes over what the replica has received, its unconfirmed tail included: stop following → promise the
epoch → begin it, which is durable before anything follows → serve followers. The records that are not in the bucket
are in memory already, unless the warm tail says otherwise (`tidelog.broker.replication.warm`).

Invariants: changes of the role run in turn; a role ends before the next one begins; the WAL is promised a newer epoch
only after nothing is received and nothing appended for an older one.

Entry: `HotReplica`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tidelog.broker.replication.disk_watch import DiskWatch
from tidelog.broker.replication.door import ReplicationDoor
from tidelog.broker.replication.follower import ReplicaFollower
from tidelog.broker.replication.inputs import (
    MasterTarget,
    ReplicaEvents,
    ReplicaIdentity,
    ReplicationLimits,
    ReplicationWorld,
    SetAuthority,
)
from tidelog.broker.replication.master import MasterSetup, ReplicaMaster
from tidelog.broker.replication.warm import WarmTail
from tidelog.controller.model.records import NO_BROKER
from tidelog.runtime.errors import Closed, CorruptData, Fenced, InvalidInput, TidelogError
from tidelog.storage.replication.configuration import SetConfiguration
from tidelog.storage.replication.pace import CatchUpPace
from tidelog.storage.replication.policy import ReplicationPolicy
from tidelog.storage.wal.base import ReplicatedWal, WalFailed

logger = logging.getLogger(__name__)

END_POLL_S = 0.005
"""A hand-over waits for the end of the old master's term, which is milliseconds away."""


class ReplicaPosition(NamedTuple):
    """What a promise tells of a replica."""

    last_epoch: int
    """Epoch of its last byte (int32); -1: its WAL is empty."""
    end_offset: int
    """The end of its WAL (int64 bytes), durable."""
    confirm_offset: int
    """Up to where it knows its bytes to be confirmed (int64)."""


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """What a replica is made of."""

    identity: ReplicaIdentity
    policy: ReplicationPolicy
    """The first one; see `HotReplica.use_policy`."""
    authority: SetAuthority
    door: ReplicationDoor
    world: ReplicationWorld
    events: ReplicaEvents
    limits: ReplicationLimits
    pace: CatchUpPace = field(default_factory=CatchUpPace)
    """As `MasterSetup.pace`."""


class HotReplica:
    """The replica of a WAL that was recovered, its records added to `tail`. The WAL is the caller's: close it after."""

    def __init__(self, wal: ReplicatedWal, tail: WarmTail, parts: ReplicaParts) -> None:
        self.wal = wal
        self.tail = tail
        self._parts = parts
        self.policy = parts.policy
        self.leaving: frozenset[int] = frozenset()
        """See `let_go`."""
        self._turn = asyncio.Lock()
        self._closed = False
        self.follower: ReplicaFollower | None = None
        """While it follows."""
        self.master: ReplicaMaster | None = None
        """While it leads."""
        wal.set_on_failed(self._on_failed)

    def _on_failed(self, error: Exception) -> None:
        failure = error if isinstance(error, WalFailed) else WalFailed(str(error))
        if self.master is not None:
            self.master.fail(failure)
        if self.follower is not None:
            self.follower.fail(failure)
        self._parts.events.wal_failed(error)

    @property
    def is_following(self) -> bool:
        """Return whether it follows a master, with which it is connected, and its WAL is a prefix of that one's."""
        return self.follower is not None and self.follower.is_following

    def note_committed(self, offset: int) -> None:
        """Everything before this WAL offset (int64 bytes) is in committed objects, as the metadata here says."""
        if self.master is not None:
            self.master.note_committed(offset)
        if self.follower is not None:
            self.follower.note_committed(offset)
        else:
            self.tail.committed_offset = max(self.tail.committed_offset, offset)

    def use_policy(self, policy: ReplicationPolicy) -> None:
        """Lead by this policy, whether the replica leads already or later."""
        self.policy = policy
        if self.master is not None:
            self.master.use_policy(policy)

    def let_go(self, brokers: frozenset[int]) -> None:
        """Lead without these brokers, whether the replica leads already or later."""
        self.leaving = brokers
        if self.master is not None:
            self.master.let_go(brokers)

    async def use_identity(self, identity: ReplicaIdentity) -> None:
        """Be a learner, or none, from the next role on; the present one ends. The WAL and the registration stay."""
        async with self._turn:
            self._check_open()
            assert identity.replica == self._parts.identity.replica, "another WAL is another replica"
            self._parts = replace(self._parts, identity=identity)
            await self._end_role()

    async def promise(self, epoch: int) -> ReplicaPosition:
        """Take nothing from a master of an older epoch any more, durably; return where the WAL ends then.

        Raises `Fenced` if a larger epoch was promised, `WalFull` (call again), `WalFailed`.
        """
        async with self._turn:
            self._check_open()
            if epoch < self.wal.promised_epoch:
                raise Fenced(f"epoch {epoch} is older than {self.wal.promised_epoch}, which the WAL has promised")
            if self.master is None or self.master.epoch < epoch:
                await self._end_role()
            wal = self.wal
            await wal.promise(epoch)
            return ReplicaPosition(wal.epoch_history.epoch_at(wal.end_offset - 1), wal.end_offset, wal.confirm_offset)

    async def follow_to_the_end(self, limit_s: float) -> None:
        """Return when the connection to the master that it follows has ended, at the latest after `limit_s`."""
        clock = self._parts.world.clock
        deadline = clock.monotonic() + limit_s
        while self.is_following and clock.monotonic() < deadline:
            await clock.sleep(END_POLL_S)

    async def follow(self, target: MasterTarget) -> bool:
        """Follow this master; return False, and change nothing, for one of an older epoch."""
        async with self._turn:
            self._check_open()
            if target.epoch < self.wal.promised_epoch or (self.master and self.master.epoch >= target.epoch):
                return False
            if self.follower is None:
                await self._end_role()
                parts = self._parts
                self.follower = ReplicaFollower(
                    self.wal, parts.identity, self.tail, world=parts.world, limits=parts.limits, events=parts.events
                )
                self.follower.start()
            return self.follower.follow(target)

    async def lead(self, epoch: int, configuration: SetConfiguration) -> ReplicaMaster:
        """Be the master of this epoch, to which the replica was elected; return when followers are served.

        The records that are not in the bucket are in `tail.records` then. Called again for the same epoch it returns
        the same master. Raises `Fenced` if a larger epoch was promised or begun, `WalFull` (call again), `WalFailed`,
        `InvalidInput` if it is no member of the configuration, `CorruptData` if the WAL ends before what it knows to be
        confirmed: the election was wrong.
        """
        async with self._turn:
            self._check_open()
            if self.master is not None and self.master.epoch == epoch:
                return self.master
            wal, parts = self.wal, self._parts
            if epoch < wal.promised_epoch:
                raise Fenced(f"epoch {epoch} is older than {wal.promised_epoch}, which the WAL has promised")
            if parts.identity.replica not in configuration.members:
                raise InvalidInput(f"{parts.identity.replica} is to lead, and is not among {configuration.members}")
            await self._end_role()
            await wal.promise(epoch)
            if wal.confirm_offset > wal.end_offset:
                raise CorruptData(
                    f"this replica ends at {wal.end_offset}; it knows that {wal.confirm_offset} is confirmed",
                    hint="it must not lead: keep the directories of all members of the replica set",
                )
            if wal.end_offset < self.tail.committed_offset:
                await self._begin_at_committed(epoch)
            await self.tail.complete(wal)
            if wal.master_epoch != epoch:  # it is, if an earlier call was cancelled
                await wal.begin_epoch(epoch)
            setup = MasterSetup(
                parts.identity, self.policy, parts.authority, parts.world, parts.events, parts.limits, parts.pace
            )
            self.master = ReplicaMaster(wal, setup, configuration, self.tail.committed_offset)
            self.master.let_go(self.leaving)
            self.master.start()
            parts.door.open(parts.identity.replica_set_id, self.master)
            extra = {"set": parts.identity.replica_set_id, "epoch": epoch, "end": wal.end_offset}
            logger.info("this replica leads", extra=extra)
            return self.master

    async def resign_if_stuck(self, epoch: int, is_due: Callable[[], bool], tell: Callable[[str], None]) -> None:
        """Let another replica lead if this one does not begin the term that it was elected for; return then.

        Nobody else would: its broker lives. Its disk hangs, or has become full. `tell` gets that, for operators.
        Returns, too, when it leads, or is to lead no more (`is_due`).
        """
        limits, clock = self._parts.limits, self._parts.world.clock
        watch = DiskWatch(limits.hung_disk_s, limits.tick_s)
        reason = f"broker {self._parts.identity.replica.broker_id} does not begin its term: its disk hangs, or is full"
        while is_due() and (self.master is None or self.master.epoch < epoch):
            await clock.sleep(limits.tick_s)
            done = self.wal.durable_offset + self.tail.end_offset  # what was written, or read, of the WAL
            if not watch.look(done, sys.maxsize) or not is_due():
                continue
            logger.error("this replica was elected and cannot lead: another one is to", extra={"epoch": epoch})
            tell(reason)
            try:
                await self._parts.authority.resign(NO_BROKER, reason, master_epoch=epoch)
            except Fenced:
                return  # another epoch has begun, or nobody else is there
            except TidelogError as error:
                logger.warning("no election in place of a master that cannot lead", extra={"error": str(error)})
                continue
            return

    async def _begin_at_committed(self, epoch: int) -> None:
        """Let the WAL go on behind what is in the bucket: it has less than that, and nothing past that was confirmed.

        A follower's WAL that was begun anew behind trimmed records, and has received none, is found empty by a start.
        """
        wal, offset = self.wal, self.tail.committed_offset
        places = {"set": self._parts.identity.replica_set_id, "end": wal.end_offset, "committed": offset}
        logger.warning("the WAL of the new master ends before the committed WAL offset; it begins there", extra=places)
        await wal.restart_at(offset, master_epoch=epoch, kept_as=f".behind-{epoch}")
        self.tail.reconcile(wal)

    def hand_over(self) -> WarmTail:
        """Give the records that the WAL holds beyond the bucket to the storage of the term that has begun, once.

        The replica has an empty tail from now on, which begins anew when it follows.
        """
        assert self.master is not None, "only a master's records are handed over"
        tail, self.tail = self.tail, self.tail.successor()
        return tail

    async def close(self) -> None:
        """End the role; the replica does nothing any more."""
        async with self._turn:
            self._closed = True
            await self._end_role()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the replica is closed")

    async def _end_role(self) -> None:
        follower, self.follower = self.follower, None
        if follower is not None:
            await follower.stop()
        master, self.master = self.master, None
        if master is not None:
            self._parts.door.shut(self._parts.identity.replica_set_id, master)
            await master.close()
