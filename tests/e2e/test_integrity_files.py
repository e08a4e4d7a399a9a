"""A flipped bit in any file of a data directory is named by `tidelog wal verify`, and a process refuses to start on it.

The directory is that of a real process which was killed: WAL, epoch file, controller journal and snapshot, identity.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.backends import create_topic, read_topic, s3_flags
from tests.e2e.test_failures import Writer
from tests.support.bit_flips import bit_flip, places
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.config import Config
from tidelog.process.data_check import DataReport, check_data
from tidelog.runtime.disk import FileDisk
from tidelog.storage.wal.disk import inspect as wal_tool

FLIPS = 120
"""Bits turned over in each file, one after another."""
FLAGS = ("--set", "upload.age_ms=600000", "--set", "controller.snapshot_entries=10")


class Killed(NamedTuple):
    """A directory as `kill -9` left it."""

    data_dir: Path
    port: int
    acknowledged: list[bytes]
    proven: int
    """WAL bytes that a later record says were durable."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    data_dir = tmp_path_factory.mktemp("integrity") / "data"
    with running(data_dir, FLAGS) as process:
        create_topic(process.bootstrap, "t")
        for number in range(15):  # entries enough for a snapshot
            create_topic(process.bootstrap, f"other-{number}")
        writer = Writer(process.bootstrap, "t")
        for _ in range(30):
            writer.write(700)
            writer.flush()
        process.kill()
    info = asyncio.run(_inspect(data_dir / "wal"))
    assert (data_dir / "controller" / "snapshot").exists()
    return Killed(data_dir, process.port, writer.acknowledged, info.segments[-1].confirm_offset)


async def _inspect(path: Path) -> wal_tool.WalInfo:
    disk = FileDisk(path)
    try:
        return await wal_tool.inspect(disk)
    finally:
        await disk.close()


def check(data_dir: Path) -> DataReport:
    config = Config()
    config.node.data_dir = str(data_dir)
    return asyncio.run(check_data(config, ""))


def checked_files(killed: Killed) -> Iterator[tuple[Path, int]]:
    """Each checksummed file, and up to which byte it must be right."""
    for name in ("identity.json", "wal/epochs", "controller/journal", "controller/snapshot"):
        file = killed.data_dir / name
        yield file, file.stat().st_size
    [segment] = (killed.data_dir / "wal").glob("*.wal")
    yield segment, killed.proven


def test_a_killed_directory_is_sound(killed: Killed) -> None:
    report = check(killed.data_dir)
    assert report.is_sound, report.findings
    assert report.identity is not None and report.controller is not None and report.info is not None
    assert report.controller.snapshot_index > 0
    assert report.info.end_offset > killed.proven > 10_000


@pytest.mark.long
def test_a_flipped_bit_anywhere_is_found_and_its_file_named(killed: Killed, tmp_path: Path) -> None:
    shutil.copytree(killed.data_dir, tmp_path / "copy")
    for file, end in checked_files(killed):
        name = file.relative_to(killed.data_dir)
        for bit in places(len(str(name)), FLIPS, 0, end):
            with bit_flip(tmp_path / "copy" / name, bit):
                report = check(tmp_path / "copy")
            errors = [one for one in report.findings if one.is_error]
            assert [one.file for one in errors] == [name.as_posix()], (name, bit, report.findings)
            assert errors[0].file_offset <= bit // 8
    assert check(tmp_path / "copy").is_sound


@pytest.mark.long
def test_a_flipped_bit_in_the_tail_that_nothing_proves_is_no_false_alarm(killed: Killed, tmp_path: Path) -> None:
    shutil.copytree(killed.data_dir, tmp_path / "copy")
    [segment] = (tmp_path / "copy" / "wal").glob("*.wal")
    for bit in places(3, 20, killed.proven, segment.stat().st_size):
        with bit_flip(segment, bit):
            assert all(one.kind == "torn" for one in check(tmp_path / "copy").findings if one.kind != "leftover")


@pytest.mark.gate_cases("journal")
@pytest.mark.parametrize("number", range(5), ids=["identity", "epochs", "journal", "snapshot", "segment"])
def test_a_process_refuses_damage_names_it_and_goes_on_when_it_is_mended(
    killed: Killed, tmp_path: Path, number: int
) -> None:
    file, end = list(checked_files(killed))[number]
    name = file.relative_to(killed.data_dir)
    data_dir = tmp_path / "data"
    shutil.copytree(killed.data_dir, data_dir)
    bit = list(places(number, 3, 0, end))[2]
    with bit_flip(data_dir / name, bit):
        process = TidelogProcess(data_dir, FLAGS)
        try:
            process.launch()
            process.wait_for_line("error:", 30)
            assert process.wait(30) == 7, process.tail()
            assert name.name in process.tail()
            assert "hint:" in process.tail()
        finally:
            process.kill()
        result = Cli()("wal", "verify", "--data-dir", data_dir, code=7)
        assert name.as_posix() in result.text and result.text.startswith("DAMAGED")
        document = Cli()("wal", "verify", "--data-dir", data_dir, "--format", "json", code=7).json()
        assert [one["file"] for one in document["findings"] if one["error"]] == [name.as_posix()]
    assert Cli()("wal", "verify", "--data-dir", data_dir).text.startswith("sound: ")
    with running(data_dir, FLAGS, port=killed.port) as process:
        assert [row[4] for row in read_topic(process.bootstrap, "t")] == killed.acknowledged
        assert process.stop() == 0, process.tail()


