"""The configuration of this package: one typed struct per section, each field with its unit, range and reason.

`tidelog.config` composes the sections of all packages into one model and documents the source of each value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MIB = 1 << 20

Bytes = Annotated[int, Meta(ge=0)]
Millis = Annotated[int, Meta(ge=1)]


class WalSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[wal]`."""

    kind: Literal["disk", "s3", "memory"] = "disk"
    """Where the write-ahead log lives."""
    flush: Literal["sync", "async"] = "sync"
    """`sync`: acknowledged after fdatasync. `async`: after the write; a power loss may lose `flush_interval_ms`."""
    flush_interval_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    """How often `async` syncs (1–60,000)."""
    segment_bytes: Annotated[int, Meta(ge=MIB, le=4096 * MIB)] = 64 * MIB
    """Size of a WAL file, zero-filled ahead of use (1 MiB–4 GiB)."""
    max_bytes: Annotated[int, Meta(ge=4 * MIB)] = 2048 * MIB
    """Bound on the WAL on disk; at the bound producers wait for uploads."""
    max_record_bytes: Annotated[int, Meta(ge=MIB, le=1024 * MIB)] = 128 * MIB
    """Bound on one record's payload."""
    s3_batch_min_ms: Annotated[int, Meta(ge=1, le=10_000)] = 20
    """`s3`: shortest time between two objects while one is in flight (1–10,000); the interval follows the latency."""
    s3_batch_max_ms: Annotated[int, Meta(ge=1, le=60_000)] = 250
    """`s3`: longest time between two objects (1–60,000); longer costs fewer requests."""
    s3_batch_bytes: Annotated[int, Meta(ge=4096, le=256 * MIB)] = 8 * MIB
    """`s3`: an object of this size is sent at once (4 KiB–256 MiB)."""
    s3_in_flight: Annotated[int, Meta(ge=1, le=256)] = 16
    """`s3`: objects in flight (1–256); they are acknowledged in order."""


class S3Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[s3]`. Without an endpoint and bucket the embedded store under the data directory is used."""

    endpoint: str = ""
    """`http(s)://host:port`; empty with a bucket set means AWS."""
    bucket: str = ""
    """Name of the bucket; created at start if `create_bucket` is set."""
    prefix: str = ""
    """Prefix of every key; several clusters may share a bucket."""
    region: str = "us-east-1"
    """Region that requests are signed for."""
    access_key_id: str = ""
    """Empty, and without a file: the default provider chain (environment, shared files, instance role)."""
    access_key_id_file: str = ""
    """File with the access key id, instead of `access_key_id`; read when the process starts."""
    secret_access_key: str = ""
    """Goes with `access_key_id`; never printed. Prefer the file: a command line is visible to all users."""
    secret_access_key_file: str = ""
    """File with the secret access key, instead of `secret_access_key`; mode 600, else a warning is logged."""
    create_bucket: bool = True
    """Create the bucket if it does not exist."""
    client: Literal["aiobotocore", "obstore"] = "obstore"
    """Library that puts and gets objects. The other requests always use aiobotocore."""
    max_concurrency: Annotated[int, Meta(ge=1, le=1024)] = 64
    """Requests in flight (1–1,024)."""
    request_timeout_ms: Millis = 10_000
    """One attempt."""
    retry_budget_ms: Millis = 60_000
    """All attempts of one call together."""
    multipart_bytes: Annotated[int, Meta(ge=5 * MIB)] = 128 * MIB
    """Bodies from this size on are multipart uploads; also the size of a part (≥ 5 MiB)."""

    @property
    def is_embedded(self) -> bool:
        """Return whether the embedded store is configured."""
        return not self.endpoint and not self.bucket


class UploadSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[upload]`."""

    size_bytes: Annotated[int, Meta(ge=1024)] = 64 * MIB
    """Upload when this much confirmed data is pending."""
    age_ms: Millis = 10_000
    """Upload when the oldest confirmed record has been pending this long."""
    split_bytes: Annotated[int, Meta(ge=1024)] = 8 * MIB
    """A stream with at least this much in one upload gets an object of its own."""
    block_bytes: Annotated[int, Meta(ge=4096, le=16 * MIB)] = 256 * 1024
    """Target size of a data block (a block holds at least one record)."""
    max_in_flight: Annotated[int, Meta(ge=1, le=64)] = 4
    """Limit of overlapping uploads; they commit in order."""
    prepare_ttl_ms: Annotated[int, Meta(ge=1000)] = 600_000
    """Object ids not committed within this time expire."""
    delete_delay_ms: Annotated[int, Meta(ge=0)] = 60_000
    """How long a destroyed object stays in the bucket for readers that hold older metadata (rule 6)."""


class CacheSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[cache]`."""

    log_bytes: Annotated[int, Meta(ge=4 * MIB)] = 512 * MIB
    """Log cache, overhead included; data that is not uploaded must fit into it; at the bound producers wait."""
    block_bytes: Bytes = 256 * MIB
    """Block cache for reads from the bucket; half of it may be read ahead."""
    cold_in_flight_bytes: Annotated[int, Meta(ge=MIB)] = 64 * MIB
    """Bytes in flight from the bucket for cold reads (≥ 1 MiB); at the bound readers are served in turn."""
    cold_busy_share: Annotated[float, Meta(ge=0.01, le=1)] = 0.04
    """Share of the broker's CPU time for cold reads while CPU time is scarce (0.01–1); 1: no bound."""


class CompactionSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[compaction]`: replacing many small objects by few large ones, in the background."""

    enabled: bool = True
    """Compact in the background. `tidelog object compact` works either way."""
    interval_ms: Annotated[int, Meta(ge=100)] = 30_000
    """How often to look for objects to compact (≥ 100)."""
    min_objects: Annotated[int, Meta(ge=2, le=256)] = 8
    """Number of small neighbours that are worth a compaction (2–256)."""
    max_objects: Annotated[int, Meta(ge=2, le=1024)] = 64
    """Limit of objects in one compaction (2–1,024)."""
    age_ms: Annotated[int, Meta(ge=0)] = 3_600_000
    """Older objects are compacted even if there are fewer of them, but at least two."""
    target_bytes: Annotated[int, Meta(ge=4096, le=1024 * MIB)] = 64 * MIB
    """Target size of objects (4 KiB–1 GiB); objects of half the size are left alone. A compaction takes 2–3 times that
    in memory."""
    stream_bytes: Annotated[int, Meta(ge=1024)] = 4 * MIB
    """A stream with at least this much in the stream-set objects of one compaction gets an object of its own."""
    throttle_bytes_per_s: Annotated[int, Meta(ge=1024)] = 32 * MIB
    """Limit of bytes read and written per second (≥ 1,024). A tenth of that while the broker is busy."""
    busy_bytes_per_s: Annotated[int, Meta(ge=0)] = 16 * MIB
    """Busy: producers write more than this per second, or a whole upload (`upload.size_bytes`) is pending."""
    concurrency: Annotated[int, Meta(ge=1, le=16)] = 1
    """Limit of concurrent compactions (1–16)."""


class CleanSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[clean]`: objects in the bucket that no metadata names, left by crashes."""

    enabled: bool = True
    """The active controller searches for orphans periodically. `tidelog object clean` works either way."""
    interval_ms: Annotated[int, Meta(ge=100)] = 6 * 3_600_000
    """How often (≥ 100). A search lists all objects: a request per 1,000."""
    orphan_age_ms: Annotated[int, Meta(ge=0)] = 3_600_000
    """Younger objects are left alone: an abandoned upload may still be writing them."""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """The sections that a `Storage` reads."""

    upload: UploadSettings = field(default_factory=UploadSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
