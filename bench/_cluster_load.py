"""The load on a cluster of three brokers: throughput, acknowledgements at a low rate, and the death of a leader.

The same clients for every cluster: librdkafka to six partitions, `acks=all`; one raw socket to the leader of one
partition, which sends at fixed times; librdkafka again while a leader is killed, once with its default settings and
once with short back-offs.

Nothing is pinned: brokers and clients share the machine's cores.

Entry: `warm_up`, `throughput`, `latencies`, `failover`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from bench._clients import create_topic, produce_with_librdkafka, records_in
from bench._clusters import Cluster, leaders
from bench._common import cpu_seconds, in_process
from bench.produce_latency import raw_client
from bench.produce_throughput import LIBRDKAFKA
from tests.support.partition_load import PartitionLoad

RECORD_BYTES = 1024
PARTITIONS = 6
WARM_UP_S = 1.5
WARM_UP_TURNS = 3
WARM_UP_BYTES = 600_000_000
"""Then the WAL of each broker has files to recycle, and fills no new ones with zeros; or after `WARM_UP_TURNS`."""
FAILOVER_PARTITIONS = 6
PAUSE_S = 0.02
PATIENCE_S = 90.0
QUIET_S = 0.3
DEFAULTS = {
    "linger.ms": "5",
    "retry.backoff.ms": "100",
    "reconnect.backoff.ms": "100",
    "reconnect.backoff.max.ms": "10000",
}
"""librdkafka's own values of what `PartitionLoad` changes."""


@dataclass(frozen=True)
class LatencyLoad:
    """Requests of `batch_bytes` that make `mb_per_s`, for so long."""

    batch_bytes: int
    mb_per_s: float
    seconds: float

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return self.mb_per_s * 1e6 / self.batch_bytes


class Throughput(NamedTuple):
    """What librdkafka reached, and what it cost all brokers together until they were idle again."""

    mb_per_s: float
    cpu_s_per_gb: float


class Failover(NamedTuple):
    """Seconds from the death of a leader until the first and the last of its partitions had an acknowledgement."""

    first_s: float
    last_s: float


def settle_all(pids: Iterable[int], timeout_s: float = 15.0) -> None:
    """Wait until these processes together have used less than a fifth of a core for `QUIET_S`."""
    found = list(pids)
    deadline, used = time.monotonic() + timeout_s, sum(map(cpu_seconds, found))
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        before, used = used, sum(map(cpu_seconds, found))
        if used - before < QUIET_S / 5:
            return


def warm_up(bootstrap: str, topic: str, cores: set[int] | None = None) -> int:
    """Produce until a JVM has compiled its path and WALs have files to recycle; return the bytes."""
    sent, turns = 0, 0
    while sent < WARM_UP_BYTES and turns < WARM_UP_TURNS:
        warm = (bootstrap, topic, RECORD_BYTES, WARM_UP_S, LIBRDKAFKA)
        size, _ = in_process(produce_with_librdkafka, *warm, cores=cores)
        sent, turns = sent + size, turns + 1
    return sent


def throughput(cluster: Cluster, seconds: float) -> Throughput:
    """Measure librdkafka's producer, after a warm-up that makes files and caches."""
    pids = cluster.broker_pids().values()
    create_topic(cluster.bootstrap, "six", PARTITIONS, replicas=cluster.replicas)
    leaders(cluster.bootstrap, "six")
    sent = warm_up(cluster.bootstrap, "six")
    settle_all(pids)
    before = sum(map(cpu_seconds, pids))
    size, took = in_process(produce_with_librdkafka, cluster.bootstrap, "six", RECORD_BYTES, seconds, LIBRDKAFKA)
    settle_all(pids)
    used = sum(map(cpu_seconds, pids)) - before
    records, expected = records_in(cluster.bootstrap, "six", PARTITIONS), (sent + size) // RECORD_BYTES
    assert records == expected, f"{records} records are in the log, {expected} were sent"
    return Throughput(size / 1e6 / took, used / (size / 1e9))


def latencies(cluster: Cluster, load: LatencyLoad) -> list[float]:
    """Return the seconds until each request was acknowledged, after a warm-up: a JVM has compiled the path then."""
    create_topic(cluster.bootstrap, "paced", 1, replicas=cluster.replicas)
    _, address = leaders(cluster.bootstrap, "paced")[0]
    of_all: list[list[float]] = [
        in_process(raw_client, address, "paced", load.batch_bytes, load.per_s, seconds)
        for seconds in (min(WARM_UP_S, load.seconds), load.seconds)
    ]
    return of_all[-1]


def failover(cluster: Cluster, number: signal.Signals = signal.SIGKILL) -> dict[str, Failover]:
    """Send a leader a signal under load; return what producers with default and with short back-offs saw.

    The times are exact up to the pause between two records of a partition, 20 ms.
    """
    settings = {"defaults": DEFAULTS, "short back-offs": {}}
    topics = {name: name.replace(" ", "-") for name in settings}
    for topic in topics.values():
        create_topic(cluster.bootstrap, topic, FAILOVER_PARTITIONS, replicas=cluster.replicas)
    with contextlib.ExitStack() as stack:
        loads = {
            name: stack.enter_context(
                PartitionLoad(cluster.bootstrap, topics[name], FAILOVER_PARTITIONS, PAUSE_S, settings=changed)
            )
            for name, changed in settings.items()
        }
        for load in loads.values():
            load.wait_grown(50, PATIENCE_S)
        of = {name: leaders(cluster.bootstrap, topic) for name, topic in topics.items()}
        victim = of["defaults"][0][0]
        mine = {name: [at for at, (leader, _) in found.items() if leader == victim] for name, found in of.items()}
        for load in loads.values():
            load.begin_round()
        os.kill(cluster.broker_pids()[victim], number)
        for load in loads.values():
            load.wait_grown(10, PATIENCE_S)
        gaps = {name: load.gaps_s() for name, load in loads.items()}
    errors = [error for load in loads.values() for error in load.errors]
    assert not errors, errors[:3]
    seen = {name: [gaps[name][at] for at in partitions] for name, partitions in mine.items()}
    return {name: Failover(min(took), max(took)) for name, took in seen.items() if took}
