"""Creates a broker's data components: the WALs, storages, compaction and the orphan search.

The broker's own replica set has one member, whose WAL is a `SingleWal`, or several, and then its WAL is one of the
`HotSets`, as those of the other sets are of which the broker has a replica.

Each registers its metrics, problems and sections where it is created.

Entry: `build_data_parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tidelog.broker.admin.storage_status import WAL_FIELDS, upload_section, wal_section
from tidelog.broker.base import BrokerBase
from tidelog.broker.hot_set import HotShared
from tidelog.broker.hot_sets import DISK_WAL, HotSets, is_replicated
from tidelog.broker.objects.compaction_view import ImageView, waiting_object
from tidelog.broker.objects.manifest_writer import ManifestWriter
from tidelog.broker.objects.report import describe_damage
from tidelog.broker.partitions.local_streams import ImageStreams
from tidelog.broker.partitions.prefetch import FollowerPrefetch
from tidelog.broker.partitions.read_replicas import FollowedReplicas, ReadReplicas
from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.replication.door import ReplicationDoor
from tidelog.broker.replication.inputs import ReplicationLimits, ReplicationWorld
from tidelog.broker.single_wal import SingleWal
from tidelog.broker.storage_reports import StorageReports
from tidelog.broker.telemetry import figures
from tidelog.runtime.errors import Fenced
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata
from tidelog.storage.compaction.compactor import CommittingTerm, CompactedData, Compactor
from tidelog.storage.compaction.throttle import BusyMeter
from tidelog.storage.inputs import HandedWal, LocalStreams, ReplicaSetData, StorageEvents, bucket_reader
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.reads.throttle import ColdThrottle
from tidelog.storage.replication.pace import CatchUpPace
from tidelog.storage.replication.sending import LinkSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import Wal

MAX_DAMAGE_SHOWN = 20
"""Limit of damaged places that `/status` lists; beyond it, it shows the number only."""


@dataclass(frozen=True, slots=True)
class DataParts:
    """The data components of a broker."""

    throttle: ColdThrottle
    """Delays cold reads while the broker is busy."""
    reader: BlockReader
    """Reads from the bucket, for all storages."""
    storages: MasterStorages
    """Those that serve."""
    reports: StorageReports
    single: SingleWal | None
    """The own replica set's WAL; None: it is one of `hot_sets`."""
    hot_sets: HotSets
    read_replicas: ReadReplicas
    prefetch: FollowerPrefetch
    door: ReplicationDoor
    """Takes the connections of followers."""
    compactor: Compactor
    cleaner: OrphanCleaner
    manifests: ManifestWriter

    @property
    def is_wal_known(self) -> bool:
        """Return whether the loss of each WAL would be noticed, or nothing would be lost with it."""
        return self.hot_sets.is_known and (self.single is None or self.single.keeper.is_known)

    def led(self) -> dict[int, dict[str, Any]]:
        """Return what this broker knows of the replica sets that it leads (`ReplicaMaster.status`)."""
        return _led(self.single, self.hot_sets)

    async def upload_now(self) -> dict[int, int]:
        """Upload everything that is confirmed, and report a WAL of which everything is committed as such.

        Returns the replica sets of which every record that was in the WAL is committed, with their master epochs.
        """
        whole: dict[int, int] = {}
        for storage in self.storages.all():
            end = storage.data_end
            await storage.upload_now()
            if storage.committed_offset >= end:
                whole[storage.replica_set_id] = storage.master_epoch
        if self.single is not None:
            await self.single.keeper.settle()
        await self.hot_sets.settle()
        return whole


