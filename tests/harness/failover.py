"""A broker with its WAL in the bucket dies under load, again and again; then every promise is checked.

Three nodes, each controller and broker in a process of its own, and one idempotent producer over many partitions. In
each round the partitions are spread evenly and one node is killed (`kill -9`), or in every fourth round paused and
woken up (SIGSTOP, SIGCONT), by turns as soon as it is declared dead and when others have taken over: a zombie with
everything in memory that it had. It is started again when the round is over. Measured, in seconds:

- `declared`: from the signal until a successor was elected in its place. A killed broker's connection closes and it is
  dead at once, unless its controller was the active one; a paused one is silent for `controller.session_timeout_ms`;
- `writable`: from then until the last of its partitions had acknowledged a record, to the producer of the load or to a
  client that starts then, whichever came first (starting librdkafka takes a second; a producer that has requests on
  their way into a paused process waits for that);
- `stalled`: the longest time between two acknowledgements that the producer of the load saw, from the signal on. Its
  requests into a paused process end by its own `socket.timeout.ms`, or when the process wakes up;
- `zombie`: from SIGCONT until the process has ended by itself;
- the takeover's own steps, in milliseconds; `took` is the whole round.

At the end: no produce error, every acknowledged record at its offset, none twice, all in order. A zombie's
acknowledgement would be an offset that holds something else. A round that does not end within `--round-timeout-s` ends
the run, with what the nodes said last; `--minutes` bounds the whole. Each line ends with the load average and the
takeover's steps.

    python -m tests.harness.failover --rounds 50 [--partitions 24] [--endpoint URL --access-key K --secret-key S]

Without an endpoint the bucket is a directory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from tests.e2e.backends import create_topic
from tests.support.cluster_process import ServeCluster, ServeNode, eventually
from tests.support.partition_load import PartitionLoad
from tests.support.s3_servers import new_bucket
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import TidelogError

TOPIC = "load"
PROBED = "probed"
"""A topic like the other one; new clients write to it."""
NODES = (1, 2, 3)
GOAL_S = 3.0


@dataclass
class Round:
    """What one death came to."""

    kind: str
    broker: int
    partitions: int
    declared_s: float
    writable_s: float
    stalled_s: float
    zombie_s: float | None = None
    steps_ms: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0

    def line(self, number: int) -> str:
        """For the table."""
        zombie = f"{self.zombie_s:6.2f}" if self.zombie_s is not None else "     -"
        steps = " ".join(f"{name} {took:.0f}" for name, took in self.steps_ms.items())
        return (
            f"{number:5} {self.kind:5} {self.broker:6} {self.partitions:10} {self.declared_s:8.2f} "
            f"{self.writable_s:8.2f} {self.stalled_s:7.2f} {zombie} {self.took_s:6.1f} {os.getloadavg()[0]:5.1f}  "
            f"{steps}"
        )


HEADER = "round kind  broker partitions declared writable stalled zombie   took  load  steps of the takeover, ms"


class Nodes(ServeCluster):
    """Three nodes of both roles, their WALs in the bucket."""

    def __init__(self, directory: Path, sections: dict[str, dict[str, Any]]) -> None:
        super().__init__(directory, controllers=len(NODES), combined=True)
        self._sections = sections

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        found = super().settings(node_id)
        for section, values in self._sections.items():
            found.setdefault(section, {}).update(values)
        return found

    def others(self, node_id: int) -> str:
        """Where the others listen."""
        return ",".join(f"127.0.0.1:{port}" for each, port in self.kafka_ports.items() if each != node_id)


def ask(bootstrap: str, path: str, holds: Callable[[Any], Any], timeout_s: float) -> Any:
    """What any of the brokers answers, once it holds."""
    clusters = [ClusterConnection(address) for address in bootstrap.split(",")]
    answers: dict[str, Any] = {}

    def once() -> Any:
        for cluster in clusters:
            try:
                found = answers[cluster.bootstrap] = cluster.get(path)
            except TidelogError as error:
                answers[cluster.bootstrap] = error
            else:
                if holds(found):
                    return found
        return None

    try:
        return eventually(once, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{path}: {error}; the last answers: {answers}") from error


def spread(bootstrap: str, partitions: int, timeout_s: float) -> None:
    """Every broker ready, and partition p of both topics on broker p mod 3 + 1."""
    ask(
        bootstrap,
        "/status",
        lambda found: [node["state"] != "dead" for node in found["nodes"]] == [True] * 3,
        timeout_s,
    )
    wanted = {(topic, at): at % len(NODES) + 1 for topic in (TOPIC, PROBED) for at in range(partitions)}

    def moved() -> bool:
        path = f"/partitions?topic={TOPIC}&topic={PROBED}"
        rows = ask(bootstrap, path, lambda answer: answer["partitions"], timeout_s)["partitions"]
        found = {(row["topic"], row["partition"]): row["leader"] for row in rows}
        moves = [{"topic": at[0], "partition": at[1], "to": to} for at, to in wanted.items() if found.get(at) != to]
        if moves:
            with contextlib.suppress(TidelogError):
                ClusterConnection(bootstrap).post("/moves", {"moves": moves})
        return not moves

    eventually(moved, timeout_s)


def probe(bootstrap: str, partitions: list[int], timeout_s: float) -> float:
    """Start a client that writes one record to each partition; when the last one was acknowledged, in wall-clock s.

    It is not idempotent: librdkafka takes a second to fetch a producer id, which is not what is measured.
    """
    errors: list[str] = []
    last = [0.0]

    def done(error: KafkaError | None, _message: Message) -> None:
        last[0] = time.time()
        if error is not None:
            errors.append(str(error))

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "log_level": 0,
            "acks": "all",
            "retry.backoff.ms": 10,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 100,
            "message.timeout.ms": int(timeout_s * 1000),
        }
    )
    for partition in partitions:
        producer.produce(PROBED, b"probe", partition=partition, on_delivery=done)
    left = producer.flush(timeout_s + 5)
    assert not errors and not left, f"a new client could not write: {errors[:3]}, {left} records without an outcome"
    return last[0]


def one_round(nodes: Nodes, load: PartitionLoad, number: int, arguments: argparse.Namespace) -> Round:
    """One broker dies; returns when it is back."""
    timeout_s, broker = arguments.round_timeout_s, number % len(NODES) + 1
    spread(nodes.bootstrap, arguments.partitions, timeout_s)
    load.wait_grown(timeout_s=timeout_s)
    ask(nodes.others(broker), "/failover", lambda found: not found["taking_over"], timeout_s)
    node, others = nodes.nodes[broker], nodes.others(broker)
    pauses = number % arguments.pause_every == arguments.pause_every - 1
    wakes_early = pauses and number // arguments.pause_every % 2 == 0
    mine = [at for at in range(arguments.partitions) if at % len(NODES) + 1 == broker]
    died_s = time.time()
    load.begin_round()
    node.signal(signal.SIGSTOP if pauses else signal.SIGKILL)

    def since_ms(found: Any) -> int:
        """When the takeover of this death began, once it has."""
        work = [*found["lost"], *found["taking_over"], *found["taken_over"]]
        starts = [one["since_ms"] or 0 for one in work if one["broker"] == broker]
        return max((each for each in starts if each >= died_s * 1000), default=0)

    declared_s = since_ms(ask(others, "/failover", since_ms, timeout_s)) / 1000
    zombie = _wake(node, timeout_s) if wakes_early else None
    probed_s = probe(others, mine, timeout_s) - declared_s

    def done(found: Any) -> list[Any]:
        taken_over: list[Any] = found["taken_over"]
        return [one for one in taken_over if one["broker"] == broker and one["since_ms"] >= died_s * 1000]

    takeover = done(ask(others, "/failover", done, timeout_s))[-1]
    if pauses and zombie is None:
        time.sleep(arguments.asleep_s)
        zombie = _wake(node, timeout_s)
    load.wait_grown(timeout_s=timeout_s)
    stalled_s = max(gap for at, gap in load.gaps_s().items() if at in mine)
    assert node.process is not None
    node.process.wait(timeout_s)
    node.start()
    node.wait_ready(timeout_s)
    return Round(
        ("wake" if wakes_early else "pause") if pauses else "kill",
        broker,
        takeover["partitions_placed"],
        declared_s - died_s,
        max(0.0, min(probed_s, stalled_s - (declared_s - died_s))),
        stalled_s,
        zombie.result(timeout_s) if zombie is not None else None,
        takeover["steps_ms"],
    )


def _wake(node: ServeNode, timeout_s: float) -> Future[float]:
    """Wake a zombie up; gives the seconds until its process has ended."""
    process, ended = node.process, Future[float]()
    assert process is not None
    woken_s = time.time()
    node.signal(signal.SIGCONT)

    def watch() -> None:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            ended.set_exception(AssertionError(f"the zombie lives: {error}"))
        else:
            ended.set_result(time.time() - woken_s)

    threading.Thread(target=watch, daemon=True).start()
    return ended


def percentiles(values: list[float]) -> str:
    """Median, 99th percentile (the next value above) and largest."""
    if not values:
        return "-"
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    return f"p50 {at[0]:6.2f} s   p99 {at[1]:6.2f} s   max {ordered[-1]:6.2f} s"


def sections(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The configuration of the nodes."""
    found: dict[str, dict[str, Any]] = {
        "wal": {"kind": "s3"},
        "controller": {"session_timeout_ms": arguments.session_timeout_ms},
    }
    if arguments.endpoint:
        found["s3"] = {
            "endpoint": arguments.endpoint,
            "bucket": new_bucket(),
            "access_key_id": arguments.access_key,
            "secret_access_key": arguments.secret_key,
        }
    return found


