"""`tidelog up` has its directory for itself: of several started at once, one runs and the others say which."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import until
from tidelog.process.data_dir import UP_LOCK_FILE, WrongDataDirectory, lock_file


def start(directory: Path, brokers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tidelog", "up", "--quiet", "--data-dir", str(directory), "--kafka-port", "0"]
    flags = ["--brokers", str(brokers), "--set", "admin.port=0"]
    return subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [each for each in processes if each.poll() is not None]


@pytest.mark.processes
@pytest.mark.parametrize("brokers", [1, 2])
def test_of_two_started_at_once_one_runs_and_the_other_names_it(tmp_path: Path, brokers: int) -> None:
    both = [start(tmp_path / "d", brokers) for _ in range(2)]
    try:
        until(lambda: len(ended(both)) > 0, 60.0)
        (refused,) = ended(both)
        (running,) = (each for each in both if each is not refused)
        assert refused.stderr is not None and running.stdout is not None
        assert refused.returncode == 9
        assert f"is in use by process {running.pid}".encode() in refused.stderr.read()
        assert running.stdout.readline().startswith(b"ready bootstrap=")
        running.send_signal(signal.SIGINT)
        assert running.wait(60.0) == 0
    finally:
        for each in both:
            if each.poll() is None:
                each.send_signal(signal.SIGINT)
                each.wait(60.0)
            for pipe in (each.stdout, each.stderr):
                assert pipe is not None
                pipe.close()


def test_the_holder_is_named_though_an_earlier_one_left_its_pid(tmp_path: Path) -> None:
    os.close(lock_file(tmp_path, UP_LOCK_FILE))
    held = lock_file(tmp_path, UP_LOCK_FILE)
    with pytest.raises(WrongDataDirectory, match=f"in use by process {os.getpid()}"):
        lock_file(tmp_path, UP_LOCK_FILE)
    os.pwrite(held, b"0\n".ljust(8), 0)  # no such process: the lock is held all the same
    with pytest.raises(WrongDataDirectory, match="in use by process 0"):
        lock_file(tmp_path, UP_LOCK_FILE)
    os.close(held)
    os.close(lock_file(tmp_path, UP_LOCK_FILE))
