"""`WalConnection`: frames of `tidelog.storage.replication.frames` over one connection, either side.

A follower connects, and proves itself with the handshake of the RPC connections, purpose `wal`
(`tidelog.controller.rpc.handshake`); a master's broker takes over connections that its peer listener has authenticated.
After that the frames are not sealed: their own checks, and those of the WAL's records, notice damage. Somebody who can
read or change packets between brokers is kept out by TLS, where that is configured
(`tidelog.controller.rpc.tls_network`), and else by the network only.

Received bytes go straight into the buffers of `ReplicationReader`. What is sent is passed to the transport as it lies
in the WAL's buffers, in one vectored write, at once: the transport's own buffer is for what the kernel does not take.

Invariants: nothing is decoded before the peer is authentic; at most one batch waits in the transport, and with TLS one
more, encrypted, below it: `is_writable` is False while it holds anything.

Entry: `WalConnection`, `connect_wal`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

from tidelog.broker.replication.inputs import MasterTarget, ReplicationWorld
from tidelog.controller.rpc.handshake import MAX_FRAME_BYTES, ClientHandshake, NotAuthentic
from tidelog.controller.rpc.secret import new_nonce
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.replication.frames import BadFrame, Frame, Goodbye, GoodbyeCode, Records, encode, encode_records
from tidelog.storage.replication.reader import ReplicationReader

logger = logging.getLogger(__name__)

PURPOSE = "wal"
"""In the handshake's HELLO."""
GOODBYE_S = 1.0
"""How long a connection that says goodbye waits for the kernel to take what it sent before."""


def _no_frame(_frame: Frame) -> None:
    """Before anybody listens: nothing can arrive then."""
    raise BadFrame("a frame arrived before it was expected")


def _closed_in_handshake(error: Exception | None) -> NotAuthentic:
    return NotAuthentic(
        f"the connection was closed in the handshake: {error or 'closed'}",
        hint="the log of the other broker says why; replication.tls_* must be set on all brokers or on none",
    )


def _nothing() -> None:
    """Default callback: do nothing."""


class WalConnection(asyncio.BufferedProtocol):
    """One connection. `on_frame(frame)` is called for each frame; what it raises ends the connection.

    Set the callbacks before anything can arrive. `on_lost()` is called once, when the connection has ended.
    """

    def __init__(self, *, max_body_bytes: int, handshake: ClientHandshake | None = None) -> None:
        """`max_body_bytes`: of a received frame. `handshake`: of a client, which begins with it."""
        self.on_frame: Callable[[Frame], None] = _no_frame
        self.on_lost: Callable[[], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing
        """The kernel has taken everything that was sent."""
        self._reader = ReplicationReader(max_body_bytes)
        self._handshake = handshake
        self._greeting = memoryview(bytearray(MAX_FRAME_BYTES)) if handshake is not None else memoryview(b"")
        self._authentic: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        self.problem: Exception | None = None
        """Why this side has ended the connection, if it has."""
        self.peer = ""

    @property
    def is_open(self) -> bool:
        """Return whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """Return whether the kernel has taken all that was sent."""
        return not self._is_full and self.is_open

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that receiving holds."""
        return self._reader.held_bytes

    # --- asyncio's side ------------------------------------------------------------------------------------------

    def take_over(self, transport: asyncio.Transport) -> None:
        """Become the protocol of a transport that another one has authenticated."""
        transport.pause_reading()  # so that the next read asks for a buffer
        transport.set_protocol(self)
        self.connection_made(transport)
        transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = cast(asyncio.Transport, transport)
        # uvloop writes at once only what is over the limit. With 0, transports of TLS would call an empty buffer full.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self.peer = str(transport.get_extra_info("peername"))
        if self._handshake is not None:
            self._authentic = asyncio.get_running_loop().create_future()
            self._transport.write(self._handshake.hello())

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._greeting if self._handshake is not None else self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        try:
            if self._handshake is not None:
                self._shake_hands(self._handshake, bytes(self._greeting[:nbytes]))
                return
            for frame in self._reader.received(nbytes):
                self.on_frame(frame)
                if not self.is_open:
                    return
        except TidelogError as error:
            self.end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = None
        self._prove(self.problem or _closed_in_handshake(exc))
        self.on_lost()

    def eof_received(self) -> bool:
        """See `asyncio.BufferedProtocol`: close."""
        return False

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._is_full = True

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._is_full = False
        if self.is_open:
            self.on_writable()

    def _shake_hands(self, handshake: ClientHandshake, data: bytes) -> None:
        answer = handshake.feed(data)
        if answer and self._transport is not None:
            self._transport.write(answer)
        if handshake.session is not None:
            self._handshake = None
            self._greeting = memoryview(b"")
            self._prove(None)

    def _prove(self, error: Exception | None) -> None:
        if self._authentic is None or self._authentic.done():
            return
        if error is None:
            self._authentic.set_result(None)
        else:
            self._authentic.set_exception(error)
            self._authentic.exception()  # marks it as retrieved: there may be no waiter

    # --- the owner's side ----------------------------------------------------------------------------------------

    async def wait_authentic(self) -> None:
        """Return when the other side has proven itself and accepted us. Raises `NotAuthentic`, `CorruptData`."""
        if self._authentic is not None:
            await self._authentic

    def send(self, frame: Frame) -> None:
        """Send a frame without records. Nothing happens on a connection that has ended."""
        if self.is_open and self._transport is not None:
            self._transport.write(encode(frame))

    def send_records(self, head: Records, buffers: Sequence[Buffer], body_bytes: int) -> None:
        """Send RECORDS, whose body of `body_bytes` bytes is `buffers`; they must not change any more."""
        if self.is_open and self._transport is not None:
            self._transport.writelines([encode_records(head, body_bytes), *buffers])

    def pause_receiving(self) -> None:
        """Read nothing more until `resume_receiving`."""
        if self.is_open and self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_receiving(self) -> None:
        """Read again."""
        if self.is_open and self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def end(self, problem: Exception | None = None) -> None:
        """Drop the connection now; `problem` says why, unless it has ended already."""
        if self._transport is None:
            return
        if problem is not None and self.problem is None:
            self.problem = problem
            logger.info("a replication connection ends", extra={"peer": self.peer, "error": str(problem)})
        self._transport.abort()

    def say_goodbye(self, code: GoodbyeCode, text: str) -> None:
        """Tell the other side why, and close; a peer that does not read is dropped after `GOODBYE_S`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self.send(Goodbye(code, text))
        transport.close()
        asyncio.get_running_loop().call_later(GOODBYE_S, transport.abort)


async def connect_wal(
    world: ReplicationWorld, target: MasterTarget, *, max_body_bytes: int, timeout_s: float
) -> WalConnection:
    """Connect to a master's broker and prove the secret, in `timeout_s` each. Raises `Unavailable`, `CorruptData`."""
    handshake = ClientHandshake(world.credentials, PURPOSE, target.broker_id, nonce=new_nonce())
    made = WalConnection(max_body_bytes=max_body_bytes, handshake=handshake)
    await world.network.connect(lambda: made, target.host, target.port, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await made.wait_authentic()
    except TimeoutError:
        made.end()
        raise Unavailable(f"{target.host}:{target.port} does not answer the handshake") from None
    except BaseException:
        made.end()
        raise
    return made
