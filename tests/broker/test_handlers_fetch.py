"""Fetch over a real socket: whole batches, limits, long polls, epochs, cold reads, errors."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, cast

import pytest

from tests.support import schema
from tests.support.guarded import append_guarded
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.batch.batch import iter_batches, iter_records
from tidelog.broker.kafka.handlers import fetch as fetch_handler
from tidelog.broker.kafka.handlers.fetch import COLD_READ_TIMEOUT_S, JUST_CAME_S, MAX_COLD_READS, handle
from tidelog.broker.kafka.services import Answer, RequestContext
from tidelog.broker.kafka.wire.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    FetchTopicResponse,
)
from tidelog.broker.settings import KafkaSettings
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.store import View

FETCH = 1
VERSIONS = range(4, 18)
BIG = 1 << 20


def fetch_request(
    version: int,
    topics: dict[Any, dict[int, int | dict[str, Any]]],
    *,
    max_wait: int = 0,
    min_bytes: int = 1,
    max_bytes: int = BIG,
    isolation_level: int = 0,
    **fields: Any,
) -> Any:
    """`topics`: {name or id: {partition: offset or fields}}."""
    make = schema.request(FETCH, version).make

    def partition(index: int, wanted: int | dict[str, Any]) -> Any:
        values = {"fetch_offset": wanted} if isinstance(wanted, int) else wanted
        values = {"partition_max_bytes": BIG, "log_start_offset": -1, **values}
        return make("FetchPartition", partition=index, **values)

    asked = [
        make(
            "FetchTopic",
            **{"topic_id" if version >= 13 else "topic": key},
            partitions=[partition(index, wanted) for index, wanted in partitions.items()],
        )
        for key, partitions in topics.items()
    ]
    if version >= 7:
        fields = {"session_id": 0, "session_epoch": -1, "forgotten_topics_data": (), **fields}
    if version >= 11:
        fields.setdefault("rack_id", "")
    if version < 15:
        fields.setdefault("replica_id", -1)
    return request_entity(
        FETCH,
        version,
        max_wait=max_wait,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation_level=isolation_level,
        topics=asked,
        **fields,
    )


def metadata_request() -> Any:
    return request_entity(3, 4, topics=None, allow_auto_topic_creation=False)


async def fetch(client: KafkaClient, version: int, topics: dict[Any, dict[int, Any]], **fields: Any) -> Any:
    client.post(fetch_request(version, topics, **fields))
    return await client.receive()


def part(response: Any, topic: int = 0, partition: int = 0) -> Any:
    return response.responses[topic].partitions[partition]


def values(records: bytes) -> list[tuple[int, bytes | None]]:
    return [
        (record.offset, record.value) for _, one in iter_batches(memoryview(records)) for record in iter_records(one)
    ]


def append(world: KafkaWorld, topic: str, *contents: bytes, partition: int = 0, **options: Any) -> None:
    world.log(topic, partition).append(memoryview(bytearray(batch(*contents, **options))))


async def appended(world: KafkaWorld, topic: str, *batches: bytes, partition: int = 0) -> None:
    """Append one batch for each value, confirmed."""
    for value in batches:
        append(world, topic, value, partition=partition)
    log = world.log(topic, partition)
    await until(lambda: log.high_watermark == log.log_end_offset, "confirmation")


def key_of(version: int, topic: Any) -> Any:
    return uuid.UUID(bytes=topic.id) if version >= 13 else topic.name


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_version_returns_the_batches_and_the_offsets(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 2)
        await appended(world, "t", b"a", b"b", b"c")
        response = await fetch(client, version, {key_of(version, topic): {0: 1, 1: 0}})
        found = part(response)
        assert values(found.records) == [(1, b"b"), (2, b"c")]
        assert (found.error_code, found.high_watermark, found.last_stable_offset) == (0, 3, 3)
        assert part(response, 0, 1).records == b""
        if version >= 7:
            assert (response.error_code, response.session_id) == (0, 0)
        if version >= 13:
            assert response.responses[0].topic_id == uuid.UUID(bytes=topic.id)
        else:
            assert response.responses[0].topic == "t"


async def test_the_whole_batch_that_contains_the_offset_is_returned() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        append(world, "t", b"a", b"b", b"c")
        await appended(world, "t", b"d")
        assert values(part(await fetch(client, 11, {"t": {0: 2}})).records) == list(enumerate([b"a", b"b", b"c", b"d"]))


async def test_the_first_partition_with_data_sends_a_batch_over_any_limit() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 3)
        for index in (1, 2):
            await appended(world, "t", bytes(5000), bytes(5000), partition=index)
        limits = {index: {"fetch_offset": 0, "partition_max_bytes": 10} for index in range(3)}
        response = await fetch(client, 11, {"t": limits}, max_bytes=100)
        assert [len(values(part(response, 0, index).records)) for index in range(3)] == [0, 1, 0]
        response = await fetch(client, 11, {"t": {1: 0, 2: 0}}, max_bytes=12_000)
        assert [len(values(part(response, 0, index).records)) for index in range(2)] == [2, 0]
        response = await fetch(client, 11, {"t": {1: limits[1], 2: 0}})
        assert [len(values(part(response, 0, index).records)) for index in range(2)] == [1, 2]


async def test_a_response_never_exceeds_the_brokers_own_limit_by_more_than_a_batch() -> None:
    settings = KafkaSettings(port=0, fetch_max_bytes=6000)
    async with KafkaWorld(kafka=settings) as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", *[bytes(2000)] * 10)
        assert len(values(part(await fetch(client, 11, {"t": {0: 0}})).records)) == 2


async def test_a_long_poll_waits_for_the_high_watermark() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        world.hold()
        client.post(fetch_request(11, {"t": {0: 0, 1: 0}}, max_wait=20_000))
        append(world, "t", b"a", partition=1)
        waiting = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0.05)
        assert not waiting.done(), "what is not confirmed must not be seen"
        world.release()
        response = await waiting
        assert values(part(response, 0, 1).records) == [(0, b"a")]
        assert part(response).records == b""


async def test_a_long_poll_ends_at_its_time_with_what_there_is() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", b"a")
        loop = asyncio.get_running_loop()
        started = loop.time()
        response = await fetch(client, 11, {"t": {0: 1}}, max_wait=100)
        assert part(response).records == b"" and loop.time() - started >= 0.09
        started = loop.time()
        response = await fetch(client, 11, {"t": {0: 0}}, max_wait=100, min_bytes=10_000)
        assert values(part(response).records) == [(0, b"a")] and loop.time() - started >= 0.09


async def test_min_bytes_is_waited_for() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=20_000, min_bytes=4000))
        waiting = asyncio.ensure_future(client.receive())
        for _ in range(3):
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await appended(world, "t", bytes(1000))
        await appended(world, "t", bytes(1000))
        assert len(values(part(await waiting).records)) == 4


@pytest.mark.parametrize(
    ("limits", "min_bytes"),
    [
        ({"partition_max_bytes": 10_000}, 10_000),  # the bytes of three batches, and not of four
        ({"max_bytes": 10_000}, 10_000),
        ({"max_bytes": 10_000}, 50_000),  # more than the consumer lets a response have
    ],
)
@pytest.mark.parametrize("is_cold", [False, True])
async def test_what_does_not_fit_into_a_response_is_not_waited_for(
    limits: dict[str, int], min_bytes: int, is_cold: bool
) -> None:
    """A consumer that lagged got one response in each `max_wait`, however much there was for it."""
    limits = {"partition_max_bytes": BIG, "max_bytes": BIG, **limits}
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", *[bytes(3000)] * 5)
        if is_cold:
            await world.chill()
        asked = {"fetch_offset": 0, "partition_max_bytes": limits["partition_max_bytes"]}
        client.post(
            fetch_request(11, {"t": {0: asked}}, max_bytes=limits["max_bytes"], min_bytes=min_bytes, max_wait=60_000)
        )
        async with asyncio.timeout(30):
            assert len(values(part(await client.receive()).records)) == 3


async def test_what_one_read_of_the_bucket_leaves_is_not_waited_for() -> None:
    """A read takes a few objects at a time, which may be small."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        for _ in range(20):
            await appended(world, "t", bytes(1000))
            await world.chill()
        client.post(fetch_request(11, {"t": {0: 0}}, min_bytes=15_000, max_wait=60_000))
        async with asyncio.timeout(30):
            assert values(part(await client.receive()).records)


