"""The job `backfill` with a real Spark, from one cluster into another: offsets, holes, killed, and run again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Row, Spark, World, expected
from tests.support.cli import environment, until
from tests.support.cluster_process import up_cluster
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs a Java runtime"),
]
STEPS = "tests.pyspark_tidelog.job_steps"
LOCAL = ("--master", "local[2]", "--conf", "spark.ui.enabled=false")
ONE_AT_A_TIME = ("--option", "kafka.batch.num.messages=1", "--option", "kafka.max.in.flight=1")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    found = Spark(tmp_path_factory.mktemp("spark"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Topic `t`: 300 records in partition 0, 200 in partition 1. Topic `trimmed`: 80 to 100."""
    with up_cluster(tmp_path_factory.mktemp("old") / "data", brokers=2, flags=FLAGS) as up:
        found = World(up)
        create_topic(up.bootstrap, "t", 3, **{"max.message.bytes": "900000"})
        found.produce("t", 0, 0, 300)
        found.produce("t", 1, 0, 200)
        create_topic(up.bootstrap, "trimmed", 1)
        found.produce("trimmed", 0, 0, 100)
        found.upload()
        found.delete_records("trimmed", 80)
        yield found


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with up_cluster(tmp_path_factory.mktemp("new") / "data", brokers=2, flags=FLAGS) as up:
        yield World(up)


def told(spark: Spark, old: World, new: World, topic: str, **more: Any) -> Any:
    arguments = {"bootstrap": new.bootstrap, "source": old.bootstrap, "topic": topic, **more}
    return spark.ask(**{"call": f"{STEPS}:backfill", "with": arguments})


def backfill(spark: Spark, old: World, new: World, topic: str, **more: Any) -> Any:
    answer = told(spark, old, new, topic, **more)
    assert "ok" in answer, answer["error"]
    return answer["ok"]


def rows_of(spark: Spark, world: World, topic: str) -> list[Row]:
    return spark.read(world.options(subscribe=topic, includeHeaders="true"))


def test_a_topic_comes_with_its_offsets_and_goes_on_with_what_is_new(spark: Spark, old: World, new: World) -> None:
    done = backfill(spark, old, new, "t")
    assert (done["records"], done["found"], done["filled"]) == (500, 0, 0)
    assert rows_of(spark, new, "t") == [*expected("t", 0, 0, 300), *expected("t", 1, 0, 200)]
    assert "max.message.bytes=900000" in new.cli("topic", "describe", "t").text
    old.produce("t", 0, 300, 10)
    old.produce("t", 2, 0, 5)
    done = backfill(spark, old, new, "t")
    assert (done["records"], done["found"]) == (15, 500)
    assert [one["target_end"] for one in done["ranges"]] == [310, 200, 5]
    assert rows_of(spark, new, "t") == [*expected("t", 0, 0, 310), *expected("t", 1, 0, 200), *expected("t", 2, 0, 5)]
    new.produce("t", 2, 5, 1)
    assert "t-2 is no copy of t" in told(spark, old, new, "t")["error"]


def test_offsets_that_retention_has_removed_are_refused_or_filled_or_given_up(
    spark: Spark, old: World, new: World
) -> None:
    error = told(spark, old, new, "trimmed")["error"]
    assert "trimmed-0: offset 0 has no record" in error and "--fill-holes" in error
    done = backfill(spark, old, new, "trimmed", fills_holes=True)
    assert (done["records"], done["filled"]) == (20, 80)
    assert new.connection.offsets([("trimmed", 0)])["trimmed", 0][:2] == (80, 100)
    assert rows_of(spark, new, "trimmed") == expected("trimmed", 0, 80, 20)
    old.produce("trimmed", 0, 100, 10)
    assert backfill(spark, old, new, "trimmed")["records"] == 10
    done = backfill(spark, old, new, "trimmed", to_topic="renumbered", keeps_offsets=False)
    assert (done["records"], done["filled"]) == (30, 0)
    wanted = [{**each, "offset": each["offset"] - 80} for each in expected("renumbered", 0, 80, 30)]
    assert rows_of(spark, new, "renumbered") == wanted


def test_a_source_that_is_not_right_is_said(spark: Spark, old: World, new: World) -> None:
    assert "there is no topic 'nothing'" in told(spark, old, new, "nothing")["error"]
    create_topic(new.bootstrap, "narrow", 2)
    assert "has 2 partitions, and t has 3" in told(spark, old, new, "t", to_topic="narrow")["error"]
    more = ("--bootstrap", new.bootstrap, "--dry-run")
    dead = f"127.0.0.1:{free_port()}"
    assert "no broker answers at" in new.cli("spark", "backfill", "t", "--from-bootstrap", dead, *more, code=5).err
    both = ("--renumber", "--fill-holes")
    assert "one of the two" in new.cli("spark", "backfill", "t", "--from-bootstrap", dead, *both, *more, code=2).err
    wrong = ("--from-kafka", "no.such=1")
    assert "not right" in new.cli("spark", "backfill", "t", "--from-bootstrap", dead, *wrong, *more, code=2).err
    text = new.cli("spark", "backfill", "t", "--from-bootstrap", old.bootstrap, "--to", "u", *more).text
    assert "u, which would be created, with their offsets, in 3 tasks" in text
    assert "u" not in new.cli("topic", "list").text.split()


def test_a_backfill_that_was_killed_goes_on_where_it_was(spark: Spark, old: World, new: World, tmp_path: Path) -> None:
    create_topic(old.bootstrap, "long", 1)
    old.produce("long", 0, 0, 700)
    arguments = ("spark", "backfill", "long", "--from-bootstrap", old.bootstrap, *LOCAL)
    command = [sys.executable, "-m", "tidelog", *arguments, *ONE_AT_A_TIME]

    def end() -> int:
        if "long" not in new.connection.metadata().topics:
            return 0
        return new.connection.offsets([("long", 0)])["long", 0].high_watermark

    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(new.bootstrap), start_new_session=True
        )
        until(lambda: end() > 20 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    written = end()
    assert 20 < written < 700, (tmp_path / "log").read_text()
    done = new.cli(*arguments, "--format", "json").json()
    assert done["found"] >= written and done["records"] == 700 - done["found"]
    assert rows_of(spark, new, "long") == expected("long", 0, 0, 700)
