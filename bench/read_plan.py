"""A plan of Spark's source over 100,000 objects: its slices by answers of a broker, and in manifests.

    python -m bench.read_plan [--objects N] [--partitions N] [--runs N]

A broker's admin HTTP over the real state machine and image, whose objects exist only as metadata, and a planner in a
process of its own, as Spark's is. Printed for both ways: the planner's time; the broker's CPU, and how long its event
loop was held at a time, which is what producers feel of it; commands of the controllers; bytes of the pickled tasks;
and what a task does to find its slices. `cpu` without a planner shows what the machine's other load does to the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import msgspec

from bench._common import quick, row
from pyspark_tidelog.cluster import Lease, Lookups
from pyspark_tidelog.fetch import EMBEDDED
from pyspark_tidelog.manifests import find_ranges, read_parts
from pyspark_tidelog.plan import plan_tasks
from tidelog.broker.admin.http import AdminHttp, AdminSources
from tidelog.broker.admin.reading import ReadingRoutes
from tidelog.broker.kafka.services import no_quorum
from tidelog.broker.objects.manifest_writer import ManifestWriter
from tidelog.broker.settings import AdminSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import from_wire
from tidelog.controller.model.leases import TakeLease
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.commits import CommitObjects, NewObject, ObjectKind, pack_ranges

CLUSTER, TOPIC = "bench", "t"
OFFSETS, OBJECT_BYTES, TASK_BYTES = 10_000, 1 << 20, 64 << 20
AT_ONCE = 500
PAUSE_S = 0.001


class Metadata:
    """The controllers, applied at once, and a broker's image."""

    def __init__(self, objects: int, partitions: int) -> None:
        self.state, self.image = ControllerState(), Image()
        self.commands = 0
        self.apply(c.BecomeActive(0, 1, CLUSTER, 60_000))
        self.apply(c.RegisterBroker(0, "bench", "run", "host", 9092, "", ""))
        epoch = int(self.apply(c.Elect(0, 0))[4])
        self.apply(c.CreateTopic(b"t" * 16, TOPIC, partitions, {}, False, False, None))
        streams = [one.first_stream + 1 for one in self.image.partitions(b"t" * 16)]
        self.apply(c.OpenStreams(0, epoch, tuple((each, epoch) for each in streams)))
        ends = dict.fromkeys(streams, 0)
        for at in range(0, objects, AT_ONCE):
            count = min(AT_ONCE, objects - at)
            first = int(self.apply(c.PrepareObjects(count, 600_000)))
            made: list[NewObject] = []
            for number in range(at, at + count):
                stream = streams[number % partitions]
                start, ends[stream] = ends[stream], ends[stream] + OFFSETS
                packed = pack_ranges([(stream, start, ends[stream])])
                made.append(NewObject(first + number - at, ObjectKind.STREAM, OBJECT_BYTES, packed))
            self.apply(c.Commit(CommitObjects(0, epoch, at, at + count, tuple(made))))
        self.apply(TakeLease("bench", 3_600_000, 3_600_000))

    def apply(self, command: c.AnyCommand) -> Any:
        self.commands += 1
        envelope = c.Envelope(c.FORMAT_VERSION, 1, 0, "", 0, 0, command)
        applied = self.state.apply(envelope, self.commands)
        self.image.apply(Delta(self.commands, applied.mutations))
        result = c.decode_result(applied.result)
        if result.error is not None:
            raise from_wire(result.error)
        return msgspec.msgpack.decode(result.value)

    async def prepare(self, count: int, ttl_ms: int) -> int:
        return int(self.apply(c.PrepareObjects(count, ttl_ms)))

    async def wait_version(self, version: int) -> None:
        assert version <= self.image.version


