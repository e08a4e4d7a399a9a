"""`.ci/run` over a repository whose targets are made up: it ends with what it began in the background."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients import wait_until

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
INSTALL = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])
open("pids.part", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
try:
    child.wait() if open("takes").read() == "long" else child.kill()
finally:
    open("cleared", "w").close()
"""
MAKEFILE = """
lint:
\twhile ! test -e pids; do sleep 0.05; done; echo lint; test ! -e fails
unit-again rest simulate:
\twhile ! test -e cleared; do sleep 0.05; done; echo $@
"""


def repository(place: Path, takes: str) -> list[str]:
    """Make one, and return the command."""
    (place / ".ci").mkdir()
    (place / "localstack").mkdir()
    shutil.copy(SCRIPT, place / ".ci" / "run")
    (place / "localstack" / "install.py").write_text(INSTALL)
    (place / "Makefile").write_text(MAKEFILE)
    (place / "takes").write_text(takes)
    return [str(place / ".ci" / "run")]


def is_gone(pid: str) -> bool:
    """Whether the process has ended; one that its parent has not waited for has, too."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_a_gate_that_fails_ends_the_installation_in_the_background(tmp_path: Path) -> None:
    command = repository(tmp_path, "long")
    (tmp_path / "fails").touch()
    environment = {**os.environ, "PYTHON": sys.executable}
    pids: list[str] = []
    try:
        with (tmp_path / "output").open("w") as output:
            done = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=60, check=False)
        pids = (tmp_path / "pids").read_text().split()
        assert done.returncode == 2, (tmp_path / "output").read_text()
        assert (tmp_path / "cleared").exists(), "it had no time to remove what it had not finished"
        wait_until(lambda: all(map(is_gone, pids)), "the processes have ended", 10)
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(int(pid), 9)


def test_a_gate_that_passes_says_so(tmp_path: Path) -> None:
    command = repository(tmp_path, "short")
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line in ("lint", "unit-again", "rest", "simulate")]
    assert printed == ["lint", "unit-again", "rest", "simulate"]
    assert not done.stderr
