"""Which object store the configuration means.

Entry: `open_store`; `open_backend` for the store without the gate. The S3 client is imported only where it is used:
that alone takes 0.7 s.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from runtime.clock import Clock
from storage.object_store_local import MAX_THREADS, LocalObjectStore
from storage.object_store_stats import MeasuredObjectStore
from storage.priority_gate import GatedObjectStore, PriorityGate
from storage.settings import S3Settings

EMBEDDED_BUCKET: Final = "bucket"
"""The folder of the embedded store under the data directory."""


def open_store(s3: S3Settings, data_dir: Path, clock: Clock, rng: random.Random) -> GatedObjectStore:
    """The store that `s3` names; without endpoint and bucket the embedded one, `<data_dir>/bucket`.

    Behind a gate with as many slots as the store has connections (or threads): ask for a view with `for_purpose`.
    Does not touch the network: `probe()` does, and finds or creates the bucket. Raises `ConfigError`.
    """
    slots = MAX_THREADS if s3.is_embedded else s3.max_concurrency
    return GatedObjectStore(open_backend(s3, data_dir, clock, rng), PriorityGate(slots))


def open_backend(s3: S3Settings, data_dir: Path, clock: Clock, rng: random.Random) -> MeasuredObjectStore:
    """As `open_store`, without the gate: any number of requests go at once, whatever they are for."""
    if s3.is_embedded:
        return LocalObjectStore(data_dir / EMBEDDED_BUCKET, clock)
    from storage.object_store_s3 import S3ObjectStore

    return S3ObjectStore(s3, clock, rng)
