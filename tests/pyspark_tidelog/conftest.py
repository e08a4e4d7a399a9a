"""One Spark and one cluster for all tests of jobs: each takes ten seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pyspark_tidelog.job_harness import JobWorld
from tests.pyspark_tidelog.test_spark_batch import FLAGS, Spark
from tests.support.cluster_process import up_cluster


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """A driver; modules that need one of other settings have a fixture of this name of their own."""
    found = Spark(tmp_path_factory.mktemp("spark"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobWorld]:
    """A cluster, in which each test has topics of its own."""
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        yield JobWorld(up)
