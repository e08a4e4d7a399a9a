"""Full stream-set objects are sorted until each stream has few slices, and each byte is rewritten a few times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.planned_bucket import Bucket
from tidelog.storage.commits import ObjectKind, StreamRange
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import MAX_SORTS, plan
from tidelog.storage.compaction.sorting import (
    MAX_INPUTS,
    MAX_RANGES,
    MIN_GAIN,
    MIN_GAIN_APART,
    groups,
    may_be_sorted,
    ranges_left,
)
from tidelog.storage.settings import CompactionSettings

SETTINGS = CompactionSettings(
    min_objects=4, max_objects=16, age_ms=10_000, target_bytes=64 << 10, stream_bytes=8 << 10, enabled=True
)
PER_STREAM = 2 * MAX_INPUTS
"""Slices that a stream may have besides those of at least `stream_bytes`: what waits for more, sorted or not."""


def slices(bucket: Bucket) -> int:
    return sum(len(one.ranges) for one in bucket.facts.values())


def small_slices(bucket: Bucket) -> int:
    return sum(len(one.ranges) for one in bucket.facts.values() if one.kind == ObjectKind.STREAM_SET)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("streams", [40, 120])
def test_the_slices_of_a_long_time_are_bounded_by_bytes_and_streams(streams: int, share: float) -> None:
    bucket, rng = Bucket(SETTINGS), random.Random(7)
    stored = 0
    ids = range(1, 4 * streams, 4)
    written = max(1, int(streams * share))
    for number in range(4 * streams):
        chosen = ids if share == 1.0 else rng.sample(ids, written)
        each = (64 << 10) // written
        bucket.upload(dict.fromkeys(chosen, each))
        stored += each * written
        if number % 8 == 0:
            bucket.settle()
    bucket.settle()
    assert stored > 8 * streams * SETTINGS.stream_bytes
    assert slices(bucket) < 2 * stored / SETTINGS.stream_bytes + streams * PER_STREAM
    assert small_slices(bucket) < streams * PER_STREAM
    assert bucket.written < 8 * stored, "sorted at most four times, merged at most four"


def test_a_skewed_load_is_bounded_too() -> None:
    bucket, rng = Bucket(SETTINGS), random.Random(3)
    stored = 0
    for number in range(400):
        sizes: dict[int, int] = {}
        while sum(sizes.values()) < 64 << 10:
            stream_id = min(int(rng.paretovariate(0.6)), 400)
            sizes[stream_id] = min(7_000, sizes.get(stream_id, 0) + 300)
        bucket.upload(sizes)
        stored += sum(sizes.values())
        if number % 8 == 0:
            bucket.settle()
    bucket.settle()
    assert small_slices(bucket) < 400 * PER_STREAM
    assert bucket.written < 8 * stored


def test_without_sorting_the_slices_grow_with_each_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this is for: the same as above, with the planner as it would be without."""
    monkeypatch.setattr("tidelog.storage.compaction.plan.MAX_SORTS", 0)
    bucket = Bucket(SETTINGS)
    for _ in range(300):
        bucket.upload(dict.fromkeys(range(40), (64 << 10) // 40))
    bucket.settle()
    assert slices(bucket) == 300 * 40


def facts(object_id: int, pieces: list[tuple[int, int, int]], size: int = 60 << 10) -> ObjectFacts:
    ranges = tuple(StreamRange(*piece) for piece in sorted(pieces))
    return ObjectFacts(object_id, ObjectKind.STREAM_SET, size, 0, ranges, len(ranges))


def uploads(count: int, streams: range) -> list[ObjectFacts]:
    return [facts(n + 1, [(stream_id, 5 * n, 5 * n + 5) for stream_id in streams]) for n in range(count)]


def test_a_group_needs_enough_objects() -> None:
    assert list(groups(uploads(7, range(40)), SETTINGS)) == []
    (group,) = groups(uploads(8, range(40)), SETTINGS)
    assert [one.object_id for one in group] == list(range(1, 9))
    (group, rest) = groups(uploads(27, range(40)), SETTINGS)
    assert [one.object_id for one in group] == list(range(1, 17))
    assert [one.object_id for one in rest] == list(range(17, 28))
    eager = CompactionSettings(min_objects=2, target_bytes=64 << 10, stream_bytes=8 << 10)
    assert [len(one) for one in groups(uploads(5, range(40)), eager)] == [5]


def test_a_group_that_gains_nothing_is_not_sorted() -> None:
    apart = [facts(n, [(100 * stream_id + n, 0, 5) for stream_id in range(40)]) for n in range(1, 17)]
    assert ranges_left(apart) == 16 * 40
    assert list(groups(apart, SETTINGS)) == []
    gaps = [facts(n, [(stream_id, 10 * n, 10 * n + 5) for stream_id in range(40)]) for n in range(1, 17)]
    assert list(groups(gaps, SETTINGS)) == []


def test_objects_that_lie_mostly_beside_each_other_wait() -> None:
    """Sorted at once they would leave most of their ranges, scattered anew, and be sorted again and again."""
    firsts = [100, 62, 66, 70, 74, 78, 122, 126, 130, 134, 138]
    pairs = [facts(n, [(s, 1000 * n, 1000 * n + 5) for s in range(f, f + 40)]) for n, f in enumerate(firsts, 1)]
    more = [
        facts(100 + n, [(s, 1000 * n + 5, 1000 * n + 9) for s in range(f, f + 40)]) for n, f in enumerate(firsts[:5], 1)
    ]
    beside = [*pairs, *more]
    assert len(beside) == MAX_INPUTS
    assert MIN_GAIN * ranges_left(beside) < 16 * 40 < MIN_GAIN_APART * ranges_left(beside)
    assert list(groups(beside, SETTINGS)) == []
    assert [len(group) for group in groups(uploads(16, range(40)), SETTINGS)] == [16]


def test_sorts_of_about_the_same_streams_are_cut_at_the_same_streams() -> None:
    cuts: list[set[int]] = []
    for seed in range(4):
        bucket, rng = Bucket(SETTINGS), random.Random(seed)
        for _ in range(16):
            bucket.upload({stream: rng.randint(120, 200) for stream in rng.sample(range(2, 3000, 3), 400)})
        (task,) = plan(bucket.objects(), bucket.now_ms, SETTINGS)
        cuts.append({output.parts[0][0] for output in bucket.lay_out(task)})
    common = set.intersection(*cuts)
    assert len(common) >= 0.5 * max(map(len, cuts)), cuts


def test_what_was_sorted_is_sorted_with_its_likes_only() -> None:
    raw = uploads(8, range(400))
    done = [
        facts(100 + 10 * n + share, [(s, 1000 * n, 1000 * n + 1000) for s in range(40 * share, 40 * share + 40)])
        for n in range(8)
        for share in range(10)
    ]
    found = list(groups([*raw, *done], SETTINGS))
    assert {one.object_id for one in found[0]} == {one.object_id for one in raw}
    assert len(found) == 11
    for group in found[1:]:
        assert len({one.object_id % 10 for one in group}) == 1, "one share of the streams"


def test_few_objects_of_very_many_streams_are_enough() -> None:
    large = CompactionSettings(min_objects=8, target_bytes=64 << 10, stream_bytes=8 << 10)
    assert [len(group) for group in groups(uploads(5, range(20_000)), large)] == [2, 2]
    assert sum(len(one.ranges) for one in next(iter(groups(uploads(3, range(20_000)), large)))) <= MAX_RANGES


def test_one_plan_has_few_sorts_and_no_object_twice() -> None:
    bucket = Bucket(SETTINGS)
    for _ in range(20 * MAX_INPUTS):
        bucket.upload(dict.fromkeys(range(40), 1600))
    tasks = plan(bucket.objects(), bucket.now_ms, SETTINGS)
    assert [task.kind for task in tasks] == ["sort"] * MAX_SORTS
    inputs = [one.object_id for task in tasks for one in task.inputs]
    assert len(inputs) == len(set(inputs))
    assert plan(bucket.objects(), bucket.now_ms, SETTINGS, excluded=range(1, 10_000)) == []


def test_the_outputs_of_a_sort_have_a_part_of_the_streams_each_and_near_the_target_size() -> None:
    bucket = Bucket(SETTINGS)
    for _ in range(16):
        bucket.upload(dict.fromkeys(range(400), 160))
    (task,) = plan(bucket.objects(), bucket.now_ms, SETTINGS)
    outputs = bucket.lay_out(task)
    assert len(outputs) == 16
    assert all(SETTINGS.target_bytes * 0.7 < one.size < SETTINGS.target_bytes * 1.3 for one in outputs)
    streams = [stream_id for one in outputs for stream_id, _ in one.parts]
    assert streams == list(range(400)), "each once, in order"


def test_a_stream_that_leaves_gets_objects_of_at_most_the_target_size() -> None:
    bucket = Bucket(SETTINGS)
    for _ in range(16):
        bucket.upload({1: 20_000, **dict.fromkeys(range(2, 102), 400)})
    (task,) = plan(bucket.objects(), bucket.now_ms, SETTINGS)
    outputs = bucket.lay_out(task)
    alone = [one for one in outputs if one.kind == ObjectKind.STREAM]
    assert len(alone) == 6, "320,000 bytes, 3 blocks of 20,000 to an object"
    assert all(one.size <= SETTINGS.target_bytes for one in alone)
    assert all(stream_id != 1 for one in outputs if one.kind == ObjectKind.STREAM_SET for stream_id, _ in one.parts)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 12))
