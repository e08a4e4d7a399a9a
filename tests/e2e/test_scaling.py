"""Brokers leave and join a running cluster of real processes under load: nothing is lost, doubled or left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

from tests.e2e.backends import QUIET
from tests.support.clients import wait_until
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


def only_fences(directory: Path, broker_id: int) -> bool:
    """Whether nothing is left of a broker's WAL in the bucket but its fences (header and body, 112 bytes)."""
    return {each.stat().st_size for each in directory.glob(f"bucket/*/wal/{broker_id:08}/*")} <= {112}


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


@pytest.mark.long
@pytest.mark.slow
def test_sigterm_moves_the_partitions_away_first_and_the_next_start_takes_new_ones(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, controllers=1, brokers=3) as cluster:
        bootstrap = cluster.bootstrap
        done(bootstrap, "topic", "create", TOPIC, "--partitions", str(PARTITIONS))
        with Load(bootstrap, TOPIC, PARTITIONS) as load:
            load.more(20)
            node = cluster.nodes[102]
            assert node.stop() == 0
            assert any("drained: other brokers lead all partitions" in line for line in node.output), node.output
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


class Group:
    """A consumer of a group in a thread, committing as it goes; counts each record that it is given."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "retry.backoff.ms": 10,
                **QUIET,
            }
        )
        self.seen: Counter[bytes] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._consumer.subscribe([TOPIC])
        while not self._stopping.is_set():
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                self.seen[message.value() or b""] += 1
        self._consumer.close()

    def __enter__(self) -> Group:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join(60)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("wal", ["disk", pytest.param("s3", marks=pytest.mark.long)])
def test_a_running_cluster_gains_a_broker_and_loses_another_without_a_trace(tmp_path: Path, wal: str) -> None:
    data = ("--data-dir", str(tmp_path))
    with up_cluster(tmp_path, flags=["--wal", wal, "--racks", "a,b,c"]) as cluster:
        bootstrap = cluster.bootstrap
        assert [row["rack"] for row in brokers(bootstrap).values()] == ["a", "b", "c"]
        urls = {node["bucket"]["url"] for node in tidelog_json(bootstrap, "status")["nodes"]}
        assert urls == {(tmp_path / "bucket").as_uri()}  # not the link of each node
        done(bootstrap, "topic", "create", TOPIC, "--partitions", str(PARTITIONS))
        with Group(bootstrap) as group:
            with Load(bootstrap, TOPIC, PARTITIONS) as load:
                load.more(20)
                added = tidelog(bootstrap, "broker", "add")  # the broker at hand says which `tidelog up` runs it
                assert added.returncode == 0 and "added broker 4 at" in added.stdout, added
                assert (brokers(bootstrap)[4]["roles"], brokers(bootstrap)[4]["rack"]) == (["broker"], "a")
                done(bootstrap, "partition", "move", f"{TOPIC}:0", f"{TOPIC}:1", f"{TOPIC}:2", "--to", "4")
                load.more(20)
                early = tidelog(bootstrap, "broker", "remove", "2", *data)
                assert early.returncode == 2 and "owns" in early.stderr, early
                done(bootstrap, "broker", "drain", "2")
                done(bootstrap, "broker", "remove", "2")
                members = tidelog_json(bootstrap, "controller", "status")["members"]
                assert [row["error"] for row in members] == [None] * 3  # its controller is back already
                load.more(20)
                done(bootstrap, "broker", "drain", "4")
                done(bootstrap, "broker", "drain", "4", "--cancel")
                assert sorted(brokers(bootstrap)) == [1, 3, 4]
                load.more(20)
            written = {value for records in load.acked.values() for _, _, value in records}
            wait_until(lambda: len(group.seen) >= len(written), "the group has read what was written", 60)
        assert set(group.seen) == written
        load.check(bootstrap)
        status = tidelog_json(bootstrap, "status")
        assert [(node["id"], node["roles"]) for node in status["nodes"]] == [
            (1, ["controller", "broker"]),
            (2, ["controller"]),  # its controller goes on
            (3, ["controller", "broker"]),
            (4, ["broker"]),
        ]
        eventually(lambda: not tidelog_json(bootstrap, "status")["problems"])
        assert not (tmp_path / "node-2" / "wal").exists()
        assert only_fences(tmp_path, 2)
        assert tidelog(bootstrap, "broker", "remove", "2", *data).returncode == 3
        done(bootstrap, "broker", "drain", "4")
        done(bootstrap, "broker", "remove", "4", *data)
        assert not (tmp_path / "node-4").exists()
        assert only_fences(tmp_path, 4)
        assert list(tmp_path.glob("bucket/*/wal/00000003/*")) or wal == "disk"
        assert cluster.stop() == 0
        assert not (tmp_path / "up.sock").exists()
    with up_cluster(tmp_path, flags=["--wal", wal]) as again:  # --brokers 3, and there are two: 1 and 3
        assert sorted(brokers(again.bootstrap)) == [1, 3]
        load.check(again.bootstrap)
        assert again.stop() == 0
