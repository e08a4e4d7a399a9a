"""Objects in the bucket of a running Tidelog, made and looked at by the command line."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.support.cli import Cli
from tidelog.cli.client import ClusterConnection

BY_HAND = ("--set", "compaction.enabled=false", "--set", "clean.enabled=false")
"""Flags: nothing is compacted or cleaned up but by hand."""


def upload(bootstrap: str) -> None:
    """Everything into the bucket, now."""
    request = urllib.request.Request(ClusterConnection(bootstrap).admin_url + "/upload", method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["status"] == "uploaded"


def fill(cli: Cli, topic: str, uploads: int, records: int = 200) -> bytes:
    """Many small uploads; returns everything that was produced."""
    produced = b""
    for number in range(uploads):
        lines = b"".join(b"%s %d %d\n" % (topic.encode(), number, each) for each in range(records))
        cli("produce", topic, stdin=lines)
        upload(cli.bootstrap)
        produced += lines
    return produced


def objects(cli: Cli, state: str = "committed") -> list[dict[str, Any]]:
    return [one for one in cli("object", "list", "--format", "json").json() if one["state"] == state]
