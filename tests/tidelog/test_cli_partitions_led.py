"""`tidelog partition` where a broker's replica set is led by another member: that one knows of the moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.backends import create_topic
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tidelog.broker.settings import ReplicationSettings

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Broker 3 is away, and another member leads its replica set."""
    replication = ReplicationSettings(total_replicas=3)
    with Cluster(tmp_path_factory.mktemp("cluster"), replication=replication) as cluster:
        sets = cluster.image.replica_sets
        wait_until(lambda: all(len(one.sync_state_set) == 3 for one in sets.values()), "all are in sync", 60.0)
        create_topic(cluster.bootstrap, "t", 3)
        cluster.run(cluster.stop_broker(3))
        wait_until(lambda: cluster.image.master_of(3) is not None, "another member leads the set of broker 3", 60.0)
        yield cluster


@pytest.fixture
def cli(cluster: Cluster) -> Cli:
    return Cli(cluster.bootstrap)


@pytest.fixture
def secret(tmp_path: Path) -> tuple[str, Path]:
    """The option that names the secret of such a cluster."""
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_bytes(b"s" * 32)
    return "--secret-file", file


def test_moves_to_and_from_a_set_that_another_member_leads_are_followed(
    cluster: Cluster, cli: Cli, secret: tuple[str, Path]
) -> None:
    index = next(each for each in range(3) if cluster.partition("t", each).replica_set == 1)
    cli("produce", "t", "--partition", index, stdin=b"one\n")
    for source, target in ((1, 3), (3, 2)):
        predicted = cli("partition", "move", f"t:{index}", "--to", target, "--dry-run", "--format", "json")
        assert "dead" not in predicted.json()[0]["basis"]
        done = cli("partition", "move", f"t:{index}", "--to", target, "--timeout", 20, "--format", "json", *secret)
        [row] = done.json()
        assert (row["from"], row["to"], row["attempts"]) == (source, target, 1)
        assert row["stall_ms"] > 0
        assert cluster.partition("t", index).replica_set == target


def test_a_move_from_a_set_that_another_member_leads_is_shown(
    cluster: Cluster, cli: Cli, secret: tuple[str, Path]
) -> None:
    index = next(each for each in range(3) if cluster.partition("t", each).replica_set == 3)
    cli("produce", "t", "--partition", index, stdin=b"more\n")
    cluster.bucket.failing = True
    try:
        cli("partition", "move", f"t:{index}", "--to", 1, "--no-wait", *secret)
        leader = cluster.leader("t", index)
        wait_until(lambda: any(one["phase"] == "uploading" for one in cluster.moves(leader)), "the move has begun")
        [row] = cli("partition", "list", "--format", "json").json()
        assert (row["broker"], row["leader"], row["to"], row["phase"]) == (3, leader, 1, "uploading")
        cli("partition", "cancel", f"t:{index}", *secret)
    finally:
        cluster.bucket.failing = False
