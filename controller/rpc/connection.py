"""RPC of the controllers: requests and responses over `tidelog.runtime.wire` frames, many in flight on a connection.

A request is a frame of kind 1 with msgpack `[id, method, parameters, cluster id]`, a response one of kind 2 with `[id,
error or nil, result]`; responses arrive in any order. Methods, parameters and results are the structs below,
and those of images in `tidelog.controller.image.transfer`
(docs/formats/controller.md). Bounds: the size of a frame, the requests in flight on a connection (beyond which the
server stops reading), the bytes waiting to be sent (beyond which it stops replying).

With credentials a connection begins with the handshake of `tidelog.controller.rpc.handshake`, and every later frame is
sealed; no request is decoded before that. A server may pass the socket of a connection for `raft` to its consensus, and
the transport of one for `wal` to the replication of write-ahead logs (`tidelog.broker.replication`).

Entry: `RpcConnection` (either side), `RpcChannel` (a client's connection that reconnects).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from tidelog.controller.model.errors import ErrorInfo, NotController, OtherCluster, from_wire, to_wire
from tidelog.controller.model.load import BrokerLoad
from tidelog.controller.rpc.handshake import (
    NO_NODE,
    ClientHandshake,
    Credentials,
    Hello,
    NotAuthentic,
    ServerHandshake,
    Session,
    refusal,
    welcome,
)
from tidelog.controller.rpc.secret import new_nonce
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, Overloaded, TidelogError, Unavailable
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.runtime.network import Network
from tidelog.runtime.task_errors import as_unavailable
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.waiting import within
from tidelog.runtime.wire import Frame, FrameDecoder, FrameTooLarge, encode_frame

logger = logging.getLogger(__name__)

REQUEST = 1
RESPONSE = 2
MAX_TIMEOUTS = 2
"""Consecutive calls without any response after which a channel drops its connection."""
RECEIVE_S = 30.0
"""Time for a frame, and for the first one of a connection, to arrive completely."""
MAX_RECEIVING_BYTES = 256 << 20
"""Bytes of unfinished frames over all connections of a server."""
MAX_REQUESTS = 256
"""Requests in flight on one connection, in each direction."""
HANDSHAKE_S = 5.0
"""Time after which a peer that has not authenticated itself is dropped."""


class CallTimeout(Unavailable):
    """The other side did not reply in time; the connection may be half-open."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    id: int
    method: str
    params: msgspec.Raw
    cluster_id: str = ""
    """The caller's; empty: it has none yet, asks any cluster, or is of an older version."""


class _Response(msgspec.Struct, frozen=True, array_like=True):
    id: int
    error: ErrorInfo | None
    result: msgspec.Raw


class CommandParams(msgspec.Struct, frozen=True, array_like=True):
    """`command`: returns a `tidelog.controller.model.commands.Result`."""

    client_id: str
    sequence: int
    done: int
    command: msgspec.Raw
    version: int = 0
    """Metadata version that the caller has; 0: none, or an older version, which does not tell it."""


class PollParams(msgspec.Struct, frozen=True, array_like=True):
    """`poll`: returns a `PollReply` as soon as there are newer deltas, or after `wait_ms`."""

    from_version: int
    wait_ms: int
    cluster_id: str
    """The caller's cluster id; empty if it has none yet. Another cluster's is refused."""
    delta_version: int = 1
    """The newest version of deltas that the caller supports. Version 1, which older processes imply by sending none,
    had a row for each stream that a commit moves; in `DELTA_VERSION` they follow from the committed objects."""


DELTA_VERSION = 2
"""Version of the deltas that are sent."""


class PollReply(msgspec.Struct, frozen=True, array_like=True):
    """Deltas in order, each `[version, [[table, key, record or nil], ...]]`; or `reload`: fetch the image."""

    cluster_id: str
    reload: bool
    deltas: list[msgspec.Raw]
    version: int
    """The controller's own version; a reply is bounded and may end before it."""


