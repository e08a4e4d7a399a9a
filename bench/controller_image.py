"""The cost of 100,000 partitions (400,000 streams) for a controller, and for a broker that loads their metadata.

    python -m bench.controller_image [--partitions N] [--seconds S] [--members 1|3] [--directory DIR]

Controllers run as separate processes; their memory is VmHWM and VmRSS. Measured, with the goals in brackets: memory [≤
2 GiB], restart after kill -9 [≤ 30 s], a broker's load of the image [≤ 10 s], commands a second with 64 in flight [≥
300], and the longest latency (a snapshot is written meanwhile).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench._programs import scratch_directory
from tidelog.chaos.ports import free_port
from tidelog.controller.client.client import ClientTiming, ControllerClient
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.handshake import NO_NODE, Credentials
from tidelog.controller.rpc.secret import read_secret, write_secret
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.commits import CommitObjects, NewObject, pack_ranges

BROKERS = 10
TOPIC_PARTITIONS = 1_000
IN_FLIGHT = 64
RANGES = 20
SNAPSHOT_ENTRIES = 3_000
"""Less than the default, so that a short run includes snapshots."""
MIB = 1 << 20


def kernel_mib(pid: int, name: str) -> float:
    """VmRSS or VmHWM of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise AssertionError(name)


# --- child processes -------------------------------------------------------------------------------------------------


