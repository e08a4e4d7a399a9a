"""A streaming query from topic to topic that writes exactly once, for `tests.harness.spark_sink`: a program of its own.

    python -m tests.pyspark_tidelog.sink_query '{"bootstrap": …, "source": …, "target": …, "checkpoint": …, …}'

Each record goes to the partition with the number of its own, and the records of a partition are in one task, in order,
whatever the number of tasks is; so the target equals the source.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession


def in_order(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of a task by partition and offset: Spark has no sort for streams."""
    if found := list(batches):
        table = pa.Table.from_batches(found).sort_by([("partition", "ascending"), ("offset", "ascending")])
        yield from table.to_batches()


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    where = {"kafka.bootstrap.servers": given["bootstrap"]}
    builder: Any = SparkSession.builder
    for name, value in given["settings"].items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    frame = (
        spark.readStream.format("tidelog")
        .options(**where)
        .option("subscribe", given["source"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", given["max_offsets"])
        .option("readToken", given["token"])
        .load()
        .select("key", "value", "partition", "offset")
        .repartition(given["tasks"], "partition")
    )
    frame = frame.mapInArrow(in_order, frame.schema)
    writer = (
        frame.select("key", "value", "partition")
        .writeStream.format("tidelog")
        .options(**where)
        .option("topic", given["target"])
        .option("exactlyOnce", "true")
        .option("checkpointLocation", given["checkpoint"])
    )
    if given["ends"]:
        writer = writer.trigger(availableNow=True)
    writer.start().awaitTermination()


if __name__ == "__main__":
    main()
