"""Compaction loses nothing, doubles nothing and serves nothing wrong, whatever fails and wherever it stops."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.compaction_world import DELAY_MS, CompactionWorld, OldImage
from tests.support.storage_world import FastClock, FaultyStore, until
from tidelog.runtime.errors import Unavailable
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.store import ObjectNotFound, View
from tidelog.storage.commits import ObjectKind
from tidelog.storage.compaction.throttle import BusyMeter, Throttle
from tidelog.storage.objects.key import object_key


async def test_many_small_uploads_become_few_objects_and_read_the_same() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 3) + world.topic("b", 2)
    await world.fill(streams, 60)
    before = len(world.committed())
    compactor = await world.settle()
    assert before == 60
    assert len(world.committed()) <= 12
    assert compactor.stats.inputs - compactor.stats.outputs == before - len(world.committed())
    await world.check()
    await world.pass_time()
    assert await world.in_bucket() == world.committed()
    await world.check()


async def test_a_stream_with_much_data_gets_objects_of_its_own() -> None:
    world = CompactionWorld(target_bytes=64 << 10)
    large, small = world.topic("a", 2)
    for _ in range(6):
        await world.upload({large: [bytes(900)], small: [b"x"]})
    await world.settle()
    kinds = {
        (one.kind, tuple(piece.stream_id for piece in one.ranges))
        for one in world.image.objects.values()
        if one.id in world.committed()
    }
    assert kinds == {(ObjectKind.STREAM, (large,)), (ObjectKind.STREAM_SET, (small,))}
    await world.check()


async def test_trimmed_records_and_deleted_streams_are_left_behind() -> None:
    world = CompactionWorld(target_bytes=256 << 10)
    (kept,), (gone,) = world.topic("kept"), world.topic("gone")
    for _ in range(6):
        await world.upload({kept: [bytes(300)] * 4, gone: [bytes(300)] * 4})
    before = sum(world.image.objects[one].size for one in world.committed())
    world.trim(kept, world.acked[kept][13].base_offset)
    world.delete_topic("gone")
    await world.settle()
    (left,) = [world.image.objects[one] for one in world.committed()]
    assert [piece.stream_id for piece in left.ranges] == [kept]
    assert left.ranges[0].start_offset == world.acked[kept][13].base_offset
    assert left.size < before / 3
    await world.check()


@pytest.mark.parametrize("what", ["trim", "delete"])
async def test_topics_that_shrink_while_a_task_runs_do_no_harm(what: str) -> None:
    world = CompactionWorld()
    (a,), (b,) = world.topic("a"), world.topic("b")
    await world.fill([a, b], 8)

    def meanwhile(call: str) -> None:
        if call == "compact" and "b" in world.image.topic_ids:
            if what == "trim":
                world.trim(b, world.acked[b][-1].base_offset)
            else:
                world.delete_topic("b")

    world.metadata.on_call = meanwhile
    await world.settle()
    await world.check()
    await world.pass_time()
    assert await world.in_bucket() == world.committed()


async def test_a_crash_at_any_await_leaves_all_or_nothing() -> None:
    steps, ended = 0, False
    outcomes: set[int] = set()
    while not ended:
        world = CompactionWorld()
        streams = world.topic("a", 2)
        await world.fill(streams, 5)
        before = world.committed()
        task = asyncio.create_task(world.compactor().run())
        for _ in range(steps):
            if task.done():
                break
            await asyncio.sleep(0)
        ended = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        outcomes.add(len(world.committed()))
        await world.check()
        world.become_master()  # the next process
        await world.pass_time()
        assert await world.in_bucket() == world.committed()
        await world.settle()
        await world.check()
        await world.pass_time()
        assert await world.in_bucket() == world.committed() != before
        steps += 1
    assert steps > 20
    assert len(outcomes) == 2, "either all inputs or all outputs"


async def test_an_unknown_outcome_is_asked_again_and_not_doubled() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 2)
    await world.fill(streams, 6)
    world.metadata.fail_before, world.metadata.fail_after = 2, 2
    compactor = await world.settle()
    assert compactor.stats.given_up == 0
    await world.check()


async def test_a_bucket_that_fails_puts_the_work_off() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 2)
    await world.fill(streams, 6)
    before = world.committed()
    world.faulty.fail_puts = 1
    compactor = world.compactor()
    assert await compactor.run() == 0
    assert compactor.stats.given_up == 1
    assert world.committed() == before
    world.faulty.fail_gets = 1
    assert await compactor.run() == 0
    assert await compactor.run() == 1
    assert compactor.excluded == {}
    await world.check()


async def test_a_corrupt_input_is_named_and_kept_and_the_rest_goes_on() -> None:
    world = CompactionWorld(min_objects=2)
    streams = world.topic("a", 2)
    await world.fill(streams, 9)
    bad = sorted(world.committed())[4]
    key = object_key("cluster-of-the-compaction", bad)
    body = bytearray(await world.store.get(key))
    body[60] ^= 1
    await world.store.put(key, [bytes(body)])
    told: list[dict[str, object]] = []
    compactor = world.compactor()
    assert await compactor.run(on_event=told.append) == 0
    assert world.excluded.keys() == compactor.excluded.keys() == {bad}
    assert "crc32c" in compactor.excluded[bad]
    assert key in compactor.excluded[bad]
    assert told[-1]["event"] == "skipped"
    while await compactor.run():
        pass
    assert bad in world.committed()
    assert len(world.committed()) <= 1 + 2 * (1 + 2)
    body[60] ^= 1
    await world.store.put(key, [bytes(body)])
    await world.check()
    assert bad not in {one.object_id for task in await compactor.plan(eager=True) for one in task.inputs}
    compactor.readmit(bad)
    assert compactor.problems() == []
    assert bad in {one.object_id for task in await compactor.plan(eager=True) for one in task.inputs}


@pytest.mark.parametrize("damage", ["missing", "cut", "index"])
async def test_an_input_that_is_missing_cut_or_has_a_bad_index_is_excluded(damage: str) -> None:
    world = CompactionWorld()
    streams = world.topic("a", 2)
    await world.fill(streams, 5)
    bad = sorted(world.committed())[2]
    key = object_key("cluster-of-the-compaction", bad)
    body = bytearray(await world.store.get(key))
    if damage == "missing":
        await world.store.delete([key])
    elif damage == "cut":
        await world.store.put(key, [bytes(body[:-10])])
    else:
        body[-100] ^= 1
        await world.store.put(key, [bytes(body)])
    compactor = world.compactor()
    await compactor.run()
    assert compactor.excluded.keys() == {bad}
    assert bad in world.committed()


async def test_an_excluded_object_is_forgotten_when_its_topic_is_deleted() -> None:
    world = CompactionWorld()
    await world.fill(world.topic("a", 2), 5)
    bad = sorted(world.committed())[2]
    await world.store.delete([object_key("cluster-of-the-compaction", bad)])
    compactor = world.compactor()
    await compactor.run()
    assert [f"object {bad}" in problem for problem in compactor.problems()] == [True]
    world.delete_topic("a")
    assert bad not in world.committed()
    assert compactor.problems() == [] and compactor.status()["excluded"] == []
    assert compactor.figures()["excluded"] == 0


async def test_a_bad_transfer_is_asked_for_again() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 2)
    await world.fill(streams, 5)
    world.faulty.flip_next_get = 60
    compactor = world.compactor()
    assert await compactor.run() == 1
    assert compactor.excluded == {}
    await world.check()


async def test_a_deposed_master_stops() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 2)
    await world.fill(streams, 5)
    before = world.committed()
    compactor = world.compactor()
    world.become_master()
    assert await compactor.run() == 0
    assert compactor.stopped is not None
    assert world.committed() == before


async def test_two_that_compact_the_same_objects_do_no_harm() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 3)
    await world.fill(streams, 30)
    one, two = world.compactor(), world.compactor()
    await asyncio.gather(one.run(), two.run(), one.run(), two.run())
    assert one.stats.given_up + two.stats.given_up > 0
    assert not one.excluded
    assert not two.excluded
    await world.settle()
    await world.check()
    await world.pass_time()
    assert await world.in_bucket() == world.committed()


async def test_readers_race_with_compaction_and_deletion() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 3)
    await world.fill(streams, 40)
    over = asyncio.Event()
    rounds = 0

    async def consume(stream: int) -> None:
        nonlocal rounds
        while not over.is_set():
            reader = world.reader()
            committed = world.image.streams[stream].end_offset
            found = await world.read(stream, reader)
            assert found[-1].base_offset + found[-1].count >= committed
            assert found == world.acked[stream][: len(found)]
            await reader.close()
            rounds += 1

    readers = [asyncio.create_task(consume(stream)) for stream in streams]

    def are_round(wanted: int) -> bool:
        return rounds >= wanted or any(one.done() for one in readers)

    for number in range(12):
        await world.compactor().run()
        world.clock.now_s += DELAY_MS / 1000 + 1
        await world.lifecycle()
        await world.fill(streams, 3)
        wanted = rounds + len(streams)
        await until(partial(are_round, wanted))
        assert number < 12
    over.set()
    await asyncio.gather(*readers)
    assert len(await world.in_bucket()) < 40


async def test_a_reader_with_older_metadata_reads_the_inputs_until_they_are_gone_and_then_looks_again() -> None:
    world = CompactionWorld()
    (stream,) = world.topic("a")
    await world.fill([stream], 20)
    old = OldImage(world.metadata)
    await world.settle()
    reader = world.reader(old)
    assert await world.read(stream, reader) == world.acked[stream]  # rule 6: the delay is not over
    await reader.close()
    world.clock.now_s += DELAY_MS / 1000 + 1
    await world.lifecycle()
    stale = world.reader(old)
    old.cut_off = True
    with pytest.raises(Unavailable, match="no controller answers"):
        await world.read(stream, stale)  # old metadata proves nothing about the bucket
    assert not len(stale.damage)
    old.cut_off = False
    assert await world.read(stream, stale) == world.acked[stream]
    await stale.close()


async def test_a_reader_that_no_controller_answers_for_the_grace_asks_the_bucket_for_nothing() -> None:
    world = CompactionWorld()
    (stream,) = world.topic("a")
    await world.fill([stream], 3)
    old = OldImage(world.metadata)
    reader = world.reader(old)
    old.grace_is_over = True
    with pytest.raises(Unavailable, match="grace"):
        await world.read(stream, reader)
    assert reader.stats()["block_gets"] == 0
    old.grace_is_over = False
    assert await world.read(stream, reader) == world.acked[stream]
    await reader.close()


async def test_an_input_that_is_missing_by_old_metadata_is_not_excluded() -> None:
    world = CompactionWorld()
    await world.fill(world.topic("a", 2), 5)
    bad = sorted(world.committed())[2]
    await world.store.delete([object_key("cluster-of-the-compaction", bad)])
    world.metadata.cut_off = True
    compactor = world.compactor()
    assert await compactor.run() == 0
    assert compactor.excluded == {}, "no controller could say whether the input is still committed"


class Forgetful(FaultyStore):
    """A bucket that says of each object three times that it does not have it."""

    def __init__(self, clock: FastClock) -> None:
        super().__init__(clock)
        self.denials: Counter[str] = Counter()

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        if self.denials[key] < 3:
            self.denials[key] += 1
            raise ObjectNotFound(f"object {key} does not exist")
        return await super().get_ranges(key, ranges)


async def test_an_input_that_the_bucket_denies_for_a_moment_is_not_excluded() -> None:
    """An exclusion lasts until somebody verifies the object, or the process ends; a read would only have been late."""
    world = CompactionWorld(Forgetful(FastClock()))
    await world.fill(world.topic("a", 2), 5)
    before = len(world.committed())
    compactor = world.compactor()
    for _ in range(20):
        await compactor.run()
        assert (compactor.excluded, compactor.problems()) == ({}, [])
    assert compactor.stats.given_up > 0
    assert len(world.committed()) < before
    await world.check()


async def test_over_a_real_store_with_real_threads(tmp_path: Path) -> None:
    world = CompactionWorld(LocalObjectStore(tmp_path))
    streams = world.topic("a", 3)
    await world.fill(streams, 30)
    compactor = world.compactor(offload=asyncio.to_thread)
    while await compactor.run():
        pass
    assert len(world.committed()) < 10
    await world.check()
    await world.pass_time()
    assert await world.in_bucket() == world.committed()
    await world.store.close()


async def test_it_runs_by_itself_keeps_to_its_throttle_and_yields_to_producers() -> None:
    async def scenario(busy: bool) -> float:
        world = CompactionWorld(throttle_bytes_per_s=2048, interval_ms=1000)
        world.busy = busy
        streams = world.topic("a", 3)
        await world.fill(streams, 12)
        compactor = world.compactor(loops=True)
        compactor.start()
        began = world.clock.now_s
        await until(lambda: compactor.stats.tasks > 0)
        taken = world.clock.now_s - began
        moved = compactor.stats.read_bytes + compactor.stats.written_bytes
        await compactor.close()
        assert taken >= (moved / 2048 - 2) * (10 if busy else 1)
        assert compactor.status()["tasks"] == 1
        return taken

    assert await scenario(True) > 5 * await scenario(False)


def test_throttle_and_load_are_plain_arithmetic() -> None:
    throttle = Throttle(100)
    assert throttle.delay_s(10.0, 100, False) == 0.0  # the second that was not used
    assert throttle.delay_s(10.0, 100, False) == pytest.approx(1.0)
    assert throttle.delay_s(11.0, 10, True) == pytest.approx(1.0)
    meter = BusyMeter(busy_bytes_per_s=1000, upload_bytes=5000)
    assert not meter.observe(0.0, 0, 0)
    assert not meter.observe(0.5, 10_000, 0)
    assert meter.observe(2.0, 10_000, 0)
    assert not meter.observe(4.0, 10_500, 4999)
    assert meter.observe(4.1, 10_500, 5000)


async def test_a_controller_that_never_answers_is_given_up_when_the_ids_have_expired() -> None:
    world = CompactionWorld()
    streams = world.topic("a", 2)
    await world.fill(streams, 5)
    world.metadata.fail_before = 1 << 30
    told: list[dict[str, object]] = []
    compactor = world.compactor()
    assert await compactor.run(on_event=told.append) == 0
    assert str(Unavailable("on purpose, before it happened")) in str(told[-1]["error"])
    world.metadata.fail_before = 0
    await world.pass_time()
    await world.settle()
    await world.check()
