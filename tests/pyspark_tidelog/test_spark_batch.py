"""`spark.read.format("tidelog")` with a real Spark, a real cluster, and what happens between planning and reading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Row, Spark, World, expected
from tests.support.cli import until
from tests.support.cluster_process import up_cluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    found = Spark(tmp_path_factory.mktemp("spark"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Topic `t`: 900 records in each of two partitions, in several objects and codecs, and 100 in the tail of one."""
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        found = World(up)
        create_topic(up.bootstrap, "t", 2)
        for number, codec in enumerate(("none", "gzip", "snappy", "lz4", "zstd", "none")):
            for partition in range(2):
                found.produce("t", partition, 150 * number, 150, **{"compression.type": codec})
            found.upload()
        found.produce("t", 1, 900, 100)
        yield found


def test_a_topic_is_read_with_all_that_is_in_it(spark: Spark, world: World) -> None:
    tasks = spark.plan(world.options(subscribe="t", includeHeaders="true", maxBytesPerTask=5_000))
    assert tasks > 6, "many tasks to a partition, and one for the tail"
    assert spark.read() == [*expected("t", 0, 0, 900), *expected("t", 1, 0, 1_000)]
    assert spark.plan(world.options(subscribe="t")) == 3
    assert spark.read() == [*expected("t", 0, 0, 900, headers=False), *expected("t", 1, 0, 1_000, headers=False)]


def test_a_read_may_name_the_columns_that_it_wants(spark: Spark, world: World, tmp_path: Path) -> None:
    def ask(step: str, schema: str, **more: str) -> Any:
        options = {name: str(value) for name, value in world.options(subscribe="t", startingOffsets="earliest").items()}
        call = f"tests.pyspark_tidelog.column_steps:{step}"
        return spark.ask(call=call, **{"with": {"options": options, "schema": schema, **more}})

    rows = spark.read(world.options(subscribe="t"))
    wanted = [[row["offset"], row["partition"], row["value"]] for row in rows]
    found = ask("read", "offset LONG, partition INT, value BINARY COMMENT 'theirs'")["ok"]
    assert sorted(found, key=lambda row: (row[1], row[0])) == wanted, "in the bucket and in the tail"
    assert sorted(ask("follow", "offset LONG", place=str(tmp_path))["ok"]) == sorted([row["offset"]] for row in rows)
    for wrong in ("value STRING", "offset LONG, worth BINARY", "value BINARY NOT NULL"):
        assert "is not of columns of the source" in ask("read", wrong)["error"]


def test_what_is_to_be_read_can_be_said_in_every_way_of_sparks_kafka_source(spark: Spark, world: World) -> None:
    def offsets(**more: object) -> list[tuple[int, int, int]]:
        """First and last offset, and the number of rows, of each partition."""
        found: dict[int, list[int]] = {}
        for row in spark.read(world.options(**more)):
            found.setdefault(row["partition"], []).append(row["offset"])
        return [(mine[0], mine[-1], len(mine)) for _, mine in sorted(found.items())]

    assert offsets(subscribePattern="t|nothing") == [(0, 899, 900), (0, 999, 1_000)]
    assert offsets(assign='{"t": [1]}') == [(0, 999, 1_000)]
    assert offsets(subscribe="t", tail="skip") == [(0, 899, 900), (0, 899, 900)]
    some = {"startingOffsets": '{"t": {"0": 77, "1": -2}}', "endingOffsets": '{"t": {"0": 301, "1": -1}}'}
    assert offsets(subscribe="t", **some) == [(77, 300, 224), (0, 999, 1_000)]
    at = {"startingTimestamp": 1_700_000_000_500, "endingTimestamp": 1_700_000_000_850}
    assert offsets(subscribe="t", **at) == [(500, 849, 350), (500, 849, 350)]
    late = {"startingTimestamp": 1_700_000_000_950, "startingOffsetsByTimestampStrategy": "latest"}
    assert offsets(subscribe="t", **late) == [(950, 999, 50)]


@pytest.mark.long
def test_filters_leave_out_tasks_where_spark_pushes_them_down(spark: Spark, world: World) -> None:
    for pushes in (False, True):
        where = "partition = 1 and offset >= 880 and offset < 903"
        assert spark.plan(world.options(subscribe="t"), where, pushes=pushes) == (2 if pushes else 3)
        assert [row["offset"] for row in spark.read()] == list(range(880, 903))
        where = "timestamp >= timestamp_millis(1700000000890) and topic = 't'"
        assert spark.plan(world.options(subscribe="t"), where, pushes=pushes) == 3
        assert len(spark.read()) == 10 + 110


def test_nothing_to_read_is_no_rows(spark: Spark, world: World) -> None:
    create_topic(world.bootstrap, "empty", 2)
    assert spark.read(world.options(subscribe="empty")) == []
    assert spark.read(world.options(subscribePattern="no-such-.*")) == []
    assert spark.plan(world.options(subscribe="t"), "partition = 17", pushes=True) <= 1
    assert spark.read() == []


