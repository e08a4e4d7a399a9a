"""`RaftMember` by itself: what a message of another member may and may not do to it. Full disks, lost pieces."""

from __future__ import annotations

import contextvars
import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from pysyncobj import FAIL_REASON

from tests.support.fillable_files import FillableFiles
from tidelog.controller.model.levels import NewerLevel
from tidelog.controller.raft import core
from tidelog.controller.raft.journal import Entry, Journal
from tidelog.controller.raft.links import SendLink
from tidelog.controller.raft.member import AppliedState, RaftMember
from tidelog.controller.raft.quorum import MembershipChange
from tidelog.controller.raft.runner import system_surroundings
from tidelog.controller.raft.snapshot import Snapshot, read_snapshot, write_snapshot
from tidelog.controller.raft.thread import RaftSettings
from tidelog.controller.raft.transfer import PIECE_VERSION, Sent, SnapshotPiece
from tidelog.controller.rpc.handshake import Credentials, Session, welcome
from tidelog.runtime.errors import ConfigError, CorruptData

MEMBERS = {1: "127.0.0.1:1", 2: "127.0.0.1:2", 3: "127.0.0.1:3"}
TERM = 5


class World:
    """Member 1 of three, whose machine is a list; the test sends what the other two would."""

    def __init__(
        self, directory: Path, told: list[dict[str, Any]], monotonic: Callable[[], float] | None = None
    ) -> None:
        self.directory = directory
        self.monotonic = monotonic or system_surroundings().monotonic
        self.files = FillableFiles()
        self.applied: list[bytes] = []
        self.level = 1
        self.told = told
        self.member: RaftMember
        self.open()

    def open(self, members: dict[int, str] = MEMBERS) -> None:
        self.member = RaftMember(
            credentials=Credentials(bytes(16), 1),
            members=members,
            conf=RaftSettings(directory=self.directory).pysyncobj(),
            directory=self.directory,
            surroundings=dataclasses.replace(system_surroundings(), files=self.files, monotonic=self.monotonic),
            state=AppliedState(
                apply=lambda blob, index: self.applied.append(blob),
                freeze=lambda: lambda: msgspec.msgpack.encode(self.applied),
                load=self._load,
                level=lambda: self.level,
            ),
        )
        transport = self.member.transport
        assert transport is not None
        for node in self.member.others():
            transport.connected(node)

    def _load(self, state: bytes) -> None:
        self.applied = msgspec.msgpack.decode(state, type=list[bytes])

    def receive(self, peer_id: int, kind: str, **fields: Any) -> None:
        assert self.member.transport is not None
        self.member.transport.received(peer_id, {"type": kind, "term": TERM} | fields)

    def entries(self, previous: int, term: int, entries: list[Entry], commit: int) -> None:
        self.receive(2, "append_entries", prevLogIdx=previous, prevLogTerm=term, entries=entries, commit_index=commit)

    def turn(self) -> None:
        self.member.after_tick()
        self.member.before_tick()
        self.member.doTick(0.0)
        self.member.after_tick()

    def lead(self) -> None:
        self.member.trust_directory()
        self.member.force_election()
        self.member.doTick(0.0)
        self.receive(2, "response_vote", term=self.member.raftCurrentTerm)
        assert self.member.is_leader()

    def hear(self, node_id: int) -> None:
        """A member has everything that is in the log."""
        next_index = self.member.last_log()[1] + 1
        told = {"directory": f"of {node_id}", "next_node_idx": next_index, "reset": False, "success": True}
        self.receive(node_id, "next_node_idx", term=self.member.raftCurrentTerm, **told)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the member sends; the other two need no addresses."""
    messages: list[dict[str, Any]] = []

    def send(_link: SendLink, message: dict[str, Any]) -> bool:
        messages.append(message)
        return True

    monkeypatch.setattr(SendLink, "send", send)
    return messages


@pytest.fixture
def world(tmp_path: Path, told: list[dict[str, Any]]) -> Iterator[World]:
    world = World(tmp_path / "controller", told)
    yield world
    world.member.close()


def regular(blob: bytes, index: int, term: int) -> Entry:
    return b"\x00" + blob, index, term


def snapshot_of(path: Path, index: int, members: dict[int, str] = MEMBERS) -> bytes:
    """The file of a snapshot that a leader sends: entries 2 to `index`, of its term."""
    names = [b"leader %d" % each for each in range(2, index + 1)]
    last, previous = regular(names[-1], index, TERM), regular(names[-2], index - 1, TERM)
    write_snapshot(path, Snapshot(last, previous, msgspec.msgpack.encode(names), tuple(members.items())))
    return path.read_bytes()


def pieces_of(data: bytes, index: int, size: int = 50) -> list[Any]:
    pieces = [
        SnapshotPiece(PIECE_VERSION, index, TERM, at, len(data), crc32c(data), data[at : at + size])
        for at in range(0, len(data), size)
    ]
    assert len(pieces) > 3
    return [msgspec.to_builtins(piece, builtin_types=(bytes,)) for piece in pieces]


def test_a_snapshot_whose_pieces_were_not_kept_commits_nothing(world: World, tmp_path: Path) -> None:
    world.entries(1, 0, [regular(b"uncommitted", 2, 1)], 1)  # of a leader that is gone
    world.turn()
    data = snapshot_of(tmp_path / "sent", 9)

    world.files.full = True
    for piece in pieces_of(data, 9):
        world.receive(3, "append_entries", serialized=piece, commit_index=9)
    world.files.full = False
    world.turn()
    assert world.applied == []
    assert world.member.raftCommitIndex == 1


@pytest.mark.parametrize("lost", [0, 1, 2, -1])
def test_a_snapshot_with_a_lost_piece_is_not_taken_and_the_next_one_is(world: World, tmp_path: Path, lost: int) -> None:
    data = snapshot_of(tmp_path / "sent", 9)
    before = pieces_of(data, 9)
    del before[lost]
    for piece in before:
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.turn()
    assert world.applied == [] and read_snapshot(world.directory / "snapshot") is None
    for piece in pieces_of(data, 9):
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.turn()
    assert world.applied == [b"leader %d" % each for each in range(2, 10)]
    world.member.close()
    world.open()
    assert world.applied[-1] == b"leader 9" and world.member.raftCommitIndex == 9


def test_pieces_of_two_snapshots_do_not_make_one(world: World, tmp_path: Path) -> None:
    nine, twelve = snapshot_of(tmp_path / "sent", 9), snapshot_of(tmp_path / "sent", 12)
    for piece in (*pieces_of(nine, 9)[:2], *pieces_of(twelve, 12)[2:]):
        world.receive(2, "append_entries", serialized=piece, commit_index=12)
    world.turn()
    assert world.applied == [] and read_snapshot(world.directory / "snapshot") is None


def test_a_snapshot_that_fails_its_checksum_replaces_nothing(world: World, tmp_path: Path) -> None:
    data = snapshot_of(tmp_path / "sent", 9)
    damaged = pieces_of(data[:60] + bytes([data[60] ^ 1]) + data[61:], 9)
    for piece in damaged:
        piece[5] = crc32c(data)
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    damaged = pieces_of(data[:60] + bytes([data[60] ^ 1]) + data[61:], 9)  # damaged before it was measured
    for piece in damaged:
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.turn()
    assert world.applied == [] and world.member.failure is None
    assert read_snapshot(world.directory / "snapshot") is None


def test_a_piece_of_another_version_ends_the_member(world: World, tmp_path: Path) -> None:
    world.receive(2, "append_entries", serialized=[b"data", True, True], commit_index=9)
    first, *_ = pieces_of(snapshot_of(tmp_path / "sent", 9), 9)
    with pytest.raises(NewerLevel, match=f"version {PIECE_VERSION + 1}; {PIECE_VERSION} is known"):
        world.receive(2, "append_entries", serialized=[PIECE_VERSION + 1, *first[1:]], commit_index=9)
    assert isinstance(world.member.failure, NewerLevel)
    assert world.applied == []


def test_a_snapshot_that_comes_again_takes_nothing_back(world: World, tmp_path: Path) -> None:
    data = snapshot_of(tmp_path / "sent", 9)
    for piece in pieces_of(data, 9):
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.entries(9, TERM, [regular(b"leader 10", 10, TERM), regular(b"leader 11", 11, TERM)], 10)
    world.turn()
    assert world.applied[-1] == b"leader 10"
    for piece in pieces_of(data, 9):
        world.receive(2, "append_entries", serialized=piece, commit_index=10)
    world.turn()
    assert world.applied[-1] == b"leader 10" and world.member.last_log() == (TERM, 11)  # 11 may be acknowledged


def test_a_snapshot_keeps_what_follows_it_in_the_log(world: World, tmp_path: Path) -> None:
    world.entries(1, 0, [regular(b"leader %d" % each, each, TERM) for each in range(2, 12)], 1)
    world.turn()
    for piece in pieces_of(snapshot_of(tmp_path / "sent", 9), 9):
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.turn()
    assert world.applied[-1] == b"leader 9" and world.member.last_log() == (TERM, 11)
    world.member.close()
    journal = Journal.open(world.directory / "journal")
    assert [entry[1] for entry in journal.entries] == [8, 9, 10, 11]
    journal.close()
    world.open()


def test_a_leader_whose_disk_is_full_leads_no_more_when_it_hears_of_a_later_term(world: World) -> None:
    world.lead()
    world.files.full = True
    world.receive(3, "request_vote", last_log_index=100, last_log_term=4)
    assert not world.member.is_leader()
    assert not [message for message in world.told if message["type"] == "response_vote"]  # it is not durable
    world.files.full = False
    world.turn()
    assert [message for message in world.told if message["type"] == "response_vote"]


def test_a_vote_and_a_candidacy_leave_after_they_are_durable(world: World) -> None:
    world.member.force_election()
    world.member.doTick(0.0)
    assert not [message for message in world.told if message["type"] == "request_vote"]
    world.member.after_tick()
    assert len([message for message in world.told if message["type"] == "request_vote"]) == 2


# Turns that come late


class LateTurns:
    """A member on a machine that has little time for it, and peers that answer its pre-votes."""

    def __init__(self, directory: Path, told: list[dict[str, Any]]) -> None:
        self.now_s = 100.0
        self.told = told
        core.inject(dataclasses.replace(system_surroundings(), monotonic=lambda: self.now_s))
        self.world = World(directory, told, lambda: self.now_s)
        self.world.member.trust_directory()
        self.peers = [2, 3]
        """Those that answer."""

    def turns(self, count: int, pause_s: float, *, leader: bool = False) -> bool:
        """Take turns; return whether it has stood for election."""
        for _ in range(count):
            self.now_s += pause_s
            if leader:
                self.world.entries(1, 0, [], 1)
            self.world.turn()
            for message in list(self.told):
                if message["type"] == "pre_vote":
                    for peer in self.peers:
                        self.world.receive(peer, "pre_vote_reply", round=message["round"], granted=not leader)
            stands = any(message["type"] == "request_vote" for message in self.told)
            self.told.clear()
            if stands:
                return True
        return False


@pytest.mark.parametrize("pause_s", [0.05, 0.25, 0.5, 1.0])
def test_a_member_whose_turns_are_all_late_stands_for_election_all_the_same(
    pause_s: float, tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    def scenario() -> None:
        late = LateTurns(tmp_path / "controller", told)
        assert late.turns(round(8.0 / pause_s), pause_s)
        late.world.member.close()

    contextvars.copy_context().run(scenario)


def test_a_member_that_slept_listens_first_whenever_it_has_heard_a_leader(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    def scenario() -> None:
        late = LateTurns(tmp_path / "controller", told)
        for _ in range(20):
            assert not late.turns(1, 5.0)
            assert not late.turns(3, 0.05, leader=True)
        late.world.member.close()

    contextvars.copy_context().run(scenario)


def test_an_empty_member_begins_a_cluster_only_when_all_members_agree(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    def scenario() -> None:
        member = LateTurns(tmp_path / "controller", told)
        member.peers = [2]  # 3 is away, or has a log that these two have lost
        assert not member.turns(200, 0.05)
        member.peers = [2, 3]
        assert member.turns(200, 0.05)
        member.world.member.close()

    contextvars.copy_context().run(scenario)


def test_a_member_with_a_log_needs_only_a_majority(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    def scenario() -> None:
        member = LateTurns(tmp_path / "controller", told)
        member.world.entries(1, 0, [regular(b"one", 2, 1)], 1)
        member.peers = [3]
        assert member.turns(200, 0.05)
        member.world.member.close()

    contextvars.copy_context().run(scenario)


# A leader that the log does not name yet


def takes_snapshot_without_leader(world: World, tmp_path: Path) -> None:
    """Member 2 leads, and sends a snapshot from before it was a member."""
    members = {node_id: MEMBERS[node_id] for node_id in (1, 3)}
    for piece in pieces_of(snapshot_of(tmp_path / "sent", 9, members), 9):
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.turn()
    assert {int(node.id) for node in world.member.others()} == {3}


def added(node_id: int, index: int) -> Entry:
    return b"\x02" + msgspec.msgpack.encode(MembershipChange("add", node_id, MEMBERS[node_id])), index, TERM


def calls(world: World, peer_id: int) -> str:
    """What a controller that connects in order to send is told: "welcome", or why not."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        ours.setblocking(False)
        world.member.adopt(peer_id, ours, Session(bytes(16), bytes(16)))
        world.turn()
        told = theirs.recv(4096)
    return "welcome" if told == welcome() else told.decode(errors="replace")


