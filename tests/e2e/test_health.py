"""What does not work is seen in `tidelog status` within 5 s, by its exit code, and is gone when it works again.

A refused request (a key that was rotated, a policy that is wrong) marks nothing as damaged meanwhile, and no client is
told of corrupt data.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from tests.e2e.backends import QUIET, create_topic, faulty_proxy, read_topic, s3_flags
from tests.e2e.test_failures import Writer
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.missing import lacking
from tests.support.object_jobs import BY_HAND, upload
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import running
from tidelog.chaos.faulty_s3 import Fault, Seen
from tidelog.cli.client import ClusterConnection

SEEN_WITHIN_S = 5.0
DENIED = Fault(status=403, code="AccessDenied")
STATUS_FAILS = 10


def seen_s(cli: Cli, is_it: Callable[[str], bool]) -> float:
    """How long it takes until there is a problem that `is_it`, with which `status` ends with its code for problems.

    The broker is asked directly: how long a command takes to start is no part of it.
    """
    cluster, started = ClusterConnection(cli.bootstrap), time.monotonic()
    wait_until(lambda: any(map(is_it, cluster.get("/status")["problems"])), "the problem is seen", 30)
    took_s = time.monotonic() - started
    result = cli("status", "--format", "json", code=None)
    assert result.code == STATUS_FAILS and any(map(is_it, result.json()["problems"])), result.text
    return took_s


def is_well(cli: Cli) -> bool:
    return cli("status", code=None).code == 0


@pytest.mark.gate_cases("busy-disk")
@pytest.mark.parametrize("wal", ["disk", "s3"])
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_bucket_that_denies_everything_is_seen_and_heals(
    tmp_path: Path, moto_server: S3Server, wal: str, is_busy: bool
) -> None:
    with faulty_proxy(moto_server) as proxy:
        flags = [*s3_flags(proxy.server), "--wal", wal, "--set", "upload.age_ms=300"]
        with running(tmp_path / "data", flags) as process:
            cli = Cli(process.bootstrap)
            create_topic(process.bootstrap, "t")
            writer = Writer(process.bootstrap, "t")
            writer.write()
            writer.flush()
            wait_until(lambda: is_well(cli), "all is well")
            proxy.fault = lambda seen: DENIED
            if is_busy:
                writer.write()
                writer.poll()
            assert seen_s(cli, lambda problem: "bucket" in problem and "403" in problem) < SEEN_WITHIN_S
            proxy.fault = lambda seen: None
            writer.flush()
            wait_until(lambda: is_well(cli), "all is well again", 20)
            assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged


@pytest.mark.long
def test_a_bucket_that_refuses_deletes_only_is_seen_and_heals(tmp_path: Path, moto_server: S3Server) -> None:
    def no_deletes(seen: Seen) -> Fault | None:
        return DENIED if seen.method == "DELETE" or "delete" in seen.query else None

    with faulty_proxy(moto_server) as proxy, running(tmp_path / "data", s3_flags(proxy.server)) as process:
        cli = Cli(process.bootstrap)
        wait_until(lambda: is_well(cli), "all is well")
        proxy.fault = no_deletes
        assert seen_s(cli, lambda problem: "delete" in problem and "403" in problem) < SEEN_WITHIN_S
        proxy.fault = lambda seen: None
        wait_until(lambda: is_well(cli), "all is well again", 20)


@pytest.mark.long
def test_a_bucket_that_does_not_answer_is_seen(tmp_path: Path, moto_server: S3Server) -> None:
    with faulty_proxy(moto_server) as proxy, running(tmp_path / "data", s3_flags(proxy.server)) as process:
        cli = Cli(process.bootstrap)
        wait_until(lambda: is_well(cli), "all is well")
        proxy.fault = lambda seen: Fault(delay_s=20.0)
        assert seen_s(cli, lambda problem: "bucket" in problem and "no answer" in problem) < SEEN_WITHIN_S + 1.5


def test_consumers_of_old_data_wait_while_access_is_denied_and_nothing_is_called_damaged(
    tmp_path: Path, moto_server: S3Server
) -> None:
    with faulty_proxy(moto_server) as proxy:
        flags = [*s3_flags(proxy.server), *BY_HAND, "--set", "cache.log_bytes=16777216"]
        with running(tmp_path / "data", flags) as process:
            create_topic(process.bootstrap, "t")
            writer = Writer(process.bootstrap, "t")
            for _ in range(4):
                for _ in range(20):
                    writer.write(5_000)
                writer.flush()
                upload(process.bootstrap)
            assert process.stop() == 0
        with running(tmp_path / "data", flags) as process:  # nothing is in memory
            cli = Cli(process.bootstrap)
            proxy.fault = lambda seen: DENIED
            errors: list[KafkaError] = []
            consumer = Consumer({"bootstrap.servers": process.bootstrap, "group.id": "g", **QUIET})
            consumer.assign([TopicPartition("t", 0, 0)])
            until = time.monotonic() + 3
            while time.monotonic() < until:
                message = consumer.poll(0.1)
                if message is not None and (error := message.error()) is not None:
                    errors.append(error)
            assert not errors, "librdkafka repeats what it may repeat, and tells everything else"
            cli("object", "compact", "--eager", code=None)
            problems = cli("status", "--format", "json", code=STATUS_FAILS).json()["problems"]
            assert not [one for one in problems if "cannot be compacted" in one or "not readable" in one], problems
            proxy.fault = lambda seen: None
            values: list[bytes] = []
            deadline = time.monotonic() + 60
            while len(values) < len(writer.acknowledged):
                assert time.monotonic() < deadline
                message = consumer.poll(0.5)
                if message is not None:
                    assert message.error() is None
                    values.append(message.value() or b"")
            assert values == writer.acknowledged
            consumer.close()
            wait_until(lambda: is_well(cli), "all is well again", 30)
            assert "objects" in cli("object", "compact", "--eager").text


@pytest.fixture
def small_controller(tmp_path: Path) -> Iterator[Path]:
    """A data directory whose controller has a file system of 24 MiB."""
    where = tmp_path / "data" / "controller"
    where.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        lacking(f"a small file system (mount: {mounted.stderr.strip()})")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_controller_with_a_full_disk_is_seen_and_heals(small_controller: Path) -> None:
    with running(small_controller.parent) as process:
        cli = Cli(process.bootstrap)
        wait_until(lambda: is_well(cli), "all is well")
        ballast = small_controller / "ballast"
        with ballast.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(1 << 16))
                except OSError:
                    break
        assert seen_s(cli, lambda problem: "controller" in problem and "left on the disk" in problem) < SEEN_WITHIN_S
        ballast.unlink()
        wait_until(lambda: is_well(cli), "all is well again", 20)
