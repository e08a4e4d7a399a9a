"""The sockets between Raft members, on the consensus thread: one link for sending to a peer, one for receiving.

A `SendLink` connects, proves itself (`controller.handshake`) and from then on only sends; it connects again whenever it
is lost. A `ReceiveLink` is a socket that the controller's listener accepted and authenticated; it only receives.
Both are driven by pysyncobj's poller. Sockets never block, with one exception: a sender that is more than
`CONGESTED_BYTES` ahead of a peer waits up to `CONGESTED_WAIT_S` for it, which paces snapshots.

Invariants: messages of one link arrive whole, in order, and unchanged, or not at all; what waits to be sent is bounded
(`MAX_QUEUED_BYTES`, then the link is cut: Raft sends again).

Entry: `SendLink`, `ReceiveLink`, used by `controller.raft_transport`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from controller.addresses import split_address
from controller.handshake import ClientHandshake, Credentials, Session, refusal, welcome
from runtime.errors import CorruptData, TidelogError
from runtime.msgpack import DECODE_ERRORS
from runtime.wire import FrameDecoder

log = logging.getLogger(__name__)

MESSAGE = 3
"""Frame kind of a Raft message."""
READ, WRITE, ERROR = 1, 2, 4
READ_BYTES = 1 << 20
READS_A_TURN = 16
CONGESTED_BYTES = 8 << 20
CONGESTED_WAIT_S = 0.05
MAX_QUEUED_BYTES = 128 << 20
SILENT_PEER_MS = 2_000
"""Sent bytes that the peer's machine does not acknowledge for so long end the connection."""
RESOLVE_AGAIN_S = 5.0

Message = dict[str, Any]


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_MS)


class Resolver:
    """Turns a host name into an address in the background: the consensus thread never waits for it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str]] = {}
        self._asking: set[str] = set()

    def look_up(self, host: str, now: float) -> str | None:
        """An IP address, or None while it is not known yet."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        at, found = self._known.get(host, (float("-inf"), ""))
        if now - at > RESOLVE_AGAIN_S and host not in self._asking:
            self._asking.add(host)
            threading.Thread(target=self._ask, args=(host, now), name="tidelog-resolve", daemon=True).start()
        return found or None

    def _ask(self, host: str, now: float) -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            self._known[host] = (now, str(rows[0][4][0]))
        except OSError as error:
            log.warning("a controller's name does not resolve", extra={"host": host, "error": str(error)})
            self._known[host] = (now, "")
        finally:
            self._asking.discard(host)


