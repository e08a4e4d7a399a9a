"""Produce requests of one record per second and core.

    python -m bench.produce_requests [--requests 100000] [--connections 8] [--in-flight 5] [--value-bytes 100]

`up` is a real `tidelog up` with sync flush, pinned to one core; `memory` is only the data path, in this process:
listener, handlers and logs are real, the WAL and the bucket are in memory. The client is a separate process on the
other core that sends one prepared frame repeatedly, `--in-flight` at a time on each connection, and looks whether each
was taken. The result is requests per second of the server's CPU time, including all its threads and the kernel's work
for them, because the rate itself depends on other load on the machine. `--profile FILE` writes the cProfile of
`memory`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import time
from collections.abc import Callable
from typing import Any

import uvloop

from bench._clients import connect, create_topic, read_produced
from bench._common import Spread, background, broker, cpu_seconds, directory, in_process, pin, quick, row, settle
from tests.support import schema
from tests.support.kafka_client import encode_request, request_entity
from tests.support.kafka_world import KafkaWorld, batch
from tidelog.runtime import memory
from tidelog.storage.settings import CacheSettings, UploadSettings

PRODUCE_VERSION = 9
TOPIC = "bench"
GOAL = 20_000


def one_record_frame(topic: str, partition: int, value_bytes: int) -> bytes:
    """A Produce request with one record, as a client sends it."""
    make = schema.request(0, PRODUCE_VERSION).make
    records = batch(bytes(value_bytes))
    data = make(
        "TopicProduceData",
        name=topic,
        partition_data=[make("PartitionProduceData", index=partition, records=records)],
    )
    return encode_request(
        request_entity(0, PRODUCE_VERSION, transactional_id=None, acks=-1, timeout=30_000, topic_data=[data]),
        1,
        "bench",
    )


def send_requests(address: tuple[str, int], args: argparse.Namespace, put: Callable[[Any], None]) -> None:
    """Blocking sockets, one loop over all connections: cheap enough to keep the server busy."""
    frames = [one_record_frame(TOPIC, index % args.partitions, args.value_bytes) for index in range(args.connections)]
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(connect(address)) for _ in frames]
        readers = [opened.enter_context(one.makefile("rb", 1 << 16)) for one in sockets]
        rounds = args.requests // (args.connections * args.in_flight)
        started = time.perf_counter()
        for one, frame in zip(sockets, frames, strict=True):
            one.sendall(frame * args.in_flight)
        for number in range(rounds):
            for one, reader, frame in zip(sockets, readers, frames, strict=True):
                for _ in range(args.in_flight):
                    read_produced(reader)
                if number < rounds - 1:
                    one.sendall(frame * args.in_flight)
        put((rounds * args.in_flight * args.connections, time.perf_counter() - started))


def _up(args: argparse.Namespace) -> None:
    """Print the row of a real broker."""
    with directory() as path, broker(path / "data", ("admin.port=0",), bucket_in_memory=True, cores={0}) as tidelog:
        create_topic(tidelog.bootstrap, TOPIC, args.partitions)
        pid = tidelog.broker_pid()

        def run() -> tuple[float, float]:
            settle(pid)
            cpu = cpu_seconds(pid)
            count, seconds = in_process(send_requests, ("127.0.0.1", tidelog.port), args, cores={1})
            return count / seconds, count / (cpu_seconds(pid) - cpu)

        run()
        runs = [run() for _ in range(args.runs)]
    rate, per_core = Spread.of(rate for rate, _ in runs), Spread.of(per_core for _, per_core in runs)
    row(
        "one-record produce requests, tidelog up",
        f"{per_core.text()} per s and core, {1e6 / per_core.median:.1f} µs each, {rate.median:,.0f}/s reached",
        goal=f"≥ {GOAL:,}",
        holds=per_core.median >= GOAL,
    )


async def _serve(args: argparse.Namespace) -> None:
    cache = CacheSettings(log_bytes=4 << 30)
    world = KafkaWorld(cache=cache, upload=UploadSettings(age_ms=3_600_000, size_bytes=1 << 40))
    async with world:
        await world.topic(TOPIC, args.partitions)
        memory.tune()
        profile = cProfile.Profile() if args.profile else None
        with background(send_requests, world.server.address, args, cores={1}) as result:
            while world.server.connections == 0:  # noqa: ASYNC110 — another process connects
                await asyncio.sleep(0.01)
            cpu = time.process_time()
            if profile is not None:
                profile.enable()
            count, seconds = await asyncio.to_thread(result)
            if profile is not None:
                profile.disable()
                profile.dump_stats(args.profile)
            cpu = time.process_time() - cpu
    row(
        "one-record produce requests, data path in memory",
        f"{count / cpu:,.0f} per s and core, {cpu / count * 1e6:.1f} µs each, {count / seconds:,.0f}/s reached",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40_000 if quick() else 100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--only", choices=("up", "memory"))
    parser.add_argument("--profile")
    args = parser.parse_args()
    if args.only != "memory":
        _up(args)
    if args.only != "up":
        pin({0})
        uvloop.run(_serve(args))


if __name__ == "__main__":
    main()
