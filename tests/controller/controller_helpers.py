"""Short ways to drive a `ControllerState` and a `ControllerNode` in tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from tidelog.controller.client.client import ClientTiming, ControllerClient
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import from_wire
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.connection import CommandParams, Endpoint, RpcChannel, RpcConnection
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import Listener, ProtocolFactory, TcpNetwork
from tidelog.storage.commits import CommitObjects, NewObject, pack_ranges

TOPIC = bytes(range(16))
DELAY_MS = 1_000


class Driver:
    """Applies commands to a state and mirrors its mutations into an image, as a follower would."""

    def __init__(self) -> None:
        self.state = ControllerState()
        self.image = Image()
        """Kept by deltas as they are sent: it finds the streams' committed ends itself."""
        self.local_image = Image()
        """Kept by deltas of this process, which have those rows ready."""
        self.index = 0
        self.now_ms = 1_000
        self.term = 1
        self.log: list[c.Envelope] = []
        self.run(c.BecomeActive(0, 1, "cluster", DELAY_MS))

    def envelope(self, command: c.AnyCommand, client: str = "", sequence: int = 0, done: int = 0) -> c.Envelope:
        return c.Envelope(c.FORMAT_VERSION, self.term, self.now_ms, client, sequence, done, command)

    def apply(self, envelope: c.Envelope) -> c.Result:
        self.index += 1
        self.log.append(envelope)
        envelope = c.decode_envelope(c.encode(envelope))  # what the log would have carried
        applied = self.state.apply(envelope, self.index)
        if applied.mutations:
            self.image.apply(Delta(self.index, applied.mutations))
            self.local_image.apply(Delta(self.index, applied.mutations, applied.ends))
        return c.decode_result(applied.result)

    def run(self, command: c.AnyCommand, kind: Any = Any) -> Any:
        """The value of a command, or the error it was refused with, raised."""
        result = self.apply(self.envelope(command))
        if result.error is not None:
            raise from_wire(result.error)
        return msgspec.msgpack.decode(result.value, type=kind)

    def broker(self, broker_id: int = 0, incarnation: str = "a") -> int:
        """Register and elect; the master epoch."""
        self.run(c.RegisterBroker(broker_id, "check", incarnation, "host", 9092, "", ""), int)
        return int(self.run(c.Elect(broker_id, broker_id))[4])

    def topic(self, partitions: int = 1, name: str = "t", topic_id: bytes = TOPIC) -> list[int]:
        """Create a topic; the first stream of each partition."""
        self.run(c.CreateTopic(topic_id, name, partitions, {}, False, False, None))
        return [each.first_stream for each in self.image.partitions(topic_id)]

    def prepare(self, count: int = 1, ttl_ms: int = 10_000) -> int:
        return int(self.run(c.PrepareObjects(count, ttl_ms), int))

    def commit(self, epoch: int, wal: tuple[int, int], *objects: NewObject, replica_set: int = 0) -> None:
        self.run(c.Commit(CommitObjects(replica_set, epoch, *wal, tuple(objects))))


def new_object(object_id: int, *ranges: tuple[int, int, int]) -> NewObject:
    return NewObject(object_id, 1, 100, pack_ranges(ranges))


def make_node(directory: Path, **kwargs: Any) -> ControllerNode:
    """A single controller; `kwargs` are those of `ControllerNode` and of what it is started with."""
    settings = kwargs.pop("settings", None) or ControllerSettings()
    identity = {name: kwargs.pop(name) for name in ("credentials", "serves_broker") if name in kwargs}
    sections = {
        name: kwargs.pop(name)
        for name in ("balancer", "scale", "delete_delay_ms", "feed", "partitions_per_deletion")
        if name in kwargs
    }
    world = {
        name: kwargs.pop(name) for name in ("network", "delete_objects", "state_store", "consensus") if name in kwargs
    }
    return ControllerNode(
        ControllerIdentity(0, directory, **identity),
        ControllerSections(settings, **sections),
        ControllerWorld(world.pop("network", TcpNetwork()), SystemClock(), random.Random(), **world),
        **kwargs,
    )


def make_client(*addresses: tuple[str, int], **kwargs: Any) -> ControllerClient:
    """A client; `kwargs` are those of `ControllerClient` and of its `ClientTiming`."""
    timing = {name: kwargs.pop(name) for name in ("budget_s", "heartbeat_interval_s") if name in kwargs}
    network = kwargs.pop("network", None) or TcpNetwork()
    return ControllerClient(
        list(addresses), network, SystemClock(), random.Random(), timing=ClientTiming(**timing), **kwargs
    )


class KeptNetwork(TcpNetwork):
    """Keeps the protocols of its connections, of both directions, so that a test can lose them; may make no new ones.

    `redirected`: the address that is connected instead of another one.
    """

    def __init__(self) -> None:
        self.connections: list[RpcConnection] = []
        self.transports: list[asyncio.Transport] = []
        """Of the connections that were made from here."""
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0
        """Calls of `connect` that wait for `open`."""
        self.redirected: dict[Endpoint, Endpoint] = {}

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        return await super().listen(lambda: self._kept(factory()), host, port)

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        self.waiting += 1
        await self.open.wait()
        self.waiting -= 1
        to = self.redirected.get((host, port), (host, port))
        made = await super().connect(lambda: self._kept(factory()), *to, timeout_s=timeout_s)
        self.transports.append(cast("asyncio.Transport", made[0]))
        return made

    def _kept(self, protocol: asyncio.BaseProtocol) -> asyncio.BaseProtocol:
        assert isinstance(protocol, RpcConnection)
        self.connections.append(protocol)
        return protocol

    def lose(self) -> None:
        """Lose all connections."""
        for connection in self.connections:
            connection.abort()


async def ask(node: ControllerNode, method: str, params: Any) -> msgspec.Raw:
    """Send one request as any process may."""
    channel = RpcChannel([node.address], TcpNetwork())
    try:
        return await channel.call(method, params, 5)
    finally:
        await channel.close()


async def send(node: ControllerNode, command: c.AnyCommand) -> None:
    """Send a command without a client. Raises its refusal."""
    result = c.decode_result(
        await ask(node, "command", CommandParams("no client", 1, 1, msgspec.Raw(c.encode(command))))
    )
    if result.error is not None:
        raise from_wire(result.error)


async def until(
    condition: Callable[[], bool], timeout_s: float = 60.0, nudge: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Wait for a condition, with a deadline; `nudge` is done between looks."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            if nudge is not None:
                await nudge()
            await asyncio.sleep(0.005)
