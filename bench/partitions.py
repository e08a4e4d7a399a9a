"""Ten thousand partitions in one process: start, memory, throughput, and administration.

    python -m bench.partitions [--partitions 10000] [--topics 100] [--seconds 5] [--runs 3] [--dir DIR]

A real `tidelog up` (embedded store, WAL on disk, sync flush) is driven by librdkafka and measured from outside:

- `create`, `delete`: CreateTopics and DeleteTopics of all topics, a few topics per request, until each is answered.
- `start`: from `exec` to the ready line of a process that has all partitions, cleanly closed; `after kill`: the same
  after `kill -9` under writes.
- `idle`: resident memory per partition of the broker process with all partitions open, minus that of the same process
  without topics. Both are measured directly after a start.
- `throughput`: the same records to all partitions round-robin and to one partition, alternating, medians and spread.
  Batches have 64 KiB in both: `BURST_RECORDS` per partition.

Throughput is measured with two clients, each also against a server that only receives and responds
(`bench.limit_socket`), with the same number of topics and partitions, in the same rounds (`at a bare socket`): this
shows the client's own loss with all partitions.

- `raw requests`: prepared Produce requests over plain sockets, so that the client's cost is negligible. The result is
  the server's speed: the rate to all must be 0.8 of the rate to one.
- `librdkafka`: its thread scans all its partitions repeatedly, which limits it. So the limit of the rate to all is the
  smaller of the rate to one and the same client's at the bare server to all; the ratio of all to one is reported beside
  it. Server and client have a core each, as if each were on a machine of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from bench._clients import Address, connect, read_produced
from bench._common import cpu_seconds, interleaved, on_cores, pin, quick, row
from bench._programs import scratch_directory
from bench.limit_socket import bare_server
from tests.support import schema
from tests.support.kafka_client import encode_request, request_entity
from tests.support.kafka_world import batch
from tests.support.tidelog_process import TidelogProcess

TOPICS_A_REQUEST = 10
START_GOAL_S = 20.0
IDLE_GOAL_BYTES = 10_240
THROUGHPUT_GOAL = 0.8
RECORD_BYTES = 1024
BURST_RECORDS = 64
"""Consecutive records for one partition, as with the sticky partitioner of Java's producer."""
LINGER_MS = 200
"""Long enough that a burst becomes one batch: librdkafka scans its partitions in turn, and would otherwise send
half-filled batches. Full batches do not wait for it."""
RAW_CONNECTIONS = 4
RAW_IN_FLIGHT = 5
SERVER_CORES, CLIENT_CORES = {0}, {1}
PRODUCE_VERSION = 9
ADMIN_TIMEOUT_S = 120.0


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def say(what: str, figure: str, goal: str = "", good: bool | None = None) -> None:
    """One line of the table."""
    row(f"many partitions: {what}", figure, goal=goal, holds=good)


class Cluster:
    """The process under test."""

    def __init__(self, data_dir: Path, flags: list[str]) -> None:
        self._data_dir = data_dir
        self._flags = flags
        self._process = TidelogProcess(data_dir, flags)

    @property
    def pid(self) -> int:
        """Pid of the broker, not of its supervisor."""
        return self._process.broker_pid()

    @property
    def bootstrap(self) -> str:
        return self._process.bootstrap

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._process.port

    def start(self) -> float:
        """Start; return the seconds to the ready line."""
        self._process = TidelogProcess(self._data_dir, self._flags, self._process.port)
        started = time.perf_counter()
        self._process.start(timeout_s=180)
        return time.perf_counter() - started

    def stop(self) -> float:
        """Stop; return the seconds to a clean end."""
        started = time.perf_counter()
        self._process.stop(timeout_s=180)
        return time.perf_counter() - started

    def kill(self) -> None:
        self._process.kill()

    def settled_rss(self) -> int:
        """The minimum of a few samples over 3 s, when temporary memory of a start has been freed."""
        found = []
        for _ in range(6):
            time.sleep(0.5)
            found.append(rss_bytes(self.pid))
        return min(found)


def wait_all(futures: dict[Any, Future[Any]]) -> None:
    """Wait for every result of an admin request; raise its error."""
    for future in futures.values():
        future.result(ADMIN_TIMEOUT_S)


def in_groups(names: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(names), TOPICS_A_REQUEST):
        yield names[first : first + TOPICS_A_REQUEST]


