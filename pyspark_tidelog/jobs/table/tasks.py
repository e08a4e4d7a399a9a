"""What executors do: read records and write them as data files, and rewrite data files.

A task leaves nothing but files in the directory of its attempt. A task that is run twice leaves files twice; the driver
takes those that the task tells of that it has heard, and deletes the others with the attempt.

Entry: `observe`, `ingest`, `settle`, `rewrite`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata

from pyspark_tidelog.jobs.table.rows import RowMaker, RowPlan, staged_schema
from pyspark_tidelog.jobs.table.scan import scan_rows
from pyspark_tidelog.jobs.table.schemas import DELETED
from pyspark_tidelog.jobs.table.values import Wishes
from pyspark_tidelog.jobs.table.writer import DataWriter, WriteTarget
from pyspark_tidelog.planning import TaskPartition
from pyspark_tidelog.reading import read_task

BATCH_ROWS = 10_000
"""Rows that are turned from JSON at once."""
PLACE: tuple[str, ...] = ("_partition", "_offset")


@dataclass
class TaskOutcome:
    """What a task tells the driver."""

    files: list[DataFile] = field(default_factory=list)
    staged: list[str] = field(default_factory=list)
    """Paths of rows that wait for their key's last record."""
    bad_files: list[DataFile] = field(default_factory=list)
    rows: int = 0
    bad: int = 0
    wishes: Wishes = field(default_factory=Wishes)

    def add(self, other: TaskOutcome) -> None:
        """Add what another task tells."""
        self.files += other.files
        self.staged += other.staged
        self.bad_files += other.bad_files
        self.rows += other.rows
        self.bad += other.bad
        self.wishes.merge(other.wishes)


@dataclass(frozen=True)
class IngestPlan:
    """How a task turns records into files. Pickled to the executors."""

    rows: RowPlan
    target: WriteTarget
    quarantine: WriteTarget


def observe(piece: TaskPartition, plan: RowPlan) -> Wishes:
    """Read records only to see which columns they would need."""
    maker = RowMaker(plan)
    for batch in _batches(piece):
        maker.make(batch)
    return maker.wishes


def ingest(piece: TaskPartition, plan: IngestPlan) -> TaskOutcome:
    """Read records and write them. With wishes the files are of no use: the table is changed first."""
    maker = RowMaker(plan.rows)
    done = TaskOutcome()
    staging = StagedRows(plan.target, staged_schema(plan.rows.schema)) if plan.rows.upsert_by else None
    with DataWriter(plan.target) as writer, DataWriter(plan.quarantine) as bad_writer:
        for batch in _batches(piece):
            rows, bad = maker.make(batch)
            done.rows += rows.num_rows
            done.bad += bad.num_rows
            if maker.wishes:
                continue
            (staging or writer).add(rows)
            bad_writer.add(bad)
        done.wishes = maker.wishes
        if not maker.wishes:
            done.files, done.bad_files = writer.close(), bad_writer.close()
    if staging is not None:
        done.staged = staging.close()
    return done


def _batches(piece: TaskPartition) -> Iterator[pa.RecordBatch]:
    for batch in read_task(piece.task, piece.context):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


class StagedRows:
    """Writes rows to a file of its own, which no table gets."""

    def __init__(self, target: WriteTarget, schema: pa.Schema) -> None:
        self._path = f"{target.directory}/staged-{uuid.uuid4().hex}.parquet"
        self._io = target.open_io()
        self._schema = schema
        self._stream: Any = None
        self._writer: Any = None

    def add(self, rows: pa.Table) -> None:
        """Write rows."""
        if not rows.num_rows:
            return
        if self._writer is None:
            self._stream = self._io.new_output(self._path).create()
            self._writer = pq.ParquetWriter(self._stream, self._schema, compression="zstd")
        self._writer.write_table(rows.cast(self._schema))

    def close(self) -> list[str]:
        """Complete the file; return its path if there is one."""
        if self._writer is None:
            return []
        self._writer.close()
        self._stream.close()
        return [self._path]


@dataclass(frozen=True)
class SettlePlan:
    """How rows of an upsert are put into the table. Pickled to the executors."""

    target: WriteTarget
    keys: tuple[str, ...]
    last: str
    """Path of the last record of each key: the key's columns, `_partition` and `_offset`."""
    metadata: TableMetadata
    """Of the table, without its history."""


def settle(piece: str | FileScanTask, plan: SettlePlan) -> tuple[str, list[DataFile] | None]:
    """Write the last rows of their keys from a staged file; or a data file without the keys that were staged.

    Returns the path of what was read, and the files in its place; None if the data file has none of the keys.
    """
    io = plan.target.open_io()
    with io.new_input(plan.last).open() as stream:
        last = pq.read_table(stream)
    with DataWriter(plan.target) as writer:
        if isinstance(piece, str):
            places = last.select(PLACE)
            with io.new_input(piece).open() as stream:
                for batch in pq.ParquetFile(stream).iter_batches(BATCH_ROWS):
                    rows = pa.Table.from_batches([batch])
                    rows = rows.filter(pc.invert(rows.column(DELETED)))
                    writer.add(_joined(rows, places, PLACE, "left semi"))
            return piece, writer.close()
        keys = last.select(plan.keys)
        if not any(
            _joined(rows, keys, plan.keys, "left semi").num_rows
            for rows in scan_rows(piece, plan.metadata, io, plan.keys)
        ):
            return piece.file.file_path, None
        for rows in scan_rows(piece, plan.metadata, io):
            writer.add(_joined(rows, keys, plan.keys, "left anti"))
        return piece.file.file_path, writer.close()


def _joined(rows: pa.Table, other: pa.Table, names: tuple[str, ...], how: str) -> pa.Table:
    """Return the rows whose columns are, or are not, among those of another table."""
    index = pa.array(range(rows.num_rows), pa.int64())
    mine = rows.select(names).append_column("__row", index)
    theirs = other.cast(pa.schema([mine.schema.field(name) for name in names]))
    found = mine.join(theirs, list(names), join_type=how, use_threads=False).column("__row")
    return rows.take(found.sort())


@dataclass(frozen=True)
class RewritePlan:
    """How data files are put together. Pickled to the executors."""

    target: WriteTarget
    metadata: TableMetadata


def rewrite(piece: tuple[str, list[FileScanTask]], plan: RewritePlan) -> tuple[str, list[DataFile]]:
    """Write the rows of several data files anew, for an attempt; return its name, and the files in their place."""
    name, tasks = piece
    target = replace(plan.target, directory=f"{plan.target.directory.rstrip('/')}/{name}")
    io = target.open_io()
    with DataWriter(target) as writer:
        for task in tasks:
            for rows in scan_rows(task, plan.metadata, io):
                writer.add(rows)
        return name, writer.close()