def run(arguments: argparse.Namespace, directory: Path) -> list[str]:
    """All rounds; what was wrong."""
    nodes = Nodes(directory, sections(arguments))
    rounds: list[Round] = []
    problems: list[str] = []
    try:
        nodes.start()
        for topic in (TOPIC, PROBED):
            create_topic(nodes.bootstrap, topic, arguments.partitions)
        print(HEADER, flush=True)
        settings = dict(one.split("=", 1) for one in arguments.client)
        with PartitionLoad(nodes.bootstrap, TOPIC, arguments.partitions, settings=settings) as load:
            ends = time.monotonic() + 60 * arguments.minutes
            for number in range(arguments.rounds):
                began = time.monotonic()
                if began > ends:
                    print(f"{arguments.minutes:g} minutes are over", flush=True)
                    break
                try:
                    one = one_round(nodes, load, number, arguments)
                except AssertionError as error:
                    problems.append(f"round {number + 1} did not end: {error}")
                    _tell(nodes)
                    break
                one.took_s = time.monotonic() - began
                rounds.append(one)
                print(one.line(number + 1), flush=True)
                if arguments.verbose and one.kind != "kill":
                    _tell(nodes)
        problems += load.verify(nodes.bootstrap)
        count = load.count()
    finally:
        nodes.close()
    print(f"\n{len(rounds)} rounds, {count:,} records acknowledged, 2 x {arguments.partitions} partitions")
    machine = f"{os.cpu_count()} cores, load average at the end {os.getloadavg()[0]:.1f}"
    print(f"session time-out {arguments.session_timeout_ms} ms; {machine}")
    for title, kinds in (("killed", ("kill",)), ("paused", ("pause", "wake"))):
        mine = [one for one in rounds if one.kind in kinds]
        print(f"{title}: declared  {percentiles([one.declared_s for one in mine])}")
        print(f"{title}: writable  {percentiles([one.writable_s for one in mine])}")
        print(f"{title}: stalled   {percentiles([one.stalled_s for one in mine])}")
    print(f"zombie ends      {percentiles([one.zombie_s for one in rounds if one.zombie_s is not None])}")
    late = [number + 1 for number, one in enumerate(rounds) if one.writable_s > GOAL_S]
    print(f"rounds beyond {GOAL_S:g} s from declared to writable: {late or 'none'}")
    return problems


