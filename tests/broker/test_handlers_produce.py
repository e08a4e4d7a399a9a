"""Produce over a real socket: appends, acknowledgements, refusals, idempotence, back-pressure."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc
import uuid
from typing import Any

import pytest

from tests.support import schema
from tests.support.fake_storage import FakeClock, FakeWorld, Process
from tests.support.kafka_client import KafkaClient, encode_request, request_entity
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.batch.batch import Compression, parse_header
from tidelog.broker.replication.inputs import NotEnoughReplicas
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Fenced
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.settings import CacheSettings, UploadSettings
from tidelog.stream.admission import EARLIER_BATCH_S

PRODUCE = 0
VERSIONS = range(3, 14)


def produce_request(
    version: int, topics: dict[Any, dict[int, bytes | None]], *, acks: int = -1, timeout: int = 10_000, **fields: Any
) -> Any:
    """`topics`: {name or id: {partition: records}}."""
    make = schema.request(PRODUCE, version).make
    data = [
        make(
            "TopicProduceData",
            **{"topic_id" if version >= 13 else "name": key},
            partition_data=[
                make("PartitionProduceData", index=index, records=records) for index, records in partitions.items()
            ],
        )
        for key, partitions in topics.items()
    ]
    fields.setdefault("transactional_id", None)
    return request_entity(PRODUCE, version, acks=acks, timeout=timeout, topic_data=data, **fields)


async def produce(client: KafkaClient, version: int, topics: dict[Any, dict[int, bytes | None]], **fields: Any) -> Any:
    client.post(produce_request(version, topics, **fields))
    return await client.receive()


def outcome(response: Any, topic: int = 0, partition: int = 0) -> Any:
    return response.responses[topic].partition_responses[partition]


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_version_appends_and_answers_with_the_base_offset(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 2)
        key = _uuid(topic.id) if version >= 13 else "t"
        first = await produce(client, version, {key: {0: batch(b"a", b"b"), 1: batch(b"c")}}, acks=-1)
        second = await produce(client, version, {key: {0: batch(b"d")}}, acks=1)
        assert [outcome(first, 0, index).base_offset for index in (0, 1)] == [0, 0]
        assert [outcome(first, 0, index).error_code for index in (0, 1)] == [0, 0]
        assert outcome(second).base_offset == 2
        assert outcome(second).log_append_time is None
        assert world.log("t").high_watermark == 3


def _uuid(raw: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=raw)


async def test_the_stored_batch_has_its_offset_and_leader_epoch_and_the_same_records() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        sent = batch(b"a" * 100, b"b", compression=Compression.GZIP)
        for _ in range(2):
            await produce(client, 9, {"t": {0: sent}})
        found = await world.log("t").read(2, 1 << 20, committed=False)
        (stored,) = found.records
        header = parse_header(stored)
        assert (header.base_offset, header.partition_leader_epoch) == (2, world.log("t").leader_epoch)
        assert bytes(stored[16:]) == sent[16:]


async def test_an_acknowledgement_waits_until_the_wal_has_confirmed() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.hold()
        client.post(produce_request(9, {"t": {0: batch(b"a")}}))
        await until(lambda: world.log("t").log_end_offset == 1, "append")
        waiting = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0.05)
        assert not waiting.done() and world.log("t").high_watermark == 0
        world.release()
        assert outcome(await waiting).error_code == 0
        assert world.log("t").high_watermark == 1


@pytest.mark.parametrize("last", ["own", "other"])
async def test_a_request_to_partitions_on_two_wals_is_acknowledged_when_both_have_confirmed(last: str) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 3)
        other = Process(FakeWorld(), FakeClock(SystemClock().time_ms()), auto_confirm=False)
        world.partitions.logs[topic.id, 1] = await other.open(partition=1)
        world.hold()
        client.post(produce_request(9, {"t": {index: batch(b"a") for index in range(3)}}))
        await until(lambda: world.log("t", 2).log_end_offset == 1, "append")
        waiting = asyncio.ensure_future(client.receive())
        confirms = [world.release, other.storage.confirm_all]
        for confirm in confirms if last == "other" else reversed(confirms):
            await asyncio.sleep(0.02)
            assert not waiting.done()
            confirm()
        response = await waiting
        assert [outcome(response, 0, index).error_code for index in range(3)] == [0, 0, 0]
        assert [world.log("t", index).high_watermark for index in range(3)] == [1, 1, 1]
        other.storage.auto_confirm = True  # for the checkpoint of the close


@pytest.mark.parametrize("confirmed", ["own", "other"])
async def test_only_what_is_on_the_wal_that_does_not_confirm_in_time_is_told_so(confirmed: str) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 3)
        other = Process(FakeWorld(), FakeClock(SystemClock().time_ms()), auto_confirm=confirmed == "other")
        world.partitions.logs[topic.id, 1] = await other.open(partition=1)
        if confirmed == "other":
            world.hold()
        response = await produce(client, 9, {"t": {index: batch(b"a") for index in range(3)}}, timeout=200)
        errors = [0, 7, 0] if confirmed == "own" else [7, 0, 7]
        assert [outcome(response, 0, index).error_code for index in range(3)] == errors
        assert [world.log("t", index).high_watermark for index in range(3)] == [int(code == 0) for code in errors]
        other.storage.auto_confirm = True  # for the checkpoint of the close


@pytest.mark.parametrize("end", ["time", "term"])
async def test_what_is_confirmed_is_told_so_when_the_rest_of_the_same_wal_is_not(end: str) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 2, open_logs=False)
        process = Process(FakeWorld(), FakeClock(SystemClock().time_ms()), auto_confirm=False)
        for index in range(2):
            world.partitions.logs[topic.id, index] = await process.open(first_stream=4 * index, partition=index)
        timeout = 200 if end == "time" else 100_000
        client.post(produce_request(9, {"t": {index: batch(b"a") for index in range(2)}}, timeout=timeout))
        await until(lambda: world.log("t", 1).log_end_offset == 1, "append")
        process.storage.confirm_to(len(process.world.wal) - 1)
        if end == "term":
            process.storage.confirm.fail(Fenced("the term has ended"))
        response = await client.receive()
        assert [outcome(response, 0, index).error_code for index in range(2)] == [0, 7 if end == "time" else 6]
        assert [world.log("t", index).high_watermark for index in range(2)] == [1, 0]
        if end == "time":
            process.storage.auto_confirm = True  # for the checkpoint of the close
        else:
            world.partitions.logs.clear()


async def test_a_producer_with_many_requests_in_flight_does_not_wait_for_each_confirmation() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.hold()
        for number in range(20):
            client.post(produce_request(9, {"t": {0: batch(b"%d" % number)}}))
        await until(lambda: world.log("t").log_end_offset == 20, "all appended while none is confirmed")
        world.release()
        assert [outcome(await client.receive()).base_offset for _ in range(20)] == list(range(20))


async def test_repeats_that_are_not_confirmed_in_their_time_leave_no_records_in_memory() -> None:
    """The bucket of a WAL on S3 may be away for long, and idempotent producers repeat what the log has already."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.hold()
        sent, repeats = batch(bytes(500_000), producer_id=5, producer_epoch=0, base_sequence=0), 20
        assert outcome(await produce(client, 9, {"t": {0: sent}}, timeout=1)).error_code == 7
        tracemalloc.start()
        try:
            for _ in range(repeats):
                assert outcome(await produce(client, 9, {"t": {0: sent}}, timeout=1)).error_code == 7
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert held < 4 * len(sent), f"{held} bytes are held for {repeats} requests that were answered"
        world.release()
        assert outcome(await produce(client, 9, {"t": {0: sent}})).base_offset == 0
        assert world.log("t").log_end_offset == 1


