"""Effective topic configuration of a partition log, typed.

The broker merges Kafka's layers (topic, broker, default) into one `LogConfig`, which may be replaced at any time.
"""

from __future__ import annotations

import msgspec

from tidelog.stream.producer_state import ROWS_PER_PIECE

INT64_MAX = (1 << 63) - 1


class LogConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Effective configuration of one partition log. Names and defaults are Kafka's, with dots as underscores."""

    retention_ms: int = 604_800_000
    """Segments whose newest record is older than this are dropped; -1: never."""
    retention_bytes: int = -1
    """Oldest segments are dropped while the remaining ones still hold this many bytes; -1: no limit."""
    segment_bytes: int = 1 << 30
    segment_ms: int = 604_800_000
    max_message_bytes: int = 1_048_588
    """Largest record batch, its 12-byte prefix included."""
    timestamp_type: str = "CreateTime"
    """`CreateTime` or `LogAppendTime`."""
    cleanup_policy: str = "delete"
    """`delete`, `compact`, both with a comma, or empty: nothing is dropped or compacted (KIP-1161)."""
    min_cleanable_dirty_ratio: float = 0.5
    """Compaction begins when more than this share (0–1) of what may be compacted is dirty."""
    min_compaction_lag_ms: int = 0
    """A segment with a younger record is not compacted."""
    max_compaction_lag_ms: int = INT64_MAX
    """Compaction begins when the oldest dirty segment is older; also bounds the age of a segment that takes appends."""
    delete_retention_ms: int = 86_400_000
    """How long a tombstone stays after the compaction that first met it."""
    message_timestamp_before_max_ms: int = INT64_MAX
    """How far a CreateTime timestamp may lie in the past."""
    message_timestamp_after_max_ms: int = 3_600_000
    """How far a CreateTime timestamp may lie in the future."""
    producer_id_expiration_ms: int = 86_400_000
    """Idempotent producers that have been silent this long are removed."""
    compression_type: str = "producer"
    """`producer` keeps batches unchanged; `uncompressed`, `gzip`, `snappy`, `lz4` or `zstd` recompresses other
    batches."""
    compression_level: int | None = None
    """That of the codec of `compression_type`, for batches that are recompressed (KIP-390); None: its default."""
    index_interval_bytes: int = 4096
    """At most one time index entry for this many bytes of batches."""
    min_insync_replicas: int = 1
    """Replicas that must be in sync for a write of acks=all."""
    checkpoint_bytes: int = 16 << 20
    """A checkpoint is written after this many bytes of batches; bounds the scan of an unclean open."""
    checkpoint_batches: int = 4096
    """The same after this many batches, which may be small: a scan takes some 15 µs for each. With very many idempotent
    producers, whose states it contains, later."""
    producers_per_piece: int = ROWS_PER_PIECE
    """A table of more idempotent producers is written in pieces of this many, one with an append or a step of
    housekeeping."""

    @property
    def compacts(self) -> bool:
        """Whether records need keys."""
        return "compact" in self.cleanup_policy

    @property
    def roll_ms(self) -> int:
        """Return the age at which a segment is sealed (KIP-354)."""
        return min(self.segment_ms, self.max_compaction_lag_ms) if self.compacts else self.segment_ms

    @property
    def deletes(self) -> bool:
        """Whether retention by time and size applies."""
        return "delete" in self.cleanup_policy
