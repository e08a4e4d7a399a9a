"""The faults of the chaos harness: each is a context manager that injects the fault on entry and heals it on exit.

Faults of the bucket need an S3 server behind the harness's proxy; a full disk needs permission to mount a small tmpfs.

Entry: `FAULTS`.
"""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidelog.chaos.compacted import CLEANER
from tidelog.chaos.cut_cluster import CutCluster
from tidelog.chaos.faulty_s3 import Fault, FaultyS3
from tidelog.chaos.serve_cluster import ServeNode
from tidelog.chaos.tcp_proxy import Proxies
from tidelog.runtime.errors import InvalidInput

DISK_BYTES = 96 << 20
"""Size of a node's small disk, which also has small WAL files."""
COORDINATOR_PARTITIONS = 4
"""Of each of the topics of the coordinators, so that faults and moves meet those that are used."""
SESSION_MS = 4_000
SLOW_S = 0.1
BUCKET_SLOW_S = 1.0
EXIT_ASKS_FOR_RESTART = frozenset({1, 5, 6, -signal.SIGKILL})
"""Exit codes after which a supervisor would restart; any other is a finding."""


@dataclass(frozen=True, slots=True)
class OldRelease:
    """Another release that nodes run beside this one."""

    python: str
    """The interpreter in whose environment it is installed."""
    rng: random.Random
    """Draws which of the two a node is started in."""


class ChaosCluster(CutCluster):
    """Three nodes of both roles; every path between them, and to the bucket, can be cut.

    With an old release the cluster is founded by it. From the first restart on both versions run: a node that is
    started is of the version that no other node runs; if both do, of a random one.
    """

    def __init__(
        self,
        directory: Path,
        proxies: Proxies,
        s3: Mapping[str, Any],
        wal: str,
        *,
        nodes: int,
        small_disks: bool,
        old: OldRelease | None = None,
    ) -> None:
        super().__init__(directory, proxies, s3, wal, controllers=nodes, combined=True)
        self._small_disks = small_disks
        self._old = old
        self._founded = False
        self.starts: dict[str, int] = {}
        """How often a node was started, by the version: `new` or `old`."""
        self.client_paths = {broker: proxies.path("127.0.0.1", port) for broker, port in self.kafka_ports.items()}
        """The advertised path of each broker."""
        self._mounted: list[Path] = []
        self.ended: list[str] = []
        """Nodes that ended by themselves, with their exit codes."""
        self.problems: list[str] = []

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        """The node's configuration, by section. Uploads are small, so that some are in flight during every fault."""
        settings = super().settings(node_id)
        settings["controller"]["session_timeout_ms"] = SESSION_MS
        settings["upload"] = {"age_ms": 500, "size_bytes": 1 << 20, "split_bytes": 1 << 17}
        settings["kafka"] |= {
            "advertised_host": self.client_paths[node_id].host,
            "advertised_port": self.client_paths[node_id].port,
        }
        settings["group"] = {
            "initial_rebalance_delay_ms": 0,
            "offsets_topic_partitions": COORDINATOR_PARTITIONS,
        }
        if self._old is None:  # it knows neither transactions nor log compaction
            settings["group"]["transaction_topic_partitions"] = COORDINATOR_PARTITIONS
            settings["log"] = dict(CLEANER)
        if self._small_disks:
            settings["wal"] |= {"segment_bytes": 1 << 20}
        return settings

    def add(self, node_id: int) -> ServeNode:
        """Write the node's configuration; with small disks, on its own disk. Raises `InvalidInput`."""
        if self._small_disks:
            where = self.directory / f"node-{node_id}"
            where.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(where)]
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
            if mounted.returncode != 0:
                raise InvalidInput(
                    f"disk-full needs a small file system, and cannot mount one: {mounted.stderr.strip()}",
                    hint="run it as root, or leave disk-full out of --faults",
                )
            self._mounted.append(where)
        node = super().add(node_id)
        node.dies_with_starter = True
        node.choose_python = lambda: self._choose(node)
        return node

    def start(self) -> None:
        """Start all nodes; with an old release in that, but for the last node."""
        super().start()
        self._founded = True
        if self._old is not None:
            last = self.nodes[max(self.nodes)]
            last.stop()
            last.start()
            last.wait_ready()

    def _choose(self, node: ServeNode) -> str:
        pythons = [sys.executable, self._old.python] if self._old is not None else [sys.executable]
        if self._founded and self._old is not None:
            others = {each.python for each in self.nodes.values() if each is not node}
            pythons = [each for each in pythons if others != {each}]
            chosen = self._old.rng.choice(pythons)
        else:
            chosen = pythons[-1]
        name = "new" if chosen == sys.executable else "old"
        self.starts[name] = self.starts.get(name, 0) + 1
        return chosen

    def revive(self, timeout_s: float = 90.0) -> None:
        """Restart stopped nodes, as a supervisor does, until all are ready. Raises `AssertionError`."""
        deadline = time.monotonic() + timeout_s
        while True:
            down = [node for node in self.nodes.values() if not node.is_running()]
            for node in down:
                self._note_end(node)
                node.start()
            for node in down:
                self._wait_ready(node, deadline)
            if all(node.is_running() for node in self.nodes.values()):
                return
            assert time.monotonic() < deadline, f"nodes do not stay up: {self.ended}"

    def _note_end(self, node: ServeNode) -> None:
        code = node.process.returncode if node.process is not None else 0
        if code == -signal.SIGKILL:
            return  # killed by the harness
        said = f"node {node.node_id} ended with {code}"
        self.ended.append(said)
        if code not in EXIT_ASKS_FOR_RESTART:
            self.problems.append(f"{said}: {' | '.join(node.output[-5:])}")

    @staticmethod
    def _wait_ready(node: ServeNode, deadline: float) -> None:
        while not node.is_ready() and node.is_running():
            assert time.monotonic() < deadline, f"node {node.node_id} is not ready:\n" + "\n".join(node.output[-30:])
            time.sleep(0.05)

    def close(self) -> None:
        """Kill all nodes, and unmount the small disks."""
        super().close()
        for where in self._mounted:
            subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)