def test_groups_are_disjoint_bounded_and_worth_it(seed: int, streams: int) -> None:
    rng = random.Random(seed)
    ends: dict[int, int] = {}
    found = []
    for object_id in range(1, 80):
        chosen = rng.sample(range(streams * 4), rng.randint(1, streams * 4))
        pieces = []
        for stream_id in chosen:
            start = ends.get(stream_id, 0)
            ends[stream_id] = start + rng.randint(1, 5)
            pieces.append((stream_id, start, ends[stream_id]))
        if rng.random() < 0.9:
            found.append(facts(object_id, pieces, rng.choice([20 << 10, 40 << 10, 60 << 10])))
    candidates = [one for one in found if may_be_sorted(one, SETTINGS)]
    assert all(2 * one.size >= SETTINGS.target_bytes for one in candidates)
    taken: set[int] = set()
    for group in groups(candidates, SETTINGS):
        ids = {one.object_id for one in group}
        assert not ids & taken
        taken |= ids
        assert 2 <= len(group) == len(ids) <= MAX_INPUTS
        before = sum(len(one.ranges) for one in group)
        assert before <= MAX_RANGES
        assert MIN_GAIN * ranges_left(group) <= before
    assert list(groups(candidates, SETTINGS)) == list(groups(list(reversed(candidates)), SETTINGS))
