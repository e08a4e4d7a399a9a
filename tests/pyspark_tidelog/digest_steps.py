"""Digests by Spark, for `spark_child`."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from tests.support.digests import COLUMNS

TABLE_NAMES = {"_topic": "topic", "_partition": "partition", "_offset": "offset", "_timestamp": "timestamp"}


def of_files(spark: SparkSession, paths: list[str]) -> list[dict[str, Any]]:
    """The digest of each partition in Parquet files: of a stream, a replay, or a raw table."""
    frame = spark.read.parquet(*paths)
    for old, new in TABLE_NAMES.items():
        frame = frame.withColumnRenamed(old, new)
    columns = [f"{sql} as {name}" for name, sql in COLUMNS.items()]
    frame.createOrReplaceTempView("records")
    rows = spark.sql(f"select topic, partition, {', '.join(columns)} from records group by topic, partition").collect()
    return [row.asDict() for row in rows]
