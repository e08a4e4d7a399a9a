"""Commands of this version that an older broker answers, which does not tell all that they show."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.scripted_admin import scripted_admin
from tidelog.cli.client import ClusterConnection
from tidelog.cli.main import cli

ROW = {"id": 2, "admin_url": "", "state": "drained", "drain": "drained", "partitions": 0, "coming": 0}
PLAN = {"active": False, "stopped": "", "enabled": True, "tasks": 0, "inputs": 0, "outputs": 0, "given_up": 0}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def run(*args: str) -> Result:
        def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            node = {"id": 2, "state": "alive", "roles": ["broker"], "admin_url": url}
            told: dict[str, Any] = {
                "/brokers": {"brokers": [{**ROW, "admin_url": url}], "moves": []},
                "/compaction": PLAN,
                "/status": {"node_id": 2, "nodes": [node]},
            }
            return 200, json.dumps(told.get(path.partition("?")[0], {})).encode()

        with scripted_admin(answer) as url:
            monkeypatch.setattr(ClusterConnection, "admin_url", url)
            return CliRunner().invoke(cli, [*args, "--bootstrap", "127.0.0.1:1"])

    return run


def test_a_broker_without_replicas_of_other_sets_is_drained(ask: Callable[..., Result]) -> None:
    done = ask("broker", "drain", "2")
    assert (done.exit_code, done.stdout) == (0, "broker 2 is drained\n"), done


def test_what_an_older_broker_does_not_tell_is_named(ask: Callable[..., Result]) -> None:
    done = ask("object", "compact", "--dry-run")
    assert "the broker tells nothing of 'throttle_bytes_per_s'" in str(done.exception), done
