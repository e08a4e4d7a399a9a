"""`tidelog wal verify` over the directory of a cluster: the layout and every node, by name."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tidelog.cli.options import load_config
from tidelog.process import cluster_layout
from tidelog.process.data_check import DataReport, check_all, nothing_there
from tidelog.process.data_dir import IDENTITY_FILE, DataDirectory
from tidelog.process.replica_disks import DirectoryReplicaDisks
from tidelog.runtime.errors import NotFound
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.disk.identity import ID_FILE, read_wal_id


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


async def make_replica(directory: Path, replica_set: int) -> str:
    """Keep some records of a set, its own or another broker's; return the id of the WAL."""
    rng = random.Random(1)
    wal, disk = DirectoryReplicaDisks(directory, 1, WalSettings(), rng).open(replica_set)
    wal_id = await read_wal_id(disk, rng, replica_set)
    await wal.recover(lambda _record: None)
    await wal.begin_epoch(1)
    wal.append(StreamAppend(7, 1, 0, 1, (b"value" * 100,)))
    await wal.close()
    await disk.close()
    return wal_id


def test_replicas_of_other_brokers_sets_and_their_ids_are_checked(cluster: Path) -> None:
    asyncio.run(make_replica(cluster / "node-1", 2))
    (found,) = [one.replicas for one in check(cluster) if one.replicas]
    assert list(found) == [2] and found[2].end_offset > 500
    assert errors(check(cluster)) == []
    folder = cluster / "node-1" / "replica-2"
    flip(folder / ID_FILE)
    assert errors(check(cluster)) == [f"node-1/replica-2/{ID_FILE}"]


def test_replicas_that_were_swapped_are_named_as_no_broker_starts_with_them(cluster: Path) -> None:
    node = cluster / "node-1"
    for replica_set in (1, 2):
        asyncio.run(make_replica(node, replica_set))
    assert errors(check(cluster)) == []
    (node / "wal").rename(node / "other")
    (node / "replica-2").rename(node / "wal")
    (node / "other").rename(node / "replica-2")
    (report,) = [one for one in check(cluster) if one.replicas]
    assert not report.is_sound
    told = {one.file: one.message for one in report.findings if one.kind == "foreign"}
    assert "replica set 2, not of 1" in told[f"node-1/wal/{ID_FILE}"]
    assert "replica set 1, not of 2" in told[f"node-1/replica-2/{ID_FILE}"]


@pytest.mark.processes
def test_inspect_shows_the_replicas_of_other_sets_in_short_and_one_of_them_in_full(cluster: Path) -> None:
    node = cluster / "node-1"
    asyncio.run(make_replica(node, 1))
    asyncio.run(make_replica(node, 2))
    asyncio.run(make_replica(node, 14))
    (node / "rejected-replica-2-1").mkdir()
    cli, where = Cli(), ("--data-dir", str(node))
    document = cli("wal", "inspect", *where, "--format", "json").json()
    assert list(document["replicas"]) == ["2", "14"] and document["end_offset"] > 500
    assert document["replicas"]["2"]["end_offset"] > 500 and document["replicas"]["2"]["epochs"] == [[1, 0]]
    text = cli("wal", "inspect", *where).text
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows[[row[:1] for row in rows].index(["REPLICA-OF"]) + 1 :]] == ["2", "14"]
    one = cli("wal", "inspect", *where, "--replica-set", 14, "--format", "json").json()
    assert one == document["replicas"]["14"]
    assert "WAL offsets" in cli("wal", "inspect", *where, "--replica-set", 14).text
    own = cli("wal", "inspect", *where, "--replica-set", 1, "--format", "json").json()
    assert own["segments"] == document["segments"] and "replicas" not in own
    lines = cli("wal", "inspect", *where, "--replica-set", 2, "--records", "--format", "json").out.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["epoch_start", "data"]
    refused = cli("wal", "inspect", *where, "--replica-set", 3, code=3)
    assert "no log of replica set 3" in refused.err and "1, 2, 14" in refused.err


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
