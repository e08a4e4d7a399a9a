"""The sections `wal`, `upload` and `memory` of `/status`: what storage tells of itself.

Entry: `wal_section`, `upload_section`, `memory_section`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.broker.settings import KafkaSettings
from tidelog.runtime.memory import resident_bytes
from tidelog.storage.settings import CacheSettings
from tidelog.storage.wal.base import Wal

WAL_FIELDS = ("start_offset", "end_offset", "durable_offset", "confirm_offset", "master_epoch")


def wal_section(wal: Wal, confirm_offset: int) -> dict[str, int]:
    """Offsets of the WAL (int64 bytes) of the broker's own replica set, and the epoch that it is written in."""
    values = (wal.start_offset, wal.end_offset, wal.durable_offset, confirm_offset, wal.master_epoch)
    return dict(zip(WAL_FIELDS, values, strict=True))


def upload_section(stats: Mapping[str, int | float]) -> dict[str, int | float]:
    """`backlog_bytes` (confirmed and not uploaded), and how uploads go, of all storages (`StorageReports.stats`)."""
    return {
        "backlog_bytes": stats.get("log_cache_pending_bytes", 0),
        "in_flight": stats.get("uploads_in_flight", 0),
        "committed_offset": stats.get("committed_offset", 0),
        "retries": stats.get("upload_retries", 0),
    }


def memory_section(
    stats: Mapping[str, int | float], cache: CacheSettings, kafka: KafkaSettings, listener_bytes: tuple[int, int]
) -> dict[str, int]:
    """The accounts that bound this broker's memory, what is in each, and its bound; `resident_bytes` of the process.

    `stats`: `StorageReports.stats`; `listener_bytes`: what the Kafka listener holds of requests and of responses.
    """
    requests, responses = listener_bytes
    return {
        "resident_bytes": resident_bytes(),
        "log_cache_bytes": int(stats.get("log_cache_bytes", 0)),
        "log_cache_bound_bytes": cache.log_bytes,
        "block_cache_bytes": int(stats["block_cache_bytes"]),
        "block_cache_bound_bytes": cache.block_bytes,
        "cold_in_flight_bytes": int(stats["cold_in_flight_bytes"]),
        "cold_in_flight_bound_bytes": cache.cold_in_flight_bytes,
        "requests_bytes": requests,
        "requests_bound_bytes": kafka.max_in_flight_bytes,
        "responses_bytes": responses,
        "responses_bound_bytes": kafka.max_unread_bytes,
    }
