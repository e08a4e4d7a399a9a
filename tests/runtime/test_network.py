"""The real interface to byte streams, on the loop of production and on the one of tests."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest

from tests.support.loops import BOTH_LOOPS
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import AddressInUse, ConnectionRefused, TcpNetwork, refuses
from tidelog.runtime.ports import choose_port

LOOPS = BOTH_LOOPS


class Accepted(asyncio.Protocol):
    """Drops its connection as soon as it has it."""

    def __init__(self, made: list[Accepted]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(self)
        transport.close()


@pytest.mark.parametrize("turns", range(6))
async def test_every_connection_that_was_accepted_has_come_to_its_protocol_when_the_listener_is_closed(
    turns: int,
) -> None:
    begun: list[Accepted] = []
    made: list[Accepted] = []

    def accept() -> Accepted:
        begun.append(Accepted(made))
        return begun[-1]

    listener = await TcpNetwork().listen(accept, "127.0.0.1", 0)
    with socket.create_connection(listener.address, timeout=10) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()
        assert made == begun
        client.setblocking(False)
        try:
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 60) == b""
        except ConnectionResetError:
            assert not begun  # it had not been accepted


class Hasty(asyncio.Protocol):
    """Loses its connection as soon as it has it, as by a peer that resets it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()  # uvloop's own class, not a subclass


async def test_a_connection_that_is_lost_while_it_is_made_is_unavailable() -> None:
    listener = await TcpNetwork().listen(asyncio.Protocol, "127.0.0.1", 0)
    try:
        with pytest.raises(Unavailable, match="cannot connect to"):
            await TcpNetwork().connect(Hasty, *listener.address, timeout_s=10)
    finally:
        await listener.close()


@pytest.mark.parametrize("host", ["broker..example", "a" * 300])
async def test_a_name_that_no_host_can_have_is_told_as_one_to_listen_on(host: str) -> None:
    with pytest.raises(AddressInUse, match="cannot listen on") as told:
        await TcpNetwork().listen(asyncio.Protocol, host, 0)
    assert told.value.hint == "check the host and port in the configuration"
    with pytest.raises(AddressInUse, match="cannot listen on"):
        choose_port(host)


async def test_a_port_where_another_process_begins_to_listen_between_bind_and_listen_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux lets both bind; uvloop does not tell that the second cannot listen."""
    loop = asyncio.get_running_loop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        class Slow:
            async def create_server(self, *args: Any, **more: Any) -> asyncio.Server:
                server = await loop.create_server(*args, start_serving=False, **more)
                other.listen()
                try:
                    await server.start_serving()
                except OSError:
                    server.close()
                    raise
                return server

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", Slow)
            with pytest.raises(AddressInUse, match="is in use by another process"):
                await TcpNetwork().listen(asyncio.Protocol, *other.getsockname())


async def test_a_port_where_nobody_listens_refuses_and_one_whose_process_is_silent_does_not() -> None:
    network = TcpNetwork()
    with socket.socket() as silent:  # bound: nobody else gets the port
        silent.bind(("127.0.0.1", 0))
        host, port = silent.getsockname()
        assert await refuses(network, host, port, 10)
        with pytest.raises(ConnectionRefused):
            await network.connect(asyncio.Protocol, host, port, timeout_s=10)
        silent.listen()
        assert not await refuses(network, host, port, 10)
