"""What an object store has done: counts, errors, retries, bytes and latency of every operation.

`StoreStats` is shared by all backends; `snapshot()` is what metrics export. Invariant: a histogram's buckets never
change, so snapshots of two moments can be subtracted. Recording costs two clock reads and a few additions.

Entry: `StoreStats.measure`.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypedDict

from runtime.clock import Clock
from runtime.errors import AlreadyExists, NotFound
from storage.bucket_accounts import BucketAccounts
from storage.object_store import ObjectStore

LATENCY_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the latency buckets, in seconds: a local read at one end, an exhausted retry budget at the other."""


class OperationSnapshot(TypedDict):
    """The figures of one operation since the store was opened."""

    count: int
    errors: int
    retries: int
    bytes_in: int
    bytes_out: int
    in_flight: int
    latency_sum_s: float
    latency_buckets: dict[str, int]
    """Cumulative counts by upper bound in seconds (`"0.001"` … `"60.0"`, `"+Inf"`), as Prometheus has them."""


class OperationStats:
    """The running figures of one operation."""

    __slots__ = ("buckets", "bytes_in", "bytes_out", "count", "errors", "in_flight", "latency_sum_s", "retries")

    def __init__(self) -> None:
        self.count = 0
        """Calls that ended, well or badly."""
        self.errors = 0
        """Calls that raised. "Not found", "exists already" and a cancelled caller are no errors."""
        self.retries = 0
        self.bytes_in = 0
        """Payload bytes received from the store."""
        self.bytes_out = 0
        """Payload bytes sent to the store."""
        self.in_flight = 0
        self.latency_sum_s = 0.0
        self.buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)

    def observe(self, seconds: float) -> None:
        """Count one ended call that took `seconds`."""
        self.count += 1
        self.latency_sum_s += seconds
        self.buckets[bisect.bisect_left(LATENCY_BOUNDS_S, seconds)] += 1

    def snapshot(self) -> OperationSnapshot:
        """A copy for export."""
        cumulative: dict[str, int] = {}
        total = 0
        for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), self.buckets, strict=True):
            total += count
            cumulative[bound] = total
        return OperationSnapshot(
            count=self.count,
            errors=self.errors,
            retries=self.retries,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            in_flight=self.in_flight,
            latency_sum_s=self.latency_sum_s,
            latency_buckets=cumulative,
        )


class StoreStats:
    """The figures of one store, by operation: put, get, get_ranges, head, list, delete.

    Latency is that of the whole call, retries and waiting for a free slot included; `list` counts pages.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._operations: dict[str, OperationStats] = {}
        self.accounts = BucketAccounts()
        """Requests and bytes by purpose and topic."""

    def operation(self, name: str) -> OperationStats:
        """The figures of one operation; made when first asked for."""
        found = self._operations.get(name)
        if found is None:
            found = self._operations[name] = OperationStats()
        return found

    @contextmanager
    def measure(self, name: str) -> Iterator[OperationStats]:
        """Count what runs inside as one call of `name`; the caller adds the bytes."""
        stats = self.operation(name)
        started = self._clock.monotonic()
        stats.in_flight += 1
        try:
            yield stats
        except (NotFound, AlreadyExists, asyncio.CancelledError):
            raise
        except BaseException:
            stats.errors += 1
            raise
        finally:
            stats.in_flight -= 1
            stats.observe(self._clock.monotonic() - started)

    def snapshot(self) -> dict[str, OperationSnapshot]:
        """The figures of every operation called so far."""
        return {name: stats.snapshot() for name, stats in sorted(self._operations.items())}


class MeasuredObjectStore(ObjectStore, Protocol):
    """An `ObjectStore` that counts what it does. All backends here are."""

    @property
    def stats(self) -> StoreStats:
        """The figures since the store was opened."""
        ...
