"""Which objects hold ranges of offsets: answers, their bounds, and how a question goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.controller_helpers import Driver, new_object
from tidelog.controller.image.image import Image
from tidelog.controller.image.lookup import MAX_RANGES, MAX_SLICES, TO_THE_END, OffsetRange, look_up
from tidelog.controller.model import commands as c
from tidelog.runtime.errors import InvalidInput, NotFound
from tidelog.storage.commits import CompactObjects

OBJECTS = 5
PER_OBJECT = 10


def filled(partitions: int = 2, objects: int = OBJECTS) -> Driver:
    """Topic `t`, in each of whose partitions every object has ten offsets."""
    driver = Driver()
    epoch = driver.broker()
    streams = [first + 1 for first in driver.topic(partitions)]
    driver.run(c.OpenStreams(0, epoch, tuple((stream, 0) for stream in streams)))
    for number in range(objects):
        start = number * PER_OBJECT
        ranges = [(stream, start, start + PER_OBJECT) for stream in streams]
        driver.commit(epoch, (number, number + 1), new_object(driver.prepare(), *ranges))
    return driver


def test_a_range_is_answered_with_the_slices_that_overlap_it() -> None:
    image = filled().image
    found = look_up(image, [OffsetRange("t", 1, 15, 31), OffsetRange("t", 0)])
    assert found.next is None and found.version == image.version and found.cluster_id == "cluster"
    middle, whole = found.ranges
    assert [(each.start_offset, each.end_offset) for each in middle.slices] == [(10, 20), (20, 30), (30, 40)]
    assert (middle.start, middle.end, middle.log_start, middle.committed_end) == (15, 31, 0, 50)
    assert (whole.start, whole.end, len(whole.slices)) == (0, 50, OBJECTS)
    assert bytes.fromhex(whole.topic_id) == image.topic_ids["t"]
    assert middle.stream != whole.stream


def test_what_is_trimmed_is_told_and_has_no_slices() -> None:
    driver = filled(1)
    (partition,) = driver.image.partitions(driver.image.topic_ids["t"])
    driver.run(c.TrimStream(partition.first_stream + 1, 0, 25, 0, driver.image.replica_sets[0].master_epoch))
    (found,) = look_up(driver.image, [OffsetRange("t", 0)]).ranges
    assert found.log_start == 25
    assert [(each.start_offset, each.end_offset) for each in found.slices] == [(20, 30), (30, 40), (40, 50)]


def test_what_is_not_committed_has_no_slices() -> None:
    (found,) = look_up(filled(1).image, [OffsetRange("t", 0, 45, 1_000)]).ranges
    assert (found.end, found.committed_end, len(found.slices)) == (1_000, 50, 1)
    (found,) = look_up(filled(1).image, [OffsetRange("t", 0, 50)]).ranges
    assert (found.start, found.end, found.slices) == (50, 50, [])
    (found,) = look_up(filled(1).image, [OffsetRange("t", 0, 70)]).ranges
    assert found.slices == [], "the tail is at the brokers"


def read_all(images: list[Image], ranges: list[OffsetRange], limit: int) -> list[list[tuple[int, int]]]:
    """Ask until the answer is complete, each time another broker; the slices of each range."""
    found: list[list[tuple[int, int]]] = [[] for _ in ranges]
    at, asked, questions = 0, ranges, 0
    while True:
        answer = look_up(images[questions % len(images)], asked, limit)
        for number, one in enumerate(answer.ranges):
            found[at + number] += [(each.start_offset, each.end_offset) for each in one.slices]
        if answer.next is None:
            return found
        assert sum(len(each.slices) for each in answer.ranges) == limit
        first = asked[answer.next.range]
        rest = OffsetRange(first.topic, first.partition, answer.next.start, first.end)
        at, asked = at + answer.next.range, [rest, *asked[answer.next.range + 1 :]]
        questions += 1


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 49), st.integers(1, 60)), min_size=1, max_size=6),
)
def test_a_question_in_pieces_finds_what_one_in_whole_does(limit: int, drawn: list[tuple[int, int, int]]) -> None:
    image = filled().image
    ranges = [OffsetRange("t", partition, start, start + length) for partition, start, length in drawn]
    whole = [
        [(each.start_offset, each.end_offset) for each in one.slices]
        for one in look_up(image, ranges, MAX_SLICES).ranges
    ]
    assert read_all([image], ranges, limit) == whole


def test_compaction_between_two_pieces_leaves_no_gap_and_nothing_twice() -> None:
    before, after = filled(1), filled(1)
    objects = list(after.image.objects.values())
    (stream,) = {each.stream_id for one in objects for each in one.ranges}
    new = new_object(after.prepare(), (stream, 0, 50))
    epoch = after.image.replica_sets[0].master_epoch
    after.run(c.Compact(CompactObjects(0, epoch, tuple(each.id for each in objects), (new,))))
    (found,) = read_all([before.image, after.image], [OffsetRange("t", 0)], 2)
    assert found == [(0, 10), (10, 20), (0, 50)], "the reader takes what it lacks of the last one"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (OffsetRange("t", 0, -1, 5), "reversed or negative"),
        (OffsetRange("t", 0, 5, 4), "reversed or negative"),
        (OffsetRange("t", 0, 5, -2), "reversed or negative"),
    ],
)
def test_a_range_that_is_none_is_refused(asked: OffsetRange, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        look_up(filled().image, [asked])


def test_bounds_are_checked_before_anything_is_looked_up() -> None:
    image = filled().image
    with pytest.raises(InvalidInput, match="1 to 1000 ranges"):
        look_up(image, [])
    with pytest.raises(InvalidInput, match="not 1001"):
        look_up(image, [OffsetRange("t", 0)] * (MAX_RANGES + 1))
    for limit in (0, MAX_SLICES + 1):
        with pytest.raises(InvalidInput, match="limit is"):
            look_up(image, [OffsetRange("t", 0)], limit)


def test_what_does_not_exist_is_named() -> None:
    image = filled().image
    with pytest.raises(NotFound, match="no topic 'u'"):
        look_up(image, [OffsetRange("u", 0)])
    with pytest.raises(NotFound, match="has 2 partitions, and no partition 2"):
        look_up(image, [OffsetRange("t", 2)])
    assert OffsetRange("t", 0).end == TO_THE_END
