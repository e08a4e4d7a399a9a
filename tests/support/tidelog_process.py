"""Runs a real `tidelog up` for a test: starts it, waits for its ready line with a deadline, ends it by pid."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.ports import free_port

READY_PREFIX = "ready bootstrap="


class TidelogProcess:
    """One `tidelog up` with its output kept."""

    def __init__(self, data_dir: Path, flags: Sequence[str] = (), port: int | None = None) -> None:
        self.data_dir = data_dir
        self.port = free_port() if port is None else port
        self.flags = list(flags)
        self.output: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start the process without waiting for it."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
        command = [sys.executable, "-m", "tidelog", "up", "--data-dir", str(self.data_dir)]
        command += ["--kafka-port", str(self.port), *self.flags]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        threading.Thread(target=self._read_output, args=(self._process,), daemon=True).start()

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.output.append(line.rstrip())
                self._lines.put(line.rstrip())
        self._lines.put(None)

    def start(self, timeout_s: float = 120.0) -> TidelogProcess:
        """Start the process and wait until clients can connect."""
        self.launch()
        self.wait_for_line(READY_PREFIX, timeout_s)
        return self

    def wait_for_line(self, part: str, timeout_s: float = 120.0) -> str:
        """The first line not seen yet that contains `part`; fails with the whole output when none comes."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line with {part!r} in {timeout_s} s:\n" + self.tail()) from None
            if line is None:
                raise AssertionError(f"tidelog ended before a line with {part!r} came:\n" + self.tail())
            if part in line:
                return line

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.output[-lines:])

    def broker_pid(self) -> int:
        """The pid of the broker process now: the supervisor's only child."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def kill_broker(self) -> int:
        """`kill -9` the broker process, not its supervisor; returns the pid killed."""
        pid = self.broker_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self, timeout_s: float = 120.0) -> int:
        """SIGTERM, and wait; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"tidelog did not end in {timeout_s} s:\n" + self.tail()) from None

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait for the process to end by itself."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """`kill -9` supervisor and broker."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(AssertionError, ProcessLookupError, FileNotFoundError):
                self.kill_broker()
            self._process.kill()
            self._process.wait(30)


@contextlib.contextmanager
def running(data_dir: Path, flags: Sequence[str] = (), port: int | None = None) -> Iterator[TidelogProcess]:
    """A started Tidelog that is ended at the end, whatever happened."""
    process = TidelogProcess(data_dir, flags, port)
    try:
        yield process.start()
    finally:
        process.kill()
