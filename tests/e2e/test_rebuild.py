"""A cluster is rebuilt from its bucket alone, after every disk is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource

from tests.e2e.backends import QUIET, create_topic, read_topic, s3_flags
from tests.e2e.test_wipe import PARTITIONS, TOPIC, check_all, fill, send_idempotent, upload_everything
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.cluster_process import up_cluster
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.process.data_dir import WrongDataDirectory
from tidelog.process.rebuild import UNFINISHED_FILE
from tidelog.runtime.errors import InvalidInput, Unavailable

NOT_UPLOADED = ["--set", "upload.age_ms=3600000"]
SOON = ["--set", "controller.state_after_change_ms=100", "--set", "controller.state_interval_ms=60000"]


def rebuild(data: Path, *flags: str, code: int = 0) -> Any:
    answer = Cli()("cluster", "rebuild", "--data-dir", data, "--format", "json", *flags, code=code)
    return answer.json() if code == 0 else answer.err


def forget_disks(data: Path) -> None:
    """Delete everything but the embedded bucket."""
    for each in data.iterdir():
        if each.name != "bucket":
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def states(data: Path) -> list[Path]:
    return list((data / "bucket").glob("*/metadata/state-*"))


def retention(process: TidelogProcess) -> str:
    admin = AdminClient({"bootstrap.servers": process.bootstrap, **QUIET})
    resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC)
    return str(admin.describe_configs([resource])[resource].result(30)["retention.ms"].value)


def metadata_written(process: TidelogProcess) -> None:
    """Wait until the bucket has the metadata of now, by its version."""
    now = Cli(process.bootstrap)("status", "--format", "json", code=None).json()["image_version"]

    def has_it() -> bool:
        state = Cli(process.bootstrap)("status", "--format", "json", code=None).json()["metadata_in_bucket"]
        return state is not None and (state["version"] or 0) >= now

    wait_until(has_it, "the metadata is in the bucket")


def write(process: TidelogProcess, value: bytes, count: int) -> None:
    producer = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
    for number in range(count):
        producer.produce(TOPIC, b"%s %d" % (value, number), partition=0)
    assert producer.flush(60) == 0


def delete_records(process: TidelogProcess, before: int) -> None:
    admin = AdminClient({"bootstrap.servers": process.bootstrap, **QUIET})
    place = TopicPartition(TOPIC, 0, before)
    assert admin.delete_records([place])[place].result(30).low_watermark == before


@pytest.mark.gate_cases("minio")
@pytest.mark.parametrize(
    "where",
    [
        "embedded",
        pytest.param("moto", marks=pytest.mark.servers("moto")),
        *(pytest.param(kind, marks=[pytest.mark.servers(kind), pytest.mark.slow]) for kind in ("minio", "localstack")),
    ],
)
def test_all_is_there_after_every_disk_is_deleted(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    data = tmp_path / "data"
    flags: list[str] = []
    if where != "embedded":
        server: S3Server = request.getfixturevalue(f"{where}_server")
        flags = s3_flags(server)
    with running(data, [*flags, *SOON]) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS, **{"retention.ms": "123456789000"})
        fill(process.bootstrap)
        producer_id, offset = send_idempotent(process.port, None)
        before = read_topic(process.bootstrap, TOPIC, PARTITIONS)
        assert process.stop() == 0, process.tail()
        port = process.port
    forget_disks(data)
    planned = rebuild(data, *flags, "--dry-run")
    assert planned["lost"] == [] and planned["state_is_last"] and not planned["living_owner"]
    assert {each.name for each in data.iterdir()} <= {"bucket"}, "a dry run changed something"
    done = rebuild(data, *flags, "--yes")
    assert {**done, "state_written_ms": 0} == {**planned, "state_written_ms": 0}
    assert "already holds" in rebuild(data, *flags, "--yes", code=WrongDataDirectory.exit_code)
    with running(data, flags, port) as process:
        check_all(process, before, producer_id, offset)
        assert retention(process) == "123456789000"
        more = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        more.produce(TOPIC, b"life goes on", partition=0)
        assert more.flush(60) == 0
        assert process.stop() == 0, process.tail()
    with running(data, flags, port) as process:
        assert len(read_topic(process.bootstrap, TOPIC, PARTITIONS)) == len(before) + 1
        assert process.stop() == 0, process.tail()


def test_what_was_uploaded_after_the_metadata_is_found_and_what_was_not_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, [*NOT_UPLOADED, *SOON, "--set", "controller.state_kept=100"]) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        fill(process.bootstrap)  # creates the topic of group offsets, too
        metadata_written(process)
        old = {path.name for path in states(data)}
        fill(process.bootstrap)
        producer_id, offset = send_idempotent(process.port, None)
        upload_everything(process.bootstrap)
        before = read_topic(process.bootstrap, TOPIC, PARTITIONS)
        producer = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        for number in range(100):
            producer.produce(TOPIC, b"only in the WAL %d" % number, partition=0)
        assert producer.flush(60) == 0
        process.kill()
        port = process.port
    forget_disks(data)
    for path in states(data):
        if path.name not in old:
            path.unlink()  # as if the bucket had been out of reach for the controller
    assert "--take-over" in rebuild(data, "--yes", code=Unavailable.exit_code)
    assert {each.name for each in data.iterdir()} == {"bucket"}, "a refusal left something"
    planned = rebuild(data, "--dry-run")
    assert planned["living_owner"]
    assert planned["new_objects"] > 0
    ends = {row[0]: row[1] for row in sorted(before, key=lambda row: row[:2])}
    told = {one["partition"]: one for one in planned["lost"] if one["topic"] == TOPIC}
    assert told[0]["what"] == "not uploaded" and told[0]["from_offset"] == ends[0] + 1
    rebuild(data, "--yes", "--take-over")
    with running(data, NOT_UPLOADED, port) as process:
        check_all(process, before, producer_id, offset)
        losses = Cli(process.bootstrap)("wal", "losses", "--format", "json").json()
        assert any(one["topic"] == TOPIC for loss in losses for one in loss["partitions"])
        assert process.stop() == 0, process.tail()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("more", [True, False], ids=["and written to", "and left"])
def test_records_that_were_deleted_after_the_metadata_stay_deleted(more: bool, tmp_path: Path) -> None:
    """No record that was deleted comes back, none that was uploaded is lost, and no offset is given out twice."""
    data = tmp_path / "data"
    flags = [*NOT_UPLOADED, *SOON, "--set", "controller.state_kept=100"]
    with running(data, flags) as process:
        create_topic(process.bootstrap, TOPIC, 1)
        write(process, b"old", 50)
        upload_everything(process.bootstrap)
        metadata_written(process)
        old = {path.name for path in states(data)}
        write(process, b"new", 50)
        upload_everything(process.bootstrap)
        delete_records(process, 80 if more else 100)
        if more:
            write(process, b"last", 10)
        upload_everything(process.bootstrap)
        before = read_topic(process.bootstrap, TOPIC, 1)
        assert len(before) == (30 if more else 0)
        process.kill()
        port = process.port
    forget_disks(data)
    for path in states(data):
        if path.name not in old:
            path.unlink()
    rebuild(data, "--yes", "--take-over")
    with running(data, flags, port) as process:
        assert read_topic(process.bootstrap, TOPIC, 1) == before
        write(process, b"after", 1)
        (*same, added) = read_topic(process.bootstrap, TOPIC, 1)
        assert same == before and added[1] == (110 if more else 100)
        assert process.stop() == 0, process.tail()


@pytest.mark.long
@pytest.mark.slow
def test_a_wal_in_the_bucket_that_is_not_committed_is_refused(tmp_path: Path) -> None:
    """Also when the newest metadata is older than what is in the WAL, and says that all is committed."""
    data = tmp_path / "data"
    in_bucket = ["--wal", "s3", *NOT_UPLOADED]
    often = ["--set", "controller.state_interval_ms=300", "--set", "controller.state_kept=100"]
    with running(data, [*in_bucket, *SOON, *often]) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        fill(process.bootstrap)
        upload_everything(process.bootstrap)
        Cli(process.bootstrap)("wal", "drain")  # returns when the controllers know that all is committed
        metadata_written(process)
        before = read_topic(process.bootstrap, TOPIC, PARTITIONS)
        old = {path.name for path in states(data)}
        producer = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        producer.produce(TOPIC, b"only in the WAL", partition=0)
        assert producer.flush(60) == 0
        metadata_written(process)
        process.kill()
        port = process.port
    saved = tmp_path / "saved"
    shutil.copytree(data, saved)
    forget_disks(data)
    assert "does not say that everything in it is committed" in rebuild(data, "--dry-run", code=InvalidInput.exit_code)
    for path in states(data):
        if path.name not in old:
            path.unlink()
    told = rebuild(data, "--yes", "--take-over", code=InvalidInput.exit_code)
    assert "has records beyond WAL offset" in told and "wal drain" in told
    assert {each.name for each in data.iterdir()} == {"bucket"}, "a refusal left something"
    with running(saved, in_bucket, port) as process:  # as the hint says
        assert len(read_topic(process.bootstrap, TOPIC, PARTITIONS)) == len(before) + 1
        Cli(process.bootstrap)("wal", "drain")
        assert process.stop() == 0, process.tail()
    forget_disks(saved)
    assert rebuild(saved, "--yes")["lost"] == []
    with running(saved, in_bucket, port) as process:
        assert len(read_topic(process.bootstrap, TOPIC, PARTITIONS)) == len(before) + 1
        assert process.stop() == 0, process.tail()


@pytest.mark.long
def test_three_brokers_are_rebuilt_from_the_bucket_as_three_and_as_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    # With replicas, the last one to stop may have no quorum for what it writes when it closes its partitions.
    alone = ["--set", "replication.total_replicas=1"]
    with up_cluster(data, 3, [*NOT_UPLOADED, *SOON, *alone]) as cluster:
        create_topic(cluster.bootstrap, TOPIC, 6, **{"retention.ms": "123456789000"})
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, **QUIET})
        for number in range(600):
            producer.produce(TOPIC, b"%d" % number, partition=number % 6)
        assert producer.flush(60) == 0
        before = read_topic(cluster.bootstrap, TOPIC, 6)
        Cli(cluster.bootstrap)("wal", "drain")  # with the cluster's secret
        assert cluster.stop() == 0, cluster.tail()
    for brokers in (3, 1):
        forget_disks(data)
        copy = tmp_path / f"as-{brokers}"
        copy.mkdir()
        shutil.copytree(data / "bucket", copy / "bucket")
        report = rebuild(copy, "--brokers", str(brokers), "--take-over", "--yes")
        assert report["lost"] == []
        assert report["brokers"] == list(range(1, brokers + 1))
        with up_cluster(copy, brokers, SOON) if brokers > 1 else running(copy, SOON) as cluster:
            assert read_topic(cluster.bootstrap, TOPIC, 6) == before
            assert retention(cluster) == "123456789000"
            producer = Producer({"bootstrap.servers": cluster.bootstrap, **QUIET})
            for number in range(6):
                producer.produce(TOPIC, b"more", partition=number)
            assert producer.flush(60) == 0
            assert len(read_topic(cluster.bootstrap, TOPIC, 6)) == len(before) + 6
            assert cluster.stop() == 0, cluster.tail()


@pytest.mark.long
def test_the_old_cluster_does_not_start_again(tmp_path: Path) -> None:
    data, new = tmp_path / "data", tmp_path / "new"
    with running(data, SOON) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        assert process.stop() == 0, process.tail()
    new.mkdir()
    (new / "bucket").symlink_to(data / "bucket")
    rebuild(new, "--yes")
    process = TidelogProcess(data, SOON)
    process.launch()
    try:
        assert process.wait(60) == WrongDataDirectory.exit_code, process.tail()
        wait_until(lambda: "generation 2" in process.tail(), "the reason is printed")
    finally:
        process.kill()
    with running(new, SOON) as process:
        assert read_topic(process.bootstrap, TOPIC, PARTITIONS) == []
        assert process.stop() == 0, process.tail()


@pytest.mark.long
def test_an_old_cluster_that_runs_ends_as_soon_as_it_has_found_the_claim(tmp_path: Path) -> None:
    """It waited for 30 s for an upload that no controller could commit; the next controller was elected after that."""
    data = tmp_path / "data"
    with running(data, [*NOT_UPLOADED, "--set", "controller.state_interval_ms=1000"]) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        write(process, b"not uploaded", 10)
        metadata_written(process)
        [state, *_] = states(data)
        (state.parent / "claim-00000002").touch()
        wait_until(lambda: "belongs to generation 2" in process.tail(), "it finds the claim", 20)
        wait_until(lambda: "ended (exit code 9)" in process.tail(), "it ends", 12)


def test_an_interrupted_rebuild_is_started_over_and_not_started(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, SOON) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        assert process.stop() == 0, process.tail()
    forget_disks(data)
    rebuild(data, "--yes")
    (data / UNFINISHED_FILE).touch()
    (data / "controller" / "snapshot").unlink()
    process = TidelogProcess(data)
    process.launch()
    try:
        assert process.wait(60) == WrongDataDirectory.exit_code, process.tail()
    finally:
        process.kill()
    assert rebuild(data, "--yes")["generation"] == 3
    with running(data) as process:
        assert len(read_topic(process.bootstrap, TOPIC, PARTITIONS)) == 0
        assert retention(process)
        assert process.stop() == 0, process.tail()
