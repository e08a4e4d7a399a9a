"""`tidelog wal renew-id`: which log it gives another id, and when it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tidelog.cli.subcommands.wal import wal
from tidelog.process.data_dir import DataDirectory, WrongDataDirectory, lock_file
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import DamagedFile, InvalidInput, NotFound
from tidelog.storage.wal.disk.identity import read_wal_id, stored_wal_id

BROKER, OTHER = 2, 5


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The directory of broker 2, with the log of its own set and one of set 5."""
    DataDirectory.open(tmp_path, BROKER, "check").close()
    for folder, replica_set in (("wal", BROKER), (f"replica-{OTHER}", OTHER)):
        path = tmp_path / folder
        path.mkdir()
        asyncio.run(read_wal_id(FileDisk(path), random.Random(replica_set), replica_set))
    return tmp_path


def ids(data_dir: Path) -> list[str | None]:
    return [asyncio.run(stored_wal_id(FileDisk(data_dir / each))) for each in ("wal", f"replica-{OTHER}")]


def run(data_dir: Path, *more: str) -> Result:
    return CliRunner().invoke(wal, ["renew-id", "--data-dir", str(data_dir), *more])


def test_the_brokers_own_log_gets_another_id_and_no_other_one(data_dir: Path) -> None:
    own, other = ids(data_dir)
    result = run(data_dir, "--yes")
    assert result.exit_code == 0, result.output
    assert "elect 2 --broker 2 --accept-loss" in result.output and str(own) in result.output
    now = ids(data_dir)
    assert now[0] not in (None, own) and now[1] == other


def test_the_log_of_another_set_is_named_and_its_file_still_names_the_set(data_dir: Path) -> None:
    own, other = ids(data_dir)
    result = run(data_dir, "--yes", "--replica-set", str(OTHER), "--format", "json")
    document = json.loads(result.output)
    assert (document["before"], document["id"]) == (other, ids(data_dir)[1]) and document["id"] != other
    assert ids(data_dir)[0] == own
    path = data_dir / f"replica-{OTHER}"
    assert asyncio.run(read_wal_id(FileDisk(path), random.Random(1), OTHER)) == document["id"]


def test_a_directory_in_use_is_left_as_it_is(data_dir: Path) -> None:
    before = ids(data_dir)
    lock_fd = lock_file(data_dir, "lock")
    try:
        assert isinstance(run(data_dir, "--yes").exception, WrongDataDirectory)
    finally:
        os.close(lock_fd)
    assert ids(data_dir) == before


def test_what_is_not_there_is_not_made(data_dir: Path) -> None:
    assert isinstance(run(data_dir, "--yes", "--replica-set", "7").exception, NotFound)
    missing = data_dir / "no-such"
    assert isinstance(run(missing, "--yes").exception, NotFound) and not missing.exists()


def test_a_damaged_id_is_told_and_nothing_is_asked_without_a_terminal(data_dir: Path) -> None:
    assert isinstance(run(data_dir).exception, InvalidInput)
    (data_dir / "wal" / "id").write_bytes(b"{}")
    assert isinstance(run(data_dir, "--yes").exception, DamagedFile)
    assert (data_dir / "wal" / "id").read_bytes() == b"{}"