def create(admin: AdminClient, names: list[str], partitions: int) -> float:
    started = time.perf_counter()
    for group in in_groups(names):
        wait_all(
            admin.create_topics(
                [NewTopic(name, partitions, 1) for name in group],
                operation_timeout=60,
                request_timeout=ADMIN_TIMEOUT_S,
            )
        )
    return time.perf_counter() - started


def delete(admin: AdminClient, names: list[str]) -> float:
    started = time.perf_counter()
    for group in in_groups(names):
        wait_all(admin.delete_topics(group, operation_timeout=60, request_timeout=ADMIN_TIMEOUT_S))
    return time.perf_counter() - started


# --- throughput ----------------------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """The result of one run of a producer."""

    mib_per_s: float
    broker_ms_per_mib: float
    """CPU time of the broker."""
    client_cores: float
    """CPU time of the client per elapsed time: close to 1 the client is the limit."""


def broker_cpu_s(pid: int | None) -> float:
    """CPU time of the server; not counted for the bare one."""
    return cpu_seconds(pid) if pid is not None else 0.0


def produce(bootstrap: str, pid: int | None, targets: list[tuple[str, int]], seconds: float) -> Rate:
    """Acknowledged rate (acks=all) of `BURST_RECORDS` records to each target in turn."""
    failed: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": LINGER_MS,
            "batch.num.messages": BURST_RECORDS,
            "batch.size": BURST_RECORDS * RECORD_BYTES * 2,
            "queue.buffering.max.messages": 200_000,
            "queue.buffering.max.kbytes": 256 << 10,
            "on_delivery": lambda error, _message: failed.append(error) if error is not None else None,
        }
    )
    value = random.Random(1).randbytes(RECORD_BYTES)
    for topic, partition in targets:  # connections, metadata, the client's queues
        producer.produce(topic, value, partition=partition)
    producer.flush(60)
    broker, client, started = broker_cpu_s(pid), time.process_time(), time.perf_counter()
    sent = 0
    for topic, partition in itertools.cycle(targets):
        for _ in range(BURST_RECORDS):
            while True:
                try:
                    producer.produce(topic, value, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.01)
        sent += BURST_RECORDS
        producer.poll(0)
        if time.perf_counter() - started >= seconds:
            break
    left = producer.flush(120)
    took = time.perf_counter() - started
    assert not failed and not left, (failed[:3], left)
    mib = sent * RECORD_BYTES / (1 << 20)
    return Rate(mib / took, (broker_cpu_s(pid) - broker) / mib * 1000, (time.process_time() - client) / took)


def raw_frames(targets: list[tuple[str, int]], records: int = BURST_RECORDS) -> list[list[bytes]]:
    """One Produce request per target, all with the same batch of a burst: it is as warm in the client's caches for ten
    thousand targets as for one."""
    make = schema.request(0, PRODUCE_VERSION).make
    data_bytes = batch(random.Random(1).randbytes(RECORD_BYTES * records))
    frames: list[list[bytes]] = []
    for topic, partition in targets:
        data = make(
            "TopicProduceData",
            name=topic,
            partition_data=[make("PartitionProduceData", index=partition, records=data_bytes)],
        )
        entity = request_entity(0, PRODUCE_VERSION, transactional_id=None, acks=-1, timeout=30_000, topic_data=[data])
        head, _, tail = encode_request(entity, 1, "bench").partition(data_bytes)
        frames.append([head, data_bytes, tail])
    return frames


def send(connection: socket.socket, parts: list[bytes]) -> None:
    """Send all bytes of one request."""
    sent = connection.sendmsg(parts)
    left = sum(map(len, parts)) - sent
    if left:
        connection.sendall(b"".join(parts)[sent:])


