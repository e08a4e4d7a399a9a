"""The tasks of a read of Spark: every offset exactly once, about as large as asked for."""

from __future__ import annotations

import itertools
import pickle

from hypothesis import given
from hypothesis import strategies as st

from pyspark_tidelog.plan import PlannedRange, Slice, Task, plan_tasks


@st.composite
def ranges(draw: st.DrawFn) -> list[PlannedRange]:
    found = []
    for partition in range(draw(st.integers(1, 3))):
        edges = sorted(draw(st.sets(st.integers(0, 1_000), min_size=2, max_size=8)))
        slices = [
            Slice(draw(st.integers(1, 6)), 1, draw(st.integers(100, 10_000_000)), start, end)
            for start, end in itertools.pairwise(edges)
        ]
        start = draw(st.integers(edges[0], edges[-1]))
        end = draw(st.integers(start, edges[-1] + 500))
        overlapping = tuple(each for each in slices if each.end > start and each.start < end)
        found.append(PlannedRange("t", "id", partition, 4 * partition + 1, start, end, edges[-1], overlapping))
    return found


@given(
    ranges(),
    st.sampled_from((1, 1_000, 100_000, 1 << 40)),
    st.sampled_from((0, 1, 7, 100)),
    st.sampled_from((0, 1, 5, 40)),
    st.booleans(),
)
def test_tasks_cover_every_offset_once_in_order(
    drawn: list[PlannedRange], max_bytes: int, max_records: int, min_tasks: int, reads_tail: bool
) -> None:
    tasks = plan_tasks(drawn, max_bytes=max_bytes, max_records=max_records, min_tasks=min_tasks, reads_tail=reads_tail)
    for one in drawn:
        mine = [each for each in tasks if each.partition == one.partition]
        end = one.end if reads_tail else max(one.start, min(one.end, one.committed_end))
        at = one.start
        for task in mine:
            assert task.start == at < task.end
            at = task.end
            if task.is_tail:
                assert task.start >= min(one.committed_end, one.end)
                continue
            assert not max_records or task.end - task.start <= max_records
            held = [(max(each.start, task.start), min(each.end, task.end)) for each in task.slices]
            assert held[0][0] == task.start and held[-1][1] == task.end
            assert all(before == after for (_, before), (after, _) in itertools.pairwise(held))
        assert at == max(end, one.start)
    assert pickle.loads(pickle.dumps(tasks)) == tasks


def one_object(size: int, end: int = 1_000) -> list[PlannedRange]:
    return [PlannedRange("t", "id", 0, 1, 0, end, end, (Slice(1, 2, size, 0, end),))]


def test_a_large_object_is_cut_by_its_offsets() -> None:
    tasks = plan_tasks(one_object(1_000_000), max_bytes=250_000)
    assert [(each.start, each.end) for each in tasks] == [(0, 250), (250, 500), (500, 750), (750, 1_000)]
    assert all(each.slices == (Slice(1, 2, 1_000_000, 0, 1_000),) for each in tasks)


def test_small_objects_share_a_task() -> None:
    slices = tuple(Slice(number, 1, 1_000, 10 * number, 10 * number + 10) for number in range(10))
    tasks = plan_tasks([PlannedRange("t", "id", 0, 1, 0, 100, 100, slices)], max_bytes=5_000)
    assert [(each.start, each.end) for each in tasks] == [(0, 50), (50, 100)]


def test_an_object_of_many_partitions_counts_for_each_in_part() -> None:
    shared = Slice(1, 1, 1_000_000, 0, 100)
    drawn = [PlannedRange("t", "id", number, 1, 0, 100, 100, (shared,)) for number in range(10)]
    assert len(plan_tasks(drawn, max_bytes=100_000)) == 10


def test_as_many_tasks_as_asked_for() -> None:
    assert len(plan_tasks(one_object(1_000), max_bytes=1 << 40, min_tasks=8)) >= 8
    assert len(plan_tasks(one_object(1_000, end=3), max_bytes=1 << 40, min_tasks=8)) == 3, "there are no more offsets"


def test_as_many_tasks_as_asked_for_of_a_part_of_an_object() -> None:
    part = [PlannedRange("t", "id", 0, 1, 450, 550, 1_000, (Slice(1, 2, 1_000_000, 0, 1_000),))]
    assert len(plan_tasks(part, max_bytes=1 << 40, min_tasks=8)) >= 8


def test_what_is_not_uploaded_is_one_task_that_asks_the_brokers() -> None:
    (only,) = plan_tasks([PlannedRange("t", "id", 0, 1, 50, 80, 40, ())], max_bytes=1_000)
    assert only == Task("t", 0, 1, 50, 80, ()) and only.is_tail
    assert plan_tasks([PlannedRange("t", "id", 0, 1, 50, 80, 40, ())], max_bytes=1_000, reads_tail=False) == []
