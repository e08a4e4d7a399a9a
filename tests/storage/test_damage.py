"""Bits that flip in an object or on the way: no read returns other bytes than were written, and each is noticed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.bit_flips import flipped
from tests.support.fake_objects import FakeObjects
from tests.support.storage_world import CLUSTER, FastClock, inline
from tidelog.runtime.errors import CorruptData
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import View
from tidelog.storage.commits import ObjectKind, ObjectSlice
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.report import verify_object
from tidelog.storage.objects.writer import build_object
from tidelog.storage.reads.damage import MAX_ENTRIES, Damage, DamageLog
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.records import StreamEntry

KEY = object_key(CLUSTER, 1)
STREAMS = (1, 2, 3)


class Bucket(MemoryObjectStore):
    """A bucket whose answers can be spoiled on the way: `spoil` counts down the GETs that get a flipped bit."""

    spoil = 0
    rng = random.Random(1)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        parts = await super().get_ranges(key, ranges)
        if self.spoil:
            self.spoil -= 1
            return [flipped(part, self.rng.randrange(len(part) * 8)) for part in parts]
        return parts


class World:
    """One object of three streams, of so many bytes a record, and what is in it."""

    def __init__(self, size: int) -> None:
        rng = random.Random(size)
        self.clock = FastClock()
        self.store = Bucket(self.clock)
        self.objects = FakeObjects(clock=self.clock)
        self.records = {stream: [StreamEntry(n, 1, rng.randbytes(size)) for n in range(12)] for stream in STREAMS}
        built = build_object(
            object_id=1,
            kind=ObjectKind.STREAM_SET,
            cluster_id=CLUSTER,
            created_ms=0,
            parts=list(self.records.items()),
            block_bytes=3 * size,
        )
        self.body = b"".join(built.body)
        for stream in STREAMS:
            self.objects.slices[stream] = [ObjectSlice(1, 1, len(self.body), 0, 12)]

    def reader(self) -> BlockReader:
        """With nothing in its cache."""
        return BlockReader(
            store=self.store,
            objects=self.objects,
            clock=self.clock,
            cluster_id=CLUSTER,
            cache_bytes=16 << 20,
            offload=inline,
        )

    async def read_all(self, reader: BlockReader) -> int:
        """Read every record by itself; how many were refused. What comes is what was written."""
        refused = 0
        for stream, records in self.records.items():
            for record in records:
                try:
                    got = await reader.read(stream, record.base_offset, record.base_offset + 1, 1)
                except CorruptData:
                    refused += 1
                else:
                    assert [(one.base_offset, bytes(one.payload)) for one in got] == [(record[0], record.payload)]
        return refused


@pytest.mark.parametrize("size", [50, 40_000], ids=["read whole", "read by block"])
async def test_a_flipped_bit_anywhere_in_an_object_is_refused_noted_and_verified(size: int) -> None:
    world = World(size)
    rng = random.Random(3)
    bits = [rng.randrange(len(world.body) * 8) for _ in range(40)]
    bits += [rng.randrange((len(world.body) - 800) * 8, len(world.body) * 8) for _ in range(40)]  # index, footer
    for bit in bits:
        await world.store.put(KEY, [flipped(world.body, bit)])
        reader = world.reader()
        refused = await world.read_all(reader)
        assert refused > 0, bit
        assert reader.damage.refused == refused and reader.damage.failed_checks > 0
        [damage] = list(reader.damage.all())
        problems = await verify_object(world.store, KEY)
        assert [one.stream_id for one in problems] == [damage.stream_id]
        if damage.stream_id >= 0:
            assert refused == damage.end_offset - damage.start_offset
            assert problems[0].position <= bit // 8 < problems[0].position + problems[0].length
            assert damage.position == problems[0].position
        else:
            assert refused == 36, "without its index nothing of the object can be read"
            assert problems[0].position <= bit // 8
        await world.store.put(KEY, [world.body])
        assert await world.read_all(reader) == 0, "it is served again when it is restored"
        assert not reader.damage
        await reader.close()


@pytest.mark.parametrize("size", [50, 40_000])
async def test_a_bit_that_flipped_on_the_way_is_asked_for_again_and_refuses_nothing(size: int) -> None:
    world = World(size)
    await world.store.put(KEY, [world.body])
    for seed in range(30):
        world.store.rng = random.Random(seed)
        reader = world.reader()
        await reader.read(1, 0, 1, 1)
        world.store.spoil = 1
        assert await world.read_all(reader) == 0
        assert not reader.damage
        await reader.close()
        reader = world.reader()
        world.store.spoil = 1  # now the index
        assert await world.read_all(reader) == 0
        await reader.close()
        world.store.spoil = 1
        assert await verify_object(world.store, KEY) == []
        world.store.spoil = 0


async def test_an_object_that_is_not_there_is_noted_as_a_whole() -> None:
    world = World(50)
    reader = world.reader()
    assert await world.read_all(reader) == 36
    assert [(one.object_id, one.position, one.key) for one in reader.damage.all()] == [(1, -1, KEY)]
    await world.store.put(KEY, [world.body])
    assert await world.read_all(reader) == 0
    assert not reader.damage
    await reader.close()


def test_the_log_of_damage_is_bounded() -> None:
    log = DamageLog()
    for object_id in range(MAX_ENTRIES + 10):
        for _ in range(2):
            log.note(Damage(object_id, "k", 5, 1, 2, 3, "bad"))
    assert len(log) == MAX_ENTRIES
    log.forget_object(3)
    log.heal(4, 5)
    log.heal(4, 6)
    assert len(log) == MAX_ENTRIES - 2
