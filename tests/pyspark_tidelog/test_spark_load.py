"""The job `load` with a real Spark and a real cluster: files of each format, frames, and rows that are no records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import Row, Spark, World
from tests.pyspark_tidelog.job_harness import MARKS, answer, error

pytestmark = MARKS


@pytest.fixture
def topic(world: World, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name)[:100].replace("[", "-").replace("]", "")
    create_topic(world.bootstrap, name, 2, **{"max.message.bytes": "5000"})
    return name


def load(spark: Spark, world: World, topic: str, *paths: Path, **more: Any) -> Any:
    return answer(spark, "load", _arguments(world, topic, paths, more))


def refusal(spark: Spark, world: World, topic: str, *paths: Path, **more: Any) -> str:
    return error(spark, "load", _arguments(world, topic, paths, more))


def _arguments(world: World, topic: str, paths: tuple[Path, ...], more: dict[str, Any]) -> dict[str, Any]:
    return {"bootstrap": world.bootstrap, "topic": topic, "paths": list(map(str, paths)), **more}


def records(spark: Spark, world: World, topic: str) -> list[Row]:
    """The records, with keys and values as text, by key."""
    rows = spark.read(world.options(subscribe=topic))
    for row in rows:
        for name in ("key", "value"):
            row[name] = None if row[name] is None else bytes.fromhex(row[name]).decode()
    return sorted(rows, key=lambda row: (row["key"] or "", row["value"] or ""))


@pytest.mark.long
def test_csv_rows_become_json_and_are_refused_a_second_time(
    spark: Spark, world: World, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("id,name\n1,one\n2,\n")
    (tmp_path / "b.csv").write_text("id,name\n3,drei ü\n")
    reader = {"header": "true", "inferSchema": "true"}
    assert load(spark, world, topic, tmp_path, format="csv", read=reader, key="id")["records"] == 3
    found = records(spark, world, topic)
    assert [each["key"] for each in found] == ["1", "2", "3"]
    wanted = [{"id": 1, "name": "one"}, {"id": 2, "name": None}, {"id": 3, "name": "drei ü"}]
    assert [json.loads(each["value"]) for each in found] == wanted
    more = {"format": "csv", "read": reader}
    assert "has 3 records" in refusal(spark, world, topic, tmp_path, **more)
    assert load(spark, world, topic, tmp_path / "b.csv", read=reader, appends=True, value="name")["records"] == 1
    assert records(spark, world, topic)[0]["value"] == "drei ü"


@pytest.mark.long
def test_parquet_columns_become_key_value_and_timestamp(spark: Spark, world: World, topic: str, tmp_path: Path) -> None:
    sql = (
        "select cast(id as string) as k, if(id = 5, null, encode(concat('v', id), 'UTF-8')) as v,"
        " timestamp_millis(1700000000000 + id) as t, named_struct('id', id) as s from range(200)"
    )
    answer(spark, "write_parquet", {"sql": sql, "path": str(tmp_path / "rows.parquet")})
    done = load(spark, world, topic, tmp_path / "rows.parquet", key="k", value="v", timestamp="t")
    assert done == {"topic": topic, "records": 200}
    found = records(spark, world, topic)
    wanted = sorted((str(at), None if at == 5 else f"v{at}", 1_700_000_000_000 + at) for at in range(200))
    assert [(each["key"], each["value"], each["timestamp"]) for each in found] == wanted
    load(spark, world, topic, tmp_path / "rows.parquet", value="s", appends=True)
    assert '{"id":7}' in [each["value"] for each in records(spark, world, topic)]


def test_timestamps_keep_their_microseconds(spark: Spark, world: World, topic: str) -> None:
    instant = "timestamp_micros(-62135596799999999 + {} * 315537897599999998)"
    sql = (
        f"select id, {instant.format('id')} as at, cast('2024-01-01 00:00:00.000007' as timestamp_ntz) as plain,"
        f" struct({instant.format('id')} as at) as inside from range(2)"
    )
    for value in ("json", "inside"):
        assert load(spark, world, topic, sql=sql, key="id", value=value, appends=True)["records"] == 2
    times = ["0001-01-01T00:00:00.000001Z", "9999-12-31T23:59:59.999999Z"]
    plain = "2024-01-01T00:00:00.000007"
    assert [json.loads(each["value"]) for each in records(spark, world, topic)] == [
        wanted
        for at, time in enumerate(times)
        for wanted in ({"at": time}, {"id": at, "at": time, "plain": plain, "inside": {"at": time}})
    ]


@pytest.mark.long
def test_malformed_and_large_rows_are_told_with_file_and_row_and_nothing_is_written(
    spark: Spark, world: World, topic: str, tmp_path: Path
) -> None:
    lines = [json.dumps({"id": at, "text": "x" * 10}) for at in range(300)]
    (tmp_path / "good.json").write_text("\n".join(lines))
    lines[41] = '{"id": 41, "te'
    lines[170] = json.dumps({"id": 170, "text": "y" * 6_000})
    (tmp_path / "bad.json").write_text("\n".join(lines))
    told = refusal(spark, world, topic, tmp_path / "*.json")
    assert "2 of 600 rows cannot be records, and nothing was written" in told
    assert 'bad.json row 42: it is malformed: {"id": 41, "te' in told
    assert "bad.json row 171: it has 60" in told and "max.message.bytes is 5000" in told
    sql = "select if(id = 3, repeat('z', 6000), 'v') as v from range(10)"
    told = refusal(spark, world, topic, sql=sql, value="v")
    assert "1 of 10 rows cannot be records" in told and "it has 6000 bytes" in told
    assert records(spark, world, topic) == []
    assert load(spark, world, topic, tmp_path / "good.json")["records"] == 300
    sql = "select concat('v', id) as v from range(10)"
    assert load(spark, world, topic, sql=sql, value="v", key="v", appends=True)["records"] == 10


@pytest.mark.long
def test_a_bad_csv_row_in_a_schema_that_was_given_is_told(
    spark: Spark, world: World, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "n.csv").write_text("id,at\n" + "".join(f"{at},2024-01-01\n" for at in range(30)) + "1,2,3\n")
    told = refusal(spark, world, topic, tmp_path / "n.csv", read={"header": "true", "inferSchema": "true"})
    assert "n.csv row 31: it is malformed: 1,2,3" in told


def test_a_timestamp_that_is_none_is_told_and_nothing_is_written(
    spark: Spark, world: World, topic: str, tmp_path: Path
) -> None:
    rows = "".join(f"{at},2024-01-01T00:00:0{at}Z\n" for at in range(9))
    (tmp_path / "at.csv").write_text(f"id,at\n{rows}9,soon\n10,\n")
    more: dict[str, Any] = {"read": {"header": "true"}, "key": "id", "timestamp": "at"}
    told = refusal(spark, world, topic, tmp_path / "at.csv", **more)
    assert "1 of 11 rows cannot be records, and nothing was written" in told
    assert "at.csv row 10: its timestamp is soon" in told
    assert records(spark, world, topic) == []
    (tmp_path / "at.csv").write_text(f"id,at\n{rows}")
    assert load(spark, world, topic, tmp_path / "at.csv", **more)["records"] == 9
    assert records(spark, world, topic)[8]["timestamp"] == 1_704_067_208_000


@pytest.mark.long
def test_a_timestamp_that_the_topic_refuses_is_told_and_nothing_is_written(
    spark: Spark, world: World, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "late.csv").write_text("id,at\n1,2024-01-01T00:00:00Z\n2,2999-01-01T00:00:00Z\n")
    more: dict[str, Any] = {"read": {"header": "true"}, "key": "id", "timestamp": "at"}
    told = refusal(spark, world, topic, tmp_path / "late.csv", **more)
    assert "late.csv row 2: its timestamp is 2999-01-01T00:00:00Z, beyond the topic's message.timestamp" in told
    assert records(spark, world, topic) == []
    world.cli("topic", "alter", topic, "--config", f"message.timestamp.after.max.ms={(1 << 63) - 1}")
    assert load(spark, world, topic, tmp_path / "late.csv", **more)["records"] == 2


@pytest.mark.long
def test_names_of_columns_may_have_dots_and_backticks(spark: Spark, world: World, topic: str, tmp_path: Path) -> None:
    (tmp_path / "names.csv").write_text("a.b,c`d\n1,2\n")
    assert load(spark, world, topic, tmp_path / "names.csv", read={"header": "true"}, key="c`d")["records"] == 1
    (found,) = records(spark, world, topic)
    assert (found["key"], json.loads(found["value"])) == ("2", {"a.b": "1", "c`d": "2"})


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "nul\n"], ids=["empty", "malformed"])
def test_files_without_any_column_are_told(spark: Spark, world: World, topic: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "none.json").write_text(text)
    assert "none.json has no column: is there any row?" in refusal(spark, world, topic, tmp_path / "none.json")


def test_what_is_not_right_is_refused_before_a_row_is_read(
    spark: Spark, world: World, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("id\n1\n")
    assert "no topic 'nothing'" in refusal(spark, world, "nothing", tmp_path / "x.csv")
    assert "is not known" in refusal(spark, world, topic, tmp_path / "x.data")
    assert "PATH_NOT_FOUND" in refusal(spark, world, topic, tmp_path / "no.csv")
    assert "no file is named" in refusal(spark, world, topic)
    header = {"header": "true"}
    assert "--key names 'k'; the rows have the columns id" in refusal(
        spark, world, topic, tmp_path / "x.csv", key="k", read=header
    )
    plan = world.cli("spark", "load", topic, tmp_path / "x.csv", "--dry-run", "--format", "json").json()
    assert plan == {"topic": topic, "format": "csv", "files": 1, "bytes": 5, "records_there": 0}
    assert "there is no file" in world.cli("spark", "load", topic, tmp_path / "n.csv", "--dry-run", code=3).err
    assert load(spark, world, topic, tmp_path / "x.csv", read=header)["records"] == 1


@pytest.mark.long
def test_the_command_loads_parquet_files(spark: Spark, world: World, topic: str, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / "x.parquet")
    told = world.cli("spark", "load", topic, tmp_path / "x.parquet", "--key", "id", "--format", "json").json()
    assert told == {"topic": topic, "records": 2}
    assert [each["key"] for each in records(spark, world, topic)] == ["1", "2"]


@pytest.mark.long
def test_an_empty_file_is_no_rows(spark: Spark, world: World, topic: str, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("id\n")
    assert load(spark, world, topic, tmp_path / "empty.csv", read={"header": "true"})["records"] == 0
