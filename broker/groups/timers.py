"""Deadlines by key, without I/O: the owner asks for the next one and hands in the time.

A heap with lazy moves: pushing a deadline further away (what every heartbeat does) is one dictionary write; the heap
entry is put right when it comes up. Invariants: every key with a deadline has a heap entry at or before it; each due
key is popped once and then has no deadline.

Entry: `TimerTable`.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class TimerTable(Generic[K]):
    """Deadlines in milliseconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._deadlines: dict[K, int] = {}
        self._queued: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    def get(self, key: K) -> int | None:
        """The deadline of `key`, if it has one."""
        return self._deadlines.get(key)

    def set(self, key: K, deadline_ms: int) -> None:
        """Give `key` this deadline, in place of any other."""
        self._deadlines[key] = deadline_ms
        queued = self._queued.get(key)
        if queued is None or queued > deadline_ms:
            self._push(key, deadline_ms)

    def cancel(self, key: K) -> None:
        """Take the deadline of `key` away; none is fine."""
        self._deadlines.pop(key, None)
        if not self._deadlines:
            self._queued.clear()
            self._heap.clear()

    def next_ms(self) -> int | None:
        """When to call `pop` next: at the earliest deadline or before it. None if there is no deadline."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now_ms: int) -> K | None:
        """The key with the earliest deadline at or before `now_ms`, which it loses; None if nothing is due.

        One at a time, because what the owner does about one may move or cancel the next.
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
