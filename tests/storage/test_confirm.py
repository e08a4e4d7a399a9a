"""The confirm offset never goes back, and tells those who wait, in order."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.runtime.errors import StorageFailed
from tidelog.storage.confirm import ConfirmOffset


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50))), st.randoms())
def test_each_listener_runs_once_when_its_offset_is_reached_in_order(
    steps: list[tuple[bool, int]], _rng: random.Random
) -> None:
    confirm = ConfirmOffset()
    heard: list[int] = []
    asked: list[int] = []
    reached = 0
    for is_advance, offset in steps:
        before = len(heard)
        if is_advance:
            confirm.advance(offset)
            reached = max(reached, offset)
            assert heard[before:] == sorted(heard[before:])
        else:
            asked.append(offset)
            confirm.add_listener(offset, partial(heard.append, offset))
        assert confirm.value == reached
        assert sorted(heard) == sorted(one for one in asked if one <= reached)


async def test_listeners_run_before_waiters_resume() -> None:
    async def run() -> list[str]:
        confirm, order = ConfirmOffset(), []

        async def waiter() -> None:
            await confirm.wait(10)
            order.append("waiter")

        task = asyncio.create_task(waiter())
        await asyncio.sleep(0)
        confirm.add_listener(10, lambda: order.append("listener"))
        confirm.advance(9)
        await asyncio.sleep(0)
        assert order == []
        confirm.advance(10)
        await task
        await confirm.wait(10)
        return order

    assert await run() == ["listener", "waiter"]


async def test_after_a_failure_waits_raise_and_nothing_is_confirmed() -> None:
    confirm = ConfirmOffset(5)
    task = asyncio.create_task(confirm.wait(10))
    gone = asyncio.create_task(confirm.wait(10))
    await asyncio.sleep(0)
    gone.cancel()
    confirm.add_listener(10, lambda: pytest.fail("a listener ran after the failure"))
    confirm.fail(StorageFailed("the disk is gone"))
    confirm.fail(StorageFailed("second"))
    confirm.advance(20)
    confirm.add_listener(20, lambda: pytest.fail("a listener ran after the failure"))
    assert confirm.value == 5
    await confirm.wait(5)
    for wait in (task, confirm.wait(6)):
        with pytest.raises(StorageFailed, match="the disk is gone"):
            await wait


def test_who_waits_for_a_confirmation_that_fails_is_told_why_once() -> None:
    confirm, told = ConfirmOffset(5), []

    def never() -> None:
        pytest.fail("a listener ran after the failure")

    confirm.add_listener(5, lambda: told.append("confirmed"), lambda error: told.append(str(error)))
    confirm.add_listener(20, never, lambda error: told.append(f"20: {error}"))
    confirm.add_listener(10, never, lambda error: told.append(f"10: {error}"))
    confirm.add_listener(10, never)
    assert told == ["confirmed"]
    confirm.fail(StorageFailed("gone"))
    confirm.fail(StorageFailed("second"))
    confirm.add_listener(30, never, lambda error: told.append(f"30: {error}"))
    assert told == ["confirmed", "10: gone", "20: gone", "30: gone"]


def test_the_watch_fires_once_and_at_once_when_it_is_late() -> None:
    confirm, fired = ConfirmOffset(), []
    confirm.watch(10, lambda: fired.append(1))
    confirm.watch(20, lambda: fired.append(2))
    confirm.advance(15)
    assert fired == []
    confirm.advance(25)
    confirm.advance(30)
    assert fired == [2]
    confirm.watch(30, lambda: fired.append(3))
    assert fired == [2, 3]
