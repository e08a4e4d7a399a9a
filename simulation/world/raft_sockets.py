"""The sockets of a simulated Raft member, over the simulated network, and the poller that goes with them.

A socket is a protocol of a connection of `tidelog.simulation.world.network`: cuts, slow links, resets and crashes are
that network's. What a turn sends leaves when the turn is over (`SimSockets.later`); what arrives waits until the member
polls. A socket takes `buffer_bytes` that its peer did not take yet, and then no more, as a kernel's does.

Entry: `SimSockets`.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any, cast

from tidelog.controller.raft.surroundings import ERROR, READ, WRITE
from tidelog.runtime.network import Network

CONNECT_S = 10.0
QUEUED_BYTES = 1024
"""What waits beside a full buffer before a sender waits, too."""


class SimSocket(asyncio.Protocol):
    """See `tidelog.controller.raft.surroundings.RaftSocket`."""

    def __init__(self, sockets: SimSockets, number: int) -> None:
        self._sockets = sockets
        self._number = number
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._sending: list[bytes] = []
        """Until the turn is over."""
        self._code = 0
        self._ended = False
        self._closed = False
        self._refused = False
        """It took no more, and has not told since that it does."""

    # What the member calls

    def fileno(self) -> int:
        """See `RaftSocket.fileno`."""
        return -1 if self._closed else self._number

    def connect_ex(self, address: Any, /) -> int:
        """See `RaftSocket.connect_ex`."""
        self._sockets.spawn(self._connect(*address))
        return errno.EINPROGRESS

    async def _connect(self, host: str, port: int) -> None:
        try:
            await self._sockets.network.connect(lambda: self, host, port, timeout_s=CONNECT_S)
        except Exception:  # noqa: BLE001  # a real socket reports any failure as an error number (fault `odd`)
            self._code = errno.ECONNREFUSED
            self._sockets.changed(self._number)

    def getsockopt(self, level: int, option: int, /) -> int:
        """See `RaftSocket.getsockopt`."""
        code, self._code = self._code, 0
        return code

    def recv(self, size: int, /) -> bytes:
        """See `RaftSocket.recv`."""
        if not self._received:
            if self._ended:
                raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
            raise BlockingIOError
        data = b"".join(self._received)
        self._received = [data[size:]] if len(data) > size else []
        return data[:size]

    def send(self, data: memoryview | bytes, /) -> int:
        """See `RaftSocket.send`."""
        if self._ended or self._transport is None:
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        room = self._room()
        if room <= 0:
            self._refused = True
            raise BlockingIOError
        taken = bytes(data[:room])
        if not self._sending:
            self._sockets.later(self._send_on)
        self._sending.append(taken)
        return len(taken)

    def _room(self) -> int:
        if self._transport is None:
            return 0
        waiting = self._transport.get_write_buffer_size() + sum(map(len, self._sending))
        return self._sockets.buffer_bytes - waiting

    def _send_on(self) -> None:
        data, self._sending = b"".join(self._sending), []
        if self._transport is not None:
            self._transport.write(data)
            if self._closed:
                self._transport.close()
            elif self._refused and self._room() > 0:
                # What filled it has left since, so the transport is not full and will not say that it has room.
                self._refused = False
                self._sockets.changed(self._number)

    def close(self) -> None:
        """See `RaftSocket.close`."""
        self._closed = True
        if self._transport is not None and not self._sending:
            self._sockets.later(self._transport.close)

    # What the network calls

    def take(self, transport: asyncio.Transport) -> None:
        """The connection is there."""
        self._transport = transport
        transport.set_write_buffer_limits(high=self._sockets.buffer_bytes - 1)
        if self._closed:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.take(cast(asyncio.Transport, transport))
        self._sockets.changed(self._number)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received.append(data)
        self._sockets.changed(self._number)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._sockets.changed(self._number)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._ended = True
        self._transport = None
        self._sockets.changed(self._number)

    def events(self) -> int:
        """What a poller would say."""
        if self._closed:
            return 0
        found = READ if self._received or self._ended or self._code else 0
        if self._code or self._ended:
            found |= ERROR
        return found | (WRITE if self._room() > 0 else 0)


class SimPoller:
    """See `tidelog.controller.raft.surroundings.Poller`."""

    def __init__(self, sockets: SimSockets) -> None:
        self._sockets = sockets
        self._watched: dict[int, tuple[Callable[[int, int], None], int]] = {}
        self._hot: dict[int, None] = {}
        """Sockets of which something may be told."""

    def subscribe(self, descr: int, callback: Callable[[int, int], None], eventMask: int) -> None:  # noqa: N803
        """See `Poller.subscribe`."""
        self._watched[descr] = callback, eventMask
        self._hot[descr] = None

    def unsubscribe(self, descr: int) -> None:
        """See `Poller.unsubscribe`."""
        self._watched.pop(descr, None)
        self._hot.pop(descr, None)

    def heat(self, descr: int) -> None:
        """Something has changed."""
        if descr in self._watched:
            self._hot[descr] = None

    def _events(self, descr: int) -> int:
        return self._sockets.by_number[descr].events() & self._watched[descr][1]

    def is_hot(self) -> bool:
        """Whether a poll would tell something."""
        for descr in list(self._hot):
            if self._events(descr):
                return True
            del self._hot[descr]
        return False

    def poll(self, timeout: float) -> None:
        """See `Poller.poll`; nothing is waited for."""
        for descr in list(self._hot):
            if descr not in self._watched:
                continue
            events = self._events(descr)
            if events:
                self._watched[descr][0](descr, events)
            else:
                self._hot.pop(descr, None)


class SimSockets:
    """`tidelog.controller.raft.surroundings.Sockets` of one life."""

    def __init__(self, network: Network, loop: asyncio.AbstractEventLoop, buffer_bytes: int) -> None:
        self.network = network
        self._loop = loop
        self.buffer_bytes = buffer_bytes
        self.congested_bytes = buffer_bytes + QUEUED_BYTES
        self.by_number: dict[int, SimSocket] = {}
        self._poller = SimPoller(self)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.later: Callable[[Callable[[], None]], None] = lambda callback: callback()
        """Do something when the turn at hand is over, or at once."""
        self.wake: Callable[[], None] = lambda: None
        """Something has changed."""
        self.on_wait: Callable[[float], None] = lambda seconds: None
        """The member waits in a turn."""

    def spawn(self, work: Any) -> None:
        """Something that goes on beside the turns."""
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def changed(self, number: int) -> None:
        """A socket can tell something."""
        self._poller.heat(number)
        self.wake()

    def _new(self) -> SimSocket:
        number = len(self.by_number) + 1
        sock = self.by_number[number] = SimSocket(self, number)
        return sock

    def look_up(self, host: str, now: float) -> str | None:
        """See `Sockets.look_up`."""
        return host

    def open(self, address: str) -> SimSocket:
        """See `Sockets.open`."""
        return self._new()

    def take_over(self, transport: asyncio.Transport) -> SimSocket:
        """See `Sockets.take_over`."""
        sock, before = self._new(), transport.get_protocol()
        transport.set_protocol(sock)
        sock.take(transport)
        self._loop.call_soon(before.connection_lost, None)
        return sock

    def adopted(self, sock: Any) -> None:
        """See `Sockets.adopted`."""

    def wait_writable(self, sock: Any, seconds: float) -> None:
        """See `Sockets.wait_writable`."""
        self.on_wait(seconds)

    def poller(self) -> SimPoller:
        """See `Sockets.poller`."""
        return self._poller

    def is_hot(self) -> bool:
        """Whether the member would find something if it polled."""
        return self._poller.is_hot()
