"""A controller's directory, looked at without starting it: each damaged file is named, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bit_flips import bit_flip
from tidelog.controller.directory_check import check_directory
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.raft.journal import Journal
from tidelog.controller.raft.quorum import QuorumFile
from tidelog.controller.raft.snapshot import Snapshot, write_snapshot
from tidelog.runtime.errors import CorruptData, DamagedFile

MEMBERS = {1: "127.0.0.1:9193", 2: "10.0.0.2:9193", 30: "host-3:19193"}


def made(directory: Path) -> None:
    """Ten entries, the first eight of them in a snapshot, too."""
    QuorumFile(directory).write(MEMBERS)
    journal = Journal.open(directory / "journal")
    for index in range(1, 11):
        journal.append(b"command %d" % index, index, 1)
        journal.sync()
    journal.drop_to(6)
    journal.close()
    write_snapshot(
        directory / "snapshot", Snapshot((b"command 8", 8, 1), (b"command 7", 7, 1), ControllerState().dump())
    )


def test_a_sound_directory_is_described(tmp_path: Path) -> None:
    made(tmp_path)
    files, damage = check_directory(tmp_path)
    assert damage == [] and files is not None
    assert (files.first_index, files.last_index, files.snapshot_index, files.torn_bytes) == (7, 10, 8, 0)
    assert check_directory(tmp_path / "nothing") == (None, [])


@pytest.mark.parametrize("name", ["journal", "snapshot", "quorum"])
def test_every_flipped_bit_is_found_and_its_file_named(tmp_path: Path, name: str) -> None:
    made(tmp_path)
    file = tmp_path / name
    for bit in range(file.stat().st_size * 8):
        with bit_flip(file, bit):
            _, damage = check_directory(tmp_path)
        [error] = damage
        assert isinstance(error, DamagedFile) and Path(error.path) == file, (bit, error)
        assert error.position <= bit // 8
    assert check_directory(tmp_path)[1] == []


def test_entries_that_are_missing_between_snapshot_and_journal_are_found(tmp_path: Path) -> None:
    made(tmp_path)
    journal = Journal.open(tmp_path / "journal")
    journal.drop_to(3)
    journal.close()
    [error] = check_directory(tmp_path)[1]
    assert "entries are missing" in error.message
    (tmp_path / "snapshot").unlink()
    [error] = check_directory(tmp_path)[1]
    assert "the snapshot before it is missing" in error.message


def test_members_are_never_read_from_a_damaged_file(tmp_path: Path) -> None:
    file = QuorumFile(tmp_path)
    file.write(MEMBERS)
    assert file.read() == MEMBERS
    for bit in range(file.path.stat().st_size * 8):
        with bit_flip(file.path, bit), pytest.raises(CorruptData):
            file.read()
