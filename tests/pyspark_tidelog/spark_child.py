"""A Spark application that does what it is told, a line of JSON at a time: a driver of its own for the tests.

{"plan": {OPTION: VALUE, …}, "where": TEXT}    plans a read and keeps it; the answer is the number of its tasks
{"read": true}                                 reads what was planned; the answer is the rows, binaries in hex
{"call": "MODULE:FUNCTION", "with": {…}}       calls a function with the session and these arguments; answers its result
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession


def answer(spark: SparkSession, command: dict[str, Any], kept: dict[str, Any]) -> Any:
    if "plan" in command:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", command.get("pushes", False))
        frame: DataFrame = spark.read.format("tidelog").options(**command["plan"]).load()
        if command.get("where"):
            frame = frame.where(command["where"])
        kept["columns"] = frame.columns
        kept["rdd"] = frame.rdd
        return kept["rdd"].getNumPartitions()
    if "stream" in command:
        trigger: dict[str, Any] = command["trigger"]
        writer = spark.readStream.format("tidelog").options(**command["stream"]).load().writeStream.format("parquet")
        writer = writer.option("path", command["path"]).option("checkpointLocation", command["checkpoint"])
        kept["query"] = writer.trigger(**trigger).start()
        return str(kept["query"].id)
    if "finish" in command:
        query = kept["query"]
        if command["finish"] == "all":
            query.processAllAvailable()
            query.stop()
        elif not query.awaitTermination(int(command["finish"])):
            raise TimeoutError("the query goes on")
        return query.lastProgress is not None
    if "written" in command:
        kept["rdd"] = spark.read.parquet(command["written"]).rdd
    if "call" in command:
        module, _, function = command["call"].partition(":")
        return getattr(importlib.import_module(module), function)(spark, **command["with"])
    rows = [row.asDict(recursive=True) for row in kept["rdd"].collect()]
    for row in rows:
        row["timestamp"] = round(row["timestamp"].timestamp() * 1_000)
        for name in ("key", "value"):
            row[name] = None if row[name] is None else row[name].hex()
        for header in row.get("headers") or ():
            header["value"] = None if header["value"] is None else header["value"].hex()
    return rows


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr
    builder: Any = SparkSession.builder
    for name, value in (pair.split("=", 1) for pair in sys.argv[1:]):
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    kept: dict[str, Any] = {}
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        try:
            told: dict[str, Any] = {"ok": answer(spark, json.loads(line), kept)}
        except Exception as error:  # noqa: BLE001  # the test decides what is expected
            told = {"error": str(error)}
        print(json.dumps(told), file=out, flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
