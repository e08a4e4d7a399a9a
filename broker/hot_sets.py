"""`HotSets`: the replicated WALs of a broker, kept as the metadata say who has a replica of which set.

A broker keeps a replica of each set that it is assigned to (`ReplicationRecord.assigned`), and one of its own set if
that is to have several members. It opens a replica when it is assigned to another set, and deletes one when it is
neither assigned nor a member any more: whoever removed it has others that are in sync. One that may have records that
were given up is set aside instead: nobody else has them. Files that it finds at its start, of a set that the metadata
do not know, or that has no master, are kept, and are a problem: the metadata may be the ones that are wrong.

A replica whose promise the controllers have refused (`WalLost`) has an older copy of its WAL: its disk was rolled back.
It does nothing until its set has a living master, which then has everything that was confirmed without it. Then its
files are set aside, and it begins anew as another replica, with an empty WAL and another id, which the master fills.
Nothing that counted for the old WAL counts for the new one.

Invariants: at most one replica of a set is open; the files of a replica are deleted, or set aside, only after the
metadata have said that it is not wanted, and it was closed, and only while they have this process's registration: what
they say after another process of this broker has registered is of that one's files; a set that cannot be opened is a
problem, and does not stop the others.

Entry: `HotSets.prepare` (before the broker registers), then `begin`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tidelog.broker.base import BrokerBase
from tidelog.broker.hot_set import HotSet, HotShared
from tidelog.broker.inputs import ReplicaDisks
from tidelog.broker.membership import BrokerMembership
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.model.levels import REPLICATION_LEVEL
from tidelog.controller.model.records import NO_BROKER
from tidelog.controller.model.replication import has_several
from tidelog.controller.model.wal_notes import losses_in
from tidelog.runtime.errors import ConfigError, TidelogError
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Pause before a replica that could not be opened or deleted is tried again, unless the metadata change first."""
POLL_S = 0.02
LONG_S = 30.0
"""What is done with one replica holds up what is to be done with others: for longer than this it is a problem."""
DISK_WAL = "disk"
_STRAY = "is none that this broker is assigned to, and its set is unknown or has no master: its files are kept"


def is_replicated(base: BrokerBase) -> bool:
    """Return whether the broker's own replica set has, or is to have, several members.

    Raises `ConfigError` if it is to, and this broker cannot replicate.
    """
    image, replica_set = base.image(), base.broker_id
    record, row = image.replica_sets.get(replica_set), image.replication.get(replica_set)
    has = record is not None and has_several(record)
    wanted = row.policy.total_replicas if row is not None else base.settings.replication.total_replicas
    if not has and (wanted <= 1 or image.level < REPLICATION_LEVEL):
        return False
    if base.wal.kind != DISK_WAL or base.wal.replicas is None:
        other = "or replication.total_replicas = 1"
        if row is not None:
            other = f"the policy is in the metadata: `tidelog replica-set set-policy {replica_set}` changes it then"
        raise ConfigError(
            f"replica set {replica_set} has, or is to have, {max(wanted, 2)} replicas, and wal.kind is {base.wal.kind}",
            hint=f"only WALs on disk are replicated: set wal.kind = disk, {other}",
        )
    if base.controllers.credentials is None:
        raise ConfigError(
            f"replica set {replica_set} has, or is to have, {max(wanted, 2)} replicas, and the cluster has no secret",
            hint="set controller.secret_file: brokers use it to authenticate each other",
        )
    return True


def _is_led_by_another(image: Image, replica_set: int, me: int) -> bool:
    """Return whether another broker, which lives, is the master of a set, and no election is under way."""
    record, row = image.replica_sets.get(replica_set), image.replication.get(replica_set)
    if record is None or row is None or row.election is not None or record.master in (NO_BROKER, me):
        return False
    master = image.brokers.get(record.master)
    return master is not None and master.alive


def _has_losses(shared: HotShared, replica_set: int) -> bool:
    """Return whether records of a replica set were given up."""
    return any(each.replica_set == replica_set for each in losses_in(shared.base.image().kv))


def _nothing() -> None:
    """There is no subscription yet."""


