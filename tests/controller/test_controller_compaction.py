"""The command that replaces objects by compacted ones keeps rules 6 and 7, whatever it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.controller_helpers import DELAY_MS, TOPIC, Driver, new_object
from tests.support.examples import examples
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import ObjectState
from tidelog.runtime.errors import InvalidInput
from tidelog.storage.commits import (
    CommitRefused,
    CompactionRefused,
    CompactObjects,
    NewObject,
    StreamRange,
    pack_ranges,
)
from tidelog.storage.compaction.check import check_conserved


class World:
    """Two open streams, `a` and `b`, each in three objects: [0, 10), [10, 20), [20, 30)."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.epoch = self.driver.broker()
        (first,) = self.driver.topic()
        self.a, self.b = first, first + 1
        self.driver.run(c.OpenStreams(0, self.epoch, ((self.a, self.epoch), (self.b, self.epoch))))
        self.inputs = []
        for number in range(3):
            object_id = self.driver.prepare()
            start = 10 * number
            new = new_object(object_id, (self.a, start, start + 10), (self.b, start, start + 10))
            self.driver.commit(self.epoch, (number, number + 1), new)
            self.inputs.append(object_id)

    def output(self, *ranges: tuple[int, int, int], kind: int = 1) -> NewObject:
        return NewObject(self.driver.prepare(), kind, 50, pack_ranges(ranges))

    def request(self, *outputs: NewObject, inputs: list[int] | None = None, epoch: int | None = None) -> c.Compact:
        chosen = self.inputs if inputs is None else inputs
        return c.Compact(CompactObjects(0, self.epoch if epoch is None else epoch, tuple(chosen), outputs))

    def compact(self, *outputs: NewObject, inputs: list[int] | None = None, epoch: int | None = None) -> None:
        self.driver.run(self.request(*outputs, inputs=inputs, epoch=epoch))

    def states(self) -> list[int]:
        return [self.driver.image.objects[one].state for one in self.inputs]

    def found(self, stream: int) -> list[tuple[int, int, int]]:
        slices = self.driver.image.find_objects(stream, 0, 100, 100)
        return [(one.object_id, one.start_offset, one.end_offset) for one in slices]


@pytest.fixture
def world() -> World:
    return World()


def test_inputs_are_replaced_at_once_and_stay_in_the_bucket_for_the_delay(world: World) -> None:
    whole, alone = world.output((world.a, 0, 30), kind=2), world.output((world.b, 0, 30), kind=2)
    world.compact(whole, alone)
    assert world.states() == [ObjectState.DESTROYED] * 3
    assert world.found(world.a) == [(whole.object_id, 0, 30)]
    assert world.found(world.b) == [(alone.object_id, 0, 30)]
    expires = {world.driver.image.objects[one].expires_ms for one in world.inputs}
    assert expires == {world.driver.now_ms + DELAY_MS}
    world.driver.run(c.ForgetObjects(tuple(world.inputs)))
    assert all(one in world.driver.image.objects for one in world.inputs)  # rule 6: too early
    world.driver.now_ms += DELAY_MS
    world.driver.run(c.ForgetObjects(tuple(world.inputs)))
    assert not any(one in world.driver.image.objects for one in world.inputs)


def test_streams_go_on_where_they_were(world: World) -> None:
    world.compact(world.output((world.a, 0, 30), (world.b, 0, 30)))
    new = new_object(world.driver.prepare(), (world.a, 30, 40))
    world.driver.commit(world.epoch, (3, 4), new)
    assert [one[1:] for one in world.found(world.a)] == [(0, 30), (30, 40)]


