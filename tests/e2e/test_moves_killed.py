"""Moves between real processes that are killed in the middle: one owner, nothing lost, and the move ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.support.cluster_process import UpCluster, eventually, serve_cluster, up_cluster
from tests.support.load import Load
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import TidelogError

PARTITIONS = 6
TOPIC = "moved"
ROUNDS = int(os.environ.get("TIDELOG_TEST_MOVE_KILLS", "3"))

pytestmark = pytest.mark.slow


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpCluster]:
    with up_cluster(tmp_path / "data") as up:
        create_topic(up.bootstrap, TOPIC, PARTITIONS)
        yield up


def placed(bootstrap: str) -> dict[int, dict[str, Any]]:
    """Where the partitions are, by whichever broker lives."""

    def asked() -> list[dict[str, Any]]:
        for address in bootstrap.split(","):
            with contextlib.suppress(TidelogError):
                rows: list[dict[str, Any]] = ClusterConnection(address).get(f"/partitions?topic={TOPIC}")["partitions"]
                return rows
        return []

    return {row["partition"]: row for row in eventually(asked)}


def pid_of(cluster: ClusterConnection, broker: int) -> int:
    nodes = cluster.get("/status")["nodes"]
    url = next(node["admin_url"] for node in nodes if node["id"] == broker)
    host = ClusterConnection(cluster.bootstrap)
    host.__dict__["admin_url"] = url
    return int(next(node["pid"] for node in host.get("/status")["nodes"] if node["id"] == broker))


@pytest.mark.long
@pytest.mark.parametrize("victim", ["source", pytest.param("target", marks=pytest.mark.long)])
def test_a_broker_killed_in_the_middle_of_its_moves_loses_nothing_and_they_end(up: UpCluster, victim: str) -> None:
    rng = random.Random(victim)
    with Load(up.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        for _ in range(ROUNDS):
            rows = placed(up.bootstrap)
            cluster = ClusterConnection(up.bootstrap)
            source = rows[rng.randrange(PARTITIONS)]["broker"]
            target = source % 3 + 1
            mine = [index for index, row in rows.items() if row["broker"] == source]
            dies = source if victim == "source" else target
            pid = pid_of(cluster, dies)
            asked = cluster.post(
                "/moves", {"moves": [{"topic": TOPIC, "partition": one, "to": target} for one in mine]}
            )
            assert [one["error"] for one in asked["results"]] == [None] * len(mine)
            time.sleep(rng.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
            try:
                eventually(lambda: _all_on(up.bootstrap, mine, target))  # noqa: B023
            except AssertionError:
                raise AssertionError(f"{placed(up.bootstrap)}\n{up.tail(40)}") from None
            eventually(lambda: _answers(up.bootstrap, dies))  # noqa: B023
            load.more(20)
    load.check(up.bootstrap)


@pytest.mark.long
def test_an_active_controller_killed_in_the_middle_of_moves_loses_nothing_and_they_end(tmp_path: Path) -> None:
    rng = random.Random(7)
    with serve_cluster(tmp_path, controllers=3, brokers=2) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
            load.more()
            for _ in range(ROUNDS):
                rows = placed(cluster.bootstrap)
                source = rows[rng.randrange(PARTITIONS)]["broker"]
                target = 101 + 102 - source
                mine = [index for index, row in rows.items() if row["broker"] == source]
                active = cluster.active()
                moves = {"moves": [{"topic": TOPIC, "partition": one, "to": target} for one in mine]}
                asked = ClusterConnection(cluster.bootstrap).post("/moves", moves)
                assert [one["error"] for one in asked["results"]] == [None] * len(mine)
                time.sleep(rng.uniform(0.0, 0.1))
                cluster.nodes[active].kill()
                eventually(lambda: _all_on(cluster.bootstrap, mine, target), 120)  # noqa: B023
                load.more(20)
                cluster.nodes[active].start()
                cluster.nodes[active].wait_ready()
        load.check(cluster.bootstrap)


def _all_on(bootstrap: str, partitions: list[int], broker: int) -> bool:
    rows = placed(bootstrap)
    return all(rows[one]["broker"] == broker and rows[one]["leader"] == broker for one in partitions)


def _answers(bootstrap: str, broker: int) -> bool:
    with contextlib.suppress(TidelogError):
        nodes = ClusterConnection(bootstrap).get("/status")["nodes"]
        return any(node["id"] == broker and node["state"] != "dead" for node in nodes)
    return False
