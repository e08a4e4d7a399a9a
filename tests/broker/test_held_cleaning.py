"""Log compaction beside snapshots: what is held stays as it is, tombstones behind it too, until nobody holds it."""

from __future__ import annotations

import msgspec

from tests.broker.test_log_cleaner import KEYS, CleanerWorld, cleaner_world
from tests.support.kafka_world import until
from tidelog.batch.batch import Record, build_batch
from tidelog.controller.model.records import ObjectState
from tidelog.controller.model.snapshots import CreateBranch, CreateSnapshot, DeleteSnapshot, TopicCut
from tidelog.storage.commits import CompactObjects

LAST_KEY = b"key-gone"


async def take(here: CleanerWorld, name: str = "s") -> None:
    ends = await here.log.cut()
    await here.world.chill()
    here.world.controller.apply(CreateSnapshot(name, (TopicCut(here.log.topic_id, (ends,)),)))


async def write_more(here: CleanerWorld, batches: int, seed: int) -> None:
    await here.write(batches, seed=seed)
    await until(lambda: here.log.high_watermark == here.log.log_end_offset, "confirmation")
    await here.world.chill()


def held(here: CleanerWorld) -> set[int]:
    image = here.world.controller.image
    return {one.id for one in image.objects.values() if image.is_held(one.id)}


def is_due(here: CleanerWorld) -> bool:
    """As the cleaner sees it."""
    (row,) = here.cleaner.report()["partitions"]
    return bool(row["dirty_ratio"])


def write(here: CleanerWorld, key: bytes, value: bytes | None) -> None:
    """One record; without a value the key is gone."""
    result = here.log.append(memoryview(bytearray(build_batch([Record(0, here.clock.time_ms(), key, value, ())]))))
    if value is not None:
        here.values[key] = (result.base_offset, value)
    else:
        here.values[key] = (result.base_offset, b"")


async def delete_behind_snapshot(here: CleanerWorld) -> None:
    """A snapshot holds a value of `LAST_KEY`, whose tombstone is behind it."""
    write(here, LAST_KEY, b"old")
    await here.write(40)
    await take(here)
    write(here, LAST_KEY, None)
    await write_more(here, 80, 2)


async def test_what_a_snapshot_holds_is_left_out_and_taken_up_when_nobody_holds_it_any_more() -> None:
    async with cleaner_world() as here:
        await here.write(80)
        assert await here.check() == 320
        await take(here)
        before = held(here)
        assert len(before) > 2 and not any(here.compactor.data.view.facts(each) is None for each in before)
        assert before.isdisjoint({one.object_id for one in await here.compactor.data.view.objects()})
        await write_more(here, 80, 2)
        assert await here.round(), here.cleaner.problems()
        assert held(here) == before, "they are as they were"
        left = await here.check()
        assert 320 < left < 320 + 2 * KEYS + 60, "what is held stays, and what is not is compacted"
        assert here.log.cleaning.left > 300 and not is_due(here), "nothing is to be done while it is held"

        here.world.controller.apply(DeleteSnapshot("s"))
        assert is_due(here)
        assert await here.round(), here.cleaner.problems()
        assert here.log.cleaning.left == 0 and await here.check() < 2 * KEYS + 60
        rows = here.world.controller.image.objects
        gone = [each for each in before if rows[each].state == ObjectState.DESTROYED]
        assert len(gone) > len(before) // 2, "others hold what is left of the meta stream"


async def test_a_snapshot_in_the_middle_of_a_round_holds_what_is_left_then() -> None:
    async with cleaner_world() as here:
        await here.write(100)

        async def snapshot(_: CompactObjects) -> None:
            await take(here)

        here.objects.act = snapshot
        assert await here.round(), here.cleaner.problems()
        assert here.objects.has_acted, "it was in the middle"
        before = held(here)
        assert before and await here.check() > 300
        here.world.controller.apply(DeleteSnapshot("s"))
        assert await here.round(), here.cleaner.problems()
        assert await here.check() < 2 * KEYS + 40


async def test_a_tombstone_behind_what_is_held_stays_and_its_key_does_not_come_back() -> None:
    async with cleaner_world(delete_retention_ms="0") as here:
        await delete_behind_snapshot(here)
        for seed in (3, 4, 5):  # a round sets a horizon, and a later one acts upon it, if they may
            assert await here.round(), here.cleaner.problems()
            await write_more(here, 20, seed)
        await here.check()
        here.world.controller.apply(DeleteSnapshot("s"))
        for seed in (6, 7, 8):
            assert await here.round(), here.cleaner.problems()
            found = {key: value for _, key, value in await here.read(0)}
            assert found.get(LAST_KEY, b"") == b"", "the old value is back"
            await write_more(here, 20, seed)


async def test_a_round_of_the_dirty_part_does_not_make_up_for_what_was_left_out_though_nobody_holds_it_now() -> None:
    async with cleaner_world(delete_retention_ms="0") as here:
        await delete_behind_snapshot(here)
        assert await here.round(), here.cleaner.problems()
        left = here.log.cleaning.left
        for seed in (3, 4, 5):  # a round sets a horizon, and a later one acts upon it, if they may
            await write_more(here, 40, seed)
            await here.plan()
            plan = here.log.cleaning.plan(here.clock.time_ms(), here.log.config, is_held=True)
            assert plan.first_dirty > left, "planned while it was held"
            if seed == 3:
                here.world.controller.apply(DeleteSnapshot("s"))
            assert await here.cleaner.clean(here.log, plan), here.cleaner.problems()
            assert here.log.cleaning.left == left, "older values may be left there still"
            found = {key: value for _, key, value in await here.read(0)}
            assert found.get(LAST_KEY, b"") == b"", "the old value is back"
        for seed in (6, 7):
            await here.check()
            assert await here.round(), here.cleaner.problems()
            assert here.log.cleaning.left == 0, "that round was over the whole log"
            await write_more(here, 20, seed)
        assert LAST_KEY not in {key for _, key, _ in await here.read(0)}, "its time is over"


async def test_a_branch_of_a_compacted_topic_is_compacted_from_its_own_beginning_on() -> None:
    async with cleaner_world() as here:
        await here.write(60)
        await take(here)
        controller, world = here.world.controller, here.world
        controller.apply(CreateBranch("s", "table", b"\x09" * 16, "side", {}))
        controller.apply(DeleteSnapshot("s"))
        topic = controller.image.topic("side")
        assert topic is not None
        before = held(here)
        original, values = here.log, dict(here.values)
        here.log = log = await world.open(topic, 0)
        await write_more(here, 80, 2)
        assert await here.round(), here.cleaner.problems()
        left = await here.check()
        assert held(here) == before and 240 < left < 240 + 2 * KEYS + 60
        here.log, here.values = original, values
        assert await here.check() == 240, "the topic has what it had"
        assert msgspec.msgpack.encode(log.cleaning.left) and log.cleaning.left == 240
