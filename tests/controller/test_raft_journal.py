"""The Raft journal and snapshot files: what is synced is never lost, a torn tail is cut, damage is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.controller.raft.journal import Journal, JournalStalled
from tidelog.controller.raft.member import align
from tidelog.controller.raft.snapshot import Snapshot, read_snapshot, write_snapshot
from tidelog.runtime.errors import CorruptData, StorageFailed


def filled(path: Path, count: int = 5) -> tuple[Journal, list[int]]:
    """A journal with one entry a frame; the file's size after each."""
    journal = Journal.open(path)
    sizes = [journal.size_bytes]
    for index in range(1, count + 1):
        journal.append(b"command %d" % index, index, 1)
        journal.sync()
        sizes.append(journal.size_bytes)
    journal.close()
    return journal, sizes


def entries(path: Path) -> list[tuple[bytes, int, int]]:
    journal = Journal.open(path)
    journal.close()
    return journal.entries


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(max_size=1500)),
        st.tuples(st.just("truncate"), st.integers(0, 20)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.tuples(st.just("term"), st.integers(1, 9)),
        st.tuples(st.just("sync"), st.none()),
    ),
    max_size=25,
)


@given(operations=OPERATIONS)
@settings(max_examples=examples(60), deadline=None)
def test_what_was_synced_is_read_back(
    operations: list[tuple[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal.open(path)
    for kind, value in operations:
        if kind == "append":
            assert isinstance(value, bytes)
            journal.append(value, journal.last_index + 1, journal.term)
        elif kind == "truncate":
            assert isinstance(value, int)
            journal.truncate_from(value)
        elif kind == "drop":
            assert isinstance(value, int)
            journal.drop_to(min(value, max(0, len(journal.entries) - 1)))
        elif kind == "term":
            assert isinstance(value, int)
            journal.set_term(value, f"node-{value}")
        else:
            journal.sync()
    expected = (list(journal.entries), journal.term, journal.voted_for)
    journal.close()
    again = Journal.open(path)
    assert (again.entries, again.term, again.voted_for) == expected
    again.append(b"more", again.last_index + 1, 9)
    again.close()
    assert entries(path)[-1][0] == b"more"


def test_a_torn_tail_is_cut_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _, sizes = filled(path)
    whole = path.read_bytes()
    for length in range(sizes[-2], len(whole)):
        path.write_bytes(whole[:length])
        assert [entry[1] for entry in entries(path)] == [1, 2, 3, 4]
        assert path.stat().st_size == sizes[-2]


def test_a_tail_whose_sectors_were_never_written_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path)
    journal.append(b"kept", 1, 1)
    journal.sync()
    kept = journal.size_bytes
    journal.append(b"x" * 3000, 2, 1)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:1024] + bytes(512) + whole[1536:])
    assert [entry[0] for entry in entries(path)] == [b"kept"]
    path.write_bytes(whole[:kept] + bytes(len(whole) - kept))
    assert [entry[0] for entry in entries(path)] == [b"kept"]


def test_every_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _, sizes = filled(path, 3)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptData) as refused:
            Journal.open(path)
        frame = max(start for start in (0, 16, *sizes) if start <= position)
        assert str(path) in refused.value.message and f"byte {frame}" in refused.value.message
        assert path.read_bytes() == damaged, "a damaged file must be left as it is"


def test_a_missing_frame_in_the_middle_is_corruption(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _, sizes = filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: sizes[2]] + whole[sizes[3] :])
    with pytest.raises(CorruptData, match="follows frame"):
        Journal.open(path)