@pytest.mark.parametrize("is_cold", [False, True])
async def test_all_that_there_is_counts_as_it_is_for_min_bytes(is_cold: bool) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        await appended(world, "t", *[bytes(3000)] * 3)
        await appended(world, "t", bytes(3000), partition=1)
        if is_cold:
            await world.chill()
        asked: dict[int, Any] = {index: {"fetch_offset": 0, "partition_max_bytes": 10_000} for index in range(2)}
        client.post(fetch_request(11, {"t": asked}, min_bytes=15_000, max_wait=60_000))
        waiting = asyncio.ensure_future(client.receive())
        await until(lambda: world.log("t").watermark_listeners > 0, "the poll waits")
        assert not waiting.done()
        await appended(world, "t", bytes(3000), partition=1)
        response = await waiting
        second = 1 if is_cold else 2  # a read of the bucket leaves what is in memory to the next request
        assert [len(values(part(response, 0, index).records)) for index in range(2)] == [3, second]


@pytest.mark.parametrize("under_way", [True, False])
async def test_a_partition_that_has_just_come_makes_nobody_wait_for_min_bytes(under_way: bool) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", partitions=2)
        log = world.log("t", 1)
        log.came_at = math.inf
        if not under_way:
            await appended(world, "t", b"a", partition=1)
        client.post(fetch_request(11, {"t": {0: 0, 1: 0}}, max_wait=60_000, min_bytes=1000))
        if under_way:
            await until(lambda: log.watermark_listeners > 0, "the poll waits")
            await appended(world, "t", b"a", partition=1)
        assert values(part(await client.receive(), partition=1).records) == [(0, b"a")]


