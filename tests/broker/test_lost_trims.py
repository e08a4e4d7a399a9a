"""Trims whose answer does not come: the controller has done them, and what was trimmed may be deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.broker.test_handlers_fetch import BIG
from tests.support.guarded import append_guarded
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.runtime.errors import Unavailable
from tidelog.stream.partition_log import PartitionLog

PRODUCER = 4
TXN = 3
Trim = Callable[[int, int, int, int, int], Awaitable[None]]


async def with_aborted(world: KafkaWorld, count: int) -> PartitionLog:
    """A log with aborted transactions at 0, 2, 4, …, each in objects of its own, of which nothing is in memory."""
    topic = await world.topic("t", retention_ms="-1")
    log = world.log("t")
    for sequence in range(count):
        data = batch(b"x", producer_id=PRODUCER, producer_epoch=0, base_sequence=sequence, transactional=True)
        append_guarded(log, data)
        marker = log.write_marker(PRODUCER, 0, commit=False, coordinator_epoch=0, transaction_version=1)
        await log.wait_acked(marker.wal_end)
        await world.chill()
    await log.close()
    await world.chill()
    log = await world.open(topic, 0)
    await until(lambda: log.high_watermark == 2 * count, "confirmation")
    return log


@pytest.mark.parametrize("how", ["unknown", "cancelled"])
async def test_a_trim_of_the_aborted_transactions_that_was_done_unheard_of_hides_no_others(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with KafkaWorld() as world:
        log = await with_aborted(world, 4)
        trim: Trim = world.controller.trim_stream
        done, stream_id = asyncio.Event(), log.first_stream + TXN

        async def unheard_of(*arguments: int) -> None:
            await trim(*arguments)
            if arguments[2] == stream_id:
                done.set()
                if how == "cancelled":
                    await asyncio.get_running_loop().create_future()
                raise Unavailable("no controller answered")

        monkeypatch.setattr(world.controller, "trim_stream", unheard_of)
        assert await log.delete_records(4) == 4
        await world.chill()
        retention = asyncio.create_task(log.apply_retention())
        await asyncio.wait_for(done.wait(), 60)
        if how == "cancelled":
            retention.cancel()
        await asyncio.wait([retention])
        monkeypatch.setattr(world.controller, "trim_stream", trim)
        assert world.controller.image.streams[stream_id].start_offset == 2
        expected = [(PRODUCER, 4), (PRODUCER, 6)]
        assert (await log.read(4, BIG, committed=True)).aborted == expected
        assert await log.delete_records(6) == 6
        await world.chill()
        await log.apply_retention()
        assert world.controller.image.streams[stream_id].start_offset == 3
        assert (await log.read(6, BIG, committed=True)).aborted == expected[1:]


async def test_a_trim_that_was_not_done_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with KafkaWorld() as world:
        log = await with_aborted(world, 4)
        trim: Trim = world.controller.trim_stream

        async def refused(*arguments: int) -> None:
            raise Unavailable("no controller answered")

        monkeypatch.setattr(world.controller, "trim_stream", refused)
        assert await log.delete_records(4) == 4
        await world.chill()
        await log.apply_retention()
        monkeypatch.setattr(world.controller, "trim_stream", trim)
        await log.apply_retention()
        starts = [world.controller.image.streams[log.first_stream + each].start_offset for each in (1, TXN)]
        assert starts == [4, 2]