def _tell(nodes: Nodes) -> None:
    for node in nodes.nodes.values():
        print(f"--- node {node.node_id}\n" + "\n".join(node.output[-60:]), flush=True)


def main() -> int:
    """Run; exit code 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--partitions", type=int, default=24)
    parser.add_argument("--pause-every", type=int, default=4, help="one round in so many pauses; 1 for all")
    parser.add_argument("--asleep-s", type=float, default=0.0, help="how long a paused one sleeps on when replaced")
    parser.add_argument("--session-timeout-ms", type=int, default=10_000)
    parser.add_argument(
        "--client", action="append", default=[], metavar="KEY=VALUE", help="a setting of the load's producer"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins later")
    parser.add_argument("--round-timeout-s", type=float, default=90.0)
    parser.add_argument("--verbose", action="store_true", help="what the nodes said last, after each pause")
    parser.add_argument("--endpoint", default="", help="of an S3 server; its bucket is made")
    parser.add_argument("--access-key", default="")
    parser.add_argument("--secret-key", default="")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # and end the nodes
    gc.disable()  # each record is noted: to look through them stops the clients for longer and longer
    with tempfile.TemporaryDirectory(prefix="tidelog-failover-") as directory:
        problems = run(arguments, Path(directory))
    print(json.dumps(problems, indent=1) if problems else "nothing lost, doubled or reordered; no produce error")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
