"""Deadlines by key, sans-I/O: the owner reads the next deadline and passes in the time.

A heap with lazy moves: pushing a deadline further away (what every heartbeat does) is one dictionary write; the heap
entry is corrected when it is popped. Invariants: every key with a deadline has a heap entry at or before it; each due
key is popped once and then has no deadline.

Entry: `TimerTable`, `Now`.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Now(NamedTuple):
    """Both clocks at the same time."""

    mono_ms: int
    """Monotonic, for timers."""
    wall_ms: int
    """Wall clock, for stored and displayed times: milliseconds since the Unix epoch."""


class TimerTable(Generic[K]):
    """Deadlines in milliseconds of any monotonic clock."""

    def __init__(self) -> None:
        self._deadlines: dict[K, int] = {}
        self._queued: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    @property
    def queued(self) -> int:
        """Entries in the queue, those of replaced deadlines included."""
        return len(self._heap)

    def get(self, key: K) -> int | None:
        """The deadline of `key`, if it has one."""
        return self._deadlines.get(key)

    def set(self, key: K, deadline_ms: int) -> None:
        """Set the deadline of `key`, replacing any other."""
        self._deadlines[key] = deadline_ms
        queued = self._queued.get(key)
        if queued is None or queued > deadline_ms:
            self._push(key, deadline_ms)

    def cancel(self, key: K) -> None:
        """Remove the deadline of `key`, if it has one."""
        self._deadlines.pop(key, None)
        if not self._deadlines:
            self._queued.clear()
            self._heap.clear()

    def next_ms(self) -> int | None:
        """Time of the next `pop`: the earliest deadline or before it. None if there is no deadline."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now_ms: int) -> K | None:
        """Remove and return the key with the earliest deadline at or before `now_ms`; None if nothing is due.

        One key per call, because handling it may change or cancel the next deadline.
        """
        while self._heap and self._heap[0][0] <= now_ms:
            queued_ms, _, key = heapq.heappop(self._heap)
            if self._queued.get(key) != queued_ms:
                continue
            del self._queued[key]
            deadline_ms = self._deadlines.get(key)
            if deadline_ms is None:
                continue
            if deadline_ms > queued_ms:
                self._push(key, deadline_ms)
                continue
            del self._deadlines[key]
            return key
        return None

    def _is_live(self, entry: tuple[int, int, K]) -> bool:
        queued_ms, _, key = entry
        if self._queued.get(key) != queued_ms:
            return False
        if key not in self._deadlines:
            del self._queued[key]
            return False
        return True

    def _push(self, key: K, deadline_ms: int) -> None:
        self._pushes += 1
        self._queued[key] = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, self._pushes, key))
