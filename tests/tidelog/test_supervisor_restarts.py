"""The supervisor of `tidelog up` ends restarts that do not help, and goes on with those that may."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import chain, repeat
from pathlib import Path

import click
import pytest

from tests.controller.controller_helpers import until
from tidelog.cli.options import load_config
from tidelog.config import Loaded
from tidelog.process import cluster_layout, supervisor, up_control
from tidelog.process.supervisor import Supervisor
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import StorageFailed, TidelogError

STORAGE_FAILED = 6
NOT_READY = False
RUNS = None
NO_PROCESS = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Process:
    """Stands for a child process; see `tidelog.process.supervisor.ChildProcess`."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.is_deaf = False
        """It only notes the signals that it gets."""
        self.signals: list[int] = []
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._ended = asyncio.Event()

    def says(self, line: str) -> None:
        self._lines.put_nowait(f"{line}\n".encode())

    def end(self, code: int) -> None:
        self.returncode = code
        self._lines.put_nowait(b"")
        self._ended.set()

    @property
    async def stdout(self) -> AsyncIterator[bytes]:
        while line := await self._lines.get():
            yield line

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if self.is_deaf:
            return
        if number == signal.SIGUSR1:
            self.says(supervisor.STOPPED_LINE)
        else:
            self.end(0)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class Processes:
    """How each start of each node goes: with `RUNS` it is ready and runs until it is ended, an error is raised."""

    def __init__(self) -> None:
        self.ends: dict[int, Iterator[tuple[int, bool] | OSError | None]] = {}
        self.starts: dict[int, int] = {}
        self.newest: dict[int, Process] = {}

    async def launch(self, loaded: Loaded, _parent: int) -> Process:
        node = loaded.config.node.id
        self.starts[node] = self.starts.get(node, 0) + 1
        end = next(self.ends[node])
        if isinstance(end, OSError):
            raise end
        process = self.newest[node] = Process()
        if end is RUNS or end[1]:
            process.says(f"{supervisor.READY_PREFIX}127.0.0.1:1")
        if end is not RUNS:
            process.end(end[0])
        return process


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_delay(_base_s: float, _cap_s: float, rng: random.Random) -> Backoff:
        return Backoff(1e-6, 1e-6, rng)

    monkeypatch.setattr(supervisor, "Backoff", no_delay)


@pytest.fixture
def processes() -> Processes:
    return Processes()


def loaded(directory: Path) -> Loaded:
    return load_config(None, (), node__data_dir=str(directory), kafka__port=0)


async def test_a_disk_that_fails_at_every_start_ends_the_supervisor(tmp_path: Path, processes: Processes) -> None:
    one = loaded(tmp_path)
    processes.ends[one.config.node.id] = repeat((STORAGE_FAILED, NOT_READY))
    async with asyncio.timeout(10.0):
        assert await Supervisor([one], lambda _bootstrap: None, one, processes.launch).run() == STORAGE_FAILED
    assert processes.starts[one.config.node.id] == supervisor.FUTILE_STARTS


async def test_a_start_that_fails_in_a_way_that_nobody_expects_is_tried_again_and_ends_the_supervisor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the watching of the process, and `tidelog up` went on without it, silently."""
    one, starts = loaded(tmp_path), 0

    async def launch(_loaded: Loaded, _parent: int) -> Process:
        nonlocal starts
        starts += 1
        raise ValueError("nobody expects this")

    async with asyncio.timeout(10.0):
        assert await Supervisor([one], lambda _bootstrap: None, one, launch).run() == STORAGE_FAILED
    assert starts == supervisor.FUTILE_STARTS
    assert "cannot be started: ValueError: nobody expects this; restarting it" in capsys.readouterr().err


class Unreadable(Process):
    """A process whose output cannot be read."""

    @property
    async def stdout(self) -> AsyncIterator[bytes]:
        if self.returncode is None:
            raise RuntimeError("nobody expects this")
        yield b""


async def test_a_process_that_cannot_be_watched_is_killed_and_started_again(
    tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    one, unreadable = loaded(tmp_path), Unreadable()
    processes.ends[one.config.node.id] = iter([RUNS])

    async def launch(config: Loaded, parent: int) -> Process:
        return await processes.launch(config, parent) if unreadable.signals else unreadable

    ready = asyncio.Event()
    above = Supervisor([one], lambda _bootstrap: ready.set(), one, launch)
    running = asyncio.ensure_future(above.run())
    async with asyncio.timeout(10.0):
        await ready.wait()
        above.stop()
        assert await running == 0
    assert unreadable.signals == [signal.SIGKILL]
    assert "is killed, for it cannot be watched: RuntimeError: nobody expects this" in capsys.readouterr().err


TALKATIVE = f"""
import sys
print("x" * 1_000_000)
if sys.argv[1:]:
    sys.exit(print('{supervisor.FAILED_PREFIX}{{"kind": "Conf') or 2)
