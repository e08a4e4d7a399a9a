"""A rebuild from the bucket has the snapshots and branches that the state had, as far as their objects are there."""

from __future__ import annotations

import pytest

from tests.controller.controller_helpers import TOPIC
from tests.controller.test_snapshots import SnapshotDriver
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import ObjectState
from tidelog.controller.model.snapshots import CreateBranch, DeleteSnapshot
from tidelog.controller.rebuild.adopt import Adoption, adopt
from tidelog.controller.rebuild.plan import FoundObject, RebuildPlan, make_plan

OTHER = bytes(15) + b"\x05"


def rebuilt(state: bytes, listed: set[int], *found: FoundObject) -> tuple[RebuildPlan, Image]:
    old = ControllerState()
    old.load(state)
    plan = make_plan(old.tables, dict.fromkeys(listed, 100), found)
    new = ControllerState()
    new.load(adopt(old, plan, Adoption([0], 2, max(listed), 0)).dump())
    image = Image()
    rows = [RowChange(table.name, key, row) for table in new.tables.public() for key, row in table.rows.items()]
    image.apply(Delta(1, rows))
    return plan, image


def covered(image: Image, stream_id: int, start: int, end: int) -> list[int]:
    """The objects that have these offsets; fails at a gap."""
    found: list[int] = []
    at = start
    while at < end:
        (one,) = image.find_objects(stream_id, at, end, 1)
        assert one.start_offset <= at < one.end_offset
        found.append(one.object_id)
        at = one.end_offset
    return found


@pytest.fixture
def driver() -> SnapshotDriver:
    return SnapshotDriver()


def branch(driver: SnapshotDriver, snapshot: str = "before") -> int:
    """Make a branch with one upload of its own; return its data stream."""
    driver.run(CreateBranch(snapshot, "t", OTHER, "b", {}))
    (partition,) = driver.image.partitions(OTHER)
    first = partition.first_stream
    driver.run(c.OpenStreams(0, driver.epoch, tuple((first + place, 5) for place in range(4))))
    driver.data = first + 1
    end = driver.image.streams[first + 1].end_offset
    driver.objects.append(driver.upload(end, end + 5))
    return first + 1


def test_a_snapshot_of_trimmed_and_deleted_topics_is_there(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 12)
    driver.trim(20)
    driver.run(c.DeleteTopic(TOPIC))
    plan, image = rebuilt(driver.state.dump(), set(driver.objects[:3]))
    assert plan.lost_snapshots == () and image.snapshots == driver.image.snapshots
    assert covered(image, driver.data, 0, 12) == driver.objects[:3]


def test_a_snapshot_that_was_deleted_after_the_state_is_dropped_and_named(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 12)
    driver.trim(15)
    driver.snapshot("after", 20)
    state = driver.state.dump()
    driver.run(DeleteSnapshot("before"))
    left = set(driver.committed())
    assert left == {driver.objects[3]}
    plan, image = rebuilt(state, left)
    assert plan.lost_snapshots == ("before",) and list(image.snapshots) == ["after"]
    assert covered(image, driver.data, 15, 20) == [driver.objects[3]]


def test_objects_that_are_newer_than_the_state_go_on_behind_what_is_held(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 12)
    driver.trim(15)
    state, new = driver.state.dump(), driver.objects[-1] + 1
    plan, image = rebuilt(state, {*driver.objects, new}, FoundObject(new, 1, 100, ((driver.data, 20, 26),)))
    assert plan.lost_snapshots == ()
    assert covered(image, driver.data, 15, 26) == [driver.objects[3], new]
    assert covered(image, driver.data, 0, 12) == driver.objects[:3]


def test_a_branch_has_what_it_shares_and_what_is_its_own(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 12)
    data = branch(driver)
    driver.run(DeleteSnapshot("before"))
    driver.run(c.DeleteTopic(TOPIC))
    state = driver.state.dump()
    new = driver.objects[-1] + 1
    left = set(driver.committed())
    plan, image = rebuilt(state, {*left, new}, FoundObject(new, 1, 100, ((data, 17, 21),)))
    assert plan.lost_snapshots == ()
    assert (image.streams[data].start_offset, image.streams[data].end_offset) == (0, 21)
    assert covered(image, data, 0, 21) == [*driver.objects[:3], driver.objects[-1], new]


def test_own_objects_that_were_compacted_after_the_state_do_not_take_the_shared_ones_with_them(
    driver: SnapshotDriver,
) -> None:
    driver.snapshot("before", 12)
    data = branch(driver)
    state, own, new = driver.state.dump(), driver.objects[-1], driver.objects[-1] + 1
    listed = {*driver.objects, new} - {own}
    _, image = rebuilt(state, listed, FoundObject(new, 2, 100, ((data, 12, 17),)))
    assert covered(image, data, 0, 17) == [*driver.objects[:3], new]


def test_a_branch_that_was_trimmed_after_the_state_begins_later(driver: SnapshotDriver) -> None:
    driver.snapshot("before", 12)
    data = branch(driver)
    driver.run(DeleteSnapshot("before"))
    driver.run(c.DeleteTopic(TOPIC))
    state = driver.state.dump()
    driver.run(c.TrimStream(data, 5, 7, 0, driver.epoch))
    left = set(driver.committed())
    assert driver.objects[0] not in left
    _, image = rebuilt(state, left)
    assert image.streams[data].start_offset == 5, "as far as the bucket tells"
    assert covered(image, data, 5, 17) == [*driver.objects[1:3], driver.objects[-1]]
    states = {image.objects[each].state for each in left}
    assert states == {ObjectState.COMMITTED}
