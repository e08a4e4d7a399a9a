"""Consumers that name their rack read from a follower there, and go on when that follower or the leader ends
(KIP-392)."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.support import schema
from tests.support.hot_cluster import HotCluster, hot_cluster
from tests.support.kafka_client import KafkaClient
from tidelog.batch.batch import iter_batches, iter_records
from tidelog.cli.client import ClusterConnection

TOPIC = "near"
LEADER, NEAR, THIRD = 101, 102, 103
NOT_LEADER = 6
LONG_MS = 40_000
"""A long poll that nothing wakes lasts so long."""
SOON_S = 20.0

pytestmark = pytest.mark.slow


@pytest.fixture
def hot(tmp_path: Path) -> Iterator[HotCluster]:
    with hot_cluster(tmp_path / "hot", racks=True) as found:
        create_topic(found.bootstrap, TOPIC, 1)
        if leader(found) != LEADER:
            found.elect(leader(found), LEADER)  # each set has the id of its preferred master
        yield found


def leader(hot: HotCluster) -> int:
    """The broker that leads the topic's partition."""
    return int(hot.ask(f"/partitions?topic={TOPIC}")["partitions"][0]["leader"])


def produce(hot: HotCluster, first: int, count: int) -> None:
    producer = Producer({"bootstrap.servers": hot.bootstrap, "enable.idempotence": True, **QUIET})
    for number in range(first, first + count):
        producer.produce(TOPIC, b"%d" % number, partition=0)
    assert producer.flush(60) == 0


def served_bytes(hot: HotCluster, broker: int) -> int:
    """How much of the topic a broker has sent to consumers."""
    with urllib.request.urlopen(f"{hot.admin_url(broker)}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    wanted = [
        each for each in lines if each.startswith("tidelog_topic_fetched_bytes_total") and f'topic="{TOPIC}"' in each
    ]
    return sum(int(float(each.rsplit(" ", 1)[1])) for each in wanted)


def consumer(hot: HotCluster, rack: str, **options: Any) -> Consumer:
    found = Consumer(
        {
            "bootstrap.servers": hot.bootstrap,
            "group.id": "near",
            "client.rack": rack,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **options,
            **QUIET,
        }
    )
    found.assign([TopicPartition(TOPIC, 0, 0)])
    return found


def read(one: Consumer, first: int, count: int) -> None:
    """Read exactly these records, in order."""
    deadline = time.monotonic() + 90
    for number in range(first, first + count):
        while (message := one.poll(1.0)) is None:
            assert time.monotonic() < deadline, f"record {number} has not come"
        assert message.error() is None, message.error()
        assert (message.offset(), message.value()) == (number, b"%d" % number)


@pytest.mark.gate_cases("read_committed")
@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_a_consumer_reads_from_the_follower_in_its_rack_and_goes_on_when_brokers_die(
    hot: HotCluster, isolation: str
) -> None:
    produce(hot, 0, 500)
    near = consumer(hot, f"rack-{NEAR}", **{"isolation.level": isolation})
    try:
        read(near, 0, 500)
        produce(hot, 500, 500)
        read(near, 500, 500)
        assert served_bytes(hot, LEADER) == served_bytes(hot, THIRD) == 0
        assert served_bytes(hot, NEAR) > 0
        hot.kill(NEAR)
        produce(hot, 1000, 100)
        read(near, 1000, 100)
        hot.begin(NEAR)
        hot.wait_full()
        hot.kill(LEADER)
        produce(hot, 1100, 100)
        read(near, 1100, 100)
    finally:
        near.close()


@pytest.mark.long
def test_what_is_in_the_bucket_alone_is_read_from_a_follower_too(hot: HotCluster) -> None:
    produce(hot, 0, 300)
    for broker in (LEADER, NEAR, THIRD):
        ClusterConnection(hot.address(broker)).post("/upload")

    near = consumer(hot, f"rack-{NEAR}")
    try:
        read(near, 0, 300)
    finally:
        near.close()
    assert served_bytes(hot, NEAR) > 0 == served_bytes(hot, LEADER)


@pytest.mark.long
def test_without_a_rack_and_with_one_where_nobody_is_the_leader_is_read(hot: HotCluster) -> None:
    produce(hot, 0, 50)
    for rack in ("", "rack-9", f"rack-{LEADER}"):
        one = consumer(hot, rack)
        try:
            read(one, 0, 50)
        finally:
            one.close()
    assert served_bytes(hot, NEAR) == served_bytes(hot, THIRD) == 0


