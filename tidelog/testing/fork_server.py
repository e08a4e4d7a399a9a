"""The process that a test's brokers are forked from: it has imported the product, once for all of them.

    python -P -m tidelog.testing.fork_server DESCRIPTOR

`DESCRIPTOR` is one end of a socket pair; the process of the tests has the other (`tidelog.testing.forking`). It first
receives one byte, `READY` or `HAS_THREADS`, when everything is imported. Then it sends requests: eight bytes with the
length of a JSON document, beside which the descriptors travel that `ForkRequest` names, and the document. The answer is
eight bytes with the pid, beside which its pidfd travels. When the process has ended, its exit code is written to the
descriptor `status`, as text, negative for a signal.

Invariants: it has one thread and no event loop, so that a fork copies no lock that another thread holds; a broker has
none of the descriptors of another one; when the process of the tests has ended, however, it ends, and its brokers do so
by their own pipe.

Entry: `main`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

READY = b"r"
HAS_THREADS = b"t"
LENGTH = Struct("=q")
MAX_DESCRIPTORS = 8
IMPORTED = ("tidelog.testing.child_main", "tidelog.testing.outside", "tidelog.process.serve", "uvloop", "aiohttp.web")

HIDDEN = ("hypothesis", "cryptography")
"""What kio and pysyncobj import if it is installed, for half a second, and a broker has no use for."""


class ForkRequest(NamedTuple):
    """The descriptors of a request, in this order; those that are in `kept` are for as long as the broker runs."""

    output: int
    status: int
    parent_pipe: int
    faults: int
    kept: tuple[int, ...]

    def flat(self) -> list[int]:
        """As they travel."""
        return [self.output, self.status, self.parent_pipe, self.faults, *self.kept]

    @classmethod
    def of(cls, descriptors: list[int]) -> ForkRequest:
        """As they arrive."""
        output, status, parent_pipe, faults, *kept = descriptors
        return cls(output, status, parent_pipe, faults, tuple(kept))


class ForkedChild(NamedTuple):
    """One that runs."""

    pid: int
    status: int


def _read(control: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = control.recv(count - len(found))
        if not more:
            return b""
        found += more
    return found


def _receive(control: socket.socket) -> tuple[ForkRequest, dict[str, Any]] | None:
    """Return the next request, or None when there will be no more."""
    head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, MAX_DESCRIPTORS)
    if len(head) < LENGTH.size:
        return None
    document = _read(control, LENGTH.unpack(head)[0])
    return (ForkRequest.of(descriptors), json.loads(document)) if document else None


def _become_child(request: ForkRequest, document: dict[str, Any]) -> list[str]:
    """Make this process the broker's, and return its arguments."""
    os.setsid()  # Ctrl-C reaches only the tests, which then stop it
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(request.output, 1)
    os.dup2(request.output, 2)
    os.close(request.output)
    os.environ.clear()
    os.environ.update(document["environment"])
    os.chdir(document["directory"])
    descriptors = ["--parent-pipe", str(request.parent_pipe), "--faults", str(request.faults)]
    return ["--config", document["config"], *descriptors]


class Forks:
    """The brokers that were forked, in the process that does it."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, ForkedChild] = {}
        """By their pidfd, which is readable when they have ended."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> list[str] | None:
        """Fork as asked, until the process of the tests has ended. In a forked process it returns its arguments."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process of the tests has ended
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor != self._control.fileno():
                        self._collect(descriptor)
                        continue
                    received = _receive(self._control)
                    if received is None:
                        return None
                    args = self._fork(*received)
                    if args is not None:
                        return args
        return None

    def _collect(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        ended = self._children.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(ended.pid, 0)[1])
        os.write(ended.status, str(code).encode())
        os.close(ended.status)
        os.close(pidfd)

    def _fork(self, request: ForkRequest, document: dict[str, Any]) -> list[str] | None:
        pid = os.fork()
        if pid == 0:
            self._control.close()
            for pidfd, other in self._children.items():
                os.close(pidfd)
                os.close(other.status)
            os.close(request.status)
            return _become_child(request, document)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = ForkedChild(pid, request.status)
        self._poll.register(pidfd, select.POLLIN)
        for used in {*request.flat()} - {request.status}:
            os.close(used)
        socket.send_fds(self._control, [LENGTH.pack(pid)], [pidfd])
        return None


def import_all() -> None:
    """Import what a broker does, as quickly as that can be done."""
    gc.disable()  # while imports make objects that stay, to look for garbage takes a tenth of their time
    hidden = [name for name in HIDDEN if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in IMPORTED:
        importlib.import_module(name)
    for name in hidden:
        del sys.modules[name]
    gc.collect()
    gc.enable()
    gc.freeze()  # else the first collection of each broker writes to, and so copies, all that they share


def main() -> None:
    """Import, serve, and in a forked process run the broker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; this process ends after them
    control = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    is_alone = threading.active_count() == 1 and len(list(Path("/proc/self/task").iterdir())) == 1
    control.sendall(READY if is_alone else HAS_THREADS)
    args = Forks(control).serve() if is_alone else None
    if args is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from tidelog.testing.child_main import run_child

        run_child(args)


if __name__ == "__main__":
    main()
