"""Several `RaftConsensus` members over real sockets: loss, cuts, membership, snapshots, secrets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pickle
import shutil
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.controller.controller_helpers import until
from tests.support.quorum_world import SECRET, Applied, QuorumWorld
from tidelog.controller.model.errors import OutcomeUnknown
from tidelog.controller.raft.journal import Entry
from tidelog.controller.raft.links import MESSAGE
from tidelog.controller.raft.quorum import MembershipChange
from tidelog.controller.raft.runner import system_surroundings
from tidelog.controller.raft.surroundings import Turns
from tidelog.controller.raft.thread import RaftConsensus, RaftSettings
from tidelog.controller.raft.transport import conform
from tidelog.controller.rpc.handshake import MAX_FRAME_BYTES, ClientHandshake, Credentials, Session
from tidelog.controller.rpc.secret import new_nonce, read_secret, write_secret
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, CorruptData, TidelogError
from tidelog.runtime.wire import encode_frame


@contextlib.asynccontextmanager
async def quorum(tmp_path: Path, **settings: object) -> AsyncIterator[QuorumWorld]:
    world = QuorumWorld(tmp_path, **settings)
    try:
        yield world
    finally:
        await world.close()


async def three(world: QuorumWorld) -> None:
    for node_id in (1, 2, 3):
        await world.start(node_id)


async def test_three_members_agree_and_survive_the_loss_of_each_leader_in_turn(tmp_path: Path) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        number = 0
        for _ in range(3):
            for _ in range(20):
                await world.propose(number)
                number += 1
            lost = (await world.leader()).node_id
            await world.stop(lost)
            for _ in range(20):
                await world.propose(number)
                number += 1
            await world.start(lost)
        await world.propose(number)
        await world.agree(set(range(number + 1)))


async def test_all_members_stopped_together_remember_everything(tmp_path: Path) -> None:
    async with quorum(tmp_path, snapshot_entries=20) as world:
        await three(world)
        for number in range(30):
            await world.propose(number)
        for node_id in (1, 2, 3):
            await world.stop(node_id)
        await three(world)
        await world.propose(30)
        await world.agree(set(range(31)))


@pytest.mark.parametrize("inward, outward", [(True, True), (True, False), (False, True)])
async def test_a_leader_that_is_cut_off_steps_down_and_comes_back_as_a_follower(
    tmp_path: Path, inward: bool, outward: bool
) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        await world.propose(0)
        old = await world.leader()
        term = old.raft.role.term
        world.isolate(old.node_id, inward=inward, outward=outward)
        stranded = asyncio.create_task(old.raft.propose(b"1000 ", 30))
        others = {1, 2, 3} - {old.node_id}
        new = await world.leader(among=others)
        await until(lambda: not old.raft.role.is_leader)
        with pytest.raises(Exception, match="leader"):
            await stranded
        for number in range(1, 10):
            await world.propose(number)
        assert new.raft.role.term > term
        before = (await world.leader()).raft.role.term
        world.heal()
        await world.propose(10)
        kept = {1000} if 1000 in new.machine.numbers else set()
        assert not (kept and outward), "the command never left the old leader"
        await world.agree(set(range(11)) | kept)
        assert (await world.leader()).raft.role.term == before, "a member that came back must not cause an election"


async def test_a_follower_that_was_cut_off_disturbs_nobody_and_catches_up(tmp_path: Path) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        await world.propose(0)
        leader = await world.leader()
        cut = next(each for each in (1, 2, 3) if each != leader.node_id)
        world.isolate(cut)
        for number in range(1, 50):
            await world.propose(number)
        await asyncio.sleep(1.5)  # longer than every election time-out
        term = leader.raft.role.term
        world.heal()
        await world.agree(set(range(50)))
        assert leader.raft.role.is_leader and leader.raft.role.term == term


async def test_a_member_far_behind_is_restored_by_a_snapshot_of_many_pieces(tmp_path: Path) -> None:
    def nudge(world: QuorumWorld) -> Callable[[], Awaitable[None]]:
        numbers = iter(range(1_000, 100_000))
        return lambda: world.propose(next(numbers))

    async with quorum(tmp_path, snapshot_entries=50) as world:
        await three(world)
        await world.propose(0)
        lagging = next(each for each in (1, 2, 3) if each not in world.leaders())
        await world.stop(lagging)
        count = 120
        for number in range(1, count):
            await world.propose(number, padding=20_000)
        leader = await world.leader()
        await until(lambda: int(leader.raft.status()["journal_entries"]) < 60)
        for member in world.members.values():
            member.machine.numbers.update({10_000_000 + each: 1 for each in range(300_000)})  # about 4 MB of state
        await world.propose(count)
        await until(lambda: (tmp_path / str(leader.node_id) / "snapshot").stat().st_size > 3 << 20, 20, nudge(world))
        restored = await world.start(lagging)
        await until(lambda: len(restored.machine.numbers) > 300_000)
        kept = tmp_path / str(lagging) / "snapshot"  # put in its place once it has been read
        await until(lambda: kept.exists() and kept.stat().st_size > 3 << 20)
        await world.propose(500)
        await until(lambda: 500 in restored.machine.numbers)


class LargeState(Applied):
    """With much that a snapshot has and no command."""

    padding = b""

    def freeze(self) -> Callable[[], bytes]:
        numbers, padding = super().freeze(), self.padding
        return lambda: numbers() + padding

    def load(self, data: bytes) -> None:
        numbers, separator, padding = data.partition(b"\x00")
        self.padding = separator + padding
        super().load(numbers)


async def test_a_snapshot_larger_than_what_is_queued_for_a_member_reaches_it_over_a_slow_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.controller.raft.links.MAX_QUEUED_BYTES", 48 << 20)
    monkeypatch.setattr("tests.support.quorum_world.Applied", LargeState)

    async with quorum(tmp_path, snapshot_entries=10, election_min_s=1.5, election_max_s=3.0) as world:
        await three(world)
        await world.propose(0)
        leader = await world.leader()
        behind = next(each for each in (1, 2, 3) if each != leader.node_id)
        await world.stop(behind)
        assert isinstance(leader.machine, LargeState)
        leader.machine.padding = bytes(110 << 20)
        for number in range(1, 30):
            await world.propose(number)
        snapshot = tmp_path / str(leader.node_id) / "snapshot"
        await until(lambda: snapshot.exists() and snapshot.stat().st_size > 100 << 20)
        await until(lambda: int(leader.raft.status()["journal_entries"]) < 11)
        world.paths[leader.node_id, behind].rest_s = 0.001
        restored = await world.start(behind)
        await until(lambda: set(restored.machine.numbers) == set(range(30)))
        assert leader.raft.role.is_leader


async def test_the_leadership_is_handed_over_to_whom_one_names_without_losing_a_command(tmp_path: Path) -> None:
    async with quorum(tmp_path, election_min_s=1.5, election_max_s=3.0) as world:
        await three(world)
        done: set[int] = set()

        async def load(start: int) -> None:
            for number in range(start, start + 60):
                await world.propose(number)
                done.add(number)

        writers = [asyncio.create_task(load(1_000 * each)) for each in range(8)]
        for _ in range(4):
            leader = await world.leader()
            target = next(each for each in (1, 2, 3) if each != leader.node_id)
            await leader.raft.transfer(target)
            assert not leader.raft.role.is_leader
            assert (await world.leader()).node_id == target
        await asyncio.gather(*writers)
        await world.agree(done)
    # so slow that only a hand-over elects: three members share an interpreter here, with whatever else the machine does


async def test_a_hand_over_that_nobody_works_at_ends_with_an_unknown_outcome(tmp_path: Path) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        leader = await world.leader()
        leader.raft.stopping.set()  # its thread takes no more turns
        with pytest.raises(OutcomeUnknown, match="ended or hung"):
            await leader.raft.transfer(None, 0.01)


async def test_members_are_added_and_removed_while_commands_run_and_after_restarts_too(tmp_path: Path) -> None:
    async with quorum(tmp_path, snapshot_entries=30) as world:
        await world.start(1, ids=(1,))
        number = iter(range(1_000_000))
        done: set[int] = set()

        async def some(count: int = 20) -> None:
            for _ in range(count):
                mine = next(number)
                await world.propose(mine)
                done.add(mine)

        await some()
        for newcomer in (2, 3, 4, 5):
            await world.start(newcomer, ids=tuple(range(1, newcomer + 1)))
            await asyncio.gather(world.change("add", newcomer), some())
        await world.agree(done)
        await until(lambda: all(set(each.raft.members) == {1, 2, 3, 4, 5} for each in world.members.values()))
        leader = await world.leader()
        followers = [each for each in (1, 2, 3, 4, 5) if each != leader.node_id]
        for gone in followers[:2]:
            await asyncio.gather(world.change("rem", gone), some())
            await world.stop(gone)
        left = tuple(sorted(world.members))
        for node_id in left:  # what the directory knows counts, not the old list
            await world.stop(node_id)
        for node_id in left:
            await world.start(node_id, ids=(1, 2, 3, 4, 5))
        await some()
        await world.agree(done)
        assert all(tuple(sorted(each.raft.members)) == left for each in world.members.values())
        lost = (await world.leader()).node_id  # two of three are a majority, two of five would not be
        await world.stop(lost)
        await some()
        await world.agree(done)


class UnhurriedRunner:
    """A runner whose member goes on with its turn only when the event loop is done with what it was told."""

    def __init__(self, turns: Turns) -> None:
        self._runner = system_surroundings().runner(turns)
        self._loop = asyncio.get_running_loop()
        self.start, self.wake = self._runner.start, self._runner.wake
        self.is_alive, self.join = self._runner.is_alive, self._runner.join

    def post(self, callback: Callable[..., None], *args: object) -> None:
        self._runner.post(callback, *args)
        asyncio.run_coroutine_threadsafe(self._some_rounds(), self._loop).result(60)

    async def _some_rounds(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_whoever_hears_that_a_change_is_committed_finds_it_in_the_members(tmp_path: Path) -> None:
    surroundings = dataclasses.replace(system_surroundings(), runner=UnhurriedRunner)
    members = {1: "127.0.0.1:1"}
    settings = RaftSettings(directory=tmp_path, credentials=Credentials(SECRET, 1), members=members)
    raft = RaftConsensus(settings, SystemClock(), surroundings)
    machine = Applied()
    machine.level = lambda: 0  # type: ignore[method-assign]  # no directory is recorded unasked
    await raft.start(machine)
    try:
        await until(lambda: raft.role.is_leader)
        await raft.barrier(60)
        await raft.change_membership(MembershipChange("add", 1, members[1], "its directory"), 60)
        assert raft.directories == {1: "its directory"}
    finally:
        await raft.close()


@pytest.mark.parametrize("settings", [{}, {"snapshot_entries": 5}])
async def test_a_member_that_is_started_without_the_quorum_does_not_lead_beside_it(
    settings: dict[str, int], tmp_path: Path
) -> None:
    """Both would give the same ids to different objects, and overwrite each other's."""
    async with quorum(tmp_path, **settings) as world:
        await three(world)
        for number in range(20):
            await world.propose(number)
        await world.agree(set(range(20)))
        leader = (await world.leader()).node_id
        await until(lambda: (tmp_path / str(leader) / "snapshot").exists() == bool(settings))
        await world.stop(leader)
        alone = RaftConsensus(RaftSettings(directory=tmp_path / str(leader)), SystemClock())
        with pytest.raises(ConfigError, match=r"belongs to a quorum of controllers \[1, 2, 3\]"):
            await alone.start(Applied())
        await world.start(leader)
        await world.propose(20)
        await world.agree(set(range(21)))


