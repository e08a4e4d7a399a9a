"""What the tests of the sink have Spark do (`spark_child`): each function is given the session."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


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
    spark: SparkSession, rows: int, columns: list[str], options: dict[str, str], checkpoint: str, mode: str = "append"
) -> int:
    """Write what a stream of numbers has now, `rows` of them with each call of a checkpoint; return the batch's id."""
    source: Any = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    frame = source.load()
    if mode == "complete":
        spark.conf.set("spark.sql.shuffle.partitions", 2)
        frame = frame.groupBy((frame.value % 3).alias("value")).count()
    query = (
        frame.selectExpr(*columns)
        .writeStream.format("tidelog")
        .outputMode(mode)
        .options(**options)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return int(query.lastProgress["batchId"])
