"""The event loops that a module's async tests run on, by its variable `LOOPS` (`tests/conftest.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

LoopFactories = dict[str, Callable[[], asyncio.AbstractEventLoop]]

ASYNCIO_LOOP: LoopFactories = {"asyncio": asyncio.new_event_loop}
BOTH_LOOPS: LoopFactories = {**ASYNCIO_LOOP, "uvloop": uvloop.new_event_loop}
"""Their transports differ in how they buffer, pause and close."""