async def test_a_removed_member_wins_nothing_and_knows_why(tmp_path: Path) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        leader = await world.leader()
        removed = next(each for each in (1, 2, 3) if each != leader.node_id)
        await world.change("rem", removed)
        term = leader.raft.role.term
        member = world.members[removed]
        await until(lambda: all("not a member" in peer["problem"] for peer in member.raft.status()["peers"]))
        await asyncio.sleep(1.5)
        assert not member.raft.role.is_leader
        assert leader.raft.role.is_leader and leader.raft.role.term == term


async def test_a_member_that_lost_its_directory_counts_only_when_it_is_added_anew(tmp_path: Path) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        for number in range(5):
            await world.propose(number)
        leader = await world.leader()
        await until(lambda: len(leader.raft.directories) == 3)
        lost, other = (each for each in (1, 2, 3) if each != leader.node_id)
        await world.stop(lost)
        shutil.rmtree(tmp_path / str(lost))
        await world.start(lost)
        await world.agree(set(range(5)))  # it follows
        await world.stop(other)
        with pytest.raises(TidelogError):
            await leader.raft.propose(b"1000 ", 2.0)  # no majority of those that remember
        await world.start(other)
        await world.propose(5)
        await world.change("rem", lost)
        await world.change("add", lost)
        await until(lambda: all(len(each.raft.directories) == 3 for each in world.members.values()))
        leads = (await world.leader()).node_id
        await world.stop(next(each for each in (1, 2, 3) if each not in (lost, leads)))
        await world.propose(6)


