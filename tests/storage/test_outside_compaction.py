"""Compaction outside of the brokers: what an executor writes is committed only if it conserves what it replaces."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyspark_tidelog.fetch import EMBEDDED
from pyspark_tidelog.rewriting import RewriteReport, RewriteTask, count_outputs, needs_count, rewrite
from tests.support.compaction_world import CLUSTER, TTL_MS, CompactionWorld
from tidelog.broker.objects.compaction_view import facts_of
from tidelog.controller.model import commands as c
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, InvalidInput, Unavailable
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.commits import CompactionRefused, CompactObjects, NewObject, ObjectKind, pack_ranges
from tidelog.storage.compaction.outside import OutsideCompaction
from tidelog.storage.compaction.plan import CompactionTask
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.writer import build_object


class OutsideWorld(CompactionWorld):
    """A bucket that executors open by themselves, and one broker."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        directory.mkdir()
        super().__init__(LocalObjectStore(directory, SystemClock()), **settings)
        self.bucket = {EMBEDDED: directory.as_uri()}
        self.data = self.compactor().data

    def outside(self, **changed: Any) -> OutsideCompaction:
        return OutsideCompaction(replace(self.data, **changed), self.clock, random.Random(1))

    async def planned(self) -> list[CompactionTask]:
        return await self.compactor().plan(eager=True)

    def task(self, inputs: Sequence[int], kind: Any = "gather") -> RewriteTask:
        """What a broker tells of a task now."""
        facts = [facts_of(self.image, each) for each in inputs]
        found = tuple(one for one in facts if one is not None)
        assert len(found) == len(inputs)
        streams = sorted({piece.stream_id for one in found for piece in one.ranges})
        starts = tuple((each, self.image.streams[each].start_offset) for each in streams if each in self.image.streams)
        settings = self.settings
        return RewriteTask(CLUSTER, kind, found, starts, settings.target_bytes, settings.stream_bytes, 1024, 17)

    async def with_ids(self, task: RewriteTask) -> RewriteTask:
        count = 1
        if needs_count(task):
            report = await asyncio.to_thread(count_outputs, self.bucket, task)
            assert report.problem is None, report
            count = report.count
        return replace(task, first_id=await self.outside().prepare(count, TTL_MS), ids=count)

    async def rewrite(self, task: RewriteTask) -> RewriteReport:
        return await asyncio.to_thread(rewrite, self.bucket, task)

    async def written(self, task: RewriteTask) -> tuple[RewriteTask, RewriteReport]:
        task = await self.with_ids(task)
        report = await self.rewrite(task)
        assert report.problem is None, report
        return task, report

    async def commit(self, task: RewriteTask, outputs: Sequence[NewObject], **changed: Any) -> None:
        await self.outside(**changed).commit(CLUSTER, [one.object_id for one in task.inputs], outputs)


def told(report: RewriteReport) -> list[NewObject]:
    return [NewObject(one.object_id, one.kind, one.size, pack_ranges(one.ranges)) for one in report.outputs]


async def many_small(directory: Path, uploads: int = 12, **settings: Any) -> OutsideWorld:
    world = OutsideWorld(directory / "bucket", **settings)
    await world.fill(world.topic("a", 3) + world.topic("b", 2), uploads)
    return world


async def test_what_executors_write_reads_the_same_until_nothing_is_left_to_do(tmp_path: Path) -> None:
    world = await many_small(tmp_path, 40)
    (alone,) = world.topic("alone")
    for _ in range(5):
        await world.upload({alone: [world.rng.randbytes(300)]}, alone=[alone])
    kinds: set[str] = set()
    for _ in range(20):
        tasks = await world.planned()
        for planned in tasks:
            kinds.add(planned.kind)
            task, report = await world.written(world.task([one.object_id for one in planned.inputs], planned.kind))
            await world.commit(task, told(report))
            await world.check()
        if not tasks:
            break
    assert {"gather", "merge"} <= kinds and len(world.committed()) < 15
    await world.pass_time()
    assert await world.in_bucket() == world.committed()
    await world.check()


