"""`tidelog object verify` where a broker or the bucket fails meanwhile: what was found until then is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.ports import free_port
from tests.support.scripted_admin import scripted_admin
from tidelog.cli.client import ClusterConnection
from tidelog.cli.subcommands.object import verify
from tidelog.runtime.errors import CorruptData, Unavailable

FINDING = {
    "event": "finding",
    "object": 5,
    "key": "objects/5",
    "part": "block",
    "position": 0,
    "length_bytes": 10,
    "streams": [],
    "problem": "its checksum does not match",
}
START = {"event": "start", "objects": 2, "bytes": 200}
PROGRESS = {"event": "progress", "objects": 1, "bytes": 100, "findings": 1}
DONE = {"event": "done", "objects": 2, "bytes": 200, "findings": 1}
FAILED = {"event": "error", "object": 6, "error": "the bucket answers 503", "hint": "try again"}
OTHERS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "is busy": (409, [{"error": "a verification is going on", "hint": "wait for it to end"}]),
    "is behind": (404, [{"error": "there is no object 5", "hint": None}]),
    "has no bucket": (200, [START, FAILED]),
    "ends": (200, [START]),
}
"""What the other broker answers."""


@contextlib.contextmanager
def cluster(monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]], other_url: str) -> Iterator[None]:
    """The broker that is asked answers `lines`; another one is at `other_url`."""
    row = {"roles": ["broker"], "state": "alive"}
    nodes = [{**row, "id": 1, "admin_url": ""}, {**row, "id": 2, "admin_url": other_url}]

    def answer(method: str, path: str, _body: bytes) -> tuple[int, bytes]:
        if method == "GET":
            return 200, json.dumps({"node_id": 1, "nodes": nodes}).encode()
        return 200, b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    with scripted_admin(answer) as url:
        monkeypatch.setattr(ClusterConnection, "admin_url", url)
        yield


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(verify, [*arguments, "--bootstrap", "127.0.0.1:1"])


def tells_of_the_damage(done: Result) -> None:
    assert isinstance(done.exception, CorruptData), done.exception
    assert "its checksum does not match" in done.stdout and "DAMAGED" in done.stdout


@pytest.mark.parametrize("other", OTHERS)
def test_damage_is_told_although_another_broker_does_not_verify(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    status, lines = OTHERS[other]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with scripted_admin(lambda *_: (status, body)) as url:
        with cluster(monkeypatch, [START, FINDING, DONE], url):
            tells_of_the_damage(done := invoke("5"))
            assert "broker 2" in done.stderr
        with cluster(monkeypatch, [START, DONE], url):
            done = invoke()
    assert done.exit_code == 0 and done.stdout.startswith("sound: 2 objects") and "broker 2" in done.stderr


def test_damage_is_told_although_another_broker_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(monkeypatch, [START, FINDING, DONE], f"http://127.0.0.1:{free_port()}"):
        tells_of_the_damage(invoke())


def test_damage_is_told_although_the_verification_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(monkeypatch, [START, FINDING, PROGRESS, FAILED], ""):
        tells_of_the_damage(done := invoke())
        assert "1 objects, 100 B checked" in done.stdout and "the bucket answers 503" in done.stdout
        document = json.loads(invoke("--format", "json").stdout)
    assert (document["objects"], len(document["findings"])) == (1, 1)
    assert "the bucket answers 503" in document["problem"]


def test_a_verification_that_is_cut_short_before_it_found_anything_is_to_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster(monkeypatch, [START, FAILED], ""):
        assert isinstance(invoke().exception, Unavailable)
