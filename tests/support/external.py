"""Processes of others' programs, such as Java applications: started, watched by what they print, ended by their pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.clients import wait_until

DEADLINE_S = 180.0
TAIL = 60
"""Lines of its output that a failure shows."""


def finished(command: Sequence[str], *, cwd: Path | None = None, timeout_s: float = DEADLINE_S, **more: str) -> str:
    """Run a command to its end; return what it printed. Fails with both outputs unless it ends with 0."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=cwd,
        env={**os.environ, **more},
    )
    assert done.returncode == 0, f"{command[-8:]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


class External:
    """A program that runs beside the test; `output` is the file of all that it prints."""

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        self._output = output
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    @property
    def lines(self) -> list[str]:
        return self._output.read_text(encoding="utf-8", errors="replace").splitlines()

    def wait_for(self, part: str, timeout_s: float = DEADLINE_S) -> None:
        """Wait until a printed line has `part`; fails with the end of the output."""
        try:
            wait_until(lambda: self._has(part), f"{part!r} is printed", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(self.lines[-TAIL:])) from None

    def _has(self, part: str) -> bool:
        if any(part in line for line in self.lines):
            return True
        assert self._process.poll() is None, f"it ended with {self._process.returncode}"
        return False

    def wait(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait for its end, which must be a good one."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, f"ended with {code}:\n" + "\n".join(self.lines[-TAIL:])

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        """`kill -9`."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(DEADLINE_S)


@contextlib.contextmanager
def external(command: Sequence[str], output: Path, **environment: str) -> Iterator[External]:
    """A program in the background, which is gone afterwards, whatever happened."""
    process = External(command, output, environment)
    try:
        yield process
    finally:
        process.kill()


class Program:
    """A program that is ready to run."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def run(self, *arguments: object) -> list[str]:
        """Run it to its end; return the lines that it printed."""
        return finished([*self._command, *map(str, arguments)]).splitlines()

    def running(self, output: Path, *arguments: object) -> contextlib.AbstractContextManager[External]:
        """Run it beside the test."""
        return external([*self._command, *map(str, arguments)], output)
