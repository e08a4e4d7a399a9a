"""`tidelog wal verify` over the directory of a cluster: the layout and every node, by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tidelog.cli.options import load_config
from tidelog.process import cluster_layout
from tidelog.process.data_check import DataReport, check_all, nothing_there
from tidelog.process.data_dir import IDENTITY_FILE, DataDirectory
from tidelog.runtime.errors import NotFound


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Three nodes; the third was never started."""
    cluster_layout.plan(load_config(None, (), node__data_dir=str(tmp_path)), 3)
    for number in (1, 2):
        DataDirectory.open(tmp_path / f"node-{number}", number, "code").close()
    return tmp_path


def check(directory: Path) -> list[DataReport]:
    return asyncio.run(check_all(load_config(None, (), node__data_dir=str(directory)).config, ""))


def errors(reports: list[DataReport]) -> list[str]:
    return [one.file for report in reports for one in report.findings if one.is_error]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_all_nodes_are_checked_and_one_that_is_not_there_is_a_note(cluster: Path) -> None:
    reports = check(cluster)
    assert [one.node for one in reports] == ["", "node-1", "node-2", "node-3"]
    assert [one.identity and one.identity["broker_id"] for one in reports] == [None, 1, 2, None]
    assert errors(reports) == []
    assert [one.file for report in reports for one in report.findings] == ["node-3"]


def test_damage_of_a_node_and_of_the_layout_is_named(cluster: Path) -> None:
    flip(cluster / "node-2" / IDENTITY_FILE)
    assert errors(check(cluster)) == ["node-2/identity.json"]
    flip(cluster / cluster_layout.LAYOUT_FILE)
    assert errors(check(cluster)) == ["cluster.json", "node-2/identity.json"]


@pytest.mark.processes
def test_the_command_says_so(cluster: Path) -> None:
    assert "node-1: identity of broker 1" in Cli()("wal", "verify", "--data-dir", str(cluster)).text
    flip(cluster / "node-1" / IDENTITY_FILE)
    document = Cli()("wal", "verify", "--data-dir", str(cluster), "--format", "json", code=7).json()
    assert [one["file"] for one in document["findings"] if one["error"]] == ["node-1/identity.json"]
    assert [one["node"] for one in document["nodes"]] == ["node-1", "node-2", "node-3"]


def test_what_reads_one_log_says_where_the_nodes_are(cluster: Path) -> None:
    assert isinstance(nothing_there(cluster), NotFound)
    assert "node-1" in str(nothing_there(cluster).hint)
