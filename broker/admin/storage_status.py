"""The sections `wal`, `upload` and `memory` of `/status`: what storage tells of itself.

Entry: `wal_section`, `upload_section`, `memory_section`.
"""

from __future__ import annotations

from tidelog.broker.settings import KafkaSettings
from tidelog.runtime.memory import resident_bytes
from tidelog.storage.settings import CacheSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import Wal


def wal_section(wal: Wal, storage: Storage) -> dict[str, int]:
    """Offsets of the WAL (int64 bytes) and the epoch that it is written in."""
    return {
        "start_offset": wal.start_offset,
        "end_offset": wal.end_offset,
        "durable_offset": wal.durable_offset,
        "confirm_offset": storage.confirm_offset,
        "master_epoch": wal.master_epoch,
    }


def upload_section(storage: Storage) -> dict[str, int | float]:
    """`backlog_bytes` (confirmed and not uploaded), and how uploads go."""
    stats = storage.stats()
    return {
        "backlog_bytes": stats["log_cache_pending_bytes"],
        "in_flight": stats["uploads_in_flight"],
        "committed_offset": stats["committed_offset"],
        "retries": stats["upload_retries"],
    }


def memory_section(
    storage: Storage, cache: CacheSettings, kafka: KafkaSettings, listener_bytes: tuple[int, int]
) -> dict[str, int]:
    """The accounts that bound this broker's memory, what is in each, and its bound; `resident_bytes` of the process.

    `listener_bytes`: what the Kafka listener holds of requests and of responses.
    """
    stats = storage.stats()
    requests, responses = listener_bytes
    return {
        "resident_bytes": resident_bytes(),
        "log_cache_bytes": int(stats["log_cache_bytes"]),
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
