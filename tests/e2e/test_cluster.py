"""Three brokers and three controllers as real processes: round trips, loss of controllers, quorum changes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer
from kafka import KafkaAdminClient

from tests.support.cluster_process import (
    ServeCluster,
    ServeNode,
    eventually,
    serve_cluster,
    tidelog_json,
    up_cluster,
)
from tests.support.kafka_python import ClosingSelector
from tests.support.ports import free_port

TOPIC = "orders"


def tidelog(bootstrap: str, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "tidelog", *arguments, "--bootstrap", bootstrap]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done
    return done.stdout


class Load:
    """An idempotent producer in a thread that numbers its records, and notes each delivery and its longest gap."""

    def __init__(self, bootstrap: str, pause_s: float = 0.002) -> None:
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 2, "retry.backoff.ms": 20}
        )
        self._pause_s = pause_s
        self.delivered: list[int] = []
        self.errors: list[str] = []
        self.longest_gap_s = 0.0
        self._last = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            self._producer.produce(TOPIC, str(number).encode(), on_delivery=self._noted(number))
            number += 1
            self._producer.poll(self._pause_s)
        self._producer.flush(60)

    def _noted(self, number: int) -> Any:
        def done(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self.errors.append(str(error))
                return
            now = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now - self._last)
            self._last = now
            self.delivered.append(number)

        return done

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(90)

    def grown(self, by: int) -> None:
        """Until so many more records were delivered."""
        target = len(self.delivered) + by
        eventually(lambda: len(self.delivered) >= target)


def read_all(bootstrap: str, expected: int, group: str = "readers") -> Counter[int]:
    """The number of times each record is there."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"})
    found: Counter[int] = Counter()
    deadline = time.monotonic() + 60
    try:
        consumer.subscribe([TOPIC])
        while sum(found.values()) < expected and time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                found[int(message.value() or b"-1")] += 1
        quiet_until = time.monotonic() + 1.0  # and nothing more than was written
        while time.monotonic() < quiet_until:
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                found[int(message.value() or b"-1")] += 1
    finally:
        consumer.close()
    return found


def check(bootstrap: str, load: Load) -> None:
    assert load.errors == []
    found = read_all(bootstrap, len(load.delivered))
    assert found == Counter(load.delivered)


@pytest.mark.gate_cases("disk")
@pytest.mark.slow
@pytest.mark.parametrize("wal", ["disk", "s3"])
def test_three_brokers_share_the_partitions_and_the_loss_of_any_process_heals(tmp_path: Path, wal: str) -> None:
    with up_cluster(tmp_path, flags=["--wal", wal]) as cluster:
        addresses = cluster.bootstrap.split(",")
        assert len(addresses) == 3
        tidelog(cluster.bootstrap, "topic", "create", TOPIC, "--partitions", "12")
        for address in addresses:  # the same truth from each
            described = tidelog_json(address, "topic", "describe", TOPIC)
            leaders = Counter(row["leader"] for row in described[0]["partitions"])
            assert leaders == {1: 4, 2: 4, 3: 4}
        status = tidelog_json(cluster.bootstrap, "status", ok=(0,))
        assert [node["id"] for node in status["nodes"]] == [1, 2, 3]
        assert all(set(node["roles"]) == {"controller", "broker"} for node in status["nodes"])
        assert sorted(node["pid"] for node in status["nodes"]) == sorted(cluster.node_pids())
        assert status["problems"] == []
        with Load(cluster.bootstrap) as load:
            load.grown(300)
            active = next(node for node in status["nodes"] if node["controller"] == "active")
            os.kill(active["pid"], signal.SIGKILL)
            cluster.wait_for_line(f"broker process {active['id']} is ready again")
            load.grown(300)
        check(cluster.bootstrap, load)
        eventually(lambda: not tidelog_json(cluster.bootstrap, "status")["problems"])
        assert cluster.stop() == 0
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.long
@pytest.mark.slow
def test_the_whole_cluster_comes_back_after_kill_9_of_everything(tmp_path: Path) -> None:
    with up_cluster(tmp_path, chooses_ports=True) as cluster:
        tidelog(cluster.bootstrap, "topic", "create", TOPIC, "--partitions", "6")
        with Load(cluster.bootstrap) as load:
            load.grown(500)
            acknowledged = list(load.delivered)
            cluster_id = tidelog_json(cluster.bootstrap, "status")["cluster_id"]
            cluster.kill()
            with up_cluster(tmp_path, chooses_ports=True) as again:
                assert again.bootstrap == cluster.bootstrap
                assert tidelog_json(again.bootstrap, "status")["cluster_id"] == cluster_id
                load.grown(200)
                load.__exit__()
                assert set(acknowledged) <= set(load.delivered)
                check(again.bootstrap, load)
                assert again.stop() == 0


