"""The listener and its connections, over raw sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable
from functools import partial
from typing import Any

import pytest

from tests.support import schema
from tests.support.kafka_client import encode_request, request_entity
from tests.support.kafka_world import APIS, KafkaWorld, until
from tests.support.loops import BOTH_LOOPS
from tidelog.broker.kafka.services import Answer, ApiHandler, RequestContext
from tidelog.broker.kafka.wire.fetch import FetchResponse, FetchTopicResponse, PartitionData
from tidelog.broker.kafka.wire.messages.groups import HeartbeatResponse
from tidelog.broker.kafka.wire.produce import ProduceResponse
from tidelog.broker.settings import KafkaSettings
from tidelog.controller.model.features import METADATA_LEVELS
from tidelog.runtime.task_errors import ERRORS

PRODUCE, HEARTBEAT, API_VERSIONS = 0, 12, 18


LOOPS = BOTH_LOOPS


def has_length(entries: list[str], length: int) -> bool:
    return len(entries) == length


class Scripted:
    """A pipelined API (Produce) and a sequential one (Heartbeat), answered when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.waiting: dict[str, asyncio.Future[Any]] = {}
        self.answers: dict[str, Answer[Any]] = {}
        self.contexts: list[RequestContext] = []

    @property
    def apis(self) -> list[ApiHandler]:
        return [ApiHandler(PRODUCE, 3, 9, self.pipelined), ApiHandler(HEARTBEAT, 0, 4, self.sequential)]

    def pipelined(self, context: RequestContext, request: Any) -> Awaitable[Any]:
        name = f"p{context.correlation_id}"
        self.started.append(name)
        self.contexts.append(context)
        answer = self.answers[name] = Answer()
        return answer

    async def sequential(self, context: RequestContext, request: Any) -> Any:
        return await self._start(f"s{context.correlation_id}", context)

    def _start(self, name: str, context: RequestContext) -> asyncio.Future[Any]:
        self.started.append(name)
        self.contexts.append(context)
        future = self.waiting[name] = asyncio.get_running_loop().create_future()
        return future

    def answer(self, *names: str) -> None:
        for name in names:
            if name.startswith("p"):
                self.answers.pop(name).give(ProduceResponse([], throttle_time_ms=int(name[1:])))
            else:
                future = self.waiting.pop(name)
                future.set_result(HeartbeatResponse(throttle_time_ms=int(name[1:]), error_code=0))


def produce_entity() -> Any:
    return request_entity(PRODUCE, 9, transactional_id=None, acks=1, timeout=1000, topic_data=())


def heartbeat() -> Any:
    return request_entity(HEARTBEAT, 4, group_id="g", generation_id=1, member_id="m", group_instance_id=None)


def frame_of(entity: Any, correlation_id: int = 1) -> bytes:
    return encode_request(entity, correlation_id)


def metadata_entity(version: int = 12) -> Any:
    return request_entity(
        3, version, topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False
    )


