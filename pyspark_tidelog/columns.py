"""The columns of the data source, in Spark's words and in Arrow's. They are those of Spark's Kafka source.

Entry: `spark_schema`, `arrow_schema`.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_PAIR = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_SPARK = [
    StructField("key", BinaryType()),
    StructField("value", BinaryType()),
    StructField("topic", StringType()),
    StructField("partition", IntegerType()),
    StructField("offset", LongType()),
    StructField("timestamp", TimestampType()),
    StructField("timestampType", IntegerType()),
]
_SPARK_HEADERS = StructField("headers", ArrayType(_PAIR))
_ARROW = (
    ("key", pa.binary()),
    ("value", pa.binary()),
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("timestamp", pa.timestamp("us", tz="UTC")),
    ("timestampType", pa.int32()),
)
_ARROW_HEADERS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
"""Names and nullability as Spark has them: it compares."""


def spark_schema(*, include_headers: bool) -> StructType:
    """Return the columns as Spark's type."""
    return StructType([*_SPARK, *([_SPARK_HEADERS] if include_headers else [])])


def arrow_schema(*, include_headers: bool) -> pa.Schema:
    """Return the columns as Spark wants them from a Python data source."""
    return pa.schema([*_ARROW, *([("headers", _ARROW_HEADERS)] if include_headers else [])])