def produce_raw(address: tuple[str, int], pid: int | None, frames: list[list[bytes]], seconds: float) -> Rate:
    """Acknowledged rate of prepared requests, `RAW_IN_FLIGHT` on each of a few connections."""
    turn = itertools.cycle(frames)
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(connect(address)) for _ in range(RAW_CONNECTIONS)]
        readers = [opened.enter_context(one.makefile("rb", 1 << 16)) for one in sockets]
        broker, client, started = broker_cpu_s(pid), time.process_time(), time.perf_counter()
        answered = 0
        for one in sockets:
            for _ in range(RAW_IN_FLIGHT):
                send(one, next(turn))
        going = True
        while going:
            going = time.perf_counter() - started < seconds
            for one, reader in zip(sockets, readers, strict=True):
                for _ in range(RAW_IN_FLIGHT):
                    read_produced(reader)
                    answered += 1
                    if going:
                        send(one, next(turn))
        took = time.perf_counter() - started
    mib = answered * RECORD_BYTES * BURST_RECORDS / (1 << 20)
    return Rate(mib / took, (broker_cpu_s(pid) - broker) / mib * 1000, (time.process_time() - client) / took)


Run = Callable[[bool, bool], Rate]
"""One run: to all partitions or to one of them; of the broker or of the bare server."""


def ratios(found: dict[str, list[Rate]], to: str, of: str) -> list[float]:
    """Ratios of throughputs, of the runs of each round."""
    return [a.mib_per_s / b.mib_per_s for a, b in zip(found[to], found[of], strict=True)]


def spread(values: list[float]) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def compare(what: str, runs: int, run: Run, *, client_bound: bool) -> None:
    """Alternate all four kinds of runs; print the medians of the ratios, and the CPU times.

    `client_bound`: the limit is the smaller of the rate to one and the bare server's rate to all, not only the former.
    """
    found = interleaved(
        runs,
        one=lambda: run(False, False),
        all=lambda: run(True, False),
        bare_one=lambda: run(False, True),
        bare_all=lambda: run(True, True),
    )
    middle = {name: Rate(*map(statistics.median, zip(*rates, strict=True))) for name, rates in found.items()}
    of_one, of_bare = ratios(found, "all", "one"), ratios(found, "all", "bare_all")
    held = [max(pair) for pair in zip(of_one, of_bare, strict=True)] if client_bound else of_one
    limit = f"{middle['one'].mib_per_s:.0f} MiB/s to one"
    row(
        f"many partitions: {what}",
        f"{middle['all'].mib_per_s:.0f} MiB/s to all",
        limit=f"{limit}, {middle['bare_all'].mib_per_s:.0f} at a bare socket to all" if client_bound else limit,
        ratio=f"{spread(held)} of the smaller; {spread(of_one)} of one" if client_bound else spread(held),
        goal=f">= {THROUGHPUT_GOAL}",
        holds=statistics.median(held) >= THROUGHPUT_GOAL,
    )
    row(
        f"many partitions: {what}, at a bare socket",
        f"{middle['bare_all'].mib_per_s:.0f} MiB/s to all",
        limit=f"{middle['bare_one'].mib_per_s:.0f} MiB/s to one",
        ratio=spread(ratios(found, "bare_all", "bare_one")),
    )
    say(f"{what}, broker / bare socket, all", spread(of_bare))
    say(f"{what}, broker / bare socket, one", spread(ratios(found, "one", "bare_one")))
    many, single = middle["all"], middle["one"]
    say(f"{what}, broker's CPU", f"{many.broker_ms_per_mib:.2f} ms/MiB to all, {single.broker_ms_per_mib:.2f} to one")
    say(f"{what}, client's CPU", f"{many.client_cores:.2f} cores to all, {single.client_cores:.2f} to one")
    bare = middle["bare_all"].client_cores, middle["bare_one"].client_cores
    say(f"{what}, client's CPU at a bare socket", f"{bare[0]:.2f} cores to all, {bare[1]:.2f} to one")


# --- the run -------------------------------------------------------------------------------------------------------


