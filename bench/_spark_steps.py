"""What Spark's process does for `bench.spark_scan`. The harness of the tests calls it there by name.

CPU time is that of all of Spark: driver, JVM, and Python workers, also those that have ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUMS = ("sum(length(value))", "count(*)", "max(offset)")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tasks(spark: SparkSession, source: str, options: dict[str, str]) -> int:
    """Return the number of tasks of a read."""
    return int(spark.read.format(source).options(**options).load().rdd.getNumPartitions())


def scan(
    spark: SparkSession, source: str, options: dict[str, str], columns: list[str] | None = None, schema: str = ""
) -> dict[str, Any]:
    """Read a topic from planning to the last row; return what `columns` (`SUMS`) are, seconds, and CPU seconds.

    `schema`: of what the source is asked for; empty: all that it has.
    """
    used, started = _cpu_seconds(os.getpid()), time.perf_counter()
    reader = spark.read.format(source).options(**options)
    frame = (reader.schema(schema) if schema else reader).load()
    (found,) = frame.selectExpr(*(columns or SUMS)).collect()
    seconds = time.perf_counter() - started
    return {"found": list(found), "seconds": seconds, "cpu_s": _cpu_seconds(os.getpid()) - used}


def _cpu_seconds(root: int) -> float:
    """CPU time of a process, of all below it, and of those of them that have ended."""
    parents, ticks = {}, {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended: its parent has its time
            fields = place.read_text().rpartition(")")[2].split()
            pid = int(place.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    found, added = {root}, {root}
    while added:
        added = {pid for pid, parent in parents.items() if parent in added}
        found |= added
    return sum(ticks[pid] for pid in found) / _TICKS_PER_S
