"""The release before this one beside this one: mixed clusters, a rolling upgrade, its rollback, and the raised level.

The older one is real: its wheel, in an environment of its own (`tests/releases`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.support import schema
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.cluster_process import ServeCluster, eventually, tidelog_json
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.load import Load
from tidelog.batch.batch import Record, build_batch
from tidelog.controller.model.levels import NEWEST
from tidelog.stream.producer_state import ROWS_PER_PIECE

pytestmark = [pytest.mark.slow, pytest.mark.servers("previous_release")]

TOPIC = "orders"
PARTITIONS = 6
NEW = sys.executable
ENDS_S = 60.0
PRODUCE = 0
PRODUCE_VERSION = 8
PRODUCERS = ROWS_PER_PIECE + 50


class MixedCluster(ServeCluster):
    """Three nodes of both roles, each in the version that was last chosen for it; all begin in the older one."""

    def __init__(self, directory: Path, old: str, wal: str) -> None:
        super().__init__(directory, 3, combined=True)
        self._wal = wal
        self._old = old
        self._versions = dict.fromkeys(self.members, old)

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        """Objects are small and many, so that each version reads and compacts what the other has written."""
        settings = super().settings(node_id)
        settings["wal"] = {"kind": self._wal}
        settings["upload"] = {"age_ms": 300, "delete_delay_ms": 1_000}
        settings["compaction"] = {"interval_ms": 1_000, "min_objects": 2, "age_ms": 1_000}
        settings["log"] = {"segment_bytes": 65_536}
        settings["controller"]["session_timeout_ms"] = 4_000
        return settings

    def start_all(self) -> None:
        for node_id in self.members:
            self.add(node_id).choose_python = self._chooser(node_id)
            self.nodes[node_id].start()
        for node in self.nodes.values():
            node.wait_ready()

    def _chooser(self, node_id: int) -> Callable[[], str]:
        return lambda: self._versions[node_id]

    def restart(self, node_id: int, *, old: bool = False, kill: bool = False) -> None:
        """Stop a node, or `kill -9` it, and start it in one of the versions; then all is well again."""
        node = self.nodes[node_id]
        if kill:
            node.kill()
        else:
            assert node.stop() == 0, node.output[-30:]
        self._versions[node_id] = self._old if old else NEW
        node.start()
        node.wait_ready()
        self.wait_well()

    def wait_well(self) -> None:
        eventually(lambda: not tidelog_json(self.bootstrap, "status")["problems"])

    def run_in(self, node_id: int, *, old: bool) -> int:
        """Stop a node, start it in one of the versions, and return the code with which it ends by itself."""
        node = self.nodes[node_id]
        assert node.stop() == 0, node.output[-30:]
        self._versions[node_id] = self._old if old else NEW
        node.output.clear()
        node.start()
        assert node.process is not None
        return node.process.wait(ENDS_S)

    def move(self, partition: int, target: int) -> None:
        tidelog_json(self.bootstrap, "partition", "move", f"{TOPIC}:{partition}", "--to", str(target))

        def is_there() -> bool:
            rows = tidelog_json(self.bootstrap, "topic", "describe", TOPIC)[0]["partitions"]
            return any(row["partition"] == partition and row["leader"] == target for row in rows)

        eventually(is_there)

    def make_active(self, node_id: int) -> None:
        def is_active() -> bool:
            if self.active() != node_id:
                Cli(self.bootstrap)("controller", "transfer", "--to", node_id, code=None)
            return self.active() == node_id

        wait_until(is_active, f"controller {node_id} is active")

    def levels(self) -> dict[str, Any]:
        found: dict[str, Any] = tidelog_json(self.bootstrap, "cluster", "status")
        return found


@contextmanager
def mixed(directory: Path, old: str, wal: str = "disk") -> Iterator[MixedCluster]:
    cluster = MixedCluster(directory, old, wal)
    try:
        cluster.start_all()
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        yield cluster
    finally:
        cluster.close()


def load_on(cluster: MixedCluster) -> Load:
    return Load(cluster.bootstrap, TOPIC, PARTITIONS)


@pytest.mark.long
@pytest.mark.parametrize("wal", ["disk", pytest.param("s3", marks=pytest.mark.long)])
def test_a_rolling_upgrade_and_its_rollback_lose_nothing(tmp_path: Path, previous_release: str, wal: str) -> None:
    with mixed(tmp_path, previous_release, wal) as cluster:
        with load_on(cluster) as load:
            load.more()
            for old in (False, True, False):
                for node_id in cluster.members:
                    cluster.restart(node_id, old=old)
                    load.more()
            assert cluster.levels()["level"] == 0
        load.check(cluster.bootstrap)


@pytest.mark.long
@pytest.mark.parametrize("wal", ["disk", pytest.param("s3", marks=pytest.mark.long)])
def test_each_version_goes_on_over_what_the_other_left_when_it_was_killed(
    tmp_path: Path, previous_release: str, wal: str
) -> None:
    with mixed(tmp_path, previous_release, wal) as cluster:
        with load_on(cluster) as load:
            load.more()
            for old in (False, True):
                for node_id in cluster.members:
                    cluster.restart(node_id, old=old, kill=True)
                    load.more()
        load.check(cluster.bootstrap)


@pytest.mark.long
def test_the_token_for_the_admin_http_is_found_beside_a_broker_that_does_not_know_of_it(
    tmp_path: Path, previous_release: str
) -> None:
    """The cluster's first broker is not the only one asked: it may be of the older release, which has no token."""
    with mixed(tmp_path, previous_release) as cluster:
        cluster.restart(3)
        Cli(f"127.0.0.1:{cluster.kafka_ports[3]}")("object", "clean", "--min-age", "1h", "--yes")