class World:
    """The objects that faults act on."""

    def __init__(self, cluster: ChaosCluster, bucket: FaultyS3[Any] | None, rng: random.Random) -> None:
        self.cluster = cluster
        self.bucket = bucket
        self.rng = rng
        self.replayed: list[int] = []
        """Bytes of WAL on disk that each killed node has at its next start."""

    def pick(self) -> ServeNode:
        """Return a random node."""
        return self.rng.choice(list(self.cluster.nodes.values()))

    def others(self, node_id: int) -> list[int]:
        """Return all nodes but one."""
        return [each for each in self.cluster.nodes if each != node_id]

    def hold(self, low_s: float, high_s: float) -> None:
        """Sleep for the random duration of the fault; not a wait for a condition."""
        time.sleep(self.rng.uniform(low_s, high_s))


FaultContext = AbstractContextManager[str]
DIRECTIONS = ((True, True), (True, False), (False, True))
"""Whether requests and responses are cut."""


def _which(requests: bool, answers: bool) -> str:
    return "both ways" if requests and answers else "requests" if requests else "answers"


def kill(world: World) -> FaultContext:
    """`kill -9` of a node, which is restarted."""
    return _kill(world, world.pick())


def kill_active(world: World) -> FaultContext:
    """`kill -9` of the node with the active controller, which is restarted."""
    return _kill(world, world.cluster.nodes[world.cluster.active()])


@contextlib.contextmanager
def _kill(world: World, node: ServeNode) -> Iterator[str]:
    node.kill()
    yield f"node {node.node_id}"
    world.hold(0.1, 2.0)
    wal = node.directory / "wal"
    if wal.is_dir():
        world.replayed.append(wal_bytes(wal))
    node.start()


@contextlib.contextmanager
def stop(world: World) -> Iterator[str]:
    """SIGSTOP, for less or more than a session, and SIGCONT."""
    node = world.pick()
    node.signal(signal.SIGSTOP)
    try:
        yield f"node {node.node_id}"
        world.hold(0.5, 2 * SESSION_MS / 1000)
    finally:
        node.signal(signal.SIGCONT)


@contextlib.contextmanager
def cut(world: World) -> Iterator[str]:
    """Cut a node off from the others: both ways, or requests or responses only."""
    node_id = world.pick().node_id
    others = world.others(node_id)
    requests, answers = world.rng.choice(DIRECTIONS)
    paths = [*world.cluster.between([node_id], others), *world.cluster.between(others, [node_id])]
    paths.append(world.cluster.peer_paths[node_id])
    for path in paths:
        path.cut(requests=requests, answers=answers)
    try:
        yield f"node {node_id}, {_which(requests, answers)}"
        world.hold(1.0, 2 * SESSION_MS / 1000)
    finally:
        for path in paths:
            path.heal()