async def test_a_partition_that_came_a_while_ago_is_like_any_other() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.log("t").came_at = SystemClock().monotonic() - JUST_CAME_S
        await appended(world, "t", b"a")
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000, min_bytes=1000))
        waiting = asyncio.ensure_future(client.receive())
        await until(lambda: world.log("t").watermark_listeners > 0, "the poll waits")
        assert not waiting.done()
        client.post(metadata_request())
        assert values(part(await waiting).records) == [(0, b"a")]
        await client.receive()


@pytest.mark.parametrize("under_way", [True, False])
async def test_a_long_poll_ends_early_when_its_client_asks_something_else(under_way: bool) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", b"a")
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000, min_bytes=1000))
        if under_way:
            await until(lambda: world.log("t").watermark_listeners > 0, "the poll waits")
        client.post(metadata_request())
        assert values(part(await client.receive()).records) == [(0, b"a")]
        assert [topic.name for topic in (await client.receive()).topics] == ["t"]


async def test_a_long_poll_is_not_ended_by_the_next_one() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000))
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000))
        client.post(metadata_request())
        waiting = asyncio.ensure_future(client.receive())
        await until(lambda: world.log("t").watermark_listeners > 0, "the poll waits")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await appended(world, "t", b"a")
        assert values(part(await waiting).records) == [(0, b"a")]
        assert values(part(await client.receive()).records) == [(0, b"a")]
        assert [topic.name for topic in (await client.receive()).topics] == ["t"]


async def test_the_listeners_of_a_long_poll_are_removed() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await fetch(client, 11, {"t": {0: 0}}, max_wait=10)
        async with world.client() as leaver:
            leaver.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000))
            await until(lambda: world.log("t").watermark_listeners > 0, "the poll waits")
        await until(lambda: world.log("t").watermark_listeners == 0, "the poll of a client that left is cancelled")


