"""Time-outs that rarely expire, with one timer of the event loop for all of them.

A timer of the loop for each request costs more than the rest of its acknowledgement. Here a deadline is an entry in a
slot of a tenth of a second. One timer handles the slots that are due, and runs only while there are entries. A callback
runs up to `TICK_S` late, never early. A completed operation removes its entry, so nothing is kept alive longer than
needed.

Entry: `Deadlines`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1


class Deadlines:
    """The deadlines of one event loop, the one that the first was added on."""

    __slots__ = ("_loop", "_slots", "_timer")

    def __init__(self) -> None:
        self._slots: dict[int, dict[Callable[[], None], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # looking it up for each request costs a system call

    def __len__(self) -> int:
        """Return the number of pending deadlines."""
        return sum(map(len, self._slots.values()))

    def add(self, seconds: float, callback: Callable[[], None]) -> int:
        """Call `callback` after `seconds` (≥ 0), unless it is discarded. Returns the slot that `discard` needs."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        slot = int((loop.time() + seconds) / TICK_S) + 1
        entries = self._slots.get(slot)
        if entries is None:
            entries = self._slots[slot] = {}
            if self._timer is None:
                self._timer = loop.call_later(TICK_S, self._tick, loop)
        entries[callback] = None
        return slot

    def discard(self, slot: int, callback: Callable[[], None]) -> None:
        """Cancel a deadline. Does nothing if it has expired or was cancelled."""
        entries = self._slots.get(slot)
        if entries is not None:
            entries.pop(callback, None)
            if not entries:
                del self._slots[slot]

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(TICK_S, self._tick, loop) if self._slots else None
        now = loop.time() / TICK_S
        for slot in sorted(slot for slot in self._slots if slot <= now):
            while entries := self._slots.get(slot):
                callback = next(iter(entries))
                self.discard(slot, callback)  # before the call: if it raises, the next tick continues after it
                callback()
