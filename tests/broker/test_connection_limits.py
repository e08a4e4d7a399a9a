"""Hostile clients at the Kafka listener: bounded, counted by reason, told apart from good ones, and forgotten."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref
from typing import Any

import pytest

from tests.broker.test_server import Scripted, frame_of, heartbeat, metadata_entity
from tests.support import schema
from tests.support.kafka_client import KafkaClient, encode_request, request_entity
from tests.support.kafka_world import KafkaWorld, batch, until
from tests.support.loops import BOTH_LOOPS
from tidelog.broker.kafka import connection
from tidelog.broker.kafka.connection import REQUEST_OVERHEAD_BYTES, Connection
from tidelog.broker.kafka.limits import FIRST_STEP_BYTES
from tidelog.broker.kafka.wire.primitives import MAX_ELEMENTS
from tidelog.broker.settings import KafkaSettings

LOOPS = BOTH_LOOPS

MIB = 1 << 20
API_VERSIONS = 18


def dropped(world: KafkaWorld) -> dict[str, int]:
    return {reason: count for reason, count in world.services.metrics.connections_dropped.items() if count}


async def nothing_left(world: KafkaWorld, *, connections: int = 0) -> None:
    await until(lambda: world.server.connections == connections, "connections are forgotten")
    await until(lambda: world.server.in_flight_bytes == 0, "memory is given back")
    await until(lambda: world.server.unread_bytes == 0, "unread output is forgotten")
    assert world.services.metrics.connections == connections


async def still_served(client: KafkaClient) -> None:
    assert (await client.send(API_VERSIONS, 0)).error_code == 0


async def test_one_address_gets_its_share_of_connections() -> None:
    settings = KafkaSettings(port=0, max_connections_per_address=2)
    async with KafkaWorld(kafka=settings) as world:
        async with world.client() as first, world.client() as second:
            await still_served(first)
            await still_served(second)
            async with world.client() as third:
                assert await third.closed_by_broker()
        await nothing_left(world)
        async with world.client() as again:
            await still_served(again)
        assert dropped(world) == {"connections_per_address": 1}


@pytest.mark.parametrize(
    ("raw", "reason", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "not_kafka", "looks like HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "not_kafka", "looks like TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not_kafka", "looks like SSH"),
        (struct.pack(">i", -5) + b"1234", "not_kafka", "-5 bytes"),
        (struct.pack(">i", 2**31 - 1), "oversized", "over the limit"),
        (struct.pack(">ihhih", 10, 9999, 0, 1, -1), "not_served", "API 9999"),
        (struct.pack(">ihhih", 10, 3, 99, 1, -1), "not_served", "version 99"),
        (struct.pack(">ih", 2, 3), "malformed", "shorter than its header"),
        (struct.pack(">ihhihi", 14, 3, 1, 1, -1, 2**31 - 1), "malformed", "exceeds the frame"),
    ],
)
async def test_what_is_no_request_is_counted_by_reason_and_told(
    raw: bytes, reason: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with KafkaWorld() as world:
        async with world.client() as client:
            client.writer.write(raw)
            assert await client.closed_by_broker()
        assert dropped(world) == {reason: 1}
        await nothing_left(world)
    (line,) = [record for record in caplog.records if record.name == "tidelog.broker.kafka.server"]
    assert said in vars(line)["error"] and vars(line)["client"] == "127.0.0.1"


async def test_a_scanner_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with KafkaWorld() as world, world.client() as good:
        for _ in range(200):
            async with world.client() as client:
                client.writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
                assert await client.closed_by_broker()
        await still_served(good)
        assert dropped(world) == {"not_kafka": 200}
        await nothing_left(world, connections=1)
    assert len(caplog.records) <= 10


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"", id="nothing at all"),
        pytest.param(b"\x00", id="a byte"),
        pytest.param(struct.pack(">i", 500) + b"x", id="a small request"),
        pytest.param(struct.pack(">i", 50 * MIB) + b"x" * 40_000, id="a large request"),
    ],
)
async def test_a_request_that_does_not_come_is_not_waited_for(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MIN_RECEIVE_BYTES_S", 1 << 20)  # how long what came may take
    settings = KafkaSettings(port=0, receive_timeout_ms=100)
    async with KafkaWorld(kafka=settings) as world:
        async with world.client() as client:
            client.writer.write(start)
            assert await client.closed_by_broker()
        assert dropped(world) == {"half_sent": 1}
        await nothing_left(world)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"", id="nothing at all"),
        pytest.param(struct.pack(">i", 500) + b"x", id="a small request"),
        pytest.param(struct.pack(">i", 50 * MIB) + b"x" * 40_000, id="a large request"),
        pytest.param(struct.pack(">i", -5), id="no request"),
    ],
)
async def test_who_leaves_is_freed_without_a_search_for_cycles(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process collects everything once an hour or when it has grown: buffers cannot wait for that."""
    made: list[weakref.ref[Connection]] = []
    received = asyncio.Event()
    connection_made, buffer_updated = Connection.connection_made, Connection.buffer_updated

    def note_made(connection: Connection, transport: asyncio.BaseTransport) -> None:
        made.append(weakref.ref(connection))
        connection_made(connection, transport)

    def note_received(connection: Connection, count: int) -> None:
        received.set()
        buffer_updated(connection, count)

    monkeypatch.setattr(Connection, "connection_made", note_made)
    monkeypatch.setattr(Connection, "buffer_updated", note_received)
    async with KafkaWorld() as world:
        gc.collect()
        gc.disable()
        try:
            async with world.client() as client:
                await until(lambda: world.server.connections == 1, "it is connected")
                client.writer.write(start)
                await client.writer.drain()
                await until(lambda: not start or received.is_set(), "it came in")
            await until(lambda: [each() for each in made] == [None], "it is freed")
        finally:
            gc.enable()


