"""Brokers leave and join a running cluster of real processes under load: nothing is lost, doubled or left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_process import eventually, serve_cluster, tidelog_json, up_cluster
from tests.support.load import Load

TOPIC = "scaled"
PARTITIONS = 9


def tidelog(bootstrap: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidelog", *arguments, "--bootstrap", bootstrap]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def done(bootstrap: str, *arguments: str) -> str:
    finished = tidelog(bootstrap, *arguments)
    assert finished.returncode == 0, finished
    return finished.stdout


def brokers(bootstrap: str) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in tidelog_json(bootstrap, "broker", "list")}


def leaders(bootstrap: str, topic: str = TOPIC) -> Counter[int]:
    return Counter(row["leader"] for row in tidelog_json(bootstrap, "topic", "describe", topic)[0]["partitions"])


@pytest.mark.slow
def test_a_broker_is_drained_under_load_and_takes_partitions_again(tmp_path: Path) -> None:
    with up_cluster(tmp_path) as cluster:
        bootstrap = cluster.bootstrap
        done(bootstrap, "topic", "create", TOPIC, "--partitions", str(PARTITIONS))
        with Load(bootstrap, TOPIC, PARTITIONS) as load:
            load.more(20)
            refused = tidelog(bootstrap, "broker", "remove", "2")
            assert refused.returncode == 2 and "owns 3 partitions" in refused.stderr, refused
            plan = tidelog_json(bootstrap, "broker", "drain", "2", "--dry-run")
            assert len(plan) == 3 and {move["to"] for move in plan} == {1, 3}
            assert brokers(bootstrap)[2]["state"] == "alive"
            finished = tidelog(bootstrap, "broker", "drain", "2")
            assert finished.returncode == 0 and "is drained" in finished.stdout, finished
            assert "3 of 3 partitions moved" in finished.stderr
            assert sorted(leaders(bootstrap).items()) in ([(1, 4), (3, 5)], [(1, 5), (3, 4)])
            done(bootstrap, "topic", "create", "other", "--partitions", "4")
            assert 2 not in leaders(bootstrap, "other")
            load.more(20)
            rows = brokers(bootstrap)
            assert (rows[2]["state"], rows[2]["partitions"], rows[2]["led"]) == ("drained", 0, 0)
            assert set(rows[1]["roles"]) == {"controller", "broker"}
            assert tidelog_json(bootstrap, "status")["problems"] == []
            done(bootstrap, "broker", "drain", "2", "--cancel")
            done(bootstrap, "partition", "move", f"{TOPIC}:0", "--to", "2")
            eventually(lambda: brokers(bootstrap)[2]["led"] == 1)
            load.more(20)
        load.check(bootstrap)
        assert tidelog(bootstrap, "broker", "drain", "77").returncode == 3
        assert cluster.stop() == 0


@pytest.mark.slow
def test_sigterm_moves_the_partitions_away_first_and_the_next_start_takes_new_ones(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, controllers=1, brokers=3) as cluster:
        bootstrap = cluster.bootstrap
        done(bootstrap, "topic", "create", TOPIC, "--partitions", str(PARTITIONS))
        with Load(bootstrap, TOPIC, PARTITIONS) as load:
            load.more(20)
            node = cluster.nodes[102]
            assert node.stop() == 0
            assert any("drained: all partitions are with other brokers" in line for line in node.output), node.output
            assert set(leaders(bootstrap)) == {101, 103}
            assert brokers(bootstrap)[102]["state"] == "dead"
            load.more(20)
            node.start()
            node.wait_ready()
            row = brokers(bootstrap)[102]
            assert (row["state"], row["drain"]) == ("alive", "none")
            done(bootstrap, "topic", "create", "other", "--partitions", "3")
            assert set(leaders(bootstrap, "other")) == {102}
            node.signal(signal.SIGINT)  # no drain
            assert node.process is not None and node.process.wait(60) == 0
            assert set(leaders(bootstrap, "other")) == {None}
            assert load.errors == []
        load.check(bootstrap)
