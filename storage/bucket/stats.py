"""Statistics of an object store: counts, errors, retries, bytes and latency of every operation.

All backends use `StoreStats`; metrics export its `snapshot()`. Invariant: a histogram's buckets never
change, so two snapshots can be subtracted. Recording costs two clock reads and a few additions.

Entry: `StoreStats.measure`.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypedDict

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import AlreadyExists, NotFound
from tidelog.storage.bucket.accounts import BucketAccounts

LATENCY_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the latency buckets, in seconds: a local read at one end, an exhausted retry budget at the other."""


class OperationSnapshot(TypedDict):
    """Statistics of one operation since the store was opened."""

    count: int
    errors: int
    retries: int
    bytes_in: int
    bytes_out: int
    in_flight: int
    latency_sum_s: float
    latency_buckets: dict[str, int]
    """Cumulative counts by upper bound in seconds (`"0.001"` … `"60.0"`, `"+Inf"`), as in Prometheus."""


class OperationStats:
    """Running statistics of one operation."""

    __slots__ = ("buckets", "bytes_in", "bytes_out", "count", "errors", "in_flight", "latency_sum_s", "retries")

    def __init__(self) -> None:
        self.count = 0
        """Calls that ended, with or without success."""
        self.errors = 0
        """Calls that raised. "Not found", "exists already" and a cancelled caller do not count as errors."""
        self.retries = 0
        self.bytes_in = 0
        """Payload bytes received from the store."""
        self.bytes_out = 0
        """Payload bytes sent to the store."""
        self.in_flight = 0
        self.latency_sum_s = 0.0
        self.buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)

    def observe(self, seconds: float) -> None:
        """Count one completed call that took `seconds`."""
        self.count += 1
        self.latency_sum_s += seconds
        self.buckets[bisect.bisect_left(LATENCY_BOUNDS_S, seconds)] += 1

    def snapshot(self) -> OperationSnapshot:
        """Return a copy for export."""
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
    """Statistics of one store, by operation: put, get, get_ranges, head, list, delete.

    Latency is that of the whole call, including retries and the wait for a free slot; `list` counts pages.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._operations: dict[str, OperationStats] = {}
        self.accounts = BucketAccounts()
        """Requests and bytes by purpose and topic."""

    def operation(self, name: str) -> OperationStats:
        """Return the statistics of one operation; create them on first use."""
        found = self._operations.get(name)
        if found is None:
            found = self._operations[name] = OperationStats()
        return found

    @contextmanager
    def measure(self, name: str) -> Iterator[OperationStats]:
        """Count the `with` block as one call of `name`; the caller adds the bytes."""
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
        """Return the statistics of every operation called so far."""
        return {name: stats.snapshot() for name, stats in sorted(self._operations.items())}
