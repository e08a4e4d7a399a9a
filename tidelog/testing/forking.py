"""Start a broker's process: forked from one that has imported everything, or as a process of its own.

A Python that imports the product is ready after a second or more, and a forked one at once. The process that forks
(`tidelog.testing.fork_server`) is started when the first broker is, and serves until this process ends. Where it cannot
fork, as something in this environment starts threads in every Python process, or the kernel has no pidfd, a broker's
process is started as any other.

Entry: `start_child`; `warm_up`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from tidelog.testing.fork_server import LENGTH, READY, ForkRequest
from tidelog.testing.options import BrokerEnded

PYTHON = (sys.executable, "-P", "-m")
"""As `tidelog.runtime.children.TIDELOG`."""
IMPORT_S = 120.0
END_S = 10.0
LOST_CODE = 255
"""The code of a process whose own is not known: who would have told it was killed."""
CODE_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChildStart:
    """What a broker's process is started with."""

    config: Path
    parent_pipe: int
    faults: int
    kept: tuple[int, ...]
    """Descriptors that it keeps open."""

    @property
    def environment(self) -> dict[str, str]:
        """That of this process, without what would change the configuration."""
        return broker_environment()


def broker_environment() -> dict[str, str]:
    """The environment of a broker's process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}


class RunningChild(Protocol):
    """A process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def stdout(self) -> IO[str] | None:
        """What it writes, to standard error, too."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code. Raises `subprocess.TimeoutExpired`."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal; no effect if it has ended."""
        ...


class ForkedProcess:
    """A process that the fork server has forked; signals reach it and no other, whatever its pid is used for later."""

    def __init__(self, pid: int, pidfd: int, status: int, output: int) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = open(output, encoding="utf-8", errors="replace")  # noqa: SIM115 - the reader closes
        self._pidfd = pidfd
        self._status: int | None = status
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """See `RunningChild.poll`."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """See `RunningChild.wait`."""
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("tidelog", timeout)
        return code

    def send_signal(self, sig: int) -> None:
        """See `RunningChild.send_signal`."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._code is None:
                signal.pidfd_send_signal(self._pidfd, sig)

    def _look(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._code is not None:
                    return self._code
                told = self._status is not None
                watched = os.dup(self._pidfd if self._status is None else self._status)
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not _readable(watched, left):
                    return None
            finally:
                os.close(watched)
            with self._lock:
                if self._code is None and told == (self._status is not None):  # no other thread was quicker
                    self._read_code()

    def _read_code(self) -> None:
        if self._status is None:
            self._code = LOST_CODE
        else:
            code = os.read(self._status, CODE_BYTES)
            os.close(self._status)
            self._status = None  # if nothing was told, the fork server was killed, and the process may still run
            self._code = int(code) if code else None
        if self._code is not None:
            os.close(self._pidfd)


def _readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class ForkServer:
    """The process that forks, from here."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*PYTHON, "tidelog.testing.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=broker_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._can_fork: bool | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, nor was given up."""
        return self._control.fileno() != -1 and self._process.poll() is None

    def can_fork(self) -> bool:
        """Wait for its imports, and return whether it may fork. Raises `BrokerEnded` if it has failed."""
        with self._lock:
            if self._can_fork is None:
                self._control.settimeout(IMPORT_S)
                try:
                    told = self._control.recv(1)
                except TimeoutError:
                    told = b""
                if not told:
                    raise BrokerEnded("the process that starts brokers has failed", hint="standard error says why")
                self._can_fork = told == READY
            return self._can_fork

    def fork(self, start: ChildStart) -> ForkedProcess:
        """Start a broker. Raises `BrokerEnded` if this process has failed."""
        document = {"config": str(start.config), "directory": _current_directory(), "environment": start.environment}
        body = json.dumps(document).encode()
        output, output_end = os.pipe()
        status, status_end = os.pipe()
        request = ForkRequest(output_end, status_end, start.parent_pipe, start.faults, start.kept)
        try:
            with self._lock:
                socket.send_fds(self._control, [LENGTH.pack(len(body))], request.flat())
                self._control.sendall(body)
                answer, (pidfd,), _, _ = socket.recv_fds(self._control, LENGTH.size, 1)
        except BaseException as error:
            os.close(output)
            os.close(status)
            self._control.close()  # the next one would take the answer that is still to come
            if isinstance(error, (OSError, ValueError)):
                raise BrokerEnded(f"the process that starts brokers has failed: {error}") from error
            raise
        finally:
            os.close(output_end)
            os.close(status_end)
        return ForkedProcess(LENGTH.unpack(answer)[0], pidfd, status, output)

    def close(self) -> None:
        """End it; its brokers go on."""
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _current_directory() -> str:
    """Return the directory that a broker begins in; the root, if a test has deleted the one that it is in."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


_lock = threading.Lock()
_server: tuple[int, ForkServer] | None = None
"""With the pid of the process that has started it: a copy of that process has none."""


def warm_up() -> ForkServer | None:
    """Start the process that forks, if it does not run, and do not wait for it; None where there can be none."""
    global _server
    if not hasattr(os, "pidfd_open"):
        return None
    with _lock:
        if _server is None or _server[0] != os.getpid() or not _server[1].is_running:
            if _server is None:
                atexit.register(_close)
            elif _server[0] == os.getpid():
                _server[1].close()
            _server = os.getpid(), ForkServer()
        return _server[1]


def _close() -> None:
    if _server is not None and _server[0] == os.getpid():
        _server[1].close()


def start_child(start: ChildStart) -> RunningChild:
    """Start a broker's process."""
    server = warm_up()
    if server is not None and server.can_fork():
        return server.fork(start)
    descriptors = ("--parent-pipe", str(start.parent_pipe), "--faults", str(start.faults))
    return subprocess.Popen(
        [*PYTHON, "tidelog.testing.child_main", "--config", str(start.config), *descriptors],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=start.environment,
        pass_fds=(start.parent_pipe, start.faults, *start.kept),
        start_new_session=True,  # Ctrl-C reaches only the tests, which then stop it
    )