async def test_attempts_beside_and_after_each_other_write_the_same_once(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task = await world.with_ids(world.task(sorted(world.committed())))
    reports = await asyncio.gather(*(world.rewrite(task) for _ in range(3)))
    assert reports[0] == reports[1] == reports[2] and reports[0].problem is None
    keys = [object_key(CLUSTER, one.object_id) for one in reports[0].outputs]
    before = [await world.store.head(key) for key in keys]
    await world.commit(task, told(reports[0]))
    assert await world.rewrite(task) == reports[0], "left behind, and after the commit"
    assert [await world.store.head(key) for key in keys] == before
    await world.check()


async def test_an_object_with_other_contents_is_neither_overwritten_nor_told(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task = await world.with_ids(world.task(sorted(world.committed())))
    key = object_key(CLUSTER, task.first_id)
    await world.store.put(key, [b"something else"])
    report = await world.rewrite(task)
    assert report.problem is not None and report.problem.kind == "damaged" and "14 bytes" in report.problem.message
    assert await world.store.get(key) == b"something else"
    later = await world.rewrite(replace(task, created_ms=18, first_id=task.first_id + 1, ids=task.ids - 1))
    assert later.problem is not None and later.problem.kind == "refused", "fewer ids than outputs"


async def test_a_commit_is_refused_when_something_else_replaced_an_input(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task, report = await world.written(world.task(sorted(world.committed())))
    await world.settle(eager=True)
    kept = world.committed()
    with pytest.raises(CompactionRefused, match="no longer committed"):
        await world.commit(task, told(report))
    assert world.committed() == kept
    await world.pass_time()
    assert await world.in_bucket() == kept, "what was written in vain is deleted when its ids expire"
    with pytest.raises(CompactionRefused):
        await world.commit(task, told(report))
    await world.check()


async def test_a_broker_gives_up_what_was_compacted_outside_meanwhile(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task, report = await world.written(world.task(sorted(world.committed())))
    term = world.data.term()
    assert term is not None
    outside = CompactObjects(*term, tuple(one.object_id for one in task.inputs), tuple(told(report)))

    def commit_first(what: str) -> None:
        if what == "compact":
            world.metadata.apply(c.Compact(outside))

    world.metadata.on_call = commit_first
    compactor = world.compactor()
    assert await compactor.run() == 0 and compactor.stats.given_up > 0
    assert {one.object_id for one in report.outputs} <= world.committed()
    await world.check()


async def test_outputs_that_lack_a_range_on_purpose_are_refused_by_rule_7(tmp_path: Path) -> None:
    world = await many_small(tmp_path, stream_bytes=1024)
    task, report = await world.written(world.task(sorted(world.committed())))
    before = world.committed()
    assert len(report.outputs) > 1
    for left_out in range(len(report.outputs)):
        outputs = told(report)
        del outputs[left_out]
        with pytest.raises(CompactionRefused, match="the outputs lack"):
            await world.commit(task, outputs)
    with pytest.raises(CompactionRefused, match="which the inputs do not hold"):
        await world.commit(replace(task, inputs=task.inputs[1:]), told(report))
    assert world.committed() == before
    await world.check()


async def test_an_object_that_holds_less_than_it_is_told_is_not_committed(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    (stream, *_) = world.acked
    records = world.acked[stream]
    task = world.task(sorted(world.committed()))
    first = await world.outside().prepare(1, TTL_MS)
    short = build_object(
        object_id=first,
        kind=ObjectKind.STREAM,
        cluster_id=CLUSTER,
        created_ms=1,
        parts=[(stream, records[:-1])],
        block_bytes=512,
    )
    await world.store.put(object_key(CLUSTER, first), short.body)
    end = records[-1].base_offset + records[-1].count
    lie = NewObject(first, int(ObjectKind.STREAM), short.size, pack_ranges([(stream, 0, end)]))
    with pytest.raises(CorruptData, match="not what is to be committed"):
        await world.commit(task, [lie])
    wrong_kind = NewObject(first, int(ObjectKind.STREAM_SET), short.size, pack_ranges(short.ranges))
    with pytest.raises(CorruptData, match="not what is to be committed"):
        await world.commit(task, [wrong_kind])
    for size in (short.size - 1, short.size + 1):
        with pytest.raises(CorruptData):
            await world.commit(task, [NewObject(first, int(ObjectKind.STREAM), size, pack_ranges(short.ranges))])
    await world.check()


async def test_nothing_is_committed_before_it_is_in_the_bucket(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task, report = await world.written(world.task(sorted(world.committed())))
    before = world.committed()
    await world.store.delete([object_key(CLUSTER, report.outputs[-1].object_id)])
    with pytest.raises(CompactionRefused, match="not in the bucket"):
        await world.commit(task, told(report))
    assert world.committed() == before


async def test_objects_of_another_cluster_are_not_committed(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task, report = await world.written(world.task(sorted(world.committed())))
    with pytest.raises(InvalidInput, match="written for cluster another"):
        await world.outside().commit("another", [one.object_id for one in task.inputs], told(report))
    foreign = await world.rewrite(replace(task, cluster_id="another"))
    assert foreign.problem is not None and foreign.problem.kind == "gone"


async def test_the_same_commit_again_is_success_also_after_its_outputs_are_gone(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task, report = await world.written(world.task(sorted(world.committed())))
    world.metadata.fail_after = 1
    await world.commit(task, told(report))
    await world.commit(task, told(report))
    kept = world.committed()
    await world.check()
    world.delete_topic("a")
    world.delete_topic("b")
    await world.commit(task, told(report))
    assert kept.isdisjoint(world.committed())


async def test_what_is_trimmed_or_deleted_after_the_plan_does_not_stop_a_commit(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task, report = await world.written(world.task(sorted(world.committed())))
    (stream, *_) = world.acked
    world.trim(stream, world.acked[stream][9].base_offset)
    world.delete_topic("b")
    await world.commit(task, told(report))
    await world.check()


async def test_a_broker_that_leads_nothing_says_so_and_a_cut_off_one_too(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    task, report = await world.written(world.task(sorted(world.committed())))
    with pytest.raises(Unavailable, match="leads no replica set"):
        await world.commit(task, told(report), term=lambda: None)
    world.metadata.fail_before = 1 << 30
    with pytest.raises(Unavailable, match="took the commit"):
        await world.commit(task, told(report))
    world.metadata.fail_before = 0
    world.become_master()
    with pytest.raises(Unavailable, match="took the commit"):
        await world.commit(task, told(report))  # the term of before
    world.data = world.compactor().data
    await world.commit(task, told(report))
    await world.check()


async def test_a_damaged_a_missing_and_an_empty_input_are_told_apart(tmp_path: Path) -> None:
    world = await many_small(tmp_path)
    inputs = sorted(world.committed())
    task = await world.with_ids(world.task(inputs))
    key = object_key(CLUSTER, inputs[3])
    body = bytearray(await world.store.get(key))
    body[100] ^= 1
    await world.store.put(key, [bytes(body)])
    report = await world.rewrite(task)
    assert report.problem is not None
    assert (report.problem.kind, report.problem.object_id, report.outputs) == ("damaged", inputs[3], ())
    await world.store.delete([key])
    for work in (count_outputs, rewrite):
        gone = await asyncio.to_thread(work, world.bucket, task)
        assert gone.problem is not None and (gone.problem.kind, gone.problem.object_id) == ("gone", inputs[3])
    empty = await world.rewrite(replace(task, inputs=task.inputs[:2], starts=()))
    assert empty.problem is not None and "nothing to write" in empty.problem.message
