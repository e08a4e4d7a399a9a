"""One member of the quorum: the rules that stand around pysyncobj's core (`tidelog.controller.raft.core`).

docs/design/0002-raft-hardening.md and 0005-cluster.md list the replaced parts and the reasons. In short: entries are
raw bytes that only our state machine decodes (no pickles in journal, snapshot or on the wire); our journal replaces the
mmap one; elections of several members are preceded by a pre-vote; a member that was paused does not depose a leader;
snapshots are checksummed files; membership changes are entries of our own, effective from the moment they are in the
log.

Everything here runs on the consensus thread. Entry: `RaftMember`, used by `tidelog.controller.raft.thread`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pysyncobj import FAIL_REASON

from tidelog.controller.model.levels import DIRECTORIES_LEVEL, NewerLevel
from tidelog.controller.raft.core import NO_OP, CoreTransport, MemberNode, RaftCore, make_node
from tidelog.controller.raft.directory_id import DirectoryFile, DirectoryId, draw
from tidelog.controller.raft.journal import RESTORE, Entry, Journal, JournalStalled
from tidelog.controller.raft.quorum import Members, MembershipChange, Quorum, QuorumFile
from tidelog.controller.raft.snapshot import Snapshot, check_joined, read_snapshot, require_journal
from tidelog.controller.raft.surroundings import RaftSocket, Surroundings
from tidelog.controller.raft.transfer import Snapshots, decode_piece, decode_plain_piece
from tidelog.controller.raft.transport import PeerTransport
from tidelog.controller.rpc.handshake import Credentials, Session
from tidelog.runtime.errors import ConfigError, CorruptData, DamagedFile, StorageFailed, TidelogError

logger = logging.getLogger(__name__)

_REGULAR = 0
_MEMBERSHIP = 2
BATCH_BYTES = 16 << 20
"""With 64 KB batches followers were seen to drop acknowledged entries and get them again (docs/libraries.md)."""
QUEUE_COMMANDS = 8_192
STRANGE = "its directory is not the one that it was added with; add it anew"
SNAPSHOT_PIECE_BYTES = 1 << 20
MAX_PUT_OFF = 3
"""Elections that a member puts off because it slept, until a leader is heard: on a machine without time for it every
turn comes late, and a quorum of such members would never elect anybody."""
REFUSED_SNAPSHOT_S = 1.0
"""After a snapshot could not be kept, until it is asked for again."""

_changes = msgspec.msgpack.Decoder(MembershipChange)


class JournalAdapter:
    """Our journal, with the methods that pysyncobj calls."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.keeps_tail = False
        """The current message does not contradict the entries after the ones that it carries."""

    def __len__(self) -> int:
        return len(self.journal.entries)

    def __getitem__(self, item: Any) -> Any:
        return self.journal.entries[item]

    def add(self, command: bytes, idx: int, term: int) -> None:
        """Append one entry."""
        self.journal.append(command, idx, term)

    def clear(self) -> None:
        """Drop all entries."""
        self.journal.clear()

    def deleteEntriesFrom(self, position: int) -> None:  # noqa: N802
        """Drop entries after a conflict on a follower."""
        if not self.keeps_tail:
            self.journal.truncate_from(position)

    def deleteEntriesTo(self, position: int) -> None:  # noqa: N802
        """Drop entries that a snapshot covers."""
        try:
            self.journal.drop_to(position)
        except JournalStalled as error:
            logger.warning("compaction of the journal failed; the old file is kept", extra={"error": str(error)})

    def setRaftCommitIndex(self, index: int) -> None:  # noqa: N802
        """Store a hint."""
        self.journal.note_commit(index)

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        """Return the hint."""
        return self.journal.commit_index

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802
        """Durable at the end of the turn, before any message that reflects it.

        It cannot fail: pysyncobj has half a change of state behind it when it calls this.
        """
        self.journal.set_term(term, voted_for)

    def getCurrentTerm(self) -> int:  # noqa: N802
        """Return the recorded term."""
        return self.journal.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        """Return the recorded vote."""
        return self.journal.voted_for

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Do nothing: every sync is explicit."""

    def _destroy(self) -> None:
        self.journal.close()


def align(journal: Journal, snapshot: Snapshot | None) -> None:
    """Make the journal begin at the snapshot's last two entries, as pysyncobj requires.

    pysyncobj itself would discard the whole journal after a crash between snapshot and compaction, and with it
    acknowledged entries. Raises `CorruptData` when entries between snapshot and journal are missing.
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


