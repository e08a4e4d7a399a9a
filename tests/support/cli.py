"""Runs the `tidelog` command as a user does: in a process of its own, with pipes and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TIMEOUT_S = 180
NO_REBALANCE_DELAY = ("--set", "group.initial_rebalance_delay_ms=0")
"""Flags of `tidelog up`: a group's first member need not wait for more."""


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    def json(self) -> Any:
        return json.loads(self.out)

    def rows(self) -> list[list[str]]:
        """The lines of a table without their header, split at blanks."""
        return [line.split() for line in self.text.splitlines()[1:] if line.strip()]


def environment(bootstrap: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
    return {**kept, "TIDELOG_BOOTSTRAP": bootstrap}


class Cli:
    """The command with a bootstrap address in its environment."""

    def __init__(self, bootstrap: str = "127.0.0.1:1", cwd: Path | None = None) -> None:
        self.bootstrap = bootstrap
        self.cwd = cwd

    def __call__(self, *args: str | int | Path, stdin: bytes = b"", code: int | None = 0) -> Result:
        """Run it; `code` is the exit code that must come, None for any."""
        done = subprocess.run(
            [sys.executable, "-m", "tidelog", *map(str, args)],
            input=stdin,
            capture_output=True,
            env=environment(self.bootstrap),
            cwd=self.cwd,
            timeout=TIMEOUT_S,
            check=False,
        )
        result = Result(done.returncode, done.stdout, done.stderr.decode())
        assert code is None or result.code == code, result
        assert "Traceback" not in result.err, result.err
        return result

    def start(self, *args: str | int | Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start it with pipes; the caller ends it."""
        return subprocess.Popen(
            [sys.executable, "-m", "tidelog", *map(str, args)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(self.bootstrap),
            cwd=self.cwd,
        )


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait for a condition with a deadline."""
    import time

    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s")
        time.sleep(0.05)
