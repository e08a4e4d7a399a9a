"""What the tests of jobs share: a cluster with its bucket, jobs in a session, and commands that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pyspark_tidelog.harness import Row, Spark, World
from tests.support.bucket_files import bucket_files
from tests.support.cli import environment, until
from tests.support.cluster_process import UpCluster

MARKS = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]
LOCAL = ("--master", "local[2]", "--conf", "spark.ui.enabled=false")
ONE_AT_A_TIME = ("--option", "kafka.batch.num.messages=1", "--option", "kafka.max.in.flight=1")
"""Has a job write so slowly that it can be killed while it does."""
_STEPS = "tests.pyspark_tidelog.job_steps"


class JobWorld(World):
    """A cluster, whose bucket can be damaged."""

    def __init__(self, up: UpCluster) -> None:
        super().__init__(up)
        self.bucket = up.data_dir / "bucket"

    def file(self, object_id: int) -> Path:
        """The file of an object."""
        (found,) = [path for path in bucket_files(self.bucket) if path.name == f"{object_id:016x}"]
        return found


def answer(spark: Spark, step: str, arguments: dict[str, Any]) -> Any:
    """What a step of `job_steps` returns."""
    told = spark.ask(**{"call": f"{_STEPS}:{step}", "with": arguments})
    assert "ok" in told, told["error"]
    return told["ok"]


def error(spark: Spark, step: str, arguments: dict[str, Any]) -> str:
    """The error of a step of `job_steps`."""
    told = spark.ask(**{"call": f"{_STEPS}:{step}", "with": arguments})
    assert "error" in told, told["ok"]
    return str(told["error"])


def rows_of(spark: Spark, world: World, topic: str) -> list[Row]:
    """All rows of a topic, with headers."""
    return spark.read(world.options(subscribe=topic, includeHeaders="true"))


def killed(bootstrap: str, arguments: tuple[str, ...], when: Callable[[], bool], log: Path) -> None:
    """Run a job's command, and kill it with all its processes when a condition holds."""
    command = [sys.executable, "-m", "tidelog", "spark", *arguments, *LOCAL, *ONE_AT_A_TIME]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(bootstrap), start_new_session=True)
        until(lambda: when() or process.poll() is not None)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
