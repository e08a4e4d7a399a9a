"""Clusters of real processes whose WALs are replicated: controllers apart, so that a killed broker is only a broker.

Entry: `hot_cluster`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tidelog.chaos.ports import free_port
from tidelog.chaos.serve_cluster import ServeCluster, ServeNode, eventually, tidelog_json
from tidelog.cli.client import ClusterConnection
from tidelog.process.replica_disks import DirectoryReplicaDisks
from tidelog.runtime.errors import TidelogError
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import WalRecord

BROKERS = (101, 102, 103)
Document = dict[str, Any]
Sections = Mapping[str, Mapping[str, Any]]


class HotCluster(ServeCluster):
    """Controllers 1…, brokers 101…; `sections` are added to each node's settings."""

    def __init__(self, directory: Path, sections: Sections, controllers: int = 1, brokers: int = 3) -> None:
        super().__init__(directory, controllers, brokers)
        self.sections: dict[str, dict[str, Any]] = {name: dict(values) for name, values in sections.items()}
        self.has_racks = False
        """Whether broker N is in the rack `rack-N`; otherwise in none."""

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        found = super().settings(node_id)
        for section, values in self.sections.items():
            found.setdefault(section, {}).update(values)
        if self.has_racks and node_id in self.kafka_ports:
            found.setdefault("kafka", {})["rack"] = f"rack-{node_id}"
        return found

    # --- processes -----------------------------------------------------------------------------------------------

    @property
    def data_dir(self) -> Path:
        """Where the embedded bucket is, as in an `UpCluster`."""
        return self.directory

    def address(self, broker: int) -> str:
        """Where a broker listens."""
        return f"127.0.0.1:{self.kafka_ports[broker]}"

    def admin_url(self, broker: int) -> str:
        """A broker's admin HTTP."""
        nodes = self.ask("/status")["nodes"]
        return str(next(node["admin_url"] for node in nodes if node["id"] == broker))

    def but(self, *brokers: int) -> str:
        """The addresses of the other brokers."""
        return ",".join(self.address(each) for each in self.kafka_ports if each not in brokers)

    def begin(self, *brokers: int) -> None:
        """Start brokers that have ended, with the present settings."""
        for each in brokers:
            self.add(each).start()

    def ready(self, *brokers: int) -> None:
        """Wait until these brokers are ready."""
        for each in brokers:
            self.nodes[each].wait_ready()

    def join(self, broker: int) -> None:
        """Add a broker to the cluster and wait until it is ready."""
        self.kafka_ports[broker] = free_port()
        self.begin(broker)
        self.ready(broker)

    def kill(self, *brokers: int) -> None:
        """Send `kill -9` to all of these brokers, then wait until they have ended.

        They are stopped first: nobody sees another one's connection end before it ends itself.
        """
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in brokers:
                self.nodes[each].signal(number)
        for each in brokers:
            self.nodes[each].kill()

    # --- what the cluster says -----------------------------------------------------------------------------------

    def ask(self, path: str, spare: Iterable[int] = ()) -> Any:
        """The answer of the first broker that has one. Raises `AssertionError` if none has."""
        errors = []
        for broker in self.kafka_ports:
            node = self.nodes[broker]
            if broker not in spare and node.is_running() and node.is_ready():
                try:
                    return ClusterConnection(self.address(broker)).get(path)
                except TidelogError as error:
                    errors.append(f"{broker}: {error}")
        raise AssertionError(f"nobody answers {path}: {errors}")

    def sets(self, spare: Iterable[int] = ()) -> dict[int, Document]:
        """The replica sets, by id."""
        return {row["id"]: row for row in self.ask("/replica-sets", spare)["replica_sets"]}

    def described(self, replica_set: int) -> Document:
        """One replica set."""
        found: Document = self.ask(f"/replica-sets/describe?id={replica_set}")
        return found

    def state(self, broker: int, spare: Iterable[int] = ()) -> str | None:
        """What a broker's state is, as the others say."""
        nodes = self.ask("/status", spare)["nodes"]
        return next((str(node["state"]) for node in nodes if node["id"] == broker), None)

    def wait_sets(
        self, holds: Callable[[Document], bool], what: str, *, spare: Iterable[int] = (), timeout_s: float = 60.0
    ) -> dict[int, Document]:
        """Wait until this holds for every replica set that has partitions or members; return them."""
        last: list[Any] = [None]

        def check() -> Any:
            last[0] = self.sets(spare)
            return last[0] if last[0] and all(holds(row) for row in last[0].values()) else None

        try:
            return dict(eventually(check, timeout_s))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}; last: {last[0]}") from error

    def wait_full(self, members: int = 3, timeout_s: float = 60.0) -> dict[int, Document]:
        """Wait until each set has a master and so many members, all in sync."""
        return self.wait_sets(
            lambda row: row["master"] is not None and len(row["in_sync"]) == members == len(row["members"]),
            f"{members} members in sync",
            timeout_s=timeout_s,
        )

    def wait_masters(self, not_among: Iterable[int], timeout_s: float = 60.0) -> dict[int, Document]:
        """Wait until each set has a master that is none of these brokers, which are not asked."""
        gone = set(not_among)
        return self.wait_sets(
            lambda row: row["master"] is not None and row["master"] not in gone,
            f"masters but {gone}",
            spare=gone,
            timeout_s=timeout_s,
        )

    def elect(self, replica_set: int, broker: int) -> None:
        """Let this broker lead, and wait until it does."""

        def done() -> bool:
            found = tidelog_json(self.bootstrap, "replica-set", "elect", str(replica_set), "--broker", str(broker))
            return found is not None and found["master"] == broker

        eventually(done)

    # --- files ---------------------------------------------------------------------------------------------------

    def files(self, broker: int) -> Path:
        """A broker's data directory."""
        return self.directory / f"node-{broker}"

    def swap(self, broker: int, copy: Path) -> None:
        """Put an old copy of the directory of a broker that has ended in its place."""
        shutil.rmtree(self.files(broker))
        shutil.copytree(copy, self.files(broker), symlinks=True)

    def said(self, broker: int, count: int = 60) -> str:
        """What a broker said last."""
        node: ServeNode = self.nodes[broker]
        return "\n".join(node.output[-count:])


