"""What a Raft member reaches the world by: time, chance, files, sockets, and whatever takes its turns.

The product runs over the system's own (`tidelog.controller.raft.thread`), the simulator over simulated ones
(`tidelog.simulation.world.consensus`). Nothing in `member`, `transport`, `links`, `journal` or `transfer` calls the
operating system by another way, so that a simulation runs the code that a process runs.

Entry: `Surroundings`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tidelog.controller.raft.files import RaftFiles

READ, WRITE, ERROR = 1, 2, 4
"""Events of a poller."""


class RaftSocket(Protocol):
    """A stream socket that never blocks, with the methods of `socket.socket` of these names."""

    def fileno(self) -> int:
        """What the poller knows it by."""
        ...

    def connect_ex(self, address: Any, /) -> int:
        """0, `EINPROGRESS`, or why not."""
        ...

    def getsockopt(self, level: int, option: int, /) -> int:
        """`SO_ERROR` is asked for, and nothing else."""
        ...

    def recv(self, size: int, /) -> bytes:
        """Empty at the end. Raises `BlockingIOError`."""
        ...

    def send(self, data: memoryview | bytes, /) -> int:
        """How many bytes were taken. Raises `BlockingIOError`."""
        ...

    def close(self) -> None:
        """Drop the connection."""
        ...


class Poller(Protocol):
    """pysyncobj's own interface."""

    def subscribe(self, descr: int, callback: Callable[[int, int], None], eventMask: int) -> None:  # noqa: N803
        """Call `callback(descr, events)` in `poll` when there are some of the mask."""
        ...

    def unsubscribe(self, descr: int) -> None:
        """No more."""
        ...

    def poll(self, timeout: float) -> None:
        """Wait for at most so many seconds, and call."""
        ...


class Sockets(Protocol):
    """Connections between members."""

    congested_bytes: int
    """A sender that is so far ahead of a peer waits for it."""

    def look_up(self, host: str, now: float) -> str | None:
        """The address of a host; None while it is not known. Never waits."""
        ...

    def open(self, address: str) -> RaftSocket:
        """A socket to connect with. Raises `OSError`."""
        ...

    def take_over(self, transport: asyncio.Transport) -> RaftSocket:
        """A connection that the event loop accepted, from now on without the loop. Called on the loop."""
        ...

    def adopted(self, sock: RaftSocket) -> None:
        """Make a socket that was taken over ready for use, on the member's thread. Raises `OSError`."""
        ...

    def wait_writable(self, sock: RaftSocket, seconds: float) -> None:
        """Wait until a peer has taken something, or the time is up."""
        ...

    def poller(self) -> Poller:
        """One for each member."""
        ...


class BackgroundWork(Protocol):
    """Something that goes on beside the member's turns."""

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        ...

    def join(self) -> None:
        """Wait for its end."""
        ...


class Pause(NamedTuple):
    """What comes after a turn: at most so many seconds of nothing."""

    seconds: float
    listens: bool = True
    """A message or a wake-up ends it."""


class Turns(Protocol):
    """What a runner runs, all of it on one thread."""

    stopping: threading.Event
    """Set when no more turns are wanted."""

    def begin(self) -> bool:
        """Load what is durable; whether there are turns to take."""
        ...

    def take(self) -> Pause | None:
        """One turn; None: it was the last."""
        ...

    def watch(self, fd: int, callback: Callable[[int, int], None]) -> None:
        """Call `callback(fd, events)` in `listen` when `fd` is readable."""
        ...

    def listen(self, seconds: float) -> None:
        """Take messages, and wait for them for at most so long."""
        ...

    def end(self) -> None:
        """Release everything."""
        ...


class Runner(Protocol):
    """Takes the turns of one member, and carries what they tell to the event loop."""

    def start(self) -> None:
        """Begin."""
        ...

    def wake(self) -> None:
        """End a pause that listens. From the event loop."""
        ...

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Call something on the event loop. From a turn."""
        ...

    def is_alive(self) -> bool:
        """Whether it takes turns."""
        ...

    async def join(self) -> None:
        """Return when the last turn is over."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """See the module."""

    monotonic: Callable[[], float]
    """Seconds; one clock for everything that a member measures."""
    random: Callable[[], float]
    """From [0, 1): election time-outs."""
    files: RaftFiles
    sockets: Sockets
    work: Callable[[Callable[[], None]], BackgroundWork]
    """Begin something beside the turns: the writing of a snapshot."""
    runner: Callable[[Turns], Runner]
