"""SIGTERM, SIGINT and a failure end a real process within a bound, whatever it needs for a clean stop is gone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.support.ports import free_port
from tidelog.cli.subcommands import serve
from tidelog.process import supervisor

pytestmark = pytest.mark.processes

DEADLINE_S = 90.0
SHUTDOWN_MS = 300
GRACE_S = 1.0

PROGRAM = """
import asyncio, sys, time
from tidelog.cli.main import main
from tidelog.cli.subcommands import serve
from tidelog.process.serve import NodeProcess

how, serve.STOP_GRACE_S = sys.argv.pop(1), float(sys.argv.pop(1))
stop = NodeProcess.stop

async def never(self):
    await asyncio.Event().wait()

async def hang(self):
    while True:
        time.sleep(60)

NodeProcess.stop = {"clean": stop, "never": never, "hang": hang}[how]
main()
"""


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def begin(program: str, directory: Path, how: str, grace_s: float, *more: str) -> subprocess.Popen[str]:
    """A `tidelog serve` whose stop is clean, never ends, or hangs the event loop. `more`: further settings."""
    settings = [f"node.data_dir={directory}", f"kafka.port={free_port()}", "admin.port=0", "wal.segment_bytes=16777216"]
    settings += [f"node.shutdown_timeout_ms={SHUTDOWN_MS}", "node.drain_timeout_ms=0", *more]
    assigned = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-c", program, how, str(grace_s), "serve", *assigned],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(directory: Path, how: str, grace_s: float, *more: str) -> subprocess.Popen[str]:
    """As `begin`; returns when it is ready."""
    process = begin(PROGRAM, directory, how, grace_s, *more)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), line
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["never", "hang"])
def test_a_process_that_cannot_stop_ends_within_the_bound(
    tmp_path: Path, running: list[subprocess.Popen[str]], how: str, number: signal.Signals
) -> None:
    process = launch(tmp_path / "data", how, GRACE_S)
    running.append(process)
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert f"has not stopped within {SHUTDOWN_MS / 1000 + GRACE_S:g} s of {number.name}" in errors
    assert time.monotonic() - began >= SHUTDOWN_MS / 1000 + GRACE_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_can_stop_does_so_by_itself(
    tmp_path: Path, running: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = launch(tmp_path / "data", "clean", DEADLINE_S)
    running.append(process)
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_a_process_whose_lines_nobody_reads_any_more_stops_as_others_do(
    tmp_path: Path, running: list[subprocess.Popen[str]]
) -> None:
    process = launch(tmp_path / "data", "clean", DEADLINE_S)
    running.append(process)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
    assert process.wait(DEADLINE_S) == 0, errors
    assert " stopped node=" in errors and "Broken pipe" not in errors


def test_a_process_whose_directory_is_gone_ends(tmp_path: Path, running: list[subprocess.Popen[str]]) -> None:
    process = launch(tmp_path / "data", "clean", 10.0)
    running.append(process)
    shutil.rmtree(tmp_path / "data")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize("how", ["never", "hang"])
def test_a_process_whose_start_fails_and_that_cannot_stop_ends(
    tmp_path: Path, running: list[subprocess.Popen[str]], how: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = begin(PROGRAM, tmp_path / "data", how, GRACE_S, f"admin.port={port}")
        running.append(process)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert f"has not stopped within {SHUTDOWN_MS / 1000 + GRACE_S:g} s of its failure (" in errors


DISK = """
import errno, os, pathlib

def fdatasync(file, disk=os.fdatasync):
    if pathlib.Path("{broken}").exists():
        raise OSError(errno.EIO, "the disk is broken")
    disk(file)

os.fdatasync = fdatasync
"""


def test_a_broker_whose_disk_fails_and_that_cannot_stop_ends(
    tmp_path: Path, running: list[subprocess.Popen[str]]
) -> None:
    """Else it would go on to send heartbeats, and nobody would take over, or start it again."""
    broken = tmp_path / "broken"
    process = begin(DISK.format(broken=broken) + PROGRAM, tmp_path / "data", "never", GRACE_S)
    running.append(process)
    assert process.stdout is not None
    producer = Producer({"bootstrap.servers": process.stdout.readline().strip().removeprefix("ready bootstrap=")})
    producer.produce("t", b"kept")
    assert producer.flush(DEADLINE_S) == 0
    broken.touch()
    producer.produce("t", b"not acknowledged")
    _, errors = process.communicate(timeout=DEADLINE_S)
    producer.purge()
    producer.flush(DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert "of its failure (this process cannot continue: " in errors


SUPERVISOR = """
import sys
from tidelog.cli.main import main
from tidelog.process import supervisor

supervisor.LATE_S = float(sys.argv.pop(1))
main()
"""


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.parametrize(("brokers", "late_s"), [(1, 1.0), (3, 8.0)])
def test_up_ends_though_a_process_is_stopped_and_cannot_even_kill_itself(
    tmp_path: Path, running: list[subprocess.Popen[str]], brokers: int, late_s: float
) -> None:
    settings = [f"node.shutdown_timeout_ms={SHUTDOWN_MS}", "node.drain_timeout_ms=0", "wal.segment_bytes=16777216"]
    assigned = [word for setting in settings for word in ("--set", setting)]
    places = ["--data-dir", str(tmp_path / "data"), "--kafka-port", str(free_port()), "--brokers", str(brokers)]
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(late_s), "up", "--quiet", *places, *assigned],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running.append(process)
    assert process.stdout is not None and process.stdout.readline().startswith("ready ")
    stopped, *_ = children = children_of(process)
    try:
        os.kill(stopped, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert process.returncode == 1
    assert f"was killed: it has not ended within {SHUTDOWN_MS / 1000 + late_s:g} s of SIGTERM" in errors


def test_a_process_kills_itself_before_its_supervisor_does() -> None:
    assert serve.STOP_GRACE_S < supervisor.LATE_S
