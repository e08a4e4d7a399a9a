"""Slices of cold reads and the turns of the loop between them (`tidelog.storage.reads.turns`)."""

from __future__ import annotations

import asyncio

from tidelog.storage.reads.turns import TURNS, ColdTurns


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_between_two_slices_the_loop_turns_some_times() -> None:
    turns = ColdTurns()
    assert turns.try_take()
    seen = 0
    while not turns.try_take():
        await asyncio.sleep(0)
        seen += 1
    assert seen >= TURNS


async def test_those_who_wait_go_in_order_and_before_newcomers() -> None:
    turns, order = ColdTurns(), []

    async def reader(name: int) -> None:
        await turns.take()
        order.append(name)

    readers = [asyncio.ensure_future(reader(name)) for name in range(5)]
    await asyncio.sleep(0)
    assert order == [0]
    assert not turns.try_take()
    await asyncio.gather(*readers)
    assert order == [0, 1, 2, 3, 4]
    assert turns.waits == 4


async def test_a_reader_that_goes_away_holds_nobody_up() -> None:
    turns = ColdTurns()
    await turns.take()
    readers = [asyncio.ensure_future(turns.take()) for _ in range(3)]
    await asyncio.sleep(0)
    for one in readers[:2]:
        one.cancel()
    async with asyncio.timeout(60):
        await readers[2]
    await turns_of_the_loop(2 * TURNS)
    assert turns.try_take()


async def test_others_get_their_turns_while_many_read() -> None:
    turns, slices, others = ColdTurns(), 0, 0

    async def reader() -> None:
        nonlocal slices
        while slices < 100:
            await turns.take()
            slices += 1

    async def other() -> None:
        nonlocal others
        while slices < 100:
            await asyncio.sleep(0)
            others += 1

    await asyncio.gather(other(), *(reader() for _ in range(8)))
    assert others >= (TURNS - 1) * 100
