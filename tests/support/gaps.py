"""How long each of several partitions had nothing to show: the time between two events of the same one.

Or the time from something that was done to the first event that was asked for after it.
"""

from __future__ import annotations

import heapq
import threading
import time
from math import inf


class Gaps:
    """The longest time between two events of each partition since the round began. May be used by several threads."""

    def __init__(self, partitions: int) -> None:
        self._lock = threading.Lock()
        self._last = [0.0] * partitions
        self._longest = [0.0] * partitions
        self._two = [[0.0, 0.0] for _ in range(partitions)]
        self._asked_from = inf
        self._answered: dict[int, float] = {}

    def begin_round(self) -> None:
        """Measure from now on."""
        now = time.monotonic()
        with self._lock:
            self._longest = [0.0] * len(self._last)
            self._two = [[0.0, 0.0] for _ in self._last]
            self._last = [now] * len(self._last)

    def note(self, partition: int, asked_at: float = -inf) -> None:
        """An event of this partition, now; `asked_at`: when it was asked for, monotonic seconds."""
        now = time.monotonic()
        with self._lock:
            gap = now - self._last[partition]
            self._longest[partition] = max(self._longest[partition], gap)
            heapq.heappushpop(self._two[partition], gap)
            self._last[partition] = now
            if asked_at >= self._asked_from:
                self._answered.setdefault(partition, now)

    def mark(self) -> None:
        """Note the first event of each partition that is asked for from now on."""
        with self._lock:
            self._asked_from, self._answered = time.monotonic(), {}

    def answered_s(self, since: float) -> dict[int, float]:
        """By partition: from `since` (monotonic seconds) until the first event asked for after `mark`; or until now."""
        now = time.monotonic()
        with self._lock:
            return {partition: self._answered.get(partition, now) - since for partition in range(len(self._last))}

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