@pytest.mark.long
@pytest.mark.slow
def test_killed_paused_and_absent_controllers_cause_no_produce_error(tmp_path: Path) -> None:
    with serve_cluster(tmp_path) as cluster:
        tidelog(cluster.bootstrap, "topic", "create", TOPIC, "--partitions", "4")

        def another_than(killed: int) -> bool:
            return cluster.active() != killed

        with Load(cluster.bootstrap) as load:
            load.grown(200)
            for turn in range(4):
                killed = cluster.active()
                node = cluster.nodes[killed]
                if turn % 2:
                    node.signal(signal.SIGSTOP)
                else:
                    node.kill()
                eventually(partial(another_than, killed))
                tidelog(cluster.bootstrap, "topic", "create", f"made-{turn}")
                load.grown(100)
                if turn % 2:
                    node.signal(signal.SIGCONT)
                else:
                    node.start()
                    node.wait_ready()
                eventually(lambda: not cluster.controllers()["problems"])
            assert load.longest_gap_s < 20.0  # brokers need no controller to serve
            for node_id in cluster.members:
                cluster.nodes[node_id].kill()
            load.grown(500)
            problems = cluster.controllers()["problems"]
            assert any("no controller is active" in problem for problem in problems)
            for node_id in cluster.members:
                cluster.nodes[node_id].start()
            eventually(lambda: not cluster.controllers()["problems"])
            names = {row["name"] for row in tidelog_json(cluster.bootstrap, "topic", "list")}
            assert {f"made-{turn}" for turn in range(4)} <= names
        check(cluster.bootstrap, load)


def _described(cluster: ServeCluster) -> tuple[int, list[int]]:
    """Leader and voters that are with it, as another's client shows them."""
    client = KafkaAdminClient(bootstrap_servers=cluster.bootstrap, selector=ClosingSelector)
    try:
        answer = client.describe_metadata_quorum()
    finally:
        client.close()
    found = answer["topics"][0]["partitions"][0] if "topics" in answer else answer["partitions"][0]
    with_it = [
        each["replica_id"] for each in found["current_voters"] if each["log_end_offset"] >= found["high_watermark"]
    ]
    return found["leader_id"], sorted(with_it)


@pytest.mark.long
@pytest.mark.slow
def test_controllers_are_handed_over_added_and_removed_by_command(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, controllers=3, brokers=1) as cluster:
        active = cluster.active()
        target = next(node_id for node_id in cluster.members if node_id != active)
        tidelog(cluster.bootstrap, "controller", "transfer", "--to", str(target))
        assert cluster.active() == target
        eventually(lambda: _described(cluster) == (target, [1, 2, 3]))
        for newcomer in (4, 5):
            cluster.members[newcomer] = f"127.0.0.1:{free_port()}"
            member = f"{newcomer}@{cluster.members[newcomer]}"
            tidelog(cluster.bootstrap, "controller", "add", member, code=2)  # its process does not run yet
            cluster.add(newcomer).start()
            cluster.nodes[newcomer].wait_ready()
            tidelog(cluster.bootstrap, "controller", "add", member)
            tidelog(cluster.bootstrap, "controller", "add", member)  # asked twice is success
        eventually(lambda: _ids(cluster) == [1, 2, 3, 4, 5] and not cluster.controllers()["problems"])
        for gone in (1, 2, 3):  # among them the active one, and all that the broker was configured with
            tidelog(cluster.bootstrap, "controller", "remove", str(gone))
            cluster.nodes[gone].kill()
            if gone == 1:
                eventually(lambda: _ids(cluster) == [2, 3, 4, 5])
        eventually(lambda: _ids(cluster) == [4, 5])
        tidelog(cluster.bootstrap, "topic", "create", TOPIC)
        assert cluster.active() in (4, 5)
        tidelog(cluster.bootstrap, "controller", "remove", "4")
        cluster.nodes[4].kill()
        tidelog(cluster.bootstrap, "topic", "create", "alone")
        assert "no member" in tidelog(cluster.bootstrap, "controller", "remove", "4")
        tidelog(cluster.bootstrap, "controller", "remove", "5", code=2)
        stranger = subprocess.run(
            [sys.executable, "-m", "tidelog", "controller", "transfer", "--to", "77", "--bootstrap", cluster.bootstrap],
            capture_output=True,
            text=True,
            check=False,
        )
        assert stranger.returncode == 2 and "not a member" in stranger.stderr


def _ids(cluster: ServeCluster) -> list[int]:
    return [row["id"] for row in cluster.controllers()["members"]]