def test_a_snapshot_from_before_the_leaders_time_does_not_part_a_member_from_it(world: World, tmp_path: Path) -> None:
    takes_snapshot_without_leader(world, tmp_path)
    world.entries(9, TERM, [added(2, 10), regular(b"leader 11", 11, TERM)], 11)
    world.turn()
    assert world.applied[-1] == b"leader 11"
    assert {int(node.id) for node in world.member.others()} == {2, 3}
    acknowledged = [message for message in world.told if message["type"] == "next_node_idx"][-1]
    assert acknowledged["next_node_idx"] == 12 and acknowledged["success"]
    world.told.clear()
    assert calls(world, 2) == "welcome"


def test_nothing_but_entries_is_taken_from_an_unlisted_leader(world: World, tmp_path: Path) -> None:
    takes_snapshot_without_leader(world, tmp_path)
    world.told.clear()
    world.member.trust_directory()
    world.receive(2, "request_vote", term=TERM + 1, last_log_index=99, last_log_term=TERM)
    world.receive(2, "pre_vote", term=TERM + 1, round=1, log=[TERM, 99])
    world.turn()
    assert [message for message in world.told if message["type"] in ("response_vote", "pre_vote_reply")] == []
    assert world.member.raftCurrentTerm == TERM


def test_after_a_restart_an_unlisted_leader_is_heard_until_a_listed_one_leads(world: World, tmp_path: Path) -> None:
    takes_snapshot_without_leader(world, tmp_path)
    world.member.close()
    world.open()
    assert {int(node.id) for node in world.member.others()} == {3}
    assert calls(world, 2) == "welcome"
    world.entries(9, TERM, [regular(b"leader 10", 10, TERM)], 10)
    world.turn()
    assert world.applied[-1] == b"leader 10"
    assert "node 7 is not a member" in calls(world, 7)  # its address is not known

    world.receive(3, "append_entries", term=TERM + 1, prevLogIdx=10, prevLogTerm=TERM, entries=[], commit_index=10)
    world.turn()
    assert "node 2 is not a member" in calls(world, 2)
    world.entries(10, TERM, [regular(b"nobody's", 11, TERM + 1)], 11)
    world.receive(2, "append_entries", term=TERM + 1, prevLogIdx=10, prevLogTerm=TERM, entries=[], commit_index=10)
    world.turn()
    assert world.member.last_log() == (TERM, 10)
    assert world.member.leader_id() == "3"