def test_the_same_compaction_twice_is_success_and_changes_nothing(world: World) -> None:
    request = world.request(world.output((world.a, 0, 30), (world.b, 0, 30)))
    world.driver.run(request)
    before = world.driver.state.dump()
    rows = dict(world.driver.image.objects)
    world.driver.run(request)
    assert dict(world.driver.image.objects) == rows
    assert len(before) == len(world.driver.state.dump())


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ([("a", 0, 30)], "lack 0..30"),
        ([("a", 0, 20), ("b", 0, 30)], "lack 20..30"),
        ([("a", 5, 30), ("b", 0, 30)], "lack 0..5"),
        ([("a", 0, 31), ("b", 0, 30)], "do not hold"),
        ([("a", 0, 30), ("b", 0, 30), ("other", 0, 5)], "do not hold"),
    ],
)
def test_what_does_not_conserve_is_refused_and_changes_nothing(
    world: World, ranges: list[tuple[str, int, int]], why: str
) -> None:
    streams = {"a": world.a, "b": world.b, "other": world.a + 2}
    output = world.output(*((streams[name], start, end) for name, start, end in ranges))
    rows = dict(world.driver.image.objects)
    with pytest.raises(CompactionRefused, match=why):
        world.compact(output)
    assert dict(world.driver.image.objects) == rows


def test_a_gap_between_outputs_and_an_overlap_are_refused(world: World) -> None:
    rest = world.output((world.b, 0, 30), kind=2)
    with pytest.raises(CompactionRefused, match=r"lack 10\.\.20"):
        world.compact(world.output((world.a, 0, 10), kind=2), world.output((world.a, 20, 30), kind=2), rest)
    with pytest.raises(CompactionRefused, match="overlap at offset 10"):
        world.compact(world.output((world.a, 0, 20), kind=2), world.output((world.a, 10, 30), kind=2), rest)
    assert world.states() == [ObjectState.COMMITTED] * 3


def test_trimmed_offsets_may_be_left_out_and_no_others(world: World) -> None:
    world.driver.run(c.TrimStream(world.a, world.epoch, 12))
    with pytest.raises(CompactionRefused, match=r"lack 0\.\.13"):
        world.compact(world.output((world.a, 13, 30), (world.b, 0, 30)))
    world.compact(world.output((world.a, 11, 30), (world.b, 0, 30)))  # 11: the append that holds 12 begins there
    assert [one[1:] for one in world.found(world.a)] == [(11, 30)]


def test_a_hole_between_inputs_stays_a_hole(world: World) -> None:
    ends = [world.inputs[0], world.inputs[2]]
    with pytest.raises(CompactionRefused, match="do not hold"):
        world.compact(world.output((world.a, 0, 30), (world.b, 0, 30)), inputs=ends)
    first, last = world.output((world.a, 0, 10), (world.b, 0, 10)), world.output((world.a, 20, 30), (world.b, 20, 30))
    world.compact(first, last, inputs=ends)
    assert [one[0] for one in world.found(world.a)] == [first.object_id, world.inputs[1], last.object_id]


def test_an_input_that_is_gone_refuses_the_whole(world: World) -> None:
    world.compact(world.output((world.a, 0, 10), (world.b, 0, 10)), inputs=world.inputs[:1])
    late = world.output((world.a, 0, 30), (world.b, 0, 30))
    with pytest.raises(CompactionRefused, match="no longer committed: it is DESTROYED"):
        world.compact(late)
    assert world.states()[1:] == [ObjectState.COMMITTED] * 2
    world.driver.now_ms += DELAY_MS
    world.driver.run(c.ForgetObjects(tuple(world.inputs)))
    with pytest.raises(CompactionRefused, match="it is gone"):
        world.compact(late)


def test_deleted_streams_are_dropped_even_when_they_go_while_the_compaction_runs(world: World) -> None:
    world.driver.run(c.CreateTopic(b"x" * 16, "other", 1, {}, False, False, None))
    output = world.output((world.a, 0, 30), (world.b, 0, 30))
    (kept,) = [one.first_stream for one in world.driver.image.partitions(b"x" * 16)]
    world.driver.run(c.OpenStreams(0, world.epoch, ((kept, world.epoch),)))
    new = new_object(world.driver.prepare(), (kept, 0, 5))
    world.driver.commit(world.epoch, (3, 4), new)
    world.driver.run(c.DeleteTopic(TOPIC))
    assert world.states() == [ObjectState.DESTROYED] * 3
    with pytest.raises(CompactionRefused):
        world.compact(output)
    mixed = new_object(world.driver.prepare(), (kept, 5, 9))
    world.driver.commit(world.epoch, (4, 5), mixed)
    both = world.output((world.a, 0, 30), (kept, 0, 9))
    world.compact(both, inputs=[new.object_id, mixed.object_id])
    assert world.driver.image.objects[both.object_id].ranges == (StreamRange(kept, 0, 9),)