print("{supervisor.READY_PREFIX}127.0.0.1:1", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("fail",), 2)])
async def test_a_real_process_may_print_what_it_likes(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    """A line that is longer than the buffer of the pipe, and an error of which only a part was told."""
    one, ready = loaded(tmp_path), asyncio.Event()

    async def launch(_loaded: Loaded, _parent: int) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", TALKATIVE, *arguments, stdin=pipe, stdout=pipe
        )

    above = Supervisor([one], lambda _bootstrap: ready.set(), one, launch)
    running = asyncio.ensure_future(above.run())
    async with asyncio.timeout(60.0):
        if not arguments:
            await ready.wait()
            above.stop()
        assert await running == code


async def test_it_ends_also_when_the_process_had_been_ready_once(tmp_path: Path, processes: Processes) -> None:
    one = loaded(tmp_path)
    processes.ends[one.config.node.id] = repeat((STORAGE_FAILED, True))
    async with asyncio.timeout(10.0):
        assert await Supervisor([one], lambda _bootstrap: None, one, processes.launch).run() == STORAGE_FAILED


async def test_a_disk_that_recovers_in_time_only_delays_the_start(tmp_path: Path, processes: Processes) -> None:
    one = loaded(tmp_path)
    failures = [(STORAGE_FAILED, NOT_READY)] * (supervisor.FUTILE_STARTS - 1)
    processes.ends[one.config.node.id] = chain(failures, [(5, NOT_READY)], failures, [RUNS])
    ready = asyncio.Event()
    above = Supervisor([one], lambda _bootstrap: ready.set(), one, processes.launch)
    running = asyncio.ensure_future(above.run())
    async with asyncio.timeout(10.0):
        await ready.wait()
        above.stop()
        assert await running == 0


