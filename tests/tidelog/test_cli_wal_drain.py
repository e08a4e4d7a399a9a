"""`tidelog wal drain`: how long it waits, and for which logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from tests.e2e.backends import create_topic
from tests.support.cli import Cli
from tests.support.cluster import Cluster
from tests.support.scripted_admin import scripted_admin
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.cli.subcommands.wal import drain
from tidelog.runtime.errors import NotFound, Unavailable

Document = dict[str, Any]


class AdminOfSlowUploads:
    """The admin HTTP of a broker whose upload is not done within the time of some requests."""

    def __init__(self, slow: int) -> None:
        self.url = ""
        self.slow = slow
        """How many requests end before the upload."""
        self.waits_ms: list[int] = []
        """For how long each was to wait."""
        self.committed = False

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, Document]:
        if path == "/upload":
            self.waits_ms.append(int(query["timeout_ms"][0]))
            if len(self.waits_ms) <= self.slow:
                return 504, {"error": "not uploaded within 30000 ms; the upload continues", "hint": "see /status"}
            self.committed = True
            return 200, {"status": "uploaded"}
        row = {"broker": 1, "alive": True, "admin_url": self.url, "committed": self.committed, "at_stake": []}
        return 200, {"wals": [row]}


@pytest.fixture
def admin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminOfSlowUploads]:
    world = AdminOfSlowUploads(request.param)

    def answer(_method: str, path: str, _body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(path)
        status, found = world.answer(parts.path, parse_qs(parts.query))
        return status, json.dumps(found).encode()

    with scripted_admin(answer) as world.url:
        monkeypatch.setattr(ClusterConnection, "get", lambda _cluster, path, *_: http_json(world.url, path))
        yield world


@pytest.mark.parametrize("admin", [2], indirect=True)
def test_an_upload_that_outlasts_one_request_is_waited_for(admin: AdminOfSlowUploads) -> None:
    done = CliRunner().invoke(drain, ["--timeout", "300", "--bootstrap", "127.0.0.1:1"])
    assert done.exception is None, done.exception
    assert "everything in the logs of 1 broker is committed" in done.output
    assert admin.waits_ms == [30_000] * 3


@pytest.mark.parametrize("admin", [1 << 30], indirect=True)
def test_the_end_of_the_time_is_told_with_the_brokers_that_are_left(admin: AdminOfSlowUploads) -> None:
    done = CliRunner().invoke(drain, ["--timeout", "1", "--bootstrap", "127.0.0.1:1"])
    assert isinstance(done.exception, Unavailable)
    assert "the logs of brokers [1] were not committed within 1 s" in str(done.exception)
    assert len(admin.waits_ms) > 1


@pytest.mark.parametrize("admin", [0, 1 << 30], indirect=True)
def test_what_the_controllers_knew_of_a_broker_that_lives_is_not_believed_before_it_has_uploaded(
    admin: AdminOfSlowUploads,
) -> None:
    admin.committed = True
    done = CliRunner().invoke(drain, ["--timeout", "1", "--bootstrap", "127.0.0.1:1"])
    assert admin.waits_ms
    assert isinstance(done.exception, Unavailable) == bool(admin.slow), done.exception


@pytest.mark.parametrize("admin", [0], indirect=True)
def test_without_a_log_that_anything_is_known_of_nothing_is_said_to_be_committed(
    admin: AdminOfSlowUploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterConnection, "get", lambda _cluster, *_: {"wals": []})
    assert isinstance(CliRunner().invoke(drain, ["--bootstrap", "127.0.0.1:1"]).exception, NotFound)
    assert admin.waits_ms == []


@pytest.mark.processes
def test_records_that_the_controllers_have_not_heard_of_are_waited_for(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=1, age_ms=600_000) as cluster:
        cli = Cli(cluster.bootstrap)
        create_topic(cluster.bootstrap, "t", 1)
        cli("produce", "t", stdin=b"one\n")
        assert "of 1 broker is committed" in cli("wal", "drain").text
        cluster.run(cluster.controller.close())
        cli("produce", "t", stdin=b"two\n")
        assert not cluster.storage(1).is_all_committed
        assert "not committed within 3 s" in cli("wal", "drain", "--timeout", 3, code=5).err
