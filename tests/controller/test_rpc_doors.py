"""Connections that prove nothing take no place of those that have proven the cluster's secret."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.kafka_world import until
from tidelog.controller.rpc.connection import RpcChannel, RpcConnection
from tidelog.controller.rpc.doors import ConnectionDoors, address_group
from tidelog.controller.rpc.handshake import NO_NODE, Credentials
from tidelog.controller.rpc.listener import RpcListener
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.network import TcpNetwork

SECRET = b"a secret of enough bytes"
LIMIT = 8


async def answer(_connection: RpcConnection, _method: str, _params: msgspec.Raw) -> bytes:
    return msgspec.msgpack.encode("well")


@contextlib.asynccontextmanager
async def listening(secret: bytes | None = SECRET, limit: int = LIMIT) -> AsyncIterator[RpcListener]:
    credentials = Credentials(secret, 1) if secret is not None else None
    listener = RpcListener(
        answer, network=TcpNetwork(), clock=SystemClock(), credentials=credentials, max_connections=limit
    )
    await listener.start("127.0.0.1", 0)
    try:
        yield listener
    finally:
        await listener.close()


class Peers:
    """Connections to the listener, closed at the end."""

    def __init__(self, listener: RpcListener) -> None:
        self._listener = listener
        self._channels: list[RpcChannel] = []
        self._silent: list[asyncio.StreamWriter] = []

    async def say_nothing(self, count: int) -> None:
        """Open connections that send nothing."""
        for _ in range(count):
            _, writer = await asyncio.open_connection(*self._listener.address)
            self._silent.append(writer)

    async def call(self, node_id: int = NO_NODE, secret: bytes | None = SECRET) -> str:
        """The answer to a call on a connection of its own, which stays open."""
        credentials = Credentials(secret, node_id) if secret is not None else None
        channel = RpcChannel([self._listener.address], TcpNetwork(), credentials)
        self._channels.append(channel)
        return msgspec.msgpack.decode(await channel.call("how", None, 5.0), type=str)

    async def close(self) -> None:
        for writer in self._silent:
            writer.transport.abort()
        for channel in self._channels:
            await channel.close()


@contextlib.asynccontextmanager
async def peers_of(listener: RpcListener) -> AsyncIterator[Peers]:
    peers = Peers(listener)
    try:
        yield peers
    finally:
        await peers.close()


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a secret", "without one"])
async def test_silent_connections_do_not_lock_nodes_and_tools_out(secret: bytes | None) -> None:
    async with listening(secret) as listener, peers_of(listener) as peers:
        await peers.say_nothing(300)
        assert await peers.call(5, secret) == "well"
        assert await peers.call(NO_NODE, secret) == "well"


async def test_a_flood_is_bounded_while_proven_connections_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as listener, peers_of(listener) as peers:
        assert await peers.call(5) == "well"
        await peers.say_nothing(300)
        await until(lambda: len(listener.connections) <= 129, "only so many of one address wait for their proof")
        assert await peers.call(6) == "well"


async def test_a_peer_with_a_wrong_secret_takes_no_place() -> None:
    async with listening(limit=2) as listener, peers_of(listener) as peers:
        for _ in range(6):
            with pytest.raises(Unavailable):
                await peers.call(5, b"another secret, as long")
        assert await peers.call(5) == "well"


async def test_tools_leave_places_for_nodes_and_are_told_so() -> None:
    async with listening() as listener, peers_of(listener) as peers:
        told: TidelogError | None = None
        for _ in range(LIMIT + 1):
            try:
                assert await peers.call(NO_NODE) == "well"
            except TidelogError as error:
                told = error
        assert told is not None and "too many connections" in told.message
        assert await peers.call(5) == "well"
        assert await peers.call(6) == "well"


def test_the_total_of_unproven_connections_is_bounded_at_the_cost_of_the_busiest_address() -> None:
    doors: ConnectionDoors[int] = ConnectionDoors(4, max_unproven=6, max_unproven_per_address=4)
    for number in range(4):
        assert doors.enter(number, "10.0.0.1") is None
    assert doors.enter(10, "10.0.0.2") is None
    assert doors.enter(11, "10.0.0.3") is None
    assert doors.enter(12, "10.0.0.4") == 0, "the oldest of the address that has the most"
    assert doors.enter(13, "10.0.0.1") == 1
    assert doors.unproven == 6
    assert doors.prove(13, is_node=True)
    assert (doors.unproven, doors.proven) == (5, 1)
    for number in (1, 2, 3, 10, 11, 12, 13):
        doors.leave(number)
    assert (doors.unproven, doors.proven) == (0, 0)


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a name", "a name"),
    ],
)
def test_an_ipv6_host_counts_as_one_address(host: str, group: str) -> None:
    assert address_group(host) == group
