"""Commits that happen once, files that are written and read again, what is deleted of killed runs: without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.io.pyarrow import PyArrowFileIO, schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Transaction
from pyiceberg.typedef import Record

from pyspark_tidelog.jobs.table import compaction, tables
from pyspark_tidelog.jobs.table.attempts import Attempts, rewrite_name
from pyspark_tidelog.jobs.table.columns import grow
from pyspark_tidelog.jobs.table.compaction import group_small
from pyspark_tidelog.jobs.table.ddl import parse_ddl
from pyspark_tidelog.jobs.table.rows import staged_schema
from pyspark_tidelog.jobs.table.scan import scan_rows
from pyspark_tidelog.jobs.table.schemas import DELETED, partition_spec
from pyspark_tidelog.jobs.table.state import KEY, TableState
from pyspark_tidelog.jobs.table.tables import CatalogOptions, JobTable, append, open_catalog, swap
from pyspark_tidelog.jobs.table.tasks import StagedRows
from pyspark_tidelog.jobs.table.upserts import Upsert, last_of_keys
from pyspark_tidelog.jobs.table.values import Wishes
from pyspark_tidelog.jobs.table.writer import MAX_OPEN, DataWriter, WriteTarget
from tests.support.examples import examples
from tidelog.runtime.errors import ConfigError, Fenced, InvalidInput, NotFound, Unavailable

COLUMNS = (
    "n long, s string, at timestamp, d date, l array<struct<x: long>>,"
    " m map<string, struct<y: long>>, t struct<z: long>"
)
NAME = "lake.t"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    found = open_catalog(CatalogOptions(str(tmp_path / "lake")))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "FIRST_PAUSE_S", 0.001)


def table_of(catalog: Catalog, columns: str = COLUMNS, *partitioned: str) -> JobTable:
    schema = Schema(*parse_ddl(columns, "test"))
    spec = partition_spec(partitioned, schema) if partitioned else UNPARTITIONED_PARTITION_SPEC
    return JobTable.create(catalog, NAME, schema, spec)


def target_of(table: JobTable, name: str) -> WriteTarget:
    return WriteTarget.of(table.table.metadata, table.table.io, Attempts(table.table).directory(name), 1 << 20)


def written(table: JobTable, rows: list[dict[str, Any]], name: str = "000000000001-aa") -> list[DataFile]:
    with DataWriter(target_of(table, name)) as writer:
        writer.add(pa.Table.from_pylist(rows, nullable(table)))
        return writer.close()


def nullable(table: JobTable) -> pa.Schema:
    return pa.schema([each.with_nullable(True) for each in schema_to_pyarrow(table.table.schema())])


def advanced(table: JobTable, count: int = 10) -> TableState:
    state = table.state or TableState("t", "id")
    start = state.next.get(0, 0)
    return state.advanced(state.number + 1, uuid.uuid4().hex[:12], {0: (start, start + count)}, (), {0: start})


def numbers(table: JobTable) -> list[int]:
    table.reload()
    return sorted(table.table.scan().to_arrow().column("n").to_pylist())


def commit(table: JobTable, *values: int) -> TableState:
    state = advanced(table)
    files = written(table, [{"n": each} for each in values])
    assert table.advance(state, partial(append, files=files), is_repeatable=True)
    return state


def test_a_commit_brings_rows_and_state_together(catalog: Catalog) -> None:
    table = table_of(catalog)
    state = commit(table, 1, 2)
    assert table.state == state
    found = JobTable.find(catalog, NAME)
    assert found is not None
    assert (found.state, numbers(found)) == (state, [1, 2])
    empty = advanced(table)
    assert table.advance(empty, partial(append, files=[]), is_repeatable=True), "no rows, and yet further"
    assert (table.state, numbers(table)) == (empty, [1, 2])


def keep_retrying(transaction: Transaction) -> None:
    transaction.set_properties({"commit.retry.num-retries": "9"})


def test_of_two_jobs_the_later_one_is_fenced_whatever_the_table_says_of_retries(catalog: Catalog) -> None:
    first = table_of(catalog)
    first.change(keep_retrying)
    second = JobTable.find(catalog, NAME)
    assert second is not None
    files = written(second, [{"n": 1}])
    state = advanced(second)
    commit(first, 1)
    with pytest.raises(Fenced, match="another job has written"):
        second.advance(state, partial(append, files=files), is_repeatable=True)
    assert numbers(first) == [1]
    assert first.table.properties["commit.retry.num-retries"] == "9", "the property is not changed by it"


def test_a_commit_goes_on_top_of_one_that_moves_no_offsets(catalog: Catalog) -> None:
    table = table_of(catalog)
    commit(table, 1)
    files, state = written(table, [{"n": 2}]), advanced(table)
    other = catalog.load_table(NAME)
    other.append(pa.Table.from_pylist([{"n": 7}], nullable(table)))
    assert not table.advance(state, partial(append, files=files), is_repeatable=False)
    assert table.advance(state, partial(append, files=files), is_repeatable=True)
    assert (numbers(table), table.state) == ([1, 2, 7], state)


@pytest.mark.parametrize("error", [CommitStateUnknownException("?"), OSError("?")])
def test_a_commit_whose_answer_is_lost_is_not_repeated(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    table = table_of(catalog)
    plainly = catalog.commit_table
    lost = [True]

    def commits_and_fails(*arguments: Any) -> Any:
        done = plainly(*arguments)
        if lost and lost.pop():
            raise error
        return done

    monkeypatch.setattr(catalog, "commit_table", commits_and_fails)
    commit(table, 1, 2)
    assert numbers(table) == [1, 2]


def test_a_catalog_that_stays_away_is_unavailable_and_nothing_is_committed(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(catalog)
    state = advanced(table)
    tried = []

    def fails(*_arguments: Any) -> Any:
        tried.append(1)
        raise CommitFailedException("busy")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "commit_table", fails)
        with pytest.raises(Unavailable, match="busy"):
            table.advance(state, partial(append, files=written(table, [{"n": 1}])), is_repeatable=True)
    assert len(tried) == tables.TRIES
    assert (numbers(table), table.state) == ([], None)


def test_offsets_survive_what_others_do_to_the_table(catalog: Catalog) -> None:
    table = table_of(catalog)
    state = commit(table, 1, 2, 3)
    other = catalog.load_table(NAME)
    other.append(pa.Table.from_pylist([{"n": 9}], nullable(table)))
    other.delete("n = 2")
    others = [each.snapshot_id for each in catalog.load_table(NAME).snapshots()][:-1]
    catalog.load_table(NAME).maintenance.expire_snapshots().by_ids(others).commit()
    assert len(catalog.load_table(NAME).snapshots()) == 1
    assert numbers(table) == [1, 3, 9]
    assert table.state == state
    later = commit(table, 4)
    assert later.next == {0: 20}


def test_after_a_rollback_the_offsets_are_those_of_the_rows(catalog: Catalog) -> None:
    table = table_of(catalog)
    first = commit(table, 1)
    snapshot = table.table.current_snapshot()
    assert snapshot is not None
    commit(table, 2)
    catalog.load_table(NAME).manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
    assert numbers(table) == [1]
    assert table.state == first


def test_a_table_of_another_kind_and_one_created_again_are_noticed(catalog: Catalog) -> None:
    table = table_of(catalog)
    state = advanced(table)
    files = written(table, [{"n": 1}])
    catalog.drop_table(NAME)
    table_of(catalog)
    with pytest.raises(Fenced, match="dropped and created again"):
        table.advance(state, partial(append, files=files), is_repeatable=True)


def test_files_of_an_attempt_whose_number_is_reached_are_deleted_and_no_others(
    catalog: Catalog, tmp_path: Path
) -> None:
    table = table_of(catalog)
    attempts = Attempts(table.table)
    for name in ("000000000001-dead", "000000000002-a11e"):
        attempts.begin(name)
        written(table, [{"n": 5}], name)
    state = advanced(table)
    attempts.begin(state.commit)
    kept = written(table, [{"n": 1}], state.commit)
    written(table, [{"n": 6}], state.commit)  # a task that ran twice
    assert attempts.clean(0) == 0, "nothing is proven yet"
    assert table.advance(state, partial(append, files=kept), is_repeatable=True)
    assert Attempts(table.table).clean(1) == 2
    assert Attempts(table.table).names() == ["000000000002-a11e"]
    left = {path.parent.name for path in tmp_path.rglob("*.parquet")}
    assert left == {state.commit, "000000000002-a11e"}
    assert numbers(table) == [1]
    assert Attempts(table.table).clean(2) == 1


def test_files_of_a_rewrite_are_deleted_when_no_snapshot_has_what_it_would_replace(catalog: Catalog) -> None:
    table = table_of(catalog)
    commit(table, 1)
    (old,) = [task.file.file_path for task in table.table.scan().plan_files()]
    name = rewrite_name("ab")
    attempts = Attempts(table.table)
    attempts.begin(name, [old])
    written(table, [{"n": 1}], name)
    assert attempts.clean(9) == 0
    catalog.load_table(NAME).delete("n = 1")
    assert Attempts(catalog.load_table(NAME)).clean(9) == 0, "an older snapshot has it, and may come back"
    commit(table, 2)
    ids = [each.snapshot_id for each in table.table.snapshots()][:-1]
    catalog.load_table(NAME).maintenance.expire_snapshots().by_ids(ids).commit()
    assert Attempts(catalog.load_table(NAME)).clean(9) == 1
    assert numbers(table) == [2]


def test_a_rewrite_leaves_what_others_have_changed_and_keeps_the_offsets(catalog: Catalog) -> None:
    table = table_of(catalog)
    state = commit(table, 1)
    commit(table, 2)
    state = table.state or state
    tasks = list(table.table.scan().plan_files())
    ((first, second),) = group_small(tasks, table.table.metadata.default_spec_id, 1 << 20)
    old = {first.file.file_path: frozenset[str](), second.file.file_path: frozenset[str]()}
    new = written(table, [{"n": 1}, {"n": 2}], rewrite_name("ab"))
    stage = partial(swap, old=[first.file, second.file], new=new)
    behind = JobTable.find(catalog, NAME)
    assert behind is not None
    later = commit(behind, 3)
    assert table.replace(old, {each.file_path for each in new}, stage), "on top of a commit between"
    assert (numbers(table), table.state) == ([1, 2, 3], later)
    assert table.replace(old, {each.file_path for each in new}, stage), "it is there already"
    assert not table.replace(old, {"another"}, stage), "what it replaces is not there any more"
    assert numbers(table) == [1, 2, 3]


def test_two_jobs_that_want_the_same_column_get_one(catalog: Catalog) -> None:
    first = table_of(catalog, "n int")
    second = JobTable.find(catalog, NAME)
    assert second is not None
    wishes = Wishes(wide={("n",)})
    wishes.note_new(("c",), 5)
    assert grow(first, wishes, 100)
    assert grow(second, wishes, 100), "the other one's changes are taken"
    assert [(each.name, str(each.field_type)) for each in second.table.schema().fields] == [
        ("n", "long"),
        ("c", "long"),
    ]
    assert not grow(second, wishes, 100)


def test_columns_inside_of_others_are_widened_and_added(catalog: Catalog) -> None:
    table = table_of(
        catalog,
        "v array<int>, m map<string, float>, s struct<a: int>, p array<struct<x: int>>, q map<string, struct<x: int>>",
    )
    wishes = Wishes(wide={("v", "element"), ("m", "value"), ("s", "a"), ("p", "element", "x"), ("q", "value", "x")})
    for path in (("s", "b"), ("p", "element", "y"), ("q", "value", "y")):
        wishes.note_new(path, [1])
    assert grow(table, wishes, 100)
    schema = table.table.schema()
    assert str(schema.find_field("v.element").field_type) == "long"
    assert str(schema.find_field("m.value").field_type) == "double"
    for name in ("s.a", "p.element.x", "q.value.x"):
        assert str(schema.find_field(name).field_type) == "long"
    for name in ("s.b", "p.element.y", "q.value.y"):
        assert str(schema.find_field(name).field_type) == "list<long>"


ROWS = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        "s": st.none() | st.text(max_size=5),
        "at": st.none() | st.integers(-(10**15), 10**15),
        "d": st.none() | st.integers(-10_000, 10_000),
        "l": st.none() | st.lists(st.none() | st.fixed_dictionaries({"x": st.none() | st.integers(0, 9)}), max_size=2),
        "m": st.none()
        | st.dictionaries(
            st.text("ab", max_size=2),
            st.none() | st.fixed_dictionaries({"y": st.none() | st.integers(0, 9)}),
            max_size=2,
        ).map(lambda each: list(each.items())),
        "t": st.none() | st.fixed_dictionaries({"z": st.none() | st.integers(0, 9)}),
    }
)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=12),
    by=st.sampled_from(["", "s", "bucket(3, n)", "day(at)", "d", "year(d)"]),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_read_from_data_files_as_they_were_written(
    catalog: Catalog, rows: list[dict[str, Any]], by: str
) -> None:
    if JobTable.find(catalog, NAME) is not None:
        catalog.drop_table(NAME)
    table = table_of(catalog, COLUMNS, *([by] if by else []))
    wanted = pa.Table.from_pylist(rows, nullable(table)).to_pylist()
    state = advanced(table)
    with DataWriter(target_of(table, state.commit)) as writer:
        writer.add(pa.Table.from_pylist(rows, nullable(table)))
        files = writer.close()
    assert table.advance(state, partial(append, files=files), is_repeatable=True)
    transaction = table.table.transaction()
    with transaction.update_schema() as update:
        update.add_column(("l", "late"), parse_ddl("v long", "test")[0].field_type)
        update.add_column("late", parse_ddl("v array<long>", "test")[0].field_type)
        update.rename_column("n", "number")
    transaction.commit_transaction()
    table.reload()
    tasks = list(table.table.scan().plan_files())
    found = [
        row
        for task in tasks
        for part in scan_rows(task, table.table.metadata, table.table.io)
        for row in part.to_pylist()
    ]
    for row in wanted:
        row["number"], row["late"] = row.pop("n"), None
        row["l"] = row["l"] and [each and {**each, "late": None} for each in row["l"]]
    assert sorted(map(comparable, found)) == sorted(map(comparable, wanted))
    some = [
        row
        for task in tasks
        for part in scan_rows(task, table.table.metadata, table.table.io, ["s"])
        for row in part.to_pylist()
    ]
    assert sorted(map(comparable, some)) == sorted(comparable({"s": row["s"]}) for row in wanted)
    assert sum(each.record_count for each in files) == len(rows)
    if by:
        assert len({tuple(task.file.partition[at] for at in range(1)) for task in tasks}) == len(tasks)
        (partition,) = table.table.spec().fields
        name = table.table.schema().find_column_name(partition.source_id)
        for task in tasks:  # what a reader would leave out by the partition has none of its values
            for part in scan_rows(task, table.table.metadata, table.table.io, [name or ""]):
                for value in part.column(0).cast(physical(part.column(0).type)).to_pylist():
                    kind = table.table.schema().find_field(partition.source_id).field_type
                    made = None if value is None else partition.transform.transform(kind)(value)
                    assert made == task.file.partition[0]


def physical(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date32(kind) else kind


def comparable(row: dict[str, Any]) -> str:
    return str(sorted(row.items()))


def test_rows_that_position_deletes_take_away_are_not_read(catalog: Catalog, tmp_path: Path) -> None:
    table = table_of(catalog)
    state = advanced(table)
    files = written(table, [{"n": each} for each in range(10)])
    assert table.advance(state, partial(append, files=files), is_repeatable=True)
    (file,) = [task.file for task in table.table.scan().plan_files()]
    deletes = tmp_path / "deletes.parquet"
    place = [
        {"file_path": file.file_path, "pos": 3},
        {"file_path": "another", "pos": 4},
        {"file_path": file.file_path, "pos": 9},
    ]
    pq.write_table(pa.Table.from_pylist(place), deletes)

    def delete_file(content: DataFileContent) -> DataFile:
        return DataFile.from_args(
            content=content, file_path=f"file://{deletes}", file_format=FileFormat.PARQUET, partition=Record()
        )

    task = FileScanTask(file, {delete_file(DataFileContent.POSITION_DELETES)})
    (rows,) = scan_rows(task, table.table.metadata, table.table.io)
    assert rows.column("n").to_pylist() == [0, 1, 2, 4, 5, 6, 7, 8]
    task = FileScanTask(file, {delete_file(DataFileContent.EQUALITY_DELETES)})
    with pytest.raises(InvalidInput, match="does not understand"):
        list(scan_rows(task, table.table.metadata, table.table.io))


def test_more_partitions_than_files_may_be_open_are_written_and_files_end_at_their_size(catalog: Catalog) -> None:
    table = table_of(catalog, "n long, s string", "n")
    count = 3 * MAX_OPEN
    files = written(table, [{"n": at % count, "s": "x"} for at in range(4 * count)])
    assert sorted(each.partition[0] for each in files) == list(range(count))
    assert {each.record_count for each in files} == {4}
    single = table_of(catalog, "n long, s string")
    target = target_of(single, "000000000001-bb")
    with DataWriter(
        WriteTarget(target.schema, PartitionSpec(), target.properties, target.io, target.directory, 1)
    ) as writer:
        for _ in range(2):
            writer.add(pa.Table.from_pylist([{"n": 1, "s": "y" * 100}] * 700_000, nullable(single)))
        assert len(writer.close()) == 2


def test_duckdb_reads_what_is_written(catalog: Catalog) -> None:
    table = table_of(catalog)
    rows: list[dict[str, Any]] = [
        {"n": 1, "s": "é", "l": None, "m": [("a", {"y": 2})]},
        {"n": None, "l": [], "t": {"z": 3}},
    ]
    paths = [each.file_path.removeprefix("file://") for each in written(table, rows)]
    with duckdb.connect() as connection:
        found = connection.execute("select n, s, l, m, t from read_parquet($1)", [paths]).fetchall()
    assert found == [(1, "é", None, {"a": {"y": 2}}, None), (None, None, [], None, {"z": 3})]


KEYED = st.tuples(st.integers(0, 2), st.integers(0, 30), st.sampled_from(["a", "b", "c"]), st.binary(max_size=1))


@given(st.lists(KEYED, min_size=1, unique_by=lambda row: row[:2]), st.integers(1, 30))
@settings(max_examples=examples(100), deadline=None)
def test_the_last_record_of_a_key_is_found_in_any_pieces(rows: list[tuple[int, int, str, bytes]], cut: int) -> None:
    kinds = pa.schema(
        [("_partition", pa.int32()), ("_offset", pa.int64()), ("k", pa.string()), ("b", pa.large_binary())]
    )
    columns = [pa.array(column, kind.type) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    whole = pa.Table.from_arrays(columns, schema=kinds)
    wanted: dict[tuple[str, bytes], tuple[int, int]] = {}
    for partition, offset, key, more in sorted(rows, key=lambda row: (row[1], row[0])):
        wanted[key, more] = (partition, offset)
    found = last_of_keys(whole.slice(0, cut), ("k", "b"))
    found = last_of_keys(pa.concat_tables([found, whole.select(found.column_names)]), ("k", "b"))
    assert {(each["k"], each["b"]): (each["_partition"], each["_offset"]) for each in found.to_pylist()} == wanted


def test_an_upsert_whose_first_try_is_committed_late_keeps_the_files_of_that_try(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(catalog, "n long, _partition int, _offset long")
    commit(table, 1, 2)
    state = advanced(table)
    staging = StagedRows(target_of(table, state.commit), staged_schema(table.table.schema()))
    rows = [{"n": each, "_partition": 0, "_offset": 10 + each, DELETED: each == 2} for each in (2, 3)]
    staging.add(pa.Table.from_pylist(rows, staged_schema(table.table.schema())))
    attempts, plainly = Attempts(table.table), catalog.commit_table
    attempts.begin(state.commit)
    late: list[Any] = []

    def answers_too_late(*arguments: Any) -> Any:
        if not late:
            late.append(arguments)
            raise CommitStateUnknownException("a gateway has given up waiting")
        plainly(*late[0])
        return plainly(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "commit_table", answers_too_late)
        upsert = Upsert(table, ("n",), attempts.directory(state.commit), 1 << 20, here)
        kept = upsert.put(state, staging.close())
    attempts.end(state.commit, [each.file_path for each in kept])
    assert (numbers(table), table.state) == ([1, 3], state)


class _HereContext:
    """As much of Spark's context as a rewrite asks for; what is spread is done here."""

    def parallelize(self, pieces: Sequence[Any], _slices: int) -> _HereContext:
        self._pieces = pieces
        return self

    def map(self, work: Any) -> _HereContext:
        self._pieces = here(self._pieces, work)
        return self

    def collect(self) -> Sequence[Any]:
        return self._pieces

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments, **_more: None


