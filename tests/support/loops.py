"""The event loops that a module's async tests run on, by its variable `LOOPS` (`tests/conftest.py`)."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import uvloop

LoopFactories = dict[str, Callable[[], asyncio.AbstractEventLoop]]

ASYNCIO_LOOP: LoopFactories = {"asyncio": asyncio.new_event_loop}
BOTH_LOOPS: LoopFactories = {**ASYNCIO_LOOP, "uvloop": uvloop.new_event_loop}
"""Their transports differ in how they buffer, pause and close."""


WALL_MS = 1_700_000_000_000
"""`LoopClock.time_ms` at the loop's zero."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves its loop's time."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        assert timeout is not None, "nothing will ever happen: a deadlock"
        self.loop.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time jumps to the next timer when nothing is ready: nobody waits. Not for work in threads."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self.now_s = 1000.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


VIRTUAL_LOOP = {"virtual": VirtualLoop}
"""`LOOPS` of a module of tests whose time is virtual (`tests/conftest.py`)."""


class LoopClock:
    """The virtual loop's time, on both clocks."""

    def time_ms(self) -> int:
        return WALL_MS + int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