# Directories that were lost


def recorded(node_id: int, directory: str, index: int) -> Entry:
    change = MembershipChange("add", node_id, MEMBERS[node_id], directory)
    return b"\x02" + msgspec.msgpack.encode(change), index, TERM


def votes(world: World) -> int:
    return len([message for message in world.told if message["type"] == "response_vote"])


def test_an_empty_member_votes_for_nobody_who_has_entries(world: World) -> None:
    world.receive(2, "request_vote", last_log_index=7, last_log_term=4)
    world.turn()
    assert votes(world) == 0
    world.receive(3, "request_vote", last_log_index=1, last_log_term=0)  # the first election of a new cluster
    world.turn()
    assert votes(world) == 1


def test_an_empty_member_votes_for_one_whose_log_knows_its_directory(world: World) -> None:
    asked = {"last_log_index": 7, "last_log_term": 4}
    world.receive(2, "request_vote", **asked, recorded="a lost one")
    world.turn()
    assert votes(world) == 0
    world.receive(2, "request_vote", **asked, recorded=world.member.directory.id)
    world.turn()
    assert votes(world) == 1


def test_a_member_that_the_quorum_knows_by_another_directory_neither_votes_nor_stands(world: World) -> None:
    world.member.trust_directory()
    world.entries(1, 0, [recorded(1, "another", 2)], 2)
    world.turn()
    world.receive(3, "request_vote", term=TERM + 1, last_log_index=9, last_log_term=TERM)
    world.member.force_election()
    world.turn()
    assert votes(world) == 0 and not world.member.is_leader()
    assert not [message for message in world.told if message["type"] in ("pre_vote", "request_vote")]
    world.entries(2, TERM, [recorded(1, world.member.directory.id, 3)], 3)  # added anew
    world.turn()
    world.receive(3, "request_vote", term=TERM + 1, last_log_index=9, last_log_term=TERM)
    world.turn()
    assert votes(world) == 1


