"""pysyncobj 0.3.17 made strong from outside: the one module that knows its private names (hence the exact pin).

What is replaced, and why, is told in docs/design/0002-raft-hardening.md and 0005-cluster.md. In short: entries are raw
bytes that only our state machine reads (no pickles in journal, snapshot or on the wire); our journal stands in for the
mmap one; elections of several members are preceded by a pre-vote; a member that was paused does not depose a leader;
snapshots are checked files; membership changes are entries of our own, in force from the moment they are in the log.

Everything here runs on the consensus thread. Entry: `RaftMember`, used by `controller.raft`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf
from pysyncobj.config import SERIALIZER_STATE
from pysyncobj.node import Node
from pysyncobj.serializer import Serializer
from pysyncobj.transport import Transport

from controller.handshake import Credentials
from controller.journal import Entry, Journal, JournalStalled, sync_directory
from controller.quorum_file import Members, MembershipChange, QuorumFile
from controller.raft_transport import PeerTransport, make_node
from controller.snapshot_file import Snapshot, check_joined, read_snapshot, require_journal, write_snapshot
from runtime.errors import CorruptData, TidelogError

log = logging.getLogger(__name__)

_REGULAR = 0
_NO_OP = 1
_MEMBERSHIP = 2
BATCH_BYTES = 16 << 20
"""With 64 KB batches followers were seen to drop acknowledged entries and get them again (deps.md)."""
NEVER = 1 << 40
QUEUE_COMMANDS = 8_192
SNAPSHOT_PIECE_BYTES = 1 << 20

_changes = msgspec.msgpack.Decoder(MembershipChange)


class JournalAdapter:
    """Our journal under the names pysyncobj calls."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.keeps_tail = False
        """The message at hand does not contradict what lies behind the entries it speaks of."""

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
        if not self.keeps_tail:
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