def build_data_parts(base: BrokerBase) -> DataParts:
    """Open the broker's WAL in its cluster, and create the components that use it. Raises `ConfigError`."""
    world, cache = base.world, base.settings.cache
    replicated = is_replicated(base)
    progress: list[_WalProgress] = []

    def appended() -> int:
        return sum(each.appended() for each in progress)

    throttle = ColdThrottle(cache.cold_busy_share, world.clock, world.cpu, appended)
    reader = bucket_reader(base.image().cluster_id, world.store, base.controller, cache, world.clock, throttle=throttle)
    storages, followed, door = MasterStorages(), FollowedReplicas(), ReplicationDoor()
    reports = StorageReports(storages, followed, reader, base.health)
    make = _StorageMaker(base, reader, reports)
    single = None if replicated else _single(base, make, storages)
    if single is not None:
        wal = single.wal
        progress.append(_WalProgress(lambda: wal.end_offset, lambda: wal.durable_offset))
    hot_sets = _hot_sets(base, make, storages, followed, door, keeps_own=replicated)
    progress.append(_WalProgress(lambda: hot_sets.appended_bytes, lambda: hot_sets.durable_bytes))
    base.health.sample("WAL append", appended, lambda: sum(each.durable() for each in progress))
    _register(base, reports, single, hot_sets)
    compactor = _compactor(base, storages, appended)
    kafka = base.settings.kafka
    readable = ReadReplicas(
        base.controller,
        followed,
        reader,
        broker_id=base.broker_id,
        rack=kafka.rack,
        enabled=kafka.replica_selector == "rack",
    )
    prefetch = FollowerPrefetch(
        base.image, followed, reader, world.clock, base.settings.replication.prefetch_bytes_per_s
    )
    base.registry.add_figures(
        "followed",
        lambda: {**prefetch.figures(), "log_cache_bytes": followed.held_bytes},
        figures.followed_families,
    )
    manifests = ManifestWriter(
        image=base.image, store=world.store, prepare=base.controller.prepare_objects, clock=world.clock
    )
    cleaner = _cleaner(base)
    return DataParts(
        throttle, reader, storages, reports, single, hot_sets, readable, prefetch, door, compactor, cleaner, manifests
    )


class _WalProgress(NamedTuple):
    """What WALs were given, and what of it is durable, in bytes."""

    appended: Callable[[], int]
    durable: Callable[[], int]


@dataclass(frozen=True, slots=True)
class _StorageMaker:
    """Makes the storages of a broker, which share one reader of the bucket."""

    base: BrokerBase
    reader: BlockReader
    reports: StorageReports

    def storage(self, replica_set: int, wal: Wal, handed: HandedWal | None = None) -> Storage:
        """Return the storage of a replica set, for one term. Nothing runs yet."""
        base, streams = self.base, ImageStreams(self.base.controller, replica_set)

        def fenced(error: Exception) -> None:
            # With several members another term follows, and the replica is told of it.
            if handed is None or not isinstance(error, Fenced):
                base.failure.fail(error)

        return Storage(
            ReplicaSetData(
                base.image().cluster_id,
                replica_set,
                wal,
                base.world.store,
                base.controller,
                handed=handed,
                reader=self.reader,
            ),
            base.settings.storage,
            base.world.clock,
            base.world.rng,
            streams=LocalStreams(streams.is_placed, streams.facts),
            events=StorageEvents(
                fenced=fenced,
                wal_failed=base.failure.fail,
                quarantined=self.reports.quarantined.__setitem__,
                uploaded=base.tracing.uploaded if base.tracing is not None else None,
            ),
        )


def _single(base: BrokerBase, make: _StorageMaker, storages: MasterStorages) -> SingleWal:
    wal = base.wal.open(base.image().cluster_id)
    return SingleWal(base, wal, make.storage(base.broker_id, wal), storages)


def _hot_sets(
    base: BrokerBase,
    make: _StorageMaker,
    storages: MasterStorages,
    followed: FollowedReplicas,
    door: ReplicationDoor,
    *,
    keeps_own: bool,
) -> HotSets:
    world, settings, credentials = base.world, base.settings, base.controllers.credentials
    if credentials is None or base.wal.replicas is None or base.wal.kind != DISK_WAL:
        return HotSets(None, None, keeps_own=False)
    replication = settings.replication
    limits = ReplicationLimits(
        link=LinkSettings(
            window_bytes=replication.window_bytes,
            heartbeat_s=replication.heartbeat_ms / 1000,
            silence_s=replication.silence_ms / 1000,
        ),
        live_bytes=replication.live_bytes,
        tells_ends=not base.wal.may_lose_tail,
        hung_disk_s=replication.hung_disk_ms / 1000,
        max_record_bytes=base.wal.max_record_bytes,
    )
    shared = HotShared(
        base,
        door,
        ReplicationWorld(world.between_brokers, world.clock, world.rng, credentials),
        limits,
        storages,
        make.storage,
        settings.cache.log_bytes // max(1, replication.total_replicas),
        CatchUpPace(replication.catch_up_bytes_per_s),
        followed,
    )
    return HotSets(shared, base.wal.replicas, keeps_own=keeps_own)


