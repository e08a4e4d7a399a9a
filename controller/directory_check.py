"""Offline check of a controller's directory: verify every byte of its files.

The check only reads, and may run beside a running controller: it reads the journal before the snapshot, so that a
concurrent compaction shows entries twice rather than not at all.

Entry: `check_directory`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.controller.machine.state import ControllerState
from tidelog.controller.raft.directory_id import DirectoryFile
from tidelog.controller.raft.journal import Journal
from tidelog.controller.raft.quorum import QuorumFile
from tidelog.controller.raft.snapshot import check_joined, read_snapshot, require_journal
from tidelog.runtime.errors import CorruptData

JOURNAL_FILE = "journal"
SNAPSHOT_FILE = "snapshot"


class ControllerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Content of journal and snapshot. Indexes are of Raft entries; 0: none."""

    journal_bytes: int
    torn_bytes: int
    """Bytes of an incomplete write at the end of the journal; recovery cuts them."""
    term: int
    first_index: int
    last_index: int
    snapshot_index: int
    """The newest entry that the snapshot contains."""


def check_directory(directory: Path) -> tuple[ControllerFiles | None, list[CorruptData]]:
    """Return the content and the damage found; None if the journal is absent or unreadable. Raises `OSError`."""
    damage: list[CorruptData] = []
    journal: Journal | None = None
    torn_bytes = 0
    try:
        require_journal(directory / JOURNAL_FILE, directory / SNAPSHOT_FILE)
        journal, torn_bytes = Journal.examine(directory / JOURNAL_FILE)
    except FileNotFoundError:
        journal = None
    except CorruptData as error:
        damage.append(error)
    snapshot = None
    try:
        snapshot = read_snapshot(directory / SNAPSHOT_FILE)
        if snapshot is not None:
            ControllerState().load(snapshot.state)
    except CorruptData as error:
        damage.append(error)
    for file in (QuorumFile(directory), DirectoryFile(directory)):
        try:
            file.read()
        except CorruptData as error:
            damage.append(error)
    if journal is None:
        return None, damage
    if not damage:
        try:
            check_joined(journal.path, journal.entries, snapshot)
        except CorruptData as error:
            damage.append(error)
    files = ControllerFiles(
        journal_bytes=journal.size_bytes,
        torn_bytes=torn_bytes,
        term=journal.term,
        first_index=journal.entries[0][1] if journal.entries else 0,
        last_index=journal.last_index,
        snapshot_index=snapshot.last[1] if snapshot is not None else 0,
    )
    return files, damage