async def test_one_broker_whose_disk_fails_does_not_end_the_others(
    tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    base = loaded(tmp_path)
    nodes = cluster_layout.plan(base, 2)
    ready = asyncio.Event()
    processes.ends = {1: iter([RUNS]), 2: chain([RUNS], repeat((STORAGE_FAILED, NOT_READY)))}
    above = Supervisor(nodes, lambda _bootstrap: ready.set(), base, processes.launch)
    running = asyncio.ensure_future(above.run())
    async with asyncio.timeout(10.0):
        await ready.wait()
        processes.newest[2].end(STORAGE_FAILED)
        said = ""

        def given_up() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "is not started again" in said

        await until(given_up)
        assert not running.done()
        above.stop()
        assert await running == STORAGE_FAILED
    assert processes.starts == {1: 1, 2: supervisor.FUTILE_STARTS}


async def test_a_process_that_an_operator_restarts_is_started_at_once_as_often_as_it_is_asked_for(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def long_delay(_base_s: float, _cap_s: float, rng: random.Random) -> Backoff:
        return Backoff(1000.0, 1000.0, rng)

    monkeypatch.setattr(supervisor, "Backoff", long_delay)
    one = loaded(tmp_path)
    times = 2 * supervisor.FUTILE_STARTS
    processes.ends[one.config.node.id] = chain([(supervisor.RESTART_EXIT_CODE, True)] * times, [RUNS])
    above = Supervisor([one], lambda _bootstrap: None, one, processes.launch)
    running = asyncio.ensure_future(above.run())
    async with asyncio.timeout(10.0):
        await until(lambda: processes.starts.get(one.config.node.id) == times + 1)
        above.stop()
        assert await running == 0
    assert capsys.readouterr().err.count("as an operator asked") == times


async def test_a_restart_that_was_asked_for_while_the_supervisor_stops_ends_it_without_an_error(
    tmp_path: Path, processes: Processes
) -> None:
    base = loaded(tmp_path)
    processes.ends = {1: iter([RUNS])}
    ready = asyncio.Event()
    above = Supervisor([base], lambda _bootstrap: ready.set(), base, processes.launch)
    processes.ends = {base.config.node.id: iter([RUNS])}
    running = asyncio.ensure_future(above.run())
    async with asyncio.timeout(10.0):
        await ready.wait()
        above.stop()
        processes.newest[base.config.node.id].end(supervisor.RESTART_EXIT_CODE)
        assert await running == 0


async def cluster_of_two(directory: Path, processes: Processes) -> tuple[Supervisor, asyncio.Task[int]]:
    """A supervisor of two brokers that are ready."""
    base = loaded(directory)
    ready = asyncio.Event()
    processes.ends = {1: iter([RUNS]), 2: iter([RUNS])}
    above = Supervisor(cluster_layout.plan(base, 2), lambda _bootstrap: ready.set(), base, processes.launch)
    running = asyncio.create_task(above.run())
    await ready.wait()
    return above, running


async def test_all_end_though_one_was_removed_while_the_others_were_stopping(
    tmp_path: Path, processes: Processes
) -> None:
    async with asyncio.timeout(10.0):
        above, running = await cluster_of_two(tmp_path, processes)
        kept, removed = (processes.newest[each] for each in (1, 2))
        kept.is_deaf = removed.is_deaf = True
        removing = asyncio.create_task(asyncio.to_thread(up_control.ask, tmp_path, {"do": "stop", "id": 2}))
        await until(lambda: signal.SIGTERM in removed.signals)
        above.stop()
        await until(lambda: signal.SIGUSR1 in kept.signals)
        removed.end(0)
        assert (await removing)["id"] == 2
        kept.says(supervisor.STOPPED_LINE)
        await until(lambda: signal.SIGTERM in kept.signals)
        kept.end(0)
        assert await running == 0


@pytest.mark.parametrize("code", [1, 2, 4, 7, 8, 9])
async def test_an_added_broker_that_can_never_start_is_given_up_and_taken_back(
    code: int, tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(10.0):
        above, running = await cluster_of_two(tmp_path, processes)
        processes.ends |= {3: repeat((code, NOT_READY)), 4: iter([RUNS])}
        with pytest.raises(TidelogError, match="broker 3 cannot start"):
            await asyncio.to_thread(up_control.ask, tmp_path, {"do": "add"})
        assert processes.starts[3] == 1, "no restart can help"
        assert "before it was ready" in capsys.readouterr().err
        assert not running.done()
        added = await asyncio.to_thread(up_control.ask, tmp_path, {"do": "add"})
        assert added["id"] == 4, "ids are not used again"
        listed = await asyncio.to_thread(up_control.ask, tmp_path, {"do": "list"})
        assert sorted(listed["brokers"]) == ["1", "2", "4"]
        above.stop()
        assert await running == 0
    assert [one.config.node.id for one in cluster_layout.plan(loaded(tmp_path), 2)] == [1, 2, 4]


async def test_a_layout_that_cannot_be_written_is_told_to_who_asked(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Loaded:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "cluster.json"))

    async with asyncio.timeout(10.0):
        above, running = await cluster_of_two(tmp_path, processes)
        with monkeypatch.context() as patch:
            patch.setattr(cluster_layout, "add_broker", full)
            with pytest.raises(StorageFailed, match=r"No space left on device.*cluster\.json"):
                await asyncio.to_thread(up_control.ask, tmp_path, {"do": "add"})
        assert not running.done()
        above.stop()
        assert await running == 0


async def test_an_added_broker_whose_bucket_does_not_answer_at_first_is_started_again(
    tmp_path: Path, processes: Processes
) -> None:
    async with asyncio.timeout(10.0):
        above, running = await cluster_of_two(tmp_path, processes)
        processes.ends[3] = iter([(5, NOT_READY), (5, NOT_READY), RUNS])
        assert (await asyncio.to_thread(up_control.ask, tmp_path, {"do": "add"}))["id"] == 3
        above.stop()
        assert await running == 0


async def test_a_broker_that_cannot_start_again_is_given_up_and_does_not_end_the_others(
    tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    base = loaded(tmp_path)
    processes.ends = {1: iter([RUNS]), 2: chain([(8, True)], repeat((8, NOT_READY)))}
    above = Supervisor(cluster_layout.plan(base, 2), lambda _bootstrap: None, base, processes.launch)
    running = asyncio.create_task(above.run())
    told = ""

    def is_given_up() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "is not started again" in told

    async with asyncio.timeout(10.0):
        await until(is_given_up)
        assert not running.done()
        above.stop()
        assert await running == 8
    assert processes.starts == {1: 1, 2: 1 + supervisor.FUTILE_STARTS}


async def test_a_process_that_the_system_cannot_start_now_is_started_later(
    tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    base = loaded(tmp_path)
    processes.ends = {1: iter([RUNS]), 2: iter([NO_PROCESS, (-9, True), NO_PROCESS, NO_PROCESS, RUNS])}
    above = Supervisor(cluster_layout.plan(base, 2), lambda _bootstrap: None, base, processes.launch)
    running = asyncio.create_task(above.run())
    async with asyncio.timeout(10.0):
        await until(lambda: processes.starts.get(2) == 5)
        assert not running.done()
        above.stop()
        assert await running == 0
    assert "broker process 2 cannot be started: [Errno 11] Resource temporarily unavailable" in capsys.readouterr().err


async def test_a_process_that_the_system_never_starts_ends_the_supervisor(tmp_path: Path, processes: Processes) -> None:
    one = loaded(tmp_path)
    processes.ends[one.config.node.id] = repeat(NO_PROCESS)
    async with asyncio.timeout(10.0):
        assert await Supervisor([one], lambda _bootstrap: None, one, processes.launch).run() == STORAGE_FAILED
    assert processes.starts[one.config.node.id] == supervisor.FUTILE_STARTS


async def test_processes_are_started_again_although_nobody_can_be_told(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal is gone, or the program that read what is said."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    one = loaded(tmp_path)
    processes.ends[one.config.node.id] = iter([(-9, True), (supervisor.RESTART_EXIT_CODE, True), (5, True), RUNS])
    with os.fdopen(write_end, "wb", buffering=0) as nowhere:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(nowhere, write_through=True))
        above = Supervisor([one], click.echo, one, processes.launch)
        running = asyncio.create_task(above.run())
        async with asyncio.timeout(10.0):
            await until(lambda: processes.starts.get(one.config.node.id) == 4)
            processes.newest[one.config.node.id].says("a line for whoever reads it")
            above.stop()
            assert await running == 0


async def test_a_process_that_ends_by_a_signal_without_a_name_is_started_again(
    tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was not, and nothing was said: `tidelog up` went on without it, also as the last one."""
    one = loaded(tmp_path)
    node, number = one.config.node.id, signal.SIGRTMIN + 3  # that of a machine that stops
    processes.ends[node] = chain([(-number, True)], repeat(RUNS))
    watching = Supervisor([one], lambda _bootstrap: None, one, processes.launch)
    run = asyncio.create_task(watching.run())
    await until(lambda: processes.starts.get(node) == 2)
    assert f"ended (signal {number}); restarting it" in capsys.readouterr().err
    watching.stop()
    assert await run == 0


async def test_a_defect_in_the_watch_of_the_only_process_is_told_and_ends_the_supervisor(
    tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Defective(Backoff):
        def next_delay_s(self) -> float:
            raise RuntimeError("planted")

    monkeypatch.setattr(supervisor, "Backoff", lambda *_: Defective(1.0, 1.0, random.Random()))
    one = loaded(tmp_path)
    processes.ends[one.config.node.id] = repeat((-signal.SIGKILL, True))
    async with asyncio.timeout(10.0):
        assert await Supervisor([one], lambda _bootstrap: None, one, processes.launch).run() == STORAGE_FAILED
    assert "is not started again: RuntimeError: planted" in capsys.readouterr().err
