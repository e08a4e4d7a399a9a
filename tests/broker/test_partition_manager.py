"""The partition manager against the image: whatever changes and whenever, what is open is what is placed here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from broker.errors import fetch_code, produce_code
from broker.partitions import PartitionDamaged, PartitionManager
from broker.settings import KafkaSettings, LogSettings
from broker.topic_config import log_config
from controller import commands as c
from controller.model import TopicRecord
from runtime.clock import SystemClock
from runtime.errors import Unavailable
from storage.object_store_memory import MemoryObjectStore
from storage.settings import CacheSettings, UploadSettings, WalSettings
from storage.storage import Storage
from storage.wal_memory import MemoryWal
from stream.managers import OpenedStream
from tests.support.kafka_world import CLUSTER_ID, NODE_ID, DataController, batch, until

OTHER = 2


class BusyController(DataController):
    """Refuses to open streams as often as it is told to, and answers a turn of the loop later."""

    refusals = 0
    hold: asyncio.Event | None = None
    """The next answer waits for it."""

    async def open_streams(self, *args: Any) -> list[OpenedStream]:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("the controller is busy")
        opened = await super().open_streams(*args)
        hold, self.hold = self.hold, None
        if hold is not None:
            await hold.wait()
        return opened


class World:
    """A broker's partitions over a storage in memory."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.controller = controller = BusyController()
        controller.register(NODE_ID)
        controller.register(OTHER)
        objects: Any = controller
        self.storage = Storage(
            wal=MemoryWal(WalSettings()),
            store=MemoryObjectStore(),
            objects=objects,
            clock=SystemClock(),
            cluster_id=CLUSTER_ID,
            replica_set_id=NODE_ID,
            upload=UploadSettings(age_ms=3_600_000),
            cache=CacheSettings(),
            rng=rng,
        )
        self.partitions = PartitionManager(
            node_id=NODE_ID,
            controller=objects,
            storage=self.storage,
            clock=SystemClock(),
            kafka=KafkaSettings(),
            defaults=LogSettings(),
            rng=rng,
        )

    async def start(self) -> None:
        await self.storage.recover()
        await self.storage.start(self.controller.image.replica_sets[NODE_ID].master_epoch)
        await self.partitions.start()

    async def close(self) -> None:
        await self.partitions.close()
        await self.storage.close(upload=False)

    async def create(self, name: str, owners: list[int]) -> TopicRecord:
        return await self.controller.create_topic(name, len(owners), {}, assignment=owners)

    def wanted(self) -> dict[tuple[str, int], tuple[int, str]]:
        """What must be open: leader epoch and one setting, by topic and partition."""
        image = self.controller.image
        found = {}
        for partition in image.all_partitions():
            topic = image.topics[partition.topic_id]
            leader, epoch = image.leader(partition)
            if leader == NODE_ID:
                found[topic.name, partition.index] = epoch, log_config(topic.configs, KafkaSettings(), LogSettings())
        return found

    def is_settled(self) -> bool:
        wanted = self.wanted()
        counts = {"led": len(wanted), "open": len(wanted), "failing": 0, "moving": 0}
        return self.open() == wanted and self.partitions.counts() == counts

    def open(self) -> dict[tuple[str, int], tuple[int, str]]:
        return {(one.topic, one.partition): (one.leader_epoch, one.config) for one in self.partitions.all()}


@asynccontextmanager
async def world(seed: int = 1) -> AsyncIterator[World]:
    made = World(seed)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


