"""Background tasks and exceptions that nobody expected: noted, retried where that is possible, and never silent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.kafka_world import until
from tidelog.runtime import task_errors, tasks
from tidelog.runtime.errors import Closed, StorageFailed, Unavailable
from tidelog.runtime.network import TcpNetwork, refuses
from tidelog.runtime.task_errors import ERRORS, TaskErrors, expected
from tidelog.runtime.tasks import TaskSet, unless_failed

UNLISTED = [RuntimeError("odd"), ValueError("Invalid file descriptor: -1"), KeyError("odd"), OSError(71, "odd")]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RESTART_BASE_S", 0.001)


@pytest.mark.parametrize("error", UNLISTED, ids=lambda error: type(error).__name__)
async def test_a_kept_loop_goes_on_after_an_error_that_nobody_listed(error: Exception) -> None:
    heard: list[tuple[str, BaseException, bool]] = []
    unlisten = ERRORS.listen(lambda *told: heard.append(told))
    failures: list[BaseException] = []
    work = TaskSet("kept", failures.append)
    runs = 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise error
        await asyncio.get_running_loop().create_future()

    work.keep(loop, "loop")
    await until(lambda: runs == 4, "it runs again")
    await work.close()
    unlisten()
    assert heard == [("kept", error, False)] * 3 and not failures
    assert ERRORS.counts()["kept"] >= 3
    assert any("unexpected error of kept" in problem for problem in ERRORS.problems())


@pytest.mark.parametrize("error", [Closed("on purpose"), AssertionError("a rule")], ids=["purpose", "assertion"])
async def test_what_is_raised_on_purpose_and_a_failed_assertion_end_a_kept_loop(error: Exception) -> None:
    failures: list[BaseException] = []
    work = TaskSet("ends", failures.append)

    async def loop() -> None:
        raise error

    work.keep(loop, "loop")
    await until(lambda: bool(failures), "it has ended")
    assert failures == [error] and not len(work)


@pytest.mark.parametrize("error", [Closed("on purpose"), AssertionError("a rule")], ids=["purpose", "assertion"])
async def test_so_does_what_a_task_of_a_group_in_it_raises(error: Exception) -> None:
    """It came in an `ExceptionGroup`, which was taken for an error that nobody listed, and was tried again."""
    failures: list[BaseException] = []
    work = TaskSet("ends", failures.append)

    async def fail() -> None:
        raise error

    async def loop() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    work.keep(loop, "loop")
    await until(lambda: bool(failures), "it has ended")
    assert failures == [error] and not len(work)


async def test_a_failed_assertion_is_retried_where_nobody_can_end_the_process() -> None:
    work = TaskSet("nobody")
    runs = 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        assert runs > 2, "not yet"

    await work.keep(loop, "loop")
    assert runs == 3


async def test_a_task_that_is_not_kept_is_told_as_ended() -> None:
    heard: list[tuple[str, BaseException, bool]] = []
    unlisten = ERRORS.listen(lambda *told: heard.append(told))
    work = TaskSet("once")
    error = RuntimeError("odd")

    async def fail() -> None:
        raise error

    work.spawn(fail(), "fail")
    await until(lambda: bool(heard), "it was told")
    unlisten()
    assert heard == [("once", error, True)]


async def test_what_is_in_the_log_already_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    errors, heard, error = TaskErrors(), [], KeyError("a")
    errors.listen(lambda *told: heard.append(told))
    errors.count("a", error, ended=False)
    assert not caplog.records
    assert heard == [("a", error, False)]
    assert errors.counts() == {"a": 1}
    assert errors.problems()


async def test_problems_are_shown_for_a_while_and_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_errors, "MAX_PLACES", 2)
    errors = TaskErrors()
    for place in ("a", "b", "c", "d"):
        errors.note(place, KeyError(place), ended=False)
    assert errors.counts() == {"a": 1, "b": 1, "other": 2}
    assert len(errors.problems()) == 3
    monkeypatch.setattr(task_errors, "SHOWN_S", 0.0)
    assert not errors.problems() and errors.counts()["other"] == 2


def test_an_expected_error_stays_what_it_is_and_an_assertion_is_raised() -> None:
    error = Closed("gone")
    assert expected("x", error) is error
    assert expected("x", ExceptionGroup("tasks", [error])) is error
    for broken in (AssertionError("a rule"), ExceptionGroup("tasks", [error, AssertionError("a rule")])):
        with pytest.raises(AssertionError):
            expected("x", broken)


class BrokenLoop:
    """A loop whose connections fail as they did when a peer reset them."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def create_connection(self, *_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", UNLISTED, ids=lambda error: type(error).__name__)
async def test_a_connect_that_fails_in_an_unknown_way_is_unavailable(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", BrokenLoop(error).create_connection)
    with pytest.raises(Unavailable):
        await TcpNetwork().connect(asyncio.Protocol, "127.0.0.1", 1, timeout_s=1.0)
    assert not await refuses(TcpNetwork(), "127.0.0.1", 1, 1.0)


async def waits(ended: asyncio.Event) -> None:
    """Never returns by itself; `ended` tells that it was cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def test_work_that_waits_for_a_part_that_failed_ends_with_its_failure() -> None:
    """A broker waited for a quorum that needed the failed controller of its own process (seed 1388)."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()
    waiting = asyncio.ensure_future(unless_failed(waits(ended), failed))
    await asyncio.sleep(0)
    failed.set_exception(StorageFailed("the disk"))
    with pytest.raises(StorageFailed, match="the disk"):
        await waiting
    assert ended.is_set()


async def test_work_that_ends_or_is_cancelled_leaves_nothing_behind() -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await unless_failed(asyncio.sleep(0), failed)
    ended = asyncio.Event()
    waiting = asyncio.ensure_future(unless_failed(waits(ended), failed))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set() and not failed.done()
