"""Planning conserves: every confirmed record is in exactly one task and one object range, in order, in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.storage.cache.log_cache import CacheEntry, Fate, StreamLog
from tidelog.storage.commits import ObjectKind
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import UploadSettings
from tidelog.storage.uploads.plan import MAX_STREAMS, UploadPlanner, UploadTask, layout


class World:
    """Appends records and confirms them; one byte of WAL header each."""

    def __init__(self, planner: UploadPlanner) -> None:
        self.planner = planner
        self.logs: dict[int, StreamLog] = {}
        self.entries: list[CacheEntry] = []
        self.wal_end = planner.planned

    def append(self, stream: int, size: int, count: int = 1) -> None:
        log = self.logs.setdefault(stream, StreamLog(stream, 0))
        record = StreamEntry(log.end_offset, count, bytes(size))
        log.push(record)
        self.wal_end += size + 1
        entry = CacheEntry(self.wal_end, log, record)
        self.entries.append(entry)
        self.planner.add(entry)


def make(size_bytes: int = 100, age_ms: int = 1000, wal_start: int = 0) -> tuple[UploadPlanner, World]:
    planner = UploadPlanner(UploadSettings(size_bytes=size_bytes, age_ms=age_ms), 0)
    planner.restart(wal_start)
    planner.release([])
    return planner, World(planner)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 5), st.integers(0, 150)),
        st.tuples(st.just("confirm"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 800), st.just(0)),
        st.tuples(st.just("force"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=examples(200), deadline=None)
@given(steps, st.integers(0, 1000))
def test_every_confirmed_byte_is_planned_exactly_once_in_order(steps: list[tuple[str, int, int]], start: int) -> None:
    planner, world = make(wal_start=start)
    confirmed, now, tasks = start, 0.0, []
    boundaries = [start]
    for kind, number, size in steps:
        if kind == "append":
            world.append(number, size)
            boundaries.append(world.wal_end)
        elif kind == "confirm":
            confirmed = max(confirmed, boundaries[number * (len(boundaries) - 1) // 100])
        elif kind == "wait":
            now += number / 1000
        else:
            planner.observe(now, confirmed)
            planner.force(confirmed)
        planner.observe(now, confirmed)
        while (task := planner.next_task(now)) is not None:
            tasks.append(task)
        assert planner.pending_bytes < 100, "what reaches the size is not left"
        assert planner.planned <= confirmed, "nothing unconfirmed is planned (rule 2)"
    planner.force(confirmed)
    while (task := planner.next_task(now)) is not None:
        tasks.append(task)
    check_tasks(tasks, world, start, confirmed)


def check_tasks(tasks: list[UploadTask], world: World, start: int, confirmed: int) -> None:
    position = start
    for task in tasks:
        assert task.wal_start == position
        assert task.wal_end > task.wal_start
        assert task.wal_end - task.wal_start <= 100 or len(task.entries) == 1
        position = task.wal_end
    assert position == confirmed
    planned = [entry for task in tasks for entry in task.entries]
    assert planned == [entry for entry in world.entries if entry.wal_end <= confirmed]
    ends: dict[int, int] = {}
    for task in tasks:
        plan = layout(task, split_bytes=50)
        seen = [part.log.stream_id for one in plan.objects for part in one.parts]
        assert len(seen) == len(set(seen))
        for one in plan.objects:
            assert [part.log.stream_id for part in one.parts] == sorted(part.log.stream_id for part in one.parts)
            for part in one.parts:
                assert one.kind is (ObjectKind.STREAM if part.size >= 50 else ObjectKind.STREAM_SET)
                for record in part.records:
                    assert record.base_offset == ends.get(part.log.stream_id, 0)
                    ends[part.log.stream_id] = record.base_offset + record.count
    for stream, log in world.logs.items():
        last = [entry for entry in planned if entry.log is log]
        assert ends.get(stream, 0) == (last[-1].record.base_offset + 1 if last else 0)


def test_what_waits_is_due_by_age_and_never_later() -> None:
    planner, world = make(size_bytes=1000, age_ms=1000)
    world.append(1, 10)
    planner.observe(5.0, world.wal_end)
    assert planner.next_task(5.9) is None
    assert planner.wait_s(5.5) == pytest.approx(0.5)
    task = planner.next_task(6.0)
    assert task is not None
    assert planner.wait_s(6.0) is None
    world.append(1, 10)
    planner.observe(9.0, world.wal_end)
    assert planner.next_task(9.9) is None
    assert planner.next_task(10.0) is not None


def test_the_rest_after_a_size_cut_is_never_later_than_its_age() -> None:
    planner, world = make(size_bytes=100, age_ms=1000)
    world.append(1, 59)
    planner.observe(0.0, world.wal_end)
    world.append(1, 49)
    world.append(1, 9)
    planner.observe(0.9, world.wal_end)
    first = planner.next_task(0.9)
    assert first is not None
    assert first.wal_end == 60
    assert planner.next_task(0.9) is None
    # It was confirmed at some time after 0.0, the last that was seen before the cut.
    assert planner.wait_s(0.9) == pytest.approx(0.1)


def test_the_watch_tells_when_to_look_again() -> None:
    planner, world = make(size_bytes=100)
    assert planner.watch_at() == 1
    world.append(1, 9)
    planner.observe(0.0, 10)
    assert planner.watch_at() == 100
    world.append(1, 99)
    planner.observe(0.0, 110)
    assert planner.watch_at() is None


def test_an_epoch_start_alone_is_committed_without_objects() -> None:
    planner, _ = make(age_ms=1000)
    planner.observe(0.0, 44)
    assert planner.next_task(0.5) is None
    task = planner.next_task(1.0)
    assert task is not None
    assert (task.wal_start, task.wal_end, task.entries) == (0, 44, [])
    assert layout(task, 10).objects == []


def test_nothing_is_planned_before_the_recovered_streams_are_known() -> None:
    planner = UploadPlanner(UploadSettings(size_bytes=10, age_ms=1), 0)
    world = World(planner)
    world.append(1, 50)
    planner.observe(0.0, world.wal_end + 60)
    planner.force(world.wal_end)
    assert planner.next_task(100.0) is None
    assert planner.watch_at() is None
    assert planner.wait_s(0.0) is None
    log = StreamLog(7, 0)
    record = StreamEntry(0, 1, b"old")
    log.push(record)
    planner.release([CacheEntry(20, log, record)])
    first = planner.next_task(100.0)
    assert first is not None
    assert [entry.record for entry in first.entries] == [record]


def test_a_task_stays_within_the_streams_of_one_commit() -> None:
    planner, world = make(size_bytes=1 << 30)
    for stream in range(MAX_STREAMS * 3):
        world.append(stream, 0)
    planner.observe(0.0, world.wal_end)
    planner.force(world.wal_end)
    tasks = []
    while (task := planner.next_task(0.0)) is not None:
        tasks.append(task)
    assert all(len({entry.log.stream_id for entry in task.entries}) <= MAX_STREAMS for task in tasks)
    assert sum(len(task.entries) for task in tasks) == MAX_STREAMS * 3


def test_deleted_streams_are_left_out_and_quarantined_ones_set_aside() -> None:
    planner, world = make()
    for stream in (3, 1, 2):
        world.append(stream, 5)
    planner.observe(0.0, world.wal_end)
    planner.force(world.wal_end)
    task = planner.next_task(0.0)
    assert task is not None
    world.logs[1].fate = Fate.DROP
    world.logs[2].fate = Fate.QUARANTINE
    plan = layout(task, 100)
    assert [part.log.stream_id for one in plan.objects for part in one.parts] == [3]
    assert [part.log.stream_id for part in plan.quarantined] == [2]
    assert plan.is_current
    world.logs[3].fate = Fate.DROP
    assert not plan.is_current


def test_urgency_makes_everything_confirmed_due() -> None:
    planner, world = make(size_bytes=1000, age_ms=100_000)
    world.append(1, 10)
    planner.observe(0.0, world.wal_end)
    assert planner.next_task(0.0) is None
    planner.urgent = True
    assert planner.next_task(0.0) is not None
    assert planner.next_task(0.0) is None
