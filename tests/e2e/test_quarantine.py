"""A quarantined stream of a real process: shown, released by command, written and read again, also after kill -9."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.tidelog_process import running
from tidelog.controller.client.client import ControllerClient
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import TcpNetwork

FLAGS = ("--set", "upload.age_ms=100")
BEFORE, LOST, AFTER = 40, 20, 10
PARTS = {"meta": 0, "data": 1, "time": 2}


async def quarantine(data_dir: Path, topic: str, part: str) -> int:
    """Have the controller quarantine a stream of the topic's first partition; where its data is committed up to."""
    host, _, port = (data_dir / "controller/address").read_text().strip().rpartition(":")
    client = ControllerClient([(host, int(port))], TcpNetwork(), SystemClock(), random.Random(1))
    try:
        await client.start()
        image = client.image
        (topic_id,) = (one.id for one in image.topics.values() if one.name == topic)
        partition = image.partition(topic_id, 0)
        assert partition is not None
        epoch = image.replica_sets[partition.replica_set].master_epoch
        end = image.streams[partition.first_stream + PARTS["data"]].end_offset
        await client.quarantine_stream(partition.replica_set, epoch, partition.first_stream + PARTS[part], "a gap")
        return end
    finally:
        await client.close()


def send(bootstrap: str, values: list[bytes]) -> list[str]:
    """Write records one after the other; the errors."""
    errors: list[str] = []
    producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 5000, **QUIET})
    for value in values:
        producer.produce("t", value, on_delivery=lambda error, _: errors.append(str(error)) if error else None)
        producer.flush(30)
    return errors


def numbered(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def values(bootstrap: str) -> list[bytes]:
    return [value for _, _, _, _, value in read_topic(bootstrap, "t")]


@pytest.mark.gate_cases("data")
@pytest.mark.parametrize("part", ["data", "meta", "time"])
def test_a_released_partition_goes_on_where_it_is_committed(tmp_path: Path, part: str) -> None:
    data_dir = tmp_path / "data"
    with running(data_dir, FLAGS) as process:
        cli = Cli(process.bootstrap)
        create_topic(process.bootstrap, "t")
        create_topic(process.bootstrap, "other")
        assert send(process.bootstrap, numbered(0, BEFORE)) == []

        def uploaded() -> bool:
            (node,) = cli("status", "--format", "json").json()["nodes"]
            return bool(node["upload"]["backlog_bytes"] == 0)

        wait_until(uploaded, "everything is in the bucket")
        end = asyncio.run(quarantine(data_dir, "t", part))
        assert end == BEFORE
        taken = send(process.bootstrap, numbered(BEFORE, LOST))  # taken until an upload finds out, or refused
        assert process.stop() == 0, process.tail()

    with running(data_dir, FLAGS) as process:
        cli = Cli(process.bootstrap)
        (row,) = cli("object", "quarantine", "list", "--format", "json").json()
        assert (row["topic"], row["partition"], row["part"], row["reason"]) == ("t", 0, part, "a gap")
        wait_until(lambda: cli("status", code=None).code == 10, "the status says so")
        assert "quarantine" in cli("status", code=10).text
        cli("object", "quarantine", "release", "t:0", code=2)  # nobody can be asked
        cli("object", "quarantine", "release", "other:0", "--yes", code=3)
        acknowledged = numbered(BEFORE, LOST - len(taken))
        aside = cli("object", "quarantine", "records", "t:0").out
        found = [json.loads(line) for line in aside.splitlines()]
        if part == "data":
            assert [one["value"].encode() for one in found] == acknowledged and acknowledged
            assert [one["offset"] for one in found] == list(range(BEFORE, BEFORE + len(acknowledged)))
        else:
            assert found == []
        released = cli("object", "quarantine", "release", "t:0", "--yes").text
        assert f"released the {part} stream of t:0" in released
        wait_until(lambda: cli("status", code=None).code == 0, "the partition is open again")
        kept = values(process.bootstrap)
        assert kept[:BEFORE] == numbered(0, BEFORE)
        assert len(kept) == BEFORE if part == "data" else len(kept) >= BEFORE + LOST - len(taken)
        assert send(process.bootstrap, numbered(1000, AFTER)) == []
        assert values(process.bootstrap) == [*kept, *numbered(1000, AFTER)]
        if part == "data":  # nothing of what was acknowledged need be lost
            assert cli("object", "quarantine", "records", "t:0").out == aside
            cli("produce", "t", "--format", "json", stdin=aside)
            assert values(process.bootstrap) == [*kept, *numbered(1000, AFTER), *acknowledged]
            return
        process.kill()

    with running(data_dir, FLAGS) as process:
        assert values(process.bootstrap) == [*kept, *numbered(1000, AFTER)]
        assert process.stop() == 0, process.tail()