def read_back(bootstrap: str, targets: list[tuple[str, int]], seconds: float) -> None:
    """One consumer of all partitions, idle at their ends: the broker's CPU time shows the cost of its long polls."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, partition, -1) for topic, partition in targets])
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        consumer.poll(0.2)
    consumer.close()


def idle_memory(cluster: Cluster, args: argparse.Namespace, empty: int, what: str) -> None:
    bytes_each = (cluster.settled_rss() - empty) / args.partitions
    goal = f"<= {IDLE_GOAL_BYTES:,} bytes"
    say(what, f"{bytes_each:,.0f} bytes a partition", goal, bytes_each <= IDLE_GOAL_BYTES)


def throughput(cluster: Cluster, bare: Address, targets: list[tuple[str, int]], args: argparse.Namespace) -> None:
    """Measure with prepared requests."""
    frames = {False: raw_frames(targets[:1]), True: raw_frames(targets)}

    def prepared(to_all: bool, at_bare: bool) -> Rate:
        address, pid = (bare, None) if at_bare else (cluster.address, cluster.pid)
        return produce_raw(address, pid, frames[to_all], args.seconds / 2)

    compare("throughput, raw requests", args.runs, prepared, client_bound=False)


def throughput_pinned(
    cluster: Cluster, bare: Address, targets: list[tuple[str, int]], args: argparse.Namespace
) -> None:
    """Measure with librdkafka and the broker pinned to separate cores."""
    wanted = {False: targets[:1], True: targets}

    def librdkafka(to_all: bool, at_bare: bool) -> Rate:
        bootstrap = "{}:{}".format(*bare) if at_bare else cluster.bootstrap
        with on_cores(CLIENT_CORES):  # its threads inherit that
            return produce(bootstrap, None if at_bare else cluster.pid, wanted[to_all], args.seconds)

    pin(SERVER_CORES, cluster.pid)
    compare("throughput, librdkafka", args.runs, librdkafka, client_bound=True)
    pin(os.sched_getaffinity(0), cluster.pid)


def run(directory: Path, args: argparse.Namespace) -> None:
    names = [f"t{number:03}" for number in range(args.topics)]
    each = args.partitions // args.topics
    targets = [(name, index) for index in range(each) for name in names]
    cluster = Cluster(directory, args.flags)
    try:
        cluster.start()
        say("stop, no partitions", f"{cluster.stop():.2f} s")
        say("start, no partitions", f"{cluster.start():.2f} s")
        empty = cluster.settled_rss()
        say("memory, no partitions", f"{empty / (1 << 20):.0f} MiB")
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        say(f"create {args.topics} x {each}", f"{create(admin, names, each):.2f} s")
        say("memory after creating", f"{(rss_bytes(cluster.pid) - empty) / args.partitions:,.0f} bytes a partition")
        del admin
        say("clean stop", f"{cluster.stop():.2f} s")
        took = cluster.start()
        say("start", f"{took:.2f} s", f"<= {START_GOAL_S:.0f} s", took <= START_GOAL_S)
        idle_memory(cluster, args, empty, "idle memory, never written")
        before = cpu_seconds(cluster.pid)
        time.sleep(5)
        say("idle CPU", f"{(cpu_seconds(cluster.pid) - before) / 5 * 100:.1f} % of a core")
        before, began = cpu_seconds(cluster.pid), time.perf_counter()
        read_back(cluster.bootstrap, targets, args.seconds)
        used = (cpu_seconds(cluster.pid) - before) / (time.perf_counter() - began) * 100
        say("one idle consumer of all", f"{used:.1f} % of a core")
        produce_raw(cluster.address, cluster.pid, raw_frames(targets, records=1), 2.0)  # the first batch costs more
        with bare_server(each, topics=names) as bare:
            throughput(cluster, bare, targets, args)
        with bare_server(each, topics=names, cores=SERVER_CORES) as bare:
            throughput_pinned(cluster, bare, targets, args)
        say("clean stop, all written", f"{cluster.stop():.2f} s")
        took = cluster.start()
        say("start, all written", f"{took:.2f} s", f"<= {START_GOAL_S:.0f} s", took <= START_GOAL_S)
        idle_memory(cluster, args, empty, "idle memory, all written")
        produce(cluster.bootstrap, cluster.pid, targets, 1.0)
        cluster.kill()
        took = cluster.start()
        say("start after kill -9", f"{took:.2f} s", f"<= {START_GOAL_S:.0f} s", took <= START_GOAL_S)
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        say(f"delete {args.topics} x {each}", f"{delete(admin, names):.2f} s")
        cluster.stop()
    finally:
        cluster.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=2000 if quick() else 10_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0 if quick() else 5.0, help="of each throughput run")
    parser.add_argument("--runs", type=int, default=1 if quick() else 3, help="pairs of throughput runs")
    parser.add_argument("--dir", type=Path, help="where the data directory is made (default: the temporary directory)")
    parser.add_argument("flags", nargs="*", help="further flags of `tidelog up`, after --")
    args = parser.parse_args()
    args.topics = min(args.topics, args.partitions)
    with scratch_directory(args.dir) as directory:
        run(directory / "data", args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
