"""The columns of the data source, in Spark's words and in Arrow's. They are those of Spark's Kafka source.

Spark does not tell a Python data source which columns a query uses. It has all of them sent to the JVM, and copies them
there. So a read may name fewer in its schema, in any order.

Entry: `column_names`, `columns_of` for a schema that a read was given; `spark_schema`, `arrow_schema`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidelog.runtime.errors import ConfigError

HEADERS = "headers"
_COLUMNS: dict[str, tuple[DataType, pa.DataType]] = {
    "key": (BinaryType(), pa.binary()),
    "value": (BinaryType(), pa.binary()),
    "topic": (StringType(), pa.string()),
    "partition": (IntegerType(), pa.int32()),
    "offset": (LongType(), pa.int64()),
    "timestamp": (TimestampType(), pa.timestamp("us", tz="UTC")),
    "timestampType": (IntegerType(), pa.int32()),
    HEADERS: (
        ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
        pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ),
}
"""Names and nullability as Spark has them: it compares."""
COLUMNS = tuple(name for name in _COLUMNS if name != HEADERS)
"""Those of a read that asks for nothing else."""
LAST_MS = ((1 << 63) - 1) // 1_000
"""The last timestamp that Spark can hold, in January of 294247; a later one of a record is told as this, and one before
its negative as that. Spark counts microseconds in 64 bits, and Kafka milliseconds."""


def column_names(*, include_headers: bool) -> tuple[str, ...]:
    """Return the columns of a read without a schema of its own."""
    return (*COLUMNS, HEADERS) if include_headers else COLUMNS


def columns_of(schema: StructType) -> tuple[str, ...]:
    """Return the columns that a read's own schema names. Raises `ConfigError` if the source has no such column.

    Metadata of columns, as comments of a view's, are whoever's.
    """
    names = tuple(schema.fieldNames())
    known = spark_schema(tuple(_COLUMNS))
    plain = [StructField(each.name, each.dataType, each.nullable) for each in schema]
    wrong = [each for each in plain if each.name not in _COLUMNS or each != known[each.name]]
    if wrong or len(set(names)) < len(names) or not names:
        raise ConfigError(
            f"the schema {schema.simpleString()} is not of columns of the source, which are {known.simpleString()}",
            hint="name some of them, each once, with its type and nullable; cast columns after the read",
        )
    return names


def spark_schema(columns: Sequence[str]) -> StructType:
    """Return the columns as Spark's type."""
    return StructType([StructField(name, _COLUMNS[name][0]) for name in columns])


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the columns as Spark wants them from a Python data source."""
    return pa.schema([(name, _COLUMNS[name][1]) for name in columns])
