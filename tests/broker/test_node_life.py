"""The life of a broker: what a start that fails leaves behind, and what one that succeeds has registered."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tidelog.broker import parts
from tidelog.broker.inputs import BrokerIdentity, BrokerSettings, BrokerWorld, ControllerAccess, WalAccess
from tidelog.broker.node import BrokerNode
from tidelog.broker.settings import AdminSettings, GroupSettings, KafkaSettings, LogSettings
from tidelog.chaos.ports import free_port
from tidelog.controller import node as controller_node
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, TidelogError, Unavailable
from tidelog.runtime.network import AddressInUse, TcpNetwork
from tidelog.runtime.task_errors import TaskErrors
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import StoreCapabilities
from tidelog.storage.settings import CacheSettings, CleanSettings, CompactionSettings, UploadSettings, WalSettings
from tidelog.storage.wal.base import Wal
from tidelog.storage.wal.memory import MemoryWal

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
NOT_YET_OR_BY_OPTION = {
    "tidelog_certificate_left_seconds",
    "tidelog_disk_bytes",
    "tidelog_disk_free_bytes",
    "tidelog_trace_contexts_malformed_total",
    "tidelog_trace_spans_queued",
    "tidelog_trace_spans_total",
}
OF_THE_ACTIVE_CONTROLLER = {
    "tidelog_brokers",
    "tidelog_brokers_wanted",
    "tidelog_balancer_planned_moves",
    "tidelog_balancer_moves_total",
    "tidelog_metadata_state_age_seconds",
    "tidelog_metadata_state_bytes",
}
"""Known once a heartbeat was answered, or metadata has been written to the bucket."""


class UnfencedStore(MemoryObjectStore):
    """A bucket without conditional creates."""

    async def probe(self) -> StoreCapabilities:
        return StoreCapabilities(False, ("it has no conditional creates",))


class WatchedWal(MemoryWal):
    """A WAL that tells whether it was closed."""

    def __init__(self) -> None:
        super().__init__(WalSettings())
        self.closed = False
        self.fail: Callable[[Exception], None] = lambda error: None

    def set_on_failed(self, callback: Callable[[Exception], None]) -> None:
        self.fail = callback
        super().set_on_failed(callback)

    async def close(self) -> None:
        self.closed = True
        await super().close()


class Place:
    """A controller, and brokers over one bucket."""

    def __init__(self, controller: ControllerNode) -> None:
        self._controller = controller
        self.store = MemoryObjectStore()
        self.wals: list[WatchedWal] = []
        self.kind = "memory"
        self.port = free_port()

    def open_wal(self, cluster_id: str) -> Wal:
        assert cluster_id == self._controller.image.cluster_id
        self.wals.append(WatchedWal())
        return self.wals[-1]

    def no_wal(self, cluster_id: str, replica_set: int) -> Wal:
        raise AssertionError("nobody is taken over from")

    def bind(self, cluster_id: str) -> None:
        """The directory belongs to this cluster."""

    def node(self) -> BrokerNode:
        settings = BrokerSettings(
            kafka=KafkaSettings(port=self.port),
            admin=AdminSettings(),
            log=LogSettings(),
            group=GroupSettings(offsets_topic_partitions=1),
            upload=UploadSettings(),
            cache=CacheSettings(),
            compaction=CompactionSettings(),
            clean=CleanSettings(),
            roles=["broker"],
            flat=dict,
        )
        store = GuardedObjectStore(self.store, PriorityGate(64), SystemClock())
        return BrokerNode(
            identity=BrokerIdentity(1, "check", True, self.bind),
            settings=settings,
            controllers=ControllerAccess([self._controller.address], 0.2),
            wal=WalAccess(self.kind, self.open_wal, self.no_wal),
            world=BrokerWorld(TcpNetwork(), SystemClock(), random.Random(1), store),
        )

    async def fails(self, kind: type[TidelogError]) -> None:
        """Start a broker that cannot, and stop it."""
        node = self.node()
        with pytest.raises(kind):
            await node.start()
        await node.stop(5.0)

    async def serves(self) -> None:
        """Start a broker, and stop it."""
        node = self.node()
        await node.start()
        assert node.bootstrap[1] == self.port
        await node.stop(5.0)


@asynccontextmanager
async def place(directory: Path) -> AsyncIterator[Place]:
    controller = ControllerNode(
        ControllerIdentity(0, directory / "controller"),
        ControllerSections(ControllerSettings()),
        ControllerWorld(TcpNetwork(), SystemClock(), random.Random(2)),
    )
    await controller.start()
    try:
        await controller.wait_active(30)
        yield Place(controller)
    finally:
        await controller.close()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Place]:
    async with asyncio.timeout(60), place(tmp_path) as found:
        yield found


async def test_a_directory_of_another_cluster_is_refused_before_anything_is_opened(here: Place) -> None:
    def refuse(cluster_id: str) -> None:
        raise ConfigError("another cluster's")

    here.bind = refuse  # type: ignore[method-assign]
    await here.fails(ConfigError)
    assert not here.wals


async def test_a_wal_in_a_bucket_that_cannot_fence_is_refused_before_it_is_opened(here: Place) -> None:
    here.kind, here.store = "s3", UnfencedStore()
    await here.fails(ConfigError)
    assert not here.wals


async def test_a_wal_that_cannot_be_opened_leaves_nothing_that_runs(here: Place) -> None:
    open_wal = here.open_wal

    def refuse(cluster_id: str) -> Wal:
        raise Unavailable("not now")

    here.open_wal = refuse  # type: ignore[method-assign]
    await here.fails(Unavailable)
    here.open_wal = open_wal  # type: ignore[method-assign]
    await here.serves()


async def test_a_start_that_fails_at_its_last_step_closes_what_it_had_opened(here: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", here.port))
        taken.listen()
        await here.fails(AddressInUse)
    assert [wal.closed for wal in here.wals] == [True]
    await here.serves()
    assert [wal.closed for wal in here.wals] == [True, True]


async def test_a_broker_that_was_never_started_can_be_stopped(here: Place) -> None:
    node = here.node()
    assert node.accounted_bytes == 0
    await node.drain(1.0)
    await node.stop(1.0)


async def test_a_failure_cuts_the_listener_and_is_kept_once(here: Place) -> None:
    node = here.node()
    await node.start()
    reader, writer = await asyncio.open_connection(*node.bootstrap)
    wal = here.wals[0]
    assert not node.failed.done() and not wal.closed
    first, second = RuntimeError("first"), RuntimeError("second")
    wal.fail(first)
    wal.fail(second)
    assert await reader.read() == b""
    writer.close()
    assert node.failed.exception() is first
    await node.stop(5.0)
    assert wal.closed


async def test_every_part_of_a_running_broker_tells_of_itself(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (parts, controller_node):
        monkeypatch.setattr(module, "ERRORS", TaskErrors())  # those of this process are of other tests, too
    node = here.node()
    await node.start()
    servers = node.parts.servers
    exported = {each.name + ("_total" if each.type == "counter" else "") for each in servers.metrics.collect()}
    async with aiohttp.ClientSession(servers.admin.url) as session, session.get("/status") as response:
        status = await response.json()
    await node.stop(5.0)
    documented = set(re.findall(r"^\| `(tidelog_[a-z_]+)`", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert documented - exported <= OF_THE_ACTIVE_CONTROLLER | NOT_YET_OR_BY_OPTION
    assert exported <= documented
    assert {"partitions", "wal", "upload", "memory", "bucket", "failover", "moves", "problems"} <= set(status)
    assert status["problems"] == []
