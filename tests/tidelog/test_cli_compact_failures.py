"""`tidelog object compact` where brokers fail on the way: what they had done counts, and each failure is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.scripted_admin import scripted_admin
from tidelog.cli.client import ClusterConnection
from tidelog.cli.main import cli
from tidelog.runtime.errors import Unavailable

PROGRESS = {"event": "progress", "read_bytes": 20, "written_bytes": 10}
TASK = {"event": "task", "inputs": 3, "outputs": 1}
DONE = {"event": "done", "read_bytes": 20, "written_bytes": 10}


@contextlib.contextmanager
def cluster(monkeypatch: pytest.MonkeyPatch, ends: list[dict[str, Any]]) -> Iterator[None]:
    """A broker for each of `ends`, which is the last line that it answers after one task."""
    urls: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        for broker, end in enumerate(ends, 1):

            def answer(
                method: str, path: str, _body: bytes, broker: int = broker, end: dict[str, Any] = end
            ) -> tuple[int, bytes]:
                if method == "POST":
                    return 200, b"".join(json.dumps(line).encode() + b"\n" for line in (PROGRESS, TASK, end))
                if path == "/status":
                    row = {"roles": ["broker"], "state": "alive"}
                    nodes = [{**row, "id": each, "admin_url": url} for each, url in urls.items()]
                    return 200, json.dumps({"node_id": broker, "nodes": nodes}).encode()
                return 200, json.dumps({"plan": [{}], "active": True}).encode()

            urls[broker] = stack.enter_context(scripted_admin(answer))
        monkeypatch.setattr(ClusterConnection, "admin_url", urls[1])
        yield


def failed(broker: int) -> dict[str, Any]:
    return {"event": "error", "error": f"broker {broker} has no bucket", "hint": None}


@pytest.mark.parametrize("ends", [[failed(1), DONE, failed(3)], [failed(1), failed(2)]], ids=["some", "all"])
def test_what_was_done_before_a_failure_counts_and_all_failures_are_told(
    monkeypatch: pytest.MonkeyPatch, ends: list[dict[str, Any]]
) -> None:
    with cluster(monkeypatch, ends):
        done = CliRunner().invoke(cli, ["object", "compact", "--format", "json", "--bootstrap", "127.0.0.1:1"])
    assert done.exit_code == Unavailable.exit_code, done.exception
    document = json.loads(done.stdout)
    assert (document["tasks"], document["inputs"], document["written_bytes"]) == (
        len(ends),
        3 * len(ends),
        10 * len(ends),
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told == [f"error: {end['error']}" for end in ends if "error" in end]
