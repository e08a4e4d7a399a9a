"""Hostile peers at the controller's RPC port: bounded and forgotten, while a good client is answered."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.controller.controller_helpers import KeptNetwork, make_client, make_node
from tests.support.kafka_world import until
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.connection import RpcChannel
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import ProtocolFactory, TcpNetwork
from tidelog.runtime.wire import encode_frame

MIB = 1 << 20


@contextlib.asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[ControllerNode]:
    node = make_node(tmp_path)
    await node.start()
    try:
        await node.wait_active(60)
        yield node
        client = make_client(node.address)
        await client.start()
        await client.close()
        await until(lambda: node.status()["connections"] == 0, "forgotten")
        await until(lambda: node.status()["receiving_bytes"] == 0, "given back")
    finally:
        await node.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(60):
        try:
            return await reader.read(1) == b""
        except ConnectionResetError:
            return True


HEAD = struct.pack(">HBBI", 0x544C, 1, 1, 30 * MIB)


@pytest.mark.parametrize("start", [b"", b"TL", HEAD, HEAD + b"crc!" + b"x" * 1000])
async def test_a_frame_that_does_not_come_is_not_waited_for(
    start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.controller.rpc.connection.RECEIVE_S", 0.2)

    async with serving(tmp_path) as node:
        reader, writer = await asyncio.open_connection(*node.address)
        writer.write(start)
        assert await closed(reader)
        writer.transport.abort()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00",
        struct.pack(">HBBI", 0x544C, 1, 1, 1 << 31) + b"crc!",
        encode_frame(1, b"\x93\x01\xa5ab\x80cd\xc0"),
        encode_frame(1, b"\x91" * 5000 + b"\xc0"),
        encode_frame(2, b"\xc0"),
        encode_frame(9, b""),
    ],
)
async def test_what_is_no_request_ends_the_connection(
    raw: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as node:
        for _ in range(30):
            reader, writer = await asyncio.open_connection(*node.address)
            writer.write(raw)
            assert await closed(reader)
            writer.transport.abort()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 10


async def test_frames_that_are_still_arriving_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.controller.rpc.connection.MAX_RECEIVING_BYTES", MIB)

    async with serving(tmp_path) as node:
        peers = [await asyncio.open_connection(*node.address) for _ in range(8)]
        for _, writer in peers:
            writer.write(HEAD + b"crc!" + b"x" * (300 << 10))
        await until(lambda: int(node.status()["connections"]) < 8, "the one too many is dropped")
        assert int(node.status()["receiving_bytes"]) <= MIB
        for _, writer in peers:
            writer.transport.abort()


async def test_a_request_in_work_ends_with_the_node_when_its_connection_is_lost_while_the_node_stops(
    tmp_path: Path,
) -> None:
    network = KeptNetwork()
    node = make_node(tmp_path, network=network)
    await node.start()
    await node.wait_active(60)
    client = make_client(node.address)
    await client.start()  # follows: a long poll is in work at the node from here on
    await until(lambda: any(task.get_name() == "rpc.request" for task in asyncio.all_tasks()), "a poll in work")
    network.lose()  # told to the node on a later turn of the loop, when it is closing
    await node.close()
    left = [task for task in asyncio.all_tasks() if task.get_name() == "rpc.request"]
    await client.close()
    assert not left


class SlowNetwork(TcpNetwork):
    """Hands connections over when it is told to."""

    def __init__(self) -> None:
        self.is_connected, self.hands_over = asyncio.Event(), asyncio.Event()

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        made = await super().connect(factory, host, port, timeout_s=timeout_s)
        self.is_connected.set()
        await self.hands_over.wait()
        return made


async def test_a_channel_closed_while_it_connects_leaves_no_connection_open(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        network = SlowNetwork()
        channel = RpcChannel([node.address], network)
        call = asyncio.create_task(channel.call("status", None, 60))
        await network.is_connected.wait()
        await channel.close()
        network.hands_over.set()
        with pytest.raises(Unavailable):
            await call
        await until(lambda: node.status()["connections"] == 0, "closed")
