"""Confirmations per second and their latency with 1, 2 and 3 replicas of a WAL, each in a process with a directory.

    python -m bench.replication [--dir DIR] [--size 4096] [--in-flight 64] [--seconds 3] [--runs 3] [--profile]

The quorum is 1, 2 and 2. The limits are of the same run, in turns: the bare disk (`pwrite` and `fdatasync` of one
record), and the bare socket (a record sent to another process, which answers with as many bytes as an acknowledgement
has). A quorum of two cannot be quicker than a round trip and a sync; its own sync runs at the same time. All processes
share the machine's cores and its disk. CPU is that of the master's loop, including the load generator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import os
import pstats
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import uvloop

from bench._common import Spread, background, directory, percentile, quick, row
from bench.limit_disk import RawDisk
from tidelog.broker.replication.door import ReplicationDoor
from tidelog.broker.replication.inputs import (
    MasterTarget,
    ReplicaEvents,
    ReplicaIdentity,
    ReplicationLimits,
    ReplicationWorld,
)
from tidelog.broker.replication.replica import HotReplica, ReplicaParts
from tidelog.broker.replication.warm import WarmTail
from tidelog.controller.rpc.connection import RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.listener import RpcListener
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import InvalidInput
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.records import StreamAppend
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.policy import ReplicationPolicy
from tidelog.storage.settings import MIB, WalSettings
from tidelog.storage.wal.base import WalFull
from tidelog.storage.wal.disk.wal import DiskWal

SECRET = b"the secret of a benchmark"
TRIM_BYTES = 64 * MIB
TURN_S = 0.5
ACK_BYTES = 28
QUORUMS = {1: 1, 2: 2, 3: 2}
"""Write quorum by the number of replicas."""


class Grants:
    """A controller that agrees at once."""

    async def alter(
        self, wanted: SetConfiguration, *, master_epoch: int, ends: Mapping[WalReplica, int], confirm_offset: int
    ) -> SetConfiguration:
        return wanted._replace(number=wanted.number + 1)

    async def resign(self, designated: int, reason: str, *, master_epoch: int) -> None:
        """There is no other master here."""

    def reports_every_s(self) -> float:
        return 1.0

    def admits(self, replica: WalReplica, registration_epoch: int, *, learner: bool) -> bool:
        return True


async def open_replica(
    path: Path, broker_id: int, replicas: int, door: ReplicationDoor, confirmed: Callable[[int], None]
) -> tuple[HotReplica, DiskWal, ReplicationWorld]:
    wal = DiskWal(FileDisk(path / f"wal-{broker_id}"), WalSettings(), rng=random.Random(broker_id))
    tail = WarmTail(LogCache(512 * MIB), 0)
    await wal.recover(tail.add)
    world = ReplicationWorld(TcpNetwork(), SystemClock(), random.Random(broker_id), Credentials(SECRET, broker_id))
    parts = ReplicaParts(
        ReplicaIdentity(0, WalReplica(broker_id, f"wal-{broker_id}"), 1),
        ReplicationPolicy(replicas, QUORUMS[replicas]),
        Grants(),
        door,
        world,
        ReplicaEvents(confirmed=confirmed),
        ReplicationLimits(),
    )
    return HotReplica(wal, tail, parts), wal, world


def follow(path: Path, broker_id: int, replicas: int, port: int, put: Callable[[object], None]) -> None:
    """Run a follower until the process is ended."""

    async def run() -> None:
        replica, wal, _ = await open_replica(path, broker_id, replicas, ReplicationDoor(), lambda _offset: None)
        await replica.follow(MasterTarget(1, 1, "127.0.0.1", port))
        put("follows")
        while True:
            await asyncio.sleep(0.02)
            replica.note_committed(wal.confirm_offset)

    uvloop.run(run())


def echo(put: Callable[[object], None]) -> None:
    """Answer each record on a socket with as many bytes as an acknowledgement has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        put(server.getsockname()[1])
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = int.from_bytes(connection.recv(4), "big")
        waiting = 0
        while data := connection.recv(1 << 20):
            waiting += len(data)
            for _ in range(waiting // size):
                connection.sendall(bytes(ACK_BYTES))
            waiting %= size


class BareSocket:
    """Round trips to the process of `echo`."""

    def __init__(self, port: int, size: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(size.to_bytes(4, "big"))
        self._data = os.urandom(size)

    def round_trip(self) -> float:
        began = time.perf_counter()
        self._socket.sendall(self._data)
        left = ACK_BYTES
        while left:
            left -= len(self._socket.recv(left))
        return time.perf_counter() - began

    def close(self) -> None:
        self._socket.close()


class Producer:
    """Keeps `in_flight` appends in flight, and measures until each is confirmed."""

    def __init__(self, size: int) -> None:
        self._payload = os.urandom(size)
        self._waiting: deque[tuple[int, float]] = deque()
        self._room = asyncio.Event()
        self._base = 0
        self.took: list[float] = []

    def confirmed(self, offset: int) -> None:
        now = time.perf_counter()
        while self._waiting and self._waiting[0][0] <= offset:
            self.took.append(now - self._waiting.popleft()[1])
        self._room.set()

    async def run(self, replica: HotReplica, in_flight: int, seconds: float) -> tuple[float, float]:
        """Return elapsed seconds, and CPU seconds of the loop's thread."""
        wal = replica.wal
        began, cpu = time.perf_counter(), time.thread_time()
        next_trim = wal.start_offset + TRIM_BYTES
        while time.perf_counter() - began < seconds:
            while len(self._waiting) < in_flight:
                try:
                    end = wal.append(StreamAppend(1, 1, self._base, 1, (self._payload,)))
                except WalFull:
                    await wal.writable(len(self._payload))
                    continue
                self._base += 1
                self._waiting.append((end, time.perf_counter()))
            self._room.clear()
            await self._room.wait()
            if wal.confirm_offset > next_trim:
                await wal.trim(wal.confirm_offset)
                replica.note_committed(wal.start_offset)
                next_trim = wal.start_offset + TRIM_BYTES
        elapsed, used = time.perf_counter() - began, time.thread_time() - cpu
        while self._waiting:
            self._room.clear()
            await self._room.wait()
        return elapsed, used


class Figures:
    """What one number of replicas took."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.mb_per_s: list[float] = []
        self.cpu_us: list[float] = []
        self.alone: list[float] = []
        self.loaded: list[float] = []


class Limits:
    """The bare disk and the bare socket, and how long each write and round trip took."""

    def __init__(self, disk: RawDisk, bare: BareSocket, size: int) -> None:
        self._disk, self._bare = disk, bare
        self._data = os.urandom(size)
        self.syncs: list[float] = []
        self.trips: list[float] = []

    def run(self, seconds: float) -> None:
        """Measure both for so long, each for half of it. The loop waits."""
        for found, once in ((self.syncs, self._sync), (self.trips, self._bare.round_trip)):
            until = time.perf_counter() + seconds / 2
            while time.perf_counter() < until:
                found.append(once())

    def _sync(self) -> float:
        return self._disk.write(self._data)


async def measure(path: Path, replicas: int, options: argparse.Namespace, figures: Figures, limits: Limits) -> None:
    """Measure one number of replicas once: one append at a time, in turns with the limits, then many."""
    door, producer = ReplicationDoor(), Producer(options.size)
    replica, wal, world = await open_replica(path, 1, replicas, door, producer.confirmed)

    async def nothing(_connection: RpcConnection, method: str, _params: msgspec.Raw) -> bytes:
        raise InvalidInput(method)

    listener = RpcListener(
        nothing,
        network=world.network,
        clock=world.clock,
        credentials=world.credentials,
        max_connections=16,
        adopt_wal=door.adopt,
    )
    await listener.start("127.0.0.1", 0)
    members = frozenset(WalReplica(each, f"wal-{each}") for each in range(1, replicas + 1))
    master = await replica.lead(1, SetConfiguration(1, members, QUORUMS[replicas]))
    with contextlib.ExitStack() as others:
        for broker_id in range(2, replicas + 1):
            arguments = (path, broker_id, replicas, listener.address[1])
            others.enter_context(background(follow, *arguments, ends=False))
        async with asyncio.timeout(60):
            while len(master.status()["in_sync"]) < replicas:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await producer.run(replica, options.in_flight, 1.0)  # files and caches are made
        producer.took.clear()
        for _ in range(max(1, round(options.seconds / TURN_S))):
            limits.run(TURN_S / 2)
            await producer.run(replica, 1, TURN_S)
        figures.alone += producer.took
        producer.took.clear()
        profile = cProfile.Profile() if options.profile and replicas == 3 else None
        if profile is not None:
            profile.enable()
        elapsed, cpu = await producer.run(replica, options.in_flight, options.seconds)
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        count = len(producer.took)
        figures.loaded += producer.took
        figures.rates.append(count / elapsed)
        figures.mb_per_s.append(count * options.size / 1e6 / elapsed)
        figures.cpu_us.append(cpu / count * 1e6)
    await replica.close()
    await listener.close()
    await wal.close()


@contextlib.contextmanager
def bare_socket(size: int) -> Iterator[BareSocket]:
    with background(echo) as result:
        bare = BareSocket(result(), size)
        try:
            yield bare
        finally:
            bare.close()


def report(figures: dict[int, Figures], limits_of: Limits, options: argparse.Namespace) -> None:
    syncs, trips = limits_of.syncs, limits_of.trips

    def ms(values: list[float], part: float) -> float:
        return percentile(values, part) * 1e3

    print(f"bare disk, {options.size:,} B: p50 {ms(syncs, 0.5):.3f} ms, p99 {ms(syncs, 0.99):.3f} ms")
    print(f"bare round trip, {options.size:,} B: p50 {ms(trips, 0.5):.3f} ms, p99 {ms(trips, 0.99):.3f} ms")
    for replicas, found in figures.items():
        quorum = QUORUMS[replicas]
        limits = [ms(syncs, part) + (ms(trips, part) if quorum > 1 else 0.0) for part in (0.5, 0.99)]
        alone = [ms(found.alone, part) for part in (0.5, 0.99)]
        loaded = [ms(found.loaded, part) for part in (0.5, 0.99)]
        row(
            f"confirmed, {replicas} replicas, quorum {quorum}, one at a time",
            f"p50 {alone[0]:.3f} ms, p99 {alone[1]:.3f} ms",
            limit=f"sync{' + round trip' if quorum > 1 else ''} p50 {limits[0]:.3f}, p99 {limits[1]:.3f} ms",
            ratio=f"{alone[0] / limits[0]:.2f}, {alone[1] / limits[1]:.2f}",
        )
        row(
            f"confirmed, {replicas} replicas, quorum {quorum}, {options.in_flight} in flight",
            f"{Spread.of(found.rates).text('/s')}, {Spread.of(found.mb_per_s).text('MB/s')},"
            f" p50 {loaded[0]:.2f} ms, p99 {loaded[1]:.2f} ms, {Spread.of(found.cpu_us).text('µs of CPU', 1)}",
            limit=f"one replica {Spread.of(figures[1].rates).text('/s')}",
            ratio=f"{Spread.of(found.rates).median / Spread.of(figures[1].rates).median:.2f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where to write (default: the system's temporary directory)")
    parser.add_argument("--size", type=int, default=4096, help="payload bytes")
    parser.add_argument("--in-flight", type=int, default=64, help="appends under way")
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 3.0)
    parser.add_argument("--runs", type=int, default=1 if quick() else 3)
    parser.add_argument("--profile", action="store_true", help="of the master's loop with three replicas")
    options = parser.parse_args()
    figures = {replicas: Figures() for replicas in QUORUMS}
    with directory(options.dir) as path, bare_socket(options.size) as bare:
        disk = RawDisk(path, 256 * MIB)
        limits = Limits(disk, bare, options.size)
        for run in range(options.runs):
            for replicas, found in figures.items():
                with directory(options.dir) as place:
                    uvloop.run(measure(place, replicas, options, found, limits))
                print(f"run {run + 1}, {replicas} replicas: {found.rates[-1]:,.0f} /s", flush=True)
        disk.close()
    report(figures, limits, options)


if __name__ == "__main__":
    main()