async def test_a_majority_that_lost_its_directories_begins_no_other_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        await world.propose(0)
        await world.agree({0})
        for each in (1, 2, 3):
            await world.stop(each)
        caplog.set_level(logging.INFO, "tidelog.controller.raft.transport")
        for each in (1, 2):
            shutil.rmtree(tmp_path / str(each))
            await world.start(each)

        def waits_for_third() -> bool:
            told = [record for record in caplog.records if record.message.startswith("a new quorum begins when")]
            return any(vars(record)["controllers"] == [3] for record in told)

        await until(waits_for_third)
        third = await world.start(3)
        await until(lambda: all(peer["problem"] == "" for peer in third.raft.status()["peers"]))
        with pytest.raises(TidelogError):
            await third.raft.propose(b"1 ", 2.0)
        assert world.leaders() == [] and set(third.machine.numbers) <= {0}
        assert all(not world.members[each].machine.numbers for each in (1, 2))


async def test_a_member_with_another_secret_takes_no_part(tmp_path: Path) -> None:
    async with quorum(tmp_path) as world:
        await three(world)
        await world.propose(0)
        await world.agree({0})
        await world.stop(3)
        stranger = await world.start(3, secret=b"another secret altogether")
        for number in range(1, 5):
            await world.propose(number)
        await until(lambda: all("secret" in peer["problem"] for peer in stranger.raft.status()["peers"]))
        assert set(stranger.machine.numbers) <= {0} and not stranger.raft.role.is_leader


