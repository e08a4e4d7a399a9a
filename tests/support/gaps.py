"""How long each of several partitions had nothing to show: the time between two events of the same one."""

from __future__ import annotations

import heapq
import threading
import time


class Gaps:
    """The longest time between two events of each partition since the round began. May be used by several threads."""

    def __init__(self, partitions: int) -> None:
        self._lock = threading.Lock()
        self._last = [0.0] * partitions
        self._longest = [0.0] * partitions
        self._two = [[0.0, 0.0] for _ in range(partitions)]

    def begin_round(self) -> None:
        """Measure from now on."""
        now = time.monotonic()
        with self._lock:
            self._longest = [0.0] * len(self._last)
            self._two = [[0.0, 0.0] for _ in self._last]
            self._last = [now] * len(self._last)

    def note(self, partition: int) -> None:
        """An event of this partition, now."""
        now = time.monotonic()
        with self._lock:
            gap = now - self._last[partition]
            self._longest[partition] = max(self._longest[partition], gap)
            heapq.heappushpop(self._two[partition], gap)
            self._last[partition] = now

    def longest_s(self) -> dict[int, float]:
        """By partition, until now: what has not ended yet counts as far as it has come."""
        now = time.monotonic()
        with self._lock:
            return {
                partition: max(longest, now - last)
                for partition, (longest, last) in enumerate(zip(self._longest, self._last, strict=True))
            }

    def two_longest_s(self) -> dict[int, float]:
        """By partition: the sum of the two longest times between two events, of those that have ended."""
        with self._lock:
            return {partition: sum(two) for partition, two in enumerate(self._two)}
