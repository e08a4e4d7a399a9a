"""What jobs share: how they reach the cluster, their session, their names in Spark's UI, their progress and errors.

`spark_job` is around all that a job has Spark do. It gives the work a job group, so that it can be cancelled and be
recognized in Spark's UI; shows its progress on a terminal; and raises an error that a task or the data source raised as
the `TidelogError` that it was, with message and hint, whereas Spark's own exception has pages of both call stacks.

Entry: `ClusterAccess`, `open_session`, `spark_job`.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark_tidelog.jobs.progress import JobProgress
from pyspark_tidelog.options import ReadOptions, read_options
from tidelog.runtime.errors import ConfigError, TidelogError, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyspark_tidelog.cluster import Cluster

OPTION_PREFIXES = ("s3.", "kafka.")
"""Options of the data source that every job takes."""
LOOPBACK = "127.0.0.1"
_LOCAL = re.compile(r"local(\[[^\]]*\])?$")
_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_WAYS = frozenset({"subscribe", "subscribepattern", "assign"})
_RAISED = re.compile(r"^(?:[\w.]+\.)?(?P<name>[A-Z]\w+): (?P<text>.*)$")


@dataclass(frozen=True)
class ClusterAccess:
    """How a job reaches the cluster. Pickled to the executors."""

    bootstrap: str
    """`HOST:PORT`, several with commas."""
    token: str = field(default="", repr=False)
    """The read token; empty where the cluster has no secret."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further options of the data source that begin with one of `OPTION_PREFIXES`."""

    def source_options(self, **more: object) -> dict[str, str]:
        """Return options for `spark.read.format("tidelog")`; `more` are further ones by their names."""
        found = {"kafka.bootstrap.servers": self.bootstrap, **self.options}
        if self.token:
            found["readToken"] = self.token
        return {**found, **{name: str(value) for name, value in more.items()}}

    def read_options(self, **more: object) -> ReadOptions:
        """Return the same, checked; of all topics, unless `more` names some. Raises `ConfigError`."""
        if not _WAYS & {name.lower() for name in more}:
            more = {"subscribePattern": ".*", **more}
        return read_options(self.source_options(**more))

    def connect(self, **more: object) -> Cluster:
        """Ask the cluster for its topics. Raises `ConfigError`, `Unavailable`."""
        from pyspark_tidelog.cluster import Cluster

        return Cluster(self.read_options(**more))


def cluster_access(bootstrap: str, token: str, options: Mapping[str, str]) -> ClusterAccess:
    """Return the checked access. Raises `ConfigError` for an option that is not one of the cluster's."""
    for name in options:
        if not name.lower().startswith(OPTION_PREFIXES):
            raise ConfigError(
                f"{name!r} is no option of the cluster",
                hint=f"those that begin with {' or '.join(OPTION_PREFIXES)} are; see docs/spark.md",
            )
    found = ClusterAccess(bootstrap, token, dict(options))
    found.read_options()
    return found


def open_session(name: str, master: str, conf: Mapping[str, str]) -> SparkSession:
    """Start a session on `master` in client mode; `conf` goes to Spark as it is. Raises `ConfigError`, `Unavailable`.

    The executors of a local master have this process's Python, unless PYSPARK_PYTHON names one; and it listens on
    127.0.0.1 only, unless SPARK_LOCAL_IP says otherwise. Spark logs what is fatal only: a task's error is raised.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from pyspark_tidelog.source import TidelogSource

    if _LOCAL.match(master):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    settings = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "FATAL", **conf}
    builder: Any = SparkSession.builder
    builder = builder.appName(f"tidelog {name}").master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        found: SparkSession = builder.getOrCreate()
    except PySparkException as error:
        raise Unavailable(f"Spark does not start: {error}", hint="does this machine have a Java runtime?") from error
    except Exception as error:  # of Py4J, whose module is imported with Spark's
        if type(error).__module__.partition(".")[0] != "py4j":
            raise
        told = _first_line(error)
        raise ConfigError(
            f"Spark does not start with master {master!r}: {told}", hint="see --master, --conf"
        ) from error
    found.dataSource.register(TidelogSource)  # Spark itself does not see one that is installed to be edited
    return found


class RunningJob:
    """A job that is under way in Spark."""

    def __init__(self, spark: SparkSession, group: str, progress: JobProgress) -> None:
        self._context: Any = spark.sparkContext  # a local property may be None, whatever its stub says
        self._progress = progress
        self.group = group
        """Id of its job group."""

    @contextmanager
    def stage(self, description: str) -> Iterator[None]:
        """Give what Spark does inside a description, for its UI and the progress."""
        before = self._context.getLocalProperty("spark.job.description")
        self._context.setJobDescription(description)
        self._progress.describe(description)
        try:
            yield
        finally:
            self._context.setLocalProperty("spark.job.description", before)


@contextmanager
def spark_job(spark: SparkSession, job: str, description: str) -> Iterator[RunningJob]:
    """Be around all that a job has Spark do. `job` is its name, `description` what it does to what, for people.

    An exception ends what is still running. Raises the `TidelogError` that a task raised; and `Unavailable` for
    whatever else ends a job in Spark.
    """
    # Makes the session the active one of this thread, which has none: Spark knows no source written in Python without.
    spark.createDataFrame([], "nothing int")
    context: Any = spark.sparkContext
    group = f"tidelog-{job}-{uuid.uuid4().hex[:8]}"
    before = {name: context.getLocalProperty(name) for name in _PROPERTIES}
    context.setJobGroup(group, description, interruptOnCancel=False)
    try:
        with JobProgress(context, group, description) as progress:
            yield RunningJob(spark, group, progress)
    except BaseException as error:
        context.cancelJobGroup(group)
        told = told_by_spark(error)
        if told is None:
            raise
        raise told from error
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)


def told_by_spark(error: BaseException) -> TidelogError | None:
    """Return the error that an exception of Spark stands for; None if it is not Spark's."""
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    kinds = {kind.__name__: kind for kind in _all_kinds(TidelogError)}
    found: TidelogError | None = None
    for line in str(error).splitlines():
        match = _RAISED.match(line.strip())
        if match is not None and match["name"] in kinds:
            found = _with_hint(kinds[match["name"]], match["text"])
    if found is not None:
        return found
    return Unavailable(f"Spark ended the job: {_first_line(error)}", hint="--conf spark.log.level=ERROR tells more")


def _all_kinds(kind: type[TidelogError]) -> Iterator[type[TidelogError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _all_kinds(each)


def _with_hint(kind: type[TidelogError], text: str) -> TidelogError:
    """Return the error whose text is `message (hint)`; a subclass may have another constructor, and needs none here."""
    error = kind.__new__(kind)
    TidelogError.__init__(error, text)
    error.args = (text,)
    return error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if not line.startswith("An error occurred while calling")), type(error).__name__
    )
