"""Commands that ask every broker, where some accept connections and never answer, as processes that are stopped do."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.scripted_admin import scripted_admin
from tidelog.cli import many
from tidelog.cli.client import ClusterConnection
from tidelog.cli.main import cli
from tidelog.cli.subcommands import cost, explain, object_jobs, status
from tidelog.runtime.errors import InvalidInput, NotFound, Unavailable

SILENT = (2, 3, 4)
ASKED, ANSWERING = 1, 5
WAIT_S = 0.5
AT_ONCE_S = 1.9
"""Longer than one of them takes, and shorter than two do, with a command's own time."""
COMPACTION: dict[str, Any] = {
    **dict.fromkeys(("active", "stopped", "enabled", "unthrottled", "busy"), False),
    **dict.fromkeys(("tasks", "inputs", "outputs", "given_up", "read_bytes", "written_bytes"), 0),
    **dict.fromkeys(("running", "excluded", "plan"), ()),
    "throttle_bytes_per_s": 1,
}
NOTHING = {"bytes": 0, "objects": 0}
USAGE = {
    "bucket": "memory://",
    "seconds": 1.0,
    "produced_bytes": 0,
    "purposes": {},
    "topics": {},
    "shared": {},
    "stored": {"bytes": 0, "objects": 0, "wal_bytes": 0, "topics": {}, "shared": NOTHING, "waiting": NOTHING},
}


class SilentWorld:
    """The documents of a cluster's brokers."""

    def __init__(self) -> None:
        self.urls: dict[int, str] = {}

    def rows(self) -> list[dict[str, Any]]:
        one = {"roles": ["broker"], "state": "alive", "rack": None, "pid": 1, "address": "a:1"}
        counts = {"partitions": 1, "leaving": 0, "coming": 0, "replicas": 0}
        return [{**one, **counts, "id": broker, "admin_url": url} for broker, url in sorted(self.urls.items())]

    def answer(self, broker: int, path: str) -> tuple[int, dict[str, Any]]:
        place = path.partition("?")[0]
        if place == "/brokers":
            return 200, {"brokers": self.rows()}
        if place == "/status":
            parts = {"partitions": {"led": 7}, "upload": {"backlog_bytes": 9}, "failover": {}, "problems": []}
            return 200, {"node_id": broker, "nodes": self.rows(), "moves": {"total": 0}, "cluster_id": "c", **parts}
        if place == "/requests/slow":
            return 200, {"broker": broker, "since_ms": 1, "requests": [], "running": []}
        if place == "/bucket/usage":
            return 200, {"node_id": broker, **USAGE}
        if place == "/compaction":
            return 200, {**COMPACTION, "broker": broker}
        return 404, {"error": f"no {path}"}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentWorld]:
    world = SilentWorld()
    for module, name in (
        (status, "BROKER_TIMEOUT_S"),
        (explain, "BROKER_TIMEOUT_S"),
        (cost, "USAGE_TIMEOUT_S"),
        (object_jobs, "PLAN_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, WAIT_S)
    monkeypatch.setattr(many, "GRACE_S", 0.1)
    with contextlib.ExitStack() as stack:
        for broker in (ASKED, ANSWERING):

            def answer(_method: str, path: str, _body: bytes, broker: int = broker) -> tuple[int, bytes]:
                code, document = world.answer(broker, path)
                return code, json.dumps(document).encode()

            world.urls[broker] = stack.enter_context(scripted_admin(answer))
        for broker in SILENT:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            world.urls[broker] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(ClusterConnection, "admin_url", world.urls[ASKED])
        yield world


def invoke(*arguments: str) -> Result:
    began = time.monotonic()
    result = CliRunner().invoke(cli, [*arguments, "--bootstrap", "127.0.0.1:1"])
    assert time.monotonic() - began < AT_ONCE_S
    assert result.stdout, repr(result.exception)
    return result


def test_the_list_of_brokers_tells_who_does_not_answer(world: SilentWorld) -> None:
    rows = json.loads(invoke("broker", "list", "--format", "json").stdout)
    assert {row["id"]: row["led"] for row in rows} == {1: 7, 2: None, 3: None, 4: None, 5: 7}
    assert {row["id"] for row in rows if row["problem"] is not None} == set(SILENT)
    shown = invoke("broker", "list").stdout
    for broker in (*SILENT, ASKED, ANSWERING):
        assert (f"broker {broker} does not answer: " in shown) == (broker in SILENT)


def test_so_does_the_status(world: SilentWorld) -> None:
    result = invoke("status", "--format", "json")
    document = json.loads(result.stdout)
    assert result.exit_code == status.SOMETHING_WRONG
    assert [row["id"] for row in document["nodes"] if "upload" in row] == [ASKED, ANSWERING]
    assert [problem.partition(": ")[0] for problem in document["problems"]] == [f"broker {each}" for each in SILENT]


def test_so_do_slow_requests_and_costs_and_plans(world: SilentWorld) -> None:
    names = [f"broker {each}" for each in SILENT]
    document = json.loads(invoke("explain", "--slow", "--format", "json").stdout)
    assert list(document["since_ms"]) == [str(ASKED), str(ANSWERING)]
    assert [problem.partition(": ")[0] for problem in document["problems"]] == names
    costs = invoke("cost", "--format", "json")
    assert [each["node_id"] for each in json.loads(costs.stdout)["nodes"]] == [ASKED, ANSWERING]
    assert [line.partition(" does not")[0] for line in costs.stderr.splitlines()] == [
        f"broker {each}" for each in SILENT
    ]
    plans = invoke("object", "compact", "--dry-run", "--format", "json")
    assert [each["broker"] for each in json.loads(plans.stdout)["brokers"]] == [ASKED, ANSWERING]
    assert plans.exit_code == Unavailable.exit_code
    told = [line for line in plans.stderr.splitlines() if line.startswith("error: ")]
    assert told == [f"error: broker {each} has not answered within {WAIT_S:g} s" for each in SILENT]


def test_an_answer_in_small_pieces_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "GRACE_S", 0.0)
    held = threading.Event()
    try:
        found = many.ask_at_once({1: lambda: "a", 2: lambda: str(held.wait())}, 0.05)
    finally:
        held.set()
    assert found[1] == "a" and isinstance(found[2], Unavailable)


def test_what_no_broker_means_to_raise_is_raised() -> None:
    def fail(error: Exception) -> str:
        raise error

    found = many.ask_at_once({1: lambda: fail(NotFound("x")), 2: lambda: fail(InvalidInput("y"))})
    assert [type(each) for each in found.values()] == [NotFound, InvalidInput]
    with pytest.raises(KeyError):
        many.ask_at_once({1: lambda: fail(KeyError())})