# --- ApiVersions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(5))
async def test_api_versions_lists_what_is_served(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        software = {"client_software_name": "test", "client_software_version": "1.0"} if version >= 3 else {}
        response = await client.send(API_VERSIONS, version, **software)
        ranges = {key.api_key: (key.min_version, key.max_version) for key in response.api_keys}
        assert response.error_code == 0
        assert ranges[0] == (0, 13) and ranges[1] == (4, 18) and ranges[3] == (0, 13) and ranges[18] == (0, 4)
        assert set(ranges) == {api.api_key for api in APIS} | {18}
        if version >= 3:
            finalized = {each.name: each.max_version_level for each in response.finalized_features}
            assert finalized["metadata.version"] == METADATA_LEVELS.newest
            assert [each.name for each in response.supported_features if each.min_version == 0] == (
                ["transaction.version"] if version >= 4 else []
            ), "older clients cannot decode a minimum of 0"
            assert response.finalized_features_epoch >= 0


async def test_an_unknown_version_of_api_versions_is_answered_in_version_0_and_the_connection_kept() -> None:
    async with KafkaWorld() as world, world.client() as client:
        header = struct.pack(">hhih4s", API_VERSIONS, 99, 5, 4, b"test") + b"\x00" + b"whatever comes next"
        client.writer.write(struct.pack(">i", len(header)) + header)
        raw = await client.receive_frame()
        correlation_id, error, count = struct.unpack_from(">ihi", raw)
        keys = [struct.unpack_from(">hhh", raw, 10 + 6 * n) for n in range(count)]
        assert (correlation_id, error) == (5, 35) and (18, 0, 4) in keys and len(keys) == len(APIS) + 1
        assert (await client.send(API_VERSIONS, 0)).error_code == 0


@pytest.mark.parametrize("name", ["", "-bad", "spaced out", "semi;colon", "x" * 1_000])
async def test_a_client_that_names_itself_illegally_is_told(name: str) -> None:
    async with KafkaWorld() as world, world.client() as client:
        response = await client.send(API_VERSIONS, 3, client_software_name=name, client_software_version="1")
        assert response.error_code == 42


async def test_what_a_client_says_of_itself_goes_with_its_connection() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world, world.client() as client:
        await client.send(API_VERSIONS, 3, client_software_name="test-lib", client_software_version="1.2")
        client.post(produce_entity())
        await until(lambda: bool(scripted.started), "start")
        context = scripted.contexts[0]
        port = context.extra.pop("client_source_port")
        assert 0 < int(port) < 1 << 16
        assert context.extra == {"client_software_name": "test-lib", "client_software_version": "1.2"}
        assert (context.client_id, context.client_host) == ("test", "127.0.0.1")
        scripted.answer("p2")


# --- bytes ---------------------------------------------------------------------------------------------------------


async def test_a_request_may_come_byte_by_byte() -> None:
    async with KafkaWorld() as world, world.client() as client:
        for byte in frame_of(metadata_entity()):
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert await client.receive_frame()


async def test_many_requests_may_come_in_one_piece() -> None:
    async with KafkaWorld() as world, world.client() as client:
        client.writer.write(b"".join(frame_of(metadata_entity(), number) for number in range(3000)))
        for number in range(3000):
            (correlation_id,) = struct.unpack_from(">i", await client.receive_frame())
            assert correlation_id == number


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="tls"),
        pytest.param(struct.pack(">i", -1), id="negative size"),
        pytest.param(struct.pack(">i", 0), id="empty frame"),
        pytest.param(struct.pack(">i", 2**31 - 1), id="two gigabytes"),
        pytest.param(struct.pack(">ih", 2, 3), id="shorter than a header"),
        pytest.param(struct.pack(">ihhih", 10, 9999, 0, 1, -1), id="unknown API"),
        pytest.param(struct.pack(">ihhih", 10, 3, 99, 1, -1), id="unknown version"),
        pytest.param(struct.pack(">ihhih", 10, 3, -1, 1, -1), id="negative version"),
        pytest.param(struct.pack(">ihhihi", 14, 3, 1, 1, -1, 2**31 - 1), id="hostile array length"),
        pytest.param(struct.pack(">ihhih", 10, 0, 9, 1, -1), id="Produce without a body"),
        pytest.param(struct.pack(">ihhih", 10, 3, 1, 1, 999), id="client id past the end"),
    ],
)
async def test_what_is_no_request_closes_the_connection_and_only_that(raw: bytes) -> None:
    async with KafkaWorld() as world, world.client() as other:
        async with world.client() as client:
            client.writer.write(raw)
            assert await client.closed_by_broker()
        assert (await other.send(API_VERSIONS, 0)).error_code == 0
        assert world.server.in_flight_bytes == 0


async def test_a_frame_over_the_limit_is_refused_before_memory_is_spent() -> None:
    settings = KafkaSettings(port=0, max_request_bytes=100_000)
    async with KafkaWorld(kafka=settings) as world, world.client() as client:
        client.writer.write(struct.pack(">i", 100_001))
        assert await client.closed_by_broker()