async def test_a_request_that_is_not_confirmed_in_its_time_is_told_so() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.hold()
        response = await produce(client, 9, {"t": {0: batch(b"a")}, "missing": {0: batch(b"a")}}, timeout=50)
        assert outcome(response).error_code == 7
        assert outcome(response, 1).error_code == 3
        told, _ = world.services.metrics.render()
        for error in ("REQUEST_TIMED_OUT", "UNKNOWN_TOPIC_OR_PARTITION"):
            assert f'tidelog_partition_errors_total{{api="Produce",error="{error}"}} 1.0'.encode() in told
        world.release()
        assert outcome(await produce(client, 9, {"t": {0: batch(b"b")}})).base_offset == 1


async def test_acks_0_gets_no_answer_and_keeps_the_order() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        for number in range(3):
            client.writer.write(encode_request(produce_request(9, {"t": {0: batch(b"%d" % number)}}, acks=0), number))
        response = await produce(client, 9, {"t": {0: batch(b"last")}})
        assert outcome(response).base_offset == 3


@pytest.mark.parametrize("version", [2, 9])
async def test_a_failed_produce_with_acks_0_closes_the_connection(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        if version == 2:
            body = struct.pack(">hii", 0, 1000, 1) + struct.pack(">h1si", 1, b"t", 1) + struct.pack(">ii", 0, 0)
            frame = struct.pack(">hhih", PRODUCE, 2, 1, -1) + body
            client.writer.write(struct.pack(">i", len(frame)) + frame)
        else:
            client.writer.write(encode_request(produce_request(9, {"missing": {0: batch(b"a")}}, acks=0), 1))
        assert await client.closed_by_broker()


async def test_errors_are_per_partition_and_carry_a_message() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        damaged = bytearray(batch(b"abc"))
        damaged[-1] ^= 1
        response = await produce(
            client,
            9,
            {
                "t": {0: bytes(damaged), 1: batch(b"good"), 7: batch(b"a")},
                "missing": {0: batch(b"a")},
            },
        )
        assert [p.error_code for p in response.responses[0].partition_responses] == [2, 0, 3]
        assert outcome(response, 1).error_code == 3
        assert "missing" in outcome(response, 1).error_message
        for records in (None, b"", batch(b"a") + batch(b"b")):
            assert outcome(await produce(client, 9, {"t": {0: records}})).error_code in (87, 2), records
        assert world.log("t", 0).log_end_offset == 0


async def test_records_without_key_are_named_on_a_compacted_topic() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", cleanup_policy="compact")
        found = outcome(await produce(client, 9, {"t": {0: batch(b"a", b"b")}}))
        assert found.error_code == 87
        assert [error.batch_index for error in found.record_errors] == [0, 1]


async def test_a_batch_over_the_topic_limit_is_too_large() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", max_message_bytes="1000")
        assert outcome(await produce(client, 9, {"t": {0: batch(bytes(2000))}})).error_code == 10


async def test_a_batch_over_the_topic_limit_once_it_is_repacked_is_too_large() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", max_message_bytes="1000", compression_type="uncompressed")
        sent = batch(bytes(60_000), compression=Compression.ZSTD)
        assert outcome(await produce(client, 9, {"t": {0: sent}})).error_code == 10
        assert world.log("t").log_end_offset == 0


@pytest.mark.parametrize("acks", [-2, 2, 100])
async def test_other_acks_are_refused(acks: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        assert outcome(await produce(client, 9, {"t": {0: batch(b"a")}}, acks=acks)).error_code == 21
        assert world.log("t").log_end_offset == 0


async def test_zstd_needs_version_7() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        sent = batch(b"a" * 100, compression=Compression.ZSTD)
        assert outcome(await produce(client, 6, {"t": {0: sent}})).error_code == 76
        assert outcome(await produce(client, 7, {"t": {0: sent}})).error_code == 0


async def test_log_append_time_is_told() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", message_timestamp_type="LogAppendTime")
        found = outcome(await produce(client, 9, {"t": {0: batch(b"a", timestamp=1000)}}))
        assert found.log_append_time is not None and found.log_append_time.year >= 2024


async def test_a_repeated_idempotent_batch_gets_its_original_offset() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")

        def numbered(sequence: int, epoch: int = 0) -> bytes:
            return batch(b"x", producer_id=5, producer_epoch=epoch, base_sequence=sequence)

        for sequence in range(3):
            assert outcome(await produce(client, 9, {"t": {0: numbered(sequence)}})).base_offset == sequence
        again = outcome(await produce(client, 9, {"t": {0: numbered(1)}}))
        assert (again.error_code, again.base_offset) == (0, 1)
        assert outcome(await produce(client, 9, {"t": {0: numbered(9)}})).error_code == 45
        assert outcome(await produce(client, 9, {"t": {0: numbered(0, epoch=1)}})).error_code == 0
        assert outcome(await produce(client, 9, {"t": {0: numbered(3)}})).error_code == 47
        assert world.log("t").log_end_offset == 4


@pytest.mark.parametrize("version", [9, 10, 12, 13])
async def test_a_broker_that_does_not_lead_names_the_leader(version: int) -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        topic = await world.controller.create_topic("t", 1, {}, assignment=[2])
        key = _uuid(topic.id) if version >= 13 else "t"
        response = await produce(client, version, {key: {0: batch(b"a")}})
        assert outcome(response).error_code == 6
        if version >= 10:
            record = world.controller.image.partition(topic.id, 0)
            assert record is not None
            leader = outcome(response).current_leader
            assert (leader.leader_id, leader.leader_epoch) == world.controller.image.leader(record) != (-1, -1)
            (endpoint,) = response.node_endpoints
            assert (endpoint.node_id, endpoint.host, endpoint.port) == (2, "127.0.0.1", 9093)


async def test_an_unknown_topic_id_is_told_from_version_13() -> None:
    async with KafkaWorld() as world, world.client() as client:
        assert outcome(await produce(client, 13, {_uuid(bytes(15) + b"\x63"): {0: batch(b"a")}})).error_code == 100


async def test_a_partition_that_is_opening_is_a_retriable_error() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", open_logs=False)
        assert outcome(await produce(client, 9, {"t": {0: batch(b"a")}})).error_code == 6


async def test_a_full_log_cache_makes_producers_wait_and_loses_nothing() -> None:
    small = CacheSettings(log_bytes=64 << 10)
    async with KafkaWorld(cache=small, upload=UploadSettings(age_ms=3_600_000)) as world, world.client() as client:
        await world.topic("t")
        for _ in range(12):
            client.post(produce_request(9, {"t": {0: batch(bytes(20 << 10))}}))
        assert [outcome(await client.receive()).base_offset for _ in range(12)] == list(range(12))
        assert world.log("t").high_watermark == 12


async def test_back_pressure_that_outlasts_the_request_is_a_storage_error() -> None:
    async with KafkaWorld(cache=CacheSettings(log_bytes=64 << 10)) as world, world.client() as client:
        await world.topic("t", 2)
        world.hold()  # what is not confirmed is not uploaded, so no room comes
        sizes: dict[int, bytes | None] = {0: batch(bytes(40 << 10)), 1: batch(bytes(40 << 10))}
        client.post(produce_request(9, {"t": sizes}, timeout=100))
        client.post(produce_request(9, {"t": {0: batch(b"later")}}, timeout=10_000))
        response = await client.receive()
        assert [outcome(response, 0, index).error_code for index in (0, 1)] == [7, 56]
        world.release()
        assert outcome(await client.receive()).error_code == 0
        assert world.log("t", 1).log_end_offset == 0


class SlowChecks(SystemClock):
    """A clock by which each append takes a second: it asks for the time of day once."""

    def __init__(self) -> None:
        self._taken_s = 0.0

    def time_ms(self) -> int:
        self._taken_s += 1.0
        return super().time_ms()

    def monotonic(self) -> float:
        return super().monotonic() + self._taken_s


async def test_others_are_served_between_batches_that_take_long_to_check() -> None:
    async with KafkaWorld(clock=SlowChecks()) as world, world.client() as client:
        await world.topic("t", 3)
        seen: set[tuple[int, ...]] = set()

        async def watch() -> None:
            while True:
                seen.add(tuple(world.log("t", index).log_end_offset for index in range(3)))
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        client.post(produce_request(9, {"t": {index: batch(b"a") for index in range(3)}}))
        client.post(produce_request(9, {"t": {2: batch(b"behind")}}))
        first, second = await client.receive(), await client.receive()
        watching.cancel()
        assert [outcome(first, 0, index).error_code for index in range(3)] == [0, 0, 0]
        assert outcome(second).base_offset == 1
        assert {(1, 0, 0), (1, 1, 0)} <= seen


async def test_what_is_not_checked_in_time_is_a_storage_error() -> None:
    async with KafkaWorld(clock=SlowChecks()) as world, world.client() as client:
        await world.topic("t", 3)
        client.post(produce_request(9, {"t": {index: batch(b"a") for index in range(3)}}, timeout=1))
        response = await client.receive()
        codes = [outcome(response, 0, index).error_code for index in range(3)]
        assert codes[1:] == [56, 56] and "too long to check" in outcome(response, 0, 2).error_message
        assert world.log("t", 2).log_end_offset == 0


async def test_what_was_not_tried_in_time_is_not_overtaken_by_the_batch_behind_it() -> None:
    def idempotent(sequence: int) -> bytes:
        return batch(b"v", producer_id=7, producer_epoch=0, base_sequence=sequence)

    async with KafkaWorld(clock=SlowChecks()) as world, world.client() as client:
        await world.topic("t", 2)
        for _ in range(int(EARLIER_BATCH_S) + 1):
            assert outcome(await produce(client, 9, {"t": {0: batch(b"a")}})).error_code == 0
        sent: dict[int, bytes | None] = {0: batch(b"a"), 1: idempotent(0)}
        assert outcome(await produce(client, 9, {"t": sent}, timeout=1), 0, 1).error_code == 56
        assert outcome(await produce(client, 9, {"t": {1: idempotent(1)}})).error_code == 6
        for sequence in (0, 1):
            assert outcome(await produce(client, 9, {"t": {1: idempotent(sequence)}})).base_offset == sequence


async def test_produced_records_are_counted() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await produce(client, 9, {"t": {0: batch(b"a", b"b", b"c")}})
        body, _ = world.services.metrics.render()
        assert b'tidelog_topic_produced_records_total{topic="t"} 3.0' in body
        assert b'tidelog_request_seconds_count{api="Produce"} 1.0' in body


async def test_acks_all_is_refused_before_the_append_when_too_few_replicas_are_in_sync() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", min_insync_replicas="2")
        asked: list[int] = []

        def one_is_in_sync(min_in_sync: int) -> None:
            asked.append(min_in_sync)
            raise NotEnoughReplicas("1 replica is in sync")

        world.storage.check_writable = one_is_in_sync
        refused = outcome(await produce(client, 9, {"t": {0: batch(b"a")}}, acks=-1))
        assert (refused.error_code, refused.error_message) == (19, "1 replica is in sync")
        assert asked == [2] and world.log("t").log_end_offset == 0
        taken = outcome(await produce(client, 9, {"t": {0: batch(b"b")}}, acks=1))
        assert (taken.error_code, taken.base_offset) == (0, 0)
        client.post(produce_request(9, {"t": {0: batch(b"c")}}, acks=0))
        await until(lambda: world.log("t").log_end_offset == 2, "the write without acknowledgement")
        assert asked == [2]


@pytest.mark.parametrize("version", [9, 10, 13])
async def test_a_write_that_waits_when_the_masters_term_ends_is_told_to_ask_for_the_leader(version: int) -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        topic = await world.topic("t", 2)
        world.hold()
        key = _uuid(topic.id) if version >= 13 else "t"
        client.post(produce_request(version, {key: {0: batch(b"a"), 1: batch(b"b")}}, timeout=60_000))
        await until(lambda: world.log("t", 1).log_end_offset == 1, "append")
        world.storage.depose(Fenced("another master is elected"))
        response = await client.receive()
        assert [outcome(response, 0, index).error_code for index in (0, 1)] == [6, 6]
        assert "another master" in outcome(response).error_message
        if version >= 10:
            assert outcome(response).current_leader.leader_id == 1
            assert [endpoint.node_id for endpoint in response.node_endpoints] == [1]
        world.partitions.logs.clear()  # their storage takes no checkpoint of a close


async def test_of_two_wals_only_what_was_written_to_the_one_whose_term_ends_is_refused() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 2)
        other = Process(FakeWorld(), FakeClock(SystemClock().time_ms()), auto_confirm=False)
        world.partitions.logs[topic.id, 1] = await other.open(partition=1)
        world.hold()
        client.post(produce_request(9, {"t": {index: batch(b"a") for index in range(2)}}, timeout=60_000))
        await until(lambda: world.log("t", 1).log_end_offset == 1, "append")
        other.storage.confirm.fail(Fenced("another master is elected"))
        waiting = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        world.release()
        response = await waiting
        assert [outcome(response, 0, index).error_code for index in (0, 1)] == [0, 6]
        del world.partitions.logs[topic.id, 1]  # its storage takes no checkpoint of a close


async def test_acks_1_waits_for_the_disk_of_this_broker_for_each_wal_and_not_for_the_quorum() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 2)
        other = Process(FakeWorld(), FakeClock(SystemClock().time_ms()), auto_confirm=False)
        other.storage.durable = ConfirmOffset()
        world.partitions.logs[topic.id, 1] = await other.open(partition=1)
        client.post(produce_request(9, {"t": {index: batch(b"a") for index in range(2)}}, acks=1, timeout=60_000))
        await until(lambda: world.log("t").high_watermark == 1 == world.log("t", 1).log_end_offset, "append")
        waiting = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0.02)
        assert not waiting.done(), "the second WAL's disk has not told"
        other.storage.durable.advance(len(other.storage.world.wal))
        response = await waiting
        assert [outcome(response, 0, index).error_code for index in (0, 1)] == [0, 0]
        assert world.log("t", 1).high_watermark == 0, "the quorum lacks it"
        del world.partitions.logs[topic.id, 1]  # its storage takes no checkpoint of a close


@pytest.mark.parametrize("version", [3, 12, 13])
async def test_clients_cannot_write_to_internal_topics(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("__consumer_offsets")
        key = _uuid(topic.id) if version >= 13 else topic.name
        response = await produce(client, version, {key: {0: batch(b"no record of a group")}})
        assert outcome(response).error_code == 17
        assert world.log("__consumer_offsets").log_end_offset == 0