def test_a_wrong_token_a_wrong_topic_and_a_misspelt_option_say_what_to_do(spark: Spark, world: World) -> None:
    assert "tidelog cluster read-token" in spark.refusal(world.options(subscribe="t", readToken="wrong"))
    assert "there is no topic 'u'" in spark.refusal(world.options(subscribe="u"))
    assert "did you mean startingOffsets?" in spark.refusal(world.options(subscribe="t", startingOffset="earliest"))
    beyond = world.options(subscribe="t", endingOffsets='{"t": {"0": 1, "1": 5000}}')
    assert "t-1 ends at offset 1000, before 5000" in spark.refusal(beyond)


def test_objects_that_are_replaced_and_deleted_after_the_plan_are_looked_up_again(spark: Spark, world: World) -> None:
    create_topic(world.bootstrap, "moved", 1)
    for number in range(4):
        world.produce("moved", 0, 50 * number, 50)
        world.upload()
    spark.plan(world.options(subscribe="moved", includeHeaders="true", maxBytesPerTask=2_000))
    objects = world.objects("moved")
    world.end_leases()
    world.compact()
    world.wait_deleted(objects)
    assert spark.read() == expected("moved", 0, 0, 200)


@pytest.mark.long
def test_a_plan_in_a_manifest_is_read_and_the_manifest_deleted_after_its_lease(spark: Spark, world: World) -> None:
    create_topic(world.bootstrap, "listed", 2)
    for number in range(3):
        for partition in range(2):
            world.produce("listed", partition, 50 * number, 50)
        world.upload()
    world.end_leases()
    before = world.bucket_ids()
    assert spark.plan(world.options(subscribe="listed", includeHeaders="true", maxSlicesInTasks=5)) == 2
    (manifest,) = world.bucket_ids() - before
    wanted = [*expected("listed", 0, 0, 150), *expected("listed", 1, 0, 150)]
    assert spark.read() == wanted
    assert world.bucket_ids() - before == {manifest}
    world.end_leases()
    world.wait_deleted({manifest})
    report = world.cli("object", "clean", "--dry-run", "--format", "json").json()
    assert (report["orphans"], [each["id"] for each in report["waiting"]]) == ([], [])
    assert spark.read() == wanted, "tasks look their objects up when the manifest is gone"


def branched(world: World, source: str, branch: str) -> list[Row]:
    """A topic with 150 records in three objects, its branch, and 30 and 60 more; return the rows of the branch."""
    create_topic(world.bootstrap, source, 1)
    for number in range(3):
        world.produce(source, 0, 50 * number, 50)
        if number < 2:
            world.upload()
    world.cli("snapshot", "create", f"of-{source}", "--topics", source)
    world.cli("topic", "branch", f"{source}@of-{source}", branch)
    world.produce(source, 0, 150, 30)
    world.produce(branch, 0, 1_000, 60)
    own = [row | {"offset": row["offset"] - 850} for row in expected(branch, 0, 1_000, 60)]
    return [*expected(branch, 0, 0, 150), *own]


def test_a_branch_is_read_with_what_it_shares_and_nothing_behind_its_cut(spark: Spark, world: World) -> None:
    rows = branched(world, "source", "branch")
    options = world.options(subscribe="source,branch", includeHeaders="true")
    wanted = [*rows, *expected("source", 0, 0, 180)]
    assert spark.read(options) == wanted, "what is its own is with the brokers"
    world.upload()
    assert spark.read(options | {"maxBytesPerTask": 2_000}) == wanted
    some = {"startingOffsets": '{"branch": {"0": 120}}', "endingOffsets": '{"branch": {"0": 170}}'}
    assert spark.read(world.options(subscribe="branch", includeHeaders="true", **some)) == rows[120:170]


@pytest.mark.long
@pytest.mark.parametrize("slices", [1_000, 1])
def test_a_branch_is_read_whatever_happens_to_its_topic_after_the_plan(spark: Spark, world: World, slices: int) -> None:
    source, branch = f"source-{slices}", f"branch-{slices}"
    rows = branched(world, source, branch)
    world.upload()
    options = world.options(subscribe=branch, includeHeaders="true", maxSlicesInTasks=slices, maxBytesPerTask=4_000)
    spark.plan(options)
    behind = world.objects(source) - world.objects(branch)
    world.end_leases()
    world.delete_records(source, 140)
    world.compact()
    assert spark.read() == rows, "without a lease, as what a branch holds is not deleted"
    assert spark.read(world.options(subscribe=source, includeHeaders="true")) == expected(source, 0, 140, 40)
    spark.plan(options)
    world.cli("snapshot", "delete", f"of-{source}", "--yes")
    world.cli("topic", "delete", source, "--yes")
    world.end_leases()
    world.wait_deleted(behind)
    assert spark.read() == rows
    spark.plan(options)
    assert spark.read() == rows
    world.delete_records(branch, 155)
    assert spark.read() == rows, "its lease keeps what the branch holds no longer"