def test_a_full_disk_stalls_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path)
    journal.append(b"one", 1, 1)
    journal.sync()
    real = os.write
    left = [3]

    def short(fd: int, data: memoryview) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "no space left on device")
        written = real(fd, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", short)
    journal.append(b"two", 2, 1)
    with pytest.raises(JournalStalled):
        journal.sync()
    assert path.stat().st_size == journal.size_bytes
    with pytest.raises(JournalStalled):
        journal.sync()
    monkeypatch.undo()
    journal.sync()
    journal.close()
    assert [entry[0] for entry in entries(path)] == [b"one", b"two"]


def test_a_failed_fdatasync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(tmp_path / "journal")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fdatasync", fail)
    journal.append(b"one", 1, 1)
    with pytest.raises(StorageFailed):
        journal.sync()
    monkeypatch.undo()
    with pytest.raises(StorageFailed):
        journal.sync()
    journal.close()


def test_a_compaction_that_fails_leaves_the_old_file_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    filled(path)
    journal = Journal.open(path)

    def fail(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(JournalStalled):
        journal.drop_to(3)
    monkeypatch.undo()
    journal.append(b"six", 6, 1)
    journal.close()
    assert [entry[1] for entry in entries(path)] == [1, 2, 3, 4, 5, 6]


# Snapshots, and how they meet the journal


def snapshot_at(index: int) -> Snapshot:
    return Snapshot((b"command %d" % index, index, 1), (b"command %d" % (index - 1), index - 1, 1), b"state")


def test_a_snapshot_is_read_back_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    assert read_snapshot(path) is None
    write_snapshot(path, snapshot_at(3))
    assert read_snapshot(path) == snapshot_at(3)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x01
        path.write_bytes(damaged)
        with pytest.raises(CorruptData, match="at byte"):
            read_snapshot(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptData):
        read_snapshot(path)


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (None, [1, 2, 3, 4, 5]),
        (snapshot_at(3), [2, 3, 4, 5]),  # a crash between snapshot and compaction: nothing after it is lost
        (snapshot_at(5), [4, 5]),
        (snapshot_at(9), [8, 9]),  # received from the leader, and the journal was not replaced yet
        (Snapshot((b"other", 4, 2), (b"command 3", 3, 1), b""), [3, 4]),  # a conflicting tail was never committed
    ],
)
def test_a_journal_is_aligned_with_the_snapshot(tmp_path: Path, snapshot: Snapshot | None, expected: list[int]) -> None:
    filled(tmp_path / "journal")
    journal = Journal.open(tmp_path / "journal")
    align(journal, snapshot)
    journal.close()
    assert [entry[1] for entry in entries(tmp_path / "journal")] == expected


def test_missing_entries_between_snapshot_and_journal_are_corruption(tmp_path: Path) -> None:
    filled(tmp_path / "journal")
    journal = Journal.open(tmp_path / "journal")
    journal.drop_to(3)
    with pytest.raises(CorruptData, match="missing"):
        align(journal, snapshot_at(3))
    with pytest.raises(CorruptData, match="missing"):
        align(journal, None)
    journal.close()


@pytest.mark.parametrize("sectors", [1, 2])
def test_a_zeroed_sector_over_acknowledged_entries_is_damage_and_not_a_torn_tail(tmp_path: Path, sectors: int) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path)
    for index in range(1, 60):
        journal.append(b"command %d" % index * 10, index, 1)
        journal.sync()
    journal.close()
    sound = path.read_bytes()
    for first in range(512, len(sound) - 512 * (sectors + 1), 512):
        path.write_bytes(sound[:first] + bytes(512 * sectors) + sound[first + 512 * sectors :])
        before = path.read_bytes()
        with pytest.raises(CorruptData, match=r"journal at byte \d+"):
            Journal.open(path)
        assert path.read_bytes() == before
        with pytest.raises(CorruptData):
            Journal.examine(path)


def test_examining_changes_nothing_and_tells_of_a_torn_tail(tmp_path: Path) -> None:
    _, sizes = filled(tmp_path / "journal")
    sound = (tmp_path / "journal").read_bytes()
    for end in range(sizes[-2], sizes[-1] + 1):
        (tmp_path / "journal").write_bytes(sound[:end])
        journal, torn_bytes = Journal.examine(tmp_path / "journal")
        assert (tmp_path / "journal").read_bytes() == sound[:end]
        assert torn_bytes == (end - sizes[-2] if end < sizes[-1] else 0)
        assert journal.last_index == (5 if end == sizes[-1] else 4)
    with pytest.raises(FileNotFoundError):
        Journal.examine(tmp_path / "nothing")


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_file_that_does_not_have_its_first_frame_is_damage_and_not_a_new_journal(
    is_compacted: bool, tmp_path: Path
) -> None:
    """That frame is durable before the file is put in place: no crash tears it, a copy that was cut short does."""
    path = tmp_path / "journal"
    journal = Journal.open(path)
    journal.set_term(7, "2")
    for index in range(1, 4):
        journal.append(b"command %d" % index, index, 7)
    journal.sync()
    if is_compacted:
        journal.drop_to(1)
    journal.close()
    whole = path.read_bytes()
    first = len(whole) if is_compacted else filled(tmp_path / "other", 0)[1][0]
    for length in range(first):
        for data in (whole[:length], bytes(length)):
            path.write_bytes(data)
            for read in (Journal.open, Journal.examine):
                with pytest.raises(CorruptData):
                    read(path)
            assert path.read_bytes() == data, "the file is left alone"
