"""Clusters of three brokers under measurement, started alike: empty data directories on one disk, a controller too.

- `TidelogCluster`: `tidelog serve` processes; each WAL has one, two or three replicas, with a quorum of 1, 2 and 2.
- `KafkaCluster`: Apache Kafka in KRaft mode, three replicas of each partition, `min.insync.replicas=2`.

A cluster is used once: who has killed one of its brokers throws it away.

Entry: `Cluster`, `TidelogCluster`, `KafkaCluster`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from bench._common import directory, memory_directory
from bench._peers import KAFKA_JAVA, format_storage, new_cluster_id
from tests.support.hot_cluster import HotCluster
from tests.support.ports import free_port

QUORUMS = {1: 1, 2: 2, 3: 2}
"""Write quorum by the number of replicas."""
BROKERS = 3
START_S = 90.0
CONTROLLER_JAVA = ("-Xms256m", "-Xmx256m", "-XX:+UseG1GC")
KAFKA_NODE = """node.id={node}
controller.listener.names=CONTROLLER
controller.quorum.voters=1@127.0.0.1:{controller}
log.dirs={directory}/log
{role}
"""
KAFKA_CONTROLLER = "process.roles=controller\nlisteners=CONTROLLER://127.0.0.1:{port}"
KAFKA_BROKER = """process.roles=broker
listeners=PLAINTEXT://127.0.0.1:{port}
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
group.initial.rebalance.delay.ms=0
message.max.bytes=4194304
{more}"""


class Cluster(Protocol):
    """Three brokers under measurement."""

    @property
    def bootstrap(self) -> str:
        """`host:port` of every broker, for clients."""
        ...

    @property
    def replicas(self) -> int:
        """Replicas of each partition."""
        ...

    def start(self) -> None:
        """Start all nodes; returns when clients are served and every replica is in sync."""
        ...

    def broker_pids(self) -> dict[int, int]:
        """The brokers' processes, by the id that clients see."""
        ...

    def kill(self) -> None:
        """End all nodes at once."""
        ...


class TidelogCluster:
    """One controller, three brokers; `settings` are `section.key=value`.

    With `bucket_in_memory` the embedded store's files are in memory, as if the bucket were on other machines.
    """

    def __init__(
        self, path: Path, replicas: int = 3, settings: Iterable[str] = (), *, bucket_in_memory: bool = False
    ) -> None:
        self.replicas = replicas
        sections: dict[str, dict[str, Any]] = {
            "replication": {"total_replicas": replicas, "in_sync_replicas": QUORUMS[replicas]},
            "admin": {"port": 0},
        }
        for setting in settings:
            name, _, value = setting.partition("=")
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = parsed(value)
        path.mkdir(parents=True)
        self._stack = contextlib.ExitStack()
        self._cluster = HotCluster(path, sections, 1, BROKERS)
        if bucket_in_memory and (memory := memory_directory()) is not None:
            bucket = self._stack.enter_context(directory(memory))
            (path / "bucket").rmdir()
            (path / "bucket").symlink_to(bucket, target_is_directory=True)

    @property
    def bootstrap(self) -> str:
        """See `Cluster`."""
        return self._cluster.bootstrap

    def start(self) -> None:
        """See `Cluster`."""
        self._cluster.start()
        self._cluster.wait_full(self.replicas)

    def broker_pids(self) -> dict[int, int]:
        """See `Cluster`."""
        return {each: self._cluster.nodes[each].pid for each in self._cluster.kafka_ports}

    def kill(self) -> None:
        """See `Cluster`."""
        self._cluster.close()
        self._stack.close()


def parsed(text: str) -> bool | int | float | str:
    """A setting's value in the type that TOML gives it."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class KafkaCluster:
    """A controller and three brokers, each in a JVM; `more` are additional lines of the brokers' properties."""

    replicas = BROKERS

    def __init__(self, path: Path, jars: Path, more: str = "") -> None:
        self._path = path
        self._jars = jars
        self._more = more
        self._ports = {node: free_port() for node in range(1, 2 + BROKERS)}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def bootstrap(self) -> str:
        """See `Cluster`."""
        return ",".join(f"127.0.0.1:{port}" for node, port in self._ports.items() if node != 1)

    def start(self) -> None:
        """See `Cluster`. Raises `RuntimeError` with the output of a node that does not start."""
        cluster_id = new_cluster_id()
        for node, port in self._ports.items():
            place = self._path / f"node-{node}"
            place.mkdir(parents=True)
            properties = place / "server.properties"
            properties.write_text(self.properties(node, port, place))
            format_storage(self._jars, cluster_id, properties)
        for node in self._ports:
            self._start_node(node)
        deadline = time.monotonic() + START_S
        while not self._serves():
            for node, process in self._processes.items():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Kafka node {node} did not start:\n{self._said(node)}")
            time.sleep(0.1)

    def properties(self, node: int, port: int, place: Path) -> str:
        """The configuration of a node: 1 is the controller."""
        role = KAFKA_CONTROLLER if node == 1 else KAFKA_BROKER
        text = role.format(port=port, more=self._more)
        return KAFKA_NODE.format(node=node, controller=self._ports[1], directory=place.absolute(), role=text)

    def _start_node(self, node: int) -> None:
        place = self._path / f"node-{node}"
        java = [str(shutil.which("java")), "-cp", f"{self._jars}/*", *(KAFKA_JAVA if node != 1 else CONTROLLER_JAVA)]
        with (place / "output").open("wb") as output:
            self._processes[node] = subprocess.Popen(
                [*java, "kafka.Kafka", str(place / "server.properties")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _said(self, node: int) -> str:
        return (self._path / f"node-{node}" / "output").read_text(errors="replace")[-2000:]

    def _serves(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        try:
            found = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0}).list_topics(timeout=5)
        except KafkaException:
            return False
        return len(found.brokers) == BROKERS

    def broker_pids(self) -> dict[int, int]:
        """See `Cluster`."""
        return {node: process.pid for node, process in self._processes.items() if node != 1}

    def kill(self) -> None:
        """See `Cluster`."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait(30)


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """Start a cluster; kill it at the end."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


def leaders(bootstrap: str, topic: str) -> dict[int, tuple[int, tuple[str, int]]]:
    """By partition: the leader's id and address. Raises `RuntimeError` if they do not all have one in time."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = admin.list_topics(topic, 10)
        partitions = found.topics[topic].partitions
        if partitions and all(one.leader in found.brokers for one in partitions.values()):
            brokers: Mapping[int, Any] = found.brokers
            return {
                index: (one.leader, (brokers[one.leader].host, int(brokers[one.leader].port)))
                for index, one in sorted(partitions.items())
            }
        time.sleep(0.05)
    raise RuntimeError(f"topic {topic} has partitions without a leader")
