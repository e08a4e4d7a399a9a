"""Waiting for one future with a time-out, where every request and every simulated one does.

`asyncio.timeout` cancels the task that waits, and counts cancellations to tell its own from others'. For one future
that is completed by somebody else a timer that gives it a `TimeoutError` is enough: nothing is cancelled or counted.

Entry: `within`.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def within(future: asyncio.Future[T], seconds: float) -> T:
    """Return the result of a future that nobody else waits for. Raises `TimeoutError` after `seconds`.

    The future is done then; whoever completes it must look at that first (`Future.done`).
    """
    if future.done():
        return future.result()
    timer = asyncio.get_running_loop().call_later(seconds, _expire, future)
    try:
        return await future
    finally:
        timer.cancel()


def _expire(future: asyncio.Future[T]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())
