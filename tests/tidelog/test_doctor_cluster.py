"""`tidelog doctor` and the bundle over brokers in this process: all parts real, over TCP."""

from __future__ import annotations

import contextlib
import json
import socket
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tidelog.broker import parts
from tidelog.broker.settings import ReplicationSettings
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.cli.examine import AdminAsk, DoctorTarget, gather_facts
from tidelog.controller import node as controller_node
from tidelog.controller.checkup import Checkup
from tidelog.doctor.facts import Facts
from tidelog.doctor.findings import DoctorFinding
from tidelog.doctor.judge import judge
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.task_errors import TaskErrors

NO_FILE = DoctorTarget(None, (), None, None, False)


def facts_of(bootstrap: str) -> Facts:
    return gather_facts(NO_FILE._replace(bootstrap=bootstrap)).facts


def found(facts: Facts) -> list[DoctorFinding]:
    """What is not well of the cluster; what depends on the machine that runs the tests is left out."""
    machine = ("config.", "disk.", "limits.", "data.", "port.")
    return [each for each in judge(facts) if each.level != "ok" and not each.check.startswith(machine)]


def names(facts: Facts) -> set[str]:
    return {each.check for each in found(facts)}


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration, no directory that could be meant, and no errors of other tests in this process."""
    for module in (parts, controller_node):
        monkeypatch.setattr(module, "ERRORS", TaskErrors())
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


class Ahead(SystemClock):
    """A clock that is two minutes ahead."""

    def time_ms(self) -> int:
        return super().time_ms() + 120_000


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def test_a_cluster_that_is_well_says_so_of_every_node_disk_bucket_and_address(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=2) as cluster:
        facts = facts_of(cluster.bootstrap)
        assert found(facts) == []
        well = {each.check for each in judge(facts) if each.level == "ok"}
        assert {"health.status", "clock.together", "reach.addresses", "members.versions", "members.level"} <= well
        assert "bucket.rights" in well
        reports = [each.report for each in facts.nodes]
        tried = [len(each.addresses) for each in reports if each is not None]
        assert tried == [3, 3, 6]  # kafka, admin and peer of each other broker; the controller tries both
        keys = cluster.bucket.keys()
        assert [key for key in keys if key.startswith("probe/doctor-")] == []


def test_one_broker_alone_is_looked_at_as_well(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=1) as cluster:
        facts = facts_of(cluster.bootstrap)
        assert found(facts) == []
        assert [each.where for each in facts.nodes] == ["broker 1", "controller 0"]


def test_a_dead_broker_a_wrong_address_and_a_clock_are_told_apart(tmp_path: Path) -> None:
    with deaf_port() as port, Cluster(tmp_path, brokers=3, advertised_ports={2: port}, clocks={1: Ahead()}) as cluster:
        cluster.run(cluster.stop_broker(3))
        wait_until(lambda: not cluster.image.brokers[3].alive, "broker 3 is dead")
        own = f"127.0.0.1:{cluster.nodes[1].bootstrap[1]}"
        facts = facts_of(own)
        by_name = {each.check: each for each in found(facts)}
        assert "broker 3" in by_name["health.problem"].seen and "start it again" in by_name["health.problem"].cure
        assert by_name["reach.silent"].where == "broker 2"
        assert "broker 1, controller 0: the kafka address" in by_name["reach.silent"].seen
        assert "broker 1" in by_name["clock.far-apart"].seen
        assert set(by_name) == {"health.problem", "reach.silent", "clock.far-apart"}


def test_a_bucket_that_fails_is_found_by_each_broker(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=2) as cluster:
        cluster.bucket.failing = True
        denied = [each for each in found(facts_of(cluster.bootstrap)) if each.check == "bucket.unreachable"]
        assert {each.where for each in denied} == {"broker 1", "broker 2"}
        assert all("503 on purpose" in each.seen for each in denied)


def test_without_the_token_nodes_try_nothing_and_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(tmp_path, brokers=1, replication=ReplicationSettings()) as cluster:
        url = ClusterConnection(cluster.bootstrap).admin_url
        for path in ("/checkup", "/stacks"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(url + path, method="POST"), timeout=30)
            assert refused.value.code == 401
            refused.value.close()
        facts = facts_of(cluster.bootstrap)
        assert names(facts) == {"cluster.no-token"}
        secret = tmp_path / "secret"
        secret.write_bytes(b"s" * 32)
        secret.chmod(0o600)
        monkeypatch.setenv("TIDELOG_CONTROLLER__SECRET_FILE", str(secret))
        assert names(facts_of(cluster.bootstrap)) == set()


def test_no_address_can_be_named_and_no_controller_but_those_of_the_quorum(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=1) as cluster, deaf_port() as port:
        url = ClusterConnection(cluster.bootstrap).admin_url
        report = http_json(url, f"/checkup?address=127.0.0.1:{port}&host=127.0.0.1", method="POST")
        assert report["addresses"] == []
        with pytest.raises(Exception, match="7 is no controller"):
            http_json(url, "/checkup?controller=7", method="POST")
        with pytest.raises(Exception, match="controller is 'x'"):
            http_json(url, "/node?controller=x")


def test_a_controller_answers_by_way_of_a_broker(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=1) as cluster:
        url = ClusterConnection(cluster.bootstrap).admin_url
        assert http_json(url, "/node?controller=0")["roles"] == ["controller"]
        report = http_json(url, "/checkup?controller=0", method="POST")
        assert [(each["kind"], each["outcome"]) for each in report["addresses"]] == [
            ("kafka", "ok"),
            ("admin", "ok"),
            ("peer", "ok"),
        ]
        stacks = http_json(url, "/stacks?controller=0", method="POST")
        assert any(each["name"].startswith("controller.") for each in stacks["tasks"])


def test_who_asks_while_a_checkup_runs_gets_the_same_one(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=1) as cluster:
        url = ClusterConnection(cluster.bootstrap).admin_url
        before = sum(each["count"] for each in _puts(cluster))
        reports: list[Any] = []

        def ask() -> None:
            reports.append(http_json(url, "/checkup", method="POST"))

        askers = [threading.Thread(target=ask) for _ in range(8)]
        for each in askers:
            each.start()
        for each in askers:
            each.join(60)
        assert len(reports) == 8 and all(each == reports[0] for each in reports)
        assert sum(each["count"] for each in _puts(cluster)) - before <= 4, (
            "two puts of one checkup, and the node's own"
        )


def _puts(cluster: Cluster) -> list[Any]:
    snapshot = cluster.bucket.stats.snapshot()
    return [snapshot["put"]] if "put" in snapshot else []


def test_a_broker_of_a_version_without_checkups_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, brokers=1) as cluster:
        real = AdminAsk.get

        def older(self: AdminAsk, url: str, path: str, broker: int | None = None) -> Any:
            return real(self, url, "/no-such-page" if path in ("/node", "/clock") else path, broker)

        monkeypatch.setattr(AdminAsk, "get", older)
        # The controller, whose release a try of its address tells, is not of that version.
        assert names(facts_of(cluster.bootstrap)) == {"node.older", "members.versions"}


def test_a_checkup_that_fails_is_told_and_the_rest_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(tmp_path, brokers=2) as cluster:
        real = Checkup.run

        async def broken(self: Checkup) -> Any:
            if self.clock()["node"] == 2:
                raise RuntimeError("a defect")
            return await real(self)

        monkeypatch.setattr(Checkup, "run", broken)
        facts = facts_of(cluster.bootstrap)
        assert names(facts) == {"node.not-examined"}
        assert {each.where for each in judge(facts) if each.check == "bucket.rights"} == {"broker 1"}


def test_something_else_at_the_address_is_no_cluster() -> None:
    with deaf_port() as port:
        facts = facts_of(f"127.0.0.1:{port}")
    assert facts.cluster is not None and "does not respond as a broker" in facts.cluster.error
    assert "cluster.unreachable" in names(facts)


def test_a_bundle_of_a_cluster_with_a_dead_broker_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from tidelog.cli.main import cli

    with Cluster(tmp_path / "cluster", brokers=2) as cluster:
        cluster.run(cluster.stop_broker(2))
        wait_until(lambda: not cluster.image.brokers[2].alive, "broker 2 is dead")
        file = tmp_path / "b.tar.gz"
        arguments = ["debug", "bundle", "-o", str(file), "--bootstrap", cluster.bootstrap]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        again = CliRunner().invoke(cli, arguments)
        assert "exists" in str(again.exception)
    with tarfile.open(file) as archive:
        files = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive.getmembers()}
        content = {name: opened.read().decode() for name, opened in files.items() if opened is not None}
    assert file.stat().st_mode & 0o777 == 0o600
    manifest = json.loads(content["manifest.json"])
    assert manifest["missing"] == {"nodes/2": "broker 2 is dead"}
    assert {each["name"] for each in manifest["entries"]} == set(content) - {"manifest.json"}
    for name in ("status", "node", "checkup", "stacks", "moves"):
        folder = "" if name == "status" else "nodes/broker-1/"
        assert json.loads(content[f"{folder}{name}.json"])
    assert "tidelog_" in content["nodes/broker-1/metrics.txt"]
    assert json.loads(content["cluster/brokers.json"])["brokers"]
    assert "health.problem" in content["doctor.txt"]
    told = json.loads(content["nodes/broker-1/stacks.json"])["tasks"]
    assert len(told) > 10