async def test_an_error_ends_the_wait_at_once() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t")
        response = await fetch(client, 11, {"t": {0: 0, 5: 0}, "missing": {0: 0}}, max_wait=60_000)
        assert [part(response, 0, 0).error_code, part(response, 0, 1).error_code] == [0, 3]
        missing = part(response, 1)
        assert missing.error_code == 3 and missing.records == b"" and missing.high_watermark == -1
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000))
        log = world.log("t")
        await until(lambda: log.watermark_listeners > 0, "the poll waits")
        del world.partitions.logs[topic.id, 0]
        await log.close()
        assert part(await client.receive()).error_code == 6


@pytest.mark.parametrize("max_wait", [0, 30])
async def test_a_partition_in_a_hand_over_tells_no_high_watermark_that_the_next_leader_may_have_moved(
    max_wait: int,
) -> None:
    """The new leader had acknowledged more (seed 1557) while the old one, cut from the controller, answered this."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", b"a")
        await world.log("t").close()
        found = part(await fetch(client, 11, {"t": {0: 1}}, max_wait=max_wait))
        assert (found.error_code, found.high_watermark, found.records) == (6, -1, b"")


async def test_offsets_outside_the_log_are_out_of_range_and_the_end_waits() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", b"a", b"b", b"c")
        await world.log("t").delete_records(1)
        for offset, code in ((0, 1), (1, 0), (3, 0), (4, 1), (-1, 1)):
            assert part(await fetch(client, 11, {"t": {0: offset}})).error_code == code, offset


async def test_leader_epochs_are_checked() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        epoch = world.log("t").leader_epoch
        for claimed, code in ((epoch, 0), (epoch - 1, 74), (epoch + 1, 75), (-1, 0)):
            if claimed < -1:
                continue
            wanted = {"fetch_offset": 0, "current_leader_epoch": claimed}
            assert part(await fetch(client, 11, {"t": {0: wanted}})).error_code == (0 if claimed == -1 else code)


async def test_a_reader_with_another_history_is_told_where_it_diverges() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t")
        await appended(world, "t", b"a", b"b")
        first = world.log("t").leader_epoch
        await world.log("t").close()
        await world.open(topic, 0, leader_epoch=first + 5)
        await appended(world, "t", b"c")

        async def ask(offset: int, last_epoch: int) -> Any:
            wanted = {"fetch_offset": offset, "last_fetched_epoch": last_epoch}
            return part(await fetch(client, 12, {"t": {0: wanted}}, max_wait=60_000))

        found = await ask(3, first)  # it read three records of an epoch that wrote two
        assert (found.error_code, found.records) == (0, b"")
        assert (found.diverging_epoch.epoch, found.diverging_epoch.end_offset) == (first, 2)
        found = await ask(2, first + 3)  # an epoch that never was
        assert (found.diverging_epoch.epoch, found.diverging_epoch.end_offset) == (first, 2)
        assert values((await ask(2, first)).records) == [(2, b"c")]
        assert (await ask(2, first + 9)).error_code == 1


@pytest.mark.parametrize("version", [12, 15, 16, 17])
async def test_a_broker_that_does_not_lead_names_the_leader(version: int) -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        topic = await world.controller.create_topic("t", 1, {}, assignment=[2])
        response = await fetch(client, version, {key_of(version, topic): {0: 0}}, max_wait=60_000)
        assert part(response).error_code == 6
        if version >= 16:
            assert part(response).current_leader.leader_id == 2
            assert [endpoint.node_id for endpoint in response.node_endpoints] == [2]
        else:
            assert part(response).current_leader.leader_id == -1


async def test_an_unknown_topic_id_is_told() -> None:
    async with KafkaWorld() as world, world.client() as client:
        assert part(await fetch(client, 13, {uuid.UUID(int=99): {0: 0}}, max_wait=60_000)).error_code == 100


async def test_cold_partitions_are_read_from_the_bucket_together() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 4)
        for index in range(4):
            await appended(world, "t", *[b"%d" % n + bytes(500) for n in range(20)], partition=index)
        await world.chill()
        await appended(world, "t", b"hot", partition=3)
        assert world.log("t", 0).read_hot(0, BIG, committed=False) is None
        response = await fetch(client, 11, {"t": {0: 0, 1: 5, 2: 19, 3: 20}}, max_bytes=50 * BIG)
        assert [[offset for offset, _ in values(part(response, 0, n).records)] for n in range(4)] == [
            list(range(20)),
            list(range(5, 20)),
            [19],
            [20],
        ]
        small = {0: {"fetch_offset": 0, "partition_max_bytes": 1}, 1: {"fetch_offset": 0, "partition_max_bytes": 1}}
        response = await fetch(client, 11, {"t": small})
        assert [len(values(part(response, 0, n).records)) for n in range(2)] == [1, 0]


async def test_a_cold_partition_returns_a_batch_to_a_request_for_no_bytes() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", b"a", b"b")
        await world.chill()
        for _ in range(2):  # from the bucket, and from the cache of its blocks
            found = part(await fetch(client, 11, {"t": {0: 0}}, max_bytes=0))
            assert values(found.records) == [(0, b"a")]


async def test_a_bucket_that_fails_is_a_retriable_error_of_that_partition() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        await appended(world, "t", b"a")
        await world.chill()
        assert world.log("t", 0).read_hot(0, BIG, committed=False) is None
        await appended(world, "t", b"b", partition=1)
        await world.store.delete([info.key async for info in world.store.list("")])
        response = await fetch(client, 11, {"t": {0: 0, 1: 0}})
        assert part(response).error_code != 0
        assert values(part(response, 0, 1).records) == [(0, b"b")]


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("version", [11, 12])
async def test_a_partition_that_cannot_be_read_does_not_keep_back_a_large_batch_of_another(
    version: int, is_cold: bool
) -> None:
    """Without a session, and in one, where the partition that fails stays the first one for good."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        await appended(world, "t", b"a")
        await world.chill()
        await world.store.delete([info.key async for info in world.store.list("")])
        await appended(world, "t", bytes(5000), b"b", partition=1)
        if is_cold:
            await world.chill()
        limits = {index: {"fetch_offset": 0, "partition_max_bytes": 1000} for index in range(2)}
        session = {"session_id": 0, "session_epoch": 0} if version == 12 else {}
        response = await fetch(client, version, {"t": limits}, max_wait=60_000, **session)
        assert part(response).error_code != 0
        assert [offset for offset, _ in values(part(response, 0, 1).records)] == [0]


