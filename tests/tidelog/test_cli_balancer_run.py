"""`tidelog balancer run` looks where the partitions are when nothing is left to move."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tidelog.cli.client import ClusterConnection
from tidelog.cli.main import cli
from tidelog.runtime.errors import Unavailable

MOVES = [
    {"topic": "t", "partition": number, "from": 1, "to": 2, "goal": "count", "why": "t-0: broker 1 has more"}
    for number in range(3)
]
PLAN = {"moves": MOVES, "total": 3, "findings": ["broker 1 has more"]}
IDLE = {"left": 0, "in_flight": 0}


def run(monkeypatch: pytest.MonkeyPatch, owners: list[int], *more: str) -> Any:
    """Run it in a cluster whose partitions are at these brokers then."""
    rows = [{"topic": "t", "partition": number, "broker": owner} for number, owner in enumerate(owners)]

    def get(_: ClusterConnection, path: str, *_more: float) -> Any:
        return IDLE if path == "/balancer" else {"partitions": rows}

    monkeypatch.setattr(ClusterConnection, "get", get)
    monkeypatch.setattr(ClusterConnection, "post", lambda _, path: json.loads(json.dumps(PLAN)))
    return CliRunner().invoke(cli, ["balancer", "run", *more])


def test_a_plan_of_which_all_was_moved_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, [2, 2, 3])  # one went on to another broker meanwhile
    assert result.exit_code == 0 and "moved 3 partitions" in result.output


def test_a_plan_that_was_dropped_is_not_told_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, [2, 1, 1])
    assert isinstance(result.exception, Unavailable) and "moved 1 partitions" in result.stdout
    assert "2 partitions stay where they were" in str(result.exception)
    result = run(monkeypatch, [2, 1, 1], "--format", "json")
    assert [move["partition"] for move in json.loads(result.stdout)["not_moved"]] == [1, 2]


def test_a_deleted_topic_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, []).exit_code == 0
