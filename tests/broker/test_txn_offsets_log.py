"""Offsets in transactions on a partition log over the whole storage: what the log itself knows of them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.kafka_world import KafkaWorld
from tidelog.broker.coordinators.store import TxnProducer
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import TxnCommitRequest
from tidelog.broker.groups.records import OffsetKey, OffsetValue

OFFSETS = "__consumer_offsets"
NOBODY = MemberIdentity("", None)


async def yes(partition: int) -> int:
    return 0


async def never(partition: int) -> int:
    raise AssertionError("nobody is to be asked")


class OffsetsWorld:
    """One group, whose offsets partition is on the storage."""

    def __init__(self, world: KafkaWorld) -> None:
        self.groups = world.services.groups
        self.world = world

    async def begin(self) -> None:
        await self.world.topic("t", 4)
        await self.world.topic(OFFSETS, 2)
        self.index = await self.groups.find_partition("g")
        async with asyncio.timeout(30):
            await self.groups.wait_until_loaded(self.index)
        self.log = self.world.log(OFFSETS, self.index)

    async def put(self, offset: int, partition: int = 0, *, epoch: int = 0, admit: Any = yes) -> int:
        offsets = [(OffsetKey("g", "t", partition), OffsetValue(offset, -1, "m" * 3_000, 0))]
        request = TxnCommitRequest(TxnProducer(7, epoch), NOBODY, -1, offsets)
        return await self.groups.commit_pending("g", request, admit)

    async def commit(self, offset: int, partition: int = 0) -> int:
        offsets = [(OffsetKey("g", "t", partition), OffsetValue(offset, -1, "m" * 3_000, offset))]
        return await self.groups.commit("g", NOBODY, -1, offsets)

    async def end(self, is_commit: bool = True, *, epoch: int = 0, version: int = 1) -> int:
        return await self.groups.write_marker(self.index, 7, epoch, 0, is_commit, version)

    def found(self, *partitions: int) -> list[int | None]:
        values = self.groups.committed("g", {"t": partitions})["t"]
        return [one and one.offset for one in values.values()]


async def test_the_log_knows_the_transaction_until_its_marker() -> None:
    async with KafkaWorld(groups=True) as world:
        one = OffsetsWorld(world)
        await one.begin()
        assert await one.put(5) == 0
        assert await one.put(6, 1, admit=never) == 0
        (producer,) = one.log.producers()
        assert (producer.current_txn_start_offset, producer.last_sequence) == (0, -1)
        assert one.log.last_stable_offset == 0
        assert await one.end() == 0
        assert one.log.last_stable_offset == one.log.log_end_offset == 3
        assert one.found(0, 1) == [5, 6]
        assert await one.put(7, epoch=0, admit=yes) == 0
        assert await one.end(epoch=0, version=2) == E.INVALID_PRODUCER_EPOCH
        assert await one.end(False, epoch=1, version=2) == 0
        assert await one.put(8, epoch=0) == E.INVALID_PRODUCER_EPOCH
        assert one.found(0, 1) == [5, 6]


async def test_a_hanging_transaction_outlives_the_records_that_began_it() -> None:
    async with KafkaWorld(groups=True) as world:
        one = OffsetsWorld(world)
        await one.begin()
        assert await one.put(5, 1) == 0
        async with asyncio.timeout(60):
            offset = 0
            while one.log.log_start_offset == 0:
                offset += 1
                assert await one.commit(offset) == 0
        one.groups.unload_partition(one.index)
        await one.groups.load_partition(one.log)
        assert one.groups.unstable("g") == {("t", 1)}
        assert await one.put(6, 2, admit=never) == 0
        assert await one.end() == 0
        assert one.found(0, 1, 2) == [offset, 5, 6]
        assert one.log.last_stable_offset == one.log.high_watermark
