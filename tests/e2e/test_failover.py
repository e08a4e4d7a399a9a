"""Brokers of a real cluster that die or are paused: with the WAL in the bucket others take over, with one on disk the
partitions wait for it. Nothing acknowledged is lost or doubled, whatever a zombie tries."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import create_topic, read_topic, s3_flags
from tests.harness.failover import Nodes
from tests.support.cluster_process import UpCluster, eventually, serve_cluster, tidelog_json, up_cluster
from tests.support.load import Load
from tests.support.s3_servers import S3Server
from tidelog.chaos.serve_cluster import ServeNode
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import TidelogError

PARTITIONS = 9
TOPIC = "taken"

pytestmark = pytest.mark.slow

SHORT_SESSIONS = ("--set", "controller.session_timeout_ms=3000")


def asked(bootstrap: str, path: str, holds: Callable[[Any], Any], *, spare: str = "") -> Any:
    """The first answer of any broker (but `spare`) that holds, with a deadline."""

    def ask() -> Any:
        for address in bootstrap.split(","):
            if address != spare:
                with contextlib.suppress(TidelogError):
                    found = ClusterConnection(address).get(path)
                    if holds(found):
                        return found
        return None

    return eventually(ask)


def leaders(bootstrap: str, spare: str = "") -> dict[int, int | None]:
    found = asked(bootstrap, f"/partitions?topic={TOPIC}", lambda answer: len(answer["partitions"]) == PARTITIONS)
    return {row["partition"]: row["leader"] for row in found["partitions"]}


def active_controller(bootstrap: str) -> int:
    """The id of the controller that is active, once one is."""

    def find(answer: Any) -> list[int]:
        return [row["id"] for row in answer["members"] if row["state"] == "active"]

    return find(asked(bootstrap, "/controllers", find))[0]


def victim_of(up: UpCluster) -> tuple[int, int, str]:
    """A broker that leads something and is not the active controller: its id, pid and address."""
    active = active_controller(up.bootstrap)
    victim = next(broker for broker in (3, 2, 1) if broker != active)
    nodes = ClusterConnection(up.bootstrap).get("/status")["nodes"]
    row = next(node for node in nodes if node["id"] == victim)
    return victim, row["pid"], row["address"]


def taken_over(answer: Any, broker: int) -> bool:
    done = [one for one in answer["failover"]["taken_over"] if one["broker"] == broker and one["step"] == "done"]
    return bool(done) and done[-1]["partitions_placed"] > 0


@pytest.mark.long
def test_a_killed_broker_with_its_wal_in_the_bucket_is_taken_over_by_the_others(
    tmp_path: Path, minio_server: S3Server
) -> None:
    with up_cluster(tmp_path / "data", flags=["--wal", "s3", *s3_flags(minio_server)]) as up:
        create_topic(up.bootstrap, TOPIC, PARTITIONS)
        with Load(up.bootstrap, TOPIC, PARTITIONS) as load:
            load.more()
            victim, pid, address = victim_of(up)
            os.kill(pid, signal.SIGKILL)
            asked(up.bootstrap, "/status", lambda answer: taken_over(answer, victim), spare=address)
            load.more()
            assert victim not in leaders(up.bootstrap, spare=address).values()
            eventually(lambda: _state(up.bootstrap, victim) not in ("dead", None))
            load.more()
        load.check(up.bootstrap)


def _state(bootstrap: str, broker: int) -> str | None:
    with contextlib.suppress(TidelogError):
        for node in ClusterConnection(bootstrap).get("/status")["nodes"]:
            if node["id"] == broker:
                return str(node["state"])
    return None


def test_a_paused_broker_is_replaced_and_acknowledges_nothing_when_it_wakes_up(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data", flags=["--wal", "s3", *SHORT_SESSIONS]) as up:
        create_topic(up.bootstrap, TOPIC, PARTITIONS)
        with Load(up.bootstrap, TOPIC, PARTITIONS) as load:
            load.more()
            victim, pid, address = victim_of(up)
            os.kill(pid, signal.SIGSTOP)
            try:
                asked(up.bootstrap, "/status", lambda answer: taken_over(answer, victim), spare=address)
                for other in up.bootstrap.split(","):
                    if other != address:  # the paused one is not waited for, whichever id it has
                        assert {row["state"] for row in tidelog_json(other, "status")["nodes"]} >= {"dead"}
            finally:
                os.kill(pid, signal.SIGCONT)
            eventually(lambda: pid not in up.node_pids())
            load.more()
        # Each offset was acknowledged once, with what is there: a zombie's acknowledgement would be a second one.
        load.check(up.bootstrap)


@pytest.mark.long
def test_a_dead_broker_with_its_wal_on_disk_is_waited_for_and_the_others_go_on(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data", flags=["--set", "replication.total_replicas=1"]) as up:
        create_topic(up.bootstrap, TOPIC, PARTITIONS)
        with Load(up.bootstrap, TOPIC, PARTITIONS) as load:
            load.more()
            victim, pid, address = victim_of(up)
            before = leaders(up.bootstrap)
            mine = [index for index, leader in before.items() if leader == victim]
            os.kill(pid, signal.SIGSTOP)  # a killed one would be started again before anybody can look
            others = [index for index in range(PARTITIONS) if index not in mine]
            try:
                answer = asked(up.bootstrap, "/status", lambda found: found["failover"]["lost"], spare=address)
                (lost,) = answer["failover"]["lost"]
                assert (lost["broker"], lost["state"], lost["wal"]) == (victim, "waiting", "disk"), json.dumps(lost)
                assert any("wait for it to come back" in one for one in answer["problems"])
                counts = {index: len(load.acked.get(index, ())) for index in others}
                eventually(lambda: all(len(load.acked[index]) > counts[index] for index in others))
            finally:
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: leaders(up.bootstrap) == before)
            load.more()
        load.check(up.bootstrap)


@pytest.mark.long
def test_a_broker_that_is_dead_for_good_is_removed_with_what_only_its_disk_had(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, controllers=1, brokers=3) as nodes:
        create_topic(nodes.bootstrap, TOPIC, PARTITIONS)
        others = ",".join(f"127.0.0.1:{nodes.kafka_ports[each]}" for each in (101, 102))
        producer = Producer({"bootstrap.servers": nodes.bootstrap})
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, b"kept", partition=partition)
        assert producer.flush(60) == 0
        ClusterConnection(f"127.0.0.1:{nodes.kafka_ports[103]}").post("/upload")
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, b"not in the bucket yet", partition=partition)
        assert producer.flush(60) == 0
        mine = [at for at, leader in leaders(nodes.bootstrap).items() if leader == 103]
        assert mine
        eventually(
            lambda: ClusterConnection(others).get("/controllers")["members"][0]["not_uploaded"].get("103", [0])[0] > 0
        )
        nodes.nodes[103].kill()
        eventually(lambda: _state(others, 103) == "dead")
        assert tidelog_json(others, "broker", "remove", "103", ok=[2]) is None
        losses = tidelog_json(others, "broker", "remove", "103", "--accept-loss", "--dry-run")
        assert losses["wal"] == "disk" and losses["wal_bytes"] > 0, losses
        found = [(row["partition"], row["end_offset"]) for row in losses["partitions"] if row["topic"] == TOPIC]
        assert found == [(partition, 1) for partition in mine]
        assert tidelog_json(others, "broker", "remove", "103", "--accept-loss")["id"] == 103
        assert set(leaders(others).values()) == {101, 102}
        for partition in mine:  # where the bucket ends the log goes on
            producer.produce(TOPIC, b"after it", partition=partition)
        assert producer.flush(60) == 0
        values = [row[4] for row in read_topic(others, TOPIC, PARTITIONS) if row[0] in mine]
        assert sorted(values) == sorted([b"kept", b"after it"] * len(mine))
        nodes.nodes[103].start()  # it was not dead for good: it has nothing to say any more
        nodes.nodes[103].wait_ready()
        values = [row[4] for row in read_topic(nodes.bootstrap, TOPIC, PARTITIONS) if row[0] in mine]
        assert sorted(values) == sorted([b"kept", b"after it"] * len(mine))


@pytest.mark.long
def test_a_cluster_that_stops_and_starts_as_a_whole_keeps_its_placement_though_one_broker_is_slow(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        limits = {"session_timeout_ms": 12_000, "startup_timeout_ms": 300_000}
        nodes = Nodes(tmp_path, {"wal": {"kind": "s3"}, "controller": limits})
        stack.callback(nodes.close)
        nodes.start()
        create_topic(nodes.bootstrap, TOPIC, PARTITIONS)
        before = leaders(nodes.bootstrap)
        assert set(before.values()) == {1, 2, 3}
        nodes.nodes[3].signal(signal.SIGUSR1)  # long before the others hear of it
        eventually(lambda: "broker stopped" in nodes.nodes[3].output)

        def has_stopped(node: ServeNode) -> bool:
            return "broker stopped" in node.output

        for broker in (1, 2):
            nodes.nodes[broker].signal(signal.SIGUSR1)
        for node in nodes.nodes.values():
            eventually(partial(has_stopped, node))
            node.stop()
        for broker in (1, 2):
            nodes.nodes[broker].start()
        for broker in (1, 2):
            nodes.nodes[broker].wait_ready()
        others = nodes.others(3)
        first = active_controller(others)
        ClusterConnection(others).post("/controllers/transfer")  # the next one knows of the start, too
        eventually(lambda: active_controller(others) != first)
        began_ms = ClusterConnection(others).get("/status")[
            "time_ms"
        ]  # then wait: longer than a session, not as long as a start
        eventually(
            lambda: ClusterConnection(others).get("/status")["time_ms"] > began_ms + limits["session_timeout_ms"] + 1000
        )
        nodes.nodes[3].start()
        nodes.nodes[3].wait_ready()
        assert leaders(nodes.bootstrap) == before
