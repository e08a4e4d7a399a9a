"""Connections with TLS on both loops: who is let in, who is refused with what words, and what strangers may hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.storage.wal_harness import until
from tests.support.certificates import Authority
from tests.support.loops import BOTH_LOOPS
from tidelog.controller.rpc.connection import RpcChannel, RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.listener import RpcListener
from tidelog.controller.rpc.tls_network import TlsNetwork
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.network import ConnectionRefused, Listener, Network, TcpNetwork, refuses
from tidelog.runtime.tls import MutualTls, TlsFiles

LOOPS = BOTH_LOOPS
SECRET = b"a secret of the cluster"


class Echo(asyncio.Protocol):
    """Sends back what it gets."""

    def __init__(self, made: list[Echo]) -> None:
        self.transport: asyncio.Transport | None = None
        self.received = bytearray()
        self.is_lost = False
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._made.append(self)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None, "it has no connection yet"
        self.received += data
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class Talker(Echo):
    """Says something as soon as it is connected, and listens."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport.write(b"hello")  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.received += data


def network(files: TlsFiles) -> TlsNetwork:
    return TlsNetwork(MutualTls(files, SystemClock()), SystemClock())


class World:
    """A listener with TLS."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.made: list[Echo] = []
        self.network = network(authority.issue("server"))
        self.listener: Listener | None = None

    async def start(self) -> World:
        self.listener = await self.network.listen(lambda: Echo(self.made), "127.0.0.1", 0)
        return self

    @property
    def address(self) -> tuple[str, int]:
        assert self.listener is not None
        return self.listener.address

    async def talk(self, using: Network, host: str = "127.0.0.1") -> Talker:
        talkers: list[Echo] = []
        _, talker = await using.connect(lambda: Talker(talkers), host, self.address[1], timeout_s=10)
        assert isinstance(talker, Talker)
        return talker

    async def close(self) -> None:
        assert self.listener is not None
        await self.listener.close()
        for echo in self.made:
            if echo.transport is not None:
                echo.transport.abort()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    one = await World(Authority(tmp_path)).start()
    yield one
    await one.close()


async def test_both_sides_of_one_authority_are_connected(world: World) -> None:
    for turn in range(20):  # what the client says may come with the end of its handshake
        talker = await world.talk(network(world.authority.issue("client")))
        await until(lambda talker=talker: bytes(talker.received) == b"hello")  # type: ignore[misc]
        assert talker.transport is not None
        shown = talker.transport.get_extra_info("ssl_object")
        assert shown.version() == "TLSv1.3"
        talker.transport.abort()
        await until(lambda turn=turn: world.made[turn].is_lost)  # type: ignore[misc]
    assert world.network.problems() == []


async def refused_by_server(world: World, using: Network) -> str:
    """The problem of the server when this client connects; it gets through nowhere."""
    made = len(world.made)
    with contextlib.suppress(Unavailable):  # with TLS 1.3 the client's side is complete before the server has looked
        talker = await world.talk(using)
        await until(lambda: talker.is_lost)
        assert not talker.received
    await until(lambda: world.network.problems() != [])
    assert len(world.made) == made
    (problem,) = world.network.problems()
    return problem


async def test_a_client_without_tls_is_refused_and_the_log_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    problem = await refused_by_server(world, TcpNetwork())
    assert "does not begin with TLS" in problem and "127.0.0.1" in problem
    assert "without valid TLS was refused" in caplog.text


async def test_a_client_of_another_authority_is_refused(world: World, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "other").issue("client")
    trusting = world.authority.directory / "both.pem"
    trusting.write_bytes(other.ca_file.read_bytes() + world.authority.ca_file.read_bytes())
    problem = await refused_by_server(world, network(other._replace(ca_file=trusting)))
    assert "its certificate is not accepted: self-signed certificate in certificate chain" in problem


async def test_a_client_without_a_certificate_is_refused(world: World) -> None:
    context = ssl.create_default_context(cafile=world.authority.ca_file)
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*world.address, ssl=context)
        assert await reader.read() == b""
        writer.transport.abort()
    await until(lambda: world.network.problems() != [])
    assert "peer did not return a certificate" in world.network.problems()[0]
    assert not world.made


async def test_a_server_of_another_authority_is_left(world: World, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "other").issue("client")
    with pytest.raises(Unavailable, match=r"certificate of .* is not accepted: self-signed certificate") as caught:
        await world.talk(network(other))
    assert "tls_ca_file" in str(caught.value)
    assert not world.made


async def test_a_certificate_must_name_the_host_unless_that_is_turned_off(world: World) -> None:
    files = world.authority.issue("client")
    with pytest.raises(Unavailable, match=r"not accepted: Hostname mismatch.*tls_check_host_names"):
        await world.talk(network(files), "localhost")
    talker = await world.talk(network(files._replace(check_host_names=False)), "localhost")
    await until(lambda: bytes(talker.received) == b"hello")
    assert talker.transport is not None
    talker.transport.abort()


async def test_a_certificate_that_has_expired_since_the_start_is_refused(world: World) -> None:
    short = world.authority.issue("client", days=2 / 86_400)
    using = network(short)
    await asyncio.sleep(2.1)  # until it has expired: certificates have whole seconds
    problem = await refused_by_server(world, using)
    assert "certificate has expired" in problem
    assert any("has expired" in each for each in using.problems())


async def test_a_listener_without_tls_is_left_and_says_so(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def nothing(_connection: RpcConnection, _method: str, _params: msgspec.Raw) -> bytes:
        return b""

    caplog.set_level(logging.WARNING)
    credentials = Credentials(SECRET, 1)
    plain = RpcListener(nothing, network=TcpNetwork(), clock=SystemClock(), credentials=credentials, max_connections=4)
    await plain.start("127.0.0.1", 0)
    channel = RpcChannel([plain.address], world.network, credentials)
    try:
        with pytest.raises(Unavailable, match=r"no TLS with .*replication\.tls_"):
            await channel.call("anything", None, 5.0)
        told = [record for record in caplog.records if "TLS" in str(getattr(record, "error", ""))]
        assert told and "this listener has none" in str(getattr(told[0], "error", ""))
    finally:
        await channel.close()
        await plain.close()


async def test_a_listener_that_ends_and_one_that_is_not_there(world: World) -> None:
    silent = await asyncio.start_server(lambda _reader, writer: writer.transport.abort(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match="no TLS with"):
        await world.network.connect(asyncio.Protocol, "127.0.0.1", port, timeout_s=5)
    silent.close()
    await silent.wait_closed()
    with pytest.raises(ConnectionRefused):
        await world.network.connect(asyncio.Protocol, "127.0.0.1", port, timeout_s=5)


async def test_a_listener_that_says_nothing_is_left_in_time(world: World) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable):
            await world.network.connect(asyncio.Protocol, *silent.getsockname(), timeout_s=0.2)
        assert asyncio.get_running_loop().time() - began < 5


async def test_who_only_looks_whether_somebody_listens_is_no_problem(world: World) -> None:
    for _ in range(5):
        assert not await refuses(TcpNetwork(), *world.address, 5.0)
    talker = await world.talk(network(world.authority.issue("client")))
    await until(lambda: bytes(talker.received) == b"hello")
    assert talker.transport is not None
    talker.transport.abort()
    assert world.network.problems() == []


def hello_of_tls() -> bytes:
    """The first bytes of a client with TLS."""
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("sent", ["nothing", "a part of a hello", "a hello", "a byte at a time"])
async def test_half_open_handshakes_end_in_time_and_others_get_through(
    world: World, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr("tidelog.controller.rpc.tls_network.HANDSHAKE_S", 1.0)
    hello = hello_of_tls()
    first = {"nothing": b"", "a part of a hello": hello[:40], "a hello": hello, "a byte at a time": hello[:1]}[sent]
    peers = [await asyncio.open_connection(*world.address) for _ in range(20)]
    for _, writer in peers:
        writer.write(first)
    talker = await world.talk(network(world.authority.issue("client")))
    await until(lambda: bytes(talker.received) == b"hello")

    async def ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            for byte in hello[1:]:
                if sent != "a byte at a time" or writer.transport.is_closing():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
            while await reader.read(1000):
                pass
        writer.transport.abort()

    await asyncio.wait_for(asyncio.gather(*(ended(*peer) for peer in peers)), 30)
    assert len(world.made) == 1
    assert "TLS was not finished within 1 s" in world.network.problems()[0]
    assert talker.transport is not None
    talker.transport.abort()


async def test_the_oldest_of_too_many_half_open_handshakes_gives_way(world: World) -> None:
    peers = []
    try:
        for _ in range(200):
            peers += [await asyncio.open_connection(*world.address)]
        reader, _ = peers[0]
        with contextlib.suppress(OSError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        assert "this was the oldest" in world.network.problems()[0]
        talker = await world.talk(network(world.authority.issue("client")))
        await until(lambda: bytes(talker.received) == b"hello")
        assert talker.transport is not None
        talker.transport.abort()
    finally:
        for _, writer in peers:
            writer.transport.abort()


async def test_closing_ends_half_open_handshakes(world: World) -> None:
    reader, writer = await asyncio.open_connection(*world.address)
    writer.write(hello_of_tls()[:10])
    await writer.drain()
    await world.close()
    with contextlib.suppress(OSError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.transport.abort()
    assert not world.made


async def test_a_certificate_that_is_replaced_is_shown_to_who_connects_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.runtime.tls.LOOK_S", 0.0)
    using = network(world.authority.issue("client"))

    async def serial() -> tuple[str, Talker]:
        talker = await world.talk(using)
        await until(lambda: bytes(talker.received) == b"hello")
        assert talker.transport is not None
        return talker.transport.get_extra_info("peercert")["serialNumber"], talker

    first, old = await serial()
    world.authority.issue("server")
    second, new = await serial()
    assert first != second
    assert old.transport is not None and new.transport is not None
    old.transport.write(b" still")  # the connection before goes on
    await until(lambda: bytes(old.received) == b"hello still")
    old.transport.abort()
    new.transport.abort()


async def test_a_call_over_tls(world: World) -> None:
    async def echo(_connection: RpcConnection, method: str, params: msgspec.Raw) -> bytes:
        return bytes(params)

    listener = RpcListener(
        echo,
        network=world.network,
        clock=SystemClock(),
        credentials=Credentials(SECRET, 1),
        max_connections=4,
    )
    await listener.start("127.0.0.1", 0)
    channel = RpcChannel([listener.address], network(world.authority.issue("client")), Credentials(SECRET, 2))
    wrong = RpcChannel([listener.address], network(world.authority.issue("client")), Credentials(b"x" * 16, 2))
    try:
        for size in (1, 100_000, 3_000_000):
            assert msgspec.msgpack.decode(await channel.call("echo", "x" * size, 10.0)) == "x" * size
        with pytest.raises(TidelogError, match="secret"):
            await wrong.call("echo", "", 5.0)
    finally:
        await channel.close()
        await wrong.close()
        await listener.close()