async def serve(directory: Path, node_id: int, members: Sequence[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    node = ControllerNode(
        ControllerIdentity(
            node_id, directory / f"controller-{node_id}", Credentials(read_secret(directory / "secret"), node_id)
        ),
        ControllerSections(ControllerSettings(members=list(members), snapshot_entries=SNAPSHOT_ENTRIES)),
        ControllerWorld(TcpNetwork(), SystemClock(), random.Random()),
    )
    await node.start()
    print("started", flush=True)
    await stop.wait()
    await node.close()


async def load(directory: Path, members: Sequence[str]) -> None:
    """Load the image, as a broker does at its start."""
    client = make_client(directory, members)
    before = kernel_mib(os.getpid(), "VmRSS")
    begin, cpu = time.perf_counter(), time.process_time()
    await client.start()
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    grown = kernel_mib(os.getpid(), "VmRSS") - before
    print(f"{seconds} {cpu_s} {kernel_mib(os.getpid(), 'VmHWM')} {grown}", flush=True)
    assert client.image.streams
    await client.close()


def make_client(directory: Path, members: Sequence[str]) -> ControllerClient:
    endpoints = [(host, int(port)) for host, port in (each.split("@")[1].split(":") for each in members)]
    credentials = Credentials(read_secret(directory / "secret"), NO_NODE)
    return ControllerClient(
        endpoints, TcpNetwork(), SystemClock(), random.Random(), timing=ClientTiming(120), credentials=credentials
    )


# --- the run ---------------------------------------------------------------------------------------------------------


class Run:
    """The controllers and the requests to them."""

    def __init__(self, directory: Path, members: int) -> None:
        self.directory = directory
        self.members = [f"{node_id}@127.0.0.1:{free_port()}" for node_id in range(1, members + 1)]
        self.processes: list[subprocess.Popen[str]] = []
        write_secret(directory / "secret")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "bench.controller_image", *arguments, "--directory", str(self.directory)]

    def start(self) -> None:
        self.processes = [
            subprocess.Popen(
                self.command("--serve", str(node_id), "--peers", ",".join(self.members)),
                stdout=subprocess.PIPE,
                text=True,
            )
            for node_id in range(1, len(self.members) + 1)
        ]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    async def active(self, client: ControllerClient) -> None:
        """Wait until one of them accepts commands."""
        while True:
            for endpoint in client.endpoints:
                try:
                    if (await client.status_of(endpoint))["active"]:
                        return
                except TidelogError:
                    continue  # it is starting
            await asyncio.sleep(0.02)

    def memory(self) -> str:
        worst = max(self.processes, key=lambda process: kernel_mib(process.pid, "VmHWM"))
        return f"{kernel_mib(worst.pid, 'VmRSS'):.0f} MiB now, {kernel_mib(worst.pid, 'VmHWM'):.0f} MiB at most"

    def load_image(self) -> tuple[float, float, float, float]:
        done = subprocess.run(
            self.command("--load", "--peers", ",".join(self.members)), capture_output=True, text=True, check=True
        )
        seconds, cpu_s, most, grown = map(float, done.stdout.split())
        return seconds, cpu_s, most, grown


async def fill(client: ControllerClient, partitions: int) -> list[int]:
    """Create topics on ten brokers with open streams; return the master epochs."""
    epochs = []
    for broker in range(BROKERS):
        await client.register_broker(RegisterBroker(broker, f"c{broker}", "i", "h", 1, "", ""))
        epochs.append((await client.elect(broker, broker)).master_epoch)
    for number in range(0, partitions, TOPIC_PARTITIONS):
        assignment = [(number + each) % BROKERS for each in range(min(TOPIC_PARTITIONS, partitions - number))]
        topic = await client.create_topic(f"topic-{number}", len(assignment), {}, assignment=assignment)
        owned: dict[int, list[tuple[int, int]]] = {}
        for partition in client.image.partitions(topic.id):
            epoch = epochs[partition.replica_set]
            streams = owned.setdefault(partition.replica_set, [])
            streams += [(partition.first_stream + each, epoch) for each in range(4)]
        for broker, streams in owned.items():
            await client.open_streams(broker, epochs[broker], streams)
    return epochs


async def commit_all(client: ControllerClient, epochs: Sequence[int]) -> None:
    """Commit one object per broker with all of its data streams."""
    for broker, epoch in enumerate(epochs):
        image = client.image
        ranges = pack_ranges(
            (partition.first_stream + 1, 0, 1)
            for partition in image.all_partitions()
            if partition.replica_set == broker
        )
        object_id = await client.prepare_objects(1, 600_000)
        wal = client.committed_wal_offset(broker)
        await client.commit_objects(CommitObjects(broker, epoch, wal, wal + 1, (NewObject(object_id, 1, 100, ranges),)))


async def commits(client: ControllerClient, epochs: Sequence[int], seconds: float) -> tuple[float, float, float, float]:
    """Committed objects per second; p50, p99 and maximum in milliseconds. Prepare and commit count as one each."""
    streams = [
        [each.first_stream + 1 for each in client.image.all_partitions() if each.replica_set == broker]
        for broker in range(BROKERS)
    ]
    times: list[float] = []
    end = time.perf_counter() + seconds
    turns = [asyncio.Lock() for _ in range(BROKERS)]

    async def worker(number: int) -> None:
        rng = random.Random(number)
        broker = number % BROKERS
        while (begin := time.perf_counter()) < end:
            object_id = await client.prepare_objects(1, 600_000)
            times.append(time.perf_counter() - begin)
            async with turns[broker]:  # a replica set's commits are in order
                image, begin = client.image, time.perf_counter()
                chosen = sorted(rng.sample(streams[broker], RANGES))
                ends = [image.streams[each].end_offset for each in chosen]
                ranges = pack_ranges((each, at, at + 1) for each, at in zip(chosen, ends, strict=True))
                wal = client.committed_wal_offset(broker)
                new = NewObject(object_id, 1, 100, ranges)
                await client.commit_objects(CommitObjects(broker, epochs[broker], wal, wal + 1, (new,)))
                times.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(IN_FLIGHT)))
    per_s = len(times) / (time.perf_counter() - begin)
    times.sort()
    return per_s, times[len(times) // 2] * 1e3, times[len(times) * 99 // 100] * 1e3, times[-1] * 1e3


async def bench(directory: Path, partitions: int, members: int, seconds: float) -> None:
    run = Run(directory, members)
    run.start()
    client = make_client(directory, run.members)
    try:
        await client.start()
        begin = time.perf_counter()
        term = (await client.status())["term"]
        epochs = await fill(client, partitions)
        await commit_all(client, epochs)
        image = client.image
        rows = sum(len(table) for _, table in image.rows())
        print(
            f"{partitions} partitions, {len(image.streams)} streams, {rows} rows, {members} controllers; "
            f"filled in {time.perf_counter() - begin:.1f} s"
        )
        per_s, p50, p99, longest = await commits(client, epochs, seconds)
        print(
            f"commands, {IN_FLIGHT} in flight   {per_s:.0f}/s  [≥ 300/s]  "
            f"p50 {p50:.1f} p99 {p99:.1f} longest {longest:.0f} ms"
        )
        print(f"controller's memory       {run.memory()}  [≤ 2048 MiB]")
        print(f"elections meanwhile       {(await client.status())['term'] - term}")
        loads = [await asyncio.to_thread(run.load_image) for _ in range(3)]
        took = sorted(each[0] for each in loads)
        print(
            f"a broker loads the image  {took[1]:.2f} s ({took[0]:.2f}–{took[-1]:.2f})  [≤ 10 s], "
            f"{loads[0][1]:.1f} s of CPU, {loads[0][3]:.0f} MiB of it, {loads[0][2]:.0f} MiB at most"
        )
        print(f"controller's memory       {run.memory()}  (after the loads)")
        run.kill()
        begin = time.perf_counter()
        run.start()
        await run.active(client)
        print(f"restart after kill -9     {time.perf_counter() - begin:.1f} s until active  [≤ 30 s]")
        print(f"controller's memory       {run.memory()}  (after the restart)")
        snapshot = directory / "controller-1" / "snapshot"
        journal = directory / "controller-1" / "journal"
        size = snapshot.stat().st_size / MIB if snapshot.exists() else 0
        print(f"on disk                   snapshot {size:.0f} MiB, journal {journal.stat().st_size / MIB:.0f} MiB")
    finally:
        await client.close()
        run.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=100_000)
    parser.add_argument("--members", type=int, default=1, choices=(1, 3))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peers", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None or args.load:
        import uvloop

        peers = args.peers.split(",")
        uvloop.run(load(args.directory, peers) if args.load else serve(args.directory, args.serve, peers))
        return
    with scratch_directory(args.directory) as directory:
        asyncio.run(bench(directory, args.partitions, args.members, args.seconds))


if __name__ == "__main__":
    main()