@pytest.mark.slow
def test_a_second_live_broker_with_the_same_id_and_a_wrong_secret_are_refused(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, controllers=1, brokers=1) as cluster:
        original = cluster.nodes[101]
        impostor = cluster.add(101)
        cluster.nodes = {**cluster.nodes, 101: original, -101: impostor}
        config = tmp_path / "node-101.toml"
        text = config.read_text().replace(str(tmp_path / "node-101"), str(tmp_path / "copy"))
        config.write_text(text.replace(f"port = {cluster.kafka_ports[101]}", "port = 0"))
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "bucket").symlink_to(tmp_path / "bucket", target_is_directory=True)
        impostor.start()
        assert impostor.process is not None
        assert impostor.process.wait(30) == 4
        assert any("belongs to a live broker" in line for line in impostor.output), impostor.output
        wrong = tmp_path / "wrong"
        wrong.write_text("not the secret of this cluster\n")
        wrong.chmod(0o600)
        config.write_text(config.read_text().replace(str(tmp_path / "secret"), str(wrong)).replace("copy", "third"))
        (tmp_path / "third").mkdir()
        (tmp_path / "third" / "bucket").symlink_to(tmp_path / "bucket", target_is_directory=True)
        impostor.output.clear()
        impostor.start()
        eventually(lambda: any("secret" in line for line in impostor.output), 120)
        assert not any(line.startswith("ready") for line in impostor.output)
        impostor.kill()


@pytest.mark.long
@pytest.mark.slow
def test_a_broker_that_died_with_all_controllers_that_knew_it_is_dead_long_before_its_session_ends(
    tmp_path: Path,
) -> None:
    with serve_cluster(tmp_path) as cluster:
        dead, alive = cluster.nodes[101], f"127.0.0.1:{cluster.kafka_ports[102]}"
        controllers = [cluster.nodes[each] for each in cluster.members]
        for node in (dead, *controllers):
            node.kill()
        for node in controllers:
            config = tmp_path / f"node-{node.node_id}.toml"
            config.write_text(config.read_text().replace("[controller]", "[controller]\nsession_timeout_ms = 300000"))
            node.start()

        def states() -> dict[int, str]:
            return {row["id"]: row["state"] for row in tidelog_json(alive, "broker", "list")}

        eventually(lambda: states() == {101: "dead", 102: "alive"}, 90)
        dead.start()
        dead.wait_ready()
        eventually(lambda: states() == {101: "alive", 102: "alive"}, 30)


@pytest.mark.slow
def test_a_copy_of_a_directory_is_refused_while_the_other_one_lives(
    tmp_path: Path,
) -> None:
    with serve_cluster(tmp_path, controllers=1, brokers=1) as cluster:
        original = cluster.nodes[101]
        being_made = shutil.ignore_patterns("*.tmp")  # renamed while they are copied
        shutil.copytree(original.directory, tmp_path / "copy", symlinks=True, ignore=being_made)
        config = tmp_path / "node-101.toml"
        port = free_port()
        text = config.read_text().replace(str(original.directory), str(tmp_path / "copy"))
        text = text.replace(f"port = {cluster.kafka_ports[101]}", f"port = {port}")
        text = text.replace("[controller]", "[controller]\nsession_timeout_ms = 1000")  # how long it waits
        copy = ServeNode(tmp_path, 102, {})
        (tmp_path / "node-102.toml").write_text(text)
        cluster.nodes[102] = copy
        copy.start()
        assert copy.process is not None and copy.process.wait(60) == 9
        assert any("over another copy of this data directory" in line for line in copy.output), copy.output
        tidelog(cluster.bootstrap, "topic", "create", TOPIC)  # the original has noticed nothing
        original.kill()
        copy.start()
        copy.wait_ready()
        tidelog(f"127.0.0.1:{port}", "topic", "list")
        config.write_text(config.read_text().replace("[controller]", "[controller]\nsession_timeout_ms = 1000"))
        original.start()
        assert original.process is not None and original.process.wait(60) == 9
        tidelog(f"127.0.0.1:{port}", "topic", "list")


@pytest.mark.long
def test_a_broker_without_an_id_gets_one_that_was_never_given_out_and_keeps_it(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, controllers=1, brokers=1) as cluster:
        (tmp_path / "node-101.toml").rename(tmp_path / "template.toml")
        text = (tmp_path / "template.toml").read_text()
        for number in (201, 202):
            node = cluster.nodes[number] = ServeNode(tmp_path, number, {})
            (node.directory / "bucket").symlink_to(tmp_path / "bucket", target_is_directory=True)
            mine = text.replace("id = 101\n", "").replace(str(tmp_path / "node-101"), str(node.directory))
            (tmp_path / f"node-{number}.toml").write_text(
                mine.replace(f"port = {cluster.kafka_ports[101]}", f"port = {free_port()}")
            )
            node.start()
            node.wait_ready()
        brokers = {row["id"]: row["state"] for row in tidelog_json(cluster.bootstrap, "broker", "list")}
        assert brokers == {101: "alive", 102: "alive", 103: "alive"}
        cluster.nodes[202].kill()
        eventually(lambda: tidelog_json(cluster.bootstrap, "broker", "list")[2]["state"] == "dead")
        tidelog(cluster.bootstrap, "broker", "remove", "103")
        cluster.nodes[201].kill()
        cluster.nodes[201].start()
        cluster.nodes[201].wait_ready()
        cluster.nodes[202].start()  # its directory has the id
        cluster.nodes[202].wait_ready()
        brokers = {row["id"]: row["state"] for row in tidelog_json(cluster.bootstrap, "broker", "list")}
        assert brokers == {101: "alive", 102: "alive", 103: "alive"}
