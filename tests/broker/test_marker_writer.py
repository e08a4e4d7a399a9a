"""Markers on partition logs over the whole storage."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.kafka_world import KafkaWorld, batch
from tidelog.broker.txn.calls import MarkerParams
from tidelog.runtime.errors import Overloaded
from tidelog.stream.partition_log import PartitionLog

NOT_LEADER_OR_FOLLOWER, REQUEST_TIMED_OUT = 6, 7


async def test_what_one_partition_raises_concerns_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with KafkaWorld(groups=True) as world:
        await world.topic("t", 2)
        for index in range(2):
            log = world.log("t", index)
            guard = log.begin_verification(7, 0)
            records = batch(b"v", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
            await log.wait_acked(log.append(memoryview(bytearray(records)), guard=guard).wal_end)

        def odd(log: PartitionLog) -> None:
            if log.partition == 0:
                raise KeyError("a defect")

        monkeypatch.setattr(PartitionLog, "check_writable", odd)
        marker = MarkerParams(7, 0, True, 1, 0, [("t", 0), ("t", 1)])
        assert await world.services.marker_writer.write([marker]) == [[REQUEST_TIMED_OUT, 0]]
        assert [world.log("t", index).last_stable_offset for index in range(2)] == [0, 2]

        monkeypatch.undo()
        assert await world.services.marker_writer.write([marker]) == [[0, 0]]
        assert world.log("t", 0).last_stable_offset == 2


async def test_a_marker_for_a_topic_of_the_same_name_is_not_written() -> None:
    async with KafkaWorld(groups=True) as world:
        topic = await world.topic("t")
        marker = MarkerParams(7, 0, True, 1, 0, [("t", 0)], {"t": bytes(16)})
        assert await world.services.marker_writer.write([marker]) == [[NOT_LEADER_OR_FOLLOWER]]
        assert world.log("t").log_end_offset == 0
        marker = MarkerParams(7, 0, True, 1, 0, [("t", 0)], {"t": topic.id})
        assert await world.services.marker_writer.write([marker]) == [[0]]
        assert world.log("t").log_end_offset == 1


async def test_a_marker_that_is_sent_again_is_not_written_by_its_earlier_attempt_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection of its sender broke while it waited for room. Its producer's next transaction has its epoch."""
    async with KafkaWorld(groups=True) as world:
        await world.topic("t")
        log = world.log("t")

        async def begin_transaction(sequence: int) -> None:
            guard = log.begin_verification(7, 0)
            records = batch(b"v", producer_id=7, producer_epoch=0, base_sequence=sequence, transactional=True)
            await log.wait_acked(log.append(memoryview(bytearray(records)), guard=guard).wal_end)

        await begin_transaction(0)
        refused, has_room = asyncio.Event(), asyncio.Event()

        def full(_log: PartitionLog) -> None:
            if not refused.is_set():
                refused.set()
                raise Overloaded("no room")

        async def writable(_log: PartitionLog) -> None:
            await has_room.wait()

        monkeypatch.setattr(PartitionLog, "check_writable", full)
        monkeypatch.setattr(PartitionLog, "writable", writable)
        marker = MarkerParams(7, 0, True, 1, 0, [("t", 0)])
        earlier = asyncio.create_task(world.services.marker_writer.write([marker]))
        async with asyncio.timeout(10):
            await refused.wait()
            assert await world.services.marker_writer.write([marker]) == [[0]]
            await begin_transaction(1)
            has_room.set()
            assert await earlier == [[REQUEST_TIMED_OUT]]
        assert log.has_open_transaction(7, 0)
        assert log.last_stable_offset == 2