@contextlib.contextmanager
def hot_cluster(
    directory: Path, sections: Sections | None = None, controllers: int = 1, brokers: int = 3, *, racks: bool = False
) -> Iterator[HotCluster]:
    """Yield a started cluster whose sets have three members, or as many as there are brokers; it is killed last.

    `racks`: each broker is in a rack of its own (`HotCluster.has_racks`).
    """
    merged: dict[str, dict[str, Any]] = {"replication": {"total_replicas": min(3, brokers)}}
    for name, values in (sections or {}).items():
        merged.setdefault(name, {}).update(values)
    directory.mkdir(exist_ok=True)
    cluster = HotCluster(directory, merged, controllers, brokers)
    cluster.has_racks = racks
    try:
        cluster.start()
        cluster.wait_full(merged["replication"]["total_replicas"])
        yield cluster
    finally:
        cluster.close()


class KeptLog(NamedTuple):
    """What a WAL on disk holds."""

    start: int
    end: int
    records: dict[int, tuple[Any, ...]]
    """By WAL offset."""


def kept_log(directory: Path, replica_set: int, own_id: int) -> KeptLog:
    """What the WAL of a replica set holds in the data directory of a broker that has ended.

    A torn tail is cut, as a start of the broker would do.
    """

    async def read() -> KeptLog:
        found: dict[int, tuple[Any, ...]] = {}

        def add(record: WalRecord) -> None:
            place = (record.end_offset, record.type, record.master_epoch, record.stream_id, record.base_offset)
            found[record.offset] = (*place, bytes(record.payload))

        opened = DirectoryReplicaDisks(directory, own_id, WalSettings(), random.Random(0)).open(replica_set)
        try:
            await opened.wal.recover(add)
            return KeptLog(opened.wal.start_offset, opened.wal.end_offset, found)
        finally:
            await opened.wal.close()
            await opened.disk.close()

    return asyncio.run(read())


def assert_equal_logs(cluster: HotCluster, brokers: Iterable[int]) -> None:
    """After the brokers were killed: their logs are the same from the first offset that all of them still have."""
    for replica_set in cluster.kafka_ports:
        logs = {each: kept_log(cluster.files(each), replica_set, each) for each in brokers}
        first = max(log.start for log in logs.values())
        kept = [{at: record for at, record in log.records.items() if at >= first} for log in logs.values()]
        told = {each: (log.start, log.end, len(log.records)) for each, log in logs.items()}
        assert all(each == kept[0] for each in kept), (replica_set, told)
        assert len({log.end for log in logs.values()}) == 1, (replica_set, told)
