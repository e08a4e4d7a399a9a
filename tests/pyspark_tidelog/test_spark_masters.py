"""An installed wheel in Spark's own clusters: executors that are processes of their own, and need no more than it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, World
from tests.support.cluster_process import up_cluster
from tests.tidelog.test_wheel import build, checkout

__all__ = ["checkout"]  # a fixture

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
ANSWER_S = 240.0
DRIVER = """
import json, sys
from pyspark.sql import SparkSession
given = json.loads(sys.argv[1])
builder = SparkSession.builder
for name, value in given["settings"].items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
frame = spark.read.format("tidelog").options(**given["options"]).load()
rows = frame.selectExpr("count(*)", "count(distinct partition, offset)", "sum(offset)").collect()[0]
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
print(json.dumps([list(rows), executors]))
spark.stop()
"""
"""What a user's program is. Executors are told by Spark's own count, which has the driver in it."""


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(build("wheel", checkout, place / "wheel")) as packed:
        packed.extractall(place / "site")
    return place / "site"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        found = World(up)
        create_topic(found.bootstrap, "t", 2)
        for number in range(3):
            for partition in range(2):
                found.produce("t", partition, 100 * number, 100)
            found.upload()
        found.produce("t", 0, 300, 50)
        yield found


def environment(installed: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    return {**kept, "PYTHONPATH": str(installed), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def read(world: World, installed: Path, place: Path, master: str) -> tuple[list[int], int]:
    """What a program on this master reads, and the number of its processes."""
    settings = {
        "spark.master": master,
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": str(installed),
        "spark.executor.memory": "512m",
        "spark.local.dir": str(place / "local"),
    }
    home = place / "home"  # a local cluster keeps its executors' files there
    home.mkdir()
    for each in SPARK_CLASS.parents[1].iterdir():
        (home / each.name).symlink_to(each)
    given = {"settings": settings, "options": world.options(subscribe="t", maxBytesPerTask=4_000)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(given)],
        cwd=place,
        env={**environment(installed), "SPARK_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    rows, executors = json.loads(done.stdout.splitlines()[-1])
    return rows, executors


WHOLE = [650, 650, sum(range(300)) + sum(range(350))]


@pytest.mark.long
def test_spark_finds_the_source_in_an_installed_wheel(world: World, installed: Path, tmp_path: Path) -> None:
    assert read(world, installed, tmp_path, "local[2]") == (WHOLE, 1)


@pytest.mark.long
def test_executors_may_be_processes_of_their_own(world: World, installed: Path, tmp_path: Path) -> None:
    assert read(world, installed, tmp_path, "local-cluster[2,1,512]") == (WHOLE, 3)


@contextlib.contextmanager
def daemon(place: Path, installed: Path, *arguments: str) -> Iterator[list[str]]:
    """A process of a standalone cluster; yields what it says, from when it is up."""
    process = subprocess.Popen(
        [SPARK_CLASS, *arguments],
        cwd=place,
        env=environment(installed),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    watch = threading.Timer(ANSWER_S, process.kill)
    watch.start()
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if "Starting Spark master at" in line or "Successfully registered with master" in line:
                break
        else:
            pytest.fail("".join(said)[-3_000:])
        drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
        drain.start()
        yield said
    finally:
        watch.cancel()
        process.terminate()
        process.wait(60)
        process.stderr.close()


@pytest.mark.long
def test_a_standalone_cluster_reads(world: World, installed: Path, tmp_path: Path) -> None:
    where = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with daemon(tmp_path, installed, "org.apache.spark.deploy.master.Master", *where) as said:
        master = said[-1].split("Starting Spark master at ", 1)[1].strip()
        limits = ("--cores", "1", "--memory", "600m", "--work-dir", str(tmp_path / "work"), master)
        with daemon(tmp_path, installed, "org.apache.spark.deploy.worker.Worker", *where, *limits):
            assert read(world, installed, tmp_path, master) == (WHOLE, 2)


LOADED = """
import sys
import pyspark_tidelog.planning, pyspark_tidelog.decode, pyspark_tidelog.rows, pyspark_tidelog.sink
print("\\n".join(sys.modules))
"""


def test_a_task_imports_no_broker_and_no_controller(installed: Path, tmp_path: Path) -> None:
    more: Mapping[str, Any] = {"capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=tmp_path, env=environment(installed), **more)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"click", "kio", "prometheus_client", "pyiceberg", "pysyncobj", "rich", "sqlalchemy", "uvloop"}
    ours = {name for name in done.stdout.split() if name.startswith("tidelog.")}
    assert not [name for name in ours if name.split(".")[1] in ("broker", "cli", "controller", "simulation", "stream")]
