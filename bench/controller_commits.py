"""Metadata commands per second committed durably by a single-member controller, compared with the disk's limit.

    python -m bench.controller_commits [--directory DIR] [--seconds N]

The Raft log alone, and the whole path of a broker's `commit_objects` (client, loopback RPC, Raft, state machine, delta
back into the client's image), one at a time and 64 in flight. Each line includes the concurrent rate of the bare disk
(append 200 bytes to a file that grows, as the journal does, and fdatasync, one at a time); compare the ratio to it
between machines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench._programs import scratch_directory
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.raft.thread import RaftConsensus, RaftSettings
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.commits import CommitObjects, NewObject, pack_ranges

IN_FLIGHT = 64
SNAPSHOT_ENTRIES = 10_000
RAW_S = 0.5


class Nothing:
    """A state machine without state."""

    def apply(self, blob: bytes, index: int) -> bytes:
        return b""

    def flush(self) -> None:
        pass

    def level(self) -> int:
        return 1

    def freeze(self) -> Callable[[], bytes]:
        data = b""
        return lambda: data

    def load(self, data: bytes) -> None:
        pass


def raw_syncs(directory: Path, seconds: float) -> float:
    """Return how many appends to an empty file a second are synced. One that has its length costs less to overwrite."""
    fd = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        os.write(fd, bytes(200))
        os.fdatasync(fd)
        count += 1
    os.close(fd)
    return count / seconds


async def rate(work: Callable[[int], Awaitable[object]], workers: int, seconds: float) -> tuple[float, float, float]:
    """Return calls per second, and p50 and p99 in milliseconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def worker(number: int) -> None:
        while (begin := time.perf_counter()) < end:
            await work(number)
            times.append(time.perf_counter() - begin)

    await asyncio.gather(*(worker(number) for number in range(workers)))
    times.sort()
    return len(times) / seconds, times[len(times) // 2] * 1000, times[len(times) * 99 // 100] * 1000


def show(name: str, result: tuple[float, float, float], directory: Path) -> None:
    raw = raw_syncs(directory, RAW_S)  # beside each line, for a shared disk changes from second to second
    per_s, p50_ms, p99_ms = result
    print(f"{name:<40} {per_s:>8.0f}/s {per_s / raw:>6.2f} x raw ({raw:.0f}/s)  p50 {p50_ms:.2f} p99 {p99_ms:.2f} ms")


async def bench_raft(directory: Path, seconds: float) -> None:
    raft = RaftConsensus(RaftSettings(directory=directory, snapshot_entries=SNAPSHOT_ENTRIES), SystemClock())
    await raft.start(Nothing())
    while not raft.role.is_leader:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for workers in (1, IN_FLIGHT):
        result = await rate(lambda number: raft.propose(bytes(180), 10), workers, seconds)
        show(f"raft log, {workers} in flight", result, directory)
    await raft.close()


async def start_client(node: ControllerNode, streams: int) -> tuple[ControllerClient, int, list[int]]:
    client = ControllerClient([node.address], TcpNetwork(), SystemClock(), random.Random())
    await client.start()
    await client.register_broker(RegisterBroker(0, "c", "i", "h", 1, "", ""))
    epoch = (await client.elect(0, 0)).master_epoch
    topic = await client.create_topic("bench", streams, {})
    ids = [each.first_stream + 1 for each in client.image.partitions(topic.id)]
    await client.open_streams(0, epoch, [(each, epoch) for each in ids])
    return client, epoch, ids


async def bench_client(directory: Path, seconds: float) -> None:
    node = ControllerNode(
        ControllerIdentity(0, directory),
        ControllerSections(ControllerSettings(snapshot_entries=SNAPSHOT_ENTRIES)),
        ControllerWorld(TcpNetwork(), SystemClock(), random.Random()),
    )
    await node.start()
    client, epoch, streams = await start_client(node, 100)

    async def commit(number: int) -> None:
        object_id = await client.prepare_objects(1, 600_000)
        image = client.image
        ends = [(s, image.streams[s].end_offset) for s in streams]
        ranges = pack_ranges((s, end, end + 1) for s, end in ends)
        wal = client.committed_wal_offset(0)
        await client.commit_objects(CommitObjects(0, epoch, wal, wal + 1, (NewObject(object_id, 1, 1, ranges),)))

    show("client: prepare+commit of 100 streams, 1", await rate(commit, 1, seconds), directory)
    for workers in (1, IN_FLIGHT):
        result = await rate(lambda number: client.put_kv(f"key-{number}", bytes(100)), workers, seconds)
        show(f"client: one small command, {workers} in flight", result, directory)
    print("image:", len(client.image.objects), "objects; journal", node.status()["journal_bytes"], "bytes")
    begin = time.perf_counter()
    for _ in range(10_000):
        client.find_objects(streams[0], 5, 1 << 40, 8)
    print(f"find_objects (8 slices): {(time.perf_counter() - begin) * 100:.1f} us")
    cpu, begin = time.process_time(), time.perf_counter()
    await asyncio.sleep(2)
    print(f"idle: {(time.process_time() - cpu) / (time.perf_counter() - begin):.2%} CPU with one broker's heartbeats")
    await client.close()
    await node.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    options = parser.parse_args()
    with scratch_directory(options.directory) as directory:
        asyncio.run(bench_raft(directory / "raft", options.seconds))
        asyncio.run(bench_client(directory / "node", options.seconds))


if __name__ == "__main__":
    main()
