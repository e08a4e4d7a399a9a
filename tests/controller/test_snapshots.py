"""Snapshots of topics in the metadata: what they hold, for how long, what is refused (rules 6 and 7)."""

from __future__ import annotations

import msgspec
import pytest

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.image.transfer import ImageReceiver, ImageSender
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import InvalidTopic, UnknownTopicId
from tidelog.controller.model.levels import UnsupportedLevel
from tidelog.controller.model.records import ObjectState
from tidelog.controller.model.snapshots import (
    MAX_HELD_PARTITIONS,
    MAX_NAME_CHARS,
    MAX_PARTITIONS_PER_SNAPSHOT,
    MAX_SNAPSHOTS,
    CreateBranch,
    CreateSnapshot,
    CutRefused,
    DeleteSnapshot,
    Ends,
    SnapshotExists,
    TopicCut,
    UnknownSnapshot,
)
from tidelog.runtime.errors import InvalidInput, Overloaded
from tidelog.storage.commits import CompactionRefused, CompactObjects


class SnapshotDriver(Driver):
    """Broker 0 with an open topic of one partition, whose data stream has four objects with five offsets each."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = self.broker(0)
        (self.first,) = self.topic()
        self.data = self.first + 1
        self.run(c.OpenStreams(0, self.epoch, tuple((self.first + place, 0) for place in range(4))))
        self.wal = 0
        self.objects = [self.upload(start, start + 5) for start in (0, 5, 10, 15)]

    def upload(self, start: int, end: int) -> int:
        object_id = self.prepare()
        self.commit(self.epoch, (self.wal, self.wal + 10), new_object(object_id, (self.data, start, end)))
        self.wal += 10
        return object_id

    def snapshot(self, name: str, end: int, *, topic: bytes = TOPIC) -> None:
        self.run(CreateSnapshot(name, (TopicCut(topic, ((0, end, 0, 0),)),)))

    def trim(self, start: int) -> None:
        self.run(c.TrimStream(self.data, 0, start, 0, self.epoch))

    def committed(self) -> list[int]:
        rows = self.image.objects.values()
        return sorted(each.id for each in rows if each.state == ObjectState.COMMITTED)

    def compact(self, *inputs: int) -> int:
        rows = [self.image.objects[each].ranges[0] for each in inputs]
        output = self.prepare()
        new = new_object(output, (self.data, rows[0].start_offset, rows[-1].end_offset))
        self.run(c.Compact(CompactObjects(0, self.epoch, inputs, (new,))))
        return output


@pytest.fixture
def driver() -> SnapshotDriver:
    return SnapshotDriver()


def test_what_a_snapshot_holds_outlives_retention_and_goes_with_it(driver: SnapshotDriver) -> None:
    first, second, third, fourth = driver.objects
    driver.trim(5)
    assert driver.committed() == [second, third, fourth]
    driver.snapshot("before", 12)
    driver.trim(20)
    assert driver.committed() == [second, third], "the cut is in the third; nobody needs the fourth"
    assert [each.object_id for each in driver.image.find_objects(driver.data, 5, 12, 10)] == [second, third]
    driver.run(DeleteSnapshot("before"))
    assert driver.committed() == []
    assert first not in driver.image.index.live_slices


def test_a_snapshot_outlives_its_topic(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 20)
    driver.run(c.DeleteTopic(TOPIC))
    assert driver.committed() == driver.objects and driver.data not in driver.image.streams
    driver.run(DeleteSnapshot("before"))
    assert driver.committed() == []


def test_two_snapshots_hold_independently(driver: SnapshotDriver) -> None:
    _, second, third, fourth = driver.objects
    driver.snapshot("old", 10)
    driver.trim(7)
    driver.snapshot("new", 20)
    driver.trim(20)
    driver.run(DeleteSnapshot("old"))
    assert driver.committed() == [second, third, fourth]
    driver.run(DeleteSnapshot("new"))
    assert driver.committed() == []


def test_held_objects_are_not_replaced_and_others_are(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 8)
    with pytest.raises(CompactionRefused, match="held by snapshot 'before'"):
        driver.compact(driver.objects[1], driver.objects[2])
    merged = driver.compact(driver.objects[2], driver.objects[3])
    assert driver.committed() == [*driver.objects[:2], merged]
    driver.run(DeleteSnapshot("before"))
    again = driver.compact(driver.objects[0], driver.objects[1])
    assert driver.committed() == [merged, again]


def test_an_empty_partition_is_held_without_an_object(driver: SnapshotDriver) -> None:
    driver.trim(20)
    driver.snapshot("empty", 20)
    (topic,) = driver.image.snapshots["empty"].topics
    (partition,) = topic.partitions
    assert (partition.starts[1], partition.ends[1], partition.extents[1]) == (20, 20, ())
    assert driver.committed() == []


@pytest.mark.parametrize("end", [-1, 4, 21])
def test_a_cut_outside_of_what_is_committed_is_refused(driver: SnapshotDriver, end: int) -> None:
    driver.trim(5)
    with pytest.raises(CutRefused, match=rf"has 5\.\.20, and no cut at {end}"):
        driver.snapshot("wrong", end)
    assert not driver.image.snapshots


def test_a_quarantined_stream_is_not_cut(driver: SnapshotDriver) -> None:
    driver.run(c.QuarantineStream(0, driver.epoch, driver.data, "a gap"))
    with pytest.raises(CutRefused, match="quarantined"):
        driver.snapshot("wrong", 20)


def test_what_is_no_snapshot_is_refused(driver: SnapshotDriver) -> None:
    for name in ("", "a b", "x" * (MAX_NAME_CHARS + 1), "a/b", "ä", "a@b"):
        with pytest.raises(InvalidInput, match="named by"):
            driver.snapshot(name, 20)
    cut = TopicCut(TOPIC, ((0, 20, 0, 0),))
    with pytest.raises(InvalidInput, match="each once"):
        driver.run(CreateSnapshot("a", ()))
    with pytest.raises(InvalidInput, match="each once"):
        driver.run(CreateSnapshot("a", (cut, cut)))
    with pytest.raises(UnknownTopicId):
        driver.snapshot("a", 20, topic=bytes(15) + b"\x01")
    with pytest.raises(CutRefused, match="has 2 of its 1 partitions"):
        driver.run(CreateSnapshot("a", (TopicCut(TOPIC, ((0, 20, 0, 0), (0, 0, 0, 0))),)))
    with pytest.raises(UnknownSnapshot, match="there is no snapshot 'a'"):
        driver.run(DeleteSnapshot("a"))
    driver.snapshot("a", 20)
    with pytest.raises(SnapshotExists):
        driver.snapshot("a", 20)


def test_an_internal_topic_is_refused(driver: SnapshotDriver) -> None:
    other = bytes(15) + b"\x02"
    driver.run(c.CreateTopic(other, "__internal", 1, {}, True, False, None))
    with pytest.raises(InvalidTopic, match="is internal"):
        driver.snapshot("a", 0, topic=other)


def test_snapshots_and_what_they_hold_are_bounded(driver: SnapshotDriver) -> None:
    for number in range(MAX_SNAPSHOTS):
        driver.snapshot(f"s{number}", 20)
    with pytest.raises(Overloaded, match="may be 256"):
        driver.snapshot("one-more", 20)
    many: tuple[Ends, ...] = ((0, 0, 0, 0),) * (MAX_PARTITIONS_PER_SNAPSHOT + 1)
    driver.run(DeleteSnapshot("s0"))
    with pytest.raises(InvalidInput, match="up to 4096 partitions, not 4097"):
        driver.run(CreateSnapshot("wide", (TopicCut(TOPIC, many),)))


def test_the_partitions_of_all_snapshots_are_bounded() -> None:
    driver = Driver()
    driver.broker(0)
    driver.topic(4_000)
    cut = TopicCut(TOPIC, ((0, 0, 0, 0),) * 4_000)
    for number in range(MAX_HELD_PARTITIONS // 4_000):
        driver.run(CreateSnapshot(f"s{number}", (cut,)))
    with pytest.raises(Overloaded, match="hold 20000 partitions"):
        driver.run(CreateSnapshot("one-more", (cut,)))


def test_snapshots_are_in_the_state_and_in_images(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 12)
    driver.trim(20)
    again = ControllerState()
    again.load(driver.state.dump())
    assert again.dump() == driver.state.dump()
    assert again.tables.index.live_slices == driver.image.index.live_slices
    sender, receiver = ImageSender(1, driver.image, chunk_rows=2, chunk_bytes=1_000), ImageReceiver()
    while not receiver.is_whole:
        receiver.take(msgspec.Raw(msgspec.msgpack.encode(sender.next_chunk())))
    assert ("snapshots", "before", driver.image.snapshots["before"]) in receiver.rows
    loaded = Image()
    assert [each.table for each in loaded.difference(driver.image)].index("snapshots") < [
        each.table for each in loaded.difference(driver.image)
    ].index("objects"), "what holds objects is loaded before them"


@pytest.mark.parametrize("ends_as", ["deleted", "another"])
@pytest.mark.parametrize("deletes", [True, False])
def test_a_follower_that_missed_who_holds_next_finds_the_objects(
    driver: SnapshotDriver, ends_as: str, deletes: bool
) -> None:
    """The snapshot that it knows has ended; a branch of it, which it does not know, holds the same trimmed offsets."""
    driver.snapshot("before", 20)
    if deletes:
        driver.run(c.DeleteTopic(TOPIC))
    else:
        driver.trim(20)
    behind = Image()
    behind.apply(Delta(driver.image.version, behind.difference(driver.image), {}))
    branch = bytes(15) + b"b"
    driver.run(CreateBranch("before", "t", branch, "branch", {}))
    driver.run(DeleteSnapshot("before"))
    if ends_as == "another":
        other = bytes(15) + b"o"
        driver.topic(1, "other", other)
        driver.run(CreateSnapshot("before", (TopicCut(other, ((0, 0, 0, 0),)),)))
    behind.apply(Delta(driver.image.version, behind.difference(driver.image), {}))
    (partition,) = driver.image.partitions(branch)
    found = behind.find_objects(partition.first_stream + 1, 0, 20, 10)
    assert [each.object_id for each in found] == driver.objects
    assert found == driver.image.find_objects(partition.first_stream + 1, 0, 20, 10)


def test_there_are_none_below_level_5() -> None:
    with pytest.raises(UnsupportedLevel, match="CreateSnapshot needs feature level 5"):
        c.encode_envelope(c.Envelope(1, 1, 5, "", 0, 0, CreateSnapshot("a", ())), 4)
