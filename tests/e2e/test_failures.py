"""What goes wrong around a broker gets a clear answer, and nothing is lost (issue: What it must show, 5)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer

from tests.e2e.backends import QUIET, create_topic, faulty_proxy, read_topic, s3_flags
from tests.support.clients import value_of, wait_until
from tests.support.missing import lacking
from tests.support.ports import free_port
from tests.support.s3_servers import S3Server, new_bucket
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.chaos.faulty_s3 import Fault

OUTAGE_S = 60.0


class Writer:
    """A producer that remembers what was acknowledged and what failed."""

    def __init__(self, bootstrap: str, topic: str, **settings: object) -> None:
        self.topic = topic
        self.acknowledged: list[bytes] = []
        self.errors: list[str] = []
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **QUIET, **settings})
        self._next = 0

    def _done(self, error: object, message: Message) -> None:
        if error is not None:
            self.errors.append(str(error))
        else:
            self.acknowledged.append(value_of(message))

    def write(self, size: int = 100) -> None:
        value = f"{self._next} ".encode().ljust(size, b"-")
        self._next += 1
        self._producer.produce(self.topic, value, on_delivery=self._done)
        self._producer.poll(0)

    def poll(self, seconds: float = 0.05) -> None:
        self._producer.poll(seconds)

    def flush(self, timeout_s: float = 60.0) -> None:
        assert self._producer.flush(timeout_s) == 0, "records without an outcome"


@pytest.mark.long
@pytest.mark.slow
def test_a_bucket_that_answers_503_for_a_minute_stops_nothing_and_loses_nothing(
    tmp_path: Path, moto_server: S3Server
) -> None:
    with faulty_proxy(moto_server) as proxy:
        flags = [*s3_flags(proxy.server), "--set", "upload.age_ms=300", "--set", "s3.retry_budget_ms=5000"]
        with running(tmp_path / "data", flags) as process:
            create_topic(process.bootstrap, "t")
            writer = Writer(process.bootstrap, "t")
            slowest_s = 0.0
            proxy.fault = lambda seen: Fault(status=503)
            outage_ends = time.monotonic() + OUTAGE_S
            while time.monotonic() < outage_ends:
                before = time.monotonic()
                writer.write()
                writer.flush(20)
                slowest_s = max(slowest_s, time.monotonic() - before)
                writer.poll()
            assert not writer.errors
            refused = proxy.count("PUT") + proxy.count("POST")
            assert refused > 3, "uploads were not even tried"
            uploaded = len(proxy.requests)
            proxy.fault = lambda seen: None
            wait_until(lambda: any(seen.method == "PUT" for seen in proxy.requests[uploaded:]), "uploads go on")
            writer.write()
            writer.flush()
            assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged
            assert process.stop() == 0, process.tail()
            assert slowest_s < OUTAGE_S / 2, "a write waited for the bucket"
        shutil.rmtree(tmp_path / "data" / "wal")
        with running(tmp_path / "data", flags) as process:
            assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged


def test_a_bucket_that_is_not_there_at_start_is_a_clear_error_and_is_retried(
    tmp_path: Path, moto_server: S3Server
) -> None:
    port = free_port()
    flags = s3_flags(moto_server)
    flags[1] = f"http://127.0.0.1:{port}"
    process = TidelogProcess(tmp_path / "data", [*flags, "--set", "s3.retry_budget_ms=1000"])
    try:
        process.launch()
        line = process.wait_for_line("the bucket does not answer")
        assert f"127.0.0.1:{port}" in line and "retrying" in line
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        moto = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait_for_line("ready bootstrap=")
            create_topic(process.bootstrap, "t")
            assert process.stop() == 0, process.tail()
        finally:
            moto.terminate()
            moto.wait(30)
    finally:
        process.kill()


@pytest.mark.long
def test_a_broker_with_data_serves_while_its_bucket_is_away(tmp_path: Path, moto_server: S3Server) -> None:
    with faulty_proxy(moto_server) as proxy:
        flags = [*s3_flags(proxy.server), "--set", "s3.retry_budget_ms=1000"]
        with running(tmp_path / "data", flags) as process:
            create_topic(process.bootstrap, "t")
            writer = Writer(process.bootstrap, "t")
            writer.write()
            writer.flush()
            process.kill()
        proxy.fault = lambda seen: Fault(status=503)
        with running(tmp_path / "data", flags) as process:
            assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged
            writer = Writer(process.bootstrap, "t")
            writer.write()
            writer.flush()
            proxy.fault = lambda seen: None
            assert process.stop() == 0, process.tail()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        lacking(f"a small file system (mount: {mounted.stderr.strip()})")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.slow
def test_a_full_disk_makes_producers_wait_and_loses_nothing(small_disk: Path, moto_server: S3Server) -> None:
    with faulty_proxy(moto_server) as proxy:
        flags = [*s3_flags(proxy.server), "--set", "wal.segment_bytes=4194304", "--set", "upload.age_ms=300"]
        flags += ["--set", "s3.retry_budget_ms=2000"]
        with running(small_disk / "data", flags) as process:
            create_topic(process.bootstrap, "t")
            writer = Writer(process.bootstrap, "t", **{"message.timeout.ms": 200_000, "request.timeout.ms": 10_000})
            proxy.fault = lambda seen: Fault(status=503)  # nothing is uploaded, so nothing is trimmed
            for _ in range(600):
                writer.write(100_000)  # 60 MB into 40 MiB
                writer.poll(0)
            quiet_since = time.monotonic()
            seen = -1

            def stalled() -> bool:
                nonlocal quiet_since, seen
                writer.poll(0.1)
                if len(writer.acknowledged) != seen:
                    seen, quiet_since = len(writer.acknowledged), time.monotonic()
                return time.monotonic() - quiet_since > 3

            wait_until(stalled, "the disk is full")
            assert 50 < seen < 600, "the disk never filled"
            assert not writer.errors, writer.errors[:3]
            proxy.fault = lambda seen: None
            writer.flush(150)
            assert not writer.errors, writer.errors[:3]
            assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged
            assert len(writer.acknowledged) == 600
            assert process.stop() == 0, process.tail()


def wal_segments(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "wal").glob("*.wal"))


def fill_and_kill(data_dir: Path) -> tuple[list[bytes], int]:
    with running(data_dir, ["--set", "upload.age_ms=600000"]) as process:
        create_topic(process.bootstrap, "t")
        writer = Writer(process.bootstrap, "t")
        for _ in range(50):
            writer.write(1000)
            writer.flush()
        process.kill()
        return writer.acknowledged, process.port


def test_a_wal_with_acknowledged_bytes_missing_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    acknowledged, port = fill_and_kill(data_dir)
    segment = wal_segments(data_dir)[0]
    kept = segment.read_bytes()
    middle = kept.index(acknowledged[20])
    damaged = bytearray(kept)
    damaged[middle : middle + 10] = b"\0" * 10
    segment.write_bytes(damaged)
    process = TidelogProcess(data_dir, port=port)
    try:
        process.launch()
        process.wait_for_line("error:", 30)
        assert process.wait(30) == 7, process.tail()
        assert "wal verify" in process.tail()
        assert segment.read_bytes() == bytes(damaged), "a refused WAL must not be touched"
    finally:
        process.kill()
    segment.write_bytes(kept)
    with running(data_dir, port=port) as process:
        assert [row[4] for row in read_topic(process.bootstrap, "t")] == acknowledged


def test_a_torn_last_record_is_cut_and_everything_before_it_is_served(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    acknowledged, port = fill_and_kill(data_dir)
    segment = wal_segments(data_dir)[0]
    content = bytearray(segment.read_bytes())
    last = content.index(acknowledged[-1])
    content[last + 5 :] = b"\0" * (len(content) - last - 5)  # as if the last write had been torn
    segment.write_bytes(content)
    with running(data_dir, port=port) as process:
        assert [row[4] for row in read_topic(process.bootstrap, "t")] == acknowledged[:-1]
        writer = Writer(process.bootstrap, "t")
        writer.write()
        writer.flush()
        assert process.stop() == 0, process.tail()


def test_a_data_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with running(tmp_path / name) as process:
            assert process.stop() == 0, process.tail()
    shutil.copy(tmp_path / "one" / "identity.json", tmp_path / "two" / "identity.json")
    process = TidelogProcess(tmp_path / "two")
    try:
        process.launch()
        line = process.wait_for_line("error:")
        assert "belongs to cluster" in line
        assert process.wait() == 9, process.tail()
    finally:
        process.kill()


def test_the_only_controller_without_its_files_makes_no_other_cluster(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running(data_dir) as process:
        assert process.stop() == 0, process.tail()
    (data_dir / "controller").rename(tmp_path / "aside")
    process = TidelogProcess(data_dir)
    try:
        process.launch()
        line = process.wait_for_line("error:")
        assert "the only controller of cluster" in line and str(data_dir / "controller") in line
        assert process.wait() == 9, process.tail()
    finally:
        process.kill()
    assert not (data_dir / "controller").exists()
    (tmp_path / "aside").rename(data_dir / "controller")
    with running(data_dir) as process:
        assert process.stop() == 0, process.tail()


def test_a_data_directory_in_use_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "data"):
        second = TidelogProcess(tmp_path / "data")
        try:
            second.launch()
            assert "in use by process" in second.wait_for_line("error:")
            assert second.wait() == 9, second.tail()
        finally:
            second.kill()


@pytest.mark.long
def test_a_killed_up_leaves_nothing_outside_of_its_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with running(tmp_path / "data", port=0) as process:
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        process.wait_for_line("is ready again")  # a second start reads the configuration, too
        process.kill()
    assert list(scratch.iterdir()) == []


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = TidelogProcess(tmp_path / "data", port=taken.getsockname()[1])
        try:
            process.launch()
            assert str(process.port) in process.wait_for_line("error:")
            assert "--kafka-port" in process.wait_for_line("hint:")
            assert process.wait() == 8, process.tail()
        finally:
            process.kill()


@pytest.mark.gate_cases("flags0-2-did you mean 'wal.flush'", "flags7-2-no configuration file")
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--set", "wal.flsh=sync"], 2, "did you mean 'wal.flush'"),
        (["--set", "wal.flush=sometimes"], 2, "wal.flush"),
        (["--set", "kafka.num_partitions=0"], 2, "kafka.num_partitions"),
        (["--brokers", "2", "--controllers", "3"], 2, "needs as many brokers"),
        (["--set", "controller.members=1@127.0.0.1:1,2@127.0.0.1:2,3@127.0.0.1:3"], 2, "controller.secret_file"),
        (["--set", "controller.host=0.0.0.0"], 2, "controller.secret_file"),
        (["--s3-endpoint", "http://127.0.0.1:1"], 2, "--bucket"),
        (["--config", "nowhere.toml"], 2, "no configuration file"),
    ],
)
def test_wrong_flags_and_keys_get_a_clear_answer(flags: list[str], code: int, said: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
    command = [sys.executable, "-m", "tidelog", "up", "--data-dir", str(tmp_path / "data"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert not (tmp_path / "data").exists(), "nothing may be touched"


def test_a_wrong_bucket_name_is_told_at_once(tmp_path: Path, moto_server: S3Server) -> None:
    flags = [*s3_flags(moto_server, new_bucket()), "--set", "s3.create_bucket=false"]
    process = TidelogProcess(tmp_path / "data", flags)
    try:
        process.launch()
        line = process.wait_for_line("bucket")
        assert "test-" in line
    finally:
        process.kill()


def test_a_server_that_cannot_fence_is_refused_for_the_wal_and_told_why(tmp_path: Path, moto_server: S3Server) -> None:
    with faulty_proxy(moto_server) as proxy:
        proxy.fault = lambda seen: Fault(drop_headers=("If-None-Match",))
        process = TidelogProcess(tmp_path / "data", [*s3_flags(proxy.server), "--wal", "s3"])
        try:
            process.launch()
            line = process.wait_for_line("cannot keep two brokers from writing the same WAL")
            assert "ignores `If-None-Match: *`" in line, line
            process.wait_for_line("--wal disk")
        finally:
            process.kill()


@pytest.mark.long
def test_a_wal_in_the_bucket_rides_out_a_bucket_that_is_away(tmp_path: Path, moto_server: S3Server) -> None:
    """Producers wait, nothing fails and nothing is lost; answers that get lost are recognised."""
    with faulty_proxy(moto_server) as proxy:
        flags = [*s3_flags(proxy.server), "--wal", "s3", "--set", "s3.retry_budget_ms=1000"]
        with running(tmp_path / "data", flags) as process:
            create_topic(process.bootstrap, "t")
            writer = Writer(process.bootstrap, "t")
            writer.write()
            writer.flush()
            proxy.fault = lambda seen: Fault(lose_reply=True) if len(proxy.requests) % 2 else Fault(status=503)
            for _ in range(20):
                writer.write()
            away_until = time.monotonic() + 4
            while time.monotonic() < away_until:
                writer.poll()
            proxy.fault = lambda seen: None
            writer.flush()
            assert not writer.errors and len(writer.acknowledged) == 21
            assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged
            process.kill()
        with running(tmp_path / "data", flags) as process:
            assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged
            assert process.stop() == 0, process.tail()


@pytest.mark.long
def test_a_wal_on_disk_is_not_left_behind_by_a_change_of_kind(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        create_topic(process.bootstrap, "t")
        process.kill()
    process = TidelogProcess(tmp_path / "data", ["--wal", "s3"])
    try:
        process.launch()
        process.wait_for_line("holds a WAL on disk")
    finally:
        process.kill()
