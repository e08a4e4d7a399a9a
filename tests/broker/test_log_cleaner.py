"""What others do to a log in the middle of a round: merge its objects, delete its records, or expire them.

All parts are real; the bucket, the WAL and the network to the controller are in memory. What is to happen in the middle
happens when a round has written an output, and before the controller gets its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from crc32c import crc32c

from tests.support.kafka_world import CLUSTER_ID, NODE_ID, DataController, KafkaWorld
from tests.support.storage_world import inline
from tidelog.batch.batch import HEADER_BYTES, InvalidRecord, Record, build_batch, iter_batches, iter_records
from tidelog.batch.codec import encode_record
from tidelog.broker.objects.compaction_view import ImageView
from tidelog.broker.partitions.log_cleaner import MAX_REFUSALS, LogCleaner
from tidelog.broker.settings import LogSettings
from tidelog.runtime.clock import SystemClock
from tidelog.storage.commits import CompactObjects, ObjectKind
from tidelog.storage.compaction.compactor import CommittingTerm, CompactedData, Compactor
from tidelog.storage.compaction.plan import CompactionTask
from tidelog.storage.settings import CompactionSettings, UploadSettings
from tidelog.stream.cleaning.plan import Round
from tidelog.stream.errors import OffsetOutOfRange
from tidelog.stream.partition_log import PartitionLog

KEYS = 12
UPLOAD = UploadSettings(age_ms=3_600_000, block_bytes=512)
READ_BYTES = 4_000
Act = Callable[[CompactObjects], Awaitable[object]]


class ActedOn:
    """The controller; before it gets the commit of a cleaned object, something else happens."""

    def __init__(self, controller: DataController) -> None:
        self._controller = controller
        self.act: Act | None = None

    @property
    def has_acted(self) -> bool:
        return self.act is None

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        return await self._controller.prepare_objects(count, ttl_ms)

    async def compact_objects(self, compaction: CompactObjects) -> None:
        objects = self._controller.image.objects
        if all(objects[each].kind == ObjectKind.STREAM for each in compaction.inputs):  # else it is a gather
            act, self.act = self.act, None
            if act is not None:
                await act(compaction)
        await self._controller.compact_objects(compaction)

    async def catch_up(self) -> None:
        await self._controller.catch_up()


class CleanerWorld:
    """A broker with one compacted topic, whose rounds begin when they are asked to."""

    def __init__(self, world: KafkaWorld, log: PartitionLog) -> None:
        self.world = world
        self.log = log
        self.clock = SystemClock()
        self.objects = ActedOn(world.controller)
        self.compactor = self._compactor(self.objects)
        self.cleaner = LogCleaner(
            logs=world.partitions.all,
            is_internal=lambda name: False,
            objects=world.controller,
            compactor=self.compactor,
            clock=self.clock,
            rng=random.Random(1),
            settings=LogSettings(),
            offload=inline,
        )
        self.values: dict[bytes, tuple[int, bytes]] = {}
        """Each key's last offset and value."""

    def _compactor(self, objects: ActedOn | DataController) -> Compactor:
        controller = self.world.controller
        epoch = controller.image.replica_sets[NODE_ID].master_epoch
        view = ImageView(lambda: controller.image, lambda: (NODE_ID,))
        data = CompactedData(CLUSTER_ID, lambda: CommittingTerm(NODE_ID, epoch), self.world.store, objects, view)
        settings = CompactionSettings(enabled=False, min_objects=2, target_bytes=4 << 10)
        return Compactor(data, settings, UPLOAD, self.clock, random.Random(2), offload=inline)

    async def write(self, batches: int, seed: int = 1) -> None:
        """Write batches, and put them into several objects of the bucket."""
        rng = random.Random(seed)
        for number in range(batches):
            now_ms = self.clock.time_ms()
            keys = [b"key-%d" % rng.randrange(KEYS) for _ in range(4)]
            drawn = [b"%d" % rng.randrange(10**9) for _ in keys]
            records = [Record(0, now_ms, key, value, ()) for key, value in zip(keys, drawn, strict=True)]
            result = self.log.append(memoryview(bytearray(build_batch(records))))
            for at in range(len(records)):
                self.values[keys[at]] = (result.base_offset + at, drawn[at])
            if number % 20 == 19:
                await self.world.chill()
        await self.log.write_checkpoint()
        await self.world.chill()

    async def plan(self) -> Round:
        """A round that is due."""
        for _ in range(2):  # the newest checkpoint is noted, and then in the bucket
            self.log.cleaning.plan(self.clock.time_ms(), self.log.config)
            await self.world.chill()
        plan = self.log.cleaning.plan(self.clock.time_ms(), self.log.config)
        assert plan.is_due
        return plan

    async def round(self) -> bool:
        """One round, which must be due."""
        return await self.cleaner.clean(self.log, await self.plan())

    async def merge(self, compaction: CompactObjects) -> None:
        """Someone who does not know of the round, as after a takeover, merges the same objects."""
        other = self._compactor(self.world.controller)
        facts = [other.data.view.facts(each) for each in compaction.inputs]
        await other.carry_out(CompactionTask("merge", tuple(one for one in facts if one is not None), "by another"))

    async def read(self, offset: int) -> list[tuple[int, bytes, bytes]]:
        """What a consumer gets from an offset on: offset, key and value."""
        found: list[tuple[int, bytes, bytes]] = []
        at = offset
        while at < self.log.high_watermark:
            result = await self.log.read(at, READ_BYTES, committed=False)
            before = at
            for header, batch in iter_batches(b"".join(result.records)):
                at = header.next_offset
                found += [
                    (one.offset, bytes(one.key or b""), bytes(one.value or b""))
                    for one in iter_records(batch, header=header)
                    if one.offset >= offset
                ]
            assert at > before, f"a reader is stuck at offset {at}"
        return found

    async def check(self) -> int:
        """Check what readers from any offset get; return the number of records from the log's start on."""
        start = self.log.log_start_offset
        everything = await self.read(start)
        for offset in (start, start + 1, (start + self.log.high_watermark) // 2, self.log.high_watermark - 1):
            found = await self.read(offset)
            assert [each for each in everything if each[0] >= offset] == found
        offsets = [offset for offset, _, _ in everything]
        assert offsets == sorted(set(offsets))
        last = {key: (offset, value) for offset, key, value in everything}
        assert last == {key: at for key, at in self.values.items() if at[0] >= start}
        return len(everything)


def misnumbered(now_ms: int) -> memoryview:
    """Two records that both say that they are the first one of their batch."""
    record = Record(0, now_ms, b"key-0", b"v", ())
    batch = bytearray(build_batch([record, record]))
    batch[HEADER_BYTES:] = encode_record(record, 0, 0) * 2
    struct.pack_into(">I", batch, 17, crc32c(batch[21:]))
    return memoryview(batch)


@asynccontextmanager
async def cleaner_world(**configs: str) -> AsyncIterator[CleanerWorld]:
    async with KafkaWorld(upload=UPLOAD) as world:
        policy: dict[str, Any] = {
            "cleanup_policy": "compact,delete",
            "min_cleanable_dirty_ratio": "0.01",
            "segment_bytes": "1200",
        }
        await world.topic("table", **{**policy, **configs})
        yield CleanerWorld(world, world.log("table"))


async def test_a_round_leaves_each_keys_last_record() -> None:
    async with cleaner_world() as here:
        await here.write(100)
        assert await here.check() == 400
        assert await here.round()
        assert here.log.cleaning.last().first_dirty > 350
        assert await here.check() < 2 * KEYS + 40


async def test_a_batch_whose_records_are_not_where_it_says_does_not_end_the_compaction_of_its_partition() -> None:
    async with cleaner_world() as here:
        with contextlib.suppress(InvalidRecord):
            here.log.append(misnumbered(here.clock.time_ms()))
        await here.write(100)
        assert await here.round(), here.cleaner.problems()
        assert await here.check() < 2 * KEYS + 40


async def test_a_round_whose_objects_are_merged_meanwhile_is_done_again_and_loses_nothing() -> None:
    async with cleaner_world() as here:
        await here.write(100)
        here.objects.act = here.merge
        assert await here.round(), here.cleaner.problems()
        assert here.objects.has_acted, "it was in the middle"
        assert await here.check() < 2 * KEYS + 40
        await here.write(20, seed=2)
        assert await here.round()
        await here.check()


async def test_a_round_that_is_always_refused_is_given_up_and_the_next_one_is_whole() -> None:
    async with cleaner_world() as here:
        await here.write(100)

        refused = 0

        async def merge_again(compaction: CompactObjects) -> None:
            nonlocal refused
            await here.merge(compaction)
            refused += 1
            here.objects.act = merge_again

        here.objects.act = merge_again
        assert not await here.round()
        assert refused == MAX_REFUSALS + 1
        assert here.cleaner.problems()
        assert await here.check() == 400
        here.objects.act = None
        assert await here.round()
        assert not here.cleaner.problems()
        assert await here.check() < 2 * KEYS + 40


@pytest.mark.parametrize("share", [0.2, 0.7, 1.0])
async def test_records_that_are_deleted_in_the_middle_of_a_round_stay_deleted(share: float) -> None:
    async with cleaner_world() as here:
        await here.write(100)
        end = here.log.high_watermark

        async def delete(_: CompactObjects) -> None:
            await here.log.delete_records(int(share * end))

        here.objects.act = delete
        await here.round()
        assert here.objects.has_acted, "it was in the middle"
        assert here.log.log_start_offset == int(share * end)
        if share < 1.0:
            await here.check()
        await here.write(60, seed=2)
        await here.check()
        assert await here.round(), here.cleaner.problems()
        assert await here.check() < 2 * KEYS + 40


async def test_records_that_are_deleted_while_their_keys_are_read_are_no_problem() -> None:
    async with cleaner_world() as here:
        await here.write(300)  # in more objects than one read looks into
        plan, pace = await here.plan(), here.cleaner.pace
        has_deleted = False

        async def delete(size: int) -> None:
            nonlocal has_deleted
            if not has_deleted:
                has_deleted = True
                await here.log.delete_records(plan.end)
                await here.world.chill()
                await here.log.apply_retention()
                assert here.log.state.data.start_offset == plan.end
            await pace(size)

        here.cleaner.pace = delete  # type: ignore[method-assign]
        assert not await here.cleaner.clean(here.log, plan)
        assert has_deleted and here.cleaner.problems() == [], "the next round goes on from there"
        await here.check()
        await here.write(60, seed=2)
        assert await here.round(), here.cleaner.problems()
        await here.check()


@pytest.mark.parametrize("how", ["moved", "deleted", "policy"])
async def test_a_problem_of_a_partition_is_over_when_it_is_not_compacted_here_any_more(how: str) -> None:
    async with cleaner_world() as here:
        await here.write(100)

        async def merge_again(compaction: CompactObjects) -> None:
            await here.merge(compaction)
            here.objects.act = merge_again

        here.objects.act = merge_again
        assert not await here.round()
        assert here.cleaner.problems() and here.cleaner.figures()["uncleanable_partitions"] == 1
        if how == "moved":
            await here.log.close()
        elif how == "deleted":
            await here.log.drop()
        else:
            here.log.config = msgspec.structs.replace(here.log.config, cleanup_policy="delete")
        assert here.cleaner.problems() == [] and here.cleaner.figures()["uncleanable_partitions"] == 0


async def test_segments_that_expire_in_the_middle_of_a_round_are_gone() -> None:
    async with cleaner_world(retention_bytes="2500") as here:
        await here.write(100)

        async def expire(_: CompactObjects) -> None:
            assert await here.log.apply_retention() > 0

        here.objects.act = expire
        await here.round()
        assert here.objects.has_acted, "it was in the middle"
        assert here.log.log_start_offset > 0
        with pytest.raises(OffsetOutOfRange):
            await here.log.read(0, READ_BYTES, committed=False)
        await here.check()
        await here.write(60, seed=2)
        await here.round()
        await here.check()


async def test_a_round_ends_when_its_partition_is_closed_and_the_next_leader_does_the_rest() -> None:
    async with cleaner_world() as here:
        await here.write(100)
        here.objects.act = lambda _: here.log.close()
        assert not await here.round()
        assert not here.cleaner.problems(), "a move is none"
        (record,) = here.world.controller.image.topics.values()
        here.log = await here.world.open(record, 0)
        assert here.log.cleaning.last().first_dirty == 0
        await here.check()
        assert await here.round()
        assert await here.check() < 2 * KEYS + 40


@pytest.mark.parametrize("leader", ["the same", "another"])
async def test_a_round_that_is_cut_off_at_any_step_changes_nothing_for_readers(leader: str) -> None:
    """After each cut all is read, by the same leader or one that opens the log anew, and at last a round is whole."""
    async with cleaner_world() as here:
        turns, is_whole, left = 0, False, 0
        while not is_whole:
            await here.write(16, seed=turns)
            left += 64
            plan = await here.plan()
            task = asyncio.create_task(here.cleaner.clean(here.log, plan))
            for _ in range(turns):
                await asyncio.sleep(0)
            is_whole = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if leader == "another":
                await here.log.close()
                (record,) = here.world.controller.image.topics.values()
                here.log = await here.world.open(record, 0)
            before, left = left, await here.check()
            assert left <= before, "nothing comes back"
            turns += 1
        assert task.result()
        assert turns > 12
        first_dirty = here.log.cleaning.last().first_dirty
        offsets = [offset for offset, _, _ in await here.read(0) if offset < first_dirty]
        assert first_dirty > 0 and len(offsets) <= KEYS
