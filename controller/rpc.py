"""The controller's RPC: requests and responses over `runtime.wire` frames, many in flight on a connection.

A request is a frame of kind 1 with msgpack `[id, method, parameters]`, a response one of kind 2 with
`[id, error or nil, result]`; responses come in any order. Methods, parameters and results are the structs below
(docs/formats/controller.md). Bounds: a frame's size, the requests in flight on a connection (past which the server
stops reading), the bytes waiting to be sent (past which it stops answering).

With credentials a connection begins with the handshake of `controller.handshake`, and every frame after it is sealed;
until then no request is decoded. A server may hand the socket of a connection that is for `raft` to its consensus.

Entry: `RpcConnection` (either side), `RpcChannel` (a client's connection that comes back).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from controller.errors import ErrorInfo, NotController, from_wire, to_wire
from controller.handshake import (
    ClientHandshake,
    Credentials,
    Hello,
    NotAuthentic,
    ServerHandshake,
    Session,
    refusal,
    welcome,
)
from controller.load import BrokerLoad
from runtime.clock import Clock
from runtime.errors import CorruptData, Overloaded, TidelogError, Unavailable
from runtime.log_limit import LogLimiter
from runtime.msgpack import DECODE_ERRORS
from runtime.network import Network
from runtime.tasks import TaskSet
from runtime.wire import Frame, FrameDecoder, encode_frame

log = logging.getLogger(__name__)

REQUEST = 1
RESPONSE = 2
MAX_TIMEOUTS = 2
"""Calls that time out in a row, with no answer to any, before a channel drops its connection."""
RECEIVE_S = 30.0
"""For a frame, and the first one of a connection, to arrive whole."""
MAX_RECEIVING_BYTES = 256 << 20
"""Of unfinished frames, over all connections of a server."""
MAX_REQUESTS = 256
"""In flight on one connection, each direction."""
HANDSHAKE_S = 5.0
"""A peer that has not proved itself by then is dropped."""


class CallTimeout(Unavailable):
    """The other side did not answer in time; the connection may be half-open."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    id: int
    method: str
    params: msgspec.Raw


class _Response(msgspec.Struct, frozen=True, array_like=True):
    id: int
    error: ErrorInfo | None
    result: msgspec.Raw


class CommandParams(msgspec.Struct, frozen=True, array_like=True):
    """`command`: returns a `controller.commands.Result`."""

    client_id: str
    sequence: int
    done: int
    command: msgspec.Raw


class PollParams(msgspec.Struct, frozen=True, array_like=True):
    """`poll`: returns a `PollReply` as soon as there is something newer, or after `wait_ms`."""

    from_version: int
    wait_ms: int
    cluster_id: str
    """The asker's; empty if it has none yet. Another cluster's is refused."""
    delta_version: int = 1
    """The newest version of deltas that the asker understands. 1, which older processes do not send, told of each
    stream that a commit moves; `DELTA_VERSION` leaves them to be found from the committed objects."""


DELTA_VERSION = 2
"""Of the deltas that are sent now."""


class PollReply(msgspec.Struct, frozen=True, array_like=True):
    """Deltas in order, each `[version, [[table, key, record or nil], ...]]`; or `reload`: fetch the image."""

    cluster_id: str
    reload: bool
    deltas: list[msgspec.Raw]
    version: int
    """The controller's own; a reply is bounded and may end before it."""


class ImageChunk(msgspec.Struct, frozen=True, array_like=True):
    """`image` (no parameters): the next part of one consistent image; asked until `last`."""

    version: int
    rows: list[tuple[str, msgspec.Raw, msgspec.Raw]]
    last: bool


class HeartbeatParams(msgspec.Struct, frozen=True, array_like=True):
    """`heartbeat`: the active controller returns a `controller.load.HeartbeatReply`, others nil."""

    broker_id: int
    registration_epoch: int
    load: BrokerLoad | None = None
    """What the broker carries; nil: not measured."""
    unsaved_bytes: int = -1
    """Of its WAL, acknowledged and not in the bucket yet; -1: not known."""
    leaving: bool = False
    """The last one: the broker stops in good order, perhaps with the whole cluster."""
    age_ms: int = 0
    """Since the broker's process registered for the first time."""


class TransferParams(msgspec.Struct, frozen=True, array_like=True):
    """`transfer`: hand the leadership over; returns nil when it is given up."""

    node_id: int | None
    """To whom; nil: to the member that has most."""