class HereSpark:
    """A session without Spark."""

    sparkContext = _HereContext()  # noqa: N815  # Spark's name

    def createDataFrame(self, *_arguments: Any) -> None:  # noqa: N802  # Spark's name
        """Nothing is made of it."""


def test_a_rewrite_that_was_committed_without_an_answer_keeps_the_files_that_others_have_left_of_it(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = table_of(catalog)
    commit(table, 1, 2)
    with catalog.load_table(NAME).update_spec() as update:
        update.add_identity("n")
    plainly = tables.JobTable.reload
    asked: list[JobTable] = []

    def reloads_after_another(mine: JobTable) -> None:
        if not asked:
            asked.append(mine)
            catalog.load_table(NAME).delete("n = 1")
        plainly(mine)

    commits = catalog.commit_table
    lost = [True]

    def commits_and_fails(*arguments: Any) -> Any:
        done = commits(*arguments)
        if lost and lost.pop():
            raise CommitStateUnknownException("a gateway has given up waiting")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "commit_table", commits_and_fails)
        patch.setattr(tables.JobTable, "reload", reloads_after_another)
        patch.setattr(compaction, "open_catalog", lambda _options: catalog)
        spark: Any = HereSpark()
        options = compaction.RewriteOptions(NAME, CatalogOptions(str(tmp_path / "lake")))
        assert compaction.run(spark, options).skipped == 1
    assert numbers(table) == [2]


