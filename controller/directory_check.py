"""Looking at a controller's directory without starting it: is every byte of journal, snapshot and quorum file right?

It only reads, and may be used beside a running controller: the journal is read before the snapshot, so that a
compaction in between shows more than is needed, never less.

Entry: `check_directory`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from controller.journal import Journal
from controller.quorum_file import QuorumFile
from controller.snapshot_file import check_joined, read_snapshot, require_journal
from controller.state import ControllerState
from runtime.errors import CorruptData

JOURNAL_FILE = "journal"
SNAPSHOT_FILE = "snapshot"


class ControllerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What journal and snapshot hold. Indexes are of Raft entries; 0: none."""

    journal_bytes: int
    torn_bytes: int
    """At the journal's end, of a write that did not complete: recovery cuts them."""
    term: int
    first_index: int
    last_index: int
    snapshot_index: int
    """The newest entry that the snapshot contains."""


def check_directory(directory: Path) -> tuple[ControllerFiles | None, list[CorruptData]]:
    """What is there and what is damaged; None without a journal or if that cannot be read. Raises `OSError`."""
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
    try:
        QuorumFile(directory).read()
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
