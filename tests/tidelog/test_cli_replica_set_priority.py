"""`tidelog replica-set set-priority`, where the member is removed while its priority is set."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.support.scripted_admin import scripted_admin
from tidelog.cli.client import ClusterConnection
from tidelog.cli.subcommands.replica_set import set_priority
from tidelog.runtime.errors import NotFound


@pytest.mark.parametrize("style", ["table", "json"])
def test_a_member_that_has_gone_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch, style: str) -> None:
    posts: list[str] = []

    def answer(method: str, path: str, _body: bytes) -> tuple[int, bytes]:
        if method == "POST":
            posts.append(path)
            return 200, b"{}"
        return 200, json.dumps({"id": 1, "replicas": [{"broker": 1, "priority": 0}]}).encode()

    with scripted_admin(answer) as url:
        monkeypatch.setattr(ClusterConnection, "admin_url", url)
        wanted = ["1", "--broker", "2", "--priority", "5", "--format", style, "--bootstrap", "127.0.0.1:1"]
        done = CliRunner().invoke(set_priority, wanted)
    assert posts == ["/replica-sets/priority?id=1&broker=2&priority=5"]
    assert isinstance(done.exception, NotFound), done.exception
    assert "broker 2 keeps no replica of replica set 1 any more" in str(done.exception)
