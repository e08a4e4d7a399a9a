"""Flink's Kafka sink, exactly once, against three brokers: the job is killed, and goes on at a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.backends import create_topic
from tests.support.clients import wait_until
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.committed import committed_values
from tests.support.java import Java

pytestmark = [pytest.mark.servers("flink"), pytest.mark.slow, pytest.mark.long]
PARTITIONS, COUNT, PER_SECOND = 3, 4_000, 200
OPENED = [
    option
    for package in ("java.lang", "java.util", "java.util.concurrent", "java.net", "java.nio")
    for option in ("--add-opens", f"java.base/{package}=ALL-UNNAMED")
]
"""What Flink reaches into on Java 17 and later: its own scripts open it, too."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    with up_cluster(tmp_path_factory.mktemp("flink") / "data") as started:
        yield started


@pytest.mark.parametrize("names", ["INCREMENTING", "POOLING"])
def test_each_number_arrives_once_although_the_job_is_killed(
    up: UpCluster, java: Java, flink: Path, tmp_path: Path, names: str
) -> None:
    """Lingering transactions are found by their names (INCREMENTING), or by ListTransactions (POOLING)."""
    topic = f"numbers-{names.lower()}"
    create_topic(up.bootstrap, topic, PARTITIONS)
    program = java.program("FlinkNumbers", flink, "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", *OPENED)
    asked = (up.bootstrap, topic, tmp_path / "checkpoints", names, COUNT, PER_SECOND)

    def arrived() -> list[int]:
        return [int(value) for values in committed_values(up.bootstrap, topic, PARTITIONS) for value in values]

    for victim in range(2):
        with program.running(tmp_path / f"{victim}.log", *asked) as process:
            before = len(arrived())
            wait_until(lambda before=before: len(arrived()) > before + PER_SECOND, "numbers are committed")  # type: ignore[misc]
            process.kill()
        assert len(arrived()) < COUNT
    with program.running(tmp_path / "last.log", *asked) as process:
        process.wait_for("done", 240)
        process.wait()
        assert any(line.startswith("goes on at chk-") for line in process.lines)
    assert sorted(arrived()) == list(range(COUNT))
