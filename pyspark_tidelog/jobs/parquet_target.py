"""A directory of Parquet files that a job makes as a whole, on any file system that Spark has. On the driver.

Spark writes into a directory beside it, which then takes its place by a rename: a reader sees all files of one run, or
those of the run before. A run that was killed leaves that directory behind, and the next one writes it anew. Only a
directory that has the file `MARKER`, which tells which job made it, is replaced.

On a file system whose rename is no single step (an S3 bucket) a reader should look for `_SUCCESS`.

Entry: `OwnedDirectory`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidelog.runtime.errors import AlreadyExists, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MARKER = "_tidelog_job"
"""Spark's and other readers leave out names that begin with `_`."""


class OwnedDirectory:
    """The directory `path`, made by the job that `owner` describes."""

    def __init__(self, spark: SparkSession, path: str, owner: str) -> None:
        """Raises `AlreadyExists` for what no such job has made."""
        context: Any = spark.sparkContext
        self._hadoop = context._jvm.org.apache.hadoop.fs
        self._path = self._hadoop.Path(path)
        self._draft = self._path.suffix(".draft")
        self._before = self._path.suffix(".before")
        self._files = self._path.getFileSystem(context._jsc.hadoopConfiguration())
        self._owner = owner
        self.path = path
        for each in (self._path, self._draft, self._before):
            self._check_mine(each)

    def _check_mine(self, path: Any) -> None:
        if not self._files.exists(path) or self._read(self._hadoop.Path(path, MARKER)) == self._owner:
            return
        raise AlreadyExists(
            f"{path.toString()} is there, and was not made by this job with the same topic",
            hint="name another path, or remove it",
        )

    def _read(self, path: Any) -> str | None:
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def replace(self, frame: DataFrame, columns: list[str]) -> None:
        """Write a frame's rows, in directories by the values of columns, in place of what is there.

        Raises `Unavailable`, and what Spark raises.
        """
        self._files.delete(self._draft, True)
        self._mark(self._draft)  # first: what a killed run leaves is known as this job's
        frame.write.mode("append").partitionBy(*columns).parquet(self._draft.toString())
        self._files.delete(self._before, True)
        if self._files.exists(self._path):
            self._rename(self._path, self._before)
        self._rename(self._draft, self._path)
        self._files.delete(self._before, True)

    def _mark(self, path: Any) -> None:
        stream = self._files.create(self._hadoop.Path(path, MARKER), True)
        try:
            stream.write(self._owner.encode())
        finally:
            stream.close()

    def _rename(self, path: Any, to: Any) -> None:
        if not self._files.rename(path, to):
            raise Unavailable(f"{path.toString()} cannot be renamed to {to.toString()}", hint="run it again")