def _led(single: SingleWal | None, hot_sets: HotSets) -> dict[int, dict[str, Any]]:
    found = hot_sets.master_statuses()
    status = single.master_status() if single is not None else None
    if single is not None and status is not None:
        found[single.storage.replica_set_id] = status
    return found


def _register(base: BrokerBase, reports: StorageReports, single: SingleWal | None, hot_sets: HotSets) -> None:
    """Register what WALs and storages report."""

    def problems() -> list[str]:
        found = single.problems() if single is not None else []
        damage = describe_damage(base.image(), reports.damage, MAX_DAMAGE_SHOWN)
        return found + reports.problems() + damage + hot_sets.problems()

    def wal() -> dict[str, int]:
        if single is not None:
            return wal_section(single.wal, single.storage.confirm_offset)
        own = hot_sets.get(base.broker_id)
        return wal_section(own.wal, own.wal.confirm_offset) if own is not None else dict.fromkeys(WAL_FIELDS, 0)

    base.registry.add_figures("storage", reports.stats, figures.storage_families)
    base.registry.add_problems("storage", problems)
    base.registry.add_section("wal", wal)
    base.registry.add_section("upload", lambda: upload_section(reports.stats()))
    base.registry.add_section("replicas", hot_sets.report)
    base.registry.add_figures("replica sets", lambda: _led(single, hot_sets), figures.replica_set_families)


def _compactor(base: BrokerBase, storages: MasterStorages, appended: Callable[[], int]) -> Compactor:
    settings, clock = base.settings, base.world.clock
    meter = BusyMeter(settings.compaction.busy_bytes_per_s, settings.upload.size_bytes)

    def busy() -> bool:
        return meter.observe(clock.monotonic(), appended(), storages.not_uploaded_bytes)

    def terms() -> dict[int, int]:
        sets = base.image().replica_sets
        return {
            each: epoch
            for each, epoch in storages.terms().items()
            if (record := sets.get(each)) is not None
            and (record.master, record.master_epoch) == (base.broker_id, epoch)
        }

    def term() -> CommittingTerm | None:
        found = terms()
        return CommittingTerm(*min(found.items())) if found else None

    compactor = Compactor(
        CompactedData(
            base.image().cluster_id,
            term,
            base.world.store.for_purpose(Purpose.COMPACTION),
            base.controller,
            ImageView(base.image, terms),
        ),
        settings.compaction,
        settings.upload,
        clock,
        base.world.rng,
        busy=busy,
    )
    base.registry.add_figures("compaction", compactor.figures, figures.compaction_families)
    base.registry.add_problems("compaction", compactor.problems)
    return compactor


def _cleaner(base: BrokerBase) -> OrphanCleaner:
    """Return the orphan cleaner: on request on any broker, periodically only beside the active controller."""
    cluster_id = base.image().cluster_id
    cleaner = OrphanCleaner(
        store=base.world.store.for_purpose(Purpose.CLEAN),
        cluster_id=lambda: cluster_id,
        metadata=OrphanMetadata(
            fence=lambda: base.controller.prepare_objects(1, 1),
            knows=lambda object_id: object_id in base.image().objects,
            unknown=base.controller.unknown_objects,
            waiting=lambda object_id: waiting_object(base.image().objects.get(object_id)),
        ),
        clock=base.world.clock,
        rng=base.world.rng,
        settings=base.settings.clean,
        is_active=base.controllers.searches_orphans,
    )

    def problems() -> list[str]:
        return [f"the search for orphans fails: {cleaner.last_error}"] if cleaner.last_error else []

    base.registry.add_figures("orphans", cleaner.figures, figures.orphan_families)
    base.registry.add_problems("orphans", problems)
    return cleaner
