"""Kafka Connect, distributed, with exactly-once sources and its default replication factors, against three brokers."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import value_of, wait_until
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.external import External
from tests.support.java import Java
from tests.support.ports import free_port
from tests.support.topic_facts import topic_facts

pytestmark = [pytest.mark.servers("kafka_apps"), pytest.mark.slow, pytest.mark.long]
TOPIC, LINES = "lines", 2_000
WIDTH = 600
"""FileStreamSource keeps back whole lines in its buffer of 1024 characters until the file grows: so lines are longer
than half of that."""


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpCluster]:
    with up_cluster(tmp_path / "data") as started:
        yield started


class Worker:
    """The worker of a Connect cluster: started, killed and started again on the same port."""

    def __init__(self, java: Java, jars: Path, folder: Path, bootstrap: str) -> None:
        self._program = java.main(
            "org.apache.kafka.connect.cli.ConnectDistributed", jars, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        )
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        self._file = folder / "worker.properties"
        converter = "org.apache.kafka.connect.storage.StringConverter"
        settings = {
            "bootstrap.servers": bootstrap,
            "group.id": "workers",
            "listeners": self._url,
            "key.converter": converter,
            "value.converter": converter,
            "config.storage.topic": "connect-configs",
            "offset.storage.topic": "connect-offsets",
            "status.storage.topic": "connect-status",
            "exactly.once.source.support": "enabled",
            "scheduled.rebalance.max.delay.ms": "0",
            # A worker reads its offsets past all open transactions: one that a killed worker has left holds it up.
            "producer.transaction.timeout.ms": "10000",
        }
        self._file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    @contextlib.contextmanager
    def running(self) -> Iterator[External]:
        with self._program.running(self._folder / "worker.log", self._file) as process:
            try:
                yield process
            except AssertionError as error:
                raise AssertionError(f"{error}\n" + "\n".join(process.lines[-60:])) from error

    def ask(self, path: str, **body: object) -> object:
        """A request to the worker; None if it is not there yet, or cannot answer now."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method="PUT" if body else "GET"
        )
        try:
            with urllib.request.urlopen(request, timeout=100) as response:
                return json.load(response)
        except urllib.error.URLError:
            return None

    def runs(self, connector: str) -> bool:
        """Whether the connector's only task runs."""
        found = self.ask(f"/connectors/{connector}/status")
        return isinstance(found, dict) and [task["state"] for task in found["tasks"]] == ["RUNNING"]


class Lines:
    """The committed records of the topic, read on and on."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "reader", "isolation.level": "read_committed", **QUIET}
        )
        self._consumer.assign([TopicPartition(TOPIC, 0, 0)])
        self.found: list[str] = []

    def count(self) -> int:
        """Read what is there; return how many lines have been read."""
        for message in self._consumer.consume(1000, 0.1):
            assert message.error() is None, message.error()
            self.found.append(value_of(message).decode())
        return len(self.found)

    def close(self) -> None:
        self._consumer.close()


def test_each_line_of_a_file_arrives_once_although_the_worker_is_killed(
    up: UpCluster, java: Java, kafka_apps: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source.txt"
    wanted: list[str] = []

    def write(count: int) -> None:
        more = [f"line {number} ".ljust(WIDTH, "-") for number in range(len(wanted), len(wanted) + count)]
        wanted.extend(more)
        with source.open("a") as file:
            file.writelines(f"{line}\n" for line in more)

    create_topic(up.bootstrap, TOPIC, 1)
    write(LINES)
    worker = Worker(java, kafka_apps, tmp_path, up.bootstrap)
    with contextlib.closing(Lines(up.bootstrap)) as lines:
        with worker.running() as process:
            wait_until(lambda: worker.ask("/") is not None, "the worker answers")
            connector = {
                "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
                "file": str(source),
                "topic": TOPIC,
                "batch.size": "20",
                "exactly.once.support": "required",
            }
            wait_until(lambda: worker.ask("/connectors/file/config", **connector) is not None, "it takes the connector")
            wait_until(lambda: lines.count() >= LINES // 10, "lines arrive")
            process.kill()
        assert lines.count() < LINES, "it was killed in the middle"
        write(LINES)
        with worker.running():
            wait_until(lambda: lines.count() >= len(wanted), "all lines arrive", 240)
            assert worker.runs("file")
            write(1)
            wait_until(lambda: lines.count() >= len(wanted), "one more")
        assert lines.found == wanted
    facts = {
        topic: topic_facts(up.bootstrap, topic) for topic in ("connect-configs", "connect-offsets", "connect-status")
    }
    assert {topic: (replicas, policy) for topic, (_, replicas, policy) in facts.items()} == dict.fromkeys(
        facts, (3, "compact")
    )