@contextlib.contextmanager
def cut_clients(world: World) -> Iterator[str]:
    """Cut clients off from a node: both ways, or requests or responses only; then connections may be closed.

    If they are closed, responses are lost, and producers send again records that were already written.
    """
    node_id = world.pick().node_id
    path = world.cluster.client_paths[node_id]
    requests, answers = world.rng.choice(DIRECTIONS)
    path.cut(requests=requests, answers=answers)
    closes = world.rng.random() < 0.5
    try:
        yield f"node {node_id}, {_which(requests, answers)}{', then closed' if closes else ''}"
        world.hold(0.5, 2 * SESSION_MS / 1000)
        if closes:
            path.reset()
    finally:
        path.heal()


@contextlib.contextmanager
def slow(world: World) -> Iterator[str]:
    """Slow down the network between the nodes."""
    paths = [*world.cluster.paths.values(), *world.cluster.peer_paths.values()]
    for path in paths:
        path.slow(SLOW_S)
    try:
        yield f"all nodes, {SLOW_S:g} s a message"
        world.hold(2.0, 6.0)
    finally:
        for path in paths:
            path.heal()


@contextlib.contextmanager
def _bucket(world: World, fault: Fault, what: str) -> Iterator[str]:
    bucket = world.bucket
    assert bucket is not None, "checked before the run"
    bucket.fault = lambda seen: fault
    try:
        yield what
        world.hold(2.0, 8.0)
    finally:
        bucket.fault = lambda seen: None


def bucket_503(world: World) -> FaultContext:
    """The bucket responds to every request with 503."""
    return _bucket(world, Fault(status=503), "the bucket")


def bucket_403(world: World) -> FaultContext:
    """The bucket denies every request, as after the rotation of a key."""
    return _bucket(world, Fault(status=403, code="AccessDenied"), "the bucket, 403")


def bucket_slow(world: World) -> FaultContext:
    """Every response of the bucket takes a second longer."""
    return _bucket(world, Fault(delay_s=BUCKET_SLOW_S), f"the bucket, {BUCKET_SLOW_S:g} s a request")


@contextlib.contextmanager
def disk_full(world: World) -> Iterator[str]:
    """Fill a node's disk, and later free it.

    While uploads succeed, the WAL reuses the files that they free and needs no space. So the bucket fails meanwhile, if
    it is behind a proxy.
    """
    node = world.pick()
    ballast = node.directory / "ballast"
    _fill(ballast)
    if world.bucket is not None:
        world.bucket.fault = lambda seen: Fault(status=503)
    try:
        yield f"node {node.node_id}" + (", bucket 503" if world.bucket is not None else "")
        world.hold(4.0, 10.0)
    finally:
        ballast.unlink()
        if world.bucket is not None:
            world.bucket.fault = lambda seen: None


def _fill(ballast: Path) -> None:
    """Write until the disk is full; the node may use some of the space meanwhile."""
    piece = bytes(1 << 16)
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.tell() < DISK_BYTES:
                file.write(piece)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def wal_bytes(directory: Path) -> int:
    """Return the bytes in the WAL on disk of a stopped node."""
    import asyncio

    from tidelog.runtime.disk import FileDisk
    from tidelog.storage.wal.disk import inspect as wal_tool

    async def inspect() -> int:
        disk = FileDisk(directory)
        try:
            info = await wal_tool.inspect(disk)
        finally:
            await disk.close()
        return info.end_offset - info.start_offset

    return asyncio.run(inspect())


FAULTS: dict[str, Callable[[World], FaultContext]] = {
    "kill": kill,
    "kill-active": kill_active,
    "stop": stop,
    "cut": cut,
    "cut-clients": cut_clients,
    "slow": slow,
    "bucket-503": bucket_503,
    "bucket-slow": bucket_slow,
    "bucket-403": bucket_403,
    "disk-full": disk_full,
}
"""Name → fault."""
BUCKET_FAULTS = frozenset({"bucket-503", "bucket-slow", "bucket-403"})
"""The faults that need an S3 server."""
USUAL = ("kill", "kill-active", "stop", "cut", "cut-clients", "slow")
"""The faults that work everywhere."""