class Loop:
    """How late the event loop wakes a task that sleeps for a millisecond."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    async def watch(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(PAUSE_S)
            self.late_ms.append(1_000 * (time.perf_counter() - begin - PAUSE_S))


async def measured(metadata: Metadata, arguments: list[str]) -> dict[str, Any]:
    """Run a planner; return what it tells, and what the broker's process saw."""
    loop = Loop()
    watch = asyncio.create_task(loop.watch())
    commands, cpu = metadata.commands, time.process_time()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.read_plan",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    await child.stdout.readline()  # it has imported what it needs
    loop.late_ms.clear()
    cpu = time.process_time()
    child.stdin.write(b"go\n")
    told: dict[str, Any] = json.loads(await child.stdout.readline())
    told["cpu_s"] = time.process_time() - cpu
    late = sorted(loop.late_ms)
    told["late_max_ms"], told["late_p99_ms"] = late[-1], late[int(0.99 * len(late))]
    told["commands"] = metadata.commands - commands
    child.stdin.close()
    watch.cancel()
    assert await child.wait() == 0
    return told


def planner(url: str, bucket: str, partitions: int, most: int) -> None:
    """The planner's process: `most` as in the source's option maxSlicesInTasks; -1: do nothing for a second."""
    lookups, settings = Lookups((url,), ""), {EMBEDDED: bucket}
    print("ready", flush=True)
    sys.stdin.readline()
    if most < 0:
        time.sleep(1)
        print(json.dumps({}), flush=True)
        return
    ranges = [(TOPIC, index, 0, (1 << 62)) for index in range(partitions)]
    begin = time.perf_counter()
    found = find_ranges(lookups, settings, ranges, Lease(1, 1, 3_600.0), most=most)
    slices_s = time.perf_counter() - begin
    tasks = found.place(plan_tasks(found.ranges, max_bytes=TASK_BYTES, reads_tail=False))
    plan_s = time.perf_counter() - begin
    size = sum(len(pickle.dumps(task)) for task in tasks)
    begin = time.perf_counter()
    sample = random.Random(1).sample(tasks, 20)
    for task in sample:
        if task.parts:
            assert read_parts(settings, found.cluster_id, task.parts)
    told = {
        "slices_s": slices_s,
        "plan_s": plan_s,
        "tasks": len(tasks),
        "task_bytes": size / len(tasks),
        "find_ms": 1_000 * (time.perf_counter() - begin) / len(sample),
    }
    print(json.dumps(told), flush=True)


async def run(objects: int, partitions: int, runs: int) -> None:
    metadata = Metadata(objects, partitions)
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as directory:
        bucket = Path(directory)
        store, clock = LocalObjectStore(bucket, SystemClock()), SystemClock()
        writer = ManifestWriter(image=lambda: metadata.image, store=store, prepare=metadata.prepare, clock=clock)
        sources = AdminSources(
            node_id=0,
            roles=["broker"],
            clock=clock,
            store=store,
            image=lambda: metadata.image,
            not_ready=list,
            upload_now=lambda: asyncio.sleep(0, {}),
            controllers=no_quorum,
        )
        routes = ReadingRoutes(cast("Any", metadata), writer).routes()
        metrics = Metrics(process=False)
        server = AdminHttp(sources, PartRegistry(), metrics, TcpNetwork(), AdminSettings(port=0), routes)
        url = await server.start()
        try:
            for way, most in (("idle", -1), ("answers", 1_000_000_000), ("manifests", 10_000)):
                for _ in range(runs):
                    place = ["--url", url, "--bucket", bucket.as_uri(), "--partitions", str(partitions)]
                    told = await measured(metadata, [*place, "--most", str(most)])
                    figures = ", ".join(f"{name} {value:,.2f}" for name, value in told.items())
                    row(f"plan over {objects:,} objects, {way}", figures)
        finally:
            await server.close()
            await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=10_000 if quick() else 100_000)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--runs", type=int, default=1 if quick() else 3)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--bucket", help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url:
        planner(arguments.url, arguments.bucket, arguments.partitions, arguments.most)
    else:
        asyncio.run(run(arguments.objects, arguments.partitions, arguments.runs))


if __name__ == "__main__":
    main()
