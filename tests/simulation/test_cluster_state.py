"""The checks from inside: silent on what the product does, and each finds what is planted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tests.support.compaction_world import CLUSTER, CompactionWorld
from tests.support.orphan_world import metadata
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import ObjectState
from tidelog.simulation.checkers import Finding
from tidelog.simulation.checkers.cluster_state import check_bucket, check_image, check_progress, snapshot
from tidelog.storage.commits import StreamRange, pack_ranges
from tidelog.storage.objects.key import object_key


async def used() -> tuple[CompactionWorld, int]:
    """A world with uploads, and one of its data streams."""
    world = CompactionWorld()
    streams = world.topic("t", 2)
    await world.fill(streams, 6)
    return world, streams[0]


def looked_at(world: CompactionWorld) -> list[Finding]:
    return check_image(world.image)


async def test_silent_through_uploads_trims_compaction_and_deletion() -> None:
    world, stream = await used()
    before = snapshot(world.image)
    for step in range(4):
        if step == 1:
            world.trim(stream, world.image.streams[stream].end_offset // 2)
        elif step == 2:
            await world.settle(eager=True)
            await world.pass_time()
        elif step == 3:
            world.delete_topic("t")
        assert check_image(world.image) == []
        assert check_progress(before, world.image) == []
        orphans = metadata(world)
        assert await check_bucket(world.image, world.store, orphans=orphans, now_ms=world.clock.time_ms()) == []
        before = snapshot(world.image)


def change(image: Image, stream: int, ranges: Callable[[list[StreamRange]], list[StreamRange]]) -> None:
    """Make the last object that holds a stream say something else of it."""
    record = max(
        (
            one
            for one in image.objects.values()
            if one.state == ObjectState.COMMITTED and any(each.stream_id == stream for each in one.ranges)
        ),
        key=lambda one: one.id,
    )
    kept = [each for each in record.ranges if each.stream_id != stream]
    changed = ranges([each for each in record.ranges if each.stream_id == stream])
    both: list[StreamRange] = sorted([*kept, *changed], key=lambda each: each.stream_id)
    packed = msgspec.Raw(pack_ranges(tuple(both)))
    image.objects[record.id] = msgspec.structs.replace(record, packed=packed)


@pytest.mark.parametrize(
    "ranges",
    [
        lambda held: [],
        lambda held: [StreamRange(one.stream_id, one.start_offset - 1, one.end_offset) for one in held],
        lambda held: [StreamRange(one.stream_id, one.start_offset + 1, one.end_offset) for one in held],
        lambda held: [StreamRange(one.stream_id, one.start_offset, one.end_offset + 1) for one in held],
    ],
    ids=["missing", "overlap", "gap", "too far"],
)
async def test_ranges_that_are_not_contiguous_are_found(
    ranges: Callable[[list[StreamRange]], list[StreamRange]],
) -> None:
    world, stream = await used()
    change(world.image, stream, ranges)
    (finding,) = looked_at(world)
    assert finding.rule == "contiguous-ranges" and f"stream {stream} " in finding.message


@pytest.mark.parametrize("name", ["epoch", "start_offset", "end_offset"])
async def test_a_stream_that_goes_back_is_found(name: str) -> None:
    world, stream = await used()
    world.trim(stream, 2)
    before, record = snapshot(world.image), world.image.streams[stream]
    world.image.streams[stream] = msgspec.structs.replace(record, **{name: getattr(record, name) - 1})
    (finding,) = check_progress(before, world.image)
    assert finding.rule == "only-grows" and f"stream {stream} " in finding.message


@pytest.mark.parametrize("name", ["master_epoch", "committed_wal_offset"])
async def test_a_replica_set_that_goes_back_is_found(name: str) -> None:
    world, _ = await used()
    before, record = snapshot(world.image), world.image.replica_sets[0]
    world.image.replica_sets[0] = msgspec.structs.replace(record, **{name: getattr(record, name) - 1})
    (finding,) = check_progress(before, world.image)
    assert finding.rule == "only-grows" and "replica set 0" in finding.message


async def test_a_compaction_that_drops_something_is_found() -> None:
    world, stream = await used()
    before = snapshot(world.image)
    await world.settle(eager=True)
    assert check_progress(before, world.image) == []
    change(world.image, stream, lambda held: [])
    (finding,) = check_progress(before, world.image)
    assert finding.rule == "compaction-conserves" and f"stream {stream}:" in finding.message


async def test_missing_and_damaged_objects_are_found() -> None:
    world, _ = await used()
    first, second = sorted(world.committed())[:2]
    body = bytearray(await world.store.get(object_key(CLUSTER, second)))
    body[len(body) // 3] ^= 1
    await world.store.put(object_key(CLUSTER, second), [bytes(body)])
    await world.store.delete([object_key(CLUSTER, first)])
    found = await check_bucket(world.image, world.store)
    assert [(one.rule, one.message.split(",")[0]) for one in found] == [
        ("sound-objects", f"object {first}"),
        ("sound-objects", f"object {second}"),
    ]


async def test_what_nobody_names_is_found() -> None:
    world, _ = await used()
    given_up = max(world.image.objects) + 1
    await world.store.put(object_key(CLUSTER, given_up), [b"late"])
    await world.store.put(object_key(CLUSTER, 10_000), [b"from the future"])
    search = metadata(world)
    for _ in range(2):
        await search.fence()
    del world.image.objects[given_up]
    found = await check_bucket(world.image, world.store, orphans=search, now_ms=world.clock.time_ms() + 1)
    assert [one.rule for one in found] == ["no-orphans", "no-orphans"]
    assert object_key(CLUSTER, given_up) in found[0].message


async def test_an_object_that_is_deleted_and_forgotten_while_it_is_looked_for_is_no_orphan() -> None:
    world, _ = await used()
    due = max(world.image.objects) + 1
    key = object_key(CLUSTER, due)
    await world.store.put(key, [b"due"])
    search = metadata(world)
    await search.fence()
    del world.image.objects[due]

    async def fence() -> int:
        await world.store.delete([key])
        return await search.fence()

    orphans = search._replace(fence=fence)
    assert await check_bucket(world.image, world.store, orphans=orphans, now_ms=world.clock.time_ms() + 1) == []
