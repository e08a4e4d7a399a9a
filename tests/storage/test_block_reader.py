"""Reads from the bucket: what comes back, how few GETs it takes, and what faults do to it."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.fake_objects import FakeObjects
from tests.support.storage_world import CLUSTER, FastClock, FaultyStore, inline
from tidelog.runtime.errors import Closed, CorruptData, Unavailable
from tidelog.storage.commits import ObjectKind, ObjectSlice, StreamRange
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import TAIL_BYTES
from tidelog.storage.objects.writer import build_object
from tidelog.storage.reads.cache import ByteLru, Flights
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.records import StreamEntry

KIB = 1024


class Bucket:
    """Objects with known records, and a reader."""

    def __init__(self, *, cache_bytes: int = 64 << 20, in_flight_bytes: int = 64 << 20) -> None:
        self.clock = FastClock()
        self.store = FaultyStore(self.clock)
        self.objects = FakeObjects(clock=self.clock)
        self.records: dict[int, list[StreamEntry]] = {}
        self.reader = BlockReader(
            store=self.store,
            objects=self.objects,
            clock=self.clock,
            cluster_id=CLUSTER,
            cache_bytes=cache_bytes,
            in_flight_bytes=in_flight_bytes,
            offload=inline,
        )
        self.next_id = 1

    async def add(self, parts: dict[int, list[int]], *, block_bytes: int = 64 * KIB, seed: int = 0) -> int:
        """Put an object with records of these sizes, by stream; each covers 2 offsets."""
        rng = random.Random(seed)
        object_id, self.next_id = self.next_id, self.next_id + 1
        new: dict[int, list[StreamEntry]] = {}
        for stream in sorted(parts):
            known = self.records.setdefault(stream, [])
            base = known[-1].base_offset + 2 if known else 0
            new[stream] = [StreamEntry(base + 2 * n, 2, rng.randbytes(size)) for n, size in enumerate(parts[stream])]
            known += new[stream]
        built = build_object(
            object_id=object_id,
            kind=ObjectKind.STREAM_SET,
            cluster_id=CLUSTER,
            created_ms=0,
            parts=list(new.items()),
            block_bytes=block_bytes,
        )
        await self.store.put(object_key(CLUSTER, object_id), built.body)
        for piece in built.ranges:
            one = ObjectSlice(object_id, 1, built.size, piece.start_offset, piece.end_offset)
            self.objects.slices.setdefault(piece.stream_id, []).append(one)
        return object_id

    def end(self, stream: int) -> int:
        return self.records[stream][-1].base_offset + 2

    async def read(self, stream: int, start: int, max_bytes: int, end: int | None = None) -> list[StreamEntry]:
        got = await self.reader.read(stream, start, self.end(stream) if end is None else end, max_bytes)
        return [record._replace(payload=bytes(record.payload)) for record in got]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.dictionaries(st.integers(1, 3), st.lists(st.integers(0, 300), min_size=1, max_size=8), min_size=1)),
    st.integers(1, 400),
    st.randoms(use_true_random=False),
)
def test_any_read_is_the_models_answer(
    objects: list[dict[int, list[int]]], block_bytes: int, rng: random.Random
) -> None:
    async def scenario() -> None:
        bucket = Bucket()
        for seed, parts in enumerate(objects):
            await bucket.add(parts, block_bytes=block_bytes, seed=seed)
        for stream, records in bucket.records.items():
            for _ in range(8):
                start = rng.randrange(bucket.end(stream))
                end = rng.randrange(start + 1, bucket.end(stream) + 1)
                max_bytes = rng.choice([1, 100, 1000, 1 << 20])
                got = await bucket.read(stream, start, max_bytes, end)
                first = start // 2
                assert got
                assert got == records[first : first + len(got)]
                assert all(record.base_offset < end for record in got)
                assert len(got) == 1 or sum(len(record.payload) for record in got) <= max_bytes
        assert await bucket.reader.read(99, 0, 10, 100) == []
        await bucket.reader.close()

    asyncio.run(scenario())


async def test_a_small_object_costs_one_get_and_then_none() -> None:
    bucket = Bucket()
    await bucket.add({1: [100] * 20, 2: [100] * 20}, block_bytes=500)
    for _ in range(2):
        assert await bucket.read(1, 0, 1 << 20) == bucket.records[1]
        assert len(bucket.store.gets) == 1
    await bucket.reader.close()


async def test_neighbouring_blocks_share_a_get() -> None:
    bucket = Bucket()
    await bucket.add({1: [10 * KIB] * 100, 2: [10 * KIB] * 5})
    assert await bucket.read(1, 0, 10 << 20) == bucket.records[1]
    tail, blocks = bucket.store.gets
    assert tail[2] - tail[1] == TAIL_BYTES
    assert blocks[1] == 0
    assert blocks[2] >= 1000 * KIB
    await bucket.reader.close()


async def test_many_readers_of_one_block_share_a_get_and_one_that_leaves_disturbs_no_other() -> None:
    bucket = Bucket()
    await bucket.add({1: [10 * KIB] * 20})
    bucket.store.get_gate = asyncio.Event()
    readers = [asyncio.create_task(bucket.read(1, 0, 1000)) for _ in range(10)]
    for _ in range(5):
        await asyncio.sleep(0)
    readers[0].cancel()
    bucket.store.get_gate.set()
    for reader in readers[1:]:
        assert await reader == bucket.records[1][:1]
    with pytest.raises(asyncio.CancelledError):
        await readers[0]
    assert len(bucket.store.gets) == 2, "one tail, one block"
    await bucket.reader.close()


async def test_a_sequential_reader_finds_the_next_blocks_in_the_cache() -> None:
    bucket = Bucket()
    for seed in range(3):
        await bucket.add({1: [16 * KIB] * 256}, seed=seed)
    offset, waited, reads = 0, 0, 0
    while offset < bucket.end(1):
        before = bucket.reader.stats()["block_gets"]
        got = await bucket.read(1, offset, 128 * KIB)
        offset = got[-1].base_offset + 2
        reads += 1
        waited += bucket.reader.stats()["block_gets"] > before
        for _ in range(20):
            await asyncio.sleep(0)
    assert reads >= 96
    assert waited <= 6, "nearly every read is answered from the cache"
    assert bucket.reader.stats()["block_gets"] <= 20, "few, large GETs"
    fetched = bucket.reader.stats()["block_get_bytes"]
    assert fetched < 1.3 * 12 * (1 << 20), "nothing is fetched twice"
    assert bucket.reader.stats()["cold_in_flight_bytes"] == 0
    await bucket.reader.close()


async def test_the_next_objects_index_is_on_its_way_before_the_reader_gets_there() -> None:
    bucket = Bucket()
    first = await bucket.add({1: [16 * KIB] * 1024}, seed=1)
    second = await bucket.add({1: [16 * KIB] * 1024}, seed=2)
    offset = 0
    for _ in range(3):
        got = await bucket.read(1, offset, 128 * KIB)
        offset = got[-1].base_offset + 2
        for _ in range(20):
            await asyncio.sleep(0)
    assert offset < bucket.end(1) // 8
    asked = [key for key, start, end in bucket.store.gets if end - start == TAIL_BYTES]
    assert asked == [object_key(CLUSTER, first), object_key(CLUSTER, second)]
    await bucket.reader.close()


async def test_a_random_reader_reads_nothing_ahead() -> None:
    bucket = Bucket()
    await bucket.add({1: [16 * KIB] * 512})
    rng = random.Random(5)
    for _ in range(10):
        await bucket.read(1, rng.randrange(bucket.end(1)), 1)
        for _ in range(10):
            await asyncio.sleep(0)
    assert bucket.reader.stats()["block_get_bytes"] <= TAIL_BYTES + 10 * 70 * KIB
    await bucket.reader.close()


async def test_the_cache_stays_within_its_bound() -> None:
    bucket = Bucket(cache_bytes=1 << 20)
    await bucket.add({1: [16 * KIB] * 256})
    offset = 0
    while offset < bucket.end(1):
        offset = (await bucket.read(1, offset, 100 * KIB))[-1].base_offset + 2
        assert bucket.reader.stats()["block_cache_bytes"] <= 1 << 20
    await bucket.reader.close()


async def test_a_bad_transfer_is_asked_for_again_and_a_bad_object_never_served() -> None:
    bucket = Bucket()
    object_id = await bucket.add({1: [10 * KIB] * 20}, block_bytes=20 * KIB)
    await bucket.read(1, 0, 1)
    bucket.store.flip_next_get = 777
    assert await bucket.read(1, 20, 1) == [bucket.records[1][10]]
    key = object_key(CLUSTER, object_id)
    body = bytearray(await bucket.store.get(key))
    body[15 * 10 * KIB] ^= 1
    await bucket.store.put(key, [body])
    with pytest.raises(CorruptData, match=key):
        await bucket.read(1, 28, 1)
    with pytest.raises(CorruptData, match="crc32c"):
        await bucket.read(1, 28, 1)
    assert await bucket.read(1, 0, 1) == bucket.records[1][:1]
    await bucket.reader.close()


@pytest.mark.parametrize("harm", ["block", "index", "footer", "gone"])
async def test_what_lies_before_damage_is_served_by_the_read_that_reaches_it(harm: str) -> None:
    bucket = Bucket()
    await bucket.add({1: [10 * KIB] * 20}, block_bytes=20 * KIB)
    object_id = await bucket.add({1: [10 * KIB] * 20}, block_bytes=20 * KIB)
    key = object_key(CLUSTER, object_id)
    body = bytearray(await bucket.store.get(key))
    body[{"block": 5 * 20 * KIB, "index": -100, "footer": -10, "gone": 0}[harm]] ^= 1
    await bucket.store.put(key, [body])
    if harm == "gone":
        await bucket.store.delete([key])
    found: list[StreamEntry] = []
    with pytest.raises(CorruptData, match=key):
        while True:
            found += await bucket.read(1, 2 * len(found), 1 << 20)
    assert found == bucket.records[1][: len(found)]
    assert 20 < len(found) < 40 if harm == "block" else len(found) == 20
    await bucket.reader.close()


@pytest.mark.parametrize("is_cached", [False, True])
async def test_what_is_read_ahead_and_lacks_its_offsets_fails_no_read_before_it(is_cached: bool) -> None:
    """The next object is not the one that the metadata mean: it was overwritten by another one of that id."""
    bucket = Bucket()
    await bucket.add({1: [16 * KIB] * 256}, seed=1)
    end = bucket.end(1)
    other = await bucket.add({2: [10] * 256})
    (one,) = bucket.objects.slices[2]
    bucket.objects.slices[1].append(ObjectSlice(other, 1, one.size, end, end + 512))
    await bucket.read(2, 0, 10)  # its index is in the cache
    if is_cached:
        while await bucket.reader.gather([StreamRange(1, 0, end)], 64 << 20):
            continue
    found: list[StreamEntry] = []
    while len(found) < 256:
        at = 2 * len(found)
        got = bucket.reader.read_cached(1, at, end + 512, 128 * KIB, is_urgent=True)
        if got is None:
            got = await bucket.read(1, at, 128 * KIB, end + 512)
        found += [each._replace(payload=bytes(each.payload)) for each in got]
        for _ in range(20):
            await asyncio.sleep(0)
    assert found == bucket.records[1]
    with pytest.raises(CorruptData, match="block of stream 1"):
        await bucket.read(1, end, 128 * KIB, end + 512)
    assert bucket.reader.stats()["read_ahead_bytes"] == 0
    await bucket.reader.close()


async def test_a_bucket_that_does_not_answer_is_unavailable_and_later_it_works() -> None:
    bucket = Bucket()
    await bucket.add({1: [10 * KIB] * 20, 2: [10]})
    bucket.store.fail_gets = 1
    with pytest.raises(Unavailable):
        await bucket.read(1, 0, 1)  # the index
    assert await bucket.read(2, 0, 1) == bucket.records[2]  # the index came with the end of the object
    bucket.store.fail_gets = 1
    with pytest.raises(Unavailable):
        await bucket.read(1, 0, 1)  # the block
    assert await bucket.read(1, 0, 1) == bucket.records[1][:1]
    await bucket.reader.close()


async def test_an_object_that_compaction_replaced_is_looked_up_again() -> None:
    bucket = Bucket()
    await bucket.add({1: [10 * KIB] * 20})
    first = bucket.objects.slices[1][0]
    replacement = Bucket()
    replacement.next_id = 50
    await replacement.add({1: [10 * KIB] * 20})
    body = await replacement.store.get(object_key(CLUSTER, 50))
    await bucket.store.put(object_key(CLUSTER, 50), [body])
    await bucket.store.delete([object_key(CLUSTER, 1)])
    sleep = bucket.clock.sleep

    async def sleep_and_learn(seconds: float) -> None:
        bucket.objects.slices[1] = [ObjectSlice(50, 1, first.size, first.start_offset, first.end_offset)]
        await sleep(seconds)

    bucket.clock.sleep = sleep_and_learn  # type: ignore[method-assign]
    assert await bucket.read(1, 0, 1) == bucket.records[1][:1]
    await bucket.store.delete([object_key(CLUSTER, 50)])
    with pytest.raises(CorruptData, match="not in the bucket"):
        await bucket.read(1, 20, 1)
    await bucket.reader.close()


async def test_an_object_without_the_offset_that_the_metadata_says_it_has_is_corrupt() -> None:
    bucket = Bucket()
    await bucket.add({1: [10], 2: [10]})
    one = bucket.objects.slices[1][0]
    bucket.objects.slices[3] = [one]
    with pytest.raises(CorruptData, match="block of stream 3"):
        await bucket.reader.read(3, 0, 2, 10)
    await bucket.reader.close()


async def test_an_object_of_another_size_than_the_metadata_says_is_corrupt() -> None:
    bucket = Bucket()
    await bucket.add({1: [10], 2: [10]})
    one = bucket.objects.slices[1][0]
    bucket.objects.slices[1] = [ObjectSlice(one.object_id, 1, one.size - 1, 0, 2)]
    with pytest.raises(CorruptData):
        await bucket.read(1, 0, 10)
    await bucket.reader.close()


async def test_closing_wakes_those_who_wait() -> None:
    bucket = Bucket()
    await bucket.add({1: [10]})
    bucket.store.get_gate = asyncio.Event()
    waiting = asyncio.create_task(bucket.read(1, 0, 10))
    late = asyncio.create_task(bucket.read(1, 0, 10))
    await asyncio.sleep(0)
    await bucket.reader.close()
    for reader in (waiting, late):
        with pytest.raises(Closed):
            await reader
    with pytest.raises(Closed):
        await bucket.read(1, 0, 10)


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 500), st.booleans())))
def test_the_lru_keeps_the_most_recent_within_its_bound(steps: list[tuple[int, int, bool]]) -> None:
    lru: ByteLru[int, int] = ByteLru(2000)
    model: dict[int, tuple[int, int]] = {}
    for key, size, is_put in steps:
        if is_put:
            lru.put(key, size, size)
            model.pop(key, None)
            model[key] = (size, size + 256)
            while sum(cost for _, cost in model.values()) > 2000:
                del model[next(iter(model))]
        else:
            got = lru.get(key)
            assert got == (model[key][0] if key in model else None)
            if key in model:
                model[key] = model.pop(key)
        assert lru.bytes == sum(cost for _, cost in model.values())
        assert len(lru) == len(model)


async def test_flights_that_nobody_awaits_complain_to_nobody() -> None:
    flights: Flights[int, int] = Flights()
    flights.open(1)
    flights.land(1, Unavailable("nobody asked"))
    flights.land(1, 5)
    future = flights.open(2)
    flights.land(2, 7)
    assert await Flights.outcome(future) == 7
    assert len(flights) == 0


async def gathered(bucket: Bucket, streams: list[int], max_bytes: int = 1 << 20) -> int:
    """The GETs that it takes to gather these streams."""
    before = len(bucket.store.gets)
    await bucket.reader.gather([StreamRange(each, 0, bucket.end(each)) for each in streams], max_bytes)
    return len(bucket.store.gets) - before


async def test_many_streams_are_gathered_by_a_get_for_each_object_and_one_for_its_index() -> None:
    bucket = Bucket()
    streams = list(range(100))
    for seed in range(2):
        await bucket.add({each: [2 * KIB] * 2 for each in streams}, seed=seed)
    assert await gathered(bucket, streams) == 4
    before = len(bucket.store.gets)
    for each in streams:
        assert await bucket.read(each, 0, 1 << 20) == bucket.records[each]
    assert len(bucket.store.gets) == before, "every read is answered from memory"
    assert await gathered(bucket, streams) == 0
    await bucket.reader.close()


async def test_ranges_in_many_objects_are_gathered_whole() -> None:
    bucket = Bucket()
    streams = list(range(20))
    for seed in range(25):
        await bucket.add({each: [2 * KIB] * 2 for each in streams}, seed=seed)
    await gathered(bucket, streams, 16 << 20)
    before = len(bucket.store.gets)
    for each in streams:
        start = 0
        while start < bucket.end(each):
            start = (await bucket.read(each, start, 1 << 20))[-1].base_offset + 2
    assert len(bucket.store.gets) == before
    await bucket.reader.close()


@pytest.mark.parametrize(("between", "gets"), [(12 * KIB, 2), (200 * KIB, 50)])
async def test_gathered_blocks_share_a_get_with_a_little_between_them_and_leave_it_out_of_memory(
    between: int, gets: int
) -> None:
    bucket = Bucket()
    await bucket.add({each: [between if each % 2 else 2 * KIB] for each in range(100)}, block_bytes=256 * KIB)
    wanted = list(range(0, 100, 2))
    found = await gathered(bucket, wanted)
    assert gets <= found <= gets + 2, "one is for the index"
    assert bucket.reader.stats()["block_cache_bytes"] < len(wanted) * 2 * KIB + 100 * KIB
    before = len(bucket.store.gets)
    for each in wanted:
        assert await bucket.read(each, 0, 1 << 20) == bucket.records[each]
    assert len(bucket.store.gets) == before
    await bucket.reader.close()


async def test_what_is_gathered_is_bounded_and_the_first_ranges_come_first() -> None:
    bucket = Bucket()
    streams = list(range(50))
    await bucket.add({each: [4 * KIB] for each in streams})
    await gathered(bucket, streams[::-1], 64 * KIB)
    size = bucket.reader.stats()["block_get_bytes"]
    assert size <= TAIL_BYTES + 64 * KIB
    before = len(bucket.store.gets)
    assert await bucket.read(49, 0, 1 << 20) == bucket.records[49]
    assert len(bucket.store.gets) == before
    assert await bucket.read(0, 0, 1 << 20) == bucket.records[0]
    assert len(bucket.store.gets) == before + 1
    await bucket.reader.close()


async def test_what_cannot_be_gathered_is_left_to_the_reads() -> None:
    bucket = Bucket()
    await bucket.add({1: [4 * KIB] * 2, 2: [4 * KIB] * 2})
    bucket.store.fail_gets = 2
    assert await gathered(bucket, [1, 2]) == 2, "no index, for both"
    bucket.store.flip_next_get = 40
    await gathered(bucket, [1, 2])
    assert await bucket.read(1, 0, 1 << 20) == bucket.records[1]
    assert await bucket.read(2, 0, 1 << 20) == bucket.records[2]
    await bucket.reader.close()
    assert await gathered(bucket, [1, 2]) == 0


async def test_who_leaves_while_blocks_are_gathered_takes_none_from_their_readers() -> None:
    bucket = Bucket()
    await bucket.add({1: [30 * KIB] * 4})
    bucket.store.get_gate = asyncio.Event()
    gathering = asyncio.create_task(gathered(bucket, [1]))
    reading = asyncio.create_task(bucket.read(1, 0, 1 << 20))
    for _ in range(5):
        await asyncio.sleep(0)
    gathering.cancel()
    bucket.store.get_gate.set()
    assert await reading == bucket.records[1]
    with pytest.raises(asyncio.CancelledError):
        await gathering
    await bucket.reader.close()
