"""A flipped bit in an object of the bucket, seen by a real client: never served, named, and other partitions go on."""

from __future__ import annotations

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.support.bit_flips import bit_flip
from tests.support.cli import Cli, until
from tests.support.clients import place_of, value_of, wait_until
from tests.support.ports import free_port
from tests.support.tidelog_process import running
from tidelog.cli.client import ClusterConnection

PARTITIONS = 2
RECORDS = 40


def write(bootstrap: str, topic: str) -> dict[int, list[bytes]]:
    """Records of random bytes into each partition; what was acknowledged, by partition."""
    producer = Producer({"bootstrap.servers": bootstrap, **QUIET})
    rng = random.Random(7)
    acknowledged: dict[int, list[bytes]] = {partition: [] for partition in range(PARTITIONS)}

    def done(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        acknowledged[place_of(message)[1]].append(value_of(message))

    for number in range(RECORDS * PARTITIONS):
        producer.produce(topic, rng.randbytes(500), partition=number % PARTITIONS, on_delivery=done)
        producer.flush(30)
    return acknowledged


def in_the_bucket(data_dir: Path, port: int, flags: tuple[str, ...] = ()) -> dict[int, list[bytes]]:
    """A topic whose every byte is in the bucket, and no process."""
    with running(data_dir, flags, port=port) as process:
        create_topic(process.bootstrap, "t", PARTITIONS)
        acknowledged = write(process.bootstrap, "t")
        assert process.stop() == 0, process.tail()
    return acknowledged


def consume(bootstrap: str, partition: int, wanted: int, timeout_s: float = 30) -> tuple[list[bytes], list[KafkaError]]:
    """What a consumer gets of one partition until it has `wanted` records or an error."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "check.crcs": True, **QUIET})
    values: list[bytes] = []
    errors: list[KafkaError] = []
    try:
        consumer.assign([TopicPartition("t", partition, 0)])

        def arrived() -> bool:
            for message in consumer.consume(500, 0.2):
                if (error := message.error()) is not None:
                    errors.append(error)
                else:
                    values.append(value_of(message))
            return bool(errors) or len(values) >= wanted

        wait_until(arrived, f"records or an error of partition {partition}", timeout_s)
    finally:
        consumer.close()
    return values, errors


def blocks_of(cli: Cli, part: str, partition: int) -> list[dict[str, Any]]:
    """The blocks of one stream, each with the `object` that holds it."""
    wanted = ("t", partition, part)
    return [
        {**block, "object": one["id"], "key": one["key"]}
        for one in cli("object", "list", "--format", "json").json()
        for block in cli("object", "inspect", one["id"], "--format", "json").json()["blocks"]
        if (block["topic"], block["partition"], block["part"]) == wanted
    ]


def metric(bootstrap: str, name: str) -> float:
    with urllib.request.urlopen(ClusterConnection(bootstrap).admin_url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    [value] = [line.split()[1] for line in lines if line.split()[0] == name]
    return float(value)


@pytest.mark.gate_cases("0")
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_block_is_refused_named_and_served_again_when_restored(tmp_path: Path, seed: int) -> None:
    data_dir, port = tmp_path / "data", free_port()
    acknowledged = in_the_bucket(data_dir, port)
    cli = Cli(f"127.0.0.1:{port}")
    with running(data_dir, port=port) as process:
        [block] = blocks_of(cli, "data", 0)
        assert process.stop() == 0, process.tail()
    at = random.Random(seed).randrange(block["position"] * 8, (block["position"] + block["length_bytes"]) * 8)
    with running(data_dir, port=port) as process:
        with bit_flip(data_dir / "bucket" / block["key"], at):
            values, errors = consume(process.bootstrap, 0, RECORDS)
            assert values == acknowledged[0][: len(values)] and len(values) < RECORDS
            assert [error.code() for error in errors[:1]] == [KafkaError.INVALID_MSG], errors
            assert consume(process.bootstrap, 1, RECORDS) == (acknowledged[1], [])
            problems = cli("status", "--format", "json", code=10).json()["problems"]
            assert len(problems) == 1 and block["key"] in problems[0]
            assert f"t-0 offsets {block['start_offset']} to {block['end_offset'] - 1}" in problems[0]
            assert metric(process.bootstrap, "tidelog_storage_failed_checks_total") >= 1
            assert metric(process.bootstrap, "tidelog_storage_refused_reads_total") >= 1
            assert metric(process.bootstrap, "tidelog_storage_damaged_places") == 1
            assert any("damaged data in the bucket is not served" in line for line in process.output)
            [finding] = cli("object", "verify", "--format", "json", code=7).json()["findings"]
            assert (finding["object"], finding["part"]) == (block["object"], "block")
            assert (finding["position"], finding["length_bytes"]) == (block["position"], block["length_bytes"])
            [whose] = finding["streams"]
            assert (whose["topic"], whose["partition"], whose["part"]) == ("t", 0, "data")
            assert (whose["start_offset"], whose["end_offset"]) == (block["start_offset"], block["end_offset"])
            shown = cli("object", "verify", block["object"], code=7).rows()[0]
            assert shown[:9] == [
                *(str(block["object"]), "block", str(block["position"]), str(block["stream_id"]), "t", "0", "data"),
                *(str(block["start_offset"]), str(block["end_offset"])),
            ]
        assert consume(process.bootstrap, 0, RECORDS) == (acknowledged[0], [])
        assert metric(process.bootstrap, "tidelog_storage_damaged_places") == 0
        assert cli("status").text.endswith("no problems\n")
        assert process.stop() == 0, process.tail()


@pytest.mark.long
@pytest.mark.parametrize("part", ["index", "footer"])
def test_a_damaged_end_of_an_object_names_all_that_is_lost_with_it(tmp_path: Path, part: str) -> None:
    data_dir, port = tmp_path / "data", free_port()
    acknowledged = in_the_bucket(data_dir, port)
    cli = Cli(f"127.0.0.1:{port}")
    with running(data_dir, port=port) as process:
        [block] = blocks_of(cli, "data", 0)
        described = cli("object", "inspect", block["object"], "--format", "json").json()
        start, end = described["index_position"], described["size_bytes"] - 72
        place = (start, end) if part == "index" else (end, described["size_bytes"])
        with bit_flip(data_dir / "bucket" / block["key"], random.Random(part).randrange(place[0] * 8, place[1] * 8)):
            findings = cli("object", "verify", "--format", "json", code=7).json()["findings"]
            assert [(one["object"], one["part"], one["position"]) for one in findings] == [
                (block["object"], part, place[0])
            ]
            lost = {(one["topic"], one["partition"], one["part"]) for one in findings[0]["streams"]}
            assert {("t", 0, "data"), ("t", 1, "data")} <= lost
            assert cli("status", code=10).code == 10
        assert cli("object", "verify").text.startswith("sound: ")
        assert cli("status").text.endswith("no problems\n")
        process.kill()
    with bit_flip(data_dir / "bucket" / block["key"], place[0] * 8 + 3), running(data_dir, port=port) as process:
        values, errors = consume(process.bootstrap, 0, RECORDS)
        assert values == [] and errors[0].code() == KafkaError.INVALID_MSG
        process.kill()
    with running(data_dir, port=port) as process:
        rows = read_topic(process.bootstrap, "t", PARTITIONS)
        assert [row[4] for row in rows] == acknowledged[0] + acknowledged[1]


@pytest.mark.long
def test_a_partition_whose_metadata_is_damaged_says_so_and_the_others_open(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "data", free_port()
    acknowledged = in_the_bucket(data_dir, port)
    cli = Cli(f"127.0.0.1:{port}")
    with running(data_dir, port=port) as process:
        block = blocks_of(cli, "meta", 0)[0]
        process.kill()
    with running_damaged(data_dir, port, block) as process:
        values, errors = consume(process.bootstrap, 0, RECORDS)
        assert values == [] and errors[0].code() == KafkaError.INVALID_MSG
        assert consume(process.bootstrap, 1, RECORDS) == (acknowledged[1], [])
        problems = json.dumps(cli("status", "--format", "json", code=10).json()["problems"])
        assert "t-0 does not open" in problems and block["key"] in problems
        assert "t-0 (meta stream) offsets" in problems
        restore(data_dir, block)
        until(lambda: cli("status", code=None).code == 0)
        assert consume(process.bootstrap, 0, RECORDS) == (acknowledged[0], [])
        assert process.stop() == 0, process.tail()


def running_damaged(data_dir: Path, port: int, block: dict[str, Any]) -> Any:
    file = data_dir / "bucket" / block["key"]
    (data_dir / "kept").write_bytes(file.read_bytes())
    damaged = bytearray(file.read_bytes())
    damaged[block["position"] + block["length_bytes"] // 2] ^= 0x10
    file.write_bytes(damaged)
    return running(data_dir, port=port)


def restore(data_dir: Path, block: dict[str, Any]) -> None:
    (data_dir / "kept").replace(data_dir / "bucket" / block["key"])


@pytest.mark.long
def test_a_flipped_bit_in_any_object_is_verified_away_and_nothing_else_is(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "data", free_port()
    acknowledged = in_the_bucket(data_dir, port)
    cli = Cli(f"127.0.0.1:{port}")
    rng = random.Random(11)
    with running(data_dir, port=port) as process:
        for partition, values in write(process.bootstrap, "t").items():
            acknowledged[partition] += values
        assert process.stop() == 0, process.tail()
    with running(data_dir, port=port) as process:
        objects = cli("object", "list", "--format", "json").json()
        assert len(objects) >= 2
        url = ClusterConnection(process.bootstrap).admin_url + "/objects/verify"
        for one in objects:
            for _ in range(60):
                bit = rng.randrange(one["size_bytes"] * 8)
                with bit_flip(data_dir / "bucket" / one["key"], bit):
                    findings = [line for line in verify_lines(url) if line["event"] == "finding"]
                assert [(line["object"], line["part"] in ("block", "index", "footer")) for line in findings] == [
                    (one["id"], True)
                ]
                [finding] = findings
                assert finding["position"] <= bit // 8 < finding["position"] + finding["length_bytes"]
                assert finding["streams"] and all(each["topic"] for each in finding["streams"])
        assert cli("object", "verify").text.startswith("sound: ")
        assert cli("status").text.endswith("no problems\n")
        rows = read_topic(process.bootstrap, "t", PARTITIONS)
        assert [row[4] for row in rows] == acknowledged[0] + acknowledged[1]


def verify_lines(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as response:
        return [json.loads(line) for line in response]


@pytest.mark.long
def test_compaction_leaves_a_damaged_object_alone_until_it_is_mended(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "data", free_port()
    flags = ("--set", "compaction.enabled=false", "--set", "clean.enabled=false")
    cli = Cli(f"127.0.0.1:{port}")
    produced = b""
    with running(data_dir, flags, port=port) as process:
        cli("topic", "create", "many", "-p", 1)
        upload = urllib.request.Request(ClusterConnection(process.bootstrap).admin_url + "/upload", method="POST")
        for number in range(6):
            lines = b"".join(b"%d %d\n" % (number, each) for each in range(300))
            cli("produce", "many", stdin=lines)
            urllib.request.urlopen(upload, timeout=60).close()
            produced += lines
        assert process.stop() == 0, process.tail()
    with running(data_dir, flags, port=port) as process:
        before = [one for one in cli("object", "list", "--format", "json").json() if one["state"] == "committed"]
        victim = before[len(before) // 2]
        with bit_flip(data_dir / "bucket" / victim["key"], 500):
            given_up = cli("object", "compact", "--eager", "--format", "json", code=None).json()["given_up"]
            assert victim["key"] in json.dumps(given_up)
            while cli("object", "compact", "--eager", "--format", "json", code=None).json()["tasks"]:
                continue
            left = [one for one in cli("object", "list", "--format", "json").json() if one["state"] == "committed"]
            assert victim["id"] in {one["id"] for one in left} and len(left) < len(before)
            problems = cli("status", "--format", "json", code=10).json()["problems"]
            assert any("cannot be compacted" in problem and victim["key"] in problem for problem in problems)
            assert cli("object", "verify", code=7).rows()[0][0] == str(victim["id"])
        assert cli("object", "verify").text.startswith("sound: ")
        assert cli("status").text.endswith("no problems\n")
        cli("object", "compact", "--eager")
        assert cli("consume", "many", "--exit").out == produced
        assert process.stop() == 0, process.tail()


def test_what_can_be_read_before_damage_is_shown_by_the_command(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "data", free_port()
    readable = in_the_bucket(data_dir, port)[0]
    cli = Cli(f"127.0.0.1:{port}")
    with running(data_dir, port=port) as process:
        write(process.bootstrap, "t")
        assert process.stop() == 0, process.tail()
    with running(data_dir, port=port) as process:
        damaged = blocks_of(cli, "data", 0)[-1]
        assert damaged["start_offset"] == RECORDS
        with bit_flip(data_dir / "bucket" / damaged["key"], (damaged["position"] + 100) * 8):
            shown = cli("consume", "t", "--partition", 0, "--exit", "--format", "json", code=7)
        assert [json.loads(line)["offset"] for line in shown.out.splitlines()] == list(range(len(readable)))
        assert f"failed at offset {RECORDS}" in shown.err
        assert process.stop() == 0, process.tail()
