"""`HotSet`: one replicated WAL of a broker: its disk, its replica, what the replica is to do, and its storages.

Open it (the WAL is read, and its records are kept warm), begin it under the broker's registration, close it. What it
does in between follows from the metadata (`ReplicaDuty`).

A replica set begins with one member, its broker. While that is so, the records are on one disk alone: then the WAL is
judged at the start by what the controllers know of it, and they are told when something is at stake, as for a WAL that
is not replicated (`tidelog.broker.wal_keeper`). From the second member on promises take that part (rule 13).

Entry: `HotSet.open`, then `begin`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidelog.broker.base import BrokerBase
from tidelog.broker.hot_storage import HotStorage
from tidelog.broker.inputs import OpenedReplicaWal
from tidelog.broker.membership import BrokerMembership
from tidelog.broker.partitions.read_replicas import FollowedReplicas
from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.replication.authority import ControllerAuthority
from tidelog.broker.replication.door import ReplicationDoor
from tidelog.broker.replication.duty import ReplicaDuty, ReplicaRole
from tidelog.broker.replication.inputs import ReplicaEvents, ReplicaIdentity, ReplicationLimits, ReplicationWorld
from tidelog.broker.replication.replica import HotReplica, ReplicaParts
from tidelog.broker.replication.warm import WarmTail
from tidelog.broker.wal_files import missing_wal_files
from tidelog.broker.wal_keeper import WalKeeper, meet_known_wal
from tidelog.controller.model.errors import ConfigsChanged
from tidelog.controller.model.replication import PolicyRecord, has_several
from tidelog.controller.model.wal_notes import WalLost, gave_up
from tidelog.runtime.errors import Fenced, StorageFailed, TidelogError
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.inputs import HandedWal
from tidelog.storage.replication.configuration import WalReplica
from tidelog.storage.replication.following import Diverged
from tidelog.storage.replication.pace import CatchUpPace
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import ReplicatedWal
from tidelog.storage.wal.disk.identity import read_wal_id, renew_wal_id

logger = logging.getLogger(__name__)

NOT_FOLLOWING_S = 5.0
"""A replica that has not followed its master for so long is a problem for the operator."""

MakeStorage = Callable[[int, ReplicatedWal, HandedWal], Storage]
"""`(replica set id, WAL, handed)`: makes the storage of a term."""


@dataclass(frozen=True, slots=True)
class HotShared:
    """What the replicas of one broker share."""

    base: BrokerBase
    door: ReplicationDoor
    world: ReplicationWorld
    limits: ReplicationLimits
    storages: MasterStorages
    make_storage: MakeStorage
    log_cache_bytes: int
    """Bound of one replica's log cache."""
    pace: CatchUpPace
    """For followers that catch up."""
    followed: FollowedReplicas
    """Those that consumers may read from."""


def _nothing() -> None:
    """Nobody replaces rejected WALs yet."""


