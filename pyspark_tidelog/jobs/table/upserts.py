"""Upserts: the last record of each key decides, and one without a value deletes the key.

Executors have written the records of a commit to staged files. The driver reads the keys of these alone, and finds the
last record of each. Then executors write the last records to data files, and every data file of the table that has one
of the keys anew without it. One commit puts these in place of the others.

The driver holds the keys of one commit (`--max-offsets-per-commit` bounds them), each task the keys and one data file.

Entry: `Upsert`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from pyspark_tidelog.jobs.table.attempts import referenced_files
from pyspark_tidelog.jobs.table.rows import nullable
from pyspark_tidelog.jobs.table.state import TableState
from pyspark_tidelog.jobs.table.tables import TRIES, JobTable, swap
from pyspark_tidelog.jobs.table.tasks import PLACE, SettlePlan, settle
from pyspark_tidelog.jobs.table.writer import WriteTarget
from tidelog.runtime.errors import Unavailable

KEY_TYPES = (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)
_PRUNED = (BinaryType, IntegerType, LongType, StringType)
_AT_LEAST: Any = GreaterThanOrEqual  # pydantic's plugin for types takes no positions
_AT_MOST: Any = LessThanOrEqual
Spread = Callable[[Sequence[Any], Any], list[Any]]


class Upsert:
    """Puts the staged records of one commit into a table."""

    def __init__(self, table: JobTable, keys: tuple[str, ...], directory: str, file_bytes: int, spread: Spread) -> None:
        self._table = table
        self._keys = keys
        self._directory = directory
        self._file_bytes = file_bytes
        self._spread = spread

    def put(self, wanted: TableState, staged: Sequence[str]) -> list[DataFile]:
        """Commit; return the files that the table has got. Raises `Fenced`, `Unavailable`.

        Each try writes files anew. One whose answer was lost may be committed after all while the next one is made.
        """
        last = self._last_records(staged)
        path = f"{self._directory}/last.parquet"
        if last is not None:
            with self._table.table.io.new_output(path).create(overwrite=True) as stream:
                pq.write_table(last, stream)
        written: list[DataFile] = []
        for attempt in range(TRIES):
            old: list[DataFile] = []
            new: list[DataFile] = []
            if last is not None:
                old, new = self._settled(staged, last, path)
            written += new
            if self._table.advance(wanted, partial(swap, old=old, new=new), is_repeatable=False):
                return written if attempt == 0 else self._in_table(written)
        raise Unavailable(f"table {self._table.identifier} was changed by others {TRIES} times meanwhile")

    def _in_table(self, files: Sequence[DataFile]) -> list[DataFile]:
        referenced = referenced_files(self._table.table)
        return [each for each in files if each.file_path in referenced]

    def _last_records(self, staged: Sequence[str]) -> pa.Table | None:
        """Return the last record of each key: its columns, partition and offset."""
        found: pa.Table | None = None
        for path in staged:
            with self._table.table.io.new_input(path).open() as stream:
                rows = pq.read_table(stream, columns=[*self._keys, *PLACE])
            found = last_of_keys(rows if found is None else pa.concat_tables([found, rows]), self._keys)
        return found

    def _settled(self, staged: Sequence[str], last: pa.Table, path: str) -> tuple[list[DataFile], list[DataFile]]:
        """Have the data files written; return those that they replace, and those."""
        table = self._table.table
        scan = table.scan(row_filter=self._bounds(last))
        tasks = {task.file.file_path: task for task in scan.plan_files()}
        target = WriteTarget.of(table.metadata, table.io, self._directory, self._file_bytes)
        plan = SettlePlan(target, self._keys, path, without_history(table.metadata))
        pieces: list[str | FileScanTask] = [*staged, *tasks.values()]
        old: list[DataFile] = []
        new: list[DataFile] = []
        for source, files in self._spread(pieces, partial(settle, plan=plan)):
            if files is not None:
                new += files
                if source in tasks:
                    old.append(tasks[source].file)
        return old, new

    def _bounds(self, last: pa.Table) -> BooleanExpression:
        """Return a filter that leaves out data files which, by their statistics, have none of the keys."""
        found: BooleanExpression = AlwaysTrue()
        for name in self._keys:
            if isinstance(self._table.table.schema().find_field(name).field_type, _PRUNED):
                bounds = pc.min_max(last.column(name))
                low, high = bounds["min"].as_py(), bounds["max"].as_py()
                found = And(found, And(_AT_LEAST(name, low), _AT_MOST(name, high)))
        return found


def last_of_keys(rows: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """Return the columns of the key, partition and offset of the record with the highest offset of each key.

    A key's records are in one partition; if they are not, the higher partition is the later one of equal offsets.
    """
    ordered = rows.sort_by([(PLACE[1], "ascending"), (PLACE[0], "ascending")])
    grouped = ordered.group_by(list(keys), use_threads=False).aggregate([(name, "last") for name in PLACE])
    columns = [*(grouped.column(name) for name in keys), *(grouped.column(f"{name}_last") for name in PLACE)]
    return pa.Table.from_arrays(columns, schema=nullable(rows.select([*keys, *PLACE]).schema))


def without_history(metadata: TableMetadata) -> TableMetadata:
    """Return what reading a data file needs: a table has thousands of snapshots, and each task would get them."""
    less: dict[str, Any] = {
        "snapshots": [],
        "snapshot_log": [],
        "metadata_log": [],
        "refs": {},
        "current_snapshot_id": None,
    }
    return metadata.model_copy(update=less)
