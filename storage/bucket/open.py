"""Opening the configured object store.

Entry: `open_store`; `open_backend` for the backend alone. The S3 client is imported only on use: the import takes
0.7 s.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tidelog.runtime.clock import Clock
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.local import MAX_THREADS, LocalObjectStore
from tidelog.storage.bucket.proof import BucketProof
from tidelog.storage.bucket.secret_files import with_secret_files
from tidelog.storage.bucket.store import Backend
from tidelog.storage.settings import S3Settings

EMBEDDED_BUCKET: Final = "bucket"
"""The directory of the embedded store under the data directory."""


def open_backend(s3: S3Settings, data_dir: Path, clock: Clock, rng: random.Random) -> Backend:
    """As `open_store`, without the decorator: the number of concurrent requests is not bounded by purpose."""
    if s3.is_embedded:
        return LocalObjectStore(data_dir / EMBEDDED_BUCKET, clock)
    from tidelog.storage.bucket.s3 import S3ObjectStore

    return S3ObjectStore(with_secret_files(s3), clock, rng)


OpenBackend = Callable[[S3Settings, Path, Clock, random.Random], Backend]
"""Opens a backend, as `open_backend` does."""


def open_store(
    s3: S3Settings,
    data_dir: Path,
    clock: Clock,
    rng: random.Random,
    proof: BucketProof | None = None,
    backend: OpenBackend = open_backend,
) -> GuardedObjectStore:
    """Return the store that `s3` names; without endpoint and bucket the embedded one, `<data_dir>/bucket`.

    Its gate has as many slots as the store has connections (or threads); call `for_purpose` for a view.
    With `proof` nothing is written before the bucket is proven to be the cluster's.
    Sends nothing: `probe()` does, and finds or creates the bucket. Raises `ConfigError`.
    """
    slots = MAX_THREADS if s3.is_embedded else s3.max_concurrency
    return GuardedObjectStore(backend(s3, data_dir, clock, rng), PriorityGate(slots), clock, proof=proof)
