"""A channel finds the active controller: also one that no configured address names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.controller.controller_helpers import make_client, make_node
from tidelog.controller.model.errors import NotController
from tidelog.controller.rpc.connection import RpcChannel, RpcConnection
from tidelog.controller.rpc.listener import RpcListener
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import TcpNetwork
from tidelog.runtime.ports import choose_port


@contextlib.asynccontextmanager
async def telling(active: tuple[str, int]) -> AsyncIterator[tuple[str, int]]:
    """The address of a member that is not active, and tells which one is."""

    async def handle(_connection: RpcConnection, _method: str, _params: msgspec.Raw) -> bytes:
        error = NotController("this controller is not active")
        error.address = f"{active[0]}:{active[1]}"
        raise error

    listener = RpcListener(handle, network=TcpNetwork(), clock=SystemClock(), credentials=None, max_connections=10)
    await listener.start("127.0.0.1", 0)
    try:
        yield listener.address
    finally:
        await listener.close()


async def test_a_client_with_old_members_starts_when_a_replacement_is_active(tmp_path: Path) -> None:
    node = make_node(tmp_path)
    await node.start()
    await node.wait_active(60)
    async with telling(node.address) as old:
        client = make_client(old)
        try:
            async with asyncio.timeout(20):
                await client.start()
        finally:
            await client.close()
            await node.close()
    assert client.image.cluster is not None


async def test_a_told_address_that_does_not_answer_is_left_for_the_configured_ones() -> None:
    gone = ("127.0.0.1", choose_port("127.0.0.1"))
    async with telling(gone) as old:
        channel = RpcChannel([old], TcpNetwork(), follows=True)
        for expected in (old, gone, old):
            assert channel.endpoint == expected
            with pytest.raises(Unavailable):
                await channel.call("session", None, 5)
        await channel.close()


async def test_a_channel_that_is_not_to_follow_stays_with_its_addresses() -> None:
    async with telling(("127.0.0.1", 1)) as old:
        channel = RpcChannel([old], TcpNetwork())
        with pytest.raises(NotController):
            await channel.call("session", None, 5)
        assert channel.endpoint == old
        await channel.close()


async def test_the_first_addresses_are_tried_again_when_none_of_a_newer_list_answers(tmp_path: Path) -> None:
    node = make_node(tmp_path)
    await node.start()
    await node.wait_active(60)
    gone = [("127.0.0.1", choose_port("127.0.0.1")) for _ in range(2)]
    channel = RpcChannel([node.address], TcpNetwork(), follows=True)
    try:
        await channel.call("session", None, 5)
        channel.set_endpoints(gone)
        for expected in gone:
            assert channel.endpoint == expected
            with pytest.raises(Unavailable):
                await channel.call("session", None, 5)
        assert channel.endpoint == node.address
        await channel.call("session", None, 5)
        await node.close()
        tried = []
        for _ in range(6):
            tried.append(channel.endpoint)
            with pytest.raises(Unavailable):
                await channel.call("session", None, 5)
        assert {*tried[:4]} == {*tried[3:]} == {node.address, *gone}
    finally:
        await channel.close()
        await node.close()
