"""`tidelog cluster restart --rolling` where replica sets have one member: partitions move away, and come back."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from tests.support.scripted_admin import scripted_admin
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.cli.subcommands import cluster_restart
from tidelog.cli.subcommands.cluster_restart import restart

Document = dict[str, Any]


class AdminOfOne:
    """The admin HTTP of a cluster of one-member sets. When broker 1 restarts, one of its topics is deleted."""

    def __init__(self) -> None:
        self.url = ""
        self.silent_url = ""
        """Of broker 0, which is alive and never answers; empty: there is none."""
        self.epoch = 1
        self.topics = {"kept": 1, "deleted": 1}
        """The broker of partition 0 of each."""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Document]:
        if path == "/moves":
            for move in body["moves"]:
                if move["topic"] in self.topics:
                    self.topics[move["topic"]] = move["to"]
            return 200, {"results": []}
        if path == "/partitions":
            if not self.topics.keys() >= set(query["topic"]):
                return 404, {"error": "a topic does not exist"}
            return 200, {"partitions": [{"topic": name, "partition": 0} for name in query["topic"]]}
        if path == "/restart" and method == "POST":
            self.epoch += 1
            self.topics = {"kept": 2}
        elif path == "/restart" and "owner" in query:
            return 200, {"owned": [{"topic": name, "partition": 0} for name, at in self.topics.items() if at == 1]}
        return 200, self.look()

    def look(self) -> Document:
        row = {"id": 1, "alive": True, "drain": "none", "registration_epoch": self.epoch, "admin_url": self.url}
        home = {"id": 1, "master": 1, "electing": False, "members": [1], "in_sync": [1], "master_epoch": 1}
        count = sum(at == 1 for at in self.topics.values())
        others = [{**row, "id": 0, "admin_url": self.silent_url}] if self.silent_url else []
        return {
            "brokers": [{**each, "partitions": count, "hindrances": []} for each in (*others, row)],
            "replica_sets": [{**home, "elects": False, "partitions": count}],
            "controllers": [],
        }


@pytest.fixture
def admin() -> Iterator[AdminOfOne]:
    world = AdminOfOne()

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(path)
        status, found = world.answer(method, parts.path, parse_qs(parts.query), json.loads(body or b"null"))
        return status, json.dumps(found).encode()

    with scripted_admin(answer) as world.url:
        yield world


def test_a_topic_that_was_deleted_meanwhile_is_not_waited_for(
    admin: AdminOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterConnection, "get", lambda _cluster, path: http_json(admin.url, path))
    done = CliRunner().invoke(restart, ["--rolling", "--timeout", "3", "--bootstrap", "127.0.0.1:1"])
    assert done.exception is None, done.output
    assert done.exit_code == 0, done.output
    assert admin.topics == {"kept": 1}


def test_a_broker_that_never_answers_is_asked_last_then(admin: AdminOfOne, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_restart, "LOOK_TIMEOUT_S", 1.0)
    monkeypatch.setattr(ClusterConnection, "get", lambda _cluster, path: http_json(admin.url, path))
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin.silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        wanted = ["--rolling", "--brokers", "1", "--timeout", "3", "--bootstrap", "127.0.0.1:1"]
        done = CliRunner().invoke(restart, wanted)
    assert done.exit_code == 0, done.output
    assert time.monotonic() - began < 10, "once, and not for each of many looks"
