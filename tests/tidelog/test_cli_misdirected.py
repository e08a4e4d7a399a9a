"""Commands and the console ask a broker by its address, where another one answers: both tell loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from pyspark_tidelog.cluster import Cluster as SparkCluster
from pyspark_tidelog.options import ReadOptions
from tests.support.cluster import Cluster
from tidelog.broker import parts
from tidelog.broker.settings import AdminSettings
from tidelog.chaos.ports import free_port
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.cli.examine import DoctorTarget, gather_facts
from tidelog.cli.main import cli
from tidelog.cli.subcommands.status import gather
from tidelog.console.link import ClusterLink
from tidelog.console.passed_on import PassedOn
from tidelog.controller import node as controller_node
from tidelog.doctor.judge import judge
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.task_errors import TaskErrors

ANSWERS = "broker 1 answers at 127.0.0.1"


@pytest.fixture(scope="module")
def misled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Broker 2 tells the address of its own loopback, which is broker 1's here."""
    port = free_port()
    admins = {
        1: AdminSettings(port=port),
        2: AdminSettings(host="127.0.0.2", port=port, advertised_host="127.0.0.1"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for module in (parts, controller_node):
            patch.setattr(module, "ERRORS", TaskErrors())  # those of other tests in this process
        with Cluster(tmp_path_factory.mktemp("misled"), brokers=2, admins=admins) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def astray(misled: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Another cluster, whose broker 1 tells the address of its own loopback: that is the broker 1 of `misled` here.

    As from a machine that has a cluster of its own, of one whose brokers listen on loopback for administrators.
    """
    port = misled.nodes[1].parts.servers.admin.url.rpartition(":")[2]
    admins = {1: AdminSettings(host="127.0.0.3", port=int(port), advertised_host="127.0.0.1")}
    with Cluster(tmp_path_factory.mktemp("astray"), brokers=1, admins=admins) as cluster:
        assert cluster.nodes[1].parts.servers.admin.url == misled.nodes[1].parts.servers.admin.url
        yield cluster


def told(cluster: Cluster, *arguments: str) -> tuple[Any, str]:
    """Return the document of a command that begins with broker 1, and what it says on standard error."""
    bootstrap = f"127.0.0.1:{cluster.nodes[1].bootstrap[1]}"
    result = CliRunner().invoke(cli, [*arguments, "--format", "json", "--bootstrap", bootstrap])
    return json.loads(result.stdout), result.stderr


def test_the_status_of_a_broker_is_not_that_of_the_one_that_answers(misled: Cluster) -> None:
    document, _ = told(misled, "status")
    one, other = [each for each in document["nodes"] if "broker" in each["roles"]]
    assert "wal" in one and "wal" not in other
    assert [each for each in document["problems"] if each.startswith(f"broker 2: {ANSWERS}")]


@pytest.mark.parametrize("answer", [[], {}, {"node_id": 1}], ids=["program", "document", "older broker"])
def test_nor_is_what_an_older_broker_or_another_program_answers(misled: Cluster, answer: Any) -> None:
    asked, _ = told(misled, "status")
    asked["failover"] = {}
    document = gather(asked, lambda _url, _broker: answer)
    assert [each for each in document["problems"] if each.endswith("is another broker or program")]


def test_its_bucket_requests_are_not_paid_for_twice(misled: Cluster) -> None:
    document, warned = told(misled, "cost")
    assert [each["node_id"] for each in document["nodes"]] == [1]
    assert ANSWERS in warned


def test_its_slow_requests_are_not_told_twice(misled: Cluster) -> None:
    document, _ = told(misled, "explain", "--slow")
    assert list(document["since_ms"]) == ["1"]
    assert ANSWERS in document["problems"][0]


def test_a_broker_that_fails_does_not_keep_what_others_tell(misled: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_cluster: ClusterConnection, url: str, path: str, *, timeout_s: float, broker: int | None = None) -> Any:
        if broker == 2:
            raise TidelogError("returned 500 Internal Server Error")
        return http_json(url, path, broker=broker, timeout_s=timeout_s)

    monkeypatch.setattr(ClusterConnection, "ask", fails)
    document, _ = told(misled, "explain", "--slow")
    assert list(document["since_ms"]) == ["1"]
    assert document["problems"] == ["broker 2: returned 500 Internal Server Error"]


def test_its_backlog_is_not_that_of_another(misled: Cluster) -> None:
    rows, _ = told(misled, "broker", "list")
    assert [each["upload_bytes"] is None for each in rows] == [False, True]


def test_nobody_uploads_in_its_place(misled: Cluster) -> None:
    bootstrap = f"127.0.0.1:{misled.nodes[1].bootstrap[1]}"
    done = CliRunner().invoke(cli, ["wal", "drain", "--broker", "2", "--timeout", "5", "--bootstrap", bootstrap])
    assert isinstance(done.exception, Unavailable), done.output
    assert str(done.exception).startswith(ANSWERS)


async def test_the_console_shows_an_error_for_it_and_not_the_figures_of_another(misled: Cluster) -> None:
    url = misled.nodes[1].parts.servers.admin.url
    link = ClusterLink(lambda: url, time.monotonic)
    try:
        found = await link.read_all(PassedOn("/status", []))
        assert list(found["answers"]) == ["1"] and ANSWERS in found["errors"]["2"]
        with pytest.raises(Unavailable, match=ANSWERS):
            await link.read(PassedOn("/status", []), broker=2)
    finally:
        await link.close()


def test_the_doctor_tells_of_the_address_and_does_not_take_one_node_for_two(misled: Cluster) -> None:
    bootstrap = f"127.0.0.1:{misled.nodes[1].bootstrap[1]}"
    facts = gather_facts(DoctorTarget(None, (), None, bootstrap, False)).facts
    assert {each.where for each in facts.nodes} == {"broker 1", "controller 0"}
    silent = [each for each in judge(facts) if each.check == "node.silent"]
    assert [(each.where, ANSWERS in each.seen) for each in silent] == [("broker 2", True)]


COMMANDS = (
    "status",
    "broker list",
    "broker drain 2 --no-wait",
    "wal drain --timeout 1",
    "replica-set list",
    "controller transfer",
    "cluster restart --rolling",
    "object compact",
    "explain --slow",
    "cost",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_broker_of_another_cluster_answers_or_obeys(
    misled: Cluster, astray: Cluster, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.cli.client.PATIENCE_S", 0.1)
    bootstrap = f"127.0.0.1:{astray.nodes[1].bootstrap[1]}"
    done = CliRunner().invoke(cli, [*command.split(), "--bootstrap", bootstrap])
    assert isinstance(done.exception, Unavailable), done.output
    assert f"a broker of cluster {misled.image.cluster_id} answers at" in str(done.exception)
    assert not any(each.draining for each in misled.image.brokers.values())


def test_the_status_of_a_broker_is_not_that_of_its_namesake_in_another_cluster(astray: Cluster) -> None:
    asked = http_json(astray.nodes[1].parts.servers.admin.url.replace("127.0.0.1", "127.0.0.3"), "/status")
    other = {**asked["nodes"][-1], "id": 2}
    document = gather({**asked, "nodes": [other]}, lambda _url, _broker: {**asked, "node_id": 2, "cluster_id": "B"})
    assert document["problems"][-1].endswith("is a broker of cluster B")


def test_nor_does_one_tell_spark_where_its_own_records_are(misled: Cluster, astray: Cluster) -> None:
    read = SparkCluster(ReadOptions(f"127.0.0.1:{astray.nodes[1].bootstrap[1]}", ("t",)))
    with pytest.raises(Unavailable, match=f"a broker of cluster {misled.image.cluster_id} answers at"):
        read.lookups().take_lease("me", 60.0)
    assert not misled.image.leases
