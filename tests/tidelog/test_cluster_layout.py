"""The ports of the processes of `tidelog up --brokers N`: all different, none that a connection may take, and kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tidelog.chaos.ports import port_block
from tidelog.cli.options import load_config
from tidelog.cli.subcommands.up import parse_racks
from tidelog.config import Loaded
from tidelog.controller.raft.quorum import parse_members
from tidelog.process import cluster_layout
from tidelog.process.data_dir import DataDirectory, WrongDataDirectory, json_checksum
from tidelog.runtime.errors import ConfigError, DamagedFile
from tidelog.runtime.ports import ephemeral_ports


def loaded(directory: Path, *assignments: str, port: int = 0) -> Loaded:
    return load_config(None, assignments, node__data_dir=str(directory), kafka__port=port)


def ports(nodes: list[Loaded]) -> tuple[list[int], list[int]]:
    """Of the brokers, and of the controllers, by id."""
    members = parse_members(nodes[0].config.controller.members)
    return [node.config.kafka.port for node in nodes], [int(members[each].rpartition(":")[2]) for each in members]


def test_ports_are_chosen_outside_of_the_ephemeral_ones_and_kept(tmp_path: Path) -> None:
    brokers, controllers = ports(cluster_layout.plan(loaded(tmp_path), 3))
    assert len({*brokers, *controllers}) == 6
    assert not set(ephemeral_ports()).intersection([*brokers, *controllers])
    assert ports(cluster_layout.plan(loaded(tmp_path), 3)) == (brokers, controllers)
    fourth = cluster_layout.add_broker(loaded(tmp_path), [1, 2, 3]).config.kafka.port
    assert fourth not in {*brokers, *controllers, *ephemeral_ports()}
    assert ports(cluster_layout.plan(loaded(tmp_path), 3)) == ([*brokers, fourth], controllers)


@pytest.mark.parametrize("what", ["nothing", "an identity of no cluster", "a cluster", "a rebuilt cluster", "objects"])
def test_after_a_first_start_that_failed_the_refusal_of_other_options_says_how_to_begin_anew(
    tmp_path: Path, what: str
) -> None:
    cluster_layout.plan(loaded(tmp_path), 3)
    node = tmp_path / "node-1"
    if what in ("an identity of no cluster", "a cluster"):
        body = {"format": 1, "broker_id": 1, "check_code": "code", "cluster_id": "id" if what == "a cluster" else ""}
        (node / "identity.json").write_text(json.dumps({**body, "crc32c": json_checksum(body)}))
        (node / "controller").mkdir()
    elif what == "a rebuilt cluster":
        (node / "controller").mkdir()
    elif what == "objects":
        (tmp_path / "bucket" / "object").touch()
    for brokers, controllers in ((2, None), (5, 5)):
        with pytest.raises(ConfigError) as refused:
            cluster_layout.plan(loaded(tmp_path), brokers, controllers)
        hint = refused.value.hint or ""
        assert (f"delete {tmp_path} to begin anew" in hint) == (what in ("nothing", "an identity of no cluster"))


def test_a_single_broker_is_not_begun_beside_the_nodes_of_a_cluster_that_has_lost_its_layout(tmp_path: Path) -> None:
    for node in cluster_layout.plan(loaded(tmp_path), 2):
        DataDirectory.open(Path(node.config.node.data_dir), node.config.node.id, "code").close()
    (tmp_path / "cluster.json").unlink()
    with pytest.raises(WrongDataDirectory, match=r"the nodes of a cluster \(node-1, node-2\), and no cluster.json"):
        cluster_layout.plan(loaded(tmp_path), 1)
    assert [node.config.node.id for node in cluster_layout.plan(loaded(tmp_path), 2)] == [1, 2]


def test_racks_are_given_in_turn_and_kept(tmp_path: Path) -> None:
    def racks(nodes: list[Loaded]) -> list[str]:
        return [node.config.kafka.rack for node in nodes]

    assert racks(cluster_layout.plan(loaded(tmp_path), 3, racks=["a", "b"])) == ["a", "b", "a"]
    assert racks(cluster_layout.plan(loaded(tmp_path), 3)) == ["a", "b", "a"]
    assert cluster_layout.add_broker(loaded(tmp_path), [1, 2, 3]).config.kafka.rack == "b"
    assert racks(cluster_layout.plan(loaded(tmp_path), 3, racks=["x"])) == ["x"] * 4
    alone = loaded(tmp_path / "alone", "kafka.rack=configured")
    assert racks(cluster_layout.plan(alone, 1)) == ["configured"]
    assert racks(cluster_layout.plan(alone, 1, racks=["a", "b"])) == ["a"]
    assert racks(cluster_layout.plan(loaded(tmp_path / "more", "kafka.rack=all"), 2)) == ["all", "all"]


def test_three_brokers_or_more_keep_three_replicas_unless_told_otherwise(tmp_path: Path) -> None:
    def planned(name: str, brokers: int, *assignments: str) -> list[int]:
        nodes = cluster_layout.plan(loaded(tmp_path / name, *assignments), brokers)
        return [node.config.replication.total_replicas for node in nodes]

    assert planned("two", 2) == [1, 1]
    assert planned("three", 3) == [3, 3, 3]
    replication = cluster_layout.add_broker(loaded(tmp_path / "three"), [1, 2, 3]).config.replication
    policy = replication.policy()
    assert (policy.total_replicas, policy.in_sync_replicas, policy.min_in_sync_replicas) == (3, 2, 1)
    assert not policy.enable_auto_in_sync_replicas and not policy.all_ack_in_sync_state_set
    assert planned("told", 3, "replication.total_replicas=1") == [1, 1, 1]
    assert planned("bucket", 3, "wal.kind=s3") == [1, 1, 1]


def test_an_empty_rack_is_wrong_usage() -> None:
    assert parse_racks(None) == [] and parse_racks("a, b") == ["a", "b"]
    for text in ("", "a,", ",b"):
        with pytest.raises(ConfigError, match="empty name"):
            parse_racks(text)


def test_configured_ports_are_counted_from(tmp_path: Path) -> None:
    nodes = cluster_layout.plan(loaded(tmp_path, "controller.port=9193", port=9092), 3)
    assert ports(nodes) == ([9092, 9093, 9094], [9193, 9194, 9195])
    moved = cluster_layout.plan(loaded(tmp_path, "controller.port=7000", port=19092), 3)
    assert ports(moved) == ([19092, 19093, 19094], [9193, 9194, 9195])  # the quorum knows its members by theirs


@pytest.mark.parametrize(
    ("assignments", "port"),
    [
        ((), 65_534),
        *(((f"{setting}=65534",), 9092) for setting in ("controller.port", "admin.port", "kafka.peer_port")),
    ],
)
def test_ports_that_would_be_counted_beyond_the_last_one_are_refused_before_anything_is_written(
    tmp_path: Path, assignments: tuple[str, ...], port: int
) -> None:
    with pytest.raises(ConfigError, match=r"port is 65534: node 3 would listen on 65536"):
        cluster_layout.plan(loaded(tmp_path, *assignments, port=port), 3)
    assert not list(tmp_path.iterdir())
    assert ports(cluster_layout.plan(loaded(tmp_path, port=65_533), 3))[0] == [65_533, 65_534, 65_535]


def test_a_chosen_port_is_none_that_another_process_is_configured_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = port_block()
    monkeypatch.setattr("tidelog.runtime.ports.lasting_ports", lambda: block[:6])
    brokers, controllers = ports(cluster_layout.plan(loaded(tmp_path, port=block.start), 3))
    assert set(brokers).isdisjoint(controllers)


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_no_flipped_bit_of_the_layout_changes_what_is_started(tmp_path: Path) -> None:
    cluster_layout.plan(loaded(tmp_path), 3, racks=["a", "b"])
    cluster_layout.drop_broker(loaded(tmp_path), 2, [1, 2, 3])
    file = tmp_path / cluster_layout.LAYOUT_FILE
    sound, nodes = file.read_bytes(), cluster_layout.nodes(loaded(tmp_path).config)
    refused = 0
    for bit in range(len(sound) * 8):
        file.write_bytes(flipped(sound, bit))
        try:  # white space may be another one
            assert cluster_layout.nodes(loaded(tmp_path).config) == nodes, bit
        except DamagedFile as error:
            assert error.path == str(file)
            refused += 1
    assert refused > len(sound) * 8 / 2
    file.write_bytes(flipped(sound, sound.index(b"kafka_ports") * 8))
    with pytest.raises(DamagedFile):
        cluster_layout.plan(loaded(tmp_path), 3)


def test_a_layout_of_the_first_format_is_read_and_gets_its_checksum(tmp_path: Path) -> None:
    before = ports(cluster_layout.plan(loaded(tmp_path), 3))
    file = tmp_path / cluster_layout.LAYOUT_FILE
    body = json.loads(file.read_bytes())
    del body["crc32c"]
    file.write_text(json.dumps({**body, "format": 1}))
    assert ports(cluster_layout.plan(loaded(tmp_path), 3)) == before
    assert json.loads(file.read_bytes()) == {**body, "format": 2, "crc32c": json_checksum(body)}


def test_nodes_with_buckets_of_their_own_are_refused(tmp_path: Path) -> None:
    original, copy, moved = tmp_path / "original", tmp_path / "copy", tmp_path / "moved \u00fc"
    cluster_layout.plan(loaded(original), 2)
    shutil.copytree(original, copy)  # it follows links
    shutil.copytree(original, moved, symlinks=True)
    with pytest.raises(WrongDataDirectory, match="node-1/bucket is not the link"):
        cluster_layout.plan(loaded(copy), 2)
    nodes = cluster_layout.plan(loaded(moved), 2)
    assert all((Path(node.config.node.data_dir) / "bucket").samefile(moved / "bucket") for node in nodes)
    dangling = moved / "node-2" / "bucket"
    dangling.unlink()
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(WrongDataDirectory, match="node-2/bucket is not the link"):
        cluster_layout.plan(loaded(moved), 2)
