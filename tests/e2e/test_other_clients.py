"""Clients that many use and whose code the others here do not share: each walks over all that it can do. Three write
through deaths, pauses and moves, after which what they were told is there.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import wait_until
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.external import External, Program
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tests.support.java import Java
from tidelog.chaos.serve_cluster import tidelog_json

pytestmark = [pytest.mark.slow, pytest.mark.long]
PARTITIONS = 6
WRITING_S = 40
PAUSE_S = 6.0
CLIENTS = Path(__file__).parents[1] / "clients"
JAVA_VERSIONS = ("2.1.1", "2.8.2", "3.4.1", "3.9.1")
SARAMA_VERSIONS = ("2.1.0", "3.6.0", "4.1.0")
"""Of Kafka, whose requests it then sends."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    with up_cluster(tmp_path_factory.mktemp("others") / "data") as started:
        yield started


def walk(program: Program, output: Path, *arguments: str, steps: int) -> None:
    """Run it to its end: every step must be all right, and none may be missing."""
    with program.running(output, *arguments) as running:
        running.wait()
    told = running.lines
    assert not [each for each in told if not each.startswith("ok ")]
    assert len(told) == steps, told


@pytest.mark.parametrize("version", SARAMA_VERSIONS)
def test_sarama(up: UpCluster, go_programs: Callable[[str], Program], version: str, tmp_path: Path) -> None:
    """A client of Kafka 2.1 knows three of the steps not."""
    arguments = ("surface", up.bootstrap, f"sarama-{version}", version)
    walk(go_programs("sarama"), tmp_path / "out", *arguments, steps=38 if version == "2.1.0" else 41)


def test_kafka_go(up: UpCluster, go_programs: Callable[[str], Program], tmp_path: Path) -> None:
    walk(go_programs("kafkago"), tmp_path / "out", "surface", up.bootstrap, "kafka-go", steps=32)


def test_kafkajs(up: UpCluster, node_programs: Callable[[str], Program], tmp_path: Path) -> None:
    walk(node_programs("kafkajs"), tmp_path / "out", "surface", up.bootstrap, "kafkajs", steps=24)


def test_platformatic(up: UpCluster, node_programs: Callable[[str], Program], tmp_path: Path) -> None:
    walk(node_programs("platformatic"), tmp_path / "out", "surface", up.bootstrap, "platformatic", steps=25)


@pytest.mark.parametrize("version", JAVA_VERSIONS)
def test_an_older_java_client(up: UpCluster, older_java_clients: Path, version: str, tmp_path: Path) -> None:
    classes = tmp_path / "classes"
    classes.mkdir()
    program = Java(classes).program("OlderClient", older_java_clients / version)
    with program.running(tmp_path / "out", up.bootstrap, f"java-{version}") as running:
        running.wait()
    told = [each for each in running.lines if "SLF4J" not in each]
    assert not [each for each in told if not each.startswith("ok ")]
    assert len(told) == 29


def test_older_python_clients(up: UpCluster, older_python_clients: str, tmp_path: Path) -> None:
    program = Program([older_python_clients, str(CLIENTS / "python" / "older_clients.py")])
    walk(program, tmp_path / "out", up.bootstrap, "older-python", steps=27)


# --- through deaths, pauses and moves ------------------------------------------------------------------------------


def disturb(hot: HotCluster, topic: str, rng: random.Random, until: float) -> None:
    """Kill, stop, pause and move, one after the other, each at least once."""
    turns = 0
    while time.monotonic() < until or turns < 4:
        broker = rng.choice(BROKERS)
        process = hot.nodes[broker].process
        assert process is not None
        if turns % 4 == 0:
            hot.kill(broker)
            hot.begin(broker)
            hot.ready(broker)
        elif turns % 4 == 1:
            process.terminate()
            process.wait(60)
            hot.begin(broker)
            hot.ready(broker)
        elif turns % 4 == 2:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            os.kill(process.pid, signal.SIGCONT)
        else:
            moved = [f"{topic}:{each}" for each in range(PARTITIONS)]
            tidelog_json(hot.bootstrap, "partition", "move", *moved, "--to", str(broker))
        turns += 1
        hot.wait_full()


def read(bootstrap: str, topic: str, partition: int) -> list[int]:
    options = {"group.id": "reader", "enable.auto.commit": False, "enable.partition.eof": True, **QUIET}
    consumer = Consumer({"bootstrap.servers": bootstrap, **options})
    consumer.assign([TopicPartition(topic, partition, 0)])
    found: list[int] = []

    def ended() -> bool:
        for message in consumer.consume(1000, 1.0):
            if message.error():
                return True
            value = message.value()
            assert value is not None
            found.append(int(value))
        return False

    wait_until(ended, f"{topic}-{partition} is read to its end", 60.0)
    consumer.close()
    return found


def acked(writer: External) -> list[list[int]]:
    """What it was told, by partition."""
    told = [each.split()[2:] for each in writer.lines if each.startswith("acked ")]
    assert not [each for each in writer.lines if each.startswith("error")]
    return [[int(number) for number in numbers] for numbers in told]


@pytest.mark.parametrize("client", ["sarama", "kafkago", "kafkajs"])
def test_what_a_client_was_told_is_there_after_deaths_pauses_and_moves(
    client: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """kafka-go has no idempotent producer: what it sent again may be there twice."""
    fixture = "go_programs" if client in ("sarama", "kafkago") else "node_programs"
    program: Program = request.getfixturevalue(fixture)(client)
    with hot_cluster(tmp_path / "hot", controllers=3) as hot:
        create_topic(hot.bootstrap, client, PARTITIONS)
        ends = time.monotonic() + WRITING_S
        writing = ("write", hot.bootstrap, client, PARTITIONS, WRITING_S)
        with program.running(tmp_path / "out", *writing) as writer:
            disturb(hot, client, random.Random(1), ends - PAUSE_S)
            writer.wait()
        for partition, numbers in enumerate(acked(writer)):
            found = read(hot.bootstrap, client, partition)
            assert len(numbers) > WRITING_S
            assert set(found) >= set(numbers)
            if client != "kafkago":
                assert found == sorted(set(found))
