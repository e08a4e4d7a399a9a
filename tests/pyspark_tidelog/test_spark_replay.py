"""The job `replay` with a real Spark and a real cluster: into a topic and into Parquet, killed, and run again."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import Row, Spark, expected
from tests.pyspark_tidelog.job_harness import LOCAL, MARKS, ONE_AT_A_TIME, JobWorld, answer, error, killed, rows_of
from tests.support.cli import until

pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def topic(world: JobWorld) -> None:
    """Topic `t`: 400 records in objects and 50 in the tail of partition 0; 150 in partition 1."""
    create_topic(world.bootstrap, "t", 3, **{"retention.ms": "-1"})
    for number in range(4):
        world.produce("t", 0, 100 * number, 100)
        world.upload()
    world.produce("t", 0, 400, 50)
    world.produce("t", 1, 0, 150)


def replay(spark: Spark, world: JobWorld, topic: str, **more: Any) -> Any:
    return answer(spark, "replay", {"bootstrap": world.bootstrap, "token": world.token, "topic": topic, **more})


def refusal(spark: Spark, world: JobWorld, topic: str, **more: Any) -> str:
    return error(spark, "replay", {"bootstrap": world.bootstrap, "token": world.token, "topic": topic, **more})


def high_watermark(world: JobWorld, topic: str, partition: int = 0) -> int:
    return world.connection.offsets([(topic, partition)])[topic, partition].high_watermark


@pytest.mark.long
def test_a_topic_is_copied_with_all_that_is_in_it_and_goes_on_with_what_is_new(spark: Spark, world: JobWorld) -> None:
    done = replay(spark, world, "t", to_topic="copy")
    assert (done["records"], done["found"], done["target"]) == (600, 0, "copy")
    assert rows_of(spark, world, "copy") == [*expected("copy", 0, 0, 450), *expected("copy", 1, 0, 150)]
    assert "retention.ms=-1" in world.cli("topic", "describe", "copy").text
    world.produce("t", 1, 150, 30)
    done = replay(spark, world, "t", to_topic="copy")
    assert (done["records"], done["found"]) == (30, 600)
    assert rows_of(spark, world, "copy")[450:] == expected("copy", 1, 0, 180)


@pytest.mark.long
def test_a_range_of_time_or_offsets_is_numbered_from_zero(spark: Spark, world: JobWorld) -> None:
    bounds = {"startingTimestamp": "1700000000100", "endingTimestamp": "1700000000130"}
    done = replay(spark, world, "t", to_topic="some", bounds=bounds)
    assert done["ranges"] == [{"partition": at, "start": 100, "end": 130} for at in range(2)]
    wanted = [{**each, "offset": each["offset"] - 100} for at in range(2) for each in expected("some", at, 100, 30)]
    assert rows_of(spark, world, "some") == wanted
    bounds = {
        "startingOffsets": '{"t": {"0": 7, "1": 149, "2": 0}}',
        "endingOffsets": '{"t": {"0": 9, "1": 150, "2": -1}}',
    }
    assert replay(spark, world, "t", to_topic="few", bounds=bounds)["records"] == 2 + 1
    assert "is no copy of t" in refusal(spark, world, "t", to_topic="few"), "it began elsewhere"


@pytest.mark.long
def test_keys_choose_partitions_of_a_target_with_other_partitions(spark: Spark, world: JobWorld) -> None:
    create_topic(world.bootstrap, "keyed", 2)
    done = replay(spark, world, "t", to_topic="keyed", by_key=True)
    found = rows_of(spark, world, "keyed")
    source = rows_of(spark, world, "t")
    assert done["records"] == len(found) == len(source)

    def told(rows: list[Row]) -> list[str]:
        names = ("key", "value", "timestamp", "headers")
        return sorted(json.dumps([each[name] for name in names]) for each in rows)

    assert told(found) == told(source)
    places: dict[str, set[int]] = {}
    for each in found:
        if each["key"] is not None:
            places.setdefault(each["key"], set()).add(each["partition"])
    assert {len(each) for each in places.values()} == {1} and {each["partition"] for each in found} == {0, 1}
    assert "cannot tell from its own" in refusal(spark, world, "t", to_topic="keyed", by_key=True)
    assert "not of Parquet files" in refusal(spark, world, "t", to_parquet="p", by_key=True)


@pytest.mark.long
def test_a_target_that_is_not_right_is_refused(spark: Spark, world: JobWorld) -> None:
    assert "into itself" in refusal(spark, world, "t", to_topic="t")
    assert "exactly one target" in refusal(spark, world, "t")
    assert "there is no topic 'nothing'" in refusal(spark, world, "nothing", to_topic="copy2")
    create_topic(world.bootstrap, "two", 2)
    assert "has 2 partitions, and t has 3" in refusal(spark, world, "t", to_topic="two")
    create_topic(world.bootstrap, "stamped", 3, **{"message.timestamp.type": "LogAppendTime"})
    assert "timestamps would not be preserved" in refusal(spark, world, "t", to_topic="stamped")
    create_topic(world.bootstrap, "full", 3)
    producer = Producer({"bootstrap.servers": world.bootstrap})
    producer.produce("full", b"mine", partition=2)
    assert producer.flush(60) == 0
    assert "full-2 has records, and nothing of t-2 is replayed" in refusal(spark, world, "t", to_topic="full")


@pytest.mark.long
def test_parquet_files_have_all_columns_by_day_and_are_replaced_as_a_whole(
    spark: Spark, world: JobWorld, tmp_path: Path
) -> None:
    path = tmp_path / "files"
    wanted = [{**each, "day": "2023-11-14"} for each in expected("t", 0, 0, 450)]
    bounds = {
        "startingOffsets": '{"t": {"0": 0, "1": 0, "2": 0}}',
        "endingOffsets": '{"t": {"0": -1, "1": 150, "2": 0}}',
    }
    for _ in range(2):
        done = replay(spark, world, "t", to_parquet=str(path), bounds=bounds)
        assert done["records"] == 600
        assert (path / "_SUCCESS").exists()
        assert {each.name for each in path.glob("topic=t/*")} == {"partition=0", "partition=1"}
        found = answer(spark, "read_parquet", {"path": str(path)})
        assert found == [*wanted, *({**each, "day": "2023-11-14"} for each in expected("t", 1, 0, 150))]
        assert [each.name for each in tmp_path.iterdir() if not each.name.startswith(".")] == ["files"]
        draft = tmp_path / "files.draft"  # what a run leaves that is killed
        draft.mkdir()
        shutil.copy(path / "_tidelog_job", draft)
        (draft / "part-0.parquet").write_bytes(b"half")
    shutil.rmtree(draft)
    assert "was not made by this job" in refusal(spark, world, "copy", to_parquet=str(path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    assert "was not made by this job" in refusal(spark, world, "t", to_parquet=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "file").exists()


@pytest.mark.long
def test_a_replay_that_was_killed_goes_on_where_it_was(spark: Spark, world: JobWorld, tmp_path: Path) -> None:
    create_topic(world.bootstrap, "killed", 3)
    command = ("replay", "t", "--to", "killed")
    killed(world.bootstrap, command, lambda: high_watermark(world, "killed") > 20, tmp_path / "log")
    written = len(rows_of(spark, world, "killed"))
    second = high_watermark(world, "t", 1)  # another test may have added some
    total = 450 + second
    assert 20 < written < total, (tmp_path / "log").read_text()
    done = world.cli("spark", *command, "--format", "json", *LOCAL).json()
    assert done["found"] >= written and done["records"] == total - done["found"]
    assert rows_of(spark, world, "killed") == [*expected("killed", 0, 0, 450), *expected("killed", 1, 0, second)]


@pytest.mark.long
def test_ctrl_c_ends_a_replay_with_its_code_and_the_plan_writes_nothing(world: JobWorld, tmp_path: Path) -> None:
    leases = world.cli("lease", "list").text.count("\n")
    plan = world.cli("spark", "replay", "t", "--to", "stopped", "--dry-run", "--format", "json").json()
    assert plan["creates_target"] and plan["tasks"] == 2 and plan["bytes"] > 0
    assert plan["ranges"][0] == {"partition": 0, "start": 0, "end": 450}
    assert "stopped" not in world.cli("topic", "list").text
    assert world.cli("lease", "list").text.count("\n") == leases, "it holds none any more"
    create_topic(world.bootstrap, "stopped", 3)
    command = ["spark", "replay", "t", "--to", "stopped", *LOCAL, *ONE_AT_A_TIME]
    process = world.cli.start(*command)
    until(lambda: high_watermark(world, "stopped") > 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err and out == b""
    assert high_watermark(world, "stopped") < 450
