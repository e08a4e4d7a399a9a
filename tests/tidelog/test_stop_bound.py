"""SIGTERM and SIGINT end a real process within a bound, whatever it needs for a clean stop is gone."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port

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


def launch(directory: Path, how: str, grace_s: float, *more: str) -> subprocess.Popen[str]:
    """A `tidelog serve` whose stop is clean, never ends, or hangs the event loop; returns when it is ready."""
    settings = [f"node.data_dir={directory}", f"kafka.port={free_port()}", "admin.port=0", "wal.segment_bytes=16777216"]
    settings += [f"node.shutdown_timeout_ms={SHUTDOWN_MS}", "node.drain_timeout_ms=0", *more]
    assigned = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(grace_s), "serve", *assigned],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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


def test_a_process_whose_directory_is_gone_ends(tmp_path: Path, running: list[subprocess.Popen[str]]) -> None:
    process = launch(tmp_path / "data", "clean", 10.0)
    running.append(process)
    shutil.rmtree(tmp_path / "data")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
