"""Brokers of a real cluster that die or are paused: with the WAL in the bucket others take over, with one on disk the
partitions wait for it. Nothing acknowledged is lost or doubled, whatever a zombie tries."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import TidelogError
from tests.e2e.backends import create_topic, s3_flags
from tests.support.cluster_process import UpCluster, eventually, tidelog_json, up_cluster
from tests.support.load import Load
from tests.support.s3_servers import S3Server
from tidelog.client import Cluster

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
                    found = Cluster(address).get(path)
                    if holds(found):
                        return found
        return None

    return eventually(ask)


def leaders(bootstrap: str, spare: str = "") -> dict[int, int | None]:
    found = asked(bootstrap, f"/partitions?topic={TOPIC}", lambda answer: len(answer["partitions"]) == PARTITIONS)
    return {row["partition"]: row["leader"] for row in found["partitions"]}


def victim_of(up: UpCluster) -> tuple[int, int, str]:
    """A broker that leads something and is not the active controller: its id, pid and address."""
    members = tidelog_json(up.bootstrap, "controller", "status")["members"]
    active = next(row["id"] for row in members if row["state"] == "active")
    victim = next(broker for broker in (3, 2, 1) if broker != active)
    nodes = Cluster(up.bootstrap).get("/status")["nodes"]
    row = next(node for node in nodes if node["id"] == victim)
    return victim, row["pid"], row["address"]


def salvaged(answer: Any, broker: int) -> bool:
    done = [one for one in answer["failover"]["salvaged"] if one["broker"] == broker and one["step"] == "done"]
    return bool(done) and done[-1]["partitions_placed"] > 0


def test_a_killed_broker_with_its_wal_in_the_bucket_is_taken_over_by_the_others(
    tmp_path: Path, minio_server: S3Server
) -> None:
    with up_cluster(tmp_path / "data", flags=["--wal", "s3", *s3_flags(minio_server)]) as up:
        create_topic(up.bootstrap, TOPIC, PARTITIONS)
        with Load(up.bootstrap, TOPIC, PARTITIONS) as load:
            load.more()
            victim, pid, address = victim_of(up)
            os.kill(pid, signal.SIGKILL)
            asked(up.bootstrap, "/status", lambda answer: salvaged(answer, victim), spare=address)
            load.more()
            assert victim not in leaders(up.bootstrap, spare=address).values()
            eventually(lambda: _state(up.bootstrap, victim) not in ("dead", None))
            load.more()
        load.check(up.bootstrap)


def _state(bootstrap: str, broker: int) -> str | None:
    with contextlib.suppress(TidelogError):
        for node in Cluster(bootstrap).get("/status")["nodes"]:
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
                asked(up.bootstrap, "/status", lambda answer: salvaged(answer, victim), spare=address)
            finally:
                os.kill(pid, signal.SIGCONT)
            eventually(lambda: pid not in up.node_pids())
            load.more()
        # Each offset was acknowledged once, with what is there: a zombie's acknowledgement would be a second one.
        load.check(up.bootstrap)


def test_a_dead_broker_with_its_wal_on_disk_is_waited_for_and_the_others_go_on(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data") as up:
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