def test_a_stale_master_epoch_is_fenced(world: World) -> None:
    output = world.output((world.a, 0, 30), (world.b, 0, 30))
    world.driver.broker(incarnation="b")
    with pytest.raises(CommitRefused):
        world.compact(output)
    assert world.states() == [ObjectState.COMMITTED] * 3


def test_an_output_whose_id_expired_is_refused(world: World) -> None:
    output = world.output((world.a, 0, 30), (world.b, 0, 30))
    world.driver.now_ms += 20_000
    world.driver.run(c.ExpireObjects((output.object_id,)))
    with pytest.raises(CompactionRefused, match="not prepared"):
        world.compact(output)
    assert world.states() == [ObjectState.COMMITTED] * 3


def test_malformed_requests_are_refused(world: World) -> None:
    good = world.output((world.a, 0, 30), (world.b, 0, 30))
    for outputs, inputs in [
        ((), world.inputs),
        ((good,), []),
        ((good, good), world.inputs),
        ((good,), [*world.inputs, world.inputs[0]]),
        ((good,), [good.object_id]),
        ((world.output(kind=1),), world.inputs),
        ((world.output((world.a, 0, 30), (world.b, 0, 30), kind=2),), world.inputs),
        ((world.output((world.a, 0, 10), (world.a, 10, 30), (world.b, 0, 30)),), world.inputs),
        ((world.output((world.a, 0, 30), kind=7),), world.inputs),
    ]:
        with pytest.raises(InvalidInput):
            world.compact(*outputs, inputs=inputs)
    assert world.states() == [ObjectState.COMMITTED] * 3


def test_an_image_that_skips_the_changes_ends_the_same(world: World) -> None:
    """A follower too far behind loads a new image; what it lacks is applied as one difference."""
    behind = Image()
    rows = behind.difference(world.driver.image)
    behind.apply(Delta(1, rows))
    world.compact(world.output((world.a, 0, 30), (world.b, 0, 30)))
    behind.apply(Delta(2, behind.difference(world.driver.image)))
    for stream in (world.a, world.b):
        assert behind.find_objects(stream, 0, 100, 100) == world.driver.image.find_objects(stream, 0, 100, 100)


OFFSETS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=5)


@given(OFFSETS, OFFSETS, st.integers(0, 18))
@settings(max_examples=examples(400), deadline=None)
def test_the_check_agrees_with_sets_of_offsets(
    held: list[tuple[int, int]], made: list[tuple[int, int]], start_offset: int
) -> None:
    def offsets(pairs: list[tuple[int, int]]) -> list[int]:
        return [offset for start, length in pairs for offset in range(start, start + length)]

    def overlap(pairs: list[tuple[int, int]]) -> bool:
        return len(offsets(pairs)) != len(set(offsets(pairs)))

    def ranges(pairs: list[tuple[int, int]]) -> list[StreamRange]:
        return [StreamRange(1, start, start + length) for start, length in pairs]

    def missing_runs_are_trimmed() -> bool:
        return all(offset < start_offset for offset in set(offsets(held)) - set(offsets(made)))

    right = (
        not overlap(held)
        and not overlap(made)
        and set(offsets(made)) <= set(offsets(held))
        and missing_runs_are_trimmed()
    )
    try:
        check_conserved(ranges(held), ranges(made), lambda _stream: start_offset)
    except CompactionRefused:
        assert not right
    else:
        assert right