class HeartbeatParams(msgspec.Struct, frozen=True, array_like=True):
    """`heartbeat`: the active controller returns a `tidelog.controller.model.load.HeartbeatReply`, others nil."""

    broker_id: int
    registration_epoch: int
    load: BrokerLoad | None = None
    """Load of the broker; nil: not measured."""
    not_uploaded_bytes: int = -1
    """Acknowledged bytes of its WAL that are not uploaded; -1: unknown."""
    leaving: bool = False
    """The last heartbeat: the broker stops cleanly, perhaps with the whole cluster."""
    age_ms: int = 0
    """Time since the broker's process registered for the first time."""
    version: int = -1
    """Metadata version that the broker has applied; -1: an older broker, which does not tell it."""


class TransferParams(msgspec.Struct, frozen=True, array_like=True):
    """`transfer`: transfer the leadership; returns nil when it is transferred."""

    node_id: int | None
    """The target; nil: the most current member."""


class ChangeParams(msgspec.Struct, frozen=True, array_like=True):
    """`change`: add or remove a member.

    Returns when the new quorum has committed it, and an added one has caught up: whether the member to remove was one,
    or true; nil from versions that do not tell.
    """

    operation: str
    """`add` or `rem`."""
    node_id: int
    address: str
    """`host:port`; ignored for `rem`."""


class UpgradeParams(msgspec.Struct, frozen=True, array_like=True):
    """`upgrade`: raise the feature level; returns a map of what was found and done."""

    level: int
    """-1: the highest level that all members support."""
    dry_run: bool


class UnknownObjectsParams(msgspec.Struct, frozen=True, array_like=True):
    """`unknown-objects`: which of these object ids the metadata does not name in any state, as `list[int]`."""

    version: int
    """The reply is of metadata of this version or a later one."""
    object_ids: tuple[int, ...]


class SessionReply(msgspec.Struct, frozen=True, array_like=True):
    """`session` (no parameters): returns a unique client id for dedupe."""

    client_id: str
    cluster_id: str


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(_Request)
_responses = msgspec.msgpack.Decoder(_Response)
_NIL = msgspec.Raw(b"\xc0")

Handler = Callable[["RpcConnection", str, msgspec.Raw], Awaitable[bytes]]
"""Answers one request with an encoded result, or raises a `TidelogError`."""
AdoptPeer = Callable[[int, asyncio.Transport, Session], None]
"""Takes over the connection of another node, by its id: its socket, or the transport with another protocol."""
OnProven = Callable[["RpcConnection", bool], bool]
"""A server's connection has proven itself, as a node or not. Returns whether it may stay."""


