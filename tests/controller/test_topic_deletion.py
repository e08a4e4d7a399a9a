"""A large topic is deleted by several commands of bounded work, and is gone for everybody from the first one on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.controller.controller_helpers import TOPIC, Driver, make_client, make_node, new_object
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import ObjectState
from tidelog.runtime.errors import InvalidInput

SMALL = 7
ROWS_PER_PARTITION = 5


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.broker()
    return driver


def test_the_topic_is_gone_before_its_partitions_are(driver: Driver) -> None:
    first = driver.topic(20)[0]
    driver.topic(2, "other", bytes(15) + b"o")
    driver.run(c.DeleteTopic(TOPIC, SMALL))
    for image in (driver.image, driver.local_image):
        assert image.topic("t") is None and image.partitions(TOPIC) == [] and image.partition(TOPIC, 0) is None
        assert {each.topic_id for each in image.all_partitions()} == {bytes(15) + b"o"}
        assert image.stream(first) is None and image.moving() == []
        assert image.index.deleted_topics == {TOPIC}
        assert len(image.owned(0)) == 20 - SMALL + 2  # a takeover places them until they are gone
    again = bytes(15) + b"a"
    driver.topic(3, "t", again)
    assert driver.run(c.DeletePartitions(TOPIC, SMALL), int) == 20 - 2 * SMALL
    assert driver.run(c.DeletePartitions(TOPIC, SMALL), int) == 0
    assert driver.run(c.DeletePartitions(TOPIC, SMALL), int) == 0
    assert not driver.image.index.deleted_topics and not driver.state.tables.index.deleted_topics
    assert len(driver.image.streams) == 4 * 5 and len(driver.image.partitions(again)) == 3


def test_partitions_of_a_topic_that_exists_are_not_removed(driver: Driver) -> None:
    driver.topic(2)
    with pytest.raises(InvalidInput):
        driver.run(c.DeletePartitions(TOPIC, 1))
    assert len(driver.image.partitions(TOPIC)) == 2


def test_a_member_that_loads_a_snapshot_in_between_goes_on_like_the_others(driver: Driver) -> None:
    driver.topic(20)
    driver.run(c.MovePartitions((c.PartitionMove(TOPIC, 3, 0),)))
    driver.run(c.DeleteTopic(TOPIC, SMALL))
    other = ControllerState()
    other.load(driver.state.dump())
    assert other.tables.index.deleted_topics == {TOPIC}
    assert other.tables.index.moving == driver.state.tables.index.moving == set()
    driver.index += 1
    for state in (other, driver.state):
        state.apply(driver.envelope(c.DeletePartitions(TOPIC, SMALL)), driver.index)
    assert other.dump() == driver.state.dump()


def test_objects_go_with_the_last_stream_that_uses_them(driver: Driver) -> None:
    epoch = driver.image.replica_sets[0].master_epoch
    firsts = driver.topic(3)
    driver.run(c.OpenStreams(0, epoch, tuple((each, epoch) for each in firsts)))
    object_id = driver.prepare()
    driver.commit(epoch, (0, 1), new_object(object_id, *((each, 0, 5) for each in firsts)))
    driver.run(c.DeleteTopic(TOPIC, 1))
    assert driver.image.objects[object_id].state == ObjectState.COMMITTED
    driver.run(c.DeletePartitions(TOPIC, 1))
    assert driver.image.objects[object_id].state == ObjectState.COMMITTED
    driver.run(c.DeletePartitions(TOPIC, 1))
    assert driver.image.objects[object_id].state == ObjectState.DESTROYED


def test_a_commit_in_flight_is_taken_while_the_partitions_are_removed(driver: Driver) -> None:
    epoch = driver.image.replica_sets[0].master_epoch
    firsts = driver.topic(3)
    driver.run(c.OpenStreams(0, epoch, tuple((each, epoch) for each in firsts)))
    object_id = driver.prepare()
    driver.run(c.DeleteTopic(TOPIC, 1))
    driver.commit(epoch, (0, 1), new_object(object_id, *((each, 0, 5) for each in firsts)))
    assert driver.image.replica_sets[0].committed_wal_offset == 1


def test_a_deletion_of_an_older_version_is_applied_as_it_was_then(driver: Driver) -> None:
    driver.topic(20)
    driver.run(c.decode_command(msgspec.msgpack.encode([7, TOPIC])))
    assert not driver.image.streams and not driver.image.index.deleted_topics


async def test_the_active_controller_removes_what_is_left_also_after_a_restart(tmp_path: Path) -> None:
    node = make_node(tmp_path, partitions_per_deletion=SMALL)
    await node.start()
    client = make_client(node.address)
    await client.start()
    await client.register_broker(c.RegisterBroker(0, "check", "a", "host", 9092, "", ""))
    await client.elect(0, 0)
    topic = await client.create_topic("t", 10 * SMALL, {})
    sizes: list[int] = []
    stopped = asyncio.Event()

    def count(delta: Delta) -> None:
        removed = sum(1 for change in delta.of("partitions") if change.record is None)
        if removed:
            sizes.append(removed)
            stopped.set()

    node.feed.listen(count)
    await client.delete_topic(topic.id)
    assert client.image.topic("t") is None
    await stopped.wait()
    await client.close()
    await node.close()

    again = make_node(tmp_path, partitions_per_deletion=SMALL)
    again.feed.listen(count)
    await again.start()
    await again.wait_active(60)
    async with asyncio.timeout(60):
        while again.image.streams:
            await again.feed.wait_newer(again.image.version, 1.0)
    assert not again.image.index.deleted_topics and Image().index.topic_partitions == again.image.index.topic_partitions
    assert max(sizes) <= SMALL and sum(sizes) >= 9 * SMALL
    await again.close()
