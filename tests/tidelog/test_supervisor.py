"""The processes of `tidelog up`: what they import, how they fail, and that none outlives the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import until
from tests.support.tidelog_process import TidelogProcess, running

pytestmark = pytest.mark.processes


def test_up_starts_in_a_directory_with_folders_named_as_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tidelog", "storage", "runtime"):
        (tmp_path / name).mkdir()
    (tmp_path / "asyncio.py").write_text("raise SystemExit('not the standard library')")
    monkeypatch.chdir(tmp_path)
    command = [str(Path(sys.executable).with_name("tidelog")), "up", "--quiet"]
    command += ["--data-dir", "data", "--kafka-port", str(TidelogProcess(tmp_path).port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("ready bootstrap=")
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def test_up_ends_with_the_error_of_a_child_that_fails_before_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvloop.py").write_text("raise RuntimeError('a broken library')")  # the supervisor does not import it
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = TidelogProcess(tmp_path / "data")
    process.launch()
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
    until(lambda: "RuntimeError: a broken library" in process.output)
    assert not [line for line in process.output if "restarting" in line]


@pytest.mark.parametrize("brokers", [1, 3])
def test_no_child_outlives_a_killed_supervisor_even_where_sigint_is_blocked(tmp_path: Path, brokers: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the processes
    try:
        with running(tmp_path / "data", ["--brokers", str(brokers)]) as process:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == brokers
            os.kill(process.pid, signal.SIGKILL)
            try:
                until(lambda: not any(map(_runs, children)), 40)
            finally:
                for child in filter(_runs, children):
                    os.kill(int(child), signal.SIGKILL)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
