"""Rows to Parquet files that a table can take: with field ids, statistics and the values of the partitioning.

pyiceberg's own writer has the location of its files from the table, so that nobody could tell whose they are; these
are in the directory of an attempt (`pyspark_tidelog.jobs.table.attempts`).

Invariants: a file has rows of one partition of the table; memory is bounded by `BUFFER_BYTES` and `MAX_OPEN` files.

Entry: `DataWriter`, `WriteTarget`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import (
    PyArrowFileIO,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

BUFFER_BYTES = 64 << 20
"""Rows that a task holds in memory before it writes them, about."""
MAX_OPEN = 16
"""Files that a task has open."""
DEFAULT_FILE_BYTES = 128 << 20
_CODEC = "write.parquet.compression-codec"


@dataclass(frozen=True)
class WriteTarget:
    """Where a task writes. Pickled to the executors."""

    schema: Schema
    spec: PartitionSpec
    properties: Mapping[str, str]
    """Of the table."""
    io: Mapping[str, str]
    """Properties of its files' store."""
    directory: str
    file_bytes: int = DEFAULT_FILE_BYTES
    """The size at which a file ends, about."""

    @classmethod
    def of(cls, metadata: TableMetadata, io: FileIO, directory: str, file_bytes: int) -> WriteTarget:
        """Return the target for a table as it is now."""
        return cls(metadata.schema(), metadata.spec(), metadata.properties, dict(io.properties), directory, file_bytes)

    def open_io(self) -> FileIO:
        """Return access to the store."""
        return PyArrowFileIO(dict(self.io))


class _OpenFile:
    """A Parquet file that is being written."""

    def __init__(self, target: WriteTarget, io: FileIO, schema: pa.Schema, partition: Record) -> None:
        self.name = f"{uuid.uuid4().hex}.parquet"
        self._target = target
        self._partition = partition
        self._output = io.new_output(f"{target.directory}/{self.name}")
        self._stream: Any = self._output.create()
        codec = target.properties.get(_CODEC, "zstd")
        self._writer = pq.ParquetWriter(
            self._stream,
            schema,
            compression="none" if codec == "uncompressed" else codec,
            store_decimal_as_integer=True,
        )

    def write(self, table: pa.Table) -> int:
        """Write a row group; return the size of the file so far."""
        self._writer.write_table(table)
        return int(self._stream.tell())

    def close(self) -> DataFile:
        """Complete the file."""
        self._writer.close()
        self._stream.close()
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=self._writer.writer.metadata,
            stats_columns=compute_statistics_plan(self._target.schema, dict(self._target.properties)),
            parquet_column_mapping=parquet_path_to_id_mapping(self._target.schema),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=self._output.location,
            file_format=FileFormat.PARQUET,
            partition=self._partition,
            file_size_in_bytes=len(self._output),
            sort_order_id=None,
            spec_id=self._target.spec.spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def abandon(self) -> None:
        """Close what will not be used."""
        self._writer.close()
        self._stream.close()


class DataWriter:
    """Writes rows; `close` tells the files."""

    def __init__(self, target: WriteTarget) -> None:
        self._target = target
        self._io = target.open_io()
        self._schema = schema_to_pyarrow(target.schema)
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._open: dict[tuple[Any, ...], _OpenFile] = {}
        """By the partition's values; the one that was written last is the last."""
        self._files: list[DataFile] = []

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:  # after an error only: `close` leaves none
            self._open.popitem()[1].abandon()

    def add(self, table: pa.Table) -> None:
        """Take rows, with the columns of the table by name; further columns are left out."""
        if not table.num_rows:
            return
        self._waiting.append(table.select(self._schema.names).cast(self._schema))
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= BUFFER_BYTES:
            self._flush()

    def close(self) -> list[DataFile]:
        """Write what waits and complete all files."""
        self._flush()
        while self._open:
            self._end(next(iter(self._open)))
        return self._files

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        for values, rows in split(table, self._target.spec, self._target.schema):
            found = self._open.pop(values, None)
            if found is None:
                if len(self._open) >= MAX_OPEN:
                    self._end(next(iter(self._open)))
                found = _OpenFile(self._target, self._io, self._schema, Record(*values))
            self._open[values] = found
            if found.write(rows) >= self._target.file_bytes:
                self._end(values)

    def _end(self, values: tuple[Any, ...]) -> None:
        self._files.append(self._open.pop(values).close())


def split(table: pa.Table, spec: PartitionSpec, schema: Schema) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Return rows by the partition of the table that they belong to, with the partition's values."""
    if spec.is_unpartitioned():
        yield (), table
        return
    coded = []
    for field in spec.fields:
        source = schema.find_field(field.source_id)
        transform = field.transform.transform(source.field_type)
        name = schema.find_column_name(field.source_id)
        assert name is not None, field
        column = _physical(_column(table, name)).combine_chunks().dictionary_encode()
        values = [None if each is None else transform(each) for each in column.dictionary.to_pylist()]
        coded.append([None if at is None else values[at] for at in column.indices.to_pylist()])
    rows: dict[tuple[Any, ...], list[int]] = {}
    for index, values in enumerate(zip(*coded, strict=True)):
        rows.setdefault(values, []).append(index)
    for key, mine in rows.items():
        yield key, table if len(rows) == 1 else table.take(pa.array(mine, pa.int64()))


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    first, *steps = name.split(".")
    column = table.column(first)
    for step in steps:
        column = pc.struct_field(column, step)
    return column


def _physical(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return dates as days and timestamps as microseconds, as Iceberg's transforms want them."""
    if pa.types.is_date32(column.type):
        return column.cast(pa.int32())
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64())
    return column
