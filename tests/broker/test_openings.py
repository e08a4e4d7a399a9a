"""Requests that come while a partition is opening: they wait a little, in order, and nothing is lost or overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.broker.test_handlers_fetch import append, fetch_request, part, values
from tests.broker.test_handlers_produce import outcome, produce_request
from tests.support import schema
from tests.support.fake_storage import FakeClock
from tests.support.kafka_client import KafkaClient, encode_request, request_entity
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.broker.partitions import openings
from tidelog.broker.partitions.openings import OPENING_WAIT_S, Openings
from tidelog.controller.model.records import TopicRecord

KEY = (bytes(16), 0)


@asynccontextmanager
async def opening_world() -> AsyncIterator[tuple[KafkaWorld, TopicRecord]]:
    """A world with topic t, of which partition 1 is open and partition 0 is opening."""
    async with KafkaWorld() as world:
        world.partitions.openings = Openings(world.services.clock)
        topic = await world.topic("t", 2, open_logs=False)
        await world.open(topic, 1)
        yield world, topic


async def asked_for(world: KafkaWorld) -> None:
    """Wait until a request waits for the opening."""
    assert world.partitions.openings is not None
    openings_here = world.partitions.openings
    await until(lambda: bool(openings_here.pending()), "a request waits")


async def test_batches_that_were_sent_one_behind_the_other_wait_and_keep_their_order() -> None:
    async with opening_world() as (world, topic), world.client() as client:
        for number in range(5):
            client.post(produce_request(9, {"t": {0: batch(b"%d" % number)}}))
        await asked_for(world)
        await world.open(topic, 0)
        assert [outcome(await client.receive()).base_offset for _ in range(5)] == [0, 1, 2, 3, 4]
        client.post(fetch_request(12, {"t": {0: 0}}))
        assert values(part(await client.receive()).records) == [(n, b"%d" % n) for n in range(5)]


async def test_the_other_partitions_of_a_request_are_appended_meanwhile() -> None:
    async with opening_world() as (world, topic), world.client() as client:
        client.post(produce_request(9, {"t": {0: batch(b"a"), 1: batch(b"b")}}))
        await until(lambda: world.log("t", 1).high_watermark == 1, "the open partition has its batch")
        await world.open(topic, 0)
        response = await client.receive()
        assert [outcome(response, 0, index).error_code for index in (0, 1)] == [0, 0]
        assert world.log("t", 0).high_watermark == world.log("t", 1).high_watermark == 1


@pytest.mark.parametrize("closes", [False, True], ids=["stays", "closes"])
async def test_a_producer_that_asks_for_no_answer_loses_nothing(closes: bool) -> None:
    """Also one that closes its connection when all is sent."""
    async with opening_world() as (world, topic), world.client() as client:
        for number in range(5):
            client.writer.write(encode_request(produce_request(9, {"t": {0: batch(b"%d" % number)}}, acks=0), number))
        await client.writer.drain()
        await asked_for(world)
        if closes:
            client.writer.close()
            await client.writer.wait_closed()
            async with world.client() as other:  # the broker has heard of it
                await other.send(18, 0)
        await world.open(topic, 0)
        await until(lambda: world.log("t", 0).high_watermark == 5, "all are stored")


async def test_the_wait_is_bounded_by_the_time_of_the_request() -> None:
    async with opening_world() as (world, topic), world.client() as client:
        client.post(produce_request(9, {"t": {0: batch(b"a"), 1: batch(b"b")}}, timeout=50))
        response = await client.receive()
        assert [outcome(response, 0, index).error_code for index in (0, 1)] == [6, 0]
        await world.open(topic, 0)
        client.post(produce_request(9, {"t": {0: batch(b"c")}}))
        assert outcome(await client.receive()).base_offset == 0


async def test_a_fetch_treats_an_opening_partition_as_one_without_data() -> None:
    async with opening_world() as (world, _), world.client() as client, world.client() as producer:
        client.post(fetch_request(12, {"t": {0: 0, 1: 0}}, max_wait=30_000))
        await asked_for(world)
        producer.post(produce_request(9, {"t": {1: batch(b"b")}}))
        await producer.receive()
        response = await client.receive()
        assert part(response, 0, 0).error_code == 6 and values(part(response, 0, 1).records) == [(0, b"b")]


async def session_with_an_opening_partition(
    world: KafkaWorld, topic: TopicRecord, client: KafkaClient
) -> dict[str, int]:
    """Fields of the next requests of a fetch session of two partitions; the first one is to open again."""
    log = await world.open(topic, 0)
    client.post(fetch_request(12, {"t": {0: 0, 1: 0}}, session_epoch=0))
    session = {"session_id": (await client.receive()).session_id, "max_wait": 60_000}
    del world.partitions.logs[topic.id, 0]
    await log.close()
    return session


async def test_a_response_in_a_session_leaves_an_opening_partition_out() -> None:
    async with opening_world() as (world, topic), world.client() as client, world.client() as producer:
        session = await session_with_an_opening_partition(world, topic, client)
        client.post(fetch_request(12, {}, session_epoch=1, **session))
        await asked_for(world)
        producer.post(produce_request(9, {"t": {1: batch(b"b")}}))
        await producer.receive()
        (other,) = (await client.receive()).responses[0].partitions
        assert (other.partition_index, values(other.records)) == (1, [(0, b"b")])
        client.post(fetch_request(12, {"t": {1: 1}}, session_epoch=2, **session))
        await world.open(topic, 0)
        append(world, "t", b"a")
        while not (response := await client.receive()).responses:
            client.post(fetch_request(12, {}, session_epoch=3, **session))
        (opened,) = response.responses[0].partitions
        assert (opened.partition_index, opened.error_code) == (0, 0)


async def test_a_partition_of_a_session_that_opens_for_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings, "OPENING_WAIT_S", 0.3)
    async with opening_world() as (world, topic), world.client() as client:
        session = await session_with_an_opening_partition(world, topic, client)
        client.post(fetch_request(12, {}, session_epoch=1, **session))
        (late,) = (await client.receive()).responses[0].partitions
        assert (late.partition_index, late.error_code) == (0, 6)
        await world.open(topic, 0)


async def test_a_fetch_is_answered_when_the_partition_has_opened() -> None:
    async with opening_world() as (world, topic), world.client() as client:
        client.post(fetch_request(12, {"t": {0: 0, 1: 0}}, max_wait=60_000))
        await asked_for(world)
        await world.open(topic, 0)
        response = await client.receive()
        assert [part(response, 0, index).error_code for index in (0, 1)] == [0, 0]


async def test_a_fetch_waits_no_longer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings, "OPENING_WAIT_S", 0.1)
    async with opening_world() as (world, _), world.client() as client:
        client.post(fetch_request(12, {"t": {0: 0}}, max_wait=30_000))
        assert part(await client.receive()).error_code == 6


async def test_offsets_are_looked_up_when_the_partition_is_open() -> None:
    make = schema.request(2, 5).make
    asked = make("ListOffsetsPartition", partition_index=0, timestamp=-1, current_leader_epoch=-1)
    topics = [make("ListOffsetsTopic", name="t", partitions=[asked])]
    async with opening_world() as (world, topic), world.client() as client:
        client.post(request_entity(2, 5, replica_id=-1, isolation_level=0, topics=topics))
        await asked_for(world)
        await world.open(topic, 0)
        (found,) = (await client.receive()).topics[0].partitions
        assert (found.error_code, found.offset) == (0, 0)


def test_the_wait_is_bounded_for_each_opening_not_for_each_request() -> None:
    clock = FakeClock()
    pending = Openings(clock)
    since = clock.monotonic()
    first = pending.get(KEY, since)
    assert first is not None and first.remaining_s == OPENING_WAIT_S
    clock.now_ms += int((OPENING_WAIT_S - 0.5) * 1000)
    second = pending.get(KEY, since)
    assert second is first and first.remaining_s == 0.5
    clock.now_ms += 500
    assert pending.get(KEY, since) is None and first.remaining_s == 0
    pending.end(KEY)
    assert pending.get(KEY, since) is None, "its time is over, though it was asked for anew"
    assert not pending.pending()


def test_the_wait_for_a_leader_to_be_does_not_use_up_that_for_its_opening() -> None:
    clock = FakeClock()
    pending = Openings(clock)
    coming = pending.get(KEY, clock.monotonic(), leads=False)
    assert coming is not None
    clock.now_ms += int(OPENING_WAIT_S * 1000)
    assert pending.get(KEY, clock.monotonic(), leads=False) is None, "an election that takes long"
    clock.now_ms += 1000
    since = clock.monotonic()
    assert pending.get(KEY, since) is coming and coming.remaining_s == OPENING_WAIT_S
    clock.now_ms += 500
    assert pending.get(KEY, since) is coming and coming.remaining_s == OPENING_WAIT_S - 0.5
    pending.end(KEY)
    assert coming.ended and coming.remaining_s == 0


async def test_all_who_wait_are_woken_at_the_end() -> None:
    clock = FakeClock()
    pending = Openings(clock)
    opening = pending.get(KEY, clock.monotonic())
    assert opening is not None
    waiting: list[asyncio.Task[Any]] = [asyncio.create_task(opening.wait(60)) for _ in range(3)]
    await asyncio.sleep(0)
    pending.end_all()
    await asyncio.gather(*waiting)
    assert opening.ended and opening.remaining_s == 0