@pytest.mark.parametrize("size", [500, 500_000])
async def test_a_request_cut_off_by_its_client_leaves_nothing_behind(size: int) -> None:
    async with KafkaWorld() as world:
        async with world.client() as client:
            client.writer.write(struct.pack(">i", size) + b"x" * (size // 2))
            if size > 100_000:
                await until(lambda: world.server.in_flight_bytes == size, "reserved")
            else:
                await until(lambda: world.server.connections == 1, "connected")
        await until(lambda: world.server.connections == 0, "gone")
        assert world.server.in_flight_bytes == 0


# --- order ---------------------------------------------------------------------------------------------------------


async def test_pipelined_requests_start_at_once_and_are_answered_in_order() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world, world.client() as client:
        for _ in range(3):
            client.post(produce_entity())
        await until(lambda: scripted.started == ["p1", "p2", "p3"], "all have started")
        scripted.answer("p3", "p2")
        first = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0.02)
        assert not first.done()
        scripted.answer("p1")
        times = [await first, await client.receive(), await client.receive()]
        assert [schema.to_ms(response.throttle_time) for response in times] == [1, 2, 3]


async def test_answers_given_at_once_keep_the_order_and_let_others_go_first() -> None:
    scripted = Scripted()
    loop = asyncio.get_running_loop()
    turns: list[int] = []
    turn = 0

    def tick() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(tick)

    def at_once(context: RequestContext, request: Any) -> Awaitable[Any]:
        turns.append(turn)
        answer: Answer[HeartbeatResponse] = Answer()
        answer.give(HeartbeatResponse(throttle_time_ms=context.correlation_id, error_code=0))
        return answer

    apis = [scripted.apis[0], ApiHandler(HEARTBEAT, 0, 4, at_once, sequential=True)]
    async with KafkaWorld(apis=apis) as world, world.client() as client:
        for entity in (produce_entity(), *[heartbeat()] * 5):
            client.post(entity)
        await until(lambda: scripted.started == ["p1"], "start")
        await asyncio.sleep(0.01)
        assert turns == []  # a sequential request waits for those before
        tick()
        scripted.answer("p1")
        times = [schema.to_ms((await client.receive()).throttle_time) for _ in range(6)]
        assert times == [1, 2, 3, 4, 5, 6]
        assert len(set(turns)) == 5
        await until(lambda: world.server.in_flight_bytes == 0, "all given back")


async def test_any_other_request_waits_for_those_before_and_holds_those_after() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world, world.client() as client:
        for entity in (produce_entity(), heartbeat(), produce_entity(), heartbeat()):
            client.post(entity)
        started = scripted.started
        for name, so_far in (("p1", 1), ("s2", 2), ("p3", 3), ("s4", 4)):
            await until(partial(has_length, started, so_far), name)
            await asyncio.sleep(0.01)
            assert started[-1] == name and len(started) == so_far
            scripted.answer(name)
        assert [schema.to_ms((await client.receive()).throttle_time) for _ in range(4)] == [1, 2, 3, 4]


async def test_the_pipeline_of_a_connection_is_bounded() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world, world.client() as client:
        for _ in range(300):
            client.post(produce_entity())
        await until(lambda: len(scripted.started) == 128, "the bound is reached")
        await asyncio.sleep(0.02)
        assert len(scripted.started) == 128
        for number in range(1, 301):
            await until(partial(scripted.answers.__contains__, f"p{number}"), "start")
            scripted.answer(f"p{number}")
            assert schema.to_ms((await client.receive()).throttle_time) == number
        assert world.server.in_flight_bytes == 0


# --- bounds --------------------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_stops_being_served() -> None:
    started = 0

    async def big(context: RequestContext, request: Any) -> Any:
        nonlocal started
        started += 1
        partition = PartitionData(0, records=[bytes(1 << 20)])
        return FetchResponse([FetchTopicResponse("t", b"", [partition])])

    async with KafkaWorld(apis=[ApiHandler(1, 4, 11, big)]) as world, world.client() as client:
        one = request_entity(1, 4, replica_id=-1, max_wait=0, min_bytes=0, max_bytes=1, isolation_level=0, topics=())
        count = 60
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(b"".join(frame_of(one, number) for number in range(count)))
        await until(lambda: started > 0, "start")
        before = -1
        while before != started:  # until nothing moves any more
            before = started
            await asyncio.sleep(0.1)
        assert started < count
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for number in range(count):
            (correlation_id,) = struct.unpack_from(">i", await client.receive_frame())
            assert correlation_id == number
        assert started == count and world.server.in_flight_bytes == 0


async def test_large_requests_wait_for_the_brokers_memory() -> None:
    scripted = Scripted()
    settings = KafkaSettings(port=0, max_in_flight_bytes=450_000)
    async with KafkaWorld(kafka=settings, apis=scripted.apis) as world:
        async with world.client() as first, world.client() as second:
            body = frame_of(produce_entity())[4:]
            large = body + bytes(300_000 - len(body))  # bytes after a request are ignored
            for client in (first, second):
                client.writer.write(struct.pack(">i", len(large)) + large)
            await until(lambda: len(scripted.started) == 1, "one is served")
            await asyncio.sleep(0.05)
            assert len(scripted.started) == 1 and 300_000 <= world.server.in_flight_bytes <= 450_000
            scripted.answer("p1")
            await until(lambda: len(scripted.started) == 2, "then the other")
            scripted.answer("p1")
            assert await first.receive_frame() and await second.receive_frame()
        await until(lambda: world.server.in_flight_bytes == 0, "all given back")


async def test_frames_that_fill_the_bound_together_still_come_in() -> None:
    scripted = Scripted()
    settings = KafkaSettings(port=0, max_in_flight_bytes=400_000)
    world = KafkaWorld(kafka=settings, apis=scripted.apis)
    async with world, world.client() as first, world.client() as second:
        body = frame_of(produce_entity())[4:]
        large = struct.pack(">i", 200_000) + body + bytes(200_000 - len(body))
        for client in (first, second):
            client.writer.write(large[:1000])
        await until(lambda: world.server.in_flight_bytes >= 100_000, "both are begun")
        for client in (first, second):
            client.writer.write(large[1000:])
        await until(lambda: len(scripted.started) == 2, "both are served")


async def test_connections_over_the_bound_are_closed_at_once() -> None:
    settings = KafkaSettings(port=0, max_connections=2)
    async with KafkaWorld(kafka=settings) as world:
        async with world.client() as first, world.client() as second:
            assert (await first.send(API_VERSIONS, 0)).error_code == 0
            assert (await second.send(API_VERSIONS, 0)).error_code == 0
            async with world.client() as third:
                assert await third.closed_by_broker()
            assert (await first.send(API_VERSIONS, 0)).error_code == 0
        await until(lambda: world.server.connections == 0, "closed")
        async with world.client() as again:
            assert (await again.send(API_VERSIONS, 0)).error_code == 0
        assert world.services.metrics.connections_refused == 1


async def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    scripted = Scripted()
    settings = KafkaSettings(port=0, idle_timeout_ms=200)
    world = KafkaWorld(kafka=settings, apis=scripted.apis)
    async with world, world.client() as idle, world.client() as half, world.client() as busy:
        half.writer.write(b"\x00\x00\x10\x00half")
        busy.post(produce_entity())
        assert await idle.closed_by_broker() and await half.closed_by_broker()
        scripted.answer("p1")
        assert await busy.receive()


async def test_a_large_request_other_than_produce_is_refused() -> None:
    async with KafkaWorld() as world, world.client() as client:
        body = frame_of(metadata_entity())[4:]
        large = body + bytes((16 << 20) + 1 - len(body))
        client.writer.write(struct.pack(">i", len(large)) + large)
        assert await client.closed_by_broker()


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises at once", "raises later", "answers nonsense"])
async def test_a_defect_in_a_handler_ends_one_connection(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def at_once(context: RequestContext, request: Any) -> Awaitable[Any]:
        raise RuntimeError("defect")

    async def later(context: RequestContext, request: Any) -> Any:
        await asyncio.sleep(0)
        raise RuntimeError("defect")

    async def nonsense(context: RequestContext, request: Any) -> Any:
        return "nonsense"

    handle = {"raises at once": at_once, "raises later": later, "answers nonsense": nonsense}[how]
    heard: list[tuple[str, BaseException, bool]] = []
    unlisten = ERRORS.listen(lambda *told: heard.append(told))

    async with KafkaWorld(apis=[ApiHandler(HEARTBEAT, 0, 4, handle)]) as world, world.client() as other:
        async with world.client() as client:
            client.post(heartbeat())
            assert await client.closed_by_broker()
        assert (await other.send(API_VERSIONS, 0)).error_code == 0
        assert world.server.in_flight_bytes == 0
        assert any("unexpected error of Kafka requests" in problem for problem in ERRORS.problems())
    unlisten()
    assert [record for record in caplog.records if record.exc_info]
    assert [(place, ended) for place, _, ended in heard] == [("Kafka requests", False)]


async def test_an_answer_for_a_client_that_has_left_is_dropped() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world:
        async with world.client() as client:
            client.post(produce_entity())
            client.post(produce_entity())
            await until(lambda: len(scripted.started) == 2, "start")
        await until(lambda: world.server.connections == 0, "gone")
        scripted.answer("p2", "p1")
        await until(lambda: world.server.in_flight_bytes == 0, "given back")


# --- close ---------------------------------------------------------------------------------------------------------


async def test_close_answers_what_was_started_and_takes_nothing_more() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world, world.client() as busy, world.client() as idle:
        busy.post(produce_entity())
        await until(lambda: len(scripted.started) == 1, "start")
        closing = asyncio.ensure_future(world.server.close(grace_s=10))
        assert await idle.closed_by_broker()
        busy.post(produce_entity())
        await asyncio.sleep(0.05)
        assert scripted.started == ["p1"] and not closing.done()
        scripted.answer("p1")
        assert schema.to_ms((await busy.receive()).throttle_time) == 1
        await closing
        assert world.server.connections == 0
        with pytest.raises(OSError):
            await asyncio.open_connection(*world.server.address)


async def test_close_cuts_what_is_not_done_at_the_deadline() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world, world.client() as client:
        client.post(heartbeat())
        await until(lambda: len(scripted.started) == 1, "start")
        await world.server.close(grace_s=0.05)
        assert world.server.connections == 0 and scripted.waiting["s1"].cancelled()


async def test_a_cut_ends_every_connection_at_once_and_takes_no_new_one() -> None:
    scripted = Scripted()
    async with KafkaWorld(apis=scripted.apis) as world, world.client() as busy, world.client() as idle:
        busy.post(produce_entity())
        await until(lambda: len(scripted.started) == 1, "start")
        world.server.cut()
        scripted.answers["p1"].give(ProduceResponse([], throttle_time_ms=1))  # too late: it must not be heard
        assert await busy.closed_by_broker()
        assert await idle.closed_by_broker()
        assert world.server.connections == 0 and world.server.in_flight_bytes == 0
        async with world.client() as late:
            assert await late.closed_by_broker()
