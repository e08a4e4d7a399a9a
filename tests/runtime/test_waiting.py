"""Waiting for one future with a time-out."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tidelog.runtime.waiting import within
from tidelog.simulation.world.loop import START_S, VirtualLoop


async def test_the_result_comes_as_soon_as_it_is_there() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 7)
    assert await within(future, 60) == 7
    assert await within(future, 60) == 7


async def test_an_error_is_raised() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_exception, ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        await within(future, 60)


def test_time_is_up_when_it_is_and_the_future_is_done_then() -> None:
    loop = VirtualLoop()

    async def wait() -> None:
        future: asyncio.Future[int] = loop.create_future()
        with pytest.raises(TimeoutError):
            await within(future, 3.5)
        assert loop.time() == START_S + 3.5
        assert future.done()

    loop.run_until_complete(wait())
    loop.close()


def test_who_is_cancelled_while_waiting_leaves_no_timer() -> None:
    loop = VirtualLoop()

    async def wait() -> None:
        future: asyncio.Future[int] = loop.create_future()
        task = loop.create_task(within(future, 3.5))
        await asyncio.sleep(1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert future.cancelled()
        await asyncio.sleep(5)

    loop.run_until_complete(wait())
    loop.close()
