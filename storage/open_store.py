"""Which object store the configuration means.

Entry: `open_store`. The S3 client is imported only where it is used: that alone takes 0.7 s.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from runtime.clock import Clock
from storage.object_store_local import MAX_THREADS, LocalObjectStore
from storage.priority_gate import GatedObjectStore, PriorityGate
from storage.settings import S3Settings

EMBEDDED_BUCKET: Final = "bucket"
"""The folder of the embedded store under the data directory."""


def open_store(s3: S3Settings, data_dir: Path, clock: Clock, rng: random.Random) -> GatedObjectStore:
    """The store that `s3` names; without endpoint and bucket the embedded one, `<data_dir>/bucket`.

    Behind a gate with as many slots as the store has connections (or threads): ask for a view with `for_purpose`.
    Does not touch the network: `probe()` does, and finds or creates the bucket. Raises `ConfigError`.
    """
    if not s3.endpoint and not s3.bucket:
        return GatedObjectStore(LocalObjectStore(data_dir / EMBEDDED_BUCKET, clock), PriorityGate(MAX_THREADS))
    from storage.object_store_s3 import S3ObjectStore

    return GatedObjectStore(S3ObjectStore(s3, clock, rng), PriorityGate(s3.max_concurrency))