def here(pieces: Sequence[Any], work: Any) -> list[Any]:
    return [work(each) for each in pieces]


def test_a_warehouse_elsewhere_needs_a_catalog_and_a_catalog_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="catalog-uri"):
        open_catalog(CatalogOptions("s3://bucket/lake"))
    with pytest.raises(Unavailable, match="does not open"):
        open_catalog(CatalogOptions("s3://bucket/lake", "http://127.0.0.1:9/"))


def test_files_go_through_arrow_whatever_the_catalog_names(tmp_path: Path) -> None:
    properties = {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"}  # its package for S3 is not installed
    catalog = open_catalog(CatalogOptions(str(tmp_path / "lake"), properties=properties))
    try:
        created = table_of(catalog)
        commit(created, 1)
        found = JobTable.find(catalog, NAME)
        assert found is not None
        attempts = Attempts(found.table)
        attempts.begin("000000000001-bb")
        assert attempts.clean(1) == 0 and attempts.names() == []
        for table in (created, found):
            assert type(table.table.io) is type(target_of(table, "x").open_io()) is PyArrowFileIO
    finally:
        catalog.close()


def test_what_a_catalog_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "nothing"))

    def opened(uri: str = "", **properties: str) -> None:
        with tables.store_errors():
            open_catalog(CatalogOptions(str(tmp_path / "lake"), uri, properties))

    with pytest.raises(ConfigError, match=r"needs a package that is not installed: .*pip install"):
        opened("postgresql://user@127.0.0.1/lake")
    with pytest.raises(Unavailable, match="catalog of type glue does not open: You must specify a region"):
        opened(type="glue")
    with pytest.raises(Unavailable, match="catalog of type none does not open"):
        opened(type="none")
    with pytest.raises(Unavailable) as refused:
        opened("mysql+none://user:secret-word@127.0.0.1/lake", type="sql")
    assert "secret-word" not in str(refused.value) and "mysql+none://user:***@127.0.0.1/lake" in str(refused.value)


def test_a_state_that_is_not_the_tables_is_refused(catalog: Catalog) -> None:
    table = table_of(catalog)
    table.table.transaction().set_properties({KEY: advanced(table).to_json(7)}).commit_transaction()
    with pytest.raises(NotFound, match="offsets are not known"):
        JobTable.find(catalog, NAME)
