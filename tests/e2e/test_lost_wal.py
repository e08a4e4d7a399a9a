"""A WAL that does not continue what was acknowledged is refused: missing, empty, older, or of another kind."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.runtime.errors import ConfigError, CorruptData

TOPIC = "kept"
NOT_UPLOADED = ["--set", "upload.age_ms=3600000"]


def produce(process: TidelogProcess, first: int, count: int) -> None:
    producer = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
    for number in range(first, first + count):
        producer.produce(TOPIC, b"%d" % number, partition=0)
    assert producer.flush(60) == 0


def values(process: TidelogProcess) -> list[bytes]:
    return [row[4] for row in read_topic(process.bootstrap, TOPIC)]


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def admin_get(process: TidelogProcess, path: str) -> Any:
    admin = AdminClient({"bootstrap.servers": process.bootstrap, **QUIET})
    resource = ConfigResource(ConfigResource.Type.BROKER, "1")
    url = admin.describe_configs([resource])[resource].result(30)["tidelog.admin.url"].value
    with urllib.request.urlopen(f"{url}{path}", timeout=30) as answer:
        return json.load(answer)


def refused(data: Path, flags: list[str], port: int) -> str:
    """Start over the directory; the start must fail. Returns what it printed."""
    process = TidelogProcess(data, flags, port)
    process.launch()
    try:
        assert process.wait(60) == CorruptData.exit_code, process.tail()
        wait_until(lambda: "at stake" in process.tail(), "the refusal is printed")
        return process.tail()
    finally:
        process.kill()


def test_a_lost_wal_is_refused_and_its_return_is_welcome(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, NOT_UPLOADED) as process:
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 300)
        process.kill()
        port = process.port
    (data / "wal").rename(tmp_path / "unmounted")
    told = refused(data, NOT_UPLOADED, port)
    assert f"{TOPIC}:0" in told
    assert "tidelog wal accept-loss" in told
    (data / "wal").mkdir(exist_ok=True)
    refused(data, NOT_UPLOADED, port)  # a directory where nothing is mounted
    shutil.rmtree(data / "wal")
    (tmp_path / "unmounted").rename(data / "wal")
    with running(data, NOT_UPLOADED, port) as process:
        assert values(process) == numbers(300)


def test_an_older_copy_of_the_wal_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, NOT_UPLOADED) as process:
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 100)
        process.kill()
        port = process.port
    shutil.copytree(data / "wal", tmp_path / "backup")
    with running(data, NOT_UPLOADED, port) as process:
        produce(process, 100, 50)
        process.kill()
    (data / "wal").rename(tmp_path / "newest")
    shutil.copytree(tmp_path / "backup", data / "wal")
    assert f"{TOPIC}:0" in refused(data, NOT_UPLOADED, port)
    shutil.rmtree(data / "wal")
    (tmp_path / "newest").rename(data / "wal")
    with running(data, NOT_UPLOADED, port) as process:
        assert values(process) == numbers(150)


@pytest.mark.long
def test_a_copy_that_was_taken_of_the_running_wal_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, NOT_UPLOADED) as process:
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 100)

        def copied() -> bool:
            shutil.rmtree(tmp_path / "backup", ignore_errors=True)
            try:
                shutil.copytree(data / "wal", tmp_path / "backup")
            except shutil.Error:
                return False  # a file was replaced meanwhile
            return True

        wait_until(copied, "a copy of the running WAL")
        produce(process, 100, 100)

        def noted() -> bool:
            rows = admin_get(process, "/wals")["wals"]
            return any(one["to_offset"] >= 200 for row in rows for one in row["at_stake"])

        wait_until(noted, "the controller knows of the newest records")
        process.kill()
        port = process.port
    shutil.rmtree(data / "wal")
    shutil.copytree(tmp_path / "backup", data / "wal")
    assert f"{TOPIC}:0 offsets 0 to 200" in refused(data, NOT_UPLOADED, port)


@pytest.mark.long
def test_a_loss_is_accepted_once_and_recorded_and_the_old_disk_is_not_taken_afterwards(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, NOT_UPLOADED) as process:
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 100)
        process.kill()
        port = process.port
    (data / "wal").rename(tmp_path / "old")
    told = refused(data, NOT_UPLOADED, port)
    token = told.split("tidelog wal accept-loss ")[1].split()[0]
    Cli()("wal", "accept-loss", "1.999", "--data-dir", data)
    refused(data, NOT_UPLOADED, port)  # another loss was accepted
    Cli()("wal", "accept-loss", token, "--data-dir", data)
    with running(data, NOT_UPLOADED, port) as process:
        assert values(process) == []
        produce(process, 1000, 70)
        (loss,) = Cli(process.bootstrap)("wal", "losses", "--format", "json").json()
        assert [(one["topic"], one["partition"], one["from_offset"]) for one in loss["partitions"]] == [(TOPIC, 0, 0)]
        process.kill()
    # The old disk comes back: its records have the same offsets as those of the new one.
    (data / "wal").rename(tmp_path / "new")
    (tmp_path / "old").rename(data / "wal")
    refused(data, NOT_UPLOADED, port)
    (data / "wal").rename(tmp_path / "old")
    (tmp_path / "new").rename(data / "wal")
    with running(data, NOT_UPLOADED, port) as process:
        assert values(process) == [b"%d" % number for number in range(1000, 1070)]


@pytest.mark.long
def test_an_old_disk_that_returns_after_all_was_uploaded_is_kept_aside(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, NOT_UPLOADED) as process:
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 100)
        port = process.port
        assert process.stop() == 0, process.tail()
    (data / "wal").rename(tmp_path / "old")
    with running(data, NOT_UPLOADED, port) as process:  # everything was uploaded: nothing is at stake
        produce(process, 100, 20)
        assert process.stop() == 0, process.tail()
    shutil.rmtree(data / "wal")
    (tmp_path / "old").rename(data / "wal")
    before = sorted(one.read_bytes() for one in (data / "wal").glob("*.wal"))
    with running(data, NOT_UPLOADED, port) as process:
        assert values(process) == numbers(120)
        kept = sorted(one.read_bytes() for one in (data / "wal").glob("*.wal.rejected-*"))
        assert kept == before


def test_the_kind_of_wal_is_not_changed_under_acknowledged_records(tmp_path: Path) -> None:
    data = tmp_path / "data"
    in_bucket = [*NOT_UPLOADED, "--wal", "s3"]
    with running(data, in_bucket) as process:
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 200)
        process.kill()
        port = process.port
    changed = TidelogProcess(data, [*NOT_UPLOADED, "--wal", "disk"], port)
    changed.launch()
    try:
        assert changed.wait(60) == ConfigError.exit_code, changed.tail()
        wait_until(lambda: "tidelog wal drain" in changed.tail(), "the refusal names the way out")
    finally:
        changed.kill()
    with running(data, in_bucket, port) as process:
        assert values(process) == numbers(200)
        assert "committed" in Cli(process.bootstrap)("wal", "drain").text
        process.kill()
    with running(data, [*NOT_UPLOADED, "--wal", "disk"], port) as process:
        assert values(process) == numbers(200)