@pytest.mark.long
@pytest.mark.parametrize("asked", [1, 3])
def test_the_doctor_names_the_older_nodes_and_examines_the_others(
    tmp_path: Path, previous_release: str, asked: int
) -> None:
    """Whichever version tells it of the cluster."""
    with mixed(tmp_path, previous_release) as cluster:
        cluster.restart(3)
        cluster.make_active(1)
        cli = Cli(f"127.0.0.1:{cluster.kafka_ports[asked]}", cwd=tmp_path)
        document = cli("doctor", "--format", "json", "--secret-file", tmp_path / "secret", code=None).json()
        found = {(each["check"], each["where"]) for each in document["findings"]}
        older = {("node.older", "broker 1"), ("node.older", "broker 2")}
        assert older | {("members.versions", "cluster"), ("members.level-unknown", "cluster")} <= found
        assert {("disk.sync", "broker 3"), ("bucket.rights", "broker 3")} <= found
        assert not {where for check, where in found if check == "node.older"} & {"broker 3"}
        problems = [each for each in document["findings"] if each["level"] == "problem"]
        assert problems == []
        cli("debug", "bundle", "-o", tmp_path / "bundle.tar.gz", "--secret-file", tmp_path / "secret")


@pytest.mark.long
@pytest.mark.parametrize("active_is_old", [pytest.param(False, marks=pytest.mark.long), True])
def test_partitions_move_between_the_versions_whichever_has_the_active_controller(
    tmp_path: Path, previous_release: str, active_is_old: bool
) -> None:
    with mixed(tmp_path, previous_release) as cluster:
        with load_on(cluster) as load:
            cluster.restart(1)
            cluster.restart(2)
            cluster.make_active(3 if active_is_old else 1)
            load.more()
            for partition in range(PARTITIONS):
                for target in (3, 1, 3, 2):
                    cluster.move(partition, target)
            load.more()
        load.check(cluster.bootstrap)


