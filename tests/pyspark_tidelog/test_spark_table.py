"""`tidelog spark table` with a real Spark and a real cluster. DuckDB reads the data files that the table's current
snapshot has: it shares no code with what wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyiceberg.table import Table

from pyspark_tidelog.jobs.table.job import QUARANTINE_OF
from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Row, Spark, World, expected
from tests.support.cluster_process import up_cluster
from tests.support.lake import Warehouse

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]
CALLS = "tests.pyspark_tidelog.table_steps"
Told = dict[str, Any]
TABLE = "lake.t"


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    found = Spark(tmp_path_factory.mktemp("spark"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        yield World(up)


class Lake(Warehouse):
    """A warehouse, and a topic of two partitions that becomes a table in it."""

    def __init__(self, spark: Spark, world: World, topic: str, warehouse: Path) -> None:
        super().__init__(warehouse)
        self.spark = spark
        self.world = world
        self.topic = topic
        create_topic(world.bootstrap, topic, 2)
        self.values: list[tuple[int, int, bytes | None, bytes | None]] = []
        """What was produced: partition, offset, key, value."""
        self._ends = [0, 0]

    def produce(self, records: list[tuple[int, bytes | None, bytes | None]]) -> None:
        """Write records: partition, key, value."""
        producer = Producer({"bootstrap.servers": self.world.bootstrap, "linger.ms": 5})
        for partition, key, value in records:
            producer.produce(self.topic, partition=partition, key=key, value=value)
            self.values.append((partition, self._ends[partition], key, value))
            self._ends[partition] += 1
        assert producer.flush(60) == 0

    def call(self, function: str, spark: Spark | None = None, **more: Any) -> Any:
        world = self.world
        given = {"bootstrap": world.bootstrap, "token": world.token, "topic": self.topic, **more}
        return (spark or self.spark).ask(
            **{"call": f"{CALLS}:{function}", "with": {**given, "warehouse": str(self.warehouse)}}
        )

    def ingest(self, **more: Any) -> Told:
        told = self.call("ingest", **more)
        assert "ok" in told, told["error"]
        return dict(told["ok"])

    def refusal(self, **more: Any) -> str:
        return str(self.call("ingest", **more)["error"])

    def table(self, name: str = TABLE) -> Table:
        return super().table(name)

    def rows(self, name: str = TABLE) -> list[Row]:
        return super().rows(name)

    def places(self, name: str = TABLE) -> list[tuple[int, int]]:
        return [(row["_partition"], row["_offset"]) for row in self.rows(name)]

    def strays(self, *names: str) -> list[Path]:
        return super().strays(*names or (TABLE, f"{TABLE}_quarantine"))


@pytest.fixture
def lake(spark: Spark, world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Lake:
    name = request.node.name.replace("[", ".").replace("]", "")
    return Lake(spark, world, name, tmp_path / "lake")


def as_raw(topic: str, partition: int, first: int, count: int) -> list[Row]:
    """What `World.produce` has written, as rows of a raw table."""
    found = []
    for row in expected(topic, partition, first, count):
        headers = row["headers"]
        found.append(
            {
                "_topic": topic,
                "_partition": partition,
                "_offset": row["offset"],
                "_timestamp": datetime.fromtimestamp(row["timestamp"] / 1_000, UTC),
                "key": None if row["key"] is None else bytes.fromhex(row["key"]),
                "value": None if row["value"] is None else bytes.fromhex(row["value"]),
                "headers": headers
                and [
                    {"key": each["key"], "value": None if each["value"] is None else bytes.fromhex(each["value"])}
                    for each in headers
                ],
            }
        )
    return found


@pytest.mark.long
def test_a_raw_table_has_the_topic_row_by_row_however_often_the_job_runs(lake: Lake) -> None:
    world, topic = lake.world, lake.topic
    for partition in range(2):
        world.produce(topic, partition, 0, 150)
    world.upload()
    world.produce(topic, 1, 150, 50)
    told = lake.ingest(max_offsets=100, partition_by=["day(_timestamp)"])
    assert (told["commits"], told["offsets"], told["rows"], told["quarantined"]) == (4, 350, 350, 0)
    wanted = [*as_raw(topic, 0, 0, 150), *as_raw(topic, 1, 0, 200)]
    assert lake.rows() == wanted
    assert lake.ingest()["commits"] == 0
    before = len(list(lake.table().scan().plan_files()))
    squeezed = lake.spark.ask(
        **{
            "call": f"{CALLS}:compact",
            "with": {"table": "lake.t", "warehouse": str(lake.warehouse), "file_bytes": 1 << 20},
        }
    )["ok"]
    assert (squeezed["rewritten"], squeezed["written"]) == (before, 1)
    assert lake.rows() == wanted
    lake.table().maintenance.expire_snapshots().by_ids(
        [each.snapshot_id for each in lake.table().snapshots()][:-1]
    ).commit()
    world.produce(topic, 0, 150, 30)
    assert lake.ingest()["offsets"] == 30
    assert lake.rows() == sorted(
        [*wanted, *as_raw(topic, 0, 150, 30)], key=lambda row: (row["_partition"], row["_offset"])
    )
    assert lake.markers() == []


@pytest.mark.long
def test_columns_follow_the_fields_of_json_and_what_does_not_fit_is_in_the_quarantine(lake: Lake) -> None:
    def value(at: int) -> bytes | None:
        if at % 40 == 7:
            return b"{broken"
        told: Told = {"id": at, "name": f"n{at}"}
        if at % 40 == 9:
            told["id"] = "not a number"
        if at > 100:
            told["more"] = {"x": at / 2, "tags": ["a", None]}
        if at > 150:
            told["more"]["late"] = True
        return None if at % 40 == 11 else json.dumps(told).encode()

    lake.produce([(at % 2, b"k%d" % at, value(at)) for at in range(200)])
    told = lake.ingest(schema="json", max_offsets=60)
    bad = [each for each in lake.values if each[3] is not None and (b"broken" in each[3] or b"not a" in each[3])]
    assert (told["rows"], told["quarantined"], told["commits"]) == (200 - len(bad), len(bad), 4)
    rows = {(row["_partition"], row["_offset"]): row for row in lake.rows()}
    assert len(rows) == 200 - len(bad)
    for partition, offset, key, text in lake.values:
        if (partition, offset, key, text) in bad:
            assert (partition, offset) not in rows
            continue
        row = rows[partition, offset]
        fields = json.loads(text) if text is not None else {}
        more = fields.get("more")
        assert (row["_key"], row["id"], row["name"]) == (key, fields.get("id"), fields.get("name"))
        assert row["more"] == (more and {"x": more["x"], "tags": more["tags"], "late": more.get("late")})
    kept = [(row["_partition"], row["_offset"], row["key"], row["value"]) for row in lake.rows("lake.t_quarantine")]
    assert kept == sorted(bad)
    reasons = {row["reason"] for row in lake.rows("lake.t_quarantine")}
    assert any("id: 'not a number' is no long" in each for each in reasons)
    assert str(lake.table().schema().find_field("more.late").field_type) == "boolean"


@pytest.mark.long
def test_given_columns_are_widened_and_other_fields_left_out_or_quarantined(lake: Lake) -> None:
    lake.produce([(0, None, b'{"id": 1, "f": 0.5, "other": 1}')])
    lake.ingest(schema="id int, f float, at timestamp", new_fields="quarantine")
    assert len(lake.rows("lake.t_quarantine")) == 1
    lake.produce([(0, None, b'{"id": 2, "f": 0.5}')])
    lake.ingest(schema="id int, f float, at timestamp", new_fields="ignore")
    lake.produce([(0, None, b'{"id": 5000000000, "f": 1e100, "at": "2024-01-01T00:00:00Z", "new": [1]}')])
    lake.ingest(schema="id int, f float, at timestamp", new_fields="add")
    assert [str(lake.table().schema().find_field(name).field_type) for name in ("id", "f")] == ["long", "double"]
    found = lake.table().scan().to_arrow().select(["_offset", "id", "f", "new"]).to_pylist()
    assert sorted(tuple(row.values()) for row in found) == [(1, 2, 0.5, None), (2, 5_000_000_000, 1e100, [1])]


@pytest.mark.parametrize("by", ["_key", pytest.param("id", marks=pytest.mark.long)])
def test_an_upsert_keeps_the_last_record_of_each_key_and_a_null_value_deletes_it(lake: Lake, by: str) -> None:
    wanted: dict[bytes, int] = {}

    def records(count: int, first: int) -> list[tuple[int, bytes | None, bytes | None]]:
        found: list[tuple[int, bytes | None, bytes | None]] = []
        for at in range(first, first + count):
            number = at * 7 % 31
            key = b"%d" % number
            if at % 5 == 3:
                found.append((number % 2, key, None))
                wanted.pop(key, None)
            else:
                found.append((number % 2, key, b'{"id": %d, "v": %d}' % (number, at)))
                wanted[key] = at
        return found

    lake.produce(records(120, 0))
    more: Told = {"schema": "json", "upsert_by": [by]}
    lake.ingest(max_offsets=37, **more)
    assert {row["_key"]: row["v"] for row in lake.rows()} == wanted
    assert len(lake.rows()) == len(wanted)
    lake.produce(records(40, 120))
    lake.produce([(0, None, None), (1, b"x", b"[]")])
    told = lake.ingest(**more)
    assert (told["commits"], told["quarantined"]) == (1, 2)
    assert {row["_key"]: row["v"] for row in lake.rows()} == wanted
    assert len(lake.rows()) == len(wanted)
    assert "upserted by" in lake.refusal(schema="json")
    assert (lake.strays(), lake.markers()) == ([], [])


@pytest.mark.gate_cases("commit-append")
@pytest.mark.parametrize(
    ("step", "upsert"),
    [
        ("files", ["_key"]),
        ("commit", []),
        pytest.param("files", [], marks=pytest.mark.long),
        pytest.param("commit", ["_key"], marks=pytest.mark.long),
        pytest.param("quarantine", [], marks=pytest.mark.long),
    ],
    ids=lambda each: each if isinstance(each, str) else "upsert" if each else "append",
)
def test_after_a_kill_at_any_step_the_next_run_leaves_the_table_equal_to_the_topic(
    lake: Lake, tmp_path: Path, step: str, upsert: list[str]
) -> None:
    lake.produce([(at % 2, b"%d" % at, b"{" if at % 10 == 3 else b'{"v": %d}' % at) for at in range(60)])
    more: Told = {"schema": "json", "upsert_by": upsert}
    lake.ingest(max_offsets=40, **more)
    lake.produce(
        [(at % 2, b"%d" % (at + 60 * (not upsert)), b"{" if at % 10 == 5 else b'{"v": 1}') for at in range(60)]
    )
    driver = Spark(tmp_path)
    with pytest.raises(AssertionError, match="Spark has ended"):
        lake.call("ingest", driver, die_at=step, max_offsets=30, **more)
    driver.close()
    committed = step != "files"
    told = lake.ingest(max_offsets=50, **more)
    assert told["offsets"] == (30 if committed else 60)
    bad = [(partition, offset) for partition, offset, _, value in lake.values if value == b"{"]
    assert lake.places("lake.t_quarantine") == sorted(bad)
    last = {key: (partition, offset) for partition, offset, key, value in lake.values if value != b"{"}
    assert lake.places() == sorted(last.values())
    assert (lake.strays(), lake.markers()) == ([], [])
    assert told["removed_files"] > 0 or committed


@pytest.mark.gate_cases("both-live")
@pytest.mark.parametrize("stops", [False, True], ids=["both-live", "winner-stops"])
def test_of_two_jobs_at_once_one_gives_up_and_nothing_is_doubled_or_lost(lake: Lake, stops: bool) -> None:
    lake.produce([(at % 2, None, b"{" if at % 9 == 4 else b'{"v": %d}' % at) for at in range(50)])
    told = lake.call("two_at_once", schema="json", stops=stops)["ok"]
    assert told["second"] == "stopped" if stops else told["second"]["offsets"] == 50
    assert "another job has written to table lake.t" in told["first"]
    lake.ingest(schema="json")
    assert lake.places() == sorted((partition, offset) for partition, offset, _, value in lake.values if value != b"{")
    bad = sorted((partition, offset) for partition, offset, _, value in lake.values if value == b"{")
    assert lake.places("lake.t_quarantine") == bad
    assert (lake.strays(), lake.markers()) == ([], [])


def test_a_quarantine_belongs_to_one_table(lake: Lake) -> None:
    other = Lake(lake.spark, lake.world, f"{lake.topic}-other", lake.warehouse)
    for each in (lake, other):
        each.produce([(0, None, b"{"), (0, None, b'{"v": 1}')])
    more: Told = {"schema": "json", "quarantine": "lake.bad_quarantine"}
    assert lake.refusal(stop_at="commit", **more) == "commit"
    told = other.call("ingest", table="lake.other", **more)
    assert "lake.bad_quarantine has the records of table lake.t" in told.get("error", ""), told
    lake.ingest(**more)
    assert [(row["_topic"], row["_offset"]) for row in lake.rows("lake.bad_quarantine")] == [(lake.topic, 0)]
    with lake.table("lake.bad_quarantine").transaction() as transaction:
        transaction.remove_properties(QUARANTINE_OF)  # as of an earlier version
    told = other.call("ingest", table="lake.other", **more)
    assert f"lake.bad_quarantine has the records of topic {lake.topic} that" in told.get("error", ""), told
    lake.ingest(**more)
    assert lake.table("lake.bad_quarantine").properties[QUARANTINE_OF] == "lake.t"


@pytest.mark.long
def test_a_topic_that_was_created_again_is_noticed(lake: Lake) -> None:
    lake.produce([(0, None, b"old")] * 3)
    lake.ingest()
    admin = lake.world.connection.admin
    admin.delete_topics([lake.topic])[lake.topic].result(60)
    assert "there is no topic" in lake.refusal()
    create_topic(lake.world.bootstrap, lake.topic, 2)
    assert lake.places() == [(0, 0), (0, 1), (0, 2)]
    producer = Producer({"bootstrap.servers": lake.world.bootstrap})
    for _ in range(5):
        producer.produce(lake.topic, partition=0, value=b"new")
    assert producer.flush(60) == 0
    assert "was deleted and created again" in lake.refusal()
    assert lake.ingest(accepts_new_topic=True)["offsets"] == 5
    assert sorted(row["value"] for row in lake.rows()) == [b"new"] * 5 + [b"old"] * 3
    assert lake.ingest()["commits"] == 0


@pytest.mark.long
@pytest.mark.parametrize("trims", [True, False], ids=["trimmed", "uploaded"])
def test_offsets_that_do_not_exist_any_more_are_an_error_unless_the_loss_is_accepted(lake: Lake, trims: bool) -> None:
    lake.produce([(0, None, b"%d" % at) for at in range(5)])
    lake.ingest()
    lake.produce([(0, None, b"%d" % at) for at in range(5, 20)])
    lake.world.upload()
    lake.world.delete_records(lake.topic, 12, trims=trims)
    assert "offsets 5 to 11 do not exist any more" in lake.refusal(max_offsets=10)
    assert lake.ingest(accepts_loss=True, max_offsets=3)["rows"] == 8
    assert [row["value"] for row in lake.rows()] == [b"%d" % at for at in range(20) if not 5 <= at < 12]
    assert (lake.strays(), lake.markers()) == ([], [])


@pytest.mark.long
def test_offsets_of_a_partition_that_was_empty_at_the_last_commit_are_not_left_out_silently(lake: Lake) -> None:
    lake.produce([(1, None, b"other")])
    lake.ingest()
    lake.produce([(0, None, b"%d" % at) for at in range(20)])
    lake.world.upload()
    lake.world.delete_records(lake.topic, 12)
    told = lake.refusal()
    assert "offsets 0 to 11 do not exist any more" in told
    assert "--accept-data-loss" in told
    assert lake.ingest(accepts_loss=True)["rows"] == 8


@pytest.mark.long
def test_an_empty_topic_has_no_table_of_inferred_columns_yet(lake: Lake) -> None:
    told = lake.ingest(schema="json")
    assert (told["commits"], told["snapshot"]) == (0, None)
    assert lake.ingest(table="lake.raw")["commits"] == 0
    assert lake.rows("lake.raw") == []
    lake.produce([(0, None, b"x")])
    assert lake.ingest(table="lake.raw")["commits"] == 1
    assert "is made of topic" in Lake(lake.spark, lake.world, lake.topic + "2", lake.warehouse).refusal(
        table="lake.raw"
    )


@pytest.mark.long
def test_the_command_plans_runs_and_compacts(lake: Lake) -> None:
    for _ in range(2):
        lake.produce([(0, b"k", b'{"a": 1}'), (1, b"k", b"{")])
    where = ("--warehouse", str(lake.warehouse))
    job = ("spark", "table", lake.topic, "--table", "lake.t", "--schema", "json", *where)
    local = ("--master", "local[1]", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.bindAddress=127.0.0.1")
    planned = lake.world.cli(*job, "--dry-run", "--format", "json").json()
    assert (planned["offsets"], planned["exists"], planned["commits"]) == (4, False, 1)
    assert not lake.warehouse.exists()
    told = lake.world.cli(*job, *local).text
    assert "table lake.t: 2 rows of 4 offsets in 1 commit" in told
    assert "2 records are in the quarantine lake.t_quarantine" in told
    assert lake.places() == [(0, 0), (0, 1)]
    assert "0 offsets to be added, in 0 commits" in lake.world.cli(*job, "--dry-run").text
    assert "0 of 1 files" in lake.world.cli("spark", "table-compact", "lake.t", *where, "--dry-run").text
    assert lake.world.cli("spark", "table", "nothing", "--table", "lake.t", *where, "--dry-run", code=3).code == 3