def test_votes_and_acknowledgements_of_a_directory_that_was_lost_do_not_count(world: World) -> None:
    world.member.trust_directory()
    world.entries(1, 0, [recorded(2, "two", 2)], 2)
    world.turn()
    world.member.force_election()
    world.member.doTick(0.0)
    term = world.member.raftCurrentTerm
    world.receive(2, "response_vote", term=term, directory="empty")
    assert not world.member.is_leader()
    world.receive(2, "response_vote", term=term, directory="two")
    assert world.member.is_leader()
    world.turn()
    held = world.member.last_log()[1]
    for directory, committed in (("empty", 2), ("two", held)):
        world.receive(
            2, "next_node_idx", term=term, directory=directory, next_node_idx=held + 1, reset=False, success=True
        )
        world.turn()
        assert world.member.raftCommitIndex == committed


def test_a_leader_records_the_directories_of_members_that_have_none_yet(world: World) -> None:
    world.lead()
    term = world.member.raftCurrentTerm
    for node_id in (2, 3, 2, 3, 2, 3):
        held = world.member.last_log()[1]
        world.receive(
            node_id,
            "next_node_idx",
            term=term,
            directory=f"of {node_id}",
            next_node_idx=held + 1,
            reset=False,
            success=True,
        )
        world.member.record_directories()
        world.turn()
    assert world.member.applied.directories == {1: world.member.directory.id, 2: "of 2", 3: "of 3"}


