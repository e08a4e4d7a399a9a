"""Measures the load of this broker's partitions for the reports in heartbeats (`tidelog.controller.model.load`).

Counting costs two additions on the request path. At each sample the counts become rates: exponentially weighted means
with a time constant of `WINDOW_S`, correct from the first sample on (counts and elapsed time are both weighted). The
table contains only partitions with load, so the cost of a sample depends on the number of busy partitions.

Entry: `PartitionLoadMeter`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable

from tidelog.controller.model.load import MAX_HEAVIEST, BrokerLoad, PartitionLoad

WINDOW_S = 10.0
"""Long enough to smooth requests and flushes, short enough for a balancer to see the effect of its moves."""
SILENT = 0.5
"""A partition whose rates are all below this is removed from the table."""


class _PartitionCounts:
    __slots__ = ("bytes_in", "bytes_out", "rate_in", "rate_out", "rate_requests", "requests", "seconds")

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = self.requests = 0
        self.rate_in = self.rate_out = self.rate_requests = 0.0
        """Weighted sums; divided by `seconds` they are rates."""
        self.seconds = 0.0

    def fold(self, decay: float, elapsed_s: float) -> None:
        """Add the counts since the last sample to the weighted sums."""
        self.rate_in = self.rate_in * decay + self.bytes_in
        self.rate_out = self.rate_out * decay + self.bytes_out
        self.rate_requests = self.rate_requests * decay + self.requests
        self.seconds = self.seconds * decay + elapsed_s
        self.bytes_in = self.bytes_out = self.requests = 0

    def rates(self) -> tuple[int, int, int]:
        """Bytes in and out per second, thousandths of a request per second."""
        weight = 1.0 / self.seconds
        return (
            round(self.rate_in * weight),
            round(self.rate_out * weight),
            round(self.rate_requests * 1000 * weight),
        )


class PartitionLoadMeter:
    """Measures the load. All methods run on the event loop's thread; `cpu_s` is the process's processor time."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._monotonic = monotonic
        self._cpu_s = cpu_s
        self._partitions: dict[int, _PartitionCounts] = {}
        self._sampled_s = monotonic()
        self._cpu_sampled_s = cpu_s()
        self._cpu = 0.0
        self._cpu_seconds = 0.0
        self._latest: BrokerLoad | None = None

    def produced(self, stream: int, size_bytes: int) -> None:
        """Count batches appended to the partition with this first stream id."""
        counts = self._partitions.get(stream) or self._first(stream)
        counts.bytes_in += size_bytes
        counts.requests += 1

    def fetched(self, stream: int, size_bytes: int) -> None:
        """Count batches sent to a consumer."""
        counts = self._partitions.get(stream) or self._first(stream)
        counts.bytes_out += size_bytes
        counts.requests += 1

    def _first(self, stream: int) -> _PartitionCounts:
        counts = self._partitions[stream] = _PartitionCounts()
        return counts

    def forget(self, stream: int) -> None:
        """Drop a partition that this broker no longer leads."""
        self._partitions.pop(stream, None)

    def sample(self) -> BrokerLoad:
        """Return the current rates. Calls within 200 ms (each controller gets a heartbeat) return the same report."""
        now_s = self._monotonic()
        elapsed_s = now_s - self._sampled_s
        if self._latest is not None and elapsed_s < 0.2:
            return self._latest
        self._sampled_s, elapsed_s = now_s, max(elapsed_s, 1e-3)
        decay = math.exp(-elapsed_s / WINDOW_S)
        cpu_s = self._cpu_s()
        self._cpu = self._cpu * decay + cpu_s - self._cpu_sampled_s
        self._cpu_seconds = self._cpu_seconds * decay + elapsed_s
        self._cpu_sampled_s = cpu_s
        rows: list[tuple[int, int, int, int]] = []
        for stream, counts in list(self._partitions.items()):
            counts.fold(decay, elapsed_s)
            rates = counts.rates()
            if max(rates[0], rates[1], rates[2] / 1000) < SILENT:
                del self._partitions[stream]
            else:
                rows.append((stream, *rates))
        heaviest = rows if len(rows) <= MAX_HEAVIEST else heapq.nlargest(MAX_HEAVIEST, rows, key=_weight)
        self._latest = BrokerLoad(
            sum(row[1] for row in rows),
            sum(row[2] for row in rows),
            sum(row[3] for row in rows),
            round(1000 * self._cpu / self._cpu_seconds),
            tuple(PartitionLoad(*row) for row in heaviest),
        )
        return self._latest


def _weight(row: tuple[int, int, int, int]) -> tuple[int, int]:
    return row[1] + row[2], row[3]
