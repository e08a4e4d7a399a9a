"""Limits cold reads to one slice per few iterations of the event loop, so that other tasks run in between.

On the event loop a cold read (finding records, returning them, writing the response) costs a part of a
millisecond per megabyte. Ten replays served from the block cache, one right after the other, would delay
a producer's request by all of them, and would take any share of a busy loop. So a slice (the
records of one read, about `max_bytes` of a Fetch) is only taken when `TURNS` iterations of the loop have passed since
the last one. An iteration of an idle loop takes microseconds, which costs a replay nothing; an iteration of a busy loop
takes as long as the work of the producers that it serves, and they get that many per slice. Waiting reads are served
in order.

Reads of partitions that are being opened take no turn: producers wait for all of them.

Entry: `ColdTurns`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

TURNS: Final = 2
"""Iterations of the loop between two slices: an iteration of a busy loop takes much longer than a slice."""


class ColdTurns:
    """The schedule of slices. Used on one event loop."""

    def __init__(self, turns: int = TURNS) -> None:
        self._turns = turns
        self._left = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.waits = 0
        """Slices that had to wait."""

    @property
    def is_free(self) -> bool:
        """Return whether a slice may be taken now."""
        return not self._left and not self._waiting

    def try_take(self) -> bool:
        """Take a slice if one may be taken now."""
        if not self.is_free:
            return False
        self._begin()
        return True

    async def take(self) -> None:
        """Wait until a slice may be taken, and take it."""
        if self.try_take():
            return
        self.waits += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _begin(self) -> None:
        self._left = self._turns
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._left -= 1
        if self._left:
            asyncio.get_running_loop().call_soon(self._turn)
            return
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # else its caller was cancelled
                future.set_result(None)
                self._begin()
                return
