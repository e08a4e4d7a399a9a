"""Writes a state as the directories of controllers that have not started yet.

All members of a quorum get the same snapshot, as if each had applied the log up to there, and directory ids of their
own, which the snapshot names: they may vote.

Entry: `write_directories`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tidelog.controller.machine.state import ControllerState
from tidelog.controller.raft.directory_id import DirectoryFile, draw
from tidelog.controller.raft.files import SYSTEM_FILES
from tidelog.controller.raft.journal import Entry, Journal
from tidelog.controller.raft.quorum import QuorumFile
from tidelog.controller.raft.snapshot import Snapshot, write_snapshot
from tidelog.runtime.errors import StorageFailed

NO_OP = b"\x01"
"""A log entry that changes nothing."""


def write_directories(
    state: ControllerState,
    directories: Mapping[int, Path],
    members: Mapping[int, str],
    random: Callable[[], float],
) -> None:
    """Write the directory of each member, by node id; durable on return. Raises `StorageFailed`.

    `members`: addresses by node id; empty for a controller that is alone.
    """
    row = state.tables.cluster.get("")
    assert row is not None, "a state has its cluster"
    term, index = row.active_term, state.applied_index
    previous: Entry = (NO_OP, index - 1, term)
    last: Entry = (NO_OP, index, term)
    ids = {node_id: draw(random, is_trusted=True) for node_id in directories}
    recorded = tuple((node_id, ids[node_id].id) for node_id in sorted(ids)) if members else ()
    snapshot = Snapshot(last, previous, state.dump(), tuple(sorted(members.items())), recorded)
    for node_id, directory in directories.items():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            journal = Journal.open(directory / "journal")
            journal.reset([previous, last])
            journal.set_term(term, None)
            journal.close()
            if members:
                QuorumFile(directory).write(members)
                DirectoryFile(directory).write(ids[node_id])
            draft = directory / "snapshot.tmp"
            write_snapshot(draft, snapshot)
            SYSTEM_FILES.rename(draft, directory / "snapshot")
            SYSTEM_FILES.sync_directory(directory)
        except OSError as error:
            raise StorageFailed(
                f"cannot write {directory}: {error}", hint="check the directory's permissions"
            ) from error
