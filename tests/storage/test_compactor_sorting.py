"""Sorting full objects loses nothing and doubles nothing, whatever fails and wherever it stops."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.compaction_world import CLUSTER, CompactionWorld
from tidelog.storage.objects.key import object_key

STREAMS = 12


async def full(uploads: int = 8, stream_bytes: int = 1 << 20) -> tuple[CompactionWorld, list[int]]:
    """A world of full objects with all streams in each."""
    world = CompactionWorld(target_bytes=16 << 10, stream_bytes=stream_bytes)
    streams = world.topic("a", STREAMS - 2) + world.topic("b", 2)
    for _ in range(uploads):
        await world.upload({stream: [world.rng.randbytes(400) for _ in range(3)] for stream in streams})
    return world, streams


def slices(world: CompactionWorld) -> list[int]:
    ends = world.image.streams
    return [len(world.image.find_objects(one, 0, ends[one].end_offset, 1000)) for one in world.acked if one in ends]


async def test_full_objects_are_sorted_and_read_the_same() -> None:
    world, _ = await full()
    assert set(slices(world)) == {8}
    compactor = world.compactor()
    assert [task.kind for task in await compactor.plan()] == ["sort"]
    assert await compactor.run() == 1
    assert set(slices(world)) == {1}
    assert compactor.stats.inputs == 8
    await world.check()
    await world.pass_time()
    assert await world.in_bucket() == world.committed()
    await world.check()


async def test_streams_with_much_data_leave_the_sets() -> None:
    world, _ = await full(stream_bytes=8 << 10)
    await world.settle()
    assert {len(world.image.objects[one].ranges) for one in world.committed()} == {1}
    assert len(world.committed()) == STREAMS
    await world.check()


async def test_a_writer_that_dies_at_any_await_leaves_all_or_nothing() -> None:
    steps, ended = 0, False
    outcomes: set[frozenset[int]] = set()
    while not ended:
        world, _ = await full()
        task = asyncio.create_task(world.compactor().run())
        for _ in range(steps):
            if task.done():
                break
            await asyncio.sleep(0)
        ended = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        outcomes.add(frozenset(slices(world)))
        await world.check()
        world.become_master()  # the next process
        await world.pass_time()
        assert await world.in_bucket() == world.committed()
        await world.settle()
        await world.check()
        await world.pass_time()
        assert await world.in_bucket() == world.committed()
        steps += 7
    assert outcomes == {frozenset({8}), frozenset({1})}


async def test_ids_that_expire_while_it_is_written_change_nothing() -> None:
    world, _ = await full()
    expire = True

    def meanwhile(call: str) -> None:
        nonlocal expire
        if call == "compact" and expire:
            expire = False
            world.clock.now_s += 24 * 3600
            world.metadata.on_call = lambda _: None
            for object_id in sorted(world.image.index.prepared):
                world.expire(object_id)

    world.metadata.on_call = meanwhile
    compactor = world.compactor()
    assert await compactor.run() == 0
    assert compactor.stats.given_up == 1
    assert set(slices(world)) == {8}
    await world.check()
    await world.settle()
    assert set(slices(world)) == {1}
    await world.check()


@pytest.mark.parametrize("call", ["prepare", "compact"])
async def test_a_topic_that_is_deleted_meanwhile_is_left_behind(call: str) -> None:
    world, _ = await full()

    def meanwhile(name: str) -> None:
        if name == call and "b" in world.image.topic_ids:
            world.delete_topic("b")

    world.metadata.on_call = meanwhile
    await world.settle()
    assert set(slices(world)) == {1}
    await world.check()


async def test_an_input_that_was_destroyed_meanwhile_gives_the_task_up() -> None:
    world, streams = await full()
    first = min(world.committed())

    def meanwhile(name: str) -> None:
        if name == "compact" and first in world.committed():
            for stream in streams:
                world.trim(stream, world.acked[stream][3].base_offset)

    world.metadata.on_call = meanwhile
    compactor = world.compactor()
    assert await compactor.run() == 0
    assert compactor.stats.given_up == 1
    assert compactor.excluded == {}
    await world.settle()
    await world.check()


async def test_a_damaged_input_is_excluded_and_the_others_are_sorted() -> None:
    world, streams = await full(9)
    bad = sorted(world.committed())[4]
    key = object_key(CLUSTER, bad)
    body = bytearray(await world.store.get(key))
    body[100] ^= 1
    await world.store.put(key, [bytes(body)])
    compactor = world.compactor()
    assert await compactor.run() == 0
    assert set(compactor.excluded) == {bad}
    assert await compactor.run() == 1
    assert set(slices(world)) == {3}, "before it, it, and behind it"
    body[100] ^= 1
    await world.store.put(key, [bytes(body)])
    await world.check()
    assert len(streams) == STREAMS


async def test_two_that_sort_the_same_objects_do_no_harm() -> None:
    world, _ = await full()
    one, two = world.compactor(), world.compactor()
    await asyncio.gather(one.run(), two.run())
    assert one.stats.tasks + two.stats.tasks == 1
    assert one.stats.given_up + two.stats.given_up == 1
    await world.check()
    await world.pass_time()
    assert await world.in_bucket() == world.committed()
