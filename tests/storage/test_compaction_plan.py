"""The planner conserves every offset, keeps its tasks bounded, never rewrites without need, and comes to an end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.planned_bucket import Bucket
from tidelog.runtime.errors import CorruptData
from tidelog.storage.commits import ObjectKind, StreamRange
from tidelog.storage.compaction.plan import MAX_OUTPUTS, CompactionTask, lay_out, plan
from tidelog.storage.settings import CompactionSettings

SETTINGS = CompactionSettings(
    min_objects=4, max_objects=8, age_ms=10_000, target_bytes=64 << 10, stream_bytes=8 << 10, enabled=True
)


STREAMS = st.integers(1, 6)
UPLOAD = st.dictionaries(STREAMS, st.integers(100, 20_000), min_size=1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("upload"), UPLOAD, st.frozensets(STREAMS, max_size=2)),
            st.tuples(st.just("trim"), STREAMS, st.integers(0, 100)),
            st.tuples(st.just("delete"), STREAMS, st.none()),
            st.tuples(st.just("wait"), st.integers(1, 20_000), st.none()),
            st.tuples(st.just("compact"), st.none(), st.none()),
        ),
        max_size=60,
    )
)
@settings(max_examples=examples(150), deadline=None)
def test_whatever_happens_every_offset_is_kept_and_compaction_comes_to_an_end(
    steps: list[tuple[str, Any, Any]],
) -> None:
    bucket = Bucket(SETTINGS)
    deleted: set[int] = set()
    for what, one, two in steps:
        if what == "upload":
            bucket.upload({each: size for each, size in one.items() if each not in deleted}, two)
        elif what == "trim" and one in bucket.starts:
            bucket.starts[one] = max(bucket.starts[one], min(two, bucket.ends[one]))
        elif what == "delete":
            deleted.add(one)
            bucket.starts.pop(one, None)
        elif what == "wait":
            bucket.now_ms += one
        elif what == "compact":
            for task in plan(bucket.objects(), bucket.now_ms, SETTINGS)[:2]:
                bucket.run(task)
        bucket.covered()
    before = bucket.covered()
    bucket.settle()
    after = bucket.covered()
    assert before.keys() == after.keys()
    bucket.now_ms += 100_000
    bucket.settle()
    assert plan(bucket.objects(), bucket.now_ms, SETTINGS) == []


def test_many_small_uploads_become_few_objects_and_each_byte_is_rewritten_few_times() -> None:
    bucket = Bucket(SETTINGS)
    rng = random.Random(5)
    for _ in range(2_000):
        bucket.upload({stream: rng.randrange(100, 600) for stream in range(1, 9)})
        if rng.random() < 0.2:
            bucket.settle()
    stored = sum(one.size for one in bucket.facts.values())
    bucket.now_ms += 100_000
    bucket.settle()
    assert len(bucket.facts) < 3 * stored / SETTINGS.target_bytes + 8 * 8
    assert bucket.written < 6 * stored  # log2(64 KiB / 2 KiB) = 5, and the split


def test_objects_of_half_the_target_are_left_alone() -> None:
    bucket = Bucket(SETTINGS)
    for _ in range(20):
        bucket.upload({1: 33 << 10}, frozenset([1]))
    bucket.now_ms += 1 << 30
    assert plan(bucket.objects(), bucket.now_ms, SETTINGS) == []


def test_few_small_objects_wait_for_more_until_they_are_old() -> None:
    bucket = Bucket(SETTINGS)
    for _ in range(3):
        bucket.upload({1: 500})
    assert plan(bucket.objects(), bucket.now_ms, SETTINGS) == []
    bucket.now_ms += 10_000
    (task,) = plan(bucket.objects(), bucket.now_ms, SETTINGS)
    assert "older than 10 s" in task.reason
    bucket.upload({1: 500})
    (task,) = plan(bucket.objects(), bucket.now_ms, SETTINGS)
    assert task.reason == "4 small objects"


def test_a_large_stream_leaves_the_set_and_so_does_one_whose_parts_do_not_meet() -> None:
    bucket = Bucket(SETTINGS)
    bucket.upload({1: 3_000, 2: 100, 3: 100})
    bucket.upload({2: 100}, frozenset([2]))
    for _ in range(3):
        bucket.upload({1: 3_000, 2: 100, 3: 100})
    (task,) = plan(bucket.objects(), bucket.now_ms, SETTINGS)
    shapes = [(one.kind, [part[0] for part in one.parts]) for one in bucket.lay_out(task)]
    assert shapes == [
        (ObjectKind.STREAM, [1]),
        (ObjectKind.STREAM, [2]),
        (ObjectKind.STREAM, [2]),
        (ObjectKind.STREAM_SET, [3]),
    ]


def test_an_excluded_object_is_a_wall_that_nothing_is_merged_across() -> None:
    bucket = Bucket(SETTINGS)
    for _ in range(9):
        bucket.upload({1: 500}, frozenset([1]))
    tasks = plan(bucket.objects(), bucket.now_ms, SETTINGS, excluded=[5])
    assert [[one.object_id for one in task.inputs] for task in tasks] == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_a_mostly_dead_set_is_written_again_without_the_dead() -> None:
    bucket = Bucket(SETTINGS)
    bucket.upload({1: 40_000, 2: 100, 3: 100})
    bucket.now_ms += 10_000
    bucket.starts[1] = 5
    assert plan(bucket.objects(), bucket.now_ms, SETTINGS) == []
    del bucket.starts[2]
    (task,) = plan(bucket.objects(), bucket.now_ms, SETTINGS)
    assert task.kind == "shed"
    bucket.run(task)
    (left,) = bucket.objects()
    assert [piece.stream_id for piece in left.ranges] == [3]
    assert left.size < 1_000


def test_more_streams_than_may_leave_at_once_stay_in_layers() -> None:
    bucket = Bucket(SETTINGS)
    many = range(1, 2 * MAX_OUTPUTS)
    bucket.upload(dict.fromkeys(many, 60))
    bucket.upload(dict.fromkeys(many, 60), frozenset(many))
    bucket.upload(dict.fromkeys(many, 60))
    sets = tuple(one for one in bucket.objects() if one.kind == ObjectKind.STREAM_SET)
    outputs = bucket.lay_out(CompactionTask("gather", sets, "test"))
    kinds = [one.kind for one in outputs]
    assert kinds.count(ObjectKind.STREAM) == MAX_OUTPUTS
    assert kinds.count(ObjectKind.STREAM_SET) == 2
    bucket.run(CompactionTask("gather", sets, "test"))
    bucket.covered()


def test_an_index_that_lacks_what_the_metadata_says_is_corrupt() -> None:
    bucket = Bucket(SETTINGS)
    bucket.upload({1: 100})
    (one,) = bucket.objects()
    wrong = one._replace(ranges=(StreamRange(1, 0, 6),))
    with pytest.raises(CorruptData, match="offsets of stream 1"):
        lay_out(CompactionTask("shed", (wrong,), "test"), bucket.indexes, bucket.starts, 100, 1000)
