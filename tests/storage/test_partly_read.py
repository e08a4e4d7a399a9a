"""Rewriting objects of which only a part is read: what is gone costs no bytes, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.compaction_world import CLUSTER, CompactionWorld
from tidelog.storage.commits import CompactionRefused
from tidelog.storage.compaction.compactor import Compactor
from tidelog.storage.compaction.plan import CompactionTask
from tidelog.storage.objects.key import object_key
from tidelog.storage.records import StreamEntry

BODIES = 300
BODY_BYTES = 451
"""One to a block of the world's uploads, two to one of its compactor."""


class Keeping:
    """Leaves a hole of each record below an offset, and knows so."""

    def __init__(self, kept_from: int) -> None:
        self.kept_from = kept_from
        self.paced = 0

    def is_gone(self, start: int, end: int) -> bool:
        return end <= self.kept_from

    async def pace(self, size: int) -> None:
        self.paced += size

    async def __call__(self, records: list[StreamEntry]) -> list[StreamEntry]:
        return [StreamEntry(*one[:2], b"") if one.payload and self.is_gone(*span(one)) else one for one in records]


def span(one: StreamEntry) -> tuple[int, int]:
    return one.base_offset, one.base_offset + one.count


async def filled(uploads: int) -> tuple[CompactionWorld, int, Callable[[], CompactionTask]]:
    world = CompactionWorld()
    (stream,) = world.topic("a")
    for _ in range(uploads):
        await world.upload({stream: [world.rng.randbytes(BODY_BYTES) for _ in range(BODIES)]}, alone=[stream])

    def task() -> CompactionTask:
        found = [world.compactor().data.view.facts(each) for each in world.committed()]
        inputs = sorted((one for one in found if one is not None), key=lambda one: one.ranges[0].start_offset)
        return CompactionTask("merge", tuple(inputs), "")

    return world, stream, task


async def rewrite(compactor: Compactor, task: CompactionTask, stream: int, change: Keeping) -> tuple[int, int]:
    """By how much the objects shrink, and how much is read for it."""
    read, written, change.paced = compactor.stats.read_bytes, compactor.stats.written_bytes, 0
    removed = await compactor.rewrite(task, stream, change)
    read, written = compactor.stats.read_bytes - read, compactor.stats.written_bytes - written
    assert change.paced == read + written
    return removed, read


async def test_objects_and_blocks_that_are_gone_are_not_read() -> None:
    world, stream, task = await filled(4)
    log = world.acked[stream]
    kept_from = log[BODIES * 5 // 2].base_offset
    size = task().size
    removed, read = await rewrite(world.compactor(), task(), stream, Keeping(kept_from))
    assert read < size * 0.55, "one object and a half of four, and the ends of two"
    assert removed > size * 0.6
    found = await world.read(stream, world.reader())
    assert span(found[0]) == (log[0].base_offset, kept_from)
    assert found[0].is_hole
    assert found[1:] == [one for one in log if one.base_offset >= kept_from]


async def test_the_same_again_writes_nothing() -> None:
    world, stream, task = await filled(2)
    compactor, kept = world.compactor(), Keeping(world.acked[stream][BODIES].base_offset)
    await rewrite(compactor, task(), stream, kept)
    written = compactor.stats.written_bytes
    assert (await rewrite(compactor, task(), stream, kept))[0] == 0
    assert compactor.stats.written_bytes == written


async def test_objects_of_which_nothing_is_left_become_one_hole_unread() -> None:
    world, stream, task = await filled(3)
    end = world.acked[stream][-1].base_offset + world.acked[stream][-1].count
    compactor, gone = world.compactor(), Keeping(end)
    assert (await rewrite(compactor, task(), stream, gone))[1] == 0
    assert [span(one) for one in await world.read(stream, world.reader())] == [(0, end)]
    _, read = await rewrite(compactor, task(), stream, gone)
    assert read < 1_000, "whether a small object holds anything else is looked up"
    assert compactor.stats.outputs == 1


@pytest.mark.parametrize("body", [BODIES // 2, BODIES * 3 // 2], ids=["in what is gone", "in what is read"])
async def test_what_is_trimmed_is_in_no_hole(body: int) -> None:
    world, stream, task = await filled(2)
    start = world.acked[stream][body].base_offset + 1 - world.acked[stream][body].count % 2
    world.trim(stream, start)
    kept = Keeping(world.acked[stream][BODIES].base_offset)
    await rewrite(world.compactor(), task(), stream, kept)
    found = await world.read(stream, world.reader())
    assert found[0].base_offset <= start < span(found[0])[1]
    assert [one for one in found if not one.is_hole] == [
        one for one in world.acked[stream][BODIES:] if span(one)[1] > start
    ]


async def test_all_of_it_trimmed_is_refused() -> None:
    world, stream, task = await filled(2)
    inputs = task()
    world.trim(stream, world.acked[stream][-1].base_offset + world.acked[stream][-1].count)
    with pytest.raises(CompactionRefused):
        await rewrite(world.compactor(), inputs, stream, Keeping(10))


async def test_objects_with_a_gap_between_them_are_refused() -> None:
    world, stream, task = await filled(3)
    inputs = task().inputs
    apart = CompactionTask("merge", (inputs[0], inputs[2]), "")
    before = await world.store.get(object_key(CLUSTER, inputs[0].object_id))
    for kept_from in (0, inputs[0].ranges[0].end_offset):
        with pytest.raises(CompactionRefused):
            await rewrite(world.compactor(), apart, stream, Keeping(kept_from))
    assert await world.store.get(object_key(CLUSTER, inputs[0].object_id)) == before
    await world.check()
