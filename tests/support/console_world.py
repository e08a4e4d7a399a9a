"""A cluster for the console's pages: three nodes under load, topics whose data is hostile, a group that lags, moves.

    with console_world(directory) as world:
        world.kill(3)

Names, keys, values and headers hold markup that would change the page's title if any of it were ever run.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.clients import wait_until
from tidelog.chaos.ports import free_port
from tidelog.chaos.serve_cluster import ServeCluster
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.controller.rpc.secret import admin_token, read_secret

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
HOSTILE_GROUP = f"group {HOSTILE}"
TOPICS = {"orders": 12, "payments": 6, "clicks": 8, "audit.log": 2}
RECORDS_PER_S = 400


class ConsoleCluster(ServeCluster):
    """Three nodes, each a controller and a broker with the console; each WAL has three replicas."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 3, combined=True)
        self.admin_ports = {node_id: free_port() for node_id in self.members}

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        found = super().settings(node_id)
        found["admin"] = {"port": self.admin_ports[node_id], "console": True}
        found["replication"] = {"total_replicas": 3, "in_sync_replicas": 2}
        found["controller"]["session_timeout_ms"] = 3_000
        found["kafka"]["rack"] = f"rack-{'abc'[node_id - 1]}"
        found["upload"] = {"age_ms": 2_000}
        found["group"] = {"initial_rebalance_delay_ms": 0, "offsets_topic_partitions": 4}
        return found


class ConsoleWorld:
    """The cluster and its load."""

    def __init__(self, cluster: ConsoleCluster) -> None:
        self.cluster = cluster
        self.token = admin_token(read_secret(cluster.directory / "secret"))
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def url(self, node_id: int = 1) -> str:
        """The console that a broker serves."""
        return f"http://127.0.0.1:{self.cluster.admin_ports[node_id]}/console/"

    def prepare(self) -> None:
        """Create the topics, and begin to write and read."""
        admin = AdminClient({"bootstrap.servers": self.cluster.bootstrap})
        topics = [
            NewTopic(name, partitions, config={"retention.ms": "86400000"}) for name, partitions in TOPICS.items()
        ]
        for future in admin.create_topics(topics).values():
            future.result(60)
        for work in (self._write, self._read_slowly):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()

    def _write(self) -> None:
        rng = random.Random(7)
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap, "linger.ms": 20, "log_level": 0})
        number = 0
        while not self._stopping.is_set():
            for _ in range(RECORDS_PER_S // 10):
                number += 1
                document = {
                    "order": number,
                    "customer": f"c-{rng.randrange(5_000)}",
                    "amount": round(rng.uniform(1, 900), 2),
                    "items": [{"sku": f"sku-{rng.randrange(900)}", "count": rng.randrange(1, 9)} for _ in range(3)],
                }
                topic = rng.choice(list(TOPICS))
                with contextlib.suppress(BufferError):  # a broker is down: the next round has room again
                    producer.produce(topic, json.dumps(document), f"key-{number % 997}")
            if number % 400 == 0:
                with contextlib.suppress(BufferError):
                    producer.produce("orders", HOSTILE, HOSTILE, headers=[(HOSTILE, HOSTILE.encode())])
            producer.poll(0)
            self._stopping.wait(0.1)
        producer.flush(10)

    def _read_slowly(self) -> None:
        config = {
            "bootstrap.servers": self.cluster.bootstrap,
            "group.id": HOSTILE_GROUP,
            "client.id": "billing",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
        consumer = Consumer(config)
        consumer.subscribe(["orders", "payments"])
        read = 0
        while not self._stopping.is_set():
            read += len(consumer.consume(20, 0.2))
            self._stopping.wait(0.1)
        consumer.close()

    def move(self, topic: str, partition: int, to: int) -> None:
        """Commit a move."""
        url = f"http://127.0.0.1:{self.living_admin_port()}"
        body = {"moves": [{"topic": topic, "partition": partition, "to": to}]}
        (result,) = http_json(url, "/moves", method="POST", body=body, token=lambda: self.token)["results"]
        assert result["error"] is None, result

    def move_now(self) -> None:
        """Move two partitions of `payments` between the living brokers, and wait until one has arrived; the other may
        be on its way."""
        url = f"http://127.0.0.1:{self.living_admin_port()}"
        living = [number for number, row in self.brokers().items() if row["state"] == "alive"]

        def moved() -> int:
            return sum(each["kind"] == "moved" for each in http_json(url, "/timeline")["events"])

        rows = http_json(url, "/partitions?topic=payments")["partitions"]
        before = moved()
        led = [row for row in rows if row["leader"] in living and row["to"] is None]
        assert len(led) >= 2 and len(living) >= 2, "two partitions can move"
        for row in led[:2]:
            self.move("payments", row["partition"], next(each for each in living if each != row["leader"]))
        wait_until(lambda: moved() > before, "a partition has moved", 60)

    def living_admin_port(self) -> int:
        return next(self.cluster.admin_ports[each] for each, node in self.cluster.nodes.items() if node.is_running())

    def brokers(self) -> dict[int, dict[str, Any]]:
        rows = http_json(f"http://127.0.0.1:{self.living_admin_port()}", "/brokers")["brokers"]
        return {row["id"]: row for row in rows}

    def kill(self, node_id: int) -> None:
        """Kill a node for good, and wait until it is known as dead and others lead its partitions."""
        self.cluster.nodes[node_id].kill()
        wait_until(lambda: self.brokers()[node_id]["state"] == "dead", f"broker {node_id} is dead", 60)

    def wait_history(self, seconds: float) -> None:
        """Let the load go on: plots need time. Waits until the broker's own history says that so much has passed."""
        url = f"http://127.0.0.1:{self.living_admin_port()}"

        def samples() -> int:
            found = http_json(url, "/history")["series"].get("produced_bytes", [])
            return sum(value is not None for value in found)

        wait_until(lambda: samples() * 10 >= seconds, f"{seconds} s of history", seconds + 120)

    def close(self) -> None:
        """End the load."""
        self._stopping.set()
        deadline = time.monotonic() + 30
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))


@contextlib.contextmanager
def console_world(directory: Path) -> Iterator[ConsoleWorld]:
    """Yield a world with its load running; everything is ended at the end."""
    cluster = ConsoleCluster(directory)
    try:
        cluster.start()
        world = ConsoleWorld(cluster)
        connection = ClusterConnection(cluster.bootstrap)
        wait_until(lambda: connection.get("/status")["level"] > 0, "the cluster has a feature level", 60)
        world.prepare()
        try:
            yield world
        finally:
            world.close()
    finally:
        cluster.close()
