"""What moves share: rounds of uploads, and commands for many partitions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tidelog.broker.partitions.coalesce import COMMANDS_AT_ONCE, ITEMS_A_COMMAND, Answers, Commands, Rounds
from tidelog.runtime.errors import Closed, Fenced, NotFound, TidelogError, Unavailable
from tidelog.runtime.tasks import TaskSet


@contextlib.asynccontextmanager
async def task_set() -> AsyncIterator[TaskSet]:
    """A task set, which is closed afterwards."""
    tasks = TaskSet("test")
    try:
        async with asyncio.timeout(30):
            yield tasks
    finally:
        await tasks.close()


async def test_all_who_ask_at_the_same_time_are_served_by_one_round() -> None:
    async with task_set() as tasks:

        async def upload() -> None:
            await asyncio.sleep(0)

        rounds = Rounds(upload, tasks, "upload")
        await asyncio.gather(*(rounds.join() for _ in range(50)))
        assert rounds.count == 1


async def test_who_asks_during_a_round_is_served_by_the_next() -> None:
    async with task_set() as tasks:
        gate = asyncio.Semaphore(0)
        begun = asyncio.Event()

        async def upload() -> None:
            begun.set()
            await gate.acquire()

        rounds = Rounds(upload, tasks, "upload")
        first = asyncio.create_task(rounds.join())
        await begun.wait()
        later = [asyncio.create_task(rounds.join()) for _ in range(10)]
        await asyncio.sleep(0)
        gate.release()
        await first
        assert not any(each.done() for each in later)
        gate.release()
        await asyncio.gather(*later)
        assert rounds.count == 2


async def test_a_round_that_fails_fails_for_those_it_served_only() -> None:
    async with task_set() as tasks:
        faults: list[Exception] = [Unavailable("the controller is away")]

        async def upload() -> None:
            if faults:
                raise faults.pop()

        rounds = Rounds(upload, tasks, "upload")
        found = await asyncio.gather(rounds.join(), rounds.join(), return_exceptions=True)
        assert [type(each) for each in found] == [Unavailable, Unavailable]
        await rounds.join()


async def test_who_gives_up_waiting_takes_nothing_from_the_others() -> None:
    async with task_set() as tasks:
        gate = asyncio.Event()

        async def upload() -> None:
            await gate.wait()

        rounds = Rounds(upload, tasks, "upload")
        impatient, patient = asyncio.create_task(rounds.join()), asyncio.create_task(rounds.join())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        gate.set()
        await patient
        assert impatient.cancelled()


async def test_a_defect_ends_nobody_s_wait_silently() -> None:
    async with task_set() as tasks:

        async def upload() -> None:
            raise ZeroDivisionError

        async def send(kind: int, items: list[int]) -> Answers:
            raise ZeroDivisionError

        with pytest.raises(Closed):
            await Rounds(upload, tasks, "upload").join()
        commands = Commands(send, tasks, "hand-over")
        found = await asyncio.gather(
            *(commands.ask(1, number) for number in range(3 * ITEMS_A_COMMAND)), return_exceptions=True
        )
        assert all(isinstance(each, Closed) for each in found)


async def test_each_is_given_its_own_answer_and_commands_are_bounded() -> None:
    async with task_set() as tasks:
        sent: list[list[int]] = []
        under_way = most = 0

        async def send(kind: int, items: list[int]) -> Answers:
            nonlocal under_way, most
            sent.append(items)
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.001)
            under_way -= 1
            return [NotFound(str(item)) if item % 2 else None for item in items]

        commands = Commands(send, tasks, "hand-over")
        found = await asyncio.gather(*(commands.ask(1, number) for number in range(500)))
        for number, error in enumerate(found):
            assert (error is None) if number % 2 == 0 else (error is not None and error.message == str(number))
        assert sorted(item for items in sent for item in items) == list(range(500)), "each is asked once"
        assert max(map(len, sent)) <= ITEMS_A_COMMAND
        assert most <= COMMANDS_AT_ONCE
        assert commands.count == len(sent) <= 500 // ITEMS_A_COMMAND + 2


async def test_a_command_names_one_master_epoch() -> None:
    async with task_set() as tasks:
        sent: list[tuple[int, list[int]]] = []

        async def send(kind: int, items: list[int]) -> Answers:
            sent.append((kind, items))
            return [None] * len(items)

        commands = Commands(send, tasks, "hand-over")
        await asyncio.gather(*(commands.ask(number // 5, number) for number in range(10)))
        assert sorted(sent) == [(0, [0, 1, 2, 3, 4]), (1, [5, 6, 7, 8, 9])]


async def test_an_error_of_the_whole_command_is_everybody_s_and_the_next_ones_go_on() -> None:
    async with task_set() as tasks:
        errors: list[TidelogError] = [Fenced("a stale master epoch")]

        async def send(kind: int, items: list[int]) -> Answers:
            if errors:
                raise errors.pop()
            return [None] * len(items)

        commands = Commands(send, tasks, "hand-over")
        found = await asyncio.gather(*(commands.ask(1, number) for number in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [Fenced] * 3
        assert await commands.ask(1, 4) is None