OWNERS = st.lists(st.sampled_from([NODE_ID, OTHER]), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), OWNERS),
        st.tuples(st.just("delete"), st.integers(0, 5)),
        st.tuples(st.just("grow"), st.tuples(st.integers(0, 5), OWNERS)),
        st.tuples(st.just("configure"), st.tuples(st.integers(0, 5), st.integers(1, 5))),
        st.tuples(st.just("refuse"), st.integers(1, 3)),
        st.tuples(st.just("turns"), st.integers(1, 20)),
        st.tuples(st.just("commit"), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(steps=STEPS)
def test_what_is_open_is_what_is_placed_here_whatever_happens(steps: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        async with world() as here:
            controller = here.controller
            for number, (what, value) in enumerate(steps):
                topics = sorted(controller.image.topics.values(), key=lambda topic: topic.name)
                if what == "create":
                    await here.create(f"t{number:02}", value)
                elif what == "delete" and value < len(topics):
                    await controller.delete_topic(topics[value].id)
                elif what == "grow" and value[0] < len(topics):
                    total = topics[value[0]].partitions + len(value[1])
                    await controller.create_partitions(topics[value[0]].id, total, assignment=value[1])
                elif what == "configure" and value[0] < len(topics):
                    await controller.alter_topic_configs(topics[value[0]].id, {"retention.ms": str(value[1])})
                elif what == "refuse":
                    controller.refusals = value
                elif what == "turns":
                    for _ in range(value):
                        await asyncio.sleep(0)
                elif what == "commit":
                    await append_everywhere(here)
            await until(here.is_settled, "what is open is what is placed here")
            await here.partitions.wait_settled()
            assert here.partitions.problems() == []

    asyncio.run(run())


def test_a_name_stands_for_the_newest_topic_that_has_it() -> None:
    """Though the older one, deleted while it opened, opens after it."""

    async def run() -> None:
        async with world() as here:
            opened = []
            here.partitions.on_opened(opened.append)
            hold = here.controller.hold = asyncio.Event()
            old = await here.create("t", [NODE_ID])
            await until(lambda: here.controller.hold is None, "its streams are open")
            await here.controller.delete_topic(old.id)
            new = await here.create("t", [NODE_ID])
            await until(here.is_settled, "the new one is open")
            hold.set()
            await until(lambda: len(opened) == 2, "the old one opens")
            assert here.partitions.get("t", 0) is here.partitions.get_by_id(new.id, 0)
            await until(lambda: here.partitions.counts()["open"] == 1, "and closes")
            assert here.partitions.get("t", 0) is here.partitions.get_by_id(new.id, 0)

    asyncio.run(run())


def test_a_start_is_not_held_up_by_a_partition_that_leaves() -> None:
    """Uploads are held back until the start is settled, and a partition that leaves waits for one."""

    async def run() -> None:
        made = World(1)
        topic = await made.create("t", [NODE_ID, NODE_ID])
        made.controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 1, OTHER),)))
        held = asyncio.Event()
        made.storage.upload_now = held.wait  # type: ignore[method-assign,assignment]
        await made.start()
        try:
            async with asyncio.timeout(60):
                await made.partitions.wait_settled()
            assert made.partitions.counts()["open"] == 2
            assert made.partitions.unsettled() == []
        finally:
            held.set()
            await made.close()

    asyncio.run(run())


async def append_everywhere(here: World) -> None:
    for one in here.partitions.all():
        one.append_internal(batch(b"x"))
    await here.storage.confirm.wait(here.storage._wal.end_offset)
    await here.storage.upload_now()


def test_a_commit_of_objects_changes_no_placement_and_looks_at_no_partition() -> None:
    async def run() -> None:
        async with world() as here:
            await here.create("t", [NODE_ID] * 3)
            await until(lambda: len(here.open()) == 3, "all are open")
            version, placed = here.controller.image.version, here.controller.image.placement_version
            await append_everywhere(here)
            assert here.controller.image.version > version
            assert here.controller.image.replica_sets[NODE_ID].committed_wal_offset > 0
            assert here.controller.image.placement_version == placed
            assert not here.partitions._pending
            assert not here.partitions._changed.is_set()

    asyncio.run(run())


def test_everything_that_places_a_partition_moves_the_placement_version() -> None:
    async def run() -> None:
        controller = DataController()
        changes = [
            lambda: controller.register(NODE_ID),
            lambda: controller.set_alive(NODE_ID, False),
            lambda: controller.set_alive(NODE_ID, True),
            lambda: controller.apply(c.CreateTopic(b"t" * 16, "t", 1, {}, False, False, None)),
            lambda: controller.apply(c.AlterTopicConfigs(b"t" * 16, {"retention.ms": "1"})),
            lambda: controller.apply(c.CreatePartitions(b"t" * 16, 2, None, False)),
            lambda: controller.apply(c.Elect(NODE_ID, NODE_ID)),
            lambda: controller.apply(c.AlterConfigs("cluster", "", {"log.retention.ms": "1"})),
            lambda: controller.apply(c.DeleteTopic(b"t" * 16)),
        ]
        for change in changes:
            before = controller.image.placement_version
            change()
            assert controller.image.placement_version == controller.image.version > before

    asyncio.run(run())


def test_a_partition_whose_data_is_damaged_is_told_from_one_that_is_opening() -> None:
    async def run() -> None:
        async with world() as here:
            topic = await here.create("t", [NODE_ID])
            [stream] = [one.first_stream + 1 for one in here.controller.image.partitions(topic.id)]
            master_epoch = here.controller.image.replica_sets[NODE_ID].master_epoch
            here.controller.apply(c.QuarantineStream(NODE_ID, master_epoch, stream, "a gap"))
            await until(lambda: here.partitions.counts()["failing"] == 1, "it does not open")
            with pytest.raises(PartitionDamaged, match=r"t-0 cannot be opened: .* quarantined: a gap") as caught:
                here.partitions.get("t", 0)
            assert (produce_code(caught.value), fetch_code(caught.value)) == (56, 2)
            assert "quarantined: a gap" in here.partitions.problems()[0]
            here.controller.apply(c.ReleaseStream(stream))
            await until(lambda: here.partitions.counts()["open"] == 1, "it opens when it was released")
            assert here.partitions.get("t", 0).append(memoryview(batch(b"v"))).base_offset == 0

    asyncio.run(run())
