"""How long transactions stall while the partition of their coordinator moves, beside a plain producer at its moves.

    python -m bench.transaction_moves [--moves 30] [--ids 200] [--replicas 3]

Three brokers and three controllers as processes. An idempotent producer writes to one partition, and a transactional
one commits every 20 ms to another, which does not move. In turns the first partition moves to the next broker, and the
partition of `__transaction_state` that has the transactional id. A stall is the longest time between two
acknowledgements, or two commits, around a move. `--ids` other transactional ids have their state in the same partition,
so that there is something to load. Both clients have back-offs of 10 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from bench._common import percentile, quick, row
from bench.partition_moves import AFTER_S, longest_gap_ms
from tests.e2e.backends import create_topic
from tests.support.cluster_process import UpCluster, eventually, up_cluster
from tidelog.cli.client import ClusterConnection

STATE_TOPIC = "__transaction_state"
PLAIN_TOPIC, TOPIC = "plain", "in-transactions"
EVERY_S = 0.02
BACK_OFF_MS = 10
SETTLE_S = 1.0
PATIENCE_S = 60.0
GOAL = 3.0


class Stream(threading.Thread):
    """Calls `step` every `EVERY_S`, and notes when it was done."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.done: list[float] = []
        self.error: Exception | None = None
        self.stopping = threading.Event()
        self._step = step

    def run(self) -> None:
        """The thread's main function."""
        try:
            while not self.stopping.wait(EVERY_S):
                self._step()
                self.done.append(time.monotonic())
        except Exception as error:  # noqa: BLE001  # raised by `end`
            self.error = error

    def end(self) -> None:
        """Stop. Raises what ended it early, and `RuntimeError` if its last step does not end."""
        self.stopping.set()
        self.join(PATIENCE_S)
        if self.is_alive():
            raise RuntimeError(f"a step of the stream has not ended in {PATIENCE_S:g} s")
        if self.error is not None:
            raise self.error


def plain_step(bootstrap: str) -> Callable[[], None]:
    """Write a record and wait for its acknowledgement."""
    producer = _producer(bootstrap, {"enable.idempotence": True})

    def step() -> None:
        producer.produce(PLAIN_TOPIC, bytes(1_000), partition=0)
        assert producer.flush(PATIENCE_S) == 0

    return step


def transaction_step(bootstrap: str, name: str) -> Callable[[], None]:
    """Write a record and commit it."""
    producer = _producer(bootstrap, {"transactional.id": name})
    producer.init_transactions(PATIENCE_S)

    def step() -> None:
        producer.begin_transaction()
        producer.produce(TOPIC, bytes(1_000), partition=0)
        producer.commit_transaction(PATIENCE_S)

    return step


def _producer(bootstrap: str, settings: dict[str, Any]) -> Producer:
    quickly = {"retry.backoff.ms": BACK_OFF_MS, "linger.ms": 0, "log_level": 0}
    return Producer({"bootstrap.servers": bootstrap, **quickly, **settings})


def leader(cluster: ClusterConnection, topic: str) -> int:
    """Return the broker of partition 0."""
    return int(cluster.get(f"/partitions?topic={topic}")["partitions"][0]["broker"])


def stall_ms(cluster: ClusterConnection, topic: str, stream: Stream) -> float:
    """Move partition 0 of a topic to the next broker; return the stream's longest gap meanwhile, in ms."""
    to = leader(cluster, topic) % 3 + 1
    began = time.monotonic()
    cluster.post("/moves", {"moves": [{"topic": topic, "partition": 0, "to": to}]})
    eventually(lambda: leader(cluster, topic) == to)
    here = time.monotonic()
    eventually(lambda: bool(stream.done) and stream.done[-1] > here + AFTER_S)
    found = longest_gap_ms(stream.done, began, here + AFTER_S)
    time.sleep(SETTLE_S)
    return found


def measure(up: UpCluster, options: argparse.Namespace) -> None:
    """Move both in turns, and print the rows."""
    for topic in (PLAIN_TOPIC, TOPIC):
        create_topic(up.bootstrap, topic, 1)
    cluster = ClusterConnection(up.bootstrap)
    for number in range(options.ids):
        transaction_step(up.bootstrap, f"other-{number}")()
    plain = Stream(plain_step(up.bootstrap))
    transactions = Stream(transaction_step(up.bootstrap, "measured"))
    plain.start()
    transactions.start()
    time.sleep(SETTLE_S)
    began = time.monotonic()
    time.sleep(2 * SETTLE_S)
    quiet = longest_gap_ms(transactions.done, began, time.monotonic())
    of_plain: list[float] = []
    of_transactions: list[float] = []
    for _ in range(options.moves):
        of_plain.append(stall_ms(cluster, PLAIN_TOPIC, plain))
        of_transactions.append(stall_ms(cluster, STATE_TOPIC, transactions))
    plain.end()
    transactions.end()
    counts = f"{len(transactions.done)} commits, {len(plain.done)} records"
    print(f"  {counts}; longest time between two commits without a move: {quiet:.0f} ms")
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        limit, found = percentile(of_plain, part), percentile(of_transactions, part)
        row(
            f"transactions stall, coordinator moves with {options.ids} ids, {name}",
            f"{found:.0f} ms (max {max(of_transactions):.0f})",
            limit=f"plain producer {limit:.0f} ms (max {max(of_plain):.0f})",
            ratio=f"{found / limit:.2f}",
            goal=f"≤ {GOAL:g}" if name == "p50" else "",
            holds=statistics.median(of_transactions) <= GOAL * statistics.median(of_plain) if name == "p50" else None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=5 if quick() else 30)
    parser.add_argument("--ids", type=int, default=20 if quick() else 200)
    parser.add_argument("--replicas", type=int, default=3, help="brokers that have each WAL, 1 to 3")
    options = parser.parse_args()
    flags = ("--set", f"replication.total_replicas={options.replicas}", "--set", "group.transaction_topic_partitions=1")
    with (
        tempfile.TemporaryDirectory(prefix="tidelog-moves-") as directory,
        up_cluster(Path(directory) / "data", flags=flags) as up,
    ):
        measure(up, options)


if __name__ == "__main__":
    main()
