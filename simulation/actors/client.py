"""Connections of the workloads' clients, and their view of the cluster's metadata.

Entry: `Client`: `ask` a broker, `leader` of a partition; `connection` for actors with several requests in flight. All
failures are raised as `Lost`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import Any

from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import Network
from tidelog.runtime.waiting import within
from tidelog.simulation.actors import kafka, kafka_ids
from tidelog.simulation.actors.kafka import FieldReader, Leader, Request

Address = tuple[str, int]
CONNECT_S = 1.0
METADATA_S = 2.0


class Lost(Exception):
    """No response. Whether the request took effect is unknown, unless `unsent`."""

    def __init__(self, why: str, *, unsent: bool = False) -> None:
        super().__init__(why)
        self.unsent = unsent


class ClientConnection(asyncio.Protocol):
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
                future.set_result(request.read(FieldReader(frame, 4)))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.lost = True
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(Lost(f"connection lost: {exc or 'closed'}"))

    def send(self, request: Request) -> asyncio.Future[Any]:
        """Write a request after those in flight; the future has the result of the response, or `Lost`."""
        self._next_id += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.lost:
            future.set_exception(Lost("the connection is lost", unsent=True))
            return future
        self._waiting[self._next_id] = request, future
        self.transport.write(request.frame(self._next_id, self._client_id))
        return future

    async def ask(self, request: Request, timeout_s: float) -> Any:
        """Send a request and return the result of the response. Raises `Lost`."""
        future = self.send(request)
        try:
            return await within(future, timeout_s)
        except TimeoutError:
            self.transport.abort()
            raise Lost(f"no answer within {timeout_s} s") from None


class Client:
    """One client process."""

    def __init__(self, network: Network, name: str, bootstrap: list[Address], ids: Mapping[str, bytes]) -> None:
        """`ids` contains the ids of topics that are identified by id."""
        self._network = network
        self._ids = ids
        self.name = name
        self._bootstrap = bootstrap
        self._connections: dict[Address, ClientConnection] = {}
        self._opening: dict[Address, asyncio.Lock] = {}
        self._brokers: dict[int, Address] = {}
        self._leaders: dict[tuple[str, int], int] = {}
        self._epochs: dict[tuple[str, int], int] = {}
        """The largest leader epoch received: older information is ignored."""
        self._turn = 0

    async def ask(self, address: Address, request: Request, timeout_s: float) -> Any:
        """Send a request and return the result of the response. Raises `Lost`."""
        connection = await self.connection(address)
        return await connection.ask(request, timeout_s)

    async def connection(self, address: Address) -> ClientConnection:
        """Return the connection to a broker; connect if there is none. Raises `Lost`."""
        lock = self._opening.setdefault(address, asyncio.Lock())
        async with lock:
            connection = self._connections.get(address)
            if connection is None or connection.lost or connection.transport.is_closing():
                connection = await self._connect(address)
        return connection

    async def _connect(self, address: Address) -> ClientConnection:
        try:
            _, protocol = await self._network.connect(
                lambda: ClientConnection(self.name), address[0], address[1], timeout_s=CONNECT_S
            )
        except Unavailable as error:
            raise Lost(error.message, unsent=True) from None
        assert isinstance(protocol, ClientConnection)
        self._connections[address] = protocol
        return protocol

    def close(self) -> None:
        """Drop all connections."""
        for connection in self._connections.values():
            if not connection.lost:
                connection.transport.abort()

    async def ask_any(self, request: Request, timeout_s: float) -> Any:
        """Send a request to one broker, round-robin; to the next one if that accepts no connection. Raises `Lost`."""
        known = list(self._brokers.values()) or self._bootstrap
        for others in reversed(range(len(known))):
            self._turn += 1
            try:
                return await self.ask(known[self._turn % len(known)], request, timeout_s)
            except Lost as lost:
                if not lost.unsent or not others:
                    raise
        raise AssertionError("there is always a broker to ask")

    async def refresh(self, topic: str) -> int:
        """Request the placement of the topic's partitions; return the topic's error. Raises `Lost`."""
        topic_id = self._ids.get(topic)
        request = kafka.metadata([topic]) if topic_id is None else kafka_ids.metadata(topic_id)
        try:
            answer = await self.ask_any(request, METADATA_S)
        except Lost:
            self._brokers.clear()  # these brokers may be gone: start again with the bootstrap addresses
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
        """The address of the partition's leader, if known."""
        if self._leaders.get((topic, partition), -1) < 0:
            await self.refresh(topic)
        return self.address_of(self._leaders.get((topic, partition), -1))

    def epoch(self, topic: str, partition: int) -> int:
        """The largest leader epoch that was received, or -1."""
        return self._epochs.get((topic, partition), -1)

    def address_of(self, broker_id: int) -> Address | None:
        """The address of a broker, if known."""
        return self._brokers.get(broker_id)

    def forget(self, topic: str, partition: int, told: Leader | None = None) -> None:
        """Drop the known leader, which is wrong or does not respond; `told` is the reported new leader."""
        self._leaders.pop((topic, partition), None)
        if told is not None and told.broker in self._brokers:
            self._learn(topic, partition, told)
