"""Controllers as real processes under kill -9 and SIGSTOP, with commands that count.

Each command takes one id from a counter. If every acknowledged id is different and the next one is one more than their
number, no command was lost and none took effect twice, however often it was asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support.cluster_process import ServeCluster, serve_cluster
from tidelog.controller.client.client import ClientTiming, ControllerClient
from tidelog.controller.model import commands as c
from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.connection import CommandParams, RpcChannel, SessionReply
from tidelog.controller.rpc.handshake import NO_NODE, Credentials
from tidelog.controller.rpc.secret import read_secret
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.network import TcpNetwork

pytestmark = pytest.mark.processes

WRITERS = 8
TTL_MS = 24 * 3_600_000


class Counting:
    """Writers that take ids for as long as they are let."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._stop = False
        self.ids: list[int] = []

    async def write(self) -> None:
        while not self._stop:
            self.ids.append(await self._client.prepare_objects(1, TTL_MS))

    async def grown(self, by: int, timeout_s: float = 40.0) -> None:
        target = len(self.ids) + by
        async with asyncio.timeout(timeout_s):
            while len(self.ids) < target:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def stop(self, writers: list[asyncio.Task[None]]) -> None:
        self._stop = True
        await asyncio.gather(*writers)


class Chaos:
    """What a scenario does to the controllers."""

    def __init__(self, cluster: ServeCluster, client: ControllerClient, credentials: Credentials) -> None:
        self.cluster = cluster
        self.client = client
        self.credentials = credentials

    async def active(self, other_than: int = 0) -> int:
        """The id of the active controller."""
        async with asyncio.timeout(30):
            while True:
                for node_id, address in self.cluster.members.items():
                    try:
                        status = await self.client.status_of(split_address(address))
                    except TidelogError:
                        continue
                    if status["active"] and node_id != other_than:
                        return node_id
                await asyncio.sleep(0.05)

    async def kill(self, *node_ids: int) -> None:
        for node_id in node_ids:
            self.cluster.nodes[node_id].signal(signal.SIGKILL)
        for node_id in node_ids:
            await asyncio.to_thread(self.cluster.nodes[node_id].kill)

    def start(self, *node_ids: int) -> None:
        for node_id in node_ids:
            self.cluster.nodes[node_id].start()


@contextlib.asynccontextmanager
async def cluster_with_writers(directory: Path) -> AsyncIterator[tuple[Chaos, Counting]]:
    with serve_cluster(directory, controllers=3, brokers=0) as cluster:
        credentials = Credentials(read_secret(directory / "secret"), NO_NODE)
        endpoints = [split_address(address) for address in cluster.members.values()]
        client = ControllerClient(
            endpoints, TcpNetwork(), SystemClock(), random.Random(), timing=ClientTiming(60.0), credentials=credentials
        )
        await client.start()
        counting = Counting(client)
        writers = [asyncio.create_task(counting.write()) for _ in range(WRITERS)]
        try:
            await counting.grown(50)
            yield Chaos(cluster, client, credentials), counting
            await counting.grown(50)
        finally:
            await counting.stop(writers)
        ids = counting.ids
        assert sorted(ids) == list(range(1, len(ids) + 1))
        assert await client.prepare_objects(1, TTL_MS) == len(ids) + 1
        assert set(client.image.objects) == set(range(1, len(ids) + 2))
        await client.close()


@pytest.mark.slow
async def test_killed_leaders_lose_and_double_no_command(tmp_path: Path) -> None:
    async with cluster_with_writers(tmp_path) as (chaos, counting):
        for _ in range(6):
            victim = await chaos.active()
            await chaos.kill(victim)
            await counting.grown(100)
            chaos.start(victim)
            await counting.grown(20)


@pytest.mark.long
@pytest.mark.slow
async def test_all_members_killed_at_once_remember_every_command(tmp_path: Path) -> None:
    async with cluster_with_writers(tmp_path) as (chaos, counting):
        for _ in range(3):
            await chaos.kill(1, 2, 3)
            chaos.start(1, 2, 3)
            await counting.grown(100)


@pytest.mark.long
@pytest.mark.slow
async def test_a_paused_leader_steps_down_and_what_it_says_later_is_refused(tmp_path: Path) -> None:
    async with cluster_with_writers(tmp_path) as (chaos, counting):
        for _ in range(3):
            paused = await chaos.active()
            address = split_address(chaos.cluster.members[paused])
            channel = RpcChannel([address], TcpNetwork(), chaos.credentials)
            raw = await channel.call("session", None, 5)
            session = msgspec.msgpack.decode(raw, type=SessionReply).client_id
            chaos.cluster.nodes[paused].signal(signal.SIGSTOP)
            stale = msgspec.Raw(c.encode(c.PutKv("stale", b"")))
            asked = asyncio.create_task(channel.call("command", CommandParams(session, 1, 0, stale), 20))
            assert await chaos.active(other_than=paused) != paused
            await counting.grown(100)
            chaos.cluster.nodes[paused].signal(signal.SIGCONT)
            with pytest.raises(Unavailable):
                result = c.decode_result(await asked)
                assert result.error is not None and result.error.name == "NotController", result
                raise Unavailable("refused by the state machine")
            assert not (await chaos.client.status_of(address))["active"]
            await counting.grown(50)
            await channel.close()
        assert "stale" not in chaos.client.image.kv