class RpcLimits:
    """Bounds shared by all connections of a server: bytes of incomplete frames, and their time to arrive.

    A peer that announces a frame and does not send it, or sends nothing at all, is dropped after `RECEIVE_S`; a peer
    whose bytes exceed `MAX_RECEIVING_BYTES` is dropped at once.
    """

    def __init__(self, clock: Clock) -> None:
        self._partial: dict[RpcConnection, int] = {}
        self._timers: dict[RpcConnection, asyncio.TimerHandle] = {}
        self.receiving_bytes = 0
        self.logs = LogLimiter(logger, clock)

    def opened(self, connection: RpcConnection) -> None:
        """Start the timer for the first frame of a new connection."""
        self._expect(connection)

    def received(self, connection: RpcConnection, partial_bytes: int, *, whole: bool) -> None:
        """Record received bytes, `partial_bytes` of them in an unfinished frame. Raises `Overloaded`."""
        self.receiving_bytes += partial_bytes - self._partial.pop(connection, 0)
        if partial_bytes:
            self._partial[connection] = partial_bytes
        if self.receiving_bytes > MAX_RECEIVING_BYTES:
            raise Overloaded(f"incomplete frames hold {self.receiving_bytes} bytes")
        if whole or not partial_bytes:
            self._forget_timer(connection)
        if partial_bytes and connection not in self._timers:
            self._expect(connection)

    def closed(self, connection: RpcConnection) -> None:
        """Remove a closed connection."""
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
    """One connection. A server's has a `handler`; a client uses `call`."""

    def __init__(
        self,
        *,
        handler: Handler | None = None,
        on_made: Callable[[RpcConnection], None] | None = None,
        on_proven: OnProven | None = None,
        on_lost: Callable[[RpcConnection], None] | None = None,
        credentials: Credentials | None = None,
        adopt_peer: AdoptPeer | None = None,
        adopt_wal: AdoptPeer | None = None,
        limits: RpcLimits | None = None,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._credentials = credentials
        self._adopt_peer = adopt_peer
        self._adopt_wal = adopt_wal
        self._handshake: ClientHandshake | ServerHandshake | None = None
        self._session: Session | None = None
        self._authentic: asyncio.Future[None] | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._on_made = on_made
        self._on_proven = on_proven
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
        self.host = ""
        """Address of the other side, without the port."""
        self.answers = 0
        """Number of responses received."""
        self.cluster_id = ""
        """The cluster that the other side's requests are for; empty: they do not tell."""

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, not a subclass
        address = transport.get_extra_info("peername")
        self.peer = str(address)
        self.host = str(address[0]) if isinstance(address, tuple) else self.peer
        if self._limits is not None:
            self._limits.opened(self)
        if self._on_made is not None:
            self._on_made(self)
        if self._credentials is not None:
            self._begin_handshake(self._credentials, self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        if self._limits is not None:
            self._limits.closed(self)
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
            if self._limits is not None:
                self._limits.received(self, self._decoder.buffered_bytes, whole=bool(frames))
            for frame in frames:
                self._take(frame)
        except (TidelogError, *DECODE_ERRORS) as error:
            extra = {"peer": self.peer, "error": str(error)}
            if self._limits is not None:
                self._limits.logs.line("dropped", logging.WARNING, "a connection was dropped", extra)
            else:
                logger.warning("a connection was dropped", extra=extra)
            if isinstance(error, TidelogError):
                self._prove(error)
            self.abort()

    def _take(self, frame: Frame) -> None:
        payload = self._session.open(frame) if self._session is not None else frame.payload
        if frame.kind == REQUEST and self._handler is not None:
            if self._credentials is None and not self._may_stay(is_node=True):
                raise Overloaded("too many connections")
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
            self._handshake = ServerHandshake(credentials, nonce=new_nonce())
            return
        self._handshake = ClientHandshake(credentials, "rpc", nonce=new_nonce())
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
        if hello.purpose == "rpc" and not self._may_stay(is_node=hello.node_id != NO_NODE):
            transport.write(refusal("too many connections; close those of other tools, or ask another node"))
            transport.close()
        elif hello.purpose == "rpc":
            transport.write(welcome())
            self._session = session
        elif hello.purpose == "raft" and self._adopt_peer is not None:
            self._adopt_peer(hello.node_id, transport, session)
        elif hello.purpose == "wal" and hello.node_id != NO_NODE and self._adopt_wal is not None:
            self.connection_lost(None)  # for this object and its listener; the transport gets another protocol
            self._adopt_wal(hello.node_id, transport, session)
        else:
            transport.write(refusal(f"connections for {hello.purpose[:50]!r} are not accepted here"))
            transport.close()

    def _may_stay(self, *, is_node: bool) -> bool:
        return self._on_proven is None or self._on_proven(self, is_node)

    def _prove(self, error: TidelogError | None) -> None:
        if self._authentic is None or self._authentic.done():
            return
        if error is None:
            self._authentic.set_result(None)
        else:
            self._authentic.set_exception(error)
            self._authentic.exception()  # marks it as retrieved: there may be no waiter

    async def wait_authentic(self) -> None:
        """Return when the other side has authenticated itself and accepted us. Raises `NotAuthentic`, `CorruptData`."""
        if self._authentic is not None:
            await self._authentic

    def _serve(self, request: _Request) -> None:
        self.cluster_id = request.cluster_id or self.cluster_id
        self._tasks.spawn(self._answer(request), "request")
        if len(self._tasks) >= MAX_REQUESTS and not self._paused_reading and self._transport is not None:
            self._paused_reading = True
            self._transport.pause_reading()

    async def _answer(self, request: _Request) -> None:
        assert self._handler is not None
        if not self._writable.is_set():  # before the work: replies that a peer does not read must not accumulate
            await self._writable.wait()
        try:
            result = await self._handler(self, request.method, request.params)
            reply = _Response(request.id, None, msgspec.Raw(result))
        except TidelogError as error:
            reply = _Response(request.id, to_wire(error), _NIL)
        except DECODE_ERRORS as error:
            reply = _Response(request.id, to_wire(CorruptData(f"{request.method}: {error}")), _NIL)
        if self._transport is not None:
            try:
                self._write(RESPONSE, _encoder.encode(reply))
            except FrameTooLarge as error:
                self._write(RESPONSE, _encoder.encode(_Response(request.id, to_wire(error), _NIL)))
            if self._paused_reading and len(self._tasks) <= MAX_REQUESTS // 2:
                self._paused_reading = False
                self._transport.resume_reading()

    def _answered(self, response: _Response) -> None:
        self.answers += 1
        future = self._waiting.pop(response.id, None)
        if future is None or future.done():
            return  # the caller has timed out
        if response.error is None:
            future.set_result(response.result)
        else:
            future.set_exception(from_wire(response.error))

    async def call(self, method: str, params: Any, timeout_s: float, cluster_id: str = "") -> msgspec.Raw:
        """Send a request to a process of a cluster (empty: any).

        Raises the other side's error, and `Unavailable` after `timeout_s` or a lost connection.
        """
        if not self.is_open or self._transport is None:
            raise Unavailable("the connection to the controller is closed")
        request_id = next(self._ids)
        request = _Request(request_id, method, msgspec.Raw(_encoder.encode(params)), cluster_id)
        payload = _encoder.encode(request)
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._write(REQUEST, payload)
            return await within(future, timeout_s)
        except TimeoutError:
            raise CallTimeout(f"the controller did not answer {method} within {timeout_s:.1f} s") from None
        finally:
            self._waiting.pop(request_id, None)

    def require_cluster(self, ours: str) -> None:
        """Refuse the requests of a caller that asks another cluster than ours. Raises `OtherCluster`.

        It knew one of its own at this address, or the directory of the process there was lost or replaced.
        """
        if self.cluster_id and ours and self.cluster_id != ours:
            raise OtherCluster(
                f"the caller belongs to cluster {self.cluster_id}; this process belongs to {ours}",
                hint="the directory of this process was replaced, or the address is another cluster's",
            )

    def abort(self) -> None:
        """Drop the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Drop the connection and cancel the requests being served."""
        self.abort()
        await self._tasks.close()


Endpoint = tuple[str, int]


def _not_asked(endpoint: Endpoint) -> Unavailable:
    return Unavailable("{}:{} is not to be asked any more".format(*endpoint))


class RpcChannel:
    """A client's connection to any reachable controller: opened on demand, replaced when lost.

    `cluster_id` returns the cluster that is asked (empty: any). At the address of a controller may be one of another
    cluster, with the same secret: its own were lost, or replaced.

    `follows`: a controller that is not active may tell the address of one that is not in `endpoints`, such as that of a
    replacement. It is tried until a call to it fails.

    The endpoints that it began with are not forgotten for those of `set_endpoints`, which may be older: the first
    metadata after all controllers have new addresses still name the old ones. While nobody answers, one of the first
    endpoints is tried in each round of the list, too.
    """

    def __init__(
        self,
        endpoints: list[Endpoint],
        network: Network,
        credentials: Credentials | None = None,
        *,
        follows: bool = False,
        cluster_id: Callable[[], str] = lambda: "",
    ) -> None:
        assert endpoints
        self._cluster_id = cluster_id
        self._follows = follows
        self._told: Endpoint | None = None
        """Address of the active controller, if `endpoints` does not have it."""
        self._endpoints = list(endpoints)
        self._first = tuple(endpoints)
        self._network = network
        self._credentials = credentials
        self._at = 0
        self._unanswered = 0
        """Turns since the last answer of any controller."""
        self._connection: RpcConnection | None = None
        self._opening: RpcConnection | None = None
        """The connection whose handshake is going on."""
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self._timeouts = 0
        self.opened = 0
        """Connections opened so far."""

    @property
    def endpoint(self) -> Endpoint:
        """Return the endpoint of the next call."""
        return self._told or self._endpoints[self._at]

    def set_endpoints(self, endpoints: list[Endpoint]) -> None:
        """Replace the list of controllers; a connection to one that stays in it is kept."""
        if not endpoints or endpoints == self._endpoints:
            return
        current, self._told = self.endpoint, None
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
            return await connection.call(method, params, timeout_s, self._cluster_id())
        except CallTimeout:
            self._timeouts += 1
            if self._timeouts >= MAX_TIMEOUTS or len(self._endpoints) > 1 or self._told is not None:
                self._turn(connection, drop=True)
            raise
        except NotController as error:
            self._unanswered = 0
            self._turn(connection, to=error.endpoint())
            raise
        except Unavailable:
            if connection is not None and not connection.is_open:
                self._turn(connection)
            raise
        except (TidelogError, AssertionError):
            raise
        except Exception as error:
            if connection is not None:
                connection.abort()  # whatever state it is in
                self._turn(connection)
            raise as_unavailable("network", error) from error
        finally:
            if connection is not None and connection.answers > seen:
                self._timeouts = self._unanswered = 0

    async def _open(self, timeout_s: float) -> RpcConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                endpoint = self.endpoint
                try:
                    protocol = await self._connect(endpoint, min(timeout_s, HANDSHAKE_S))
                except Exception as error:
                    if endpoint != self.endpoint:
                        raise _not_asked(endpoint) from error
                    if isinstance(error, Unavailable) or not isinstance(error, TidelogError):
                        self._turn(None)
                    raise
                if self._is_closed or endpoint != self.endpoint:
                    protocol.abort()
                    raise _not_asked(endpoint)
                self._connection = protocol
                self.opened += 1
            return self._connection

    async def _connect(self, endpoint: Endpoint, limit_s: float) -> RpcConnection:
        host, port = endpoint
        _, protocol = await self._network.connect(
            lambda: RpcConnection(credentials=self._credentials), host, port, timeout_s=limit_s
        )
        assert isinstance(protocol, RpcConnection)
        self._opening = protocol
        try:
            async with asyncio.timeout(limit_s):
                await protocol.wait_authentic()
        except TimeoutError:
            protocol.abort()
            raise Unavailable(f"{host}:{port} does not answer the handshake") from None
        except BaseException:
            protocol.abort()
            raise
        finally:
            self._opening = None
        return protocol

    def _turn(self, failed: RpcConnection | None, *, drop: bool = False, to: Endpoint | None = None) -> None:
        if failed is not None and failed is not self._connection:
            return  # another call has already switched
        self._timeouts = 0
        before, self._told = self.endpoint, None
        if to in self._endpoints:
            self._at = self._endpoints.index(to)
        elif to is not None and self._follows:
            self._told = to
        else:
            self._unanswered += 1
            self._told = self._unlisted()
            if self._told is None:
                self._at = (self._at + 1) % len(self._endpoints)
        if drop or len(self._endpoints) > 1 or before != self.endpoint:
            self.drop()

    def _unlisted(self) -> Endpoint | None:
        """Return one of the first endpoints that is not in the list, at the end of each round that nobody answered."""
        rounds, turn = divmod(self._unanswered, len(self._endpoints) + 1)
        unlisted = [each for each in self._first if each not in self._endpoints]
        return unlisted[rounds % len(unlisted)] if unlisted and turn == len(self._endpoints) else None

    def prefer(self, endpoint: Endpoint) -> None:
        """Switch to this controller if it is known and not the current one; as `turn`."""
        if endpoint in self._endpoints and endpoint != self.endpoint:
            self._timeouts = 0
            self._told = None
            self._at = self._endpoints.index(endpoint)
            self.drop()

    def turn(self) -> None:
        """Switch to the next controller. Calls in flight fail as after a lost connection."""
        self._turn(self._connection, drop=True)

    def drop(self) -> None:
        """Close the connection, also one that is being opened; the next call opens another."""
        if self._opening is not None:
            self._opening.abort()
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def close(self) -> None:
        """Close the connection, or cancel its opening."""
        self._is_closed = True
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