class Snapshots(Serializer):  # type: ignore[misc]
    """pysyncobj's serializer, but it writes on a thread of its own, so that the member goes on meanwhile (a leader that
    stops for longer than an election time-out is none any more), and closes what it was sending when a transfer ends.

    `freeze(last, previous)` holds the state and returns what makes the snapshot. One file is written at a time.
    """

    def __init__(
        self, path: Path, freeze: Callable[[Entry, Entry], Callable[[], Snapshot]], load: Callable[[str], Any]
    ) -> None:
        super().__init__(str(path), SNAPSHOT_PIECE_BYTES, False, freeze, load, None)
        self._path = path
        self._draft = path.with_name(path.name + ".tmp")
        self._freeze = freeze
        self._writer: threading.Thread | None = None
        self._written = False
        self._wanted = True
        self._id = 0
        self.failed = False
        """The last one was not written."""

    def serialize(self, data: tuple[Any, Entry, Entry, Any], snapshot_id: int) -> None:
        """Begin a snapshot; `checkSerializing` tells how it went."""
        if self._writer is not None:
            return
        self._id, self._written, self._wanted = snapshot_id, False, True
        make = self._freeze(data[1], data[2])
        self._writer = threading.Thread(target=self._write, args=(make,), name="tidelog-snapshot", daemon=True)
        self._writer.start()

    def _write(self, make: Callable[[], Snapshot]) -> None:
        try:
            write_snapshot(self._draft, make())
            self._written = True
        except (OSError, MemoryError) as error:
            log.warning("the snapshot was not written; it is tried again", extra={"error": str(error)})

    def abandon(self) -> None:
        """A newer snapshot came from the leader: what is being written must not replace it."""
        self._wanted = False

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        before = dict(self._Serializer__transmissions)
        yield
        for peer, transfer in before.items():
            if self._Serializer__transmissions.get(peer) is not transfer:
                transfer["file"].close()

    def checkSerializing(self) -> Any:  # noqa: N802
        """Put a finished snapshot in its place, which ends the transfers of the old one."""
        if self._writer is None:
            return SERIALIZER_STATE.NOT_SERIALIZING, None
        if self._writer.is_alive():
            return SERIALIZER_STATE.SERIALIZING, self._id
        self._writer = None
        if not self._wanted:
            self._draft.unlink(missing_ok=True)
            return SERIALIZER_STATE.NOT_SERIALIZING, None
        try:
            if self._written:
                os.rename(self._draft, self._path)
        except OSError as error:
            log.warning("the snapshot was not put in place", extra={"error": str(error)})
            self._written = False
        if not self._written:
            self.failed = True
            return SERIALIZER_STATE.FAILED, self._id
        self._end_transfers()
        return SERIALIZER_STATE.SUCCESS, self._id

    def _end_transfers(self) -> None:
        with self._closing():
            self._Serializer__transmissions: dict[Any, Any] = {}

    def getTransmissionData(self, peer: Any) -> Any:  # noqa: N802
        """The next piece."""
        with self._closing():
            return super().getTransmissionData(peer)

    def cancelTransmisstion(self, peer: Any) -> None:  # noqa: N802
        """The peer went away."""
        with self._closing():
            super().cancelTransmisstion(peer)

    def close(self) -> None:
        """End all transfers, in and out."""
        if self._writer is not None:
            self._writer.join()
        self._end_transfers()
        incoming = self._Serializer__incomingTransmissionFile
        if incoming is not None:
            incoming.close()


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

    With `credentials` it takes part in a quorum, whose members are `members` unless the directory knows better; without
    it is alone and talks to nobody. No properties here: pysyncobj reads every attribute while it is being built.
    """

    def __init__(
        self,
        *,
        credentials: Credentials | None,
        members: Members,
        conf: dict[str, Any],
        directory: Path,
        apply: Callable[[bytes, int], Any],
        freeze: Callable[[], Callable[[], bytes]],
        load: Callable[[bytes], None],
    ) -> None:
        self._apply = apply
        self._freeze = freeze
        self._load = load
        self._node_id = credentials.node_id if credentials is not None else -1
        self._configured = members
        self._snapshot_path = directory / "snapshot"
        require_journal(directory / "journal", self._snapshot_path)
        self.journal = Journal.open(directory / "journal")
        self.failure: Exception | None = None
        self._paused_since = time.monotonic()
        for leftover in ("snapshot.tmp", "snapshot.1.tmp"):
            (directory / leftover).unlink(missing_ok=True)
        try:
            self._first: Snapshot | None = read_snapshot(self._snapshot_path)
            align(self.journal, self._first)
            self.members = self._known_members(directory) if credentials is not None else {}
        except TidelogError:
            self.journal.close()
            raise
        self.applied_members: Members = dict(self.members)
        settings = SyncObjConf(
            autoTick=False,
            appendEntriesUseBatch=False,
            appendEntriesBatchSizeBytes=BATCH_BYTES,
            commandsQueueSize=QUEUE_COMMANDS,
            commandsWaitLeader=False,
            dynamicMembershipChange=credentials is not None,
            fullDumpFile=str(self._snapshot_path),
            journalFile=None,
            useFork=False,
            serializer=self._freeze_snapshot,
            deserializer=self._read_snapshot,
            logCompactionMinEntries=NEVER,
            logCompactionMinTime=NEVER,
            logCompactionBatchSize=SNAPSHOT_PIECE_BYTES,
            **conf,
        )
        if credentials is None:
            super().__init__(Node("single"), [], settings, nodeClass=Node, transport=NoTransport())
        else:
            others = self._others()

            def transport(member: Any, me: Any, nodes: Any) -> PeerTransport:
                return PeerTransport(member, credentials, others)

            me = make_node(self._node_id, self.members.get(self._node_id, ""))
            super().__init__(me, others, settings, nodeClass=Node, transportClass=transport)
        self._SyncObj__serializer = Snapshots(self._snapshot_path, self._freeze_snapshot, self._read_snapshot)
        self._use_journal(alone=not self._others())

    def _known_members(self, directory: Path) -> Members:
        """Snapshot (else the file of the first start, else the configuration), then the changes in the journal.

        A change counts from the moment it is in the log, committed or not (Ongaro's thesis, section 4.1).
        """
        file = QuorumFile(directory)
        members = dict(self._first.members) if self._first is not None and self._first.members else file.read()
        if members is None:
            members = dict(self._configured)
            file.write(members)
        for command, _, _ in self.journal.entries:
            change = _decode_change(command)
            if change is not None:
                _change_members(members, change)
        return self._with_configured_addresses(members)

    def _with_configured_addresses(self, members: Members) -> Members:
        return {node_id: self._configured.get(node_id, address) for node_id, address in members.items()}

    def _others(self) -> list[Node]:
        return [make_node(node_id, address) for node_id, address in self.members.items() if node_id != self._node_id]

    def _use_journal(self, *, alone: bool) -> None:
        """Put our journal in the place of the memory journal that the constructor made, and its term and vote."""
        adapter = self._adapter = JournalAdapter(self.journal)
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
        change = _decode_change(command)
        if change is not None:
            self._SyncObj__doChangeCluster(change)  # done already, unless the entry was replayed from the journal
            _change_members(self.applied_members, change)
            return b""
        if command[0] != _NO_OP:
            log.error("an entry of a kind we never write was ignored", extra={"kind": command[0]})
        return None

    def _SyncObj__parseChangeClusterRequest(self, command: bytes) -> MembershipChange | None:  # noqa: N802
        """Instead of unpickling a request."""
        return _decode_change(command)

    def _SyncObj__doChangeCluster(self, change: MembershipChange, reverse: bool = False) -> bool:  # noqa: N802
        """Take a change from the log into force; `reverse`: the entry is being truncated."""
        if reverse and self._adapter.keeps_tail:
            return False
        adds = (change.operation == "add") != reverse
        before = dict(self.members)
        _change_members(self.members, MembershipChange("add" if adds else "rem", change.node_id, change.address))
        if self.members == before:
            return False
        log.info("the quorum changes", extra={"members": sorted(self.members), "was": sorted(before)})
        if change.node_id == self._node_id:
            return True
        node = make_node(change.node_id, self._configured.get(change.node_id, change.address))
        others, transport = self._SyncObj__otherNodes, self._SyncObj__transport
        if node in others:  # under an older address, or on its way out
            others.discard(node)
            self._SyncObj__raftNextIndex.pop(node, None)
            self._SyncObj__raftMatchIndex.pop(node, None)
            self._SyncObj__connectedNodes.discard(node)
            transport.dropNode(node)
        if adds:
            others.add(node)
            self._SyncObj__raftNextIndex[node] = self.journal.last_index + 1
            self._SyncObj__raftMatchIndex[node] = 0
            self._SyncObj__lastResponseTime[node] = time.monotonic()
            transport.addNode(node)
        return True

    def _SyncObj__deleteEntriesFrom(self, index: int) -> None:  # noqa: N802
        """A follower's conflict; committed entries never conflict, or two members have different truths."""
        if self._adapter.keeps_tail:
            return
        if index <= self.raftCommitIndex:
            self.failure = CorruptData(
                f"the leader contradicts entry {index}, and {self.raftCommitIndex} was committed here",
                hint="this member's directory, or another's, is not what it was: remove the member and add it anew",
            )
            raise self.failure
        self.journal.truncate_from(index - self.journal.entries[0][1])

    @contextlib.contextmanager
    def keeping_tail(self, keeps: bool) -> Iterator[None]:
        """While a message is handled that contradicts nothing we hold: its follower drops nothing."""
        self._adapter.keeps_tail = keeps
        try:
            yield
        finally:
            self._adapter.keeps_tail = False

    def _freeze_snapshot(self, last: Entry, previous: Entry) -> Callable[[], Snapshot]:
        members = tuple(sorted(self.applied_members.items()))
        state = self._freeze()
        return lambda: Snapshot(last, previous, state(), members)

    def _read_snapshot(self, path: str) -> tuple[Entry, Entry, list[Node]]:
        """At start, and after a leader's snapshot was received; an error here must stop the member."""
        try:
            snapshot, self._first = self._first, None
            is_received = snapshot is None
            if snapshot is None:
                with Path(path).open("rb") as file:
                    os.fsync(file.fileno())
                sync_directory(self._snapshot_path.parent)
                self._SyncObj__serializer.abandon()
                snapshot = read_snapshot(Path(path))
            assert snapshot is not None
            self._load(snapshot.state)
        except (TidelogError, OSError) as error:
            self.failure = error
            raise
        if snapshot.members:
            self.applied_members = dict(snapshot.members)
            if is_received:  # at start the members are known already, with the changes in the journal
                self.members = self._with_configured_addresses(dict(snapshot.members))
        return snapshot.last, snapshot.previous, self._others()

    # Pre-vote and pauses (several members only)

    def before_tick(self) -> None:
        """Decide whether an election that is due may begin. Called before each tick."""
        transport = self._SyncObj__transport
        now = time.monotonic()
        paused, self._paused_since = now - self._paused_since, now
        if not isinstance(transport, PeerTransport) or not self._SyncObj__otherNodes:
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
        if isinstance(transport, PeerTransport) and self.failure is None:
            transport.release()

    def submit(self, command: bytes, callback: Callable[[Any, int], None]) -> None:
        """Queue a command; `callback(result, reason)` on this thread, or never."""
        if self._isLeader():
            self._applyCommand(command, callback, _REGULAR)
        else:
            callback(None, FAIL_REASON.NOT_LEADER)

    def submit_change(self, change: MembershipChange, callback: Callable[[Any, int], None]) -> None:
        """Queue a membership change; refused while another is under way or this leader is new."""
        if not self._isLeader():
            callback(None, FAIL_REASON.NOT_LEADER)
        elif self.members != self.applied_members:
            callback(None, FAIL_REASON.REQUEST_DENIED)
        else:
            self._applyCommand(msgspec.msgpack.encode(change), callback, _MEMBERSHIP)

    def hand_over(self, target: int | None) -> bool:
        """Ask a member (None: the one that has most) to take over; False if it does not have everything yet."""
        others = self._SyncObj__otherNodes & self._SyncObj__connectedNodes
        known = self._SyncObj__raftMatchIndex
        wanted = [node for node in others if target is None or int(node.id) == target]
        node = max(wanted, key=lambda each: known.get(each, 0), default=None)
        reasons: list[int] = []
        if node is not None:
            self.transferLeadership(node, lambda _, reason: reasons.append(reason))
        return reasons == [FAIL_REASON.SUCCESS]

    def peers(self, now: float) -> list[dict[str, int | float | str | None]]:
        """What this member knows of each other one; lag and silence only as leader."""
        transport = self._SyncObj__transport
        if not isinstance(transport, PeerTransport):
            return []
        problems = transport.problems()
        leads = bool(self._isLeader())
        heard = self._SyncObj__lastResponseTime
        rows: list[dict[str, int | float | str | None]] = []
        for node in sorted(self._SyncObj__otherNodes, key=lambda each: int(each.id)):
            match = self._SyncObj__raftMatchIndex.get(node, 0) if leads else None
            rows.append(
                {
                    "id": int(node.id),
                    "address": str(node.address),
                    "problem": problems.get(int(node.id), ""),
                    "match_index": match,
                    "lag": self.journal.last_index - match if match is not None else None,
                    "silent_s": round(now - heard[node], 2) if leads and node in heard else None,
                }
            )
        return rows

    def adopt(self, peer_id: int, sock: Any, session: Any) -> None:
        """See `PeerTransport.adopt`."""
        transport = self._SyncObj__transport
        if isinstance(transport, PeerTransport):
            transport.adopt(peer_id, sock, session)
        else:
            sock.close()

    def take_snapshot_failed(self) -> bool:
        """Whether the last snapshot was not written; asks once."""
        failed: bool = self._SyncObj__serializer.failed
        self._SyncObj__serializer.failed = False
        return failed

    def is_alone(self) -> bool:
        """Whether there is nobody else to ask."""
        return not self._SyncObj__otherNodes

    def has_work(self) -> bool:
        """Whether another tick would get further without a message from outside."""
        transport = self._SyncObj__transport
        if isinstance(transport, PeerTransport) and transport.news:
            transport.news = False
            return True
        if self.raftCommitIndex > self.raftLastApplied:
            return True
        return self.is_alone() and self.journal.last_index > self.raftCommitIndex

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
            self._SyncObj__serializer.close()
            self.destroy()
        finally:
            notifier = getattr(self, "_SyncObj__pipeNotifier", None)
            if notifier is not None:
                for name in ("_PipeNotifier__pipeR", "_PipeNotifier__pipeW"):
                    with contextlib.suppress(OSError):
                        os.close(getattr(notifier, name))


def _decode_change(command: bytes) -> MembershipChange | None:
    if command[:1] != bytes([_MEMBERSHIP]):
        return None
    return _changes.decode(command[1:])


def _change_members(members: Members, change: MembershipChange) -> None:
    if change.operation == "add":
        members[change.node_id] = change.address
    else:
        members.pop(change.node_id, None)