async def test_a_fetch_waits_once_for_a_bucket_that_hangs_however_many_partitions_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each further 16 partitions had another 15 s: the client's time was over, and it got nothing of the others."""
    monkeypatch.setattr(fetch_handler, "COLD_READ_TIMEOUT_S", 1.0)
    count = 3 * MAX_COLD_READS
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", count + 1)
        for index in range(count):
            await appended(world, "t", b"cold", partition=index)
        await world.chill()
        await appended(world, "t", b"hot", partition=count)

        async def hang(*_: object) -> list[View]:
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(world.store, "get_ranges", hang)
        began = SystemClock().monotonic()
        asked = {"t": dict.fromkeys(range(count + 1), 0)}
        response = await fetch(client, 11, asked, max_bytes=60 * BIG, min_bytes=1000, max_wait=60_000)
        assert SystemClock().monotonic() - began < 2.0
        found = [part(response, 0, index) for index in range(count + 1)]
        assert [one.error_code for one in found] == [0] * (count + 1)
        assert [len(values(one.records)) for one in found] == [0] * count + [1]


@pytest.mark.parametrize("in_session", [False, True])
async def test_what_is_in_memory_does_not_wait_long_for_a_bucket_that_is_away(
    monkeypatch: pytest.MonkeyPatch, in_session: bool
) -> None:
    """One partition that lagged made the newest records of all others 15 s late, response after response."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        await appended(world, "t", b"cold")
        await world.chill()
        await appended(world, "t", b"hot", partition=1)
        gone_on, read = asyncio.Event(), world.store.get_ranges

        async def hang(key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
            await gone_on.wait()
            return await read(key, ranges)

        monkeypatch.setattr(world.store, "get_ranges", hang)
        session = {"session_id": 0, "session_epoch": 0} if in_session else {}
        async with asyncio.timeout(COLD_READ_TIMEOUT_S / 2):
            response = await fetch(client, 11, {"t": {0: 0, 1: 0}}, max_bytes=9 * BIG, max_wait=60_000, **session)
        assert [part(response, 0, index).error_code for index in range(2)] == [0, 0]
        assert [values(part(response, 0, index).records) for index in range(2)] == [[], [(0, b"hot")]]
        gone_on.set()
        if in_session:
            session = {"session_id": response.session_id, "session_epoch": 1}
        response = await fetch(client, 11, {"t": {1: 1} if in_session else {0: 0, 1: 1}}, max_wait=60_000, **session)
        assert values(part(response).records) == [(0, b"cold")]


async def test_read_committed_has_a_list_of_aborted_transactions_and_read_uncommitted_has_none() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", b"a")
        log = world.log("t")
        append_guarded(log, batch(b"open", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        await until(lambda: log.high_watermark == 2, "confirmation")
        committed = part(await fetch(client, 11, {"t": {0: 0}}, isolation_level=1))
        assert values(committed.records) == [(0, b"a")]
        assert (committed.last_stable_offset, committed.aborted_transactions) == (1, ())
        everything = part(await fetch(client, 11, {"t": {0: 0}}))
        assert len(values(everything.records)) == 2 and everything.aborted_transactions is None


async def test_fetched_records_are_counted() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, "t", b"a", b"b", b"c")
        await fetch(client, 11, {"t": {0: 1}})
        body, _ = world.services.metrics.render()
        assert b'tidelog_topic_fetched_records_total{topic="t"} 2.0' in body


async def test_one_partition_is_answered_the_same_both_ways() -> None:
    """A request for one partition takes a shorter way than one with a second topic, here one without partitions."""

    def at_once(answer: Awaitable[FetchResponse]) -> FetchTopicResponse | None:
        if not isinstance(answer, Answer):
            cast("Coroutine[Any, Any, FetchResponse]", answer).close()
            return None
        assert answer.done and answer.response is not None
        return cast("FetchResponse", answer.response).topics[0]

    answered: set[bool | None] = set()
    async with KafkaWorld() as world:
        topic = await world.topic("t", 1)
        await appended(world, "t", b"a" * 100, b"b" * 100)
        log = world.log("t", 0)
        append_guarded(log, batch(b"open", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        await until(lambda: log.high_watermark == 3, "confirmation")
        for offset, limit, at_least, committed, epoch, last_epoch, version in itertools.product(
            (-1, 0, 1, 2, 3, 4),
            (0, 180, BIG),
            (0, 1, 250, BIG),
            (0, 1),
            (-1, log.leader_epoch, log.leader_epoch + 1),
            (-1, 0),
            (12, 18),
        ):
            spec = FetchPartition(0, offset, limit, epoch, last_epoch)
            asked = FetchTopic("t", topic.id, [spec])
            nothing = FetchTopic("t", topic.id, [])
            answers = []
            for topics in ([asked], [asked, nothing]):
                request = FetchRequest(-1, 500, at_least, BIG, committed, 0, -1, topics, [], "")
                context = RequestContext(world.services, FETCH, version, 7, "test", "127.0.0.1")
                answers.append(at_once(handle(context, request)))
            assert answers[0] == answers[1]
            answered.add(None if answers[0] is None else bool(answers[0].partitions[0].records))
        assert answered == {None, False, True}