def test_at_level_0_no_directory_is_recorded_and_members_may_be_removed(world: World) -> None:
    """A member before feature levels would take the entry for a new member, and forget the directory."""
    world.level = 0
    world.lead()
    reasons: list[int] = []
    for node_id in (2, 3, 2, 3):
        next_index = world.member.last_log()[1] + 1
        told = {"directory": f"of {node_id}", "next_node_idx": next_index, "reset": False, "success": True}
        world.receive(node_id, "next_node_idx", term=world.member.raftCurrentTerm, **told)
        world.member.record_directories()
        world.turn()
    assert world.member.applied.directories == {}
    world.member.submit_change(MembershipChange("rem", 3, ""), lambda _result, reason: reasons.append(reason))
    world.turn()
    assert FAIL_REASON.REQUEST_DENIED not in reasons


def test_no_member_is_removed_until_a_majority_of_the_rest_was_heard_from(world: World) -> None:
    """Else a leader with entries and a member that was never reached could be left, and neither be elected."""
    world.lead()
    reasons: list[int] = []

    def remove_the_third() -> None:
        world.member.submit_change(MembershipChange("rem", 3, ""), lambda _result, reason: reasons.append(reason))

    def hear(node_id: int) -> None:
        next_index = world.member.last_log()[1] + 1
        told = {"directory": f"of {node_id}", "next_node_idx": next_index, "reset": False, "success": True}
        world.receive(node_id, "next_node_idx", term=world.member.raftCurrentTerm, **told)
        world.member.record_directories()
        world.turn()

    for _ in range(4):
        hear(3)
    assert set(world.member.applied.directories) == {1, 3}
    remove_the_third()
    assert reasons == [FAIL_REASON.REQUEST_DENIED]
    for _ in range(4):
        hear(2)
    remove_the_third()
    for _ in range(2):
        world.turn()
        hear(2)
    assert sorted(world.member.applied.members) == [1, 2]


