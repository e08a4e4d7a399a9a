"""`tidelog spark table` with a REST catalog, Project Nessie, and its files on MinIO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, World
from tests.support.cluster_process import up_cluster
from tests.support.job_process import JobProcess
from tests.support.rest_catalog import RestCatalog, rest_catalog
from tests.support.s3_servers import S3Server
from tests.support.table_load import TableLoad, as_latest, as_row, as_rows

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]
LOCAL = ("--master", "local[1]", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.bindAddress=127.0.0.1")
END_S = 240.0


@pytest.fixture
def catalog(nessie: Path, minio_server: S3Server, tmp_path: Path) -> Iterator[RestCatalog]:
    with rest_catalog(nessie, tmp_path / "nessie", minio_server) as found:
        yield found


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_tables_equal_their_topic_after_drivers_died_at_each_step_of_a_commit(
    catalog: RestCatalog, tmp_path: Path
) -> None:
    with up_cluster(tmp_path / "data", flags=FLAGS) as up:
        world = World(up)
        create_topic(world.bootstrap, "events", 2)
        load = TableLoad(world.bootstrap, "events", 2, 1.0)
        where = (*catalog.arguments(), *LOCAL)
        every = ("spark", "table", "events", "--table", "lake.rows", "--schema", "json", *where)
        latest = (*("lake.latest" if each == "lake.rows" else each for each in every), "--upsert-by", "_key")
        for number, step in enumerate(("files", "commit", "quarantine")):
            load.send(60)  # the last ones have a field more
            load.flush()
            for name, job in (("rows", every), ("latest", latest)):
                log = tmp_path / f"{name}-{number}.log"
                killed = JobProcess(world.bootstrap, log, step, "1", *job, module="tests.pyspark_tidelog.table_job")
                assert killed.process.wait(END_S) < 0, killed.said()
        for job in (every, latest):  # what the killed ones have left to do
            world.cli(*job)
        assert "table lake.rows: 0 rows of 0 offsets in 0 commits" in world.cli(*every).text

        records = load.read()
        for name, (good, bad) in (("rows", as_rows(records)), ("latest", as_latest(records))):
            folder = tmp_path / f"files-{name}"
            folder.mkdir()
            assert catalog.rows(f"lake.{name}", folder) == [as_row("events", good[each]) for each in sorted(good)]
            kept = [(row["_partition"], row["_offset"]) for row in catalog.rows(f"lake.{name}_quarantine", folder)]
            assert kept == sorted(bad)
        before = len(list(catalog.table("lake.rows").scan().plan_files()))
        compacted = world.cli("spark", "table-compact", "lake.rows", *where).text
        assert before > 1 and f"1 files in place of {before}" in compacted, compacted
        assert "0 rows of 0 offsets in 0 commits" in world.cli(*every).text
