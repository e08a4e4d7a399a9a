"""Creates a broker's data components: the WAL, storage, compaction and the orphan search.

Each registers its metrics, problems and sections where it is created.

Entry: `build_data_parts`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.broker.admin.storage_status import upload_section, wal_section
from tidelog.broker.base import BrokerBase
from tidelog.broker.objects.compaction_view import ImageView, waiting_object
from tidelog.broker.objects.report import describe_damage
from tidelog.broker.partitions.local_streams import ImageStreams
from tidelog.broker.telemetry import figures
from tidelog.broker.wal_keeper import WalKeeper
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata
from tidelog.storage.compaction.compactor import CompactedData, Compactor
from tidelog.storage.compaction.throttle import BusyMeter
from tidelog.storage.inputs import LocalStreams, ReplicaSetData, StorageEvents
from tidelog.storage.reads.throttle import ColdThrottle
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import Wal

MAX_DAMAGE_SHOWN = 20
"""Limit of damaged places that `/status` lists; beyond it, it shows the number only."""


@dataclass(frozen=True, slots=True)
class DataParts:
    """The data components of a broker."""

    wal: Wal
    throttle: ColdThrottle
    """Delays cold reads while the broker is busy."""
    storage: Storage
    keeper: WalKeeper
    compactor: Compactor
    cleaner: OrphanCleaner


def build_data_parts(base: BrokerBase) -> DataParts:
    """Open the broker's WAL in its cluster, and create the components that use it."""
    world = base.world
    wal = base.wal.open(base.image().cluster_id)
    throttle = ColdThrottle(base.settings.cache.cold_busy_share, world.clock, world.cpu, lambda: wal.end_offset)
    storage = _storage(base, wal, throttle)
    keeper = WalKeeper(base.broker_id, base.wal, base.controller, wal, storage, world.clock)
    return DataParts(wal, throttle, storage, keeper, _compactor(base, wal, storage), _cleaner(base))


def _storage(base: BrokerBase, wal: Wal, throttle: ColdThrottle) -> Storage:
    quarantined: dict[int, str] = {}
    """Reason by stream. They may have been released since."""
    streams = ImageStreams(base.controller, base.broker_id)
    fail = base.failure.fail
    storage = Storage(
        ReplicaSetData(base.image().cluster_id, base.broker_id, wal, base.world.store, base.controller),
        base.settings.storage,
        base.world.clock,
        base.world.rng,
        streams=LocalStreams(streams.is_placed, streams.facts),
        events=StorageEvents(fenced=fail, wal_failed=fail, quarantined=quarantined.__setitem__),
        throttle=throttle,
    )

    def problems() -> list[str]:
        found = [
            f"stream {stream_id} is quarantined: {reason} (`tidelog object quarantine list`)"
            for stream_id, reason in quarantined.items()
            if storage.is_quarantined(stream_id)
        ]
        return found + describe_damage(base.image(), storage.damage, MAX_DAMAGE_SHOWN)

    base.health.sample("WAL append", lambda: wal.end_offset, lambda: wal.durable_offset)
    base.health.add(storage.upload_health)
    base.registry.add_figures("storage", storage.stats, figures.storage_families)
    base.registry.add_problems("storage", problems)
    base.registry.add_section("wal", lambda: wal_section(wal, storage))
    base.registry.add_section("upload", lambda: upload_section(storage))
    return storage


def _compactor(base: BrokerBase, wal: Wal, storage: Storage) -> Compactor:
    settings, clock, controller = base.settings, base.world.clock, base.controller
    meter = BusyMeter(settings.compaction.busy_bytes_per_s, settings.upload.size_bytes)

    def busy() -> bool:
        waiting = storage.confirm_offset - controller.committed_wal_offset(base.broker_id)
        return meter.observe(clock.monotonic(), wal.end_offset, waiting)

    compactor = Compactor(
        CompactedData(
            base.image().cluster_id,
            base.broker_id,
            base.world.store.for_purpose(Purpose.COMPACTION),
            controller,
            ImageView(base.image, base.broker_id),
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