class ChangeParams(msgspec.Struct, frozen=True, array_like=True):
    """`change`: one member more or less; returns nil when the new quorum has committed it."""

    operation: str
    """`add` or `rem`."""
    node_id: int
    address: str
    """`host:port`; ignored for `rem`."""


class SessionReply(msgspec.Struct, frozen=True, array_like=True):
    """`session` (no parameters): an id for dedupe that no other client has."""

    client_id: str
    cluster_id: str


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(_Request)
_responses = msgspec.msgpack.Decoder(_Response)
_NIL = msgspec.Raw(b"\xc0")

Handler = Callable[["RpcConnection", str, msgspec.Raw], Awaitable[bytes]]
"""Answers one request with an encoded result, or raises a `TidelogError`."""
AdoptPeer = Callable[[int, socket.socket, Session], None]
"""Takes over the socket of another controller, by its node id."""


class RpcDoor:
    """The bounds that all connections of a server share: bytes of frames that are arriving, and the time they take.

    A peer that announces a frame and does not send it, or sends nothing at all, is dropped after `RECEIVE_S`; the peer
    whose bytes go over `MAX_RECEIVING_BYTES` is dropped at once.
    """

    def __init__(self, clock: Clock) -> None:
        self._partial: dict[RpcConnection, int] = {}
        self._timers: dict[RpcConnection, asyncio.TimerHandle] = {}
        self.receiving_bytes = 0
        self.logs = LogLimiter(log, clock)

    def opened(self, connection: RpcConnection) -> None:
        """A connection begins: its first frame is due."""
        self._expect(connection)

    def received(self, connection: RpcConnection, partial_bytes: int, *, whole: bool) -> None:
        """It sent bytes, of which `partial_bytes` are an unfinished frame. Raises `Overloaded`."""
        self.receiving_bytes += partial_bytes - self._partial.pop(connection, 0)
        if partial_bytes:
            self._partial[connection] = partial_bytes
        if self.receiving_bytes > MAX_RECEIVING_BYTES:
            raise Overloaded(f"frames that are still arriving hold {self.receiving_bytes} bytes")
        if whole or not partial_bytes:
            self._forget_timer(connection)
        if partial_bytes and connection not in self._timers:
            self._expect(connection)

    def closed(self, connection: RpcConnection) -> None:
        """It has ended."""
        self.receiving_bytes -= self._partial.pop(connection, 0)
        self._forget_timer(connection)

    def _expect(self, connection: RpcConnection) -> None:
        self._timers[connection] = asyncio.get_running_loop().call_later(RECEIVE_S, self._late, connection)

    def _forget_timer(self, connection: RpcConnection) -> None:
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _late(self, connection: RpcConnection) -> None:
        self._timers.pop(connection, None)
        event = "a connection was dropped: no whole frame came in time"
        self.logs.line("late", logging.WARNING, event, {"peer": connection.peer})
        connection.abort()


