"""Small Produce requests a core serves: listener, handlers and logs are real, the WAL and the bucket are in memory.

    python bench/produce_requests.py [--requests 200000] [--connections 4] [--in-flight 5] [--value-bytes 100]

The client is a process of its own that sends one prepared frame again and again, `--in-flight` at a time on each
connection. `cpu_us` is the server process's CPU time for each request, which is what the code can be judged by: the two
processes share the machine with whatever else runs. `--profile FILE` writes the server's cProfile.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing
import socket
import struct
import time
from typing import Any

import uvloop

from broker.wire import schema
from storage.settings import CacheSettings, UploadSettings
from tests.support.kafka_client import encode_request, request_entity
from tests.support.kafka_world import KafkaWorld, batch

PRODUCE_VERSION = 9


def _frame(partition: int, value_bytes: int) -> bytes:
    make = schema.request(0, PRODUCE_VERSION).make
    records = batch(bytes(value_bytes))
    data = make(
        "TopicProduceData",
        name="bench",
        partition_data=[make("PartitionProduceData", index=partition, records=records)],
    )
    return encode_request(
        request_entity(0, PRODUCE_VERSION, transactional_id=None, acks=-1, timeout=30_000, topic_data=[data]),
        1,
        "bench",
    )


def _client(address: tuple[str, int], args: argparse.Namespace, results: Any) -> None:
    """Blocking sockets, one loop over all connections: cheap enough to keep the server busy."""
    frames = [_frame(index % args.partitions, args.value_bytes) for index in range(args.connections)]
    sockets = [socket.create_connection(address) for _ in frames]
    for one in sockets:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    readers = [one.makefile("rb", 1 << 16) for one in sockets]
    rounds = args.requests // (args.connections * args.in_flight)
    started = time.perf_counter()
    for one, frame in zip(sockets, frames, strict=True):
        one.sendall(frame * args.in_flight)
    for number in range(rounds):
        for one, reader, frame in zip(sockets, readers, frames, strict=True):
            for _ in range(args.in_flight):
                (size,) = struct.unpack(">i", reader.read(4))
                reader.read(size)
            if number < rounds - 1:
                one.sendall(frame * args.in_flight)
    results.put((rounds * args.in_flight * args.connections, time.perf_counter() - started))


async def _serve(args: argparse.Namespace) -> None:
    cache = CacheSettings(log_bytes=4 << 30)
    world = KafkaWorld(cache=cache, upload=UploadSettings(age_ms=3_600_000, size_bytes=1 << 40))
    async with world:
        await world.topic("bench", args.partitions)
        results: Any = multiprocessing.get_context("spawn").Queue()
        client = multiprocessing.get_context("spawn").Process(
            target=_client, args=(world.server.address, args, results)
        )
        client.start()
        profile = cProfile.Profile() if args.profile else None
        while world.server.connections == 0:  # noqa: ASYNC110 — another process connects
            await asyncio.sleep(0.01)
        cpu = time.process_time()
        if profile is not None:
            profile.enable()
        while client.is_alive():  # noqa: ASYNC110 — another process ends
            await asyncio.sleep(0.05)
        if profile is not None:
            profile.disable()
            profile.dump_stats(args.profile)
        cpu = time.process_time() - cpu
        count, seconds = results.get()
        mib = count * args.value_bytes / (1 << 20)
        print(
            f"requests={count} seconds={seconds:.2f} requests_per_s={count / seconds:,.0f} "
            f"cpu_us={cpu / count * 1e6:.1f} mib_per_s={mib / seconds:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--profile")
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