@pytest.mark.long
def test_each_version_knows_the_many_producers_of_a_partition_that_the_other_had(
    tmp_path: Path, previous_release: str
) -> None:
    """More than this version writes as one value at a higher level, where it writes them in pieces."""
    with mixed(tmp_path, previous_release) as cluster:
        cluster.restart(1)
        cluster.move(0, 1)
        offsets = asyncio.run(send_first_batches(cluster.kafka_ports[1]))
        assert offsets == list(range(PRODUCERS))
        for target in (2, 1, 3):
            cluster.move(0, target)
            again = asyncio.run(send_first_batches(cluster.kafka_ports[target]))
            assert again == offsets, f"broker {target} wrote batches again"


async def send_first_batches(port: int) -> list[int]:
    """Send the batch with sequence 0 of each of many idempotent producers; their offsets."""
    make = schema.request(PRODUCE, PRODUCE_VERSION).make
    offsets = []
    async with KafkaClient("127.0.0.1", port) as client:
        for producer_id in range(PRODUCERS):
            batch = build_batch([Record(0, 0, b"k", b"v")], producer_id=producer_id, producer_epoch=0, base_sequence=0)
            data = make("PartitionProduceData", index=0, records=bytes(batch))
            topics = [make("TopicProduceData", name=TOPIC, partition_data=[data])]
            fields = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": topics}
            client.post(request_entity(PRODUCE, PRODUCE_VERSION, **fields))
        for _ in range(PRODUCERS):
            result = (await client.receive()).responses[0].partition_responses[0]
            assert int(result.error_code) == 0, result
            offsets.append(int(result.base_offset))
    return offsets


@pytest.mark.long
def test_the_level_is_raised_when_all_are_new_and_an_older_process_is_refused_by_name(
    tmp_path: Path, previous_release: str
) -> None:
    with mixed(tmp_path, previous_release) as cluster:
        cli = Cli(cluster.bootstrap)
        with load_on(cluster) as load:
            for node_id in (1, 2):
                cluster.restart(node_id)
            cluster.make_active(3)
            address = f"127.0.0.1:{cluster.kafka_ports[1]}"
            refused = Cli(address)("cluster", "upgrade", "--dry-run", code=2)
            assert "the active controller runs a version before feature levels" in refused.err
            refused = Cli(f"127.0.0.1:{cluster.kafka_ports[3]}")("cluster", "status", code=3)
            assert "this broker runs a version before feature levels" in refused.err
            cluster.make_active(1)
            report = tidelog_json(address, "cluster", "status")
            assert report["level"] == 0 and report["target"] == 0, report
            refused = Cli(address)("cluster", "upgrade", "--level", "1", "--yes", code=2)
            assert "controller 3 (levels 0), broker 3 (levels 0)" in refused.err
            load.more()
            cluster.restart(3)
            assert cluster.levels()["target"] == NEWEST
            assert f"raised the feature level to {NEWEST}" in cli("cluster", "upgrade", "--yes").text
            load.more()
            assert cluster.levels()["level"] == NEWEST
            node = cluster.nodes[3]
            assert cluster.run_in(3, old=True) == 7  # damaged, or of a newer version
            assert any("written by a newer version: upgrade this controller" in line for line in node.output)
            assert not node.is_ready()
            load.more()
            node.choose_python = lambda: NEW
            node.start()
            node.wait_ready()
            cluster.wait_well()
            cluster.restart(1, kill=True)
            load.more()
        load.check(cluster.bootstrap)


@pytest.mark.long
def test_a_broker_of_the_older_release_is_refused_by_name_at_a_raised_level(
    tmp_path: Path, previous_release: str
) -> None:
    """One that is no controller: it reads no log, and would not notice by itself."""
    cluster = ServeCluster(tmp_path, 1, 2)
    try:
        cluster.start()
        node = cluster.nodes[102]
        assert node.stop() == 0
        node.output.clear()
        node.choose_python = lambda: previous_release
        node.start()
        assert node.process is not None
        assert node.process.wait(ENDS_S) == 1
        said = "\n".join(node.output)
        assert f"the cluster is at feature level {NEWEST}; broker 102 supports 0" in said, said
        node.choose_python = lambda: NEW
        node.start()
        node.wait_ready()
        node.signal(signal.SIGTERM)
    finally:
        cluster.close()