class RpcConnection(asyncio.Protocol):
    """One connection. A server's has a `handler`; a client's makes `call`s."""

    def __init__(
        self,
        *,
        handler: Handler | None = None,
        on_made: Callable[[RpcConnection], None] | None = None,
        on_lost: Callable[[RpcConnection], None] | None = None,
        credentials: Credentials | None = None,
        adopt_peer: AdoptPeer | None = None,
        door: RpcDoor | None = None,
    ) -> None:
        self._handler = handler
        self._door = door
        self._credentials = credentials
        self._adopt_peer = adopt_peer
        self._handshake: ClientHandshake | ServerHandshake | None = None
        self._session: Session | None = None
        self._authentic: asyncio.Future[None] | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._on_made = on_made
        self._on_lost = on_lost
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._tasks = TaskSet("rpc")
        self._paused_reading = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.peer = ""
        self.answers = 0
        """Responses received."""

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, not a subclass
        self.peer = str(transport.get_extra_info("peername"))
        if self._door is not None:
            self._door.opened(self)
        if self._on_made is not None:
            self._on_made(self)
        if self._credentials is not None:
            self._begin_handshake(self._credentials, self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        if self._door is not None:
            self._door.closed(self)
        self._writable.set()
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self._prove(NotAuthentic(f"the connection was closed in the handshake: {exc or 'closed'}"))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(f"the connection to the controller was lost: {exc or 'closed'}"))
        self._waiting.clear()
        if self._on_lost is not None:
            self._on_lost(self)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            if self._handshake is not None:
                self._shake_hands(self._handshake, data)
                return
            frames = self._decoder.feed(data)
            if self._door is not None:
                self._door.received(self, self._decoder.buffered_bytes, whole=bool(frames))
            for frame in frames:
                self._take(frame)
        except (TidelogError, *DECODE_ERRORS) as error:
            extra = {"peer": self.peer, "error": str(error)}
            if self._door is not None:
                self._door.logs.line("dropped", logging.WARNING, "a connection was dropped", extra)
            else:
                log.warning("a connection was dropped", extra=extra)
            if isinstance(error, TidelogError):
                self._prove(error)
            self.abort()

    def _take(self, frame: Frame) -> None:
        payload = self._session.open(frame) if self._session is not None else frame.payload
        if frame.kind == REQUEST and self._handler is not None:
            self._serve(_requests.decode(payload))
        elif frame.kind == RESPONSE:
            self._answered(_responses.decode(payload))
        else:
            raise CorruptData(f"a frame of kind {frame.kind} is not expected here")

    def _write(self, kind: int, payload: bytes) -> None:
        assert self._transport is not None
        sealed = self._session.seal(kind, payload) if self._session is not None else encode_frame(kind, payload)
        self._transport.write(sealed)

    # Handshake

    def _begin_handshake(self, credentials: Credentials, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(HANDSHAKE_S, self.abort)
        if self._handler is not None:
            self._handshake = ServerHandshake(credentials)
            return
        self._handshake = ClientHandshake(credentials, "rpc")
        self._authentic = loop.create_future()
        transport.write(self._handshake.hello())

    def _shake_hands(self, handshake: ClientHandshake | ServerHandshake, data: bytes) -> None:
        assert self._transport is not None
        answer = handshake.feed(data)
        if answer:
            self._transport.write(answer)
        if handshake.session is None:
            return
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self._handshake = None
        if isinstance(handshake, ServerHandshake):
            assert handshake.hello is not None
            self._admit(handshake.hello, handshake.session, self._transport)
        else:
            self._session = handshake.session
            self._prove(None)

    def _admit(self, hello: Hello, session: Session, transport: asyncio.Transport) -> None:
        if hello.purpose == "rpc":
            transport.write(welcome())
            self._session = session
        elif hello.purpose == "raft" and self._adopt_peer is not None:
            transport.pause_reading()
            duplicate = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            transport.abort()  # closes this descriptor; the connection lives on in the other
            self._adopt_peer(hello.node_id, duplicate, session)
        else:
            transport.write(refusal(f"connections for {hello.purpose[:50]!r} are not taken here"))
            transport.close()

    def _prove(self, error: TidelogError | None) -> None:
        if self._authentic is None or self._authentic.done():
            return
        if error is None:
            self._authentic.set_result(None)
        else:
            self._authentic.set_exception(error)
            self._authentic.exception()  # nobody may be waiting

    async def wait_authentic(self) -> None:
        """Return when the other side has proved itself and accepted us. Raises `NotAuthentic`, `CorruptData`."""
        if self._authentic is not None:
            await self._authentic

    def _serve(self, request: _Request) -> None:
        self._tasks.spawn(self._answer(request), "request")
        if len(self._tasks) >= MAX_REQUESTS and not self._paused_reading and self._transport is not None:
            self._paused_reading = True
            self._transport.pause_reading()

    async def _answer(self, request: _Request) -> None:
        assert self._handler is not None
        await self._writable.wait()  # before the work: answers that a peer does not read must not pile up
        try:
            result = await self._handler(self, request.method, request.params)
            reply = _Response(request.id, None, msgspec.Raw(result))
        except TidelogError as error:
            reply = _Response(request.id, to_wire(error), _NIL)
        except DECODE_ERRORS as error:
            reply = _Response(request.id, to_wire(CorruptData(f"{request.method}: {error}")), _NIL)
        if self._transport is not None:
            self._write(RESPONSE, _encoder.encode(reply))
            if self._paused_reading and len(self._tasks) <= MAX_REQUESTS // 2:
                self._paused_reading = False
                self._transport.resume_reading()

    def _answered(self, response: _Response) -> None:
        self.answers += 1
        future = self._waiting.pop(response.id, None)
        if future is None or future.done():
            return  # the caller gave up waiting
        if response.error is None:
            future.set_result(response.result)
        else:
            future.set_exception(from_wire(response.error))

    async def call(self, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        """Ask the other side. Raises what it raised, and `Unavailable` after `timeout_s` or a lost connection."""
        if not self.is_open or self._transport is None:
            raise Unavailable("the connection to the controller is closed")
        request_id = next(self._ids)
        request = _Request(request_id, method, msgspec.Raw(_encoder.encode(params)))
        payload = _encoder.encode(request)
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._write(REQUEST, payload)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise CallTimeout(f"the controller did not answer {method} within {timeout_s:.1f} s") from None
        finally:
            self._waiting.pop(request_id, None)

    def abort(self) -> None:
        """Drop the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Drop the connection and end the requests being served."""
        self.abort()
        await self._tasks.close()


Endpoint = tuple[str, int]


class RpcChannel:
    """A client's connection to whichever controller answers: opened when needed, replaced when lost."""

    def __init__(self, endpoints: list[Endpoint], network: Network, credentials: Credentials | None = None) -> None:
        assert endpoints
        self._endpoints = list(endpoints)
        self._network = network
        self._credentials = credentials
        self._at = 0
        self._connection: RpcConnection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self._timeouts = 0

    @property
    def endpoint(self) -> Endpoint:
        """Where calls go now."""
        return self._endpoints[self._at]

    def set_endpoints(self, endpoints: list[Endpoint]) -> None:
        """The controllers have changed; a connection to one that stays is kept."""
        if not endpoints or endpoints == self._endpoints:
            return
        current = self.endpoint
        self._endpoints = list(endpoints)
        if current in self._endpoints:
            self._at = self._endpoints.index(current)
        else:
            self._at = 0
            self.drop()

    async def call(self, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        """As `RpcConnection.call`. After a failure to reach the active controller the next call tries another one."""
        connection: RpcConnection | None = None
        seen = 0
        try:
            connection = await self._open(timeout_s)
            seen = connection.answers
            return await connection.call(method, params, timeout_s)
        except CallTimeout:
            self._timeouts += 1
            if self._timeouts >= MAX_TIMEOUTS or len(self._endpoints) > 1:
                self._turn(connection, drop=True)
            raise
        except NotController as error:
            self._turn(connection, to=error.endpoint())
            raise
        except Unavailable:
            if connection is None or not connection.is_open:
                self._turn(connection)
            raise
        finally:
            if connection is not None and connection.answers > seen:
                self._timeouts = 0

    async def _open(self, timeout_s: float) -> RpcConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                host, port = self.endpoint
                limit_s = min(timeout_s, HANDSHAKE_S)
                _, protocol = await self._network.connect(
                    lambda: RpcConnection(credentials=self._credentials), host, port, timeout_s=limit_s
                )
                assert isinstance(protocol, RpcConnection)
                try:
                    async with asyncio.timeout(limit_s):
                        await protocol.wait_authentic()
                except TimeoutError:
                    protocol.abort()
                    raise Unavailable(f"{host}:{port} does not answer the handshake") from None
                except BaseException:
                    protocol.abort()
                    raise
                if self._is_closed:
                    protocol.abort()
                    raise Unavailable(f"the channel to {host}:{port} is closed")
                self._connection = protocol
            return self._connection

    def _turn(self, failed: RpcConnection | None, *, drop: bool = False, to: Endpoint | None = None) -> None:
        if failed is not None and failed is not self._connection:
            return  # another call has turned already
        self._timeouts = 0
        self._at = self._endpoints.index(to) if to in self._endpoints else (self._at + 1) % len(self._endpoints)
        if drop or len(self._endpoints) > 1:
            self.drop()

    def prefer(self, endpoint: Endpoint) -> None:
        """Go to this controller, if it is known and another one is asked; as `turn`."""
        if endpoint in self._endpoints and endpoint != self.endpoint:
            self._timeouts = 0
            self._at = self._endpoints.index(endpoint)
            self.drop()

    def turn(self) -> None:
        """Go to the next controller; calls under way fail as by a lost connection."""
        self._turn(self._connection, drop=True)

    def drop(self) -> None:
        """End the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def close(self) -> None:
        """Drop the connection, also one that is being opened."""
        self._is_closed = True
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