class SendLink:
    """The way to one peer. `on_change(is_open)` tells when messages may be sent and when no more."""

    def __init__(
        self,
        *,
        poller: Any,
        resolver: Resolver,
        credentials: Credentials,
        peer_id: int,
        address: str,
        on_change: Callable[[bool], None],
        connect_timeout_s: float,
        retry_s: float,
    ) -> None:
        self._poller = poller
        self._resolver = resolver
        self._credentials = credentials
        self._peer_id = peer_id
        self._on_change = on_change
        self._connect_timeout_s = connect_timeout_s
        self._retry_s = retry_s
        self.address = address
        self.problem = ""
        """Why the last connection ended, while there is none."""
        self._sock: socket.socket | None = None
        self._fd = -1
        self._handshake: ClientHandshake | None = None
        self._session: Session | None = None
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._deadline = 0.0
        self._retry_at = 0.0
        self._writing = False

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._session is not None

    def tick(self, now: float) -> None:
        """Connect when it is time, give up what takes too long."""
        if self._sock is None:
            if now >= self._retry_at:
                self._retry_at = now + self._retry_s
                self._connect(now)
        elif self._session is None and now > self._deadline:
            self._end("it does not answer")

    def _connect(self, now: float) -> None:
        host, port = split_address(self.address)
        ip = self._resolver.look_up(host, now)
        if ip is None:
            self.problem = f"{host} does not resolve"
            return
        self._sock = sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        self._fd = sock.fileno()
        self._deadline = now + self._connect_timeout_s
        try:
            _tune(sock)
            code = sock.connect_ex((ip, port))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            self._end(errno.errorcode.get(code, str(code)))
            return
        self._watch(writing=True)

    def _watch(self, *, writing: bool) -> None:
        self._writing = writing
        self._poller.subscribe(self._fd, self._ready, READ | ERROR | (WRITE if writing else 0))

    def _ready(self, fd: int, event: int) -> None:
        if fd != self._fd or self._sock is None:
            return  # an event of a connection that has ended in this very poll
        try:
            if event & (READ | ERROR):
                self._read()
            if self._sock is not None and event & WRITE:
                self._write_more()
        except (OSError, TidelogError) as error:
            self._end(str(error) if isinstance(error, TidelogError) else (error.strerror or str(error)))

    def _read(self) -> None:
        assert self._sock is not None
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "error"))
        try:
            data = self._sock.recv(4096)
        except BlockingIOError:
            return
        if not data:
            self._end("closed by the peer")
            return
        if self._handshake is None or self._session is not None:
            raise CorruptData("the peer sends on a connection that is not for that")
        answer = self._handshake.feed(data)
        if answer:
            self._push(answer)
        if self._handshake.session is not None:
            self._session = self._handshake.session
            self.problem = ""
            self._on_change(True)

    def _write_more(self) -> None:
        if self._handshake is None:  # the connection has just been made
            self._handshake = ClientHandshake(self._credentials, "raft", self._peer_id)
            self._push(self._handshake.hello())
            return
        self._flush()

    def send(self, message: Message) -> bool:
        """Queue a message; whether the link is still open."""
        if self._session is None:
            return False
        try:
            self._push(self._session.seal(MESSAGE, msgspec.msgpack.encode(message)))
            if self._queued_bytes > CONGESTED_BYTES:
                self._wait_for_peer()
            if self._queued_bytes > MAX_QUEUED_BYTES:
                self._end(f"{self._queued_bytes} bytes wait to be sent")
        except OSError as error:
            self._end(error.strerror or str(error))
        return self.is_open

    def _push(self, data: bytes) -> None:
        self._queue.append(memoryview(data))
        self._queued_bytes += len(data)
        if not self._writing or self._session is None:
            self._flush()

    def _flush(self) -> None:
        assert self._sock is not None
        while self._queue:
            try:
                sent = self._sock.send(self._queue[0])
            except BlockingIOError:
                break
            self._queued_bytes -= sent
            if sent == len(self._queue[0]):
                self._queue.popleft()
            else:
                self._queue[0] = self._queue[0][sent:]
        if bool(self._queue) != self._writing:
            self._watch(writing=bool(self._queue))

    def _wait_for_peer(self) -> None:
        select.select([], [self._fd], [], CONGESTED_WAIT_S)
        self._flush()

    def _end(self, why: str) -> None:
        if self._sock is None:
            return
        was_open = self.is_open
        if why != self.problem:
            log.log(
                logging.INFO if was_open else logging.DEBUG,
                "no connection to a controller",
                extra={"peer": self._peer_id, "address": self.address, "error": why},
            )
        self.problem = why
        self.close()
        if was_open:
            self._on_change(False)

    def close(self) -> None:
        """Drop the connection, if there is one."""
        if self._sock is None:
            return
        self._poller.unsubscribe(self._fd)
        self._sock.close()
        self._sock = None
        self._fd = -1
        self._handshake = None
        self._session = None
        self._queue.clear()
        self._queued_bytes = 0
        self._writing = False


class ReceiveLink:
    """What one peer sends. Takes over an authenticated socket; `on_message(peer id, message)`."""

    def __init__(
        self,
        *,
        poller: Any,
        sock: socket.socket,
        session: Session,
        peer_id: int,
        on_message: Callable[[int, Message], None],
        on_end: Callable[[ReceiveLink], None],
    ) -> None:
        self._poller = poller
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._session = session
        self.peer_id = peer_id
        self._on_message = on_message
        self._on_end = on_end
        self._decoder = FrameDecoder()
        _tune(sock)
        sock.send(welcome())
        poller.subscribe(self._fd, self._ready, READ | ERROR)

    def _ready(self, fd: int, event: int) -> None:
        if self._sock is None or fd != self._fd:
            return
        try:
            for _ in range(READS_A_TURN):
                data = self._sock.recv(READ_BYTES)
                if not data:
                    self._end("closed by the peer")
                    return
                for frame in self._decoder.feed(data):
                    self._take(self._session.open(frame))
                if self._is_closed():
                    return
        except BlockingIOError:
            return
        except (OSError, TidelogError, *DECODE_ERRORS) as error:
            self._end(str(error))

    def _is_closed(self) -> bool:
        return self._sock is None  # a message may have ended the peer's membership

    def _take(self, payload: bytes) -> None:
        message = msgspec.msgpack.decode(payload)
        if not isinstance(message, dict):
            raise CorruptData("a message between controllers is no map")
        self._on_message(self.peer_id, message)

    def _end(self, why: str) -> None:
        log.info("a controller's connection ended", extra={"peer": self.peer_id, "error": why})
        self.close()
        self._on_end(self)

    def close(self) -> None:
        """Drop the connection."""
        if self._sock is not None:
            self._poller.unsubscribe(self._fd)
            self._sock.close()
            self._sock = None


def refuse(sock: socket.socket, reason: str) -> None:
    """Tell an authenticated peer that it may not take part, and close."""
    with contextlib.suppress(OSError):
        sock.send(refusal(reason))
    sock.close()
