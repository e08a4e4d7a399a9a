"""What the tests of jobs have Spark do (`spark_child`): each function is given the session."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pyspark_tidelog.jobs import audit as audit_job
from pyspark_tidelog.jobs import backfill as backfill_job
from pyspark_tidelog.jobs import load as load_job
from pyspark_tidelog.jobs import replay as replay_job
from pyspark_tidelog.jobs.frame import ClusterAccess, spark_job
from pyspark_tidelog.jobs.inventory import Inventory, take_inventory
from pyspark_tidelog.jobs.progress import JobProgress
from tests.support.cli import until
from tidelog.runtime.errors import CorruptData, TidelogError


def frame(spark: SparkSession) -> dict[str, Any]:
    """Run a job of three tasks that says what it sees, and one that fails; return what they left."""

    def fail(number: int) -> int:
        raise CorruptData(f"number {number} is wrong", hint="mend it") if number == 2 else ValueError("no")

    context = spark.sparkContext
    context.setJobDescription("mine")
    tracker = context.statusTracker()
    with spark_job(spark, "some", "something") as job, job.stage("a stage"):
        inside = context.getLocalProperty("spark.job.description")
        context.parallelize(range(6), 3).count()
        counts = JobProgress(context, job.group, "").counts()
        jobs = len(tracker.getJobIdsForGroup(job.group))
    told = []
    for numbers in ([2], [1]):
        try:
            with spark_job(spark, "some", "something"):
                context.parallelize(numbers, 1).map(fail).collect()
        except TidelogError as error:
            told.append([type(error).__name__, str(error)])
    after = context.getLocalProperty("spark.job.description")
    context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]  # its stub knows text only
    return {"inside": inside, "counts": counts, "jobs": jobs, "told": told, "after": after}


def audit(spark: SparkSession, bootstrap: str, token: str, report: str = "", *, batches: bool = True) -> dict[str, Any]:
    """Audit a cluster."""
    options = audit_job.AuditOptions(ClusterAccess(bootstrap, token), report, task_bytes=10_000, batches=batches)
    return asdict(audit_job.run(spark, options))


def audit_in_steps(spark: SparkSession, bootstrap: str, token: str, directory: str) -> dict[str, Any]:
    """Audit a cluster; wait between the first look at the metadata and the first read until the file `go` is there."""
    looked, go = Path(directory) / "looked", Path(directory) / "go"

    def slowly(access: ClusterAccess, version: int) -> Inventory:
        found = take_inventory(access, version)
        looked.touch()
        until(go.exists)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_job, "take_inventory", slowly)
        return audit(spark, bootstrap, token)


def replay(spark: SparkSession, bootstrap: str, token: str, **options: Any) -> dict[str, Any]:
    """Replay a topic."""
    return asdict(replay_job.run(spark, replay_job.ReplayOptions(ClusterAccess(bootstrap, token), **options)))


def backfill(spark: SparkSession, bootstrap: str, source: str, topic: str, **options: Any) -> dict[str, Any]:
    """Backfill a topic."""
    access, settings = ClusterAccess(bootstrap), {"bootstrap.servers": source}
    return asdict(backfill_job.run(spark, backfill_job.BackfillOptions(access, settings, topic, **options)))


def load(spark: SparkSession, bootstrap: str, sql: str = "", **options: Any) -> dict[str, Any]:
    """Load files, or the rows of a query."""
    wanted = load_job.LoadOptions(ClusterAccess(bootstrap), **options)
    return asdict(load_job.run(spark, wanted, spark.sql(sql) if sql else None))


def write_parquet(spark: SparkSession, sql: str, path: str) -> None:
    """Write the rows of a query to one file."""
    spark.sql(sql).coalesce(1).write.parquet(path)


def read_parquet(spark: SparkSession, path: str) -> list[dict[str, Any]]:
    """Read the rows of Parquet files, in the order of partition and offset; binaries in hex."""
    rows = [row.asDict(recursive=True) for row in spark.read.parquet(path).orderBy("partition", "offset").collect()]
    for row in rows:
        row["timestamp"] = round(row["timestamp"].timestamp() * 1_000)
        row["day"] = str(row["day"])
        for holder in (row, *(row["headers"] or ())):
            holder.update({name: value.hex() for name, value in holder.items() if isinstance(value, bytearray | bytes)})
    return rows
