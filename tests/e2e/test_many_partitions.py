"""Hundreds of partitions in one process: created, written, stopped, killed, read back and deleted by a real client."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import kafka
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.e2e.backends import QUIET
from tests.support.clients import place_of, value_of, wait_until
from tests.support.kafka_python import ClosingSelector
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.cli.client import ClusterConnection

TOPICS = [f"many-{number}" for number in range(10)]
EACH = 60
Place = tuple[str, int]
PLACES: list[Place] = [(topic, index) for topic in TOPICS for index in range(EACH)]


def write(bootstrap: str, kept: dict[Place, list[bytes]], round_number: int) -> None:
    """A record to each partition; they are acknowledged when this returns."""
    failed: list[str] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "on_delivery": lambda error, _message: failed.append(str(error)) if error is not None else None,
            **QUIET,
        }
    )
    for topic, index in PLACES:
        value = f"{round_number} {topic} {index}".encode()
        producer.produce(topic, value, partition=index)
        kept.setdefault((topic, index), []).append(value)
    assert producer.flush(60) == 0
    assert not failed, failed[:3]


def read(bootstrap: str, wanted: dict[Place, list[bytes]]) -> dict[Place, list[bytes]]:
    """All partitions from the start, by one consumer, until as much is there as is wanted."""
    found: dict[Place, list[bytes]] = {place: [] for place in wanted}
    left = sum(map(len, wanted.values()))
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "enable.auto.commit": False, **QUIET})
    consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for topic, index in wanted])

    def more() -> bool:
        nonlocal left
        for message in consumer.consume(2000, 0.2):
            assert message.error() is None, message.error()
            assert message.offset() == len(found[place_of(message)])
            found[place_of(message)].append(value_of(message))
            left -= 1
        return left <= 0

    try:
        wait_until(more, "everything is read")
    finally:
        consumer.close()
    return found


def create(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    for future in admin.create_topics([NewTopic(topic, EACH) for topic in TOPICS], request_timeout=60).values():
        future.result(60)


def counts(process: TidelogProcess) -> dict[str, int]:
    found: dict[str, int] = ClusterConnection(process.bootstrap).get("/status")["partitions"]
    return {name: found[name] for name in ("led", "open", "failing")}


@pytest.mark.long
def test_hundreds_of_partitions_keep_what_they_were_given_through_a_stop_and_a_kill(tmp_path: Path) -> None:
    kept: dict[Place, list[bytes]] = {}
    with running(tmp_path / "data") as process:
        create(process.bootstrap)
        assert counts(process) == {"led": len(PLACES), "open": len(PLACES), "failing": 0}
        write(process.bootstrap, kept, 1)
        assert process.stop() == 0, process.tail()
    with running(tmp_path / "data") as process:
        assert counts(process) == {"led": len(PLACES), "open": len(PLACES), "failing": 0}
        assert read(process.bootstrap, kept) == kept
        write(process.bootstrap, kept, 2)
        process.kill()
    with running(tmp_path / "data") as process:
        assert read(process.bootstrap, kept) == kept
        internal = counts(process)["led"] - len(PLACES)  # the offsets topic, which the consumers made
        admin = AdminClient({"bootstrap.servers": process.bootstrap, **QUIET})
        for future in admin.delete_topics(TOPICS[1:], request_timeout=60).values():
            future.result(60)
        nothing_more = {"led": EACH + internal, "open": EACH + internal, "failing": 0}
        wait_until(lambda: counts(process) == nothing_more, "deleted partitions are closed")
        left = {place: values for place, values in kept.items() if place[0] == TOPICS[0]}
        assert read(process.bootstrap, left) == left
        assert process.stop() == 0, process.tail()


def metric(process: TidelogProcess, name: str) -> float:
    with urllib.request.urlopen(ClusterConnection(process.bootstrap).admin_url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    [value] = [line.split()[1] for line in lines if line.split()[0] == name]
    return float(value)


@pytest.mark.long
def test_a_client_with_fetch_sessions_reads_hundreds_of_partitions_in_one(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        create(process.bootstrap)
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=process.bootstrap, selector=ClosingSelector, auto_offset_reset="earliest"
        )
        kept: dict[Place, list[bytes]] = {}
        found: dict[Place, list[bytes]] = {place: [] for place in PLACES}
        try:
            consumer.assign([kafka.TopicPartition(*place) for place in PLACES])
            for round_number in (1, 2, 3):
                write(process.bootstrap, kept, round_number)

                def more() -> bool:
                    for place, messages in consumer.poll(500).items():
                        found[place.topic, place.partition] += [message.value for message in messages]
                    return sum(map(len, found.values())) >= sum(map(len, kept.values()))

                wait_until(more, "everything is read")
                assert found == kept

            def session() -> tuple[float, float]:
                return metric(process, "tidelog_fetch_sessions"), metric(process, "tidelog_fetch_session_partitions")

            # The client takes partitions out of its session while it has records of them that nobody polled.
            wait_until(lambda: not consumer.poll(100) and session() == (1, len(PLACES)), "one session with all")
        finally:
            consumer.close()
        assert process.stop() == 0, process.tail()