class Poison:
    """A pickle of this opens a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


async def test_nothing_that_a_peer_sends_is_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "unpickled"
    poison = pickle.dumps(Poison(trap))
    assert pickle.loads(poison).close() is None and trap.exists()
    trap.unlink()

    async with quorum(tmp_path) as world:
        await three(world)
        await world.propose(0)
        host, port = world.bound[1]
        for body in (
            struct.pack("i", len(poison)) + poison,  # as pysyncobj's own transport would take it
            encode_frame(MESSAGE, poison),
            encode_frame(16, poison),
            b"GET / HTTP/1.1\r\n\r\n",
            encode_frame(16, bytes(MAX_FRAME_BYTES + 1)),
        ):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(body)
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        for secret in (b"another secret altogether", SECRET):  # also from one who knows the secret
            reader, writer = await asyncio.open_connection(host, port)
            shake = ClientHandshake(Credentials(secret, 2), "raft", 1, nonce=new_nonce())
            writer.write(shake.hello())
            try:
                while shake.session is None:
                    writer.write(shake.feed(await asyncio.wait_for(reader.read(4096), 60)))
            except (TidelogError, ConnectionError):
                assert secret != SECRET
                writer.close()
                continue
            writer.write(shake.session.seal(MESSAGE, poison))
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        for number in range(1, 5):
            await world.propose(number)
        await world.agree(set(range(5)))
        assert not trap.exists()


def test_a_changed_repeated_or_foreign_frame_ends_the_session() -> None:
    from tidelog.controller.rpc.handshake import ServerHandshake, welcome
    from tidelog.runtime.wire import FrameDecoder

    def pair() -> tuple[ClientHandshake, ServerHandshake]:
        client = ClientHandshake(Credentials(SECRET, 1), "rpc", nonce=new_nonce())
        server = ServerHandshake(Credentials(SECRET, 2), nonce=new_nonce())
        server.feed(client.feed(server.feed(client.hello())))
        client.feed(welcome())
        assert client.session is not None and server.session is not None and client.server_id == 2
        return client, server

    client, server = pair()
    _, other = pair()
    assert client.session is not None and server.session is not None and other.session is not None
    first, second = client.session.seal(1, b"one"), client.session.seal(1, b"two")
    (frame,) = FrameDecoder().feed(first)
    with pytest.raises(CorruptData):
        other.session.open(frame)  # of another connection
    with pytest.raises(CorruptData):
        server.session.open(frame._replace(payload=b"x" + frame.payload[1:]))
    with pytest.raises(CorruptData):
        server.session.open(frame._replace(kind=2))
    with pytest.raises(CorruptData):
        server.session.open(FrameDecoder().feed(second)[0])  # one is missing
    assert server.session.open(frame) == b"one"
    with pytest.raises(CorruptData):
        server.session.open(frame)  # again
    assert server.session.open(FrameDecoder().feed(second)[0]) == b"two"


def test_a_secret_file_must_be_long_enough_and_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(path)
    write_secret(path)
    secret = read_secret(path)
    write_secret(path)
    assert read_secret(path) == secret and len(secret) == 64
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others"):
        read_secret(path)
    path.chmod(0o600)
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="16"):
        read_secret(path)


def entry(index: int, term: int) -> Entry:
    return b"\x00x", index, term


def append(previous: int, term: int, entries: list[Entry], commit: int) -> dict[str, object]:
    return {
        "type": "append_entries",
        "prevLogIdx": previous,
        "prevLogTerm": term,
        "entries": entries,
        "commit_index": commit,
    }


def test_a_follower_drops_only_what_contradicts_and_commits_only_what_it_compared() -> None:
    log = [entry(5, 1), entry(6, 1), entry(7, 2), entry(8, 2)]
    again = append(5, 1, [entry(6, 1), entry(7, 2)], 8)
    assert conform(again, log, 5)
    assert (again["prevLogIdx"], again["prevLogTerm"], again["entries"], again["commit_index"]) == (7, 2, [], 7)
    conflict = append(5, 1, [entry(6, 1), entry(7, 3)], 20)
    assert not conform(conflict, log, 5)
    assert (conflict["prevLogIdx"], conflict["entries"], conflict["commit_index"]) == (6, [entry(7, 3)], 7)
    longer = append(8, 2, [entry(9, 3)], 9)
    assert not conform(longer, log, 5) and longer["entries"] == [entry(9, 3)] and longer["commit_index"] == 9
    heartbeat = append(6, 1, [], 8)
    assert conform(heartbeat, log, 5) and heartbeat["commit_index"] == 6
    unknown = append(9, 3, [], 9)
    assert conform(unknown, log, 5) and unknown["prevLogIdx"] == 9
    for is_last in (False, True):
        piece: dict[str, object] = {"type": "append_entries", "serialized": (b"x", True, is_last), "commit_index": 90}
        assert conform(piece, log, 5) and piece["commit_index"] == 5
    with pytest.raises(CorruptData):
        conform(append(8, 2, [entry(10, 3)], 9), log, 5)
    with pytest.raises(CorruptData):
        conform({"type": "append_entries", "transmission": "finish", "data": b""}, log, 5)


async def test_a_port_scan_is_dropped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.controller.rpc.connection.HANDSHAKE_S", 0.2)

    async with quorum(tmp_path) as world:
        await world.start(1, ids=(1,))
        reader, writer = await asyncio.open_connection(*world.bound[1])
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        silent = socket.create_connection(world.bound[1])
        silent.close()
        await world.propose(0)


class Accepted(asyncio.Transport):
    """What the event loop makes of a socket."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})

    def pause_reading(self) -> None: ...

    def abort(self) -> None:
        self.get_extra_info("socket").close()


async def test_a_socket_handed_over_in_the_last_turn_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applying, stopping = threading.Event(), threading.Event()

    async with quorum(tmp_path) as world:
        raft = (await world.start(1, ids=(1,))).raft
        await world.propose(0)
        apply = world.members[1].machine.apply

        def held(blob: bytes, index: int) -> bytes:
            applying.set()
            assert stopping.wait(60)
            return apply(blob, index)

        monkeypatch.setattr(world.members[1].machine, "apply", held)
        command = asyncio.create_task(raft.propose(b"1 ", 60))
        await asyncio.to_thread(applying.wait, 60)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            raft.adopt_peer(2, Accepted(ours), Session(b"", b""))
            stop = asyncio.create_task(world.stop(1))
            await until(raft.stopping.is_set)
            stopping.set()
            await stop
            assert theirs.recv(1) == b""
        await asyncio.gather(command, return_exceptions=True)
