"""Commands that wait for what goes on without them outlast a broker that goes away, and an election of controllers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tidelog.cli import client
from tidelog.cli.client import ClusterConnection
from tidelog.cli.main import cli
from tidelog.runtime.errors import Unavailable

Answers = list[Any]
BROKER = {"id": 2, "state": "draining", "drain": "operator", "coming": 0, "replicas": 0, "admin_url": ""}
SET = {"id": 1, "master": None, "master_epoch": 4, "learners": [], "in_sync": [], "replicas": [{"broker": 2}]}
AWAY = Unavailable("no controller is active")
ELECTING = {"broker": 1, "alive": False, "admin_url": "", "at_stake": [], "replicas": 2, "master_epoch": 4}
LOG = {"broker": 1, "alive": False, "admin_url": "", "at_stake": [], "replicas": 1}

CASES: dict[str, tuple[list[str], Answers]] = {
    "drain": (
        ["broker", "drain", "2"],
        [
            {"brokers": [{**BROKER, "partitions": 1}]},
            {"brokers": [{**BROKER, "partitions": 1}]},
            AWAY,
            {"brokers": [{**BROKER, "partitions": 0}]},
        ],
    ),
    "elect": (["replica-set", "elect", "1"], [SET, AWAY, {**SET, "master": 2}]),
    "add a member": (["replica-set", "add-member", "1", "--broker", "2"], [SET, AWAY, {**SET, "in_sync": [2]}]),
    "remove a member": (["replica-set", "remove-member", "1", "--broker", "2"], [SET, AWAY, {**SET, "replicas": []}]),
    "balance": (
        ["balancer", "run"],
        [{"left": 1, "in_flight": 0}, AWAY, {"left": 0, "in_flight": 0}, {"partitions": []}],
    ),
    "upload": (["wal", "drain"], [{"wals": [ELECTING]}, AWAY, {"wals": [{**LOG, "committed": True}]}]),
}
"""The command, and the answers in their order; the last one is repeated."""


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], Answers], Result]:
    def run(arguments: list[str], answers: Answers) -> Result:
        left = list(answers)

        def get(_: ClusterConnection, path: str, *_more: float) -> Any:
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, Exception):
                raise found
            return found

        move = {"topic": "t", "partition": 0, "from": 1, "to": 2, "why": "t-0: more"}
        posted = {"master_epoch": 4, "moves": [move], "total": 1, "findings": []}
        monkeypatch.setattr(ClusterConnection, "get", get)
        monkeypatch.setattr(ClusterConnection, "post", lambda _, path: posted)
        return CliRunner().invoke(cli, [*arguments, "--timeout", "30", "--bootstrap", "127.0.0.1:1"])

    monkeypatch.setattr(client, "AGAIN_S", 0.01)
    return run


@pytest.mark.parametrize("case", CASES)
def test_the_wait_goes_on(invoke: Callable[[list[str], Answers], Result], case: str) -> None:
    done = invoke(*CASES[case])
    assert done.exit_code == 0, (done.output, done.exception)


def test_a_cluster_that_is_not_there_is_not_waited_for(invoke: Callable[[list[str], Answers], Result]) -> None:
    began = time.monotonic()
    assert invoke(["wal", "drain"], [AWAY]).exception is AWAY
    assert time.monotonic() - began < 10


def test_the_wait_for_a_cluster_that_is_gone_has_an_end(
    invoke: Callable[[list[str], Answers], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    began = time.monotonic()
    arguments, _ = CASES["drain"]
    done = invoke(arguments, [{"brokers": [{**BROKER, "partitions": 1}]}, AWAY])
    assert done.exception is AWAY
    assert time.monotonic() - began < 10
