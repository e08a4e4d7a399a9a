"""A node that is started over another bucket, an empty one or an older copy is refused before it writes anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.storage.bucket.proof import WrongBucket

TOPIC = "uploaded"
SOON = ["--set", "upload.age_ms=200"]


def produce(process: TidelogProcess, first: int, count: int) -> None:
    producer = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
    for number in range(first, first + count):
        producer.produce(TOPIC, b"%d" % number, partition=0)
    assert producer.flush(60) == 0


def values(process: TidelogProcess) -> list[int]:
    return [int(row[4]) for row in read_topic(process.bootstrap, TOPIC)]


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file()) if directory.exists() else []


def refused(data: Path, port: int) -> str:
    """Start over the directory; the start must fail. Returns what it printed."""
    process = TidelogProcess(data, SOON, port)
    process.launch()
    try:
        assert process.wait(60) == WrongBucket.exit_code, process.tail()
        wait_until(lambda: "hint:" in process.tail(), "the refusal is printed")
        return process.tail()
    finally:
        process.kill()


@pytest.mark.gate_cases("killed")
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_an_empty_bucket_is_refused_and_the_right_one_is_welcome(tmp_path: Path, killed: bool) -> None:
    data, port = tmp_path / "data", 0
    with running(data, SOON) as process:
        port = process.port
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 100)
        wait_until(lambda: any("objects" in path.parts for path in files(data / "bucket")), "an object is uploaded")
        produce(process, 100, 100)
        process.kill() if killed else process.stop()
    (data / "bucket").rename(tmp_path / "right")
    assert "tidelog object accept-loss bucket." in refused(data, port)
    assert files(data / "bucket") == []
    shutil.rmtree(data / "bucket", ignore_errors=True)
    (tmp_path / "right").rename(data / "bucket")
    with running(data, SOON, port) as process:
        assert values(process) == list(range(200))


def test_an_older_copy_of_the_bucket_is_refused(tmp_path: Path) -> None:
    data, port, copy = tmp_path / "data", 0, tmp_path / "copy"
    with running(data, SOON) as process:
        port = process.port
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 100)
        process.stop()
    shutil.copytree(data / "bucket", copy)
    for start in (100, 200, 300):  # each stop uploads what is left
        with running(data, SOON, port) as process:
            produce(process, start, 100)
            process.stop()
    (data / "bucket").rename(tmp_path / "right")
    copy.rename(data / "bucket")
    before = files(data / "bucket")
    refused(data, port)
    assert files(data / "bucket") == before
    shutil.rmtree(data / "bucket")
    (tmp_path / "right").rename(data / "bucket")
    with running(data, SOON, port) as process:
        assert values(process) == list(range(400))


@pytest.mark.long
def test_an_operator_gives_the_objects_up(tmp_path: Path) -> None:
    data, port = tmp_path / "data", 0
    with running(data, SOON) as process:
        port = process.port
        create_topic(process.bootstrap, TOPIC)
        produce(process, 0, 100)
        process.stop()
    shutil.rmtree(data / "bucket")
    told = refused(data, port)
    token = next(word for word in told.split() if word.startswith("bucket."))
    Cli()("object", "accept-loss", token, "--data-dir", data)
    with running(data, SOON, port) as process:
        create_topic(process.bootstrap, "new")
        producer = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        producer.produce("new", b"1", partition=0)
        assert producer.flush(60) == 0
        process.stop()
    with running(data, SOON, port) as process:  # it has objects of its own by now
        assert [row[4] for row in read_topic(process.bootstrap, "new")] == [b"1"]
