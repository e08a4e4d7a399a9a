"""Connections between brokers, over the controller's RPC: same frames, same handshake, same bounds.

One method, `hint` (`broker.hints`): the source of a move tells the target what it will read, and the target answers
whether it is ready. It is sent once, in the background, and nothing waits for it: a hint that does not arrive costs its
target a read of the bucket, and a question to the controller. Without a
secret a broker takes hints on the loopback interface only, as a controller does: anybody else could make up records.

Invariants: at most `MAX_SENDING` hints are on their way out; a peer that does not answer for `SEND_S` is given up, and
left alone for `PAUSE_S`.

Entry: `PeerDoor` (the listener), `HintSender`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from broker.hints import HintBox, HintParams, HintReply, Told
from controller.addresses import split_address
from controller.client import ControllerClient
from controller.handshake import Credentials
from controller.rpc import RpcChannel, RpcConnection
from controller.rpc_listener import RpcListener
from runtime.clock import Clock
from runtime.errors import InvalidInput, TidelogError
from runtime.log_limit import LogLimiter
from runtime.msgpack import DECODE_ERRORS
from runtime.network import Network
from runtime.tasks import TaskSet

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 256
MAX_SENDING = 64
SEND_S = 1.0
PAUSE_S = 5.0

_replies: msgspec.msgpack.Decoder[HintReply | None] = msgspec.msgpack.Decoder(HintReply | None)


class PeerDoor:
    """Listens to other brokers."""

    def __init__(
        self,
        hints: HintBox,
        network: Network,
        clock: Clock,
        credentials: Credentials | None,
        ready: Callable[[], HintReply | None],
    ) -> None:
        """`ready()`: what to answer to a hint; None while this broker does not open partitions."""
        self._hints = hints
        self._ready = ready
        self._credentials = credentials
        self._rpc = RpcListener(
            self._handle, network=network, clock=clock, credentials=credentials, max_connections=MAX_CONNECTIONS
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, or 0 if hints are not taken here. Raises `AddressInUse`."""
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
        """Stop listening and drop the connections."""
        await self._rpc.close()


class HintSender:
    """Sends hints to the brokers that the image names."""

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
        self._limiter = LogLimiter(log, clock, burst=1, period_s=10.0)

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
            event = "a hint did not get through; the broker reads the bucket instead"
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
        """Give up what is on its way."""
        await self._tasks.close()
        for _, channel in self._channels.values():
            await channel.close()