def lead_with(world: World, *known: int) -> None:
    """Lead, with the directories of these others recorded and everything committed."""
    world.lead()
    world.turn()
    for _ in range(2 * len(known) + 4):
        for node_id in known:
            world.hear(node_id)
        world.member.record_directories()
        world.turn()
    assert set(world.member.applied.directories) == {1, *known}
    assert world.member.quorum == world.member.applied


def test_of_two_changes_that_are_asked_for_at_once_one_is_refused(world: World) -> None:
    """With both in force a majority of the old quorum and one of the new one might have no member in common."""
    lead_with(world, 2, 3)
    refused: list[int] = []
    added = MembershipChange("add", 4, "127.0.0.1:4", "of 4")
    world.member.submit_change(added, lambda _result, reason: refused.append(4) if reason else None)
    removed = MembershipChange("rem", 3, "")
    world.member.submit_change(removed, lambda _result, reason: refused.append(3) if reason else None)
    world.turn()
    assert refused == [3]
    assert sorted(world.member.quorum.members) == [1, 2, 3, 4]


def test_a_directory_that_is_recorded_with_a_removal_does_not_bring_the_member_back(world: World) -> None:
    lead_with(world, 2)
    world.hear(3)
    reasons: list[int] = []
    world.member.submit_change(MembershipChange("rem", 3, ""), lambda _result, reason: reasons.append(reason))
    world.member.record_directories()
    for _ in range(3):
        world.turn()
        world.hear(2)
    assert reasons == [FAIL_REASON.SUCCESS]
    assert sorted(world.member.applied.members) == sorted(world.member.quorum.members) == [1, 2]


def test_a_member_that_moved_is_known_by_its_new_address_and_the_quorum_can_be_changed(world: World) -> None:
    """The log has the address at which its directory was recorded; the configuration has the new one."""
    lead_with(world, 2, 3)
    world.member.close()
    world.open({**MEMBERS, 3: "127.0.0.1:33"})
    world.member.force_election()
    world.member.doTick(0.0)
    world.receive(2, "response_vote", term=world.member.raftCurrentTerm, directory="of 2")
    assert world.member.is_leader()
    reasons: list[int] = []
    world.turn()
    world.hear(2)
    world.turn()
    assert world.member.applied.members == world.member.quorum.members == {**MEMBERS, 3: "127.0.0.1:33"}
    added = MembershipChange("add", 4, "127.0.0.1:4", "of 4")
    world.member.submit_change(added, lambda _result, reason: reasons.append(reason))
    for _ in range(2):
        world.turn()
        world.hear(2)
        world.hear(3)
    world.turn()
    assert reasons == [FAIL_REASON.SUCCESS]


