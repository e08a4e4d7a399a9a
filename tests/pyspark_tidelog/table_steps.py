"""What the tests of tables have Spark do (`spark_child`), and have happen at steps of the job."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pyspark_tidelog.jobs.frame import ClusterAccess
from pyspark_tidelog.jobs.table import compaction, job
from pyspark_tidelog.jobs.table.state import TableState
from pyspark_tidelog.jobs.table.tables import CatalogOptions, JobTable, Stage
from tidelog.runtime.errors import Fenced

QUARANTINE = "_quarantine"


def options(bootstrap: str, token: str, topic: str, warehouse: str, **more: Any) -> job.TableOptions:
    for name in ("partition_by", "upsert_by"):
        more[name] = tuple(more.get(name, ()))
    return job.TableOptions(
        ClusterAccess(bootstrap, token),
        topic,
        more.pop("table", "lake.t"),
        CatalogOptions(warehouse, properties=more.pop("properties", None)),
        **more,
    )


def ingest(spark: SparkSession, die_at: str = "", stop_at: str = "", **given: Any) -> dict[str, Any]:
    """Run the job; die, or stop with an error, at a step.

    The steps: `files` are written, and nothing is committed; the `commit` of the table is done, and what does not fit
    is not in the quarantine yet; it is in the `quarantine`.
    """
    chosen = options(**given)

    def happen(step: str) -> None:
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == stop_at:
            raise StoppedHere(step)

    with at_steps(happen):
        return asdict(job.run(spark, chosen))


@contextmanager
def at_steps(happen: Callable[[str], None]) -> Iterator[None]:
    """Have `happen` called at each step of a commit; the steps are those of `ingest`."""
    plainly = JobTable.advance

    def advance(table: JobTable, wanted: TableState, stage: Stage, *, is_repeatable: bool) -> bool:
        is_main = not table.identifier.endswith(QUARANTINE)
        if is_main:
            happen("files")
        done = plainly(table, wanted, stage, is_repeatable=is_repeatable)
        happen("commit" if is_main else "quarantine")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobTable, "advance", advance)
        yield


def compact(spark: SparkSession, table: str, warehouse: str, file_bytes: int) -> dict[str, Any]:
    """Put the small files of a table together."""
    return asdict(compaction.run(spark, compaction.RewriteOptions(table, CatalogOptions(warehouse), file_bytes)))


class StoppedHere(Exception):
    """A job is stopped at a step, as if it were killed there."""


def two_at_once(spark: SparkSession, stops: bool, **given: Any) -> dict[str, Any]:
    """Run a job, and another one of the same kind when the first is about to commit. Returns what both say.

    The second one `stops` when it has committed the table, and added nothing to the quarantine.
    """
    chosen = options(**given)
    told: dict[str, Any] = {}

    def happen(step: str) -> None:
        if step == "files" and "second" not in told:
            told["second"] = "stopped"
            with contextlib.suppress(StoppedHere):
                told["second"] = asdict(job.run(spark, chosen))
        elif step == "commit" and stops:
            raise StoppedHere

    with at_steps(happen):
        try:
            told["first"] = asdict(job.run(spark, chosen))
        except Fenced as error:
            told["first"] = str(error)
    return told
