"""What jobs share: how errors come back from Spark, names and progress in it, and options of the commands."""

from __future__ import annotations

import _thread
import contextlib
import os
import pty
import subprocess
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pyspark.errors import PythonException

from pyspark_tidelog.jobs import frame
from pyspark_tidelog.jobs.frame import ClusterAccess, cluster_access, told_by_spark
from tests.pyspark_tidelog.harness import Spark
from tests.pyspark_tidelog.job_harness import LOCAL, MARKS, JobWorld, answer
from tests.support.cli import Cli, environment
from tidelog.cli.spark_run import SparkRun, spark_options
from tidelog.runtime.errors import ConfigError, CorruptData, Unavailable

TRACE = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/somewhere/reading.py", line 60, in read_task
    raise ValueError("inner: with a colon")
ValueError: inner: with a colon

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/somewhere/reading.py", line 62, in read_task
{last}
"""


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        ("tidelog.runtime.errors.CorruptData: object 7 at byte 3: wrong CRC32C (see docs)", CorruptData),
        ("tidelog.storage.objects.reader.TruncatedObject: object 7 ends at byte 3", CorruptData),
        ("pyspark_tidelog.reading.DataLoss: t-0: offsets 0 to 4 do not exist any more", None),
    ],
)
def test_an_error_of_a_task_comes_back_as_what_it_was(last: str, kind: type[Exception] | None) -> None:
    import pyspark_tidelog.reading
    import tidelog.storage.objects.reader  # noqa: F401  # the classes are known where they are imported

    told = told_by_spark(PythonException(TRACE.format(last=last)))
    assert told is not None
    assert type(told).__name__ == last.partition(":")[0].rpartition(".")[2]
    assert isinstance(told, kind or pyspark_tidelog.reading.DataLoss)
    assert str(told) == last.partition(": ")[2]


def test_another_error_of_spark_is_unavailable_and_one_of_the_job_itself_stays() -> None:
    told = told_by_spark(PythonException(TRACE.format(last="MemoryError: no room")))
    assert isinstance(told, Unavailable)
    assert "An exception was thrown" in told.message
    assert told_by_spark(ValueError("tidelog.runtime.errors.CorruptData: no")) is None


def test_the_access_to_a_cluster_becomes_options_of_the_source() -> None:
    access = ClusterAccess("h:1", "secret", {"s3.region": "r"})
    wanted = {"kafka.bootstrap.servers": "h:1", "s3.region": "r", "readToken": "secret", "subscribe": "t"}
    assert access.source_options(subscribe="t") == wanted
    assert access.read_options().pattern == ".*"
    assert access.read_options(assign='{"t": [1]}').assigned == (("t", 1),)
    assert "secret" not in repr(access)


@pytest.mark.parametrize(("name", "said"), [("subscribe", "no option of the cluster"), ("s3.buckets", "s3.bucket?")])
def test_an_option_that_is_not_the_clusters_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cluster_access("h:1", "", {name: "x"})
    assert said in str(refused.value)


def test_the_options_of_all_jobs_are_one_argument_of_a_command() -> None:
    @click.command()
    @click.argument("topic")
    @click.option("--more", is_flag=True)
    @spark_options
    def job(call: SparkRun, topic: str, more: bool) -> None:
        """Do something."""
        click.echo(f"{call.bootstrap} {call.dry_run} {call.style} {topic} {more}")

    runner = CliRunner()
    told = runner.invoke(job, ["--bootstrap", "h:1", "--dry-run", "t", "--more", "--format", "json"])
    assert told.output == "h:1 True json t True\n"
    assert "Do something." in runner.invoke(job, ["--help"]).output


class StartingSession:
    """A session, which counts how often it is stopped."""

    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


def test_ctrl_c_while_spark_starts_waits_for_it_and_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session = StartingSession()

    def opened(*_: object) -> StartingSession:
        _thread.interrupt_main()
        return session

    def never(*_: object) -> str:
        raise AssertionError("there is nothing to run or to show")

    monkeypatch.setattr(frame, "open_session", opened)
    given = {"bootstrap": "h:1", "dry_run": False, "style": "table", "read_token_file": None, "master": "local[1]"}
    run = SparkRun({**given, "source_options": (), "conf": ()})
    with pytest.raises(KeyboardInterrupt):
        run.execute("audit", never, never, render=never, render_plan=never)
    assert session.stops == 1


@pytest.mark.processes
def test_jobs_are_listed_without_a_cluster() -> None:
    assert "with Spark" in Cli()("spark", "--help").text


def with_spark(function: Any) -> Any:
    for mark in MARKS:
        function = mark(function)
    return function


@with_spark
def test_a_job_has_a_name_in_spark_counts_its_tasks_and_raises_what_a_task_raised(spark: Spark) -> None:
    found = answer(spark, "frame", {})
    assert (found["inside"], found["after"]) == ("a stage", "mine")
    assert found["counts"] == [3, 0, 3] and found["jobs"] == 1
    (corrupt, other) = found["told"]
    assert corrupt == ["CorruptData", "number 2 is wrong (mend it)"]
    assert other[0] == "Unavailable" and "Spark ended the job" in other[1]


@with_spark
@pytest.mark.long
def test_progress_is_shown_on_a_terminal_only(world: JobWorld) -> None:
    """`--master` with few cores and an audit of some objects: its bar has the description of its stage."""
    world.produce("shown", 0, 0, 20)
    world.upload()
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tidelog", "spark", "audit", *LOCAL]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=slave, stdin=subprocess.DEVNULL, env=environment(world.bootstrap)
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while piece := os.read(master, 4096):
            shown += piece
    os.close(master)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"audit of " in shown or b"audit: check" in shown
    assert out.startswith(b"sound: ")
