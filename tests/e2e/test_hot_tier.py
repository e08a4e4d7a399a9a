"""Brokers of a real cluster with replicated WALs that are killed, paused and stopped under load: what was acknowledged
is there, once and in order; and a master that was replaced acknowledges nothing.

Controllers run apart, so a killed broker is never the active controller. Disks that are lost or set back, and members
that come and go: test_hot_tier_members.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer

from tests.e2e.backends import QUIET, create_topic
from tests.support import schema
from tests.support.hot_cluster import BROKERS, HotCluster, assert_equal_logs, hot_cluster
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.kafka_world import batch
from tests.support.partition_load import PartitionLoad
from tidelog.chaos.serve_cluster import eventually

PARTITIONS = 6
TOPIC = "hot"
OTHER = "other"
"""A topic that the load does not write to."""
NOT_LEADER, REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS, STORAGE_ERROR = 6, 7, 19, 56
RETRIABLE = {NOT_LEADER, REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS, STORAGE_ERROR}
"""What producers retry (org.apache.kafka.common.protocol.Errors)."""

pytestmark = pytest.mark.slow


def leaders(hot: HotCluster, topic: str = TOPIC, spare: tuple[int, ...] = ()) -> dict[int, int | None]:
    rows = hot.ask(f"/partitions?topic={topic}", spare)["partitions"]
    return {row["partition"]: row["leader"] for row in rows}


def led_by(hot: HotCluster, broker: int, topic: str = TOPIC) -> list[int]:
    return [at for at, leader in leaders(hot, topic).items() if leader == broker]


def check(hot: HotCluster, load: PartitionLoad) -> None:
    assert load.verify(hot.bootstrap) == []
    rest = {each: hot.nodes[each].process for each in hot.kafka_ports}
    assert all(process is not None and process.poll() is None for process in rest.values()), "a broker has ended"


def test_a_master_and_then_its_successor_are_killed_and_the_preferred_master_leads_again_in_the_end(
    tmp_path: Path,
) -> None:
    with hot_cluster(tmp_path / "hot", controllers=3) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            assert led_by(hot, 101)
            hot.kill(101)
            hot.wait_masters([101])
            load.wait_grown()
            second = hot.sets([101])[101]["master"]
            time.sleep(1.0)  # not to wait for something: the second death comes this much later
            hot.begin(101)
            hot.kill(second)
            hot.ready(101)
            hot.wait_masters([second])
            load.wait_grown()
            hot.begin(second)
            hot.ready(second)
            hot.wait_full()
            hot.elect(101, 101)
            load.wait_grown()
            assert led_by(hot, 101)
        check(hot, load)
        hot.kill(*BROKERS)
        assert_equal_logs(hot, BROKERS)


@pytest.mark.long
def test_all_members_are_killed_at_once_and_go_on_with_what_was_acknowledged(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            for _ in range(2):
                load.wait_grown(50)
                hot.kill(*BROKERS)
                hot.begin(*BROKERS)
                hot.ready(*BROKERS)
                load.wait_grown(50)
            hot.wait_full()
        check(hot, load)


async def produced(hot: HotCluster, broker: int, partition: int, acks: int, timeout_ms: int = 2000) -> int:
    """The error code of a produce request to this broker, whoever leads; -1 if the connection ended."""
    async with KafkaClient("127.0.0.1", hot.kafka_ports[broker]) as client:
        post(client, partition, acks, timeout_ms)
        try:
            return code_of(await client.receive())
        except (asyncio.IncompleteReadError, ConnectionError):
            return -1


def post(client: KafkaClient, partition: int, acks: int = -1, timeout_ms: int = 2000) -> None:
    make = schema.request(0, 10).make
    data = make("PartitionProduceData", index=partition, records=batch(b"pinned"))
    topics = (make("TopicProduceData", name=OTHER, partition_data=(data,)),)
    request = request_entity(0, 10, transactional_id=None, acks=acks, timeout=timeout_ms, topic_data=topics)
    client.post(request)


def code_of(answer: Any) -> int:
    return int(answer.responses[0].partition_responses[0].error_code)


@contextlib.contextmanager
def asleep(hot: HotCluster, broker: int) -> Any:
    """SIGSTOP; SIGCONT at the end."""
    hot.nodes[broker].signal(signal.SIGSTOP)
    try:
        yield
    finally:
        hot.nodes[broker].signal(signal.SIGCONT)


def test_a_master_that_was_asleep_acknowledges_nothing_when_it_wakes_up_and_follows(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot", {"controller": {"session_timeout_ms": 3000}}) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        create_topic(hot.bootstrap, OTHER, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS, settings={"socket.timeout.ms": "3000"}) as load:
            load.wait_grown()
            mine = led_by(hot, 101, OTHER)

            async def pinned() -> list[int]:
                """Requests that were sent before it sleeps, while it sleeps, and after it has woken up."""
                async with contextlib.AsyncExitStack() as stack:
                    port = hot.kafka_ports[101]
                    clients = [await stack.enter_async_context(KafkaClient("127.0.0.1", port)) for _ in mine]
                    with asleep(hot, 101):
                        for client, partition in zip(clients, mine, strict=True):
                            post(client, partition)
                        await asyncio.to_thread(hot.wait_masters, [101])
                        await asyncio.to_thread(load.wait_grown)
                    codes = []
                    for client, partition in zip(clients, mine, strict=True):
                        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                            codes.append(code_of(await client.receive()))
                            post(client, partition)
                            codes.append(code_of(await client.receive()))
                    return codes

            codes = asyncio.run(pinned())
            assert 0 not in codes, f"a zombie has acknowledged: {codes}"
            assert set(codes) <= RETRIABLE, codes
            revive(hot, 101)
            hot.wait_full()
            load.wait_grown()
        assert load.verify(hot.bootstrap) == []
        hot.kill(*BROKERS)
        assert_equal_logs(hot, BROKERS)


def revive(hot: HotCluster, broker: int) -> None:
    """Start a broker anew if it ends, as its supervisor would; return when it is ready."""
    process = hot.nodes[broker].process
    assert process is not None

    def settled() -> bool:
        if process.poll() is not None:
            print(f"broker {broker} has ended by itself: {process.returncode}")
            hot.begin(broker)
            hot.ready(broker)
            return True
        return hot.state(broker, [broker]) not in ("dead", None)

    eventually(settled)


def outcome(hot: HotCluster, partition: int, acks: str, timeout_ms: int = 3000) -> KafkaError | None:
    """What a producer that does not retry is told, once it has reached a leader."""
    found: list[KafkaError | None] = []

    def done(error: KafkaError | None, _message: Message) -> None:
        found.append(error)

    settings = {"acks": acks, "retries": 0, "request.timeout.ms": timeout_ms, "message.timeout.ms": 20_000}
    producer = Producer({"bootstrap.servers": hot.bootstrap, **settings, **QUIET})
    producer.produce(OTHER, b"once", partition=partition, on_delivery=done)
    assert producer.flush(30) == 0
    return found[0]


@pytest.mark.long
def test_without_its_quorum_a_master_acknowledges_nothing_and_goes_on_by_itself_when_the_others_are_back(
    tmp_path: Path,
) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        create_topic(hot.bootstrap, OTHER, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            mine = led_by(hot, 101, OTHER)
            hot.kill(102, 103)

            def refused() -> bool:
                error = outcome(hot, mine[0], "all")
                return error is not None and error.code() == NOT_ENOUGH_REPLICAS

            eventually(refused)
            before = {at: load.ends()[at] for at in range(PARTITIONS)}
            for _ in range(3):
                assert refused()
            early = asyncio.run(produced(hot, 101, mine[0], acks=1))
            assert early == 0, early  # acks=1 asks for the master's disk alone
            assert load.ends() == before, "something was acknowledged by one of three"
            assert any("replica set 102 has no master" in each for each in hot.ask("/status", [102, 103])["problems"])
            hot.begin(102, 103)
            hot.ready(102, 103)
            load.wait_grown()
            hot.wait_full()
        check(hot, load)


@pytest.mark.long
def test_with_automatic_degradation_the_one_that_is_left_acknowledges(tmp_path: Path) -> None:
    settings = {"replication": {"enable_auto_in_sync_replicas": True}}
    with hot_cluster(tmp_path / "hot", settings) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            hot.kill(103)
            hot.wait_masters([103])
            load.wait_grown()
            hot.kill(102)
            hot.wait_masters([102, 103])
            load.wait_grown()
            assert {row["quorum"] for row in hot.sets([102, 103]).values()} == {1}
            hot.begin(102, 103)
            hot.ready(102, 103)
            rows = hot.wait_full()
            eventually(lambda: {row["quorum"] for row in hot.sets().values()} == {2})
            assert set(rows) == set(BROKERS)
            hot.kill(101)
            hot.wait_masters([101])
            load.wait_grown()
            hot.begin(101)
            hot.ready(101)
        check(hot, load)


class PlainProducer:
    """A producer with librdkafka's defaults, in a thread; notes errors and the longest time without an answer."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, **QUIET})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._last = [0.0] * PARTITIONS
        self.stall_s = [0.0] * PARTITIONS
        self.errors: list[str] = []
        self.acknowledged = 0

    def __enter__(self) -> PlainProducer:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._stopping.set()
        self._thread.join(30)
        assert self._producer.flush(60) == 0

    def _noting(self, partition: int) -> Callable[[KafkaError | None, Message], None]:
        def done(error: KafkaError | None, _message: Message) -> None:
            now = time.monotonic()
            if error is not None:
                self.errors.append(str(error))
            elif self._last[partition]:
                self.stall_s[partition] = max(self.stall_s[partition], now - self._last[partition])
            self._last[partition] = now
            self.acknowledged += 1

        return done

    def _run(self) -> None:
        while not self._stopping.is_set():
            for partition in range(PARTITIONS):
                self._producer.produce(TOPIC, b"plain", partition=partition, on_delivery=self._noting(partition))
            self._producer.poll(0.01)


@pytest.mark.long
def test_a_master_that_is_told_to_end_hands_over_and_no_error_reaches_a_client_with_default_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        create_topic(hot.bootstrap, "checked", PARTITIONS)
        with PlainProducer(hot.bootstrap) as plain, PartitionLoad(hot.bootstrap, "checked", PARTITIONS) as load:
            load.wait_grown()
            eventually(lambda: plain.acknowledged > 20 * PARTITIONS)
            stalls = []
            for broker in BROKERS:
                load.begin_round()
                plain.stall_s = [0.0] * PARTITIONS
                began = time.monotonic()
                assert hot.nodes[broker].stop() == 0
                took = time.monotonic() - began
                hot.wait_masters([broker])
                load.wait_grown()
                stalls.append((broker, took, max(load.gaps_s().values()), max(plain.stall_s)))
                hot.begin(broker)
                hot.ready(broker)
                hot.wait_full()
        assert plain.errors == []
        check(hot, load)
    with capsys.disabled():
        for broker, took, quick, default in stalls:
            print(f"\nSIGTERM of {broker}: ended in {took:.2f} s; stalls {quick:.2f} s, with defaults {default:.2f} s")
