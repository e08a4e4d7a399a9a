"""The shell is offered the names of what a cluster has, and is never kept waiting for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from click.shell_completion import ShellComplete
from confluent_kafka import Producer

from tests.support.cluster_process import eventually
from tidelog.cli.client import ANSWER_TIMEOUT_S, ClusterConnection
from tidelog.cli.main import cli
from tidelog.cli.options import BOOTSTRAP_ENV
from tidelog.testing import LocalBroker

pytestmark = pytest.mark.processes
WAIT_S = 60


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with LocalBroker(settings={"upload.age_ms": 50}) as broker:
        broker.create_topic("orders", partitions=11)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("orders", b"value")
        assert producer.flush(WAIT_S) == 0
        ClusterConnection(broker.bootstrap).post("/snapshots?name=before&topic=orders")
        yield broker.bootstrap


def offered(bootstrap: str, *words: str) -> list[str]:
    """What is offered for the last of the words."""
    *before, incomplete = words
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BOOTSTRAP_ENV, bootstrap)
        shell = ShellComplete(cli, {}, "tidelog", "_TIDELOG_COMPLETE")
        return [each.value for each in shell.get_completions(before, incomplete)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("broker", "drain", ""), ["1"]),
        (("replica-set", "describe", ""), ["1"]),
        (("replica-set", "elect", "1", "--broker", ""), ["1"]),
        (("controller", "transfer", "--to", ""), ["1"]),
        (("partition", "move", "orders:1"), ["orders:1", "orders:10"]),
        (("partition", "move", "--from", ""), ["1"]),
        (("group", "reset-offsets", "readers", "--topic", "orders", "--partition", "1"), ["1", "10"]),
        (("topic", "alter", "orders", "--config", "retention."), ["retention.bytes=", "retention.ms="]),
        (("topic", "alter", "orders", "--delete-config", "retention.m"), ["retention.ms"]),
        (("cluster", "restart", "--brokers", ""), ["1"]),
        (("cluster", "restart", "--brokers", "1,"), []),
        (("lease", "end", ""), []),
        (("snapshot", "describe", "b"), ["before"]),
        (("topic", "branch", "ord"), ["orders@before"]),
        (("object", "quarantine", ""), ["list", "records", "release"]),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, tuple) else None,
)
def test_names_are_those_of_the_cluster(bootstrap: str, words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(bootstrap, *words) == expected


def test_objects_and_settings_of_controllers(bootstrap: str) -> None:
    found = eventually(lambda: offered(bootstrap, "object", "inspect", ""), WAIT_S)
    assert all(each.isdecimal() for each in found)
    settings = offered(bootstrap, "controller", "config", "set", "balancer.")
    assert settings and all(each.startswith("balancer.") for each in settings)


def test_settings_of_a_process_need_no_cluster() -> None:
    shell = ShellComplete(cli, {}, "tidelog", "_TIDELOG_COMPLETE")
    found = [each.value for each in shell.get_completions(["serve", "--set"], "wal.f")]
    assert "wal.flush=" in found and all(each.startswith("wal.f") and each.endswith("=") for each in found)


@pytest.mark.parametrize(
    "words", [("topic", "describe", ""), ("group", "describe", ""), ("broker", "drain", "")], ids=lambda words: words[0]
)
def test_a_server_that_does_not_answer_is_not_waited_for(words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        assert offered(f"127.0.0.1:{mute.getsockname()[1]}", *words) == []
        assert time.monotonic() - began < ANSWER_TIMEOUT_S
