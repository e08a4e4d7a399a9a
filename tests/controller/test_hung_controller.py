"""A controller whose disk hangs takes itself for the active one for as long, with metadata from before: its Raft thread
waits, and its event loop answers. Brokers go by the one that was elected meanwhile. And the other way round: one whose
event loop hangs, and whose Raft thread leads on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.controller.controller_helpers import make_client, until
from tests.support.ports import free_port
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.raft import thread as raft_thread
from tidelog.controller.raft.files import RaftFile, SystemFiles
from tidelog.controller.raft.runner import system_surroundings
from tidelog.controller.raft.thread import RaftConsensus, RaftSettings
from tidelog.controller.rpc.connection import HeartbeatParams, RpcChannel
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.network import TcpNetwork

pytestmark = pytest.mark.timeout(120)

SECRET = b"s" * 32


class HangingFile:
    """A file of a disk that answers when `goes_on` is set."""

    def __init__(self, file: RaftFile, goes_on: threading.Event) -> None:
        self._file = file
        self._goes_on = goes_on
        self.read, self.write, self.cut, self.close = file.read, file.write, file.cut, file.close

    def sync(self) -> None:
        self._goes_on.wait()
        self._file.sync()


class HangingFiles(SystemFiles):
    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()

    def open(self, path: Path) -> RaftFile:
        return HangingFile(super().open(path), self.goes_on)

    def create(self, path: Path) -> RaftFile:
        return HangingFile(super().create(path), self.goes_on)


class HangingQuorum:
    """Three controllers, each with a disk of its own."""

    def __init__(self, directory: Path) -> None:
        self.disks = [HangingFiles() for _ in range(3)]
        addresses = {each: f"127.0.0.1:{free_port()}" for each in range(3)}
        members = [f"{each}@{address}" for each, address in addresses.items()]
        self.nodes = [
            ControllerNode(
                ControllerIdentity(each, directory / str(each), Credentials(SECRET, each)),
                ControllerSections(ControllerSettings(members=members)),
                ControllerWorld(
                    TcpNetwork(),
                    SystemClock(),
                    random.Random(each),
                    consensus=RaftConsensus(
                        RaftSettings(
                            directory=directory / str(each), members=addresses, credentials=Credentials(SECRET, each)
                        ),
                        SystemClock(),
                        dataclasses.replace(system_surroundings(), files=self.disks[each]),
                    ),
                ),
            )
            for each in range(3)
        ]

    async def start(self) -> None:
        for each in self.nodes:
            await each.start()
        await until(lambda: any(each.is_active for each in self.nodes))

    async def hang_the_active(self) -> ControllerNode:
        """Return it, when another one is active, too."""
        (at,) = [each for each, node in enumerate(self.nodes) if node.is_active]
        self.disks[at].goes_on.clear()
        client = await self.client(heartbeat_interval_s=60.0)
        with contextlib.suppress(TidelogError):
            await client.put_kv("wakes", b"the disk")  # it writes nothing by itself
        await until(lambda: sum(each.is_active for each in self.nodes) == 2)
        await client.close()
        return self.nodes[at]

    async def client(self, heartbeat_interval_s: float = 0.05) -> ControllerClient:
        client = make_client(
            *(each.address for each in self.nodes),
            budget_s=30,
            heartbeat_interval_s=heartbeat_interval_s,
            credentials=Credentials(SECRET, 0),
        )
        await client.start()
        return client

    async def close(self) -> None:
        for each in self.disks:
            each.goes_on.set()
        for node in self.nodes:
            await node.close()


@pytest.fixture
async def controllers(tmp_path: Path) -> AsyncIterator[HangingQuorum]:
    quorum = HangingQuorum(tmp_path)
    await quorum.start()
    try:
        yield quorum
    finally:
        await quorum.close()


def registration(incarnation: str) -> RegisterBroker:
    return RegisterBroker(7, "code", incarnation, "host", 9092, "", "")


@pytest.mark.parametrize("was_known", [True, False])
async def test_it_ends_no_broker_that_has_registered_since(controllers: HangingQuorum, was_known: bool) -> None:
    if was_known:
        before = await controllers.client()
        await before.register_broker(registration("a"))
        await before.close()
        await until(lambda: all(7 in each.image.brokers for each in controllers.nodes))
    hung = await controllers.hang_the_active()
    fenced: list[TidelogError] = []
    broker = await controllers.client()
    broker.on_fenced(fenced.append)
    epoch = await broker.register_broker(registration("b"))
    assert epoch == 1 + was_known
    channel = RpcChannel([hung.address], TcpNetwork(), Credentials(SECRET, 0))
    beat = HeartbeatParams(7, epoch, version=broker.image.version)
    assert msgspec.msgpack.decode(await channel.call("heartbeat", beat, 10)) is None
    await until(lambda: broker.balance is not None)
    assert hung.is_active and not fenced
    await channel.close()
    await broker.close()


async def test_a_broker_that_follows_it_and_asks_for_nothing_learns_what_is_committed(
    controllers: HangingQuorum,
) -> None:
    """Its answers tell an old version, which the broker has: that does not count against what the active one tells."""
    broker = await controllers.client()
    await broker.register_broker(registration("a"))
    hung = await controllers.hang_the_active()
    writer = await controllers.client()
    await writer.put_kv("key", b"value")
    await until(lambda: "key" in broker.image.kv)
    assert hung.is_active
    for each in (writer, broker):
        await each.close()


async def test_another_controller_leads_when_the_event_loop_of_the_active_one_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Raft thread led on, and nobody answered brokers or operators for as long as the loop hung."""
    monkeypatch.setattr(raft_thread, "LOOK_S", 0.1)
    monkeypatch.setattr(raft_thread, "DEAF_S", 1.0)
    quorum = HangingQuorum(tmp_path)
    deaf, *others = quorum.nodes
    loop, goes_on = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def there(work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    try:
        await asyncio.gather(there(deaf.start()), *(each.start() for each in others))
        client = await quorum.client()
        await until(lambda: any(each.is_active for each in quorum.nodes))
        while not deaf.is_active:
            with contextlib.suppress(TidelogError):
                await client.transfer_leadership(0)
        loop.call_soon_threadsafe(goes_on.wait)
        await until(lambda: any(each.is_active for each in others))
        await client.put_kv("key", b"value")
        goes_on.set()
        await until(lambda: not deaf.is_active)
        await until(lambda: "key" in deaf.image.kv)
        await client.close()
    finally:
        goes_on.set()
        await asyncio.gather(there(deaf.close()), *(each.close() for each in others))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
