"""Connections of the workloads' clients, and what they know of the cluster.

Entry: `Client`: `ask` a broker, `leader` of a partition; `connection` for whoever has several requests on their way.
All failures come out as `Lost`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import Any

from runtime.errors import Unavailable
from runtime.network import Network
from simulation import kafka, kafka_ids
from simulation.kafka import Leader, Reader, Request

Address = tuple[str, int]
CONNECT_S = 1.0
METADATA_S = 2.0


class Lost(Exception):
    """No answer. Whether the request had an effect is not known, unless `unsent`."""

    def __init__(self, why: str, *, unsent: bool = False) -> None:
        super().__init__(why)
        self.unsent = unsent


class Connection(asyncio.Protocol):
    """One connection to a broker. Requests may be sent before earlier ones are answered."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._waiting: dict[int, tuple[Request, asyncio.Future[Any]]] = {}
        self._next_id = 0
        self._data = bytearray()
        self.transport: Any = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._data += data
        while len(self._data) >= 4:
            (size,) = struct.unpack_from(">i", self._data)
            if len(self._data) < 4 + size:
                return
            frame = bytes(self._data[4 : 4 + size])
            del self._data[: 4 + size]
            (correlation_id,) = struct.unpack_from(">i", frame)
            request, future = self._waiting.pop(correlation_id)
            if not future.done():
                future.set_result(request.read(Reader(frame, 4)))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.lost = True
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(Lost(f"connection lost: {exc or 'closed'}"))

    def send(self, request: Request) -> asyncio.Future[Any]:
        """Write a request behind those that are on their way; the future has what its answer says, or `Lost`."""
        self._next_id += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.lost:
            future.set_exception(Lost("the connection is lost", unsent=True))
            return future
        self._waiting[self._next_id] = request, future
        self.transport.write(request.frame(self._next_id, self._client_id))
        return future

    async def ask(self, request: Request, timeout_s: float) -> Any:
        """Send a request and return what its answer says. Raises `Lost`."""
        future = self.send(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            self.transport.abort()
            raise Lost(f"no answer within {timeout_s} s") from None


class Client:
    """One client process."""

    def __init__(self, network: Network, name: str, bootstrap: list[Address], ids: Mapping[str, bytes]) -> None:
        """`ids` has those of the topics that are named by id."""
        self._network = network
        self._ids = ids
        self.name = name
        self._bootstrap = bootstrap
        self._connections: dict[Address, Connection] = {}
        self._opening: dict[Address, asyncio.Lock] = {}
        self._brokers: dict[int, Address] = {}
        self._leaders: dict[tuple[str, int], int] = {}
        self._epochs: dict[tuple[str, int], int] = {}
        """The largest leader epoch that anybody told: what is older is not believed any more."""
        self._turn = 0

    async def ask(self, address: Address, request: Request, timeout_s: float) -> Any:
        """Send a request and return what its answer says. Raises `Lost`."""
        connection = await self.connection(address)
        return await connection.ask(request, timeout_s)

    async def connection(self, address: Address) -> Connection:
        """The connection to a broker; made if there is none. Raises `Lost`."""
        lock = self._opening.setdefault(address, asyncio.Lock())
        async with lock:
            connection = self._connections.get(address)
            if connection is None or connection.lost or connection.transport.is_closing():
                connection = await self._connect(address)
        return connection

    async def _connect(self, address: Address) -> Connection:
        try:
            _, protocol = await self._network.connect(
                lambda: Connection(self.name), address[0], address[1], timeout_s=CONNECT_S
            )
        except Unavailable as error:
            raise Lost(error.message, unsent=True) from None
        assert isinstance(protocol, Connection)
        self._connections[address] = protocol
        return protocol

    def close(self) -> None:
        """Drop all connections."""
        for connection in self._connections.values():
            if not connection.lost:
                connection.transport.abort()

    async def ask_any(self, request: Request, timeout_s: float) -> Any:
        """Ask one broker, another one each time. Raises `Lost`."""
        known = list(self._brokers.values()) or self._bootstrap
        self._turn += 1
        return await self.ask(known[self._turn % len(known)], request, timeout_s)

    async def refresh(self, topic: str) -> int:
        """Ask where the topic's partitions are; returns the topic's error. Raises `Lost`."""
        topic_id = self._ids.get(topic)
        request = kafka.metadata([topic]) if topic_id is None else kafka_ids.metadata(topic_id)
        try:
            answer = await self.ask_any(request, METADATA_S)
        except Lost:
            self._brokers.clear()  # perhaps those are gone: begin anew
            raise
        if topic_id is None:
            self._brokers, topics = answer
            error, partitions = topics[0].error, topics[0].partitions
        else:
            self._brokers, error, _, partitions = answer
        for partition in partitions:
            known = partition.leader if partition.error == 0 else -1
            self._learn(topic, partition.number, Leader(known, partition.leader_epoch))
        return int(error)

    def _learn(self, topic: str, partition: int, told: Leader) -> None:
        if told.epoch >= self._epochs.get((topic, partition), -1):
            self._epochs[topic, partition] = told.epoch
            self._leaders[topic, partition] = told.broker

    async def leader(self, topic: str, partition: int) -> Address | None:
        """Where the partition's leader is, if that is known."""
        if self._leaders.get((topic, partition), -1) < 0:
            await self.refresh(topic)
        return self._brokers.get(self._leaders.get((topic, partition), -1))

    def forget(self, topic: str, partition: int, told: Leader | None = None) -> None:
        """What was known of the leader is wrong, or it does not answer; who is `told` instead is asked next."""
        self._leaders.pop((topic, partition), None)
        if told is not None and told.broker in self._brokers:
            self._learn(topic, partition, told)
