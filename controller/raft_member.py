"""pysyncobj 0.3.17 made strong from outside: the one module that knows its private names (hence the exact pin).

What is replaced, and why, is told in docs/design/0002-raft-hardening.md. In short: entries are raw bytes that only our
state machine reads (no pickles in journal or snapshot); our journal stands in for the mmap one; elections of several
members are preceded by a pre-vote; a member that was paused does not depose a leader; snapshots are checked files.

Everything here runs on the consensus thread. Entry: `RaftMember`, used by `controller.raft`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node, TCPNode
from pysyncobj.transport import Transport

from controller.journal import Entry, Journal, JournalStalled, sync_directory
from controller.raft_transport import HardenedTransport
from controller.snapshot_file import Snapshot, check_joined, read_snapshot, write_snapshot
from runtime.errors import TidelogError

log = logging.getLogger(__name__)

_REGULAR = 0
_NO_OP = 1
BATCH_BYTES = 16 << 20
"""With 64 KB batches followers were seen to drop acknowledged entries and get them again (deps.md)."""
NEVER = 1 << 40
QUEUE_COMMANDS = 8_192


class JournalAdapter:
    """Our journal under the names pysyncobj calls."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def __len__(self) -> int:
        return len(self.journal.entries)

    def __getitem__(self, item: Any) -> Any:
        return self.journal.entries[item]

    def add(self, command: bytes, idx: int, term: int) -> None:
        """One entry."""
        self.journal.append(command, idx, term)

    def clear(self) -> None:
        """Drop all."""
        self.journal.clear()

    def deleteEntriesFrom(self, position: int) -> None:  # noqa: N802
        """A follower's conflict."""
        self.journal.truncate_from(position)

    def deleteEntriesTo(self, position: int) -> None:  # noqa: N802
        """A snapshot covers these."""
        try:
            self.journal.drop_to(position)
        except JournalStalled as error:
            log.warning("the journal was not compacted; the old file stands", extra={"error": str(error)})

    def setRaftCommitIndex(self, index: int) -> None:  # noqa: N802
        """A hint."""
        self.journal.note_commit(index)

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        """A hint."""
        return self.journal.commit_index

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802
        """Durable when it returns."""
        self.journal.set_term(term, voted_for)

    def getCurrentTerm(self) -> int:  # noqa: N802
        """As recorded."""
        return self.journal.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        """As recorded."""
        return self.journal.voted_for

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Nothing: every sync is explicit."""

    def _destroy(self) -> None:
        self.journal.close()


class NoTransport(Transport):  # type: ignore[misc]
    """A single member talks to nobody and opens no port."""

    def __init__(self) -> None:
        super().__init__(None, None, [])

    def send(self, node: Any, message: Any) -> bool:
        """There is nobody."""
        return False


def align(journal: Journal, snapshot: Snapshot | None) -> None:
    """Make the journal begin at the snapshot's last two entries, as pysyncobj wants it.

    pysyncobj itself would throw away the whole journal when a crash came between snapshot and compaction: acknowledged
    entries lost. Raises `CorruptData` when entries between snapshot and journal are missing.
    """
    entries = journal.entries
    check_joined(journal.path, entries, snapshot)
    if snapshot is None:
        return
    first = snapshot.previous[1]
    position = first - entries[0][1] if entries else 0
    if entries[position : position + 2] == [snapshot.previous, snapshot.last]:
        if position:
            journal.drop_to(position)
    else:  # a snapshot received from the leader replaced a shorter or conflicting log
        journal.reset([snapshot.previous, snapshot.last])


class RaftMember(SyncObj):  # type: ignore[misc]
    """One member. `apply(command, index)` must not raise for anything but the end of this member.

    No properties here: pysyncobj calls `getattr` on every attribute while it is being built.
    """

    def __init__(
        self,
        *,
        address: str | None,
        peers: list[str],
        conf: dict[str, Any],
        directory: Path,
        apply: Callable[[bytes, int], Any],
        dump: Callable[[], bytes],
        load: Callable[[bytes], None],
    ) -> None:
        self._apply = apply
        self._dump = dump
        self._load = load
        self._snapshot_path = directory / "snapshot"
        self.journal = Journal.open(directory / "journal")
        self.failure: Exception | None = None
        self.snapshot_failed = False
        self._paused_since = time.monotonic()
        for leftover in ("snapshot.tmp", "snapshot.1.tmp"):
            (directory / leftover).unlink(missing_ok=True)
        try:
            self._first: Snapshot | None = read_snapshot(self._snapshot_path)
            align(self.journal, self._first)
        except TidelogError:
            self.journal.close()
            raise
        settings = SyncObjConf(
            autoTick=False,
            appendEntriesUseBatch=False,
            appendEntriesBatchSizeBytes=BATCH_BYTES,
            commandsQueueSize=QUEUE_COMMANDS,
            commandsWaitLeader=False,
            dynamicMembershipChange=False,
            fullDumpFile=str(self._snapshot_path),
            journalFile=None,
            useFork=False,
            serializer=self._write_snapshot,
            deserializer=self._read_snapshot,
            logCompactionMinEntries=NEVER,
            logCompactionMinTime=NEVER,
            **conf,
        )
        if address is None:
            super().__init__(Node("single"), [], settings, nodeClass=Node, transport=NoTransport())
        else:
            super().__init__(address, peers, settings, nodeClass=TCPNode, transportClass=HardenedTransport)
        self._use_journal(alone=address is None)

    def _use_journal(self, *, alone: bool) -> None:
        """Put our journal in the place of the memory journal that the constructor made, and its term and vote."""
        adapter = JournalAdapter(self.journal)
        if len(adapter) == 0:
            adapter.add(bytes([_NO_OP]), 1, 0)
        self._SyncObj__raftLog = adapter
        self._SyncObj__raftCurrentTerm = max(self.journal.term, self.journal.entries[-1][2])
        self._SyncObj__votedForNodeId = self.journal.voted_for
        self._SyncObj__raftCommitIndex = min(self.journal.commit_index, self.journal.last_index)
        if alone:
            self._SyncObj__raftElectionDeadline = 0.0  # nobody else can win

    # What pysyncobj calls

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:  # noqa: N802
        """Instead of unpickling a method call: the entry's bytes go to the machine."""
        if command[0] == _REGULAR:
            return self._apply(command[1:], self.raftLastApplied + 1)
        if command[0] != _NO_OP:
            log.error("an entry of a kind we never write was ignored", extra={"kind": command[0]})
        return None

    def _write_snapshot(self, path: str, data: tuple[Entry, Entry, Any]) -> None:
        try:
            write_snapshot(Path(path), Snapshot(data[0], data[1], self._dump()))
        except OSError as error:
            self.snapshot_failed = True
            log.warning("the snapshot was not written; it is tried again", extra={"error": str(error)})
            raise

    def _read_snapshot(self, path: str) -> tuple[Entry, Entry, tuple[()]]:
        """At start, and after a leader's snapshot was received; an error here must stop the member."""
        try:
            snapshot = self._first
            if snapshot is None:
                with Path(path).open("rb") as file:
                    os.fsync(file.fileno())
                sync_directory(self._snapshot_path.parent)
                snapshot = read_snapshot(Path(path))
            self._first = None
            assert snapshot is not None
            self._load(snapshot.state)
        except (TidelogError, OSError) as error:
            self.failure = error
            raise
        return snapshot.last, snapshot.previous, ()

    # Pre-vote and pauses (several members only)

    def before_tick(self) -> None:
        """Decide whether an election that is due may begin. Called before each tick."""
        transport = self._SyncObj__transport
        now = time.monotonic()
        paused, self._paused_since = now - self._paused_since, now
        if not isinstance(transport, HardenedTransport):
            return
        if paused > self.conf.raftMinTimeout / 2:
            self.postpone_election()  # this process slept: first listen whether there is a leader
        if self._isLeader() or self._SyncObj__raftElectionDeadline >= now or self._SyncObj__transferInProgress:
            return
        if transport.take_pre_vote_won():
            return  # the election may begin in this tick
        self.postpone_election()
        if self._getLeader() is not None and transport.silence_s(now) > self.conf.raftMinTimeout:
            self._SyncObj__raftLeader = None
            self._SyncObj__onLeaderChanged()
        transport.ask_pre_vote()

    def postpone_election(self) -> None:
        """Start the election time-out over."""
        self._SyncObj__raftElectionDeadline = time.monotonic() + self._SyncObj__generateRaftTimeout()

    def force_election(self) -> None:
        """Make the election due now."""
        self._SyncObj__raftElectionDeadline = 0.0

    def last_log(self) -> tuple[int, int]:
        """`(term, index)` of the newest entry."""
        return self.journal.entries[-1][2], self.journal.entries[-1][1]

    def adopt_term(self, term: int) -> None:
        """Catch up with a larger term heard of, without an election."""
        self._SyncObj__setCurrentTerm(term, None)

    # What controller.raft calls

    def after_tick(self) -> None:
        """Make the journal durable, then let acknowledgements go. Raises what the journal raises."""
        self.journal.sync()
        transport = self._SyncObj__transport
        if isinstance(transport, HardenedTransport) and self.failure is None:
            transport.release()

    def submit(self, command: bytes, callback: Callable[[Any, int], None]) -> None:
        """Queue a command; `callback(result, reason)` on this thread, or never."""
        self._applyCommand(command, callback, _REGULAR)

    def has_work(self, *, alone: bool) -> bool:
        """Whether another tick would get further without a message from outside."""
        if self.raftCommitIndex > self.raftLastApplied:
            return True
        return alone and self.journal.last_index > self.raftCommitIndex

    def leader_id(self) -> str | None:
        """The leader's member id."""
        leader = self._getLeader()
        return None if leader is None else str(leader.id)

    def wait(self, seconds: float) -> None:
        """Sleep until a message, a wake-up or the time."""
        self._poller.poll(seconds)

    def watch(self, fd: int, callback: Callable[[int, int], None]) -> None:
        """Wake `wait` when `fd` is readable."""
        self._poller.subscribe(fd, callback, 1)

    def close(self) -> None:
        """Close connections and journal, and the pipe that pysyncobj forgets."""
        try:
            self.destroy()
        finally:
            notifier = getattr(self, "_SyncObj__pipeNotifier", None)
            if notifier is not None:
                for name in ("_PipeNotifier__pipeR", "_PipeNotifier__pipeW"):
                    with contextlib.suppress(OSError):
                        os.close(getattr(notifier, name))
