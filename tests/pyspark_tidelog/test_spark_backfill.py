"""The job `backfill` with a real Spark, from one cluster into another: offsets, holes, killed, and run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Spark, World, expected
from tests.pyspark_tidelog.job_harness import LOCAL, MARKS, JobWorld, answer, error, killed, rows_of
from tests.support.cluster_process import up_cluster
from tests.support.ports import free_port
from tidelog.runtime.errors import Unavailable

pytestmark = MARKS


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Topic `h`: 300 records in partition 0, 200 in partition 1. Topic `trimmed`: 80 to 100."""
    with up_cluster(tmp_path_factory.mktemp("old") / "data", brokers=2, flags=FLAGS) as up:
        found = World(up)
        create_topic(up.bootstrap, "h", 3, **{"max.message.bytes": "900000"})
        found.produce("h", 0, 0, 300)
        found.produce("h", 1, 0, 200)
        create_topic(up.bootstrap, "trimmed", 1)
        found.produce("trimmed", 0, 0, 100)
        found.upload()
        found.delete_records("trimmed", 80)
        yield found


def backfill(spark: Spark, old: World, world: JobWorld, topic: str, **more: Any) -> Any:
    return answer(spark, "backfill", {"bootstrap": world.bootstrap, "source": old.bootstrap, "topic": topic, **more})


def refusal(spark: Spark, old: World, world: JobWorld, topic: str, **more: Any) -> str:
    return error(spark, "backfill", {"bootstrap": world.bootstrap, "source": old.bootstrap, "topic": topic, **more})


@pytest.mark.long
def test_a_topic_comes_with_its_offsets_and_goes_on_with_what_is_new(spark: Spark, old: World, world: JobWorld) -> None:
    done = backfill(spark, old, world, "h")
    assert (done["records"], done["found"], done["filled"]) == (500, 0, 0)
    assert rows_of(spark, world, "h") == [*expected("h", 0, 0, 300), *expected("h", 1, 0, 200)]
    assert "max.message.bytes=900000" in world.cli("topic", "describe", "h").text
    old.produce("h", 0, 300, 10)
    old.produce("h", 2, 0, 5)
    done = backfill(spark, old, world, "h")
    assert (done["records"], done["found"]) == (15, 500)
    assert [one["target_end"] for one in done["ranges"]] == [310, 200, 5]
    assert rows_of(spark, world, "h") == [*expected("h", 0, 0, 310), *expected("h", 1, 0, 200), *expected("h", 2, 0, 5)]
    world.produce("h", 2, 5, 1)
    assert "h-2 is no copy of h" in refusal(spark, old, world, "h")


@pytest.mark.long
def test_offsets_that_retention_has_removed_are_refused_or_filled_or_given_up(
    spark: Spark, old: World, world: JobWorld
) -> None:
    error = refusal(spark, old, world, "trimmed")
    assert "trimmed-0: offset 0 has no record" in error and "--fill-holes" in error
    done = backfill(spark, old, world, "trimmed", fills_holes=True)
    assert (done["records"], done["filled"]) == (20, 80)
    assert world.connection.offsets([("trimmed", 0)])["trimmed", 0][:2] == (80, 100)
    assert rows_of(spark, world, "trimmed") == expected("trimmed", 0, 80, 20)
    old.produce("trimmed", 0, 100, 10)
    assert backfill(spark, old, world, "trimmed")["records"] == 10
    done = backfill(spark, old, world, "trimmed", to_topic="renumbered", keeps_offsets=False)
    assert (done["records"], done["filled"]) == (30, 0)
    wanted = [{**each, "offset": each["offset"] - 80} for each in expected("renumbered", 0, 80, 30)]
    assert rows_of(spark, world, "renumbered") == wanted


@pytest.mark.long
def test_a_source_that_is_not_right_is_said(spark: Spark, old: World, world: JobWorld) -> None:
    assert "there is no topic 'nothing'" in refusal(spark, old, world, "nothing")
    create_topic(world.bootstrap, "narrow", 2)
    assert "has 2 partitions, and h has 3" in refusal(spark, old, world, "h", to_topic="narrow")
    more = ("--bootstrap", world.bootstrap, "--dry-run")
    dead = f"127.0.0.1:{free_port()}"
    assert "no broker answers at" in world.cli("spark", "backfill", "h", "--from-bootstrap", dead, *more, code=5).err
    both = ("--renumber", "--fill-holes")
    assert "one of the two" in world.cli("spark", "backfill", "h", "--from-bootstrap", dead, *both, *more, code=2).err
    wrong = ("--from-kafka", "no.such=1")
    assert "not right" in world.cli("spark", "backfill", "h", "--from-bootstrap", dead, *wrong, *more, code=2).err
    text = world.cli("spark", "backfill", "h", "--from-bootstrap", old.bootstrap, "--to", "u", *more).text
    assert "u, which would be created, with their offsets, in " in text
    assert "u" not in world.cli("topic", "list").text.split()


@pytest.mark.long
def test_a_backfill_that_was_killed_goes_on_where_it_was(
    spark: Spark, old: World, world: JobWorld, tmp_path: Path
) -> None:
    create_topic(old.bootstrap, "long", 1)
    old.produce("long", 0, 0, 700)
    command = ("backfill", "long", "--from-bootstrap", old.bootstrap)

    def end() -> int:
        if "long" not in world.connection.metadata().topics:
            return 0
        try:
            return world.connection.offsets([("long", 0)])["long", 0].high_watermark
        except Unavailable:  # it has no leader yet
            return 0

    killed(world.bootstrap, command, lambda: end() > 20, tmp_path / "log")
    written = end()
    assert 20 < written < 700, (tmp_path / "log").read_text()
    done = world.cli("spark", *command, "--format", "json", *LOCAL).json()
    assert done["found"] >= written and done["records"] == 700 - done["found"]
    assert rows_of(spark, world, "long") == expected("long", 0, 0, 700)
