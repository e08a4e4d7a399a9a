"""Connections between brokers, over the controller's RPC: same frames, same handshake, same limits.

One method, `hint` (`tidelog.broker.partitions.hints`): the source of a move sends the target the data that it will
need,
and the target replies whether it is ready. It is sent once, in the background, and nothing waits for it: a lost hint
costs the target a read of the bucket and a request to the controller. Without a
secret a broker accepts hints on the loopback interface only, as a controller does: they could be forged.

Invariants: at most `MAX_SENDING` hints are being sent; a call to a peer times out after `SEND_S`, and the peer gets no
hints for `PAUSE_S`.

Entry: `PeerListener` (the listener), `HintSender`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from tidelog.broker.partitions.hints import HintBox, HintParams, HintReply, Told
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.connection import AdoptPeer, RpcChannel, RpcConnection
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
    ) -> None:
        """`ready()` returns the reply to a hint; None while this broker does not open partitions.

        `adopt_wal` takes over the connections of followers; without it, and without credentials, there are none.
        """
        self._hints = hints
        self._ready = ready
        self._credentials = credentials
        self._rpc = RpcListener(
            self._handle,
            network=network,
            clock=clock,
            credentials=credentials,
            max_connections=MAX_CONNECTIONS,
            adopt_wal=adopt_wal if credentials is not None else None,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, or 0 if hints are not accepted. Raises `AddressInUse`."""
        if self._credentials is None and host not in LOOPBACK:
            return 0
        await self._rpc.start(host, port)
        return self._rpc.address[1]

    async def _handle(self, connection: RpcConnection, method: str, params: msgspec.Raw) -> bytes:
        if method != "hint":
            raise InvalidInput(f"there is no method {method[:50]!r} between brokers")
        self._hints.take(msgspec.msgpack.decode(params, type=HintParams))
        return msgspec.msgpack.encode(self._ready())

    async def close(self) -> None:
        """Stop listening and close the connections."""
        await self._rpc.close()


class HintSender:
    """Sends hints to the brokers named in the image."""

    def __init__(
        self,
        hints: HintBox,
        controller: ControllerClient,
        network: Network,
        clock: Clock,
        credentials: Credentials | None,
    ) -> None:
        self._counts = hints.counts
        self._controller = controller
        self._network = network
        self._clock = clock
        self._credentials = credentials
        self._channels: dict[int, tuple[str, RpcChannel]] = {}
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
        self._tasks.spawn(self._tell(told, master.id, master.peer_address, hint), "hint")
        return told

    async def _tell(self, told: Told, broker: int, address: str, hint: HintParams) -> None:
        told.ready = await self._send(broker, address, hint)

    async def _send(self, broker: int, address: str, hint: HintParams) -> HintReply | None:
        try:
            channel = await self._channel(broker, address)
            reply = _replies.decode(await channel.call("hint", hint, SEND_S))
        except (TidelogError, *DECODE_ERRORS) as error:
            self._counts["unsent"] += 1
            self._paused_until[broker] = self._clock.monotonic() + PAUSE_S
            event = "hint not delivered; the broker reads the bucket instead"
            self._limiter.line(str(broker), logging.WARNING, event, {"broker": broker, "error": str(error)})
            return None
        self._counts["sent"] += 1
        return reply

    async def _channel(self, broker: int, address: str) -> RpcChannel:
        known = self._channels.get(broker)
        if known is not None and known[0] == address:
            return known[1]
        channel = RpcChannel([split_address(address)], self._network, self._credentials)
        self._channels[broker] = (address, channel)
        if known is not None:
            await known[1].close()
        return channel

    async def close(self) -> None:
        """Cancel the hints being sent."""
        await self._tasks.close()
        for _, channel in self._channels.values():
            await channel.close()