async def test_dripping_bytes_buys_no_time() -> None:
    settings = KafkaSettings(port=0, receive_timeout_ms=100)
    async with KafkaWorld(kafka=settings) as world, world.client() as client:
        client.writer.write(struct.pack(">i", 1000))

        async def drip() -> None:
            while True:
                client.writer.write(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.ensure_future(drip())
        assert await client.closed_by_broker()
        dripping.cancel()
        assert dropped(world) == {"half_sent": 1}


async def test_who_waits_for_an_answer_or_between_requests_is_not_late() -> None:
    scripted = Scripted()
    settings = KafkaSettings(port=0, receive_timeout_ms=50)
    world = KafkaWorld(kafka=settings, apis=scripted.apis)
    async with world, world.client() as busy, world.client() as quiet:
        await still_served(quiet)
        busy.writer.write(frame_of(heartbeat(), 1))
        await until(lambda: len(scripted.started) == 1, "start")
        busy.writer.write(frame_of(heartbeat(), 2) + b"\x00\x00")  # the broker does not read on while it works
        async with world.client() as late:
            assert await late.closed_by_broker()  # the time-out has passed for those who are late
        scripted.answer("s1")
        assert await busy.receive_frame()
        await still_served(quiet)


async def test_hundreds_of_announcements_reserve_little_and_good_clients_are_served() -> None:
    async with KafkaWorld() as world, world.client() as good:
        await still_served(good)
        hostile = [world.client() for _ in range(300)]
        for client in hostile:
            await client.__aenter__()
            client.writer.write(struct.pack(">i", 100 * MIB) + b"x")  # together they announce 30 GB
        await until(lambda: world.server.connections == 301, "all are in")
        await until(lambda: world.server.in_flight_bytes >= 300 * FIRST_STEP_BYTES, "all have begun")
        assert world.server.in_flight_bytes <= 300 * FIRST_STEP_BYTES + 512 * MIB // 4
        await still_served(good)
        body = frame_of(metadata_entity())[4:]
        large = body + bytes(4 * MIB - len(body))  # bytes after a request are ignored
        good.writer.write(struct.pack(">i", len(large)) + large)
        assert await good.receive_frame()
        for client in hostile:
            client.writer.transport.abort()
        await nothing_left(world, connections=1)


async def answer_all(scripted: Scripted) -> None:
    while True:
        scripted.answer(*list(scripted.waiting))
        await asyncio.sleep(0)


async def test_a_swarm_of_tiny_requests_is_charged_for_what_it_costs() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world:
        async with world.client() as client:
            client.writer.write(frame_of(heartbeat(), 1))
            await until(lambda: len(scripted.started) == 1, "start")
            client.writer.write(frame_of(heartbeat(), 2) * 1000)
            await until(lambda: world.server.in_flight_bytes > 1000 * REQUEST_OVERHEAD_BYTES, "charged")
        answering = asyncio.ensure_future(answer_all(scripted))
        await nothing_left(world)
        answering.cancel()


def fetch_entity(partitions: list[int], max_bytes: int = 50 * MIB) -> Any:
    make = schema.request(1, 11).make
    wanted = [
        make(
            "FetchPartition",
            partition=index,
            current_leader_epoch=-1,
            fetch_offset=0,
            log_start_offset=-1,
            partition_max_bytes=max_bytes,
        )
        for index in partitions
    ]
    return request_entity(
        1,
        11,
        replica_id=-1,
        max_wait=0,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=(make("FetchTopic", topic="t", partitions=tuple(wanted)),),
        forgotten_topics_data=(),
        rack_id="",
    )


async def test_clients_that_never_read_their_fetches_are_dropped_and_readers_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidelog.broker.kafka.limits.STALL_S", 0.3)

    settings = KafkaSettings(port=0, max_unread_bytes=8 * MIB, message_max_bytes=2 * MIB, receive_timeout_ms=1000)
    async with KafkaWorld(kafka=settings) as world, world.client() as good:
        await still_served(good)
        await world.topic("t")
        for _ in range(8):
            world.log("t").append(memoryview(bytearray(batch(b"x" * MIB))))
        await until(lambda: world.log("t").high_watermark == 8, "visible")
        hostile = [world.client() for _ in range(8)]
        for client in hostile:
            await client.__aenter__()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.writer.write(encode_request(fetch_entity([0]), 1) * 3)
        await until(lambda: dropped(world).get("slow_reader", 0) > 0, "who does not read is dropped")
        assert world.server.unread_bytes <= 2 * 8 * MIB
        for client in hostile:
            client.writer.transport.abort()
        await until(lambda: world.server.unread_bytes == 0, "forgotten")
        good.post(fetch_entity([0]))
        (topic,) = (await good.receive()).responses
        assert len(topic.partitions[0].records) > 7 * MIB
        await nothing_left(world, connections=1)


async def test_a_partition_fetched_twice_in_a_request_is_read_once() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.log("t").append(memoryview(bytearray(batch(b"x" * 1000))))
        await until(lambda: world.log("t").high_watermark == 1, "visible")
        client.post(fetch_entity([0, 0, 0]))
        (topic,) = (await client.receive()).responses
        assert [partition.error_code for partition in topic.partitions] == [0, 42, 42]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(struct.pack(">hhih", 3, 1, 1, -1) + struct.pack(">i", MAX_ELEMENTS + 1)
                     + struct.pack(">h1s", 1, b"t") * (MAX_ELEMENTS + 1), id="Metadata"),
        pytest.param(struct.pack(">hhih", 0, 7, 1, -1) + struct.pack(">hhiih1si", -1, 1, 0, 1, 1, b"t", MAX_ELEMENTS)
                     + struct.pack(">ii", 0, -1) * MAX_ELEMENTS, id="Produce"),
        pytest.param(struct.pack(">hhih", 1, 4, 1, -1)
                     + struct.pack(">iiiibih1si", -1, 0, 0, 0, 0, 1, 1, b"t", MAX_ELEMENTS)
                     + struct.pack(">iqi", 0, 0, 0) * MAX_ELEMENTS, id="Fetch"),
        pytest.param(struct.pack(">hhihB", 18, 3, 1, -1, 33) + b"\x00\x00" * 33, id="tags"),
    ],
)  # fmt: skip
async def test_requests_with_too_much_in_them_are_refused(raw: bytes) -> None:
    async with KafkaWorld() as world, world.client() as client:
        client.writer.write(struct.pack(">i", len(raw)) + raw)
        assert await client.closed_by_broker()
        assert set(dropped(world)) <= {"oversized", "malformed"} and dropped(world)
        await nothing_left(world)


async def test_a_failed_produce_without_acks_is_counted_and_told_at_a_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async with KafkaWorld() as world:
        raw = struct.pack(">hhih", 0, 7, 1, -1) + struct.pack(">hhiih1sii", -1, 0, 1000, 1, 1, b"t", 1, 0)
        raw += struct.pack(">i", -1)
        for _ in range(30):
            async with world.client() as client:
                client.writer.write(struct.pack(">i", len(raw)) + raw)
                assert await client.closed_by_broker()
        assert dropped(world) == {"unanswerable": 30}
        await nothing_left(world)
    assert len([record for record in caplog.records if record.name == "tidelog.broker.kafka.server"]) == 10


async def test_connect_and_reset_leaves_nothing() -> None:
    async with KafkaWorld() as world, world.client() as good:
        address = world.server.address
        for turn in range(300):
            _, writer = await asyncio.open_connection(*address)
            if turn % 2:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER 0: close sends RST
            writer.transport.abort()
        await still_served(good)
        await nothing_left(world, connections=1)
        assert dropped(world) == {}
