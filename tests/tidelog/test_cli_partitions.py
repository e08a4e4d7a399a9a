"""`tidelog partition` against several brokers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.backends import create_topic
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.cluster import Cluster

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        create_topic(cluster.bootstrap, "t", 6)
        yield cluster


@pytest.fixture
def cli(cluster: Cluster) -> Cli:
    return Cli(cluster.bootstrap)


def test_partitions_are_moved_and_what_it_took_is_printed(cluster: Cluster, cli: Cli) -> None:
    source = cluster.leader("t", 0)
    target = source % 3 + 1
    cli("produce", "t", "--partition", 0, stdin=b"one\ntwo\n")
    [row] = cli("partition", "move", "t:0", "--to", target, "--format", "json").json()
    assert (row["topic"], row["partition"], row["from"], row["to"], row["attempts"]) == ("t", 0, source, target, 1)
    assert row["stall_ms"] > 0
    assert row["seconds"] > 0
    assert cluster.leader("t", 0) == target
    assert cli("consume", "t", "--partition", 0, "--from-beginning", "--exit").text.split() == ["one", "two"]
    [again] = cli("partition", "move", "t:0", "--to", source).rows()
    assert again[:4] == ["t", "0", str(target), str(source)]
    assert cli("partition", "move", "t:0", "--to", source).text == "nothing was moved\n"


def test_a_dry_run_predicts_and_moves_nothing(cluster: Cluster, cli: Cli) -> None:
    source = cluster.leader("t", 1)
    [row] = cli("partition", "move", "t:1", "--to", source % 3 + 1, "--dry-run", "--format", "json").json()
    assert row["upload_bytes"] >= 0
    assert row["stall_ms"] > 0
    assert row["basis"]
    assert "STALL" in cli("partition", "move", "t:1", "--to", source % 3 + 1, "--dry-run").text
    assert cluster.leader("t", 1) == source
    assert not cluster.image.moving()


def test_all_partitions_of_a_broker_are_spread_over_the_others_or_sent_to_one(cluster: Cluster, cli: Cli) -> None:
    cli("partition", "move", "--from", 3)
    placed = [cluster.leader("t", index) for index in range(6)]
    assert 3 not in placed
    assert {1, 2} <= set(placed)
    cli("partition", "move", "--from", 1, "--to", 3)
    assert 1 not in [cluster.leader("t", index) for index in range(6)]


def test_a_file_of_reassignments_is_carried_out(cluster: Cluster, cli: Cli, tmp_path: Path) -> None:
    wanted = {index: index % 3 + 1 for index in range(6)}
    file = tmp_path / "plan.json"
    rows = [{"topic": "t", "partition": index, "replicas": [broker]} for index, broker in wanted.items()]
    file.write_text(json.dumps({"version": 1, "partitions": rows}))
    cli("partition", "move", "--file", file)
    assert {index: cluster.leader("t", index) for index in wanted} == wanted
    listed = cli("partition", "list", "t", "--format", "json").json()
    assert {row["partition"]: row["leader"] for row in listed} == wanted
    assert cli("partition", "list").text == "no partition is being moved\n"


def test_a_move_that_does_not_get_on_is_shown_and_can_be_cancelled(cluster: Cluster, cli: Cli) -> None:
    source = cluster.leader("t", 2)
    target = source % 3 + 1
    cli("produce", "t", "--partition", 2, stdin=b"more\n")
    cluster.bucket.failing = True
    try:
        cli("partition", "move", "t:2", "--to", target, "--no-wait")
        [row] = cli("partition", "list", "--format", "json").json()
        assert (row["topic"], row["partition"], row["leader"], row["to"]) == ("t", 2, source, target)
        assert row["phase"] == "uploading"
        assert "not on broker" in cli("partition", "move", "t:2", "--to", target, "--timeout", 1, code=None).err
        [row] = cli("partition", "move", "t:2", "--to", source, "--dry-run", "--format", "json").json()
        assert (row["from"], row["to"]) == (source, source)
        cli("partition", "move", "t:2", "--to", source, "--no-wait")  # it stays where it is
        assert cli("partition", "list", "--format", "json").json() == []
        cli("partition", "move", "t:2", "--to", target, "--no-wait")
        assert "cancelled the move of t:2" in cli("partition", "cancel", "t:2").text
        assert cli("partition", "cancel", "t:2", code=2).err.startswith("error: t:2")
    finally:
        cluster.bucket.failing = False
    wait_until(lambda: all(move["finished_ms"] for move in cluster.moves(source)), "the attempt has ended")
    assert cluster.leader("t", 2) == source


@pytest.mark.parametrize(
    "arguments",
    [[], ["t:0"], ["t", "--to", 1], ["t:x", "--to", 1], ["t:0", "--from", 1, "--to", 2], ["t:0", "--to", 77]],
    ids=str,
)
def test_what_cannot_be_moved_is_wrong_input(cli: Cli, arguments: list[str | int]) -> None:
    assert cli("partition", "move", *arguments, code=2).err.startswith("error: ")


def test_what_does_not_exist_is_not_found(cli: Cli) -> None:
    assert "does not exist" in cli("partition", "move", "absent:0", "--to", 1, code=3).err
    assert "does not exist" in cli("partition", "move", "t:99", "--to", 1, code=3).err
    assert "does not exist" in cli("partition", "list", "absent", code=3).err
    for more in (["--dry-run"], [], ["--to", 1]):
        assert "there is no broker 77" in cli("partition", "move", "--from", 77, *more, code=3).err


def test_partitions_of_more_topics_than_a_request_line_can_name_are_moved_and_listed(
    cluster: Cluster, cli: Cli
) -> None:
    names = [f"{index:03}-{'n' * 240}" for index in range(36)]
    for name in names:
        create_topic(cluster.bootstrap, name, 1)
    cli("partition", "move", *(f"{name}:0" for name in names), "--to", 2)
    assert {cluster.leader(name, 0) for name in names} == {2}
    assert len(cli("partition", "list", *names, "--format", "json").json()) == len(names)


def test_a_topic_that_is_deleted_while_it_moves_does_not_end_the_wait_for_others(cluster: Cluster, cli: Cli) -> None:
    for name in ("kept", "deleted"):
        create_topic(cluster.bootstrap, name, 1)
        cli("partition", "move", f"{name}:0", "--to", 1)
        cli("produce", name, stdin=b"one\n")
    cluster.bucket.failing = True
    try:
        command = cli.start("partition", "move", "kept:0", "deleted:0", "--to", 3, "--format", "json")
        wait_until(lambda: len(cluster.image.moving()) == 2, "both have a target")
        cli("topic", "delete", "deleted", "--yes")
    finally:
        cluster.bucket.failing = False
    out, err = command.communicate(timeout=60)
    assert (command.returncode, [row["topic"] for row in json.loads(out)]) == (3, ["kept"])
    assert "deleted:0: its topic was deleted" in err.decode()
    assert cluster.leader("kept", 0) == 3