class HotSet:
    """See the module. Used on the event loop's thread."""

    def __init__(self, shared: HotShared, replica_set_id: int, opened: OpenedReplicaWal, wal_id: str) -> None:
        """`HotSet.open` makes one."""
        base = shared.base
        self._shared = shared
        self._disk = opened.disk
        self._wal_id = wal_id
        self.replica_set_id = replica_set_id
        self.wal = opened.wal
        self._tail = WarmTail(LogCache(shared.log_cache_bytes), base.controller.committed_wal_offset(replica_set_id))
        self._replica: HotReplica | None = None
        self._hot: HotStorage | None = None
        self.duty: ReplicaDuty | None = None
        """None before `begin`."""
        self._keeper: WalKeeper | None = None
        """Of the present term, while the set has one member."""
        self._failure = ""
        self.is_rejected = False
        """Whether the controllers have refused its promise: its WAL is an older copy, and it does nothing any more."""
        self.on_rejected: Callable[[], None] = _nothing
        """Called when that becomes known."""

    @classmethod
    async def open(cls, shared: HotShared, opened: OpenedReplicaWal, replica_set_id: int) -> HotSet:
        """Read the WAL on a disk. Raises `CorruptData`, `DamagedFile`, `ForeignWal`, `StorageFailed`."""
        try:
            wal_id = await read_wal_id(opened.disk, shared.base.world.rng, replica_set_id)
            found = cls(shared, replica_set_id, opened, wal_id)
            await found.wal.recover(found._tail.add)
        except OSError as error:
            await opened.disk.close()
            raise StorageFailed(f"the WAL of replica set {replica_set_id} cannot be opened: {error}") from error
        except TidelogError:
            await opened.wal.close()
            await opened.disk.close()
            raise
        return found

    # --- start ---------------------------------------------------------------------------------------------------

    async def begin_alone(self, membership: BrokerMembership) -> None:
        """Have the broker elected master of its own replica set, of which it is the only member; before `begin`.

        Raises `WalLost`, `WalFailed`, and the errors of the controllers.
        """
        base = self._shared.base
        if base.image().replication.get(self.replica_set_id) is None:
            await self._set_first_policy()
        epoch = await membership.elect()
        await meet_known_wal(base.broker_id, base.wal, base.controller, self.wal, epoch, start_over=self._start_over)
        committed = base.controller.committed_wal_offset(self.replica_set_id)
        if self.wal.end_offset < committed:
            await self._start_over(f".behind-{epoch}")

    async def _set_first_policy(self) -> None:
        """Set the policy that this broker is configured with, unless an operator has set one meanwhile."""
        policy = self._shared.base.settings.replication.policy()
        policy.checked()
        try:
            await self._shared.base.controller.replica_sets.set_policy(self.replica_set_id, policy, base=PolicyRecord())
        except ConfigsChanged as error:
            extra = {"replica_set": self.replica_set_id, "error": str(error)}
            logger.info("the configured replication policy is not set", extra=extra)

    async def _start_over(self, kept_as: str) -> None:
        """Begin another WAL at the committed WAL offset, with another id."""
        base = self._shared.base
        committed = base.controller.committed_wal_offset(self.replica_set_id)
        logger.warning(
            "the WAL begins anew at the committed WAL offset",
            extra={"replica_set": self.replica_set_id, "wal_end": self.wal.end_offset, "committed": committed},
        )
        await self.wal.reset(committed, kept_as)
        self._wal_id = await renew_wal_id(self._disk, base.world.rng, self.replica_set_id)
        self._tail = WarmTail(LogCache(self._shared.log_cache_bytes), committed)

    def has_given_up(self) -> bool:
        """Return whether the WAL may have records that were given up: no other replica has them."""
        wal, kv = self.wal, self._shared.base.image().kv
        if wal.end_offset == wal.start_offset:
            return False
        return gave_up(kv, self.replica_set_id, last_epoch=wal.epoch_history.last_epoch, end_offset=wal.end_offset)

    def begin(self, registration_epoch: int) -> None:
        """Join the replica set, and do what the metadata say from now on, under this registration of the broker."""
        shared, base = self._shared, self._shared.base
        row = base.image().replication.get(self.replica_set_id)
        identity = ReplicaIdentity(
            self.replica_set_id,
            WalReplica(base.broker_id, self._wal_id),
            registration_epoch,
            learner=row is not None and base.broker_id in row.learning,
        )
        replica = self._replica = HotReplica(
            self.wal,
            self._tail,
            ReplicaParts(
                identity,
                (row.policy if row is not None else base.settings.replication.policy()).checked(),
                ControllerAuthority(base.controller, identity),
                shared.door,
                shared.world,
                ReplicaEvents(
                    wal_failed=self._wal_failed,
                    readable=partial(shared.followed.confirmed, self.replica_set_id),
                    following=shared.followed.changed,
                    has_given_up=self.has_given_up,
                ),
                shared.limits,
                shared.pace,
            ),
        )
        shared.followed.add(self.replica_set_id, replica)
        self._hot = HotStorage(replica, self._make_storage, shared.storages, self._failed, self._term_begun)
        priority = base.settings.replication.election_priority
        self.duty = ReplicaDuty(
            replica, identity, base.controller, base.world.rng, self._hot.events(), priority=priority
        )
        self.duty.start()

    def _make_storage(self, handed: HandedWal) -> Storage:
        return self._shared.make_storage(self.replica_set_id, self.wal, handed)

    # --- events --------------------------------------------------------------------------------------------------

    async def _term_begun(self, storage: Storage) -> None:
        """Before a storage serves: tell the controllers that its WAL has what no other has, while that is so."""
        await self._end_notes(report=False)
        if self._is_alone():
            keeper = self._make_keeper(storage)
            await keeper.begin(storage.master_epoch)
            self._keeper = keeper
            self.look()

    def _make_keeper(self, storage: Storage) -> WalKeeper:
        base = self._shared.base
        return WalKeeper(self.replica_set_id, base.wal, base.controller, self.wal, storage, base.world.clock)

    async def _end_notes(self, *, report: bool) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close(report=report)

    def _is_alone(self) -> bool:
        record = self._shared.base.image().replica_sets.get(self.replica_set_id)
        return record is not None and not has_several(record)

    def look(self) -> None:
        """The metadata have changed."""
        if not self._is_alone():
            if self._keeper is not None:
                self._keeper.stand_down()
            return
        storage = self._hot.storage if self._hot is not None else None
        if storage is None:
            return
        if self._keeper is None:  # the others have left in this term
            self._keeper = self._make_keeper(storage)
            self._keeper.begin_within(storage.master_epoch)
        elif self._keeper.storage is storage:
            self._keeper.stand_up()

    def _wal_failed(self, error: Exception) -> None:
        if self._hot is not None:
            self._hot.wal_failed(error)
        self._shared.base.failure.fail(error)

    def _failed(self, error: BaseException) -> None:
        """The replica has stopped for good. The broker goes on with the others, unless it is the master of this one."""
        self._failure = str(error)
        self.is_rejected = isinstance(error, WalLost)
        record = self._shared.base.image().replica_sets.get(self.replica_set_id)
        leads = record is None or record.master == self._shared.base.broker_id
        if leads or isinstance(error, Fenced) or not isinstance(error, TidelogError):
            self._shared.base.failure.fail(error)
        else:
            logger.error("a replica has stopped", extra={"set": self.replica_set_id, "error": str(error)})
            if self.is_rejected:
                self.on_rejected()

    # --- reports -------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Return whether it serves, follows, or cannot."""
        if self.duty is None or self._hot is None:
            return False
        role = self.duty.role
        if role is ReplicaRole.LEADING:
            return self._hot.storage is not None
        return role in (ReplicaRole.FOLLOWING, ReplicaRole.REMOVED, ReplicaRole.FAILED)

    @property
    def is_removed(self) -> bool:
        """Return whether it was removed from its set, and has stopped: one that is wanted again begins anew."""
        return self.duty is not None and self.duty.role is ReplicaRole.REMOVED

    @property
    def leads(self) -> bool:
        """Return whether it is the master, as far as it knows."""
        return self.duty is not None and self.duty.role is ReplicaRole.LEADING

    @property
    def is_known(self) -> bool:
        """Return whether the loss of this WAL would be noticed, or nothing would be lost with it."""
        return self._keeper is None or self._keeper.is_known

    @property
    def lost_master(self) -> int | None:
        """Return the broker that it follows, if it has lost the connection to it."""
        follower = self._replica.follower if self._replica is not None else None
        if follower is None or follower.lost_at is None or follower.target is None:
            return None
        return follower.target.broker_id

    async def settle(self) -> None:
        """As `WalKeeper.settle`, if the set has one member."""
        if self._keeper is not None:
            await self._keeper.settle()

    def problems(self) -> list[str]:
        """Return what is wrong with the replica, one sentence each."""
        missing = missing_wal_files(self.replica_set_id, self._shared.base.broker_id, self.wal.missing_files)
        return [*missing, *self._role_problems()]

    def _role_problems(self) -> list[str]:
        if why := self._stopped():  # the duty has noted the same
            return [f"the replica of replica set {self.replica_set_id} has stopped: {why}"]
        found = self.duty.problems() if self.duty is not None else []
        if not found and (why := self._not_following(NOT_FOLLOWING_S)):
            found.append(f"the replica of replica set {self.replica_set_id} does not follow its master: {why}")
        return found

    def master_status(self) -> dict[str, Any] | None:
        """Return what the master of the set knows, as JSON (`ReplicaMaster.status`); None unless it leads."""
        master = self._hot.master if self._hot is not None else None
        return master.status() if master is not None else None

    def report(self) -> dict[str, Any]:
        """Return the replica as JSON."""
        duty, wal = self.duty, self.wal
        return {
            "replica_set": self.replica_set_id,
            "role": duty.role.value if duty is not None else "opening",
            "wal_id": self._wal_id,
            "start_offset": wal.start_offset,
            "end_offset": wal.end_offset,
            "durable_offset": wal.durable_offset,
            "confirm_offset": wal.confirm_offset,
            "promised_epoch": wal.promised_epoch,
            "problem": self._stopped() or self._not_done() or self._not_following() or None,
            "master": self.master_status(),
        }

    def _stopped(self) -> str:
        """Return what has stopped the replica: for good, or until there is a master of a newer epoch; else empty."""
        follower = self._replica.follower if self._replica is not None else None
        if not self._failure and follower is not None and isinstance(follower.stopped, Diverged):
            return f"its WAL and its master's contradict each other: {follower.stopped}"
        return self._failure

    def _not_done(self) -> str:
        return "" if self.duty is None else self.duty.problem or self.duty.stuck()

    def _not_following(self, for_s: float = 0.0) -> str:
        """Return why it has not received from its master for so long, though it is to follow it; empty if it does."""
        follower = self._replica.follower if self._replica is not None else None
        if follower is None or self._stopped():
            return ""
        now = self._shared.base.world.clock.monotonic()
        if follower.disk_since is not None and now - follower.disk_since >= NOT_FOLLOWING_S:
            return "its disk hangs"
        is_long = follower.failing_since is not None and now - follower.failing_since >= for_s
        return follower.problem if is_long else ""

    # --- end -----------------------------------------------------------------------------------------------------

    async def close(self, *, upload: bool) -> None:
        """End. With `upload`, first upload everything confirmed, while it leads. May be called again."""
        self._shared.followed.remove(self.replica_set_id)
        if self._hot is not None:
            await self._hot.close(upload=upload)
        await self._end_notes(report=upload)
        if self.duty is not None:
            await self.duty.close()
        await self.wal.close()
        await self._disk.close()
