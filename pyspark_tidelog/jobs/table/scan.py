"""The rows of a data file in the table's present columns, without what delete files take from it.

Not by pyiceberg's `ArrowScan`: it turns a list or map of structs that is null into an empty one, and a rewrite would
make that lasting; and it has a whole file in memory.

Columns are found by their field ids, as everywhere in Iceberg: a renamed column keeps its values, one that was added
later is null, and a wider type takes what the file has.

Entry: `scan_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from tidelog.runtime.errors import InvalidInput

BATCH_ROWS = 10_000


def scan_rows(task: FileScanTask, metadata: TableMetadata, io: FileIO, names: Sequence[str] = ()) -> Iterator[pa.Table]:
    """Return the rows, with all columns of the table or some. Raises `InvalidInput` for what only others can read."""
    schema = metadata.schema().select(*names) if names else metadata.schema()
    if task.file.file_format != FileFormat.PARQUET:
        raise InvalidInput(f"{task.file.file_path} is no Parquet file", hint="this job rewrites Parquet only")
    gone = deleted_positions(task, io)
    with io.new_input(task.file.file_path).open() as stream, pq.ParquetFile(stream) as file:
        had = pyarrow_to_schema(file.schema_arrow, metadata.name_mapping(), downcast_ns_timestamp_to_us=True)
        _refuse_filled(task.file, metadata, schema, had)
        first = 0
        for batch in file.iter_batches(BATCH_ROWS):
            rows = projected(batch, had, schema)
            if gone is not None:
                positions = pa.array(range(first, first + batch.num_rows), pa.int64())
                rows = rows.filter(pc.invert(pc.is_in(positions, gone)))
            first += batch.num_rows
            if rows.num_rows:
                yield rows


def deleted_positions(task: FileScanTask, io: FileIO) -> pa.Array | None:
    """Return the positions of rows that delete files take from a data file; None if there is no delete file."""
    if not task.delete_files:
        return None
    found = []
    for each in task.delete_files:
        if each.content != DataFileContent.POSITION_DELETES or each.file_format != FileFormat.PARQUET:
            raise InvalidInput(
                f"delete file {each.file_path} has deletes that this job does not understand",
                hint="have the engine that wrote it rewrite the table's data files",
            )
        with io.new_input(each.file_path).open() as stream:
            rows = pq.read_table(stream, columns=["file_path", "pos"])
        found.append(rows.filter(pc.equal(rows.column("file_path"), task.file.file_path)).column("pos"))
    return pa.chunked_array([chunk for each in found for chunk in each.chunks], pa.int64()).combine_chunks()


def _refuse_filled(file: DataFile, metadata: TableMetadata, schema: Schema, had: Schema) -> None:
    """Refuse a file that has not all of its values inside: of a migrated table, or with defaults of format 3."""
    missing = schema.field_ids - had.field_ids
    spec = metadata.specs()[file.spec_id]
    for field in spec.fields:
        if field.source_id in missing and str(field.transform) == "identity":
            raise InvalidInput(f"{file.file_path} has the values of {field.name} in its partition only")
    for number in missing:
        if schema.find_field(number).initial_default is not None:
            raise InvalidInput(
                f"{file.file_path} was written before column {schema.find_field(number).name} had a default"
            )


def projected(batch: pa.RecordBatch, had: Schema, wanted: Schema) -> pa.Table:
    """Return rows with the columns that are wanted; `had` are those of the batch, in its order."""
    arrow = schema_to_pyarrow(wanted)
    places = {field.field_id: index for index, field in enumerate(had.fields)}
    columns = []
    for field, kind in zip(wanted.fields, arrow, strict=True):
        place = places.get(field.field_id)
        if place is None:
            columns.append(pa.nulls(batch.num_rows, kind.type))
        else:
            columns.append(_array(batch.column(place), had.fields[place].field_type, field.field_type, kind.type))
    nullable = pa.schema([field.with_nullable(True) for field in arrow])
    return pa.Table.from_arrays(columns, schema=nullable)


def _array(array: pa.Array, had: IcebergType, wanted: IcebergType, kind: pa.DataType) -> pa.Array:
    if isinstance(wanted, StructType) and isinstance(had, StructType):
        return _struct(array, had.fields, wanted.fields, kind)
    if isinstance(wanted, ListType) and isinstance(had, ListType):
        plain = _unsliced(array)
        values = _array(plain.values, had.element_type, wanted.element_type, kind.value_type)
        made = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        offsets = plain.offsets.cast(pa.int64() if made is pa.LargeListArray else pa.int32())
        return made.from_arrays(offsets, values, type=kind, mask=_mask(plain))
    if isinstance(wanted, MapType) and isinstance(had, MapType):
        plain = _unsliced(array)
        keys = _array(plain.keys, had.key_type, wanted.key_type, kind.key_type)
        items = _array(plain.items, had.value_type, wanted.value_type, kind.item_type)
        return pa.MapArray.from_arrays(plain.offsets, keys, items, type=kind, mask=_mask(plain))
    return array.cast(kind)


def _struct(
    array: pa.StructArray, had: tuple[NestedField, ...], wanted: tuple[NestedField, ...], kind: pa.StructType
) -> pa.Array:
    plain = _unsliced(array)
    places = {field.field_id: index for index, field in enumerate(had)}
    children = []
    for index, field in enumerate(wanted):
        place = places.get(field.field_id)
        child = kind.field(index).type
        if place is None:
            children.append(pa.nulls(len(plain), child))
        else:
            children.append(_array(plain.field(place), had[place].field_type, field.field_type, child))
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=_mask(plain))


def _unsliced(array: pa.Array) -> pa.Array:
    """Return an array whose buffers begin with its first value: masks go with no others."""
    return array if array.offset == 0 else pa.concat_arrays([array, array.slice(0, 0)])


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None
