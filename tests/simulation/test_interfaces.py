"""The simulated interfaces keep what the real ones promise, and break what they say they break."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.controller.model.errors import NotController, OutcomeUnknown
from tidelog.controller.rpc.connection import RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.simulation.actors.faults import Faults
from tidelog.simulation.world.bucket import ATTEMPT_S, BucketFaults, SimBucket
from tidelog.simulation.world.clock import SimClock
from tidelog.simulation.world.cluster import SimCluster
from tidelog.simulation.world.consensus import RaftHost, RaftWatch, SimConsensus
from tidelog.simulation.world.disk import Platters, SimDisk
from tidelog.simulation.world.loop import START_S, Deadlock, Life, VirtualLoop
from tidelog.simulation.world.network import GIVE_UP_S, KERNEL_BYTES, SimNetwork
from tidelog.simulation.world.raft_files import RaftPlatters
from tidelog.simulation.world.settings import SECRET, RaftShape, Shape
from tidelog.storage.bucket.store import ObjectExists


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def run(loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(work)


# --- time and lives


def test_time_jumps_and_timers_of_one_moment_keep_their_order(loop: VirtualLoop) -> None:
    seen: list[int] = []

    async def work() -> None:
        for number in range(5):
            loop.call_later(3600, seen.append, number)
        await asyncio.sleep(7200)

    run(loop, work())
    assert seen == [0, 1, 2, 3, 4]
    assert loop.time() == START_S + 7200


def test_work_for_threads_runs_later_and_in_turn(loop: VirtualLoop) -> None:
    async def work() -> list[int]:
        return list(await asyncio.gather(*(asyncio.to_thread(pow, n, 2) for n in range(4))))

    assert run(loop, work()) == [0, 1, 4, 9]


def test_waiting_for_what_cannot_come_is_told(loop: VirtualLoop) -> None:
    with pytest.raises(Deadlock):
        run(loop, asyncio.Event().wait())


def test_a_life_that_ends_makes_no_step_more_and_a_paused_one_goes_on_where_it_was(loop: VirtualLoop) -> None:
    steps: dict[str, list[float]] = {"killed": [], "paused": []}
    unwound = []

    async def walk(name: str) -> None:
        try:
            for _ in range(10):
                await asyncio.sleep(1)
                steps[name].append(loop.time() - START_S)
        finally:
            unwound.append(name)

    async def work() -> None:
        killed, paused = Life("killed"), Life("paused")
        killed.spawn(loop, walk("killed"), "walk")
        walking = paused.spawn(loop, walk("paused"), "walk")
        await asyncio.sleep(3.5)
        killed.end(loop)
        paused.pause()
        await asyncio.sleep(5)
        paused.resume(loop)
        await walking

    run(loop, work())
    assert steps["killed"] == [1, 2, 3]
    assert steps["paused"] == [1, 2, 3, 8.5, 9.5, 10.5, 11.5, 12.5, 13.5, 14.5]
    assert unwound == ["paused"], "SIGKILL runs no finally"


# --- network


class Peer(asyncio.Protocol):
    def __init__(self) -> None:
        self.data = b""
        self.lost: list[Exception | None] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


async def connected(network: SimNetwork) -> tuple[Peer, Peer]:
    servers: list[Peer] = []

    def make() -> Peer:
        servers.append(Peer())
        return servers[-1]

    await network.host("b").listen(make, "b", 1)
    _, client = await network.host("a").connect(Peer, "b", 1, timeout_s=1)
    assert isinstance(client, Peer)
    return client, servers[0]


def test_a_cut_holds_bytes_one_way_and_lets_them_go_in_order_when_it_heals(loop: VirtualLoop) -> None:
    async def work() -> None:
        network = SimNetwork(loop, random.Random(1))
        client, server = await connected(network)
        network.cut("a", "b")
        for number in range(50):
            client.transport.write(b"%d," % number)
            await asyncio.sleep(0.001)
        server.transport.write(b"back")
        await asyncio.sleep(2)
        assert (server.data, client.data) == (b"", b"back")
        network.heal()
        await asyncio.sleep(1)
        assert server.data == b"".join(b"%d," % number for number in range(50))

    run(loop, work())


def test_a_connection_that_is_cut_too_long_is_reset_at_both_ends(loop: VirtualLoop) -> None:
    async def work() -> None:
        network = SimNetwork(loop, random.Random(1))
        client, server = await connected(network)
        network.cut("a", "b")
        client.transport.write(b"x")
        await asyncio.sleep(2 * GIVE_UP_S)
        assert isinstance(client.lost[0], ConnectionResetError) and isinstance(server.lost[0], ConnectionResetError)

    run(loop, work())


class BufferedPeer(asyncio.BufferedProtocol):
    """Reads into 16 bytes at a time, and stops reading after `limit` bytes."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.data = b""
        self.reads = 0
        self.limit = limit
        self.full: list[bool] = []
        self.lost: list[Exception | None] = []
        self.transport: Any = None
        self._buffer = bytearray(16)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self._buffer[:nbytes]
        self.reads += 1
        if len(self.data) >= self.limit:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.full.append(True)

    def resume_writing(self) -> None:
        self.full.append(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


async def taken_over(network: SimNetwork, limit: int = 1 << 30) -> tuple[Peer, BufferedPeer]:
    """Return the ends of a connection whose server has given it to a buffered protocol."""
    client, server = await connected(network)
    other = BufferedPeer(limit)
    server.transport.pause_reading()
    server.transport.set_protocol(other)
    other.connection_made(server.transport)
    server.transport.resume_reading()
    return client, other


@pytest.mark.parametrize("pieces", [False, True])
def test_a_buffered_protocol_reads_all_bytes_in_order_in_pieces(loop: VirtualLoop, pieces: bool) -> None:
    async def work() -> None:
        network = SimNetwork(loop, random.Random(1))
        network.pieces = random.Random(2) if pieces else None
        client, server = await taken_over(network)
        sent = b"".join(b"%d," % number for number in range(200))
        for at in range(0, len(sent), 50):
            client.transport.writelines([sent[at : at + 20], memoryview(sent)[at + 20 : at + 50]])
            await asyncio.sleep(0.0003)
        await asyncio.sleep(1)
        assert server.data == sent
        least = len(sent) // 16
        assert server.reads > 1.2 * least if pieces else least <= server.reads < 1.3 * least

    run(loop, work())


def test_a_buffered_protocol_that_pauses_gets_the_rest_when_it_resumes(loop: VirtualLoop) -> None:
    async def work() -> None:
        network = SimNetwork(loop, random.Random(1))
        client, server = await taken_over(network, limit=40)
        client.transport.write(bytes(range(100)))
        await asyncio.sleep(1)
        assert server.data == bytes(range(48)), "reads end at 16 bytes"
        client.transport.write(bytes(range(100, 120)))
        await asyncio.sleep(1)
        server.limit = 1 << 30
        server.transport.resume_reading()
        await asyncio.sleep(1)
        assert server.data == bytes(range(120))

    run(loop, work())


def test_another_protocol_gets_what_the_first_one_has_not_read(loop: VirtualLoop) -> None:
    async def work() -> None:
        network = SimNetwork(loop, random.Random(1))
        client, server = await taken_over(network, limit=16)
        client.transport.write(bytes(range(64)))
        await asyncio.sleep(1)
        last = Peer()
        server.transport.set_protocol(last)
        last.connection_made(server.transport)
        assert last.data == b""
        last.transport.resume_reading()
        await asyncio.sleep(1)
        assert (server.data, last.data) == (bytes(range(16)), bytes(range(16, 64)))
        client.transport.abort()
        await asyncio.sleep(1)
        assert (len(server.lost), len(last.lost)) == (0, 1)

    run(loop, work())


def test_a_transport_that_keeps_nothing_is_full_when_the_kernel_is(loop: VirtualLoop) -> None:
    async def work() -> None:
        network = SimNetwork(loop, random.Random(1))
        client, server = await taken_over(network)
        server.transport.set_write_buffer_limits(high=0)
        network.cut("b", "a")
        server.transport.write(bytes(KERNEL_BYTES))
        assert server.full == []
        server.transport.write(b"more")
        await asyncio.sleep(1)
        assert server.full == [True]
        network.heal()
        await asyncio.sleep(1)
        assert server.full == [True, False]
        assert len(client.data) == KERNEL_BYTES + 4

    run(loop, work())


@pytest.mark.parametrize("silent", [False, True])
def test_peers_of_a_crash_hear_of_it_at_once_or_when_the_host_is_back(loop: VirtualLoop, silent: bool) -> None:
    async def work() -> None:
        network = SimNetwork(loop, random.Random(1))
        client, server = await connected(network)
        network.crash("b", silent=silent)
        await asyncio.sleep(1)
        assert bool(client.lost) is not silent
        network.revive("b")
        await asyncio.sleep(1)
        assert len(client.lost) == 1 and not server.lost

    run(loop, work())


# --- disk


@pytest.mark.parametrize("seed", range(20))
def test_a_power_loss_keeps_what_was_synced_and_a_kill_keeps_all(loop: VirtualLoop, seed: int) -> None:
    rng = random.Random(seed)
    platters = Platters()

    async def work() -> None:
        disk = SimDisk(platters, loop, rng)
        file = await disk.open("f", create=True)
        await file.fill_zeros(0, 4096)
        synced: asyncio.Future[None] = loop.create_future()
        file.write(0, [b"a" * 100, b"b" * 100], sync=True, done=lambda error: synced.set_result(None))
        await synced
        file.write(200, [b"c" * 100], sync=False, done=lambda error: None)
        file.write(300, [b"d" * 100], sync=False, done=lambda error: None)
        await asyncio.sleep(1)

    run(loop, work())
    seen = platters.files["f"].seen
    assert seen[:400] == b"a" * 100 + b"b" * 100 + b"c" * 100 + b"d" * 100
    platters.lose_power(rng)
    assert seen[:200] == b"a" * 100 + b"b" * 100 and len(seen) == 4096


@pytest.mark.parametrize("ends", [True, False], ids=["dead", "alive"])
def test_what_a_hung_disk_owes_to_a_process_ends_in_it_or_never(loop: VirtualLoop, ends: bool) -> None:
    """A dead master that was told of a write would confirm it, and what a later process wrote would count as synced."""
    platters = Platters()
    told: list[OSError | None] = []

    async def write(disk: SimDisk) -> None:
        file = await disk.open("log", create=True)
        await file.fill_zeros(0, 100)
        disk.hang()
        file.write(0, [b"hung"], sync=True, done=told.append)

    async def work() -> None:
        life, disk = Life("a"), SimDisk(platters, loop, random.Random(1))
        await life.spawn(loop, write(disk), "write")
        await asyncio.sleep(1)
        if ends:
            life.end(loop)
        disk.go_on()
        await asyncio.sleep(1)

    run(loop, work())
    assert told == ([] if ends else [None])
    assert bool(platters.files["log"].unsynced) == ends


def test_after_a_failed_fsync_nothing_more_is_done(loop: VirtualLoop) -> None:
    async def work() -> list[OSError | None]:
        told: list[OSError | None] = []
        disk = SimDisk(Platters(), loop, random.Random(1))
        file = await disk.open("f", create=True)
        await file.fill_zeros(0, 4096)
        disk.fail_next_sync = True
        for number in range(3):
            file.write(number, [b"x"], sync=True, done=told.append)
            await asyncio.sleep(1)
        return told

    told = run(loop, work())
    assert len(told) == 3 and all(isinstance(error, OSError) for error in told)


def test_rot_is_in_spares_and_behind_the_last_record_only(loop: VirtualLoop) -> None:
    platters = Platters()

    async def work() -> None:
        disk = SimDisk(platters, loop, random.Random(1))
        for name in ("1.wal", "2.wal", "3.spare", "epochs"):
            file = await disk.open(name, create=True)
            await file.fill_zeros(0, 4096)
            file.write(0, [b"r" * 1000], sync=True, done=lambda error: None)
        await asyncio.sleep(1)

    run(loop, work())
    before = {name: bytes(inode.seen) for name, inode in platters.files.items()}
    assert sum(platters.rot(random.Random(seed)) for seed in range(20)) > 20
    after = {name: bytes(inode.seen) for name, inode in platters.files.items()}
    assert after["epochs"] == before["epochs"]
    for name in ("1.wal", "2.wal"):
        assert after[name][:1000] == before[name][:1000] and after[name] != before[name]
    assert after["3.spare"][:1000] != before["3.spare"][:1000]


# --- bucket


def bucket_of(loop: VirtualLoop) -> tuple[SimBucket, SimNetwork]:
    network = SimNetwork(loop, random.Random(1))
    return SimBucket(loop, network, SimClock(loop), random.Random(2)), network


def test_a_conditional_create_whose_answer_was_lost_knows_its_own_object(loop: VirtualLoop) -> None:
    async def work() -> None:
        bucket, _ = bucket_of(loop)
        ours, theirs = (bucket.store(host, SimClock(loop), random.Random(host)) for host in "ab")
        bucket.faults = BucketFaults(lose_answer=1.0)
        putting = loop.create_task(ours.put("k", [b"ours"], if_absent=True))
        await asyncio.sleep(ATTEMPT_S / 2)
        bucket.faults = BucketFaults()
        await putting
        with pytest.raises(ObjectExists):
            await theirs.put("k", [b"theirs"], if_absent=True)
        assert await theirs.get("k") == b"ours"

    run(loop, work())


def test_faults_of_the_bucket_that_overlap_are_all_there_each_until_its_own_end(loop: VirtualLoop) -> None:
    """As a fault `bucket` and a fault `deny` of one period do."""
    bucket, network = bucket_of(loop)
    cluster = cast(SimCluster, SimpleNamespace(bucket=bucket, network=network, nodes={}))
    noted: list[tuple[str, BucketFaults]] = []

    def note(who: str, what: str) -> None:
        noted.append((what, bucket.faults))

    faults = Faults(loop, cluster, random.Random(6), ("bucket", "deny"), note)
    run(loop, faults.run(200))
    had = [each for what, each in noted if what != "heal"]
    assert any(each.deny and each.refuse for each in had), "no two of them have overlapped"
    assert any(now.refuse and not now.deny for before, now in pairwise(had) if before.deny and before.refuse)
    assert any(now.deny and not now.refuse for before, now in pairwise(had) if before.deny and before.refuse)
    assert noted[-1] == ("heal", BucketFaults()) and bucket.faults == BucketFaults()


def test_a_put_may_land_after_its_sender_is_gone(loop: VirtualLoop) -> None:
    async def work() -> None:
        bucket, _ = bucket_of(loop)
        bucket.faults = BucketFaults(late=1.0)
        life = Life("a")
        life.spawn(loop, bucket.store("a", SimClock(loop), random.Random(3)).put("k", [b"late"]), "put")
        await asyncio.sleep(0.1)
        life.end(loop)
        assert "k" not in bucket.objects
        await asyncio.sleep(2 * ATTEMPT_S + 1)
        assert bucket.objects["k"].body == b"late"

    run(loop, work())


def test_an_answer_is_damaged_once_for_each_host_and_object(loop: VirtualLoop) -> None:
    async def work() -> None:
        bucket, _ = bucket_of(loop)
        interfaces = [bucket.store(host, SimClock(loop), random.Random(host)) for host in "ab"]
        await interfaces[0].put("k", [bytes(100)])
        bucket.flips.probability = 1.0
        for store in interfaces:
            damaged = await store.get("k")
            assert sum(damaged) in [1 << bit for bit in range(8)]
            assert await store.get("k") == bytes(100)
            assert await store.get_ranges("k", [(0, 50), (50, 100)]) == [bytes(50), bytes(50)]

    run(loop, work())


# --- consensus


class Machine:
    def __init__(self) -> None:
        self.entries: list[bytes] = []

    def apply(self, blob: bytes, index: int) -> bytes:
        self.entries.append(blob)
        return b"%d" % len(self.entries)

    def flush(self) -> None: ...

    def level(self) -> int:
        return 1

    def freeze(self) -> Any:
        entries = list(self.entries)
        return lambda: b"\n".join(entries)

    def load(self, data: bytes) -> None:
        self.entries = data.split(b"\n") if data else []


class Quorum:
    """Three real members, each in a life of its own."""

    def __init__(self, loop: VirtualLoop, snapshot_entries: int, raft: RaftShape | None = None) -> None:
        self.loop = loop
        self.network = SimNetwork(loop, random.Random(1))
        self.hosts = {1: "a", 2: "b", 3: "c"}
        self.platters = {each: RaftPlatters() for each in self.hosts}
        self.lives: dict[int, Life] = {}
        self.machines: dict[int, Machine] = {}
        self.members: dict[int, SimConsensus] = {}
        self.watch = RaftWatch()
        self._shape = Shape(controllers=3, brokers=1, wal="s3", partitions=1, raft=raft or RaftShape())
        self._shape.controller.snapshot_entries = snapshot_entries
        self._starts = 0

    def start(self, each: int) -> None:
        self._starts += 1
        self.members.pop(each, None)
        life, machine = Life(f"{each}.{self._starts}"), Machine()
        self.lives[each], self.machines[each] = life, machine
        life.spawn(self.loop, self._run(each, machine), "start")

    async def _run(self, each: int, machine: Machine) -> None:
        credentials, network = Credentials(SECRET, each), self.network.host(self.hosts[each])
        member = self.members[each] = SimConsensus(
            credentials=credentials,
            members={node: f"{host}:1" for node, host in self.hosts.items()},
            shape=self._shape,
            host=RaftHost(self.platters[each], network, SimClock(self.loop), self.loop, random.Random(self._starts)),
            watch=self.watch,
        )

        async def nothing(connection: RpcConnection, method: str, params: object) -> bytes:
            return b"\xc0"

        def accept() -> RpcConnection:
            return RpcConnection(handler=nothing, credentials=credentials, adopt_peer=member.adopt_peer)

        await network.listen(accept, "", 1)
        await member.start(machine)

    def kill(self, each: int, *, power: bool = False) -> None:
        self.lives[each].end(self.loop)
        self.network.crash(self.hosts[each], silent=False)
        if power:
            self.platters[each].lose_power(random.Random(each))

    async def leader(self, *, but: int = 0) -> int:
        while True:
            for each, member in self.members.items():
                if each != but and not self.lives[each].dead and member.role.is_leader:
                    return each
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("snapshot_entries", [5, 10_000])
def test_members_apply_the_same_log_over_crashes_and_cuts(loop: VirtualLoop, snapshot_entries: int) -> None:
    rng = random.Random(snapshot_entries)
    sure: list[bytes] = []

    async def work() -> None:
        quorum = Quorum(loop, snapshot_entries)
        for each in quorum.hosts:
            quorum.start(each)
        for number in range(60):
            leader = await quorum.leader()
            try:
                blob = b"entry %d" % number
                await quorum.members[leader].propose(blob, 1.0)
                sure.append(blob)
            except (NotController, OutcomeUnknown):
                pass
            if number % 6 == 5:
                each = rng.choice(list(quorum.hosts))
                quorum.kill(each, power=rng.random() < 0.5)
                await asyncio.sleep(rng.uniform(0, 2))
                quorum.start(each)
            elif number % 6 == 2:
                alone = rng.choice("abc")
                for other in "abc":
                    quorum.network.cut(alone, other)
                await asyncio.sleep(rng.uniform(0, 2))
                quorum.network.heal()
        await asyncio.sleep(5)
        logs = [machine.entries for machine in quorum.machines.values()]
        assert logs[0] == logs[1] == logs[2]
        assert [entry for entry in logs[0] if entry in sure] == sure
        assert len(set(logs[0])) == len(logs[0])
        assert not quorum.watch.findings

    run(loop, work())
    assert len(sure) > 30


def test_a_snapshot_arrives_over_connections_that_are_reset_between_its_pieces(loop: VirtualLoop) -> None:
    async def work() -> None:
        quorum = Quorum(loop, 20, RaftShape(piece_bytes=256, buffer_bytes=512))
        for each in quorum.hosts:
            quorum.start(each)
        leader = await quorum.leader()
        behind = next(each for each in quorum.hosts if each != leader)
        await quorum.members[leader].propose(b"first", 1.0)
        quorum.kill(behind)
        for number in range(60):
            await quorum.members[leader].propose(b"entry %d " % number + bytes(200), 1.0)
        quorum.start(behind)
        resets = 0
        async with asyncio.timeout(60):
            while len(quorum.machines[behind].entries) < 61:
                await asyncio.sleep(0.1)
                quorum.network.reset_between(quorum.hosts[behind], list("abc"))
                resets += 1
                if resets > 10:
                    await asyncio.sleep(5)  # whole transfers get through again
        assert resets > 1
        assert quorum.machines[behind].entries == quorum.machines[leader].entries

    run(loop, work())


@pytest.mark.parametrize("change", range(1, 25))
def test_a_crash_at_any_change_of_a_members_files_loses_nothing(loop: VirtualLoop, change: int) -> None:
    async def work() -> None:
        quorum = Quorum(loop, 5)
        for each in quorum.hosts:
            quorum.start(each)
        leader = await quorum.leader()
        for number in range(4):
            await quorum.members[leader].propose(b"%d" % number, 1.0)
        for each in quorum.hosts:
            files = quorum.members[each].files
            files.crash_in, files.on_crash = change, partial(quorum.kill, each, power=True)
        for number in range(4, 20):
            with contextlib.suppress(NotController, OutcomeUnknown):
                await quorum.members[leader].propose(b"%d" % number, 0.3)
        told = [machine.entries for machine in quorum.machines.values()]
        assert any(life.dead for life in quorum.lives.values())
        for each in quorum.hosts:
            if not quorum.lives[each].dead:  # without the others it has nothing to change
                quorum.kill(each)
            quorum.start(each)
        leader = await quorum.leader()
        await quorum.members[leader].barrier(5.0)
        entries = quorum.machines[leader].entries
        assert all(entries[: len(before)] == before for before in told)

    run(loop, work())


def test_a_leader_that_is_cut_off_gives_no_results_and_steps_down(loop: VirtualLoop) -> None:
    async def work() -> None:
        quorum = Quorum(loop, 100)
        for each in quorum.hosts:
            quorum.start(each)
        old = await quorum.leader()
        for host in "abc":
            quorum.network.cut(quorum.hosts[old], host)
        with pytest.raises(OutcomeUnknown):
            await quorum.members[old].propose(b"lost", 5.0)
        new = await quorum.leader(but=old)
        await quorum.members[new].propose(b"kept", 1.0)
        assert not quorum.members[old].role.is_leader
        quorum.network.heal()
        await asyncio.sleep(3)
        assert all(machine.entries == [b"kept"] for machine in quorum.machines.values())

    run(loop, work())
