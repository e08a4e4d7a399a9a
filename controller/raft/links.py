"""Sockets between Raft members, on the consensus thread: one link to send to a peer, one to receive from it.

A `SendLink` connects, proves itself (`tidelog.controller.rpc.handshake`) and from then on only sends; it connects again
whenever it is lost. A `ReceiveLink` is a socket that the controller's listener accepted and authenticated; it only
receives. Both are driven by pysyncobj's poller. Sockets never block, with one exception: a sender that gets more than
`Sockets.congested_bytes` ahead of a peer waits for it, once and up to `CONGESTED_WAIT_S`: a peer that stays slow must
not keep a leader from the others. A leader adds nothing to a link that is congested at the beginning of a round, so a
snapshot of any size reaches a slow peer. What is queued is bounded all the same.

Invariants: messages of one link arrive complete, in order and unchanged, or not at all; queued bytes are bounded
(beyond `MAX_QUEUED_BYTES` the link is closed, and Raft sends again).

Entry: `SendLink`, `ReceiveLink`, used by `tidelog.controller.raft.transport`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from tidelog.controller.model.addresses import split_address
from tidelog.controller.raft.surroundings import ERROR, READ, WRITE, Poller, RaftSocket, Sockets
from tidelog.controller.rpc.handshake import ClientHandshake, Credentials, Session, refusal, welcome
from tidelog.controller.rpc.secret import new_nonce
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.runtime.wire import FrameDecoder

logger = logging.getLogger(__name__)

MESSAGE = 3
"""Frame kind of a Raft message."""
READ_BYTES = 1 << 20
READS_A_TURN = 16
CONGESTED_WAIT_S = 0.05
MAX_QUEUED_BYTES = 128 << 20

Message = dict[str, Any]


class SendLink:
    """Sends to one peer. `on_change(is_open)` is called when the link opens or closes."""

    def __init__(
        self,
        *,
        poller: Poller,
        sockets: Sockets,
        credentials: Credentials,
        peer_id: int,
        address: str,
        on_change: Callable[[bool], None],
        connect_timeout_s: float,
        retry_s: float,
    ) -> None:
        self._poller = poller
        self._sockets = sockets
        self._credentials = credentials
        self._peer_id = peer_id
        self._on_change = on_change
        self._connect_timeout_s = connect_timeout_s
        self._retry_s = retry_s
        self.address = address
        self.problem = ""
        """Why the last connection ended, while there is none."""
        self._sock: RaftSocket | None = None
        self._fd = -1
        self._handshake: ClientHandshake | None = None
        self._session: Session | None = None
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._has_waited = False
        """For the peer, since its link became congested."""
        self._deadline = 0.0
        self._retry_at = 0.0
        self._writing = False

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._session is not None

    @property
    def is_congested(self) -> bool:
        """Whether more is queued than should be; it is sent as the peer takes it."""
        return self._queued_bytes > self._sockets.congested_bytes

    def tick(self, now: float) -> None:
        """Connect when a connection is due, and abandon an attempt that takes too long."""
        if self._sock is None:
            if now >= self._retry_at:
                self._retry_at = now + self._retry_s
                self._connect(now)
        elif self._session is None and now > self._deadline:
            self._end("it does not answer")

    def _connect(self, now: float) -> None:
        host, port = split_address(self.address)
        ip = self._sockets.look_up(host, now)
        if ip is None:
            self.problem = f"{host} does not resolve"
            return
        try:
            self._sock = sock = self._sockets.open(ip)
        except OSError as error:
            self.problem = error.strerror or str(error)
            return
        self._fd = sock.fileno()
        self._deadline = now + self._connect_timeout_s
        try:
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
            return  # an event of a connection that ended in the same poll
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
            raise CorruptData("the peer sends on a connection for receiving only")
        answer = self._handshake.feed(data)
        if answer:
            self._push(answer)
        if self._handshake.session is not None:
            self._session = self._handshake.session
            self.problem = ""
            self._on_change(True)

    def _write_more(self) -> None:
        if self._handshake is None:  # the connection has just been established
            self._handshake = ClientHandshake(self._credentials, "raft", self._peer_id, nonce=new_nonce())
            self._push(self._handshake.hello())
            return
        self._flush()

    def send(self, message: Message) -> bool:
        """Queue a message. Returns whether the link is still open."""
        if self._session is None:
            return False
        try:
            self._push(self._session.seal(MESSAGE, msgspec.msgpack.encode(message)))
            if not self.is_congested:
                self._has_waited = False
            elif self._sock is not None:
                if not self._has_waited:
                    self._has_waited = True
                    self._sockets.wait_writable(self._sock, CONGESTED_WAIT_S)
                self._flush()
            if self._queued_bytes > MAX_QUEUED_BYTES:
                self._end(f"{self._queued_bytes} bytes are queued")
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

    def _end(self, why: str) -> None:
        if self._sock is None:
            return
        was_open = self.is_open
        if why != self.problem:
            logger.log(
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
    """Receives from one peer on an authenticated socket, and calls `on_message(peer id, message)`."""

    def __init__(
        self,
        *,
        poller: Poller,
        sockets: Sockets,
        sock: RaftSocket,
        session: Session,
        peer_id: int,
        on_message: Callable[[int, Message], None],
        on_end: Callable[[ReceiveLink], None],
    ) -> None:
        self._poller = poller
        self._sock: RaftSocket | None = sock
        self._fd = sock.fileno()
        self._session = session
        self.peer_id = peer_id
        self._on_message = on_message
        self._on_end = on_end
        self._decoder = FrameDecoder()
        sockets.adopted(sock)
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
        return self._sock is None  # a message may have removed the peer from the quorum

    def _take(self, payload: bytes) -> None:
        message = msgspec.msgpack.decode(payload)
        if not isinstance(message, dict):
            raise CorruptData("a message between controllers is not a map")
        self._on_message(self.peer_id, message)

    def _end(self, why: str) -> None:
        logger.info("a controller's connection ended", extra={"peer": self.peer_id, "error": why})
        self.close()
        self._on_end(self)

    def close(self) -> None:
        """Drop the connection."""
        if self._sock is not None:
            self._poller.unsubscribe(self._fd)
            self._sock.close()
            self._sock = None


def refuse(sock: RaftSocket, reason: str) -> None:
    """Tell an authenticated peer that it may not take part, and close."""
    with contextlib.suppress(OSError):
        sock.send(refusal(reason))
    sock.close()
