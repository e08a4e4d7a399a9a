"""What a broker reports of its storages: figures, sections of `/status`, problems and health, over all of them.

A storage serves one term of one replica set. What is counted goes on when a term ends: the counts of ended storages are
kept. The reader of the bucket is one for all storages, so its figures are taken once.

Entry: `StorageReports`.
"""

from __future__ import annotations

from collections import Counter

from tidelog.broker.partitions.read_replicas import FollowedReplicas
from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.telemetry.figures import STORAGE_COUNTERS
from tidelog.broker.telemetry.health import HealthMonitor
from tidelog.storage.reads.damage import DamageLog
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.storage import Storage

_NOT_SUMMED = ("_offset", "_age_seconds")


class StorageReports:
    """See the module. Used on the event loop's thread."""

    def __init__(
        self, storages: MasterStorages, followed: FollowedReplicas, reader: BlockReader, health: HealthMonitor
    ) -> None:
        """`storages`: before the first one is added."""
        self._storages = storages
        self._followed = followed
        self._reader = reader
        self._health = health
        self._ended: Counter[str] = Counter()
        """Counts of storages that have ended."""
        self.quarantined: dict[int, str] = {}
        """Reason by stream. They may have been released since."""
        storages.on_each(self._added, self._removed)

    def _added(self, storage: Storage) -> None:
        self._health.add(storage.upload_health)

    def _removed(self, storage: Storage) -> None:
        self._health.discard(storage.upload_health)
        for name, value in storage.stats().items():
            if name in STORAGE_COUNTERS:
                self._ended[name] += value  # type: ignore[assignment]  # seconds are no integers

    def stats(self) -> dict[str, int | float]:
        """Return the sums of `Storage.stats()`; offsets in a WAL are those of the furthest one, ages of the oldest."""
        found: dict[str, int | float] = {}
        for storage in self._storages.all():
            for name, value in storage.stats().items():
                merged = max(found.get(name, 0), value) if name.endswith(_NOT_SUMMED) else found.get(name, 0) + value
                found[name] = merged
        for name, value in self._ended.items():
            found[name] = found.get(name, 0) + value
        return {**found, **self._reader.stats()}

    def problems(self) -> list[str]:
        """Return which streams are quarantined."""
        storages = self._storages.all()
        return [
            f"stream {stream_id} is quarantined: {reason} (`tidelog object quarantine list`)"
            for stream_id, reason in self.quarantined.items()
            if any(storage.is_quarantined(stream_id) for storage in storages)
        ]

    @property
    def damage(self) -> DamageLog:
        """Return the known damage in the bucket."""
        return self._reader.damage

    @property
    def held_bytes(self) -> int:
        """Return the bytes held by the caches and by cold reads in progress; called every second."""
        led = sum(storage.log_cache_bytes for storage in self._storages.all())
        return led + self._followed.held_bytes + self._reader.held_bytes
