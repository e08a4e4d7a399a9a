"""`tidelog spark table-compact`: small files of a table are put together, and its offsets stay as they are.

The new snapshot has the state of the one that it follows. A commit of another job between reading and committing does
no harm: what was written is committed on top of it, as long as the files that it replaces are still there. Each group
of files has an attempt of its own, because each is committed alone.

Entry: `plan`, `run`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyiceberg.table import FileScanTask

from pyspark_tidelog.jobs.frame import spark_job
from pyspark_tidelog.jobs.table.attempts import Attempts, rewrite_name
from pyspark_tidelog.jobs.table.tables import (
    CatalogOptions,
    JobTable,
    catalog_file,
    deletes_of,
    open_catalog,
    store_errors,
    swap,
)
from pyspark_tidelog.jobs.table.tasks import RewritePlan, rewrite
from pyspark_tidelog.jobs.table.upserts import without_history
from pyspark_tidelog.jobs.table.writer import DEFAULT_FILE_BYTES, WriteTarget
from tidelog.runtime.errors import NotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL = 0.75
"""A file below this part of the wanted size is small."""
GROUPS_AT_ONCE = 64
"""Groups of files that Spark rewrites at once."""


@dataclass(frozen=True)
class RewriteOptions:
    """What `tidelog spark table-compact` is to do."""

    table: str
    catalog: CatalogOptions
    file_bytes: int = DEFAULT_FILE_BYTES


@dataclass(frozen=True)
class RewriteForecast:
    """What a run would do now."""

    table: str
    files: int
    """All of the table."""
    rewritten: int
    bytes: int
    """Of the files that would be rewritten."""
    groups: int


@dataclass(frozen=True)
class RewriteResult:
    """What a run did."""

    table: str
    rewritten: int = 0
    written: int = 0
    skipped: int = 0
    """Files that others have replaced meanwhile."""
    commits: int = 0

    def plus(self, other: RewriteResult) -> RewriteResult:
        """Return the sum."""
        return RewriteResult(
            self.table,
            self.rewritten + other.rewritten,
            self.written + other.written,
            self.skipped + other.skipped,
            self.commits + other.commits,
        )


def plan(options: RewriteOptions) -> RewriteForecast:
    """Say what a run would do. Changes nothing."""
    with store_errors():
        table = _existing(options)
        tasks = list(table.table.scan().plan_files())
    groups = group_small(tasks, table.table.metadata.default_spec_id, options.file_bytes)
    chosen = [task.file.file_size_in_bytes for group in groups for task in group]
    return RewriteForecast(options.table, len(tasks), len(chosen), sum(chosen), len(groups))


def run(spark: SparkSession, options: RewriteOptions) -> RewriteResult:
    """Put the small files that there are together. Raises `NotFound`, `Unavailable`."""
    result = RewriteResult(options.table)
    with spark_job(spark, "table-compact", f"small files of table {options.table}") as job, store_errors():
        table = _existing(options)
        Attempts(table.table).clean(table.state.number if table.state is not None else 0)
        groups = group_small(table.table.scan().plan_files(), table.table.metadata.default_spec_id, options.file_bytes)
        for first in range(0, len(groups), GROUPS_AT_ONCE):
            some = groups[first : first + GROUPS_AT_ONCE]
            with job.stage(f"rewrites {sum(map(len, some)):,} files of {table.identifier}"):
                result = _rewritten(spark, options, table, some, result)
    return result


def _existing(options: RewriteOptions) -> JobTable:
    """Return the table, and make no catalog for that. Raises `NotFound`."""
    file = catalog_file(options.catalog)
    table = JobTable.find(open_catalog(options.catalog), options.table) if file is None or file.exists() else None
    if table is None:
        raise NotFound(f"there is no table {options.table}", hint="see --warehouse and --catalog-uri")
    return table


def _rewritten(
    spark: SparkSession,
    options: RewriteOptions,
    table: JobTable,
    groups: list[list[FileScanTask]],
    result: RewriteResult,
) -> RewriteResult:
    """Rewrite groups of files, and commit each; what others have changed meanwhile is left as it is."""
    attempts = Attempts(table.table)
    metadata = table.table.metadata
    begun = {}
    for group in groups:
        name = rewrite_name(uuid.uuid4().hex[:12])
        attempts.begin(name, [task.file.file_path for task in group])
        begun[name] = group
    target = WriteTarget.of(metadata, table.table.io, attempts.directory(""), options.file_bytes)
    work = partial(rewrite, plan=RewritePlan(target, without_history(metadata)))
    for name, files in spark.sparkContext.parallelize(list(begun.items()), len(begun)).map(work).collect():
        group = begun[name]
        new = {each.file_path for each in files}
        stage = partial(swap, old=[task.file for task in group], new=files)
        if table.replace({task.file.file_path: deletes_of(task) for task in group}, new, stage):
            attempts.end(name, new)
            done = RewriteResult(options.table, len(group), len(new), 0, 1)
        else:
            attempts.abandon(name)
            done = RewriteResult(options.table, skipped=len(group))
        result = result.plus(done)
    return result


def group_small(tasks: Iterable[FileScanTask], spec_id: int, file_bytes: int) -> list[list[FileScanTask]]:
    """Return groups of small files that belong together: of one partition of the table, about `file_bytes` in all.

    A file of an earlier partitioning is small whatever its size is, as is one from which others have deleted rows.
    """
    by_partition: dict[object, list[FileScanTask]] = {}
    for task in tasks:
        is_old = task.file.spec_id != spec_id
        if is_old or task.delete_files or task.file.file_size_in_bytes < SMALL * file_bytes:
            key = None if is_old else tuple(task.file.partition[at] for at in range(len(task.file.partition)))
            by_partition.setdefault(key, []).append(task)
    groups: list[list[FileScanTask]] = []
    for mine in by_partition.values():
        group: list[FileScanTask] = []
        size = 0
        for task in sorted(mine, key=lambda each: each.file.file_path):
            if group and size + task.file.file_size_in_bytes > file_bytes:
                groups.append(group)
                group, size = [], 0
            group.append(task)
            size += task.file.file_size_in_bytes
        groups.append(group)
    return [group for group in groups if len(group) > 1 or _must(group[0], spec_id)]


def _must(task: FileScanTask, spec_id: int) -> bool:
    return task.file.spec_id != spec_id or bool(task.delete_files)
