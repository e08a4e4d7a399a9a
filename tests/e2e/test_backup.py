"""`tidelog cluster backup` beside a living cluster, and `restore` to another place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic, read_topic, s3_flags
from tests.e2e.test_rebuild import NOT_UPLOADED, SOON, metadata_written, write
from tests.e2e.test_wipe import PARTITIONS, TOPIC, check_all, fill, send_idempotent, upload_everything
from tests.support.bucket_files import bucket_files
from tests.support.cli import Cli
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import running
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound

pytestmark = pytest.mark.processes


def cluster(*arguments: str | Path, code: int = 0) -> Any:
    answer = Cli()("cluster", *arguments, "--format", "json", code=code)
    return answer.json() if code == 0 else answer.err


def objects(place: Path) -> set[str]:
    return {path.name for path in bucket_files(place) if path.parts[-3] == "objects"}


@pytest.mark.long
@pytest.mark.parametrize("where", ["embedded", pytest.param("s3", marks=pytest.mark.long)])
def test_a_restored_cluster_has_all_that_was_uploaded(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    data, place, new = tmp_path / "data", tmp_path / "backup", tmp_path / "new"
    flags: list[str] = []
    there: list[str | Path] = ["--to", place]
    back: list[str | Path] = ["--from", place]
    if where == "s3":
        server: S3Server = request.getfixturevalue("moto_server")
        flags = s3_flags(server)
        bucket = f"{flags[flags.index('--bucket') + 1]}-backup"
        there = ["--to-s3-endpoint", server.endpoint, "--to-bucket", bucket]
        keys = flags[flags.index("--set") :]
        back = ["--from-s3-endpoint", server.endpoint, "--from-bucket", bucket, *keys]
    with running(data, [*flags, *SOON]) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        fill(process.bootstrap)
        upload_everything(process.bootstrap)
        metadata_written(process)
        first = cluster("backup", "--data-dir", data, *there, *flags)
        assert first["copied"] == first["objects"] > 0
        fill(process.bootstrap)
        producer_id, offset = send_idempotent(process.port, None)
        upload_everything(process.bootstrap)
        metadata_written(process)
        second = cluster("backup", "--data-dir", data, *there, *flags, "--keep", "1")
        assert 0 < second["copied"] < second["objects"]
        assert where == "s3" or len(objects(place)) == second["objects"]
        before = read_topic(process.bootstrap, TOPIC, PARTITIONS)
        more = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        more.produce(TOPIC, b"not in the backup", partition=0)
        assert more.flush(60) == 0
        assert process.stop() == 0, process.tail()
    planned = cluster("restore", *back, "--data-dir", new, "--dry-run")
    assert planned["lost"] == [] or {one["what"] for one in planned["lost"]} == {"not uploaded"}
    assert not new.exists() or not list(new.iterdir()), "a dry run changed something"
    cluster("restore", *back, "--data-dir", new, "--yes")
    with running(new, SOON) as process:
        check_all(process, before, producer_id, offset)
        assert read_topic(process.bootstrap, TOPIC, PARTITIONS) == before
        assert process.stop() == 0, process.tail()


@pytest.mark.slow
def test_a_cluster_with_its_wal_in_the_bucket_is_restored_from_a_backup_beside_its_work(tmp_path: Path) -> None:
    data, place, new = tmp_path / "data", tmp_path / "backup", tmp_path / "new"
    in_bucket = ["--wal", "s3", *NOT_UPLOADED, *SOON]
    with running(data, in_bucket) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        fill(process.bootstrap)
        upload_everything(process.bootstrap)
        before = read_topic(process.bootstrap, TOPIC, PARTITIONS)
        write(process, b"only in the WAL", 1)
        metadata_written(process)
        cluster("backup", "--data-dir", data, "--to", place)
        process.kill()
    planned = cluster("restore", "--from", place, "--data-dir", new, "--dry-run")
    assert {one["what"] for one in planned["lost"]} == {"not uploaded"}
    cluster("restore", "--from", place, "--data-dir", new, "--yes")
    with running(new, in_bucket) as process:
        assert read_topic(process.bootstrap, TOPIC, PARTITIONS) == before
        write(process, b"in the restored cluster", 1)
        process.kill()
        port = process.port
    with running(new, in_bucket, port) as process:
        assert len(read_topic(process.bootstrap, TOPIC, PARTITIONS)) == len(before) + 1
        assert process.stop() == 0, process.tail()


def test_what_is_no_backup_is_not_written_over(tmp_path: Path) -> None:
    data, place, other = tmp_path / "data", tmp_path / "backup", tmp_path / "other"
    with running(data, SOON) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        fill(process.bootstrap)
        upload_everything(process.bootstrap)
        metadata_written(process)
        cluster("backup", "--data-dir", data, "--to", place)
        own = cluster("backup", "--data-dir", data, "--to", data / "bucket", code=InvalidInput.exit_code)
        assert "in the data directory of a cluster" in own
        shutil.copytree(data / "bucket", other)
        assert "not a backup" in cluster("backup", "--data-dir", data, "--to", other, code=InvalidInput.exit_code)
        assert objects(other) == objects(data / "bucket")
        assert process.stop() == 0, process.tail()
    missing = cluster("restore", "--from", tmp_path / "no", "--data-dir", tmp_path / "new", code=NotFound.exit_code)
    assert "no directory" in missing
    [one, *_] = sorted(place.glob("*/objects/*/*"))
    body = bytearray(one.read_bytes())
    body[len(body) // 2] ^= 1
    one.write_bytes(body)
    damaged = cluster("restore", "--from", place, "--data-dir", tmp_path / "new", "--yes", code=CorruptData.exit_code)
    assert one.name in damaged and "damaged" in damaged
    body[len(body) // 2] ^= 1
    one.write_bytes(body)
    cluster("restore", "--from", place, "--data-dir", tmp_path / "new", "--yes")  # goes on
    with running(tmp_path / "new", SOON) as process:
        assert read_topic(process.bootstrap, TOPIC, PARTITIONS)
        assert process.stop() == 0, process.tail()
