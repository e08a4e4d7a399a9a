"""Fetch sessions over a real socket: what their client knows is what one without a session would be told."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broker.test_handlers_fetch import append, appended, fetch, fetch_request, part, values
from tests.support import schema
from tests.support.examples import examples
from tests.support.guarded import append_guarded
from tests.support.kafka_client import KafkaClient
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.broker.kafka.errors import FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH
from tidelog.broker.kafka.fetch_sessions import (
    EVICTABLE_AFTER_S,
    MAX_EPOCH,
    FetchSession,
    FetchSessions,
    SessionError,
)
from tidelog.broker.kafka.handlers.fetch import handle, handle_without_short_ways
from tidelog.broker.kafka.services import Answer, RequestContext
from tidelog.broker.kafka.wire.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, ForgottenTopic
from tidelog.broker.settings import KafkaSettings
from tidelog.controller.model.records import TopicRecord
from tidelog.runtime.errors import NotLeader

FETCH = 1
VERSION = 12
PARTITIONS = 4


class Reader:
    """A client with a session: names what changed, believes what it is not told of to be as before."""

    def __init__(self, client: KafkaClient) -> None:
        self._client = client
        self.id = 0
        self.epoch = 0
        self.offsets: dict[int, int] = {}
        self.told: dict[int, tuple[int, int]] = {}
        """High watermark and log start offset."""
        self.records: dict[int, list[tuple[int, bytes | None]]] = {}
        self._changed: dict[int, None] = {}
        self._forgotten: list[int] = []

    def add(self, partition: int, offset: int = 0) -> None:
        self.offsets[partition] = offset
        self._changed[partition] = None
        self.records.setdefault(partition, [])
        if partition in self._forgotten:
            self._forgotten.remove(partition)

    def forget(self, partition: int) -> None:
        if self.offsets.pop(partition, None) is not None:
            self._changed.pop(partition, None)
            self._forgotten.append(partition)

    def post(self, **fields: Any) -> None:
        named = self.offsets if self.epoch == 0 else {one: self.offsets[one] for one in self._changed}
        forget = schema.request(FETCH, VERSION).make
        gone = (forget("ForgottenTopic", topic="t", partitions=tuple(self._forgotten)),) if self._forgotten else ()
        for partition in self._forgotten:
            self.told.pop(partition, None)
        if self.epoch == 0:
            gone = ()
        self._client.post(
            fetch_request(
                VERSION,
                {"t": dict(named)} if named else {},
                session_id=self.id,
                session_epoch=self.epoch,
                forgotten_topics_data=gone,
                **fields,
            )
        )
        self._changed, self._forgotten = {}, []

    async def receive(self) -> list[int]:
        """The partitions that the response holds."""
        response = await self._client.receive()
        assert response.error_code == 0
        if self.epoch == 0:
            self.id = response.session_id
        assert response.session_id == self.id
        self.epoch += 1
        named = []
        for topic in response.responses:
            assert topic.topic == "t"
            for found in topic.partitions:
                index = found.partition_index
                named.append(index)
                assert found.error_code == 0 and index in self.offsets, "an answer for what was not asked"
                self.told[index] = found.high_watermark, found.log_start_offset
                news = [record for record in values(found.records) if record[0] >= self.offsets[index]]
                if news:
                    self.records[index] += news
                    self.offsets[index] = news[-1][0] + 1
                    self._changed[index] = None
        assert len(named) == len(set(named))
        return named

    async def poll(self, **fields: Any) -> list[int]:
        self.post(**fields)
        return await self.receive()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, PARTITIONS - 1), st.integers(1, 3)),
        st.tuples(st.just("poll"), st.sampled_from([1, 100, 1 << 20]), st.booleans()),
        st.tuples(st.just("forget"), st.integers(0, PARTITIONS - 1), st.just(0)),
        st.tuples(st.just("add"), st.integers(0, PARTITIONS - 1), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, PARTITIONS - 1), st.just(0)),
        st.tuples(st.just("chill"), st.just(0), st.just(0)),
        st.tuples(st.just("reopen"), st.integers(0, PARTITIONS - 1), st.just(0)),
    ),
    max_size=25,
)


async def do(world: KafkaWorld, reader: Reader, step: tuple[str, int, Any], number: int) -> None:
    what, index, more = step
    log = world.log("t", index) if what != "poll" else None
    if what == "append":
        assert log is not None
        append(world, "t", *[b"%d.%d" % (number, n) for n in range(more)], partition=index)
        if number % 2:
            await until(lambda: log.high_watermark == log.log_end_offset, "confirmation")
    elif what == "poll":
        await reader.poll(max_bytes=index, max_wait=20 if more else 0)
    elif what == "forget":
        reader.forget(index)
    elif what == "add" and index not in reader.offsets:
        assert log is not None
        known = reader.records.get(index)
        reader.add(index, max(log.log_start_offset, known[-1][0] + 1 if known else 0))
    elif what == "delete" and reader.records.get(index):
        assert log is not None
        await log.delete_records(reader.records[index][-1][0])
    elif what == "chill":
        await world.chill()
    elif what == "reopen":
        assert log is not None
        await until(lambda: log.high_watermark == log.log_end_offset, "confirmation")
        await log.close()
        await world.open(world.controller.image.topics[world.controller.image.topic_ids["t"]], index)


@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS)
def test_a_reader_in_a_session_knows_what_one_without_knows(steps: list[tuple[str, int, Any]]) -> None:
    async def work() -> None:
        async with KafkaWorld() as world, world.client() as client:
            await world.topic("t", PARTITIONS)
            reader = Reader(client)
            for index in range(PARTITIONS):
                reader.add(index)
            await reader.poll()
            assert reader.id > 0
            for number, step in enumerate(steps):
                await do(world, reader, step, number)
            logs = {index: world.log("t", index) for index in reader.offsets}
            await until(lambda: all(log.high_watermark == log.log_end_offset for log in logs.values()), "confirmation")
            for _ in range(100):
                if not await reader.poll() and all(reader.offsets[n] == log.log_end_offset for n, log in logs.items()):
                    break
            for index, log in logs.items():
                assert reader.told[index] == (log.high_watermark, log.log_start_offset)
                offsets = [offset for offset, _ in reader.records[index]]
                assert offsets == sorted(set(offsets)), "twice or out of order"
                whole = part(await fetch(client, VERSION, {"t": {index: log.log_start_offset}}))
                known = dict(reader.records[index])
                assert all(known[offset] == value for offset, value in values(whole.records))

    asyncio.run(work())


class TwoWays:
    """Two clients with a session each, of the same partitions and with the same requests; one goes no short way."""

    def __init__(self, world: KafkaWorld, topic_id: bytes, racks: Any) -> None:
        self._topic_id = topic_id
        self.epoch = self.id = self.short = 0
        self._ways = [
            (
                dataclasses.replace(
                    world.services, fetch_sessions=FetchSessions(100, random.Random(3)), read_replicas=racks
                ),
                way,
            )
            for way in (handle, handle_without_short_ways)
        ]

    async def poll(self, listed: dict[int, tuple[int, int, int]], gone: list[int], **limits: Any) -> FetchResponse:
        """`listed`: offset, maximum of bytes and leader epoch by partition. Return the response, equal both ways."""
        limits = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 1 << 20, "isolation_level": 0, "rack_id": "", **limits}
        version = limits.pop("version")
        specs = [FetchPartition(index, *more) for index, more in listed.items()]
        answers = []
        for services, way in self._ways:
            request = FetchRequest(
                -1,
                session_id=self.id,
                session_epoch=self.epoch,
                topics=[FetchTopic("t", self._topic_id, [spec]) for spec in specs],
                forgotten_topics=[ForgottenTopic("t", self._topic_id, gone)] if gone else [],
                **limits,
            )
            answers.append(way(RequestContext(services, FETCH, version, 7, "test", "127.0.0.1"), request))
        assert [isinstance(one, Answer) for one in answers] in ([True, True], [False, False])
        self.short += isinstance(answers[0], Answer)
        first, second = await asyncio.gather(*answers)
        assert first == second
        self.id, self.epoch = first.session_id, self.epoch + 1
        return first


class NearReplica:
    """Names a follower in rack "b" for the last partition."""

    def nearest(self, _topic_id: bytes, index: int, rack: str) -> int:
        return 2 if rack == "b" and index == PARTITIONS - 1 else -1

    def get(self, _topic_id: bytes, _index: int) -> None:
        raise NotLeader("this broker follows no partition")


PARTITION_SETS = st.lists(st.integers(0, PARTITIONS), unique=True, max_size=3)
"""The last one does not exist."""
POLLS = st.fixed_dictionaries(
    {},
    optional={
        "max_bytes": st.sampled_from([0, 100, 250, 400]),
        "min_bytes": st.sampled_from([0, 150, 10_000]),
        "max_wait_ms": st.just(3),
        "isolation_level": st.just(1),
        "rack_id": st.sampled_from(["a", "b"]),
    },
)
TWO_WAY_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, PARTITIONS - 1), st.sampled_from(["", "", "open", "abort"])),
        st.tuples(st.just("poll"), PARTITION_SETS, PARTITION_SETS, POLLS),
        st.tuples(st.just("poll"), PARTITION_SETS, st.just([]), POLLS),
        st.tuples(st.just("poll"), st.just([]), st.just([]), st.just({})),
        st.tuples(st.just("seek"), st.integers(0, PARTITIONS - 1), st.integers(-1, 4), st.sampled_from([-1, 0, 1, 2])),
        st.tuples(st.just("delete"), st.integers(0, PARTITIONS - 1)),
        st.tuples(st.just("reopen"), st.integers(0, PARTITIONS - 1)),
    ),
    max_size=30,
)


async def change(world: KafkaWorld, topic: TopicRecord, undecided: dict[int, set[int]], step: tuple[Any, ...]) -> None:
    """Do to a log what a step says, and confirm it. `undecided`: producer ids of open transactions by partition."""
    log = world.log("t", step[1])
    if step[0] == "append" and not step[2]:
        append(world, "t", b"x" * 100, partition=step[1])
    elif step[0] == "append" and step[2] == "open":
        mine = 7 + log.log_end_offset
        undecided.setdefault(step[1], set()).add(mine)
        made = batch(b"open", transactional=True, producer_id=mine, producer_epoch=0, base_sequence=0)
        append_guarded(log, made)
    elif step[0] == "append":
        for producer in sorted(undecided.pop(step[1], set())):
            log.write_marker(producer, 0, commit=False, coordinator_epoch=0, transaction_version=1)
    elif step[0] == "delete":
        await log.delete_records(max(log.log_start_offset, log.high_watermark - 1))
    elif step[0] == "reopen":
        await log.close()
        await world.open(topic, step[1])
    await until(lambda: log.closed or log.high_watermark == log.log_end_offset, "confirmation")


@settings(max_examples=examples(150), deadline=None)
@given(steps=TWO_WAY_STEPS, by_id=st.booleans())
def test_requests_of_a_session_are_answered_the_same_both_ways(steps: list[tuple[Any, ...]], by_id: bool) -> None:
    async def work() -> None:
        async with KafkaWorld() as world:
            topic = await world.topic("t", PARTITIONS)
            two = TwoWays(world, topic.id, NearReplica())
            wanted = dict.fromkeys(range(PARTITIONS + 1), (0, 1 << 20, -1))
            version, undecided = 17 if by_id else 12, dict[int, set[int]]()
            await two.poll({index: wanted[index] for index in range(PARTITIONS)}, [], version=version)
            assert two.id > 0
            for step in steps:
                if step[0] == "poll":
                    found = await two.poll({one: wanted[one] for one in step[1]}, step[2], version=version, **step[3])
                    for data in [data for each in found.topics for data in each.partitions if data.records]:
                        offset, most, leader_epoch = wanted[data.partition]
                        wanted[data.partition] = (offset + 1, most, leader_epoch)
                elif step[0] == "seek":
                    wanted[step[1]] = (step[2], 150 if step[3] == 2 else 1 << 20, step[3] if step[3] < 2 else -1)
                else:
                    await change(world, topic, undecided, step)

    asyncio.run(work())


async def test_a_session_without_news_and_one_that_reads_are_answered_at_once() -> None:
    async with KafkaWorld() as world:
        topic = await world.topic("t", PARTITIONS)
        two = TwoWays(world, topic.id, NearReplica())
        await two.poll(dict.fromkeys(range(PARTITIONS), (0, 1 << 20, -1)), [], version=17)
        for _ in range(3):
            assert not (await two.poll({}, [], version=17)).topics
        await appended(world, "t", b"a", b"b", partition=1)
        await appended(world, "t", b"c", partition=3)
        found = await two.poll({}, [0], version=17, max_wait_ms=500)
        assert [data.partition for each in found.topics for data in each.partitions] == [1, 3]
        found = await two.poll({1: (2, 1 << 20, -1), 3: (0, 1 << 20, -1)}, [], version=17, max_wait_ms=500)
        assert [data.partition for each in found.topics for data in each.partitions] == [3]
        assert two.short == two.epoch


async def test_idle_partitions_are_not_answered_and_wake_a_waiting_poll() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 3)
        reader = Reader(client)
        for index in range(3):
            reader.add(index)
        assert await reader.poll() == [0, 1, 2]
        assert await reader.poll() == []
        reader.post(max_wait=60_000)
        await until(lambda: world.services.fetch_sessions.figures() == (1, 3, 0), "the session is there")
        await appended(world, "t", b"a", partition=1)
        assert await reader.receive() == [1]
        assert reader.records[1] == [(0, b"a")]
        assert await reader.poll() == []  # the client named its new offset, there is nothing behind it


async def test_the_first_partition_cannot_keep_the_others_out() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 3)
        reader = Reader(client)
        for index in range(3):
            reader.add(index)
            await appended(world, "t", *[b"%d" % n + bytes(200) for n in range(5)], partition=index)
        assert await reader.poll(max_bytes=1) == [0, 1, 2]
        served = []
        while sum(len(records) for records in reader.records.values()) < 15:
            served += await reader.poll(max_bytes=1)
        assert served[:5] == [1, 2, 0, 1, 2]


async def test_what_does_not_fit_the_session_is_told() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t")
        first = await fetch(client, 11, {"t": {0: 0}}, session_epoch=0)
        session = first.session_id
        assert session > 0
        assert (await fetch(client, 11, {}, session_id=session, session_epoch=1)).error_code == 0
        assert (await fetch(client, 11, {}, session_id=session, session_epoch=1)).error_code == 71
        assert (await fetch(client, 11, {}, session_id=session + 1, session_epoch=2)).error_code == 70
        assert (await fetch(client, 11, {}, session_id=0, session_epoch=3)).error_code == 71
        by_id = {uuid.UUID(bytes=topic.id): {0: 0}}
        assert (await fetch(client, 13, by_id, session_id=session, session_epoch=2)).error_code == 106
        assert (await fetch(client, 11, {}, session_id=session, session_epoch=2)).error_code == 0
        last = await fetch(client, 11, {"t": {0: 0}}, session_id=session, session_epoch=-1)
        assert (last.error_code, last.session_id) == (0, 0)
        assert (await fetch(client, 11, {}, session_id=session, session_epoch=3)).error_code == 70
        assert world.services.fetch_sessions.figures() == (0, 0, 0)
        twice = await fetch(client, 11, {"t": {0: 0}}, session_epoch=0)
        again = await fetch(client, 11, {"t": {0: 0}}, session_epoch=0, session_id=twice.session_id)
        assert again.session_id not in (0, twice.session_id)
        assert world.services.fetch_sessions.figures() == (1, 1, 0)


async def test_a_partition_that_leaves_tells_its_error_until_it_is_forgotten() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 2)
        first = await fetch(client, 11, {"t": {0: 0, 1: 0}}, session_epoch=0)
        named = {"session_id": first.session_id, "max_wait": 60_000}
        log = world.partitions.logs[topic.id, 1]
        client.post(fetch_request(11, {}, session_epoch=1, **named))
        await until(lambda: log.watermark_listeners > 0, "the poll waits")
        del world.partitions.logs[topic.id, 1]
        await log.close()
        for epoch in (1, 2):
            response = await (client.receive() if epoch == 1 else fetch(client, 11, {}, session_epoch=2, **named))
            assert [(one.partition_index, one.error_code) for one in response.responses[0].partitions] == [(1, 6)]
        await world.open(topic, 1)
        await appended(world, "t", b"back", partition=1)
        response = await fetch(client, 11, {}, session_epoch=3, **named)
        assert values(part(response).records) == [(0, b"back")]


async def test_a_partition_in_a_hand_over_is_left_out_until_the_outcome_is_known() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 2)
        for index in range(2):
            await appended(world, "t", b"a", partition=index)
        first = await fetch(client, 11, {"t": {0: 0, 1: 1}}, session_epoch=0)
        session = {"session_id": first.session_id}
        await world.log("t", 1).close()
        answered = await fetch(client, 11, {}, session_epoch=1, max_wait=60_000, **session)
        assert [one.partition_index for one in answered.responses[0].partitions] == [0], "it makes nobody back off"
        nothing = await fetch(client, 11, {"t": {0: 1}}, session_epoch=2, max_wait=30, **session)
        assert nothing.responses == ()
        client.post(fetch_request(11, {}, session_epoch=3, max_wait=60_000, **session))
        log = world.log("t", 1)
        await until(lambda: log.watermark_listeners > 0, "the poll waits for the outcome")
        del world.partitions.logs[topic.id, 1]
        log.tell_listeners()
        (moved,) = (await client.receive()).responses[0].partitions
        assert (moved.partition_index, moved.error_code) == (1, 6)
        await world.open(topic, 1)


async def test_a_client_that_hangs_up_in_a_poll_leaves_nothing() -> None:
    async with KafkaWorld() as world:
        await world.topic("t", 2)
        logs = [world.log("t", index) for index in range(2)]
        async with world.client() as client:
            first = await fetch(client, 11, {"t": {0: 0, 1: 0}}, session_epoch=0)
            assert all(log.watermark_listeners == 1 for log in logs)
            client.post(fetch_request(11, {}, session_id=first.session_id, session_epoch=1, max_wait=60_000))
            await until(lambda: world.server.in_flight_bytes > 0, "the poll waits")
        await until(lambda: world.services.fetch_sessions.figures() == (0, 0, 0), "the session is gone")
        assert not any(log.watermark_listeners for log in logs)


async def test_without_room_a_session_is_declined_and_everything_answered() -> None:
    async with (
        KafkaWorld(kafka=KafkaSettings(port=0, fetch_session_partitions=4)) as world,
        world.client() as client,
    ):
        await world.topic("t", 4)
        await appended(world, "t", b"a")
        first = await fetch(client, 11, {"t": {0: 0, 1: 0}}, session_epoch=0)
        assert first.session_id
        declined = await fetch(client, 11, {"t": {0: 0, 1: 0}}, session_epoch=0)
        assert declined.session_id == 0 and values(part(declined).records) == [(0, b"a")]
        grown = await fetch(client, 11, {"t": {2: 0, 3: 0}}, session_id=first.session_id, session_epoch=1)
        assert grown.error_code == 70
        assert world.services.fetch_sessions.figures() == (0, 0, 0)


def request(partitions: int, session_id: int = 0, epoch: int = 0) -> FetchRequest:
    topic = FetchTopic("t", b"", [FetchPartition(index, 0, 1 << 20) for index in range(partitions)])
    return FetchRequest(-1, 0, 1, 1 << 20, 0, session_id, epoch, [topic] if partitions else [], [], "")


def begun(sessions: FetchSessions, partitions: int, now: float) -> FetchSession:
    session = sessions.begin(request(partitions), now, by_id=False)
    assert session is not None
    session.take()
    sessions.end(session, answered=True)
    return session


def test_those_not_used_for_the_longest_time_make_room() -> None:
    sessions = FetchSessions(20, random.Random(1))
    first, second = begun(sessions, 9, 0.0), begun(sessions, 9, 1.0)
    assert sessions.begin(request(9), EVICTABLE_AFTER_S - 1, by_id=False) is None
    used = sessions.begin(request(0, first.id, 1), EVICTABLE_AFTER_S - 1, by_id=False)
    assert used is first
    sessions.end(first, answered=True)
    third = begun(sessions, 9, EVICTABLE_AFTER_S + 1)
    assert sessions.figures() == (2, 18, 1)
    with pytest.raises(SessionError) as gone:
        sessions.begin(request(0, second.id, 1), EVICTABLE_AFTER_S + 1, by_id=False)
    assert gone.value.code == FETCH_SESSION_ID_NOT_FOUND
    assert sessions.begin(request(25), 1e9, by_id=False) is None
    assert sessions.figures() == (2, 18, 1) and third.id != first.id


def test_no_session_keeps_a_name_that_no_topic_has() -> None:
    """A session is taken for a kilobyte for each partition."""
    sessions = FetchSessions(20, random.Random(1))
    long = FetchTopic("x" * 1_000, b"", [FetchPartition(0, 0, 1 << 20)])
    asked = request(2)
    asked.topics.append(long)
    assert sessions.begin(asked, 0.0, by_id=False) is None
    session = begun(sessions, 2, 0.0)
    grown = request(0, session.id, 1)
    grown.topics.append(long)
    with pytest.raises(SessionError) as gone:
        sessions.begin(grown, 0.0, by_id=False)
    assert gone.value.code == FETCH_SESSION_ID_NOT_FOUND
    assert sessions.figures() == (0, 0, 0)


def test_two_requests_cannot_use_a_session_at_once_and_epochs_wrap() -> None:
    sessions = FetchSessions(20, random.Random(1))
    session = begun(sessions, 2, 0.0)
    sessions.begin(request(0, session.id, 1), 0.0, by_id=False)
    with pytest.raises(SessionError) as busy:
        sessions.begin(request(0, session.id, 2), 0.0, by_id=False)
    assert busy.value.code == INVALID_FETCH_SESSION_EPOCH
    sessions.end(session, answered=True)
    session.epoch = MAX_EPOCH
    assert sessions.begin(request(0, session.id, 1), 0.0, by_id=False) is session
    sessions.end(session, answered=False)
    assert sessions.figures() == (0, 0, 0)