def test_after_a_hand_over_the_old_leader_gives_consumers_what_is_not_in_the_bucket(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot", {"upload": {"age_ms": 600_000}}, racks=True) as hot:
        create_topic(hot.bootstrap, TOPIC, 1)
        home = leader(hot)
        other = NEAR if home != NEAR else LEADER
        hot.elect(home, other)
        produce(hot, 0, 20)
        hot.elect(home, home)
        hot.wait_full()
        produce(hot, 20, 10)
        near = consumer(hot, f"rack-{other}")
        try:
            read(near, 0, 30)
        finally:
            near.close()
        assert served_bytes(hot, other) > 0


class Fetching:
    """A consumer's connection to one broker, by hand."""

    def __init__(self, client: KafkaClient, topic_id: bytes, rack: str) -> None:
        self._client = client
        self._topic_id = topic_id
        self._rack = rack

    async def fetch(self, offset: int | None, *, wait_ms: int = 0, session: tuple[int, int] = (0, -1)) -> Any:
        """Ask from an offset; None: for what is new in the session `(id, epoch)`."""
        make = schema.request(1, 13).make
        topics: tuple[Any, ...] = ()
        if offset is not None:
            partition = make(
                "FetchPartition",
                partition=0,
                current_leader_epoch=-1,
                fetch_offset=offset,
                last_fetched_epoch=-1,
                log_start_offset=-1,
                partition_max_bytes=1 << 20,
            )
            topics = (make("FetchTopic", topic_id=self._topic_id, partitions=(partition,)),)
        return await self._client.send(
            1,
            13,
            max_wait=wait_ms,
            min_bytes=1,
            max_bytes=1 << 24,
            isolation_level=1,
            session_id=session[0],
            session_epoch=session[1],
            topics=topics,
            forgotten_topics_data=(),
            rack_id=self._rack,
        )


def only(answer: Any) -> Any:
    assert answer.error_code == 0
    return answer.responses[0].partitions[0]


def values(part: Any) -> list[bytes]:
    batches = [one for _, one in iter_batches(memoryview(part.records))]
    return [bytes(record.value or b"") for one in batches for record in iter_records(one)]


def test_the_protocol_step_by_step(hot: HotCluster) -> None:
    async def walk() -> None:
        async with (
            KafkaClient("127.0.0.1", hot.kafka_ports[LEADER]) as leading,
            KafkaClient("127.0.0.1", hot.kafka_ports[NEAR]) as following,
        ):
            asked = {"allow_auto_topic_creation": False, "include_topic_authorized_operations": False}
            known = await leading.send(3, 12, topics=None, **asked)
            topic_id = next(one.topic_id for one in known.topics if one.name == TOPIC)
            produce(hot, 0, 10)
            leader, near = Fetching(leading, topic_id, f"rack-{NEAR}"), Fetching(following, topic_id, f"rack-{NEAR}")

            told = only(await leader.fetch(0, wait_ms=LONG_MS))
            assert (told.preferred_read_replica, told.high_watermark, bool(told.records)) == (NEAR, 10, False)
            began_there = await leader.fetch(0, session=(0, 0))
            assert only(began_there).preferred_read_replica == NEAR
            again = await leader.fetch(None, session=(began_there.session_id, 1))
            assert only(again).preferred_read_replica == NEAR, "a session tells it as often as it is asked"
            beyond = only(await leader.fetch(11))
            assert (beyond.error_code, beyond.preferred_read_replica) == (1, -1), "the leader judges offsets"
            nobody = only(await Fetching(following, topic_id, "").fetch(0))
            assert nobody.error_code == NOT_LEADER, "without a rack only leaders are read"

            found = only(await near.fetch(0, wait_ms=LONG_MS))
            assert values(found) == [b"%d" % each for each in range(10)]
            assert (found.high_watermark, found.preferred_read_replica) == (10, -1)
            ahead = only(await near.fetch(5000))
            assert (ahead.error_code, bool(ahead.records)) == (0, False), "a follower may be behind its reader"

            began = time.monotonic()
            waiting = asyncio.create_task(near.fetch(10, wait_ms=LONG_MS))
            await asyncio.to_thread(produce, hot, 10, 1)
            assert values(only(await waiting)) == [b"10"]
            answer = await near.fetch(11, session=(0, 0))
            waiting = asyncio.create_task(near.fetch(None, wait_ms=LONG_MS, session=(answer.session_id, 1)))
            await asyncio.to_thread(produce, hot, 11, 1)
            assert values(only(await waiting)) == [b"11"], "a resting partition of a session becomes due"
            assert time.monotonic() - began < SOON_S, "new records wake a reader"

            waiting = asyncio.create_task(near.fetch(12, wait_ms=LONG_MS))
            of_leader = [each for each, row in hot.sets().items() if row["master"] == LEADER]
            for each in of_leader:
                await asyncio.to_thread(hot.elect, each, THIRD)
            ended = only(await waiting)
            assert (ended.error_code in (0, NOT_LEADER), bool(ended.records)) == (True, False)
            assert time.monotonic() - began < LONG_MS / 1000, "another leader epoch ends the long poll"

    asyncio.run(walk())