@pytest.mark.long
def test_a_query_follows_a_branch_from_its_first_offset_through_a_kill(world: World, tmp_path: Path) -> None:
    rows = branched(world, "followed-source", "followed")
    options = world.options(
        subscribe="followed", includeHeaders="true", startingOffsets="earliest", maxOffsetsPerTrigger=40, tail="skip"
    )
    with Spark(tmp_path / "first") as spark:
        spark.stream(options, tmp_path, processingTime="1 second")
        until(lambda: len(list((tmp_path / "rows").glob("*.parquet"))) >= 2)
        spark.kill()
    world.delete_records("followed-source", 160)
    world.upload()
    world.compact()
    world.cli("snapshot", "delete", "of-followed-source", "--yes")
    world.cli("topic", "delete", "followed-source", "--yes")
    with Spark(tmp_path / "second") as spark:
        spark.stream(options, tmp_path, availableNow=True)
        spark.finish(120)
        assert spark.written(tmp_path) == rows


@pytest.mark.parametrize("fails", [True, False])
def test_records_that_are_deleted_after_the_plan_are_data_loss(spark: Spark, world: World, fails: bool) -> None:
    topic = f"deleted-{fails}".lower()
    create_topic(world.bootstrap, topic, 1)
    for number in range(2):
        world.produce(topic, 0, 50 * number, 50)
        world.upload()
    spark.plan(world.options(subscribe=topic, failOnDataLoss=str(fails).lower()))
    first = min(world.objects(topic))
    world.end_leases()
    world.delete_records(topic, 70)
    world.wait_deleted({first})
    if fails:
        told = spark.ask(read=True)
        assert f"{topic}-0: offsets 0 to 69 do not exist any more" in told["error"]
        return
    assert [row["offset"] for row in spark.read()] == list(range(70, 100))


@pytest.mark.parametrize("fails", [True, False])
def test_records_that_were_deleted_before_the_plan_are_data_loss_though_objects_have_them(
    spark: Spark, world: World, fails: bool
) -> None:
    topic = f"deleted-before-{fails}".lower()
    create_topic(world.bootstrap, topic, 1)
    world.produce(topic, 0, 0, 50)
    world.upload()
    place = TopicPartition(topic, 0, 20)
    world.connection.admin.delete_records([place])[place].result(60)
    offsets = json.dumps({topic: {"0": 5}})
    options = world.options(subscribe=topic, startingOffsets=offsets, failOnDataLoss=str(fails).lower())
    if fails:
        assert f"{topic}-0: offsets 5 to 19 do not exist any more" in spark.refusal(options)
        return
    assert [row["offset"] for row in spark.read(options)] == list(range(20, 50))


@pytest.mark.parametrize("fails", [True, False])
def test_records_of_the_tail_that_are_deleted_after_the_plan_are_data_loss(
    spark: Spark, world: World, fails: bool
) -> None:
    topic = f"deleted-tail-{fails}".lower()
    create_topic(world.bootstrap, topic, 1)
    world.produce(topic, 0, 0, 50)
    spark.plan(world.options(subscribe=topic, failOnDataLoss=str(fails).lower()))
    place = TopicPartition(topic, 0, 20)
    world.connection.admin.delete_records([place])[place].result(60)
    if fails:
        assert f"{topic}-0: offsets 0 to 19 do not exist any more" in spark.ask(read=True)["error"]
        return
    assert [row["offset"] for row in spark.read()] == list(range(20, 50))


@pytest.mark.long
def test_a_compacted_topic_has_holes_and_no_data_loss(spark: Spark, world: World) -> None:
    """Planned and read before its compaction and after it, and planned before and read when its objects are gone."""
    policy = {"cleanup.policy": "compact", "segment.bytes": "4000", "min.cleanable.dirty.ratio": "0.01"}
    create_topic(world.bootstrap, "table", 1, **policy)
    producer = Producer({"bootstrap.servers": world.bootstrap, "batch.num.messages": 7})
    last: dict[str, int] = {}
    for at in range(600):
        last[f"key {at % 23}"] = at
        producer.produce("table", f"value {at}", f"key {at % 23}", partition=0)
    assert producer.flush(60) == 0
    world.upload()
    options = world.options(subscribe="table", failOnDataLoss="true", maxBytesPerTask=2_000)
    spark.plan(options)
    objects = world.objects("table")

    def values() -> dict[str, int]:
        rows = spark.read()
        offsets = [row["offset"] for row in rows]
        assert offsets == sorted(set(offsets))
        assert all(row["value"] == (b"value %d" % row["offset"]).hex() for row in rows)
        return {bytes.fromhex(row["key"]).decode(): row["offset"] for row in rows}

    assert (len(spark.read()), values()) == (600, last)

    def compacted() -> bool:
        world.upload()  # the checkpoint that a round goes up to
        (row,) = world.cli("topic", "describe", "table", "--format", "json").json()[0]["partitions"]
        return bool(row["last_cleaned_ms"])

    until(compacted)
    assert (len(spark.read()), values()) == (600, last), "as long as the lease goes on"
    world.end_leases()
    world.wait_deleted(objects)
    left = len(spark.read())
    assert (left < 200, values()) == (True, last), "tasks look their objects up again"
    spark.plan(options)
    assert (len(spark.read()), values()) == (left, last)
