"""Reads that name their columns, in Spark's process: the harness calls these by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def read(spark: SparkSession, options: dict[str, str], schema: str) -> list[list[Any]]:
    """The rows of a batch read, binaries in hex, in the order of its columns."""
    frame = spark.read.format("tidelog").options(**options).schema(schema).load()
    return [[each.hex() if isinstance(each, bytes | bytearray) else each for each in row] for row in frame.collect()]


def follow(spark: SparkSession, options: dict[str, str], schema: str, place: str) -> list[list[Any]]:
    """The rows that a query of all that there is has written."""
    frame = spark.readStream.format("tidelog").options(**options).schema(schema).load()
    writer = frame.writeStream.format("parquet").option("checkpointLocation", f"{place}/checkpoint")
    writer.option("path", f"{place}/rows").trigger(availableNow=True).start().awaitTermination(120)
    return [list(row) for row in spark.read.parquet(f"{place}/rows").collect()]
