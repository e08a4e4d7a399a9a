"""What the tests of the sink have Spark do (`spark_child`): each function is given the session."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery


def write(
    spark: SparkSession, sql: str, options: dict[str, str], format: str = "tidelog", mode: str = "append"
) -> None:
    """Write the rows of a query."""
    spark.sql(sql).write.format(format).mode(mode).options(**options).save()


def copy(spark: SparkSession, source: dict[str, str], options: dict[str, str], drop: list[str]) -> None:
    """Write what is read, as it is but for some columns."""
    frame = spark.read.format("tidelog").options(**source).load().drop(*drop)
    frame.write.format("tidelog").mode("append").options(**options).save()


def stream(
    spark: SparkSession,
    rows: int,
    columns: list[str],
    options: dict[str, str],
    checkpoint: str,
    mode: str = "append",
    format: str = "tidelog",
) -> int:
    """Write what a stream of numbers has now, `rows` of them with each call of a checkpoint; return the batch's id."""
    source: Any = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    frame = source.load()
    if mode == "complete":
        spark.conf.set("spark.sql.shuffle.partitions", 2)
        frame = frame.groupBy((frame.value % 3).alias("value")).count()
    query = (
        frame.selectExpr(*columns)
        .writeStream.format(format)
        .outputMode(mode)
        .options(**options)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    return _ended(query)


def read(spark: SparkSession, format: str, options: dict[str, str]) -> dict[str, Any]:
    """Read a topic: its columns, and its rows as text, in order."""
    frame = spark.read.format(format).options(**options).load()
    rows = frame.orderBy("topic", "partition", "offset").selectExpr("to_json(struct(*)) as row").collect()
    return {"columns": frame.schema.jsonValue()["fields"], "rows": [row["row"] for row in rows]}


def follow(spark: SparkSession, options: dict[str, str], directory: str) -> list[list[int]]:
    """Read what a stream of Spark's Kafka source has now into files; return all partitions and offsets ever read."""
    source: Any = spark.readStream.format("kafka").options(**options)
    files = f"{directory}/files"
    query = (
        source.load()
        .select("partition", "offset")
        .writeStream.format("parquet")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start(files)
    )
    _ended(query)
    return sorted([row["partition"], row["offset"]] for row in spark.read.parquet(files).collect())


def _ended(query: StreamingQuery) -> int:
    """Wait for the end of a query that has one; return the id of its last batch."""
    try:
        query.awaitTermination()
    finally:
        query.stop()
    progress = query.lastProgress
    assert progress is not None
    return int(progress["batchId"])