class HotSets:
    """See the module. Used on the event loop's thread."""

    def __init__(self, shared: HotShared | None, disks: ReplicaDisks | None, *, keeps_own: bool) -> None:
        """`shared` and `disks` None: this broker replicates nothing. `keeps_own`: `is_replicated`."""
        assert (shared is not None and disks is not None) or not keeps_own
        self._shared = shared
        self._disks = disks
        self._keeps_own = keeps_own
        self._sets: dict[int, HotSet] = {}
        self._failures: dict[int, str] = {}
        """Why a replica could not be opened, or deleted, by replica set."""
        self._doing: tuple[int, str, float] | None = None
        """The replica set of the replica that something is done with now, what, and since when (monotonic seconds)."""
        self._dropping: set[int] = set()
        """Sets whose replicas are to be closed and deleted. One that is wanted again meanwhile begins anew after."""
        self._strays: set[int] = set()
        """Sets of which there were files at the start, and that are not wanted."""
        self._rejected: list[str] = []
        """Where WALs that were set aside are kept, as it was found last."""
        self._registration_epoch = -1
        self._changed = asyncio.Event()
        self._unsubscribe: Callable[[], None] = _nothing
        self._tasks = TaskSet("hot-sets", shared.base.failure.fail if shared is not None else None)
        self._closed = False

    # --- start ---------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Read the WALs on disk, before the broker registers: an election need not wait for that.

        Raises the errors of `HotSet.open` for the broker's own replica set.
        """
        if self._shared is None:
            return
        for replica_set in sorted(self._wanted(self._shared)):
            error = await self._open(self._shared, replica_set)
            if error is not None and self._keeps_own and replica_set == self._shared.base.broker_id:
                raise error

    async def begin(self, membership: BrokerMembership) -> None:
        """Serve, and follow the metadata, under the broker's registration. Raises as `HotSet.begin_alone`."""
        if self._shared is None:
            return
        base = self._shared.base
        self._registration_epoch = membership.registration_epoch
        own, record = self._sets.get(base.broker_id), base.image().replica_sets.get(base.broker_id)
        if own is not None and (record is None or not has_several(record)):
            await own.begin_alone(membership)
        for one in self._sets.values():
            one.begin(self._registration_epoch)
        self._strays = set(self._disks.kept() if self._disks is not None else ())
        self._unsubscribe = base.controller.subscribe(self._image_changed)
        self._tasks.keep(self._run, "keep")

    async def wait_settled(self) -> None:
        """Wait until each replica serves, follows, or cannot do either; bound it with a time-out."""
        while self._shared is not None and self.unsettled():
            await self._shared.base.world.clock.sleep(POLL_S)

    def unsettled(self) -> list[int]:
        """Return the sets whose replica here neither serves nor follows, and still may."""
        return [each for each, one in sorted(self._sets.items()) if not one.is_settled]

    # --- following the metadata ----------------------------------------------------------------------------------

    def _wanted(self, shared: HotShared) -> set[int]:
        """Return the sets of which this broker is to have a replica."""
        image, me = shared.base.image(), shared.base.broker_id
        found = {
            row.id
            for row in image.replication.values()
            if (me in row.assigned or row.replica(me) is not None) and (row.id != me or self._keeps_own)
        }
        record = image.replica_sets.get(me)
        if self._keeps_own and (record is None or not has_several(record)):
            found.add(me)
        return found

    def _image_changed(self, delta: Delta) -> None:
        for one in self._sets.values():
            one.look()
        self._changed.set()

    async def _run(self) -> None:
        assert self._shared is not None
        while not self._closed:
            self._changed.clear()
            await self._keep(self._shared)
            try:
                async with asyncio.timeout(RETRY_S if self._failures or self._rejected else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _is_current(self, shared: HotShared) -> bool:
        """Whether the metadata speak of this process. If not, it is about to end."""
        broker = shared.base.image().brokers.get(shared.base.broker_id)
        return broker is not None and broker.registration_epoch == self._registration_epoch

    async def _keep(self, shared: HotShared) -> None:
        if not self._is_current(shared):
            return
        wanted = self._wanted(shared)
        kept = wanted | self._sets.keys() | self._strays
        self._failures = {each: why for each, why in self._failures.items() if each in kept}
        removed = {each for each, one in self._sets.items() if one.is_removed}  # some may be wanted again
        self._dropping |= self._sets.keys() - wanted | removed
        for replica_set in sorted(self._dropping):
            with self._does(replica_set, "deleted"):
                await self._drop(shared, replica_set)
        await self._clear(shared, wanted)
        await self._replace_rejected(shared)
        await self._list_rejected()
        for replica_set in sorted(wanted - self._sets.keys()):
            with self._does(replica_set, "opened"):
                error = await self._open(shared, replica_set)
            if error is None:
                self._sets[replica_set].begin(self._registration_epoch)

    async def _replace_rejected(self, shared: HotShared) -> None:
        """Set the WALs that were refused aside where the set goes on without them; `_keep` opens empty ones then."""
        assert self._disks is not None
        image = shared.base.image()
        for replica_set, one in list(self._sets.items()):
            if not one.is_rejected or replica_set in self._dropping or not self._is_current(shared):
                continue
            if not _is_led_by_another(image, replica_set, shared.base.broker_id):
                continue
            try:
                with self._does(replica_set, "set aside"):
                    await one.close(upload=False)
                    place = await self._disks.set_aside(replica_set)
            except TidelogError as error:
                self._note(replica_set, "cannot be replaced", error)
                continue
            del self._sets[replica_set]
            self._failures.pop(replica_set, None)
            extra = {"set": replica_set, "kept": place}
            logger.warning("a rejected WAL was set aside; this replica begins anew, without it", extra=extra)

    @contextmanager
    def _does(self, replica_set: int, what: str) -> Iterator[None]:
        """Note what is done with a replica in the `with` block."""
        assert self._shared is not None
        self._doing = (replica_set, what, self._shared.base.world.clock.monotonic())
        try:
            yield
        finally:
            self._doing = None

    async def _list_rejected(self) -> None:
        assert self._disks is not None
        try:
            self._rejected = await self._disks.rejected()
        except TidelogError as error:
            logger.warning("rejected WALs cannot be listed", extra={"error": str(error)})

    async def _clear(self, shared: HotShared, wanted: set[int]) -> None:
        """Delete what is left of replicas that were removed while this broker was down."""
        assert self._disks is not None
        image = shared.base.image()
        self._strays -= wanted | self._sets.keys()
        for replica_set in sorted(self._strays):
            if not self._is_current(shared):
                return
            row, record = image.replication.get(replica_set), image.replica_sets.get(replica_set)
            if row is None or not row.in_sync or record is None or record.master == NO_BROKER:
                self._failures.setdefault(replica_set, _STRAY)
                continue
            try:
                with self._does(replica_set, "deleted"):
                    has_given_up = await self._has_given_up(shared, replica_set)
                    await self._delete(shared, replica_set, has_given_up=has_given_up)
            except TidelogError as error:
                self._note(replica_set, "cannot be deleted", error)
                continue
            self._strays.discard(replica_set)
            self._failures.pop(replica_set, None)

    async def _has_given_up(self, shared: HotShared, replica_set: int) -> bool:
        """Whether a replica that is not open may have records that were given up."""
        assert self._disks is not None
        if not _has_losses(shared, replica_set):
            return False
        one = await HotSet.open(shared, self._disks.open(replica_set), replica_set)
        try:
            return one.has_given_up()
        finally:
            await one.close(upload=False)

    async def _delete(self, shared: HotShared, replica_set: int, *, has_given_up: bool) -> None:
        """Delete the files of a replica that is closed; set them aside if nobody else has what is in them.

        `has_given_up` is about its WAL. What it has kept when it started over may have such records, too.
        """
        assert self._disks is not None
        keeps = _has_losses(shared, replica_set) and await self._disks.keeps_earlier(replica_set)
        if not has_given_up and not keeps:
            await self._disks.remove(replica_set)
            logger.info("a replica was deleted: this broker was removed from its set", extra={"set": replica_set})
            return
        extra = {"set": replica_set, "kept": await self._disks.set_aside(replica_set)}
        logger.warning("a replica was set aside: it may have records that were given up", extra=extra)

    async def _open(self, shared: HotShared, replica_set: int) -> TidelogError | None:
        """Open a replica. Returns why it cannot be opened, which is a problem then."""
        assert self._disks is not None
        try:
            opened = self._disks.open(replica_set)
            self._sets[replica_set] = await HotSet.open(shared, opened, replica_set)
        except TidelogError as error:
            self._note(replica_set, "cannot be opened", error)
            return error
        self._sets[replica_set].on_rejected = self._changed.set
        self._failures.pop(replica_set, None)
        return None

    async def _drop(self, shared: HotShared, replica_set: int) -> None:
        """Close a replica that was not wanted any more, and delete its files; keep those of the broker's own set.

        What fails is tried again until it is done, whatever is wanted by then: it is closed, or half deleted.
        """
        one = self._sets[replica_set]
        try:
            await one.close(upload=False)
            if replica_set != shared.base.broker_id:
                await self._delete(shared, replica_set, has_given_up=one.has_given_up())
        except TidelogError as error:
            self._note(replica_set, "cannot be deleted", error)
            return
        del self._sets[replica_set]
        self._dropping.discard(replica_set)
        self._failures.pop(replica_set, None)

    def _note(self, replica_set: int, what: str, error: TidelogError) -> None:
        text = f"{what}: {error}"
        if self._failures.get(replica_set) != text:
            logger.error(f"a replica {what}", extra={"set": replica_set, "error": str(error)})
        self._failures[replica_set] = text

    # --- reports -------------------------------------------------------------------------------------------------

    def get(self, replica_set: int) -> HotSet | None:
        """Return the replica of a set that is open here."""
        return self._sets.get(replica_set)

    @property
    def appended_bytes(self) -> int:
        """Return the sum of the WALs' ends: how much was written or received."""
        return sum(one.wal.end_offset for one in self._sets.values())

    @property
    def durable_bytes(self) -> int:
        """Return the sum of the WALs' durable offsets."""
        return sum(one.wal.durable_offset for one in self._sets.values())

    @property
    def is_known(self) -> bool:
        """Return whether the loss of each WAL would be noticed, or nothing would be lost with it."""
        return all(one.is_known for one in self._sets.values())

    def suspects(self) -> set[int]:
        """Return the brokers that this one follows, and has lost its connection to: they may be dead."""
        return {broker for one in self._sets.values() if (broker := one.lost_master) is not None}

    async def settle(self) -> None:
        """Report WALs of which everything is committed as such, where that is told (`WalKeeper.settle`)."""
        for one in list(self._sets.values()):
            await one.settle()

    def problems(self) -> list[str]:
        """Return what is wrong, one sentence each."""
        found = [f"the replica of replica set {each} {why}" for each, why in sorted(self._failures.items())]
        found += [
            f"a WAL that was set aside is kept at {place}: this broker's disk had lost what it had made durable, or it"
            " has records that were given up (`tidelog wal losses`); look at it, then delete it"
            for place in self._rejected
        ]
        if self._shared is not None and self._doing is not None:
            replica_set, what, since = self._doing
            if (taken_s := self._shared.base.world.clock.monotonic() - since) >= LONG_S:
                found.append(
                    f"the replica of replica set {replica_set} is being {what} for {taken_s:.0f} s now, and what is to"
                    " be done with others waits: its disk may hang"
                )
        return found + [problem for one in self._sets.values() for problem in one.problems()]

    def master_statuses(self) -> dict[int, dict[str, Any]]:
        """Return what this broker knows of the sets that it leads, by replica set (`ReplicaMaster.status`)."""
        found = ((each, one.master_status()) for each, one in sorted(self._sets.items()))
        return {each: status for each, status in found if status is not None}

    def report(self) -> dict[str, Any]:
        """Return the replicas as JSON, by replica set."""
        return {str(each): one.report() for each, one in sorted(self._sets.items())}

    # --- end -----------------------------------------------------------------------------------------------------

    async def close(self, budget_s: float, *, upload: bool) -> None:
        """End; with `upload`, first upload what is confirmed of the sets that it leads, within the budget.

        It follows in the others meanwhile: their masters may be ending, too, and need it for their last quorum.
        """
        self._closed = True
        self._unsubscribe()
        await self._tasks.close()
        led = [one for one in self._sets.values() if one.leads]
        others = [one for one in self._sets.values() if one not in led]
        for sets in (led, others):
            await asyncio.gather(*(self._close_one(one, budget_s, upload) for one in sets))

    async def _close_one(self, one: HotSet, budget_s: float, upload: bool) -> None:
        try:
            async with asyncio.timeout(budget_s):
                await one.close(upload=upload)
        except (TimeoutError, TidelogError) as error:
            logger.warning(
                "the last upload did not finish; the rest stays in the WAL and is uploaded by the next master",
                extra={"set": one.replica_set_id, "error": str(error) or "time is up"},
            )
            await one.close(upload=False)