def _behind(journal: Journal, snapshot: Snapshot) -> list[Entry]:
    """The entries that stay when a snapshot replaces those up to its last one: none if the log differs there.

    They may have been acknowledged (Raft paper, figure 13, step 6).
    """
    position = snapshot.last[1] - journal.entries[0][1]
    if 0 <= position < len(journal.entries) and journal.entries[position][2] == snapshot.last[2]:
        return journal.entries[position + 1 :]
    return []


@dataclass(frozen=True, slots=True)
class AppliedState:
    """The state machine under a member, as functions."""

    apply: Callable[[bytes, int], Any]
    """Applies a command at an index. An exception ends the member."""
    freeze: Callable[[], Callable[[], bytes]]
    """Holds the state as it is now, and returns what encodes it."""
    load: Callable[[bytes], None]
    """Replaces the state by an encoded one."""
    level: Callable[[], int]
    """Returns its feature level."""


class RaftMember(RaftCore):
    """One member.

    With `credentials` it takes part in a quorum, whose members are `members` unless the directory knows better; without
    it is alone and talks to nobody.
    """

    def __init__(
        self,
        *,
        credentials: Credentials | None,
        members: Members,
        conf: dict[str, Any],
        directory: Path,
        surroundings: Surroundings,
        state: AppliedState,
        piece_bytes: int = SNAPSHOT_PIECE_BYTES,
    ) -> None:
        self._state = state
        self._now = surroundings.monotonic
        self._files = files = surroundings.files
        self._node_id = credentials.node_id if credentials is not None else -1
        self._configured = members
        self._snapshot_path = directory / "snapshot"
        require_journal(directory / "journal", self._snapshot_path, files)
        self._directory_file = DirectoryFile(directory, files)
        if self._directory_file.read() is not None and not files.exists(directory / "journal"):
            raise DamagedFile(
                str(directory / "journal"), 0, "it is missing, and this directory was in use", hint=RESTORE
            )
        self.journal = Journal.open(directory / "journal", files)
        self.failure: Exception | None = None
        self._paused_since = self._now()
        self._put_off = 0
        """Elections put off after pauses since a leader was heard."""
        try:
            for leftover in ("snapshot.tmp", "snapshot.1.tmp"):
                files.remove(directory / leftover)
            self._first: Snapshot | None = read_snapshot(self._snapshot_path, files)
            align(self.journal, self._first)
            self.applied = self._first_quorum(directory) if credentials is not None else self._no_quorum(directory)
            self.directory = self._open_directory(surroundings) if credentials is not None else DirectoryId("", True)
        except (TidelogError, OSError):
            self.journal.close()
            raise
        self.quorum = self._with_changes(self.applied, 0)
        """As the log has it, committed or not; `applied` is as it is committed."""
        self._unrecorded: dict[int, str] = {}
        """Directories of members that the log does not name yet."""
        self.next_snapshot_at = 0.0
        """Until then no leader is asked for its snapshot: the last one could not be kept."""
        self.transport: PeerTransport | None = None
        self._make_core(credentials, surroundings, conf)
        self._adapter = JournalAdapter(self.journal)
        self.use_journal(self._adapter, self.journal.term, self.journal.voted_for, self.journal.commit_index)
        last = self._first.last if self._first is not None else None
        self._snapshots = Snapshots(self._snapshot_path, piece_bytes, surroundings, self._freeze_snapshot, last)
        self.use_snapshots(self._snapshots)
        if not self._others():
            self.force_election()  # nobody else can win
        if self._first is not None:
            self._begin_with(self._first)

    def _make_core(self, credentials: Credentials | None, surroundings: Surroundings, conf: dict[str, Any]) -> None:
        options = {
            "appendEntriesBatchSizeBytes": BATCH_BYTES,
            "commandsQueueSize": QUEUE_COMMANDS,
            **conf,
        }
        poller = surroundings.sockets.poller()
        if credentials is None:
            super().__init__(None, [], options, poller, lambda core: CoreTransport())
            return
        others = self._others()

        def transport(core: RaftCore) -> PeerTransport:
            self.transport = PeerTransport(self, credentials, others, self._configured, surroundings, poller)
            return self.transport

        me = make_node(self._node_id, self.quorum.members.get(self._node_id, ""))
        super().__init__(me, others, options, poller, transport)

    def _open_directory(self, surroundings: Surroundings) -> DirectoryId:
        """One that has no id, but took part, is from before there were ids; an empty one is new."""
        found = self._directory_file.read()
        if found is None:
            has_taken_part = self.journal.term > 0 or bool(self.journal.entries) or self._first is not None
            found = draw(surroundings.random, is_trusted=has_taken_part)
            self._directory_file.write(found)
        return found

    def _first_quorum(self, directory: Path) -> Quorum:
        """That of the snapshot, else the file of the first start, else the configuration."""
        if self._first is not None and self._first.members:
            return self._quorum_of(self._first)
        file = QuorumFile(directory, self._files)
        members = file.read()
        if members is None:
            members = dict(self._configured)
            file.write(members)
        return Quorum(self._with_configured_addresses(members), {})

    def _no_quorum(self, directory: Path) -> Quorum:
        """Of a member that is alone. Raises `ConfigError` if it is of a quorum, whose others may go on without it."""
        known = dict(self._first.members) if self._first is not None else {}
        known = known or QuorumFile(directory, self._files).read() or {}
        members = sorted(self._with_changes(Quorum(known, {}), 0).members)
        if len(members) > 1:
            raise ConfigError(
                f"{directory} belongs to a quorum of controllers {members}, and this process is to be the only one",
                hint="set controller.members and controller.secret_file as on the other nodes",
            )
        return Quorum({}, {})

    def _quorum_of(self, snapshot: Snapshot) -> Quorum:
        return Quorum(self._with_configured_addresses(dict(snapshot.members)), dict(snapshot.directories))

    def _with_configured_addresses(self, members: Members) -> Members:
        return {node_id: self._configured.get(node_id, address) for node_id, address in members.items()}

    def _with_changes(self, quorum: Quorum, after: int) -> Quorum:
        """With the changes in the journal after an entry.

        A change counts from the moment it is in the log, committed or not (Ongaro's thesis, section 4.1).
        """
        changed = quorum.copy()
        for command, index, _ in self.journal.entries:
            change = _decode_change(command) if index > after else None
            if change is not None:
                changed.apply(change)
        return Quorum(self._with_configured_addresses(changed.members), changed.directories)

    def _others(self) -> list[MemberNode]:
        return [
            make_node(node_id, address) for node_id, address in self.quorum.members.items() if node_id != self._node_id
        ]

    # Overrides of methods that pysyncobj calls

    def apply_entry(self, command: bytes) -> Any:
        """See `RaftCore.apply_entry`: the entry's bytes go to the machine, nothing is unpickled."""
        if command[0] == _REGULAR:
            return self._state.apply(command[1:], self.raftLastApplied + 1)
        change = _decode_change(command)
        if change is not None:
            applied = self.applied.with_change(change)
            self.applied = Quorum(self._with_configured_addresses(applied.members), applied.directories)
            return b""
        if command[:1] != NO_OP:
            logger.error("an entry of a kind we never write was ignored", extra={"kind": command[0]})
        return None

    def decode_change(self, command: bytes) -> MembershipChange | None:
        """See `RaftCore.decode_change`."""
        return _decode_change(command)

    def change_members(self, change: MembershipChange, reverse: bool = False) -> bool:
        """See `RaftCore.change_members`; what is truncated is undone by `drop_from`.

        As leader this is the moment at which a change goes into the log: those that were queued with it are refused.
        """
        if reverse or (self.is_leader() and not self._may_begin(change)):
            return False
        wanted = self.quorum.with_change(change)
        if wanted == self.quorum:
            return False
        self._use(Quorum(self._with_configured_addresses(wanted.members), wanted.directories))
        return True

    def _use(self, wanted: Quorum) -> None:
        before, self.quorum = self.quorum, wanted
        if before.members == wanted.members:
            return
        logger.info("the quorum changes", extra={"members": sorted(wanted.members), "was": sorted(before.members)})
        for node_id in sorted({*before.members, *wanted.members} - {self._node_id}):
            address = wanted.members.get(node_id)
            if before.members.get(node_id) == address:
                continue
            node = make_node(node_id, address or "")
            self.drop_other(node)  # under an older address, or on its way out
            if address is not None:
                self.add_other(node, self.journal.last_index + 1)

    def congested_others(self) -> set[MemberNode]:
        """See `RaftCore.congested_others`."""
        transport = self.transport
        return {node for node in self.others() if transport.is_congested(node)} if transport is not None else set()

    def drop_from(self, index: int) -> None:
        """See `RaftCore.drop_from`; committed entries never conflict, or two members have different truths."""
        if self._adapter.keeps_tail:
            return
        if index <= self.raftCommitIndex:
            self.failure = CorruptData(
                f"the leader contradicts entry {index}, and {self.raftCommitIndex} was committed here",
                hint="the directory of this or another member was replaced: remove the member and add it again",
            )
            raise self.failure
        self.journal.truncate_from(index - self.journal.entries[0][1])
        self._use(self._with_changes(self.applied, self.raftLastApplied))

    @contextlib.contextmanager
    def keeping_tail(self, keeps: bool) -> Iterator[None]:
        """Keep the follower's tail while a message is handled that contradicts no entry of this member."""
        self._adapter.keeps_tail = keeps
        try:
            yield
        finally:
            self._adapter.keeps_tail = False

    def _freeze_snapshot(self, last: Entry, previous: Entry) -> Callable[[], Snapshot]:
        members = tuple(sorted(self.applied.members.items()))
        directories = tuple(sorted(self.applied.directories.items()))
        state = self._state.freeze()
        return lambda: Snapshot(last, previous, state(), members, directories)

    def _begin_with(self, snapshot: Snapshot) -> None:
        """At start; the members are known already, with the changes in the journal."""
        try:
            self._state.load(snapshot.state)
        except TidelogError:
            self.journal.close()
            raise
        self.take_state(snapshot.last[1], self._others())

    # Snapshots of a leader

    def take_piece(self, node: MemberNode, raw: Any) -> None:
        """A piece of the leader's snapshot; when it was the last one, the snapshot takes the place of state and log."""
        try:
            snapshot, index = self._receive(raw)
            if index <= self.raftCommitIndex:  # sent again: it would take this member back
                self._snapshots.drop_incoming()
                self.answer(node, index + 1, holds=True)
                return
        except NewerLevel as error:
            self.failure = error  # another attempt would bring the same
            raise
        except (OSError, CorruptData, StorageFailed) as error:
            logger.warning("a leader's snapshot was not kept; it is asked for again", extra={"error": str(error)})
            self.next_snapshot_at = self._now() + REFUSED_SNAPSHOT_S
            snapshot = None
        if snapshot is None:
            self.answer(node, self.journal.last_index + 1, holds=False)
            return
        self._install(snapshot, node)
        self.answer(node, snapshot.last[1] + 1, holds=True)

    def _receive(self, raw: Any) -> tuple[Snapshot | None, int]:
        """The snapshot, if that was its last piece; and the index that it ends at, if that can be told."""
        plain = decode_plain_piece(raw)
        if plain is not None:
            snapshot = self._snapshots.receive_plain(plain)
            return snapshot, snapshot.last[1] if snapshot is not None else self.raftCommitIndex + 1
        piece = decode_piece(raw)
        known = piece.index <= self.raftCommitIndex
        return None if known else self._snapshots.receive(piece), piece.index

    def _install(self, snapshot: Snapshot, leader: MemberNode) -> None:
        """The machine first: a snapshot that it does not understand must not replace the one that it does."""
        try:
            self._state.load(snapshot.state)
            self._snapshots.take_over(snapshot.last)
        except TidelogError as error:
            self.failure = error
            raise
        tail = _behind(self.journal, snapshot)
        self.journal.clear()
        for entry in (snapshot.previous, snapshot.last, *tail):
            self.journal.append(*entry)
        if snapshot.members:
            self.applied = self._quorum_of(snapshot)
            self.quorum = self._with_changes(self.applied, snapshot.last[1])
        if self.transport is not None and int(leader.id) not in self.quorum.members:
            self.transport.keep_unlisted(leader)
        self.take_state(snapshot.last[1], self._others())

    def link_lost(self, node: MemberNode) -> None:
        """What was on its way to a member may not have arrived: a snapshot is sent from its beginning again."""
        self._snapshots.cancelTransmisstion(node)

    # Directories (several members only)

    def may_vote(self, log: tuple[int, int], recorded: str = "") -> bool:
        """Whether this member may vote for one with such a log, itself included.

        `recorded` is the directory by which that one's log knows this member. If it is this one, or the quorum knows
        this one, it may; if the quorum knows another, it may not. Without any record this directory must have taken
        part, or both are empty: the first election of a cluster. So an empty member never helps one that has entries
        and no record of it: what it knew of later ones may be lost.
        """
        if recorded == self.directory.id:
            return True
        known = self.quorum.directories.get(self._node_id)
        if known is not None:
            return known == self.directory.id
        return self.directory.is_trusted or (log[1] == 1 and self.is_empty())

    def trust_directory(self) -> None:
        """It takes part in the first election of its cluster. Raises `JournalStalled`."""
        if not self.directory.is_trusted and self._node_id not in self.quorum.directories:
            trusted = DirectoryId(self.directory.id, is_trusted=True)
            try:
                self._directory_file.write(trusted)
            except StorageFailed as error:
                raise JournalStalled(error.message) from error
            self.directory = trusted

    def counts(self, node_id: int, message: dict[str, Any]) -> bool:
        """Whether a vote or acknowledgement comes from the directory that the quorum knows."""
        known = self.quorum.directories.get(node_id)
        told = str(message.get("directory", ""))
        if known is None and told:
            self._unrecorded[node_id] = told
        return known is None or known == told

    def sign(self, message: dict[str, Any], node: MemberNode) -> None:
        """Say in a message which directory it comes from, and by which the log knows the receiver's."""
        message["directory"] = self.directory.id
        message["recorded"] = self.quorum.directories.get(int(node.id), "")

    def record_directories(self) -> None:
        """As leader: propose the next directory that the log does not name yet. Called before each tick.

        Members before feature levels take such an entry for a new member.
        """
        if not self.is_leader() or self.quorum != self.applied or self.transport is None:
            return
        if self._state.level() < DIRECTORIES_LEVEL:
            return
        if self._node_id not in self.quorum.directories:
            self._unrecorded[self._node_id] = self.directory.id
        while self._unrecorded:
            node_id = min(self._unrecorded)
            directory = self._unrecorded.pop(node_id)
            address = self.quorum.members.get(node_id)
            if address is not None and node_id not in self.quorum.directories:
                self.submit_change(MembershipChange("add", node_id, address, directory), lambda _result, _reason: None)
                return

    # Pre-vote and pauses (several members only)

    def before_tick(self) -> None:
        """Decide whether an election that is due may begin. Called before each tick."""
        transport, now = self.transport, self._now()
        paused, self._paused_since = now - self._paused_since, now
        if transport is None or not self.others():
            return
        transport.news = False  # what came before this tick is in it
        if transport.silence_s(now) <= self.conf.raftMinTimeout:
            self._put_off = 0
        if paused > self.conf.raftMinTimeout / 2 and self._put_off < MAX_PUT_OFF:
            self._put_off += 1
            self.postpone_election()  # this process slept: first listen whether there is a leader
        if self.is_leader() or self.election_deadline() >= now or self.is_asked_to_lead():
            return
        if not self.may_vote(self.last_log()):
            self.postpone_election()
            return
        if transport.take_pre_vote_won():
            if self.is_empty():
                self.trust_directory()
            return  # the election may begin in this tick
        self.postpone_election()
        if self.leader() is not None and transport.silence_s(now) > self.conf.raftMinTimeout:
            self.forget_leader()
        transport.ask_pre_vote()

    def is_empty(self) -> bool:
        """Whether there is nothing in the log but the entry that each begins with."""
        return self.journal.last_index == 1

    def last_log(self) -> tuple[int, int]:
        """Return `(term, index)` of the newest entry."""
        return self.journal.entries[-1][2], self.journal.entries[-1][1]

    # What tidelog.controller.raft.thread calls

    def after_tick(self) -> None:
        """Make the journal durable, then release acknowledgements. Raises the errors of the journal."""
        self.journal.sync()
        if self.transport is not None and self.failure is None:
            self.transport.release()

    def submit(self, command: bytes, callback: Callable[[Any, int], None]) -> None:
        """Queue a command; `callback(result, reason)` on this thread, or never."""
        if self.is_leader():
            self._applyCommand(command, callback, _REGULAR)
        else:
            callback(None, FAIL_REASON.NOT_LEADER)

    def submit_change(self, change: MembershipChange, callback: Callable[[Any, int], None]) -> None:
        """Queue a membership change; refused while another is under way or this leader is new.

        Also refused if the changed quorum might elect nobody (`Quorum.unheard`).
        """
        if not self.is_leader():
            callback(None, FAIL_REASON.NOT_LEADER)
        elif not self._may_begin(change):
            callback(None, FAIL_REASON.REQUEST_DENIED)
        else:
            self._applyCommand(msgspec.msgpack.encode(change), callback, _MEMBERSHIP)

    def _may_begin(self, change: MembershipChange) -> bool:
        """One change at a time, or two majorities might have no member in common. pysyncobj does not see to that."""
        return self.quorum == self.applied and not self._endangers(change)

    def _endangers(self, change: MembershipChange) -> bool:
        if self._state.level() < DIRECTORIES_LEVEL:  # none is recorded yet, and those that took part may vote
            return False
        wanted = self.quorum.with_change(change)
        return wanted.members != self.quorum.members and bool(wanted.unheard())

    def hand_over(self, target: int | None) -> bool:
        """Ask a member (None: the one that has most) to take over; False if it does not have everything yet."""
        wanted = [node for node in self.connected_others() if target is None or int(node.id) == target]
        node = max(wanted, key=lambda each: (self.match_index(each), -int(each.id)), default=None)
        reasons: list[int] = []
        if node is not None:
            self.transferLeadership(node, lambda _, reason: reasons.append(reason))
        return reasons == [FAIL_REASON.SUCCESS]

    def peers(self, now: float) -> list[dict[str, int | float | str | None]]:
        """What this member knows of each other one; lag and silence only as leader."""
        if self.transport is None:
            return []
        problems = self.transport.problems()
        leads = self.is_leader()
        strangers = self.transport.strangers
        rows: list[dict[str, int | float | str | None]] = []
        for node in sorted(self.others(), key=lambda each: int(each.id)):
            match = self.match_index(node) if leads else None
            problem = problems.get(int(node.id), "")
            if leads and not problem and int(node.id) in strangers:
                problem = STRANGE
            heard = self.heard_at(node) if leads else None
            rows.append(
                {
                    "id": int(node.id),
                    "address": str(node.address),
                    "problem": problem,
                    "match_index": match,
                    "lag": self.journal.last_index - match if match is not None else None,
                    "silent_s": round(now - heard, 2) if heard is not None else None,
                }
            )
        return rows

    def adopt(self, peer_id: int, sock: RaftSocket, session: Session) -> None:
        """See `PeerTransport.adopt`."""
        if self.transport is not None:
            self.transport.adopt(peer_id, sock, session)
        else:
            sock.close()

    def take_snapshot_failed(self) -> bool:
        """Whether the last snapshot was not written; asks once."""
        failed, self._snapshots.failed = self._snapshots.failed, False
        return failed

    def is_alone(self) -> bool:
        """Whether there is nobody else to ask."""
        return not self.others()

    def has_work(self) -> bool:
        """Whether another tick would get further without a message from outside."""
        if self.transport is not None and self.transport.news:
            self.transport.news = False
            return True
        if self.raftCommitIndex > self.raftLastApplied:
            return True
        return self.is_alone() and self.journal.last_index > self.raftCommitIndex

    def leader_id(self) -> str | None:
        """The leader's member id."""
        leader = self.leader()
        return None if leader is None else str(leader.id)

    def wait(self, seconds: float) -> None:
        """Sleep until a message or wake-up arrives or the time is over."""
        self._poller.poll(seconds)

    def watch(self, fd: int, callback: Callable[[int, int], None]) -> None:
        """Wake `wait` when `fd` is readable."""
        self._poller.subscribe(fd, callback, 1)

    def close(self) -> None:
        """Close connections and journal."""
        try:
            self._snapshots.close()
        finally:
            self.destroy()


def _decode_change(command: bytes) -> MembershipChange | None:
    if command[:1] != bytes([_MEMBERSHIP]):
        return None
    return _changes.decode(command[1:])
