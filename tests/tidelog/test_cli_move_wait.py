"""`tidelog partition move` waits on while brokers go away, come back, and get other addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.ports import free_port
from tests.support.scripted_admin import scripted_admin
from tidelog.cli import client
from tidelog.cli.client import ClusterConnection
from tidelog.cli.main import cli
from tidelog.runtime.errors import Unavailable

OPENED = {"topic": "t", "partition": 0, "leader_epoch": 6, "open_ms": 1.0}
FIGURES = {"phase": "done", "drained_bytes": 1, "stall_ms": 1.0, "attempts": 1}
LEFT = {"topic": "t", "partition": 0, "leader_epoch": 5, **FIGURES}


class MovingCluster:
    """One process that answers as brokers 1 and 2, of which broker 2 gets `t:0`."""

    def __init__(self) -> None:
        self.url = ""
        self.old_url = ""
        """Where broker 2 was until its address is asked for the second time; empty: always here."""
        self.fails = 0
        """How many requests for the placement are answered with 503 after the move was accepted."""
        self.is_accepted = False
        self.looks = 0

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        place = path.partition("?")[0]
        if place == "/status":
            self.looks += 1
            second = self.old_url if self.old_url and self.looks == 1 else self.url
            nodes = [{"id": 1, "state": "alive", "admin_url": self.url}]
            return 200, {"nodes": [*nodes, {"id": 2, "state": "alive", "admin_url": second}]}
        if place == "/partitions" and self.is_accepted and self.fails:
            self.fails -= 1
            return 503, {"error": "no controller is active", "hint": None}
        if place == "/partitions":
            broker = 2 if self.is_accepted else 1
            row = {"topic": "t", "partition": 0, "broker": broker, "leader": broker, "leader_epoch": 4 + broker}
            return 200, {"partitions": [{**row, "to": None}]}
        if method == "POST":
            self.is_accepted = True
            return 200, {"results": [{**one, "error": None} for one in json.loads(body)["moves"]]}
        return 200, {"moves": [LEFT], "opened": [OPENED], "estimate": None}


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Iterator[MovingCluster]:
    world = MovingCluster()

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        status, found = world.answer(method, path, body)
        return status, json.dumps(found).encode()

    with scripted_admin(answer) as world.url:
        monkeypatch.setattr(ClusterConnection, "admin_url", world.url)
        yield world


def move(seconds: float) -> Result:
    wanted = ["t:0", "--to", "2", "--timeout", str(seconds), "--format", "json", "--bootstrap", "127.0.0.1:1"]
    return CliRunner().invoke(cli, ["partition", "move", *wanted])


def test_a_broker_that_has_got_another_address_is_found_there(moving: MovingCluster) -> None:
    moving.old_url = f"http://127.0.0.1:{free_port()}"
    done = move(5)
    assert done.exit_code == 0, done.output
    assert [(row["to"], row["attempts"]) for row in json.loads(done.stdout)] == [(2, 1)]


def test_the_wait_outlasts_a_broker_that_cannot_answer(moving: MovingCluster) -> None:
    moving.fails = 2
    done = move(30)
    assert done.exit_code == 0, done.output
    assert moving.fails == 0


def test_a_cluster_that_never_answers_is_not_waited_for(moving: MovingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.0)
    moving.fails = 1 << 30
    done = move(30)
    assert done.exit_code == Unavailable.exit_code and "no controller is active" in done.stderr
    assert json.loads(done.stdout) == [{"topic": "t", "partition": 0, "from": 1, "to": 2}], "what was begun is told"
