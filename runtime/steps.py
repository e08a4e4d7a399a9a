"""Work of the event loop's thread that is too long for one turn of it, as a generator: each `yield` ends a step.

Between two steps others run and change what they like: whoever writes such work takes what must not change first, and
compares at the end what may have. It stays free of I/O, and the same at each run.

Entry: `in_turns`, `at_once`; `paced` for coroutines with many items.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable
from typing import TypeAlias, TypeVar

T = TypeVar("T")

ITEMS_A_TURN = 256
"""Items of a request, some ten to two hundred microseconds each, after which others have a turn."""

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


async def paced(items: Iterable[T], items_a_turn: int = ITEMS_A_TURN) -> AsyncIterator[T]:
    """Iterate over the items, and let others run after every so many of them."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % items_a_turn == 0:
            await asyncio.sleep(0)
