"""Work of the event loop's thread that is too long for one turn of it, as a generator: each `yield` ends a step.

Between two steps others run and change what they like: whoever writes such work takes what must not change first, and
compares at the end what may have. It stays free of I/O, and the same at each run.

Entry: `in_turns`, `at_once`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]


async def in_turns(steps: Steps[T]) -> T:
    """Return the result of the work, each step of which is done in a turn of the event loop of its own."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def at_once(steps: Steps[T]) -> T:
    """Return the result of the work without a pause: where nobody waits, or there is little of it."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