@pytest.mark.long
@pytest.mark.parametrize("name", ["journal", "snapshot"])
def test_a_controller_file_that_is_gone_is_refused_and_not_begun_anew(
    killed: Killed, tmp_path: Path, name: str
) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(killed.data_dir, data_dir)
    (data_dir / "controller" / name).unlink()
    process = TidelogProcess(data_dir, FLAGS)
    try:
        process.launch()
        process.wait_for_line("error:", 30)
        assert process.wait(30) == 7, process.tail()
        assert "missing" in process.tail() and "hint:" in process.tail()
    finally:
        process.kill()
    assert not (data_dir / "controller" / name).exists()
    assert "missing" in Cli()("wal", "verify", "--data-dir", data_dir, code=7).text


@pytest.mark.long
def test_a_log_in_the_bucket_is_verified_while_it_runs_and_refused_when_damaged(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    where = ("--wal", "s3", "--data-dir", data_dir)
    flags = [*FLAGS, "--wal", "s3"]
    with running(data_dir, flags) as process:
        create_topic(process.bootstrap, "t")
        writer = Writer(process.bootstrap, "t")
        for _ in range(10):
            writer.write(700)
            writer.flush()
        assert Cli()("wal", "verify", *where).text.startswith("sound: ")
        process.kill()
    assert "RECORDS" in Cli()("wal", "inspect", *where).text
    lines = Cli()("wal", "inspect", *where, "--records").rows()
    assert sum(row[1] == "data" for row in lines) >= 10
    document = Cli()("wal", "verify", *where, "--format", "json").json()
    assert document["sound"] and document["controller"]["last_index"] > 0
    live = [one for one in document["info"]["objects"] if one["is_live"]]
    victim = live[len(live) // 2]["key"]
    file = data_dir / "bucket" / victim
    with bit_flip(file, file.stat().st_size * 4):
        result = Cli()("wal", "verify", *where, code=7)
        assert result.text.startswith("DAMAGED") and victim in result.text
        process = TidelogProcess(data_dir, flags)
        try:
            process.launch()
            process.wait_for_line("error:", 30)
            assert process.wait(30) == 7, process.tail()
            assert victim in process.tail()
        finally:
            process.kill()
    with running(data_dir, flags, port=process.port) as process:
        assert [row[4] for row in read_topic(process.bootstrap, "t")] == writer.acknowledged


@pytest.mark.long
def test_a_log_on_an_s3_server_is_verified_by_the_flags_of_up(tmp_path: Path, moto_server: S3Server) -> None:
    where = [*s3_flags(moto_server), "--wal", "s3"]
    with running(tmp_path / "data", where) as process:
        create_topic(process.bootstrap, "t")
        process.kill()
    assert Cli()("wal", "verify", *where, "--data-dir", tmp_path / "data").text.startswith("sound: ")
    cluster = json.loads((tmp_path / "data" / "identity.json").read_text())["cluster_id"]
    nowhere = ("--data-dir", tmp_path / "nowhere")
    report = Cli()("wal", "verify", *where, *nowhere, "--cluster-id", cluster, "--format", "json").json()
    assert report["info"]["objects"] and report["identity"] is None
    assert "--cluster-id" in Cli()("wal", "verify", *where, *nowhere, code=3).err
    assert "embedded bucket" in Cli()("wal", "verify", "--wal", "s3", *nowhere, "--cluster-id", "x", code=3).err


@pytest.mark.gate_cases("disk")
@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_nothing_is_reported_while_a_busy_process_writes_rolls_and_trims(tmp_path: Path, kind: str) -> None:
    data_dir = tmp_path / "data"
    flags = [*("--wal", kind), *("--set", "controller.snapshot_entries=10"), *("--set", "upload.age_ms=100")]
    flags += ["--set", "wal.segment_bytes=1048576"]
    config = Config()
    config.node.data_dir = str(data_dir)
    config.wal.kind = "s3" if kind == "s3" else "disk"
    with running(data_dir, flags) as process:
        create_topic(process.bootstrap, "t")
        writer = Writer(process.bootstrap, "t")
        starts: set[int] = set()
        looks = 0

        def looked() -> bool:
            nonlocal looks
            looks += 1
            for _ in range(20):
                writer.write(20_000)
            writer.poll(0)
            if looks % 4 == 0:
                create_topic(process.bootstrap, f"more-{looks}")
            report = asyncio.run(check_data(config, ""))
            assert report.is_sound, report.findings
            assert report.info is not None and report.controller is not None
            starts.add(report.info.start_offset)
            return len(starts) > 4

        wait_until(looked, "the log was trimmed while it was looked at", 90)
        writer.flush()
        assert not writer.errors
        assert process.stop() == 0, process.tail()
    report = asyncio.run(check_data(config, ""))
    assert report.findings == []