def test_a_directory_from_before_there_were_ids_may_vote_and_keeps_its_new_id(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    journal = Journal.open(tmp_path / "controller" / "journal")
    journal.append(b"\x01", 1, 0)
    journal.set_term(3, "2")
    journal.close()
    world = World(tmp_path / "controller", told)
    world.receive(2, "request_vote", last_log_index=7, last_log_term=4)
    world.turn()
    assert votes(world) == 1
    before = world.member.directory
    world.member.close()
    world.open()
    assert world.member.directory == before
    world.member.close()


def test_a_directory_in_use_without_its_journal_is_refused(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    World(tmp_path / "controller", told).member.close()
    (tmp_path / "controller" / "journal").unlink()
    with pytest.raises(CorruptData, match="journal"):
        World(tmp_path / "controller", told)


def test_a_damaged_directory_file_is_refused(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    World(tmp_path / "controller", told).member.close()
    path = tmp_path / "controller" / "directory"
    whole = path.read_bytes()
    for at in range(len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptData):
            World(tmp_path / "controller", told)


def test_directories_are_in_the_snapshot_and_come_back_with_it(world: World) -> None:
    world.entries(1, 0, [recorded(2, "two", 2), recorded(3, "three", 3)], 3)
    world.turn()
    world.member.forceLogCompaction()
    while read_snapshot(world.directory / "snapshot") is None:
        world.turn()
    world.turn()
    world.member.close()
    world.open()
    assert world.member.applied.directories == {2: "two", 3: "three"}


def test_a_record_that_is_truncated_is_forgotten(world: World) -> None:
    world.entries(1, 0, [recorded(2, "two", 2)], 1)
    world.turn()
    assert world.member.quorum.directories == {2: "two"}
    world.entries(1, 0, [regular(b"other", 2, TERM + 1)], 1)
    assert world.member.quorum.directories == {}
    assert sorted(world.member.quorum.members) == [1, 2, 3]


def test_another_version_of_pysyncobj_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core.check_version()
    monkeypatch.setattr(core, "VERSION", "0.3.18")
    with pytest.raises(ConfigError, match=r"0\.3\.17"):
        core.check_version()


def plain_pieces_of(data: bytes, size: int = 50) -> list[Any]:
    """As members before feature levels send them: without positions."""
    starts = range(0, len(data), size)
    return [[data[at : at + size], at == 0, at + size >= len(data)] for at in starts]


def test_a_snapshot_of_a_leader_before_feature_levels_is_taken(world: World, tmp_path: Path) -> None:
    for piece in plain_pieces_of(snapshot_of(tmp_path / "sent", 9)):
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.turn()
    assert world.applied == [b"leader %d" % each for each in range(2, 10)]
    world.receive(
        2, "append_entries", serialized=plain_pieces_of(snapshot_of(tmp_path / "sent", 5), 10_000)[0], commit_index=5
    )
    assert world.member.raftCommitIndex == 9, "it is not taken back"


@pytest.mark.parametrize("lost", [0, 1, 2, -1])
def test_of_a_plain_snapshot_with_a_lost_piece_nothing_is_taken(world: World, tmp_path: Path, lost: int) -> None:
    pieces = plain_pieces_of(snapshot_of(tmp_path / "sent", 9))
    del pieces[lost]
    for piece in pieces:
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    world.turn()
    assert world.applied == [] and read_snapshot(world.directory / "snapshot") is None


def test_a_snapshot_of_an_unknown_version_ends_the_member_instead_of_being_asked_for_again(
    world: World, tmp_path: Path
) -> None:
    data = snapshot_of(tmp_path / "sent", 9)
    header = data[:8] + (9).to_bytes(4, "little") + data[12:24]
    data = header + crc32c(header).to_bytes(4, "little") + data[28:]
    *before, last = pieces_of(data, 9)
    for piece in before:
        world.receive(2, "append_entries", serialized=piece, commit_index=9)
    with pytest.raises(NewerLevel, match="format version 9 is not known"):
        world.receive(2, "append_entries", serialized=last, commit_index=9)
    assert isinstance(world.member.failure, NewerLevel)
    assert world.applied == []


@pytest.mark.parametrize("of_before", [True, False])
def test_a_snapshot_is_sent_in_the_form_of_the_version_that_the_member_has_shown(world: World, of_before: bool) -> None:
    """Members before feature levels say no directory."""
    world.lead()
    transport, [node] = world.member.transport, [node for node in world.member.others() if int(node.id) == 2]
    assert transport is not None
    told = {"next_node_idx": 2, "reset": False, "success": False} | ({} if of_before else {"directory": "of 2"})
    world.receive(2, "next_node_idx", term=world.member.raftCurrentTerm, **told)
    for position, is_last in ((0, False), (4, True)):
        piece = SnapshotPiece(PIECE_VERSION, 9, TERM, position, 8, 7, b"data")
        transport.send(node, {"type": "append_entries", "serialized": Sent(piece, node, is_last)})
        sent = world.told[-1]["serialized"]
        assert sent == ((b"data", position == 0, is_last) if of_before else piece)
