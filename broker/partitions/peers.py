"""Connections between brokers, over the controller's RPC: same frames, same handshake, same limits.

The method `hint` (`tidelog.broker.partitions.hints`): the source of a move sends the target the data that it will
need, and the target replies whether it is ready. It is sent once, in the background, and nothing waits for it: a lost
hint costs the target a read of the bucket and a request to the controller. Other components add methods of their own
(`PeerListener.serve`). Without a secret a broker accepts calls on the loopback interface only, as a controller does:
they could be forged.

Invariants: at most `MAX_SENDING` hints are being sent; a call to a peer times out after `SEND_S`, and the peer gets no
hints for `PAUSE_S`.

Entry: `PeerListener` (the listener), `HintSender`; `tidelog.broker.partitions.peer_calls` has the connections.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec

from tidelog.broker.partitions.hints import HintBox, HintParams, HintReply, Told
from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.rpc.connection import AdoptPeer, RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.listener import RpcListener
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, TidelogError
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.runtime.network import Network
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 256
MAX_SENDING = 64
SEND_S = 1.0
PAUSE_S = 5.0

PeerMethod = Callable[[msgspec.Raw], Awaitable[bytes]]
"""Takes the encoded parameters of a call and returns its encoded result. Its `TidelogError` is the caller's."""

_replies: msgspec.msgpack.Decoder[HintReply | None] = msgspec.msgpack.Decoder(HintReply | None)


class PeerListener:
    """The listener for other brokers."""

    def __init__(
        self,
        hints: HintBox,
        network: Network,
        clock: Clock,
        credentials: Credentials | None,
        ready: Callable[[], HintReply | None],
        *,
        adopt_wal: AdoptPeer | None = None,
        cluster_id: Callable[[], str] = lambda: "",
    ) -> None:
        """`ready()` returns the reply to a hint; None while this broker does not open partitions.

        `adopt_wal` takes over the connections of followers; without it, and without credentials, there are none.
        """
        self._hints = hints
        self._ready = ready
        self._cluster_id = cluster_id
        self._credentials = credentials
        self._methods: dict[str, PeerMethod] = {"hint": self._take_hint}
        self._rpc = RpcListener(
            self._handle,
            network=network,
            clock=clock,
            credentials=credentials,
            max_connections=MAX_CONNECTIONS,
            adopt_wal=adopt_wal if credentials is not None else None,
        )

    def serve(self, method: str, called: PeerMethod) -> None:
        """Answer a method; to be called before `start`."""
        assert method not in self._methods, method
        self._methods[method] = called

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, or 0 if calls are not accepted. Raises `AddressInUse`."""
        if self._credentials is None and host not in LOOPBACK:
            return 0
        await self._rpc.start(host, port)
        return self._rpc.address[1]

    async def _handle(self, connection: RpcConnection, method: str, params: msgspec.Raw) -> bytes:
        connection.require_cluster(self._cluster_id())
        called = self._methods.get(method)
        if called is None:
            raise InvalidInput(f"there is no method {method[:50]!r} between brokers")
        return await called(params)

    async def _take_hint(self, params: msgspec.Raw) -> bytes:
        self._hints.take(msgspec.msgpack.decode(params, type=HintParams))
        return msgspec.msgpack.encode(self._ready())

    async def close(self) -> None:
        """Stop listening and close the connections."""
        await self._rpc.close()


class HintSender:
    """Sends hints to the brokers named in the image."""

    def __init__(self, hints: HintBox, controller: ControllerClient, calls: PeerCalls, clock: Clock) -> None:
        self._counts = hints.counts
        self._controller = controller
        self._calls = calls
        self._clock = clock
        self._paused_until: dict[int, float] = {}
        self._tasks = TaskSet("hints")
        self._limiter = LogLimiter(logger, clock, burst=1, period_s=10.0)

    def send(self, replica_set: int, hint: HintParams | None) -> Told:
        """Send a hint to the master of a replica set, in the background. Never raises, never waits."""
        told = Told()
        master = self._controller.image.master_of(replica_set)
        if (
            hint is None
            or master is None
            or not master.peer_address
            or len(self._tasks) >= MAX_SENDING
            or self._clock.monotonic() < self._paused_until.get(master.id, 0.0)
        ):
            self._counts["unsent"] += 1
            return told
        self._tasks.spawn(self._tell(told, master.id, hint), "hint")
        return told

    async def _tell(self, told: Told, broker: int, hint: HintParams) -> None:
        told.ready = await self._send(broker, hint)

    async def _send(self, broker: int, hint: HintParams) -> HintReply | None:
        try:
            reply = _replies.decode(await self._calls.call(broker, "hint", hint, SEND_S))
        except (TidelogError, *DECODE_ERRORS) as error:
            self._counts["unsent"] += 1
            self._paused_until[broker] = self._clock.monotonic() + PAUSE_S
            event = "hint not delivered; the broker reads the bucket instead"
            self._limiter.line(str(broker), logging.WARNING, event, {"broker": broker, "error": str(error)})
            return None
        self._counts["sent"] += 1
        return reply

    async def close(self) -> None:
        """Cancel the hints being sent."""
        await self._tasks.close()
