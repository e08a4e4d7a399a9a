"""Replicas of one set with real sockets and real disks in one process, a controller in memory, and a proxy for faults.

Entry: `HotSet`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.storage.wal_harness import until
from tests.support.certificates import Authority
from tidelog.broker.replication.door import ReplicationDoor
from tidelog.broker.replication.inputs import (
    MasterTarget,
    ReplicaEvents,
    ReplicaIdentity,
    ReplicationLimits,
    ReplicationWorld,
    SetAuthority,
)
from tidelog.broker.replication.master import ReplicaMaster
from tidelog.broker.replication.replica import HotReplica, ReplicaParts
from tidelog.broker.replication.warm import WarmTail
from tidelog.controller.model.errors import NotEligible
from tidelog.controller.rpc.connection import RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.listener import RpcListener
from tidelog.controller.rpc.tls_network import TlsNetwork
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound
from tidelog.runtime.network import Network, TcpNetwork
from tidelog.runtime.tls import MutualTls
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.records import StreamAppend
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.election import Promise, elected
from tidelog.storage.replication.pace import CatchUpPace
from tidelog.storage.replication.policy import ReplicationPolicy
from tidelog.storage.replication.sending import LinkSettings
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import ReplicatedWal
from tidelog.storage.wal.disk.wal import DiskWal

SECRET = b"a secret of the cluster"
LINK = LinkSettings(batch_bytes=16 << 10, window_bytes=128 << 10, heartbeat_s=0.1, silence_s=1.0)
LIMITS = ReplicationLimits(
    LINK,
    live_bytes=256 << 10,
    inbox_bytes=64 << 10,
    max_record_bytes=64 << 10,
    tick_s=0.02,
    connect_timeout_s=2.0,
    retry_base_s=0.005,
    retry_cap_s=0.1,
)
SETTINGS = WalSettings(segment_bytes=128 << 10, max_bytes=8 << 20, max_record_bytes=64 << 10)
POLICY = ReplicationPolicy(total_replicas=3, in_sync_replicas=2, max_behind_s=1.0, slave_timeout_s=1.0)


class MemoryAuthority:
    """The controller of one set. `trouble(wanted)` may raise before or (`after`) a change takes effect."""

    def __init__(self, configuration: SetConfiguration) -> None:
        self.configuration = configuration
        self.epoch = 0
        self.asked = 0
        self.told: tuple[Mapping[WalReplica, int], int] = ({}, -1)
        """Ends and confirm offset that came with the last request."""
        self.trouble: Callable[[SetConfiguration], None] = lambda _wanted: None
        self.trouble_after: Callable[[SetConfiguration], None] = lambda _wanted: None
        self.strangers: set[int] = set()
        self.reports_s = 3_600.0

    async def alter(
        self, wanted: SetConfiguration, *, master_epoch: int, ends: Mapping[WalReplica, int], confirm_offset: int
    ) -> SetConfiguration:
        await asyncio.sleep(0)
        self.asked += 1
        self.told = (ends, confirm_offset)
        self.trouble(wanted)
        if master_epoch != self.epoch:
            raise Fenced(f"epoch {master_epoch} has ended")
        if wanted.number == self.configuration.number and not wanted.same_terms(self.configuration):
            self.configuration = wanted._replace(number=wanted.number + 1)
        self.trouble_after(wanted)
        return self.configuration

    async def resign(self, designated: int, reason: str, *, master_epoch: int) -> None:
        raise NotEligible("this controller elects nobody by itself")

    def reports_every_s(self) -> float:
        return self.reports_s

    def admits(self, replica: WalReplica, registration_epoch: int, *, learner: bool) -> bool:
        return replica.broker_id not in self.strangers


class Proxy:
    """A TCP proxy before a broker, which can be stalled, cut after so many bytes, and flip bits."""

    def __init__(self) -> None:
        self.to = ("127.0.0.1", 0)
        self.flows = asyncio.Event()
        self.flows.set()
        self.cut_after = -1
        """Bytes from the broker after which the connection is cut; -1: never."""
        self.flip_after = -1
        """Bytes from the broker after which one bit is flipped; -1: never."""
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self._writers.add(writer)
        both: list[asyncio.Task[None]] = []
        ends = [writer]
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*self.to)
            ends.append(inner_writer)
            self._writers.add(inner_writer)
            both.append(asyncio.create_task(self._copy(reader, inner_writer, faulty=False)))
            both.append(asyncio.create_task(self._copy(inner_reader, writer, faulty=True)))
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass  # cancelled by `close`; asyncio's server asks the task for its result
        finally:
            for one in both:
                one.cancel()
            for end in ends:
                end.transport.abort()
                self._writers.discard(end)
            with contextlib.suppress(asyncio.CancelledError):  # `close` while the connection ends by itself
                await asyncio.gather(*both, return_exceptions=True)
            self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, faulty: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                await self.flows.wait()
                if faulty and self.flip_after >= 0:
                    if self.flip_after < len(data):
                        changed = bytearray(data)
                        changed[self.flip_after] ^= 4
                        data, self.flip_after = bytes(changed), -1
                    else:
                        self.flip_after -= len(data)
                if faulty and self.cut_after >= 0:
                    if self.cut_after < len(data):
                        writer.write(data[: self.cut_after])
                        self.cut_after = -1
                        await writer.drain()
                        return
                    self.cut_after -= len(data)
                writer.write(data)
                await writer.drain()

    def cut(self) -> None:
        """End all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.flows.set()
        for _ in range(3):  # also those that were accepted just now
            await asyncio.sleep(0.001)
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Broker:
    """A broker's process, while it lives."""

    broker_id: int
    wal: DiskWal
    disk: FileDisk
    door: ReplicationDoor
    listener: RpcListener
    proxy: Proxy
    proxy_port: int
    replica: HotReplica
    confirmed: list[int] = field(default_factory=list)
    deposed: list[int] = field(default_factory=list)
    diverged: list[Exception] = field(default_factory=list)
    wal_failed: list[Exception] = field(default_factory=list)

    @property
    def master(self) -> ReplicaMaster:
        assert self.replica.master is not None
        return self.replica.master


class HotSet:
    """Up to three brokers with a replica each."""

    def __init__(self, path: Path, *, policy: ReplicationPolicy = POLICY, brokers: int = 3) -> None:
        self.path = path
        self.policy = policy.check()
        self.settings = SETTINGS
        self.limits = LIMITS
        self.pace = CatchUpPace()
        self.cache_bytes = 64 << 20
        self.wal_ids = {each: f"wal-{each}" for each in range(1, brokers + 1)}
        members = frozenset(WalReplica(*each) for each in self.wal_ids.items())
        quorum = policy.quorum(brokers, brokers)
        self.authority = MemoryAuthority(SetConfiguration(1, members, quorum))
        self.brokers: dict[int, Broker] = {}
        self.secrets: dict[int, bytes] = {}
        self.learners: set[int] = set()
        self.committed = 0
        self.given_up_from = 1 << 62
        """WALs that end behind this offset have records that were given up."""
        self._next = 0

    def identity(self, broker_id: int) -> ReplicaIdentity:
        """Of a broker's replica; another kind of controllers gives other registrations."""
        return ReplicaIdentity(0, WalReplica(broker_id, self.wal_ids[broker_id]), 1, broker_id in self.learners)

    def authority_of(self, broker_id: int) -> SetAuthority:
        """The controllers, as a broker's replica asks them."""
        return self.authority

    def network_of(self, broker_id: int) -> Network:
        """What a broker listens on and connects by."""
        return TcpNetwork()

    async def start(self, broker_id: int) -> Broker:
        """Start a broker on its directory; it does nothing yet."""
        credentials = Credentials(self.secrets.get(broker_id, SECRET), broker_id)
        world = ReplicationWorld(self.network_of(broker_id), SystemClock(), random.Random(broker_id), credentials)
        disk = FileDisk(self.path / self.wal_ids[broker_id])
        wal = DiskWal(disk, self.settings, rng=random.Random(3))
        tail = WarmTail(LogCache(self.cache_bytes), self.committed)
        await wal.recover(tail.add)
        door = ReplicationDoor()

        async def nothing(_connection: RpcConnection, method: str, _params: msgspec.Raw) -> bytes:
            raise InvalidInput(method)

        listener = RpcListener(
            nothing,
            network=world.network,
            clock=world.clock,
            credentials=credentials,
            max_connections=16,
            adopt_wal=door.adopt,
        )
        await listener.start("127.0.0.1", 0)
        proxy = Proxy()
        port = await proxy.start()
        proxy.to = listener.address
        events: list[Broker] = []
        parts = ReplicaParts(
            self.identity(broker_id),
            self.policy,
            self.authority_of(broker_id),
            door,
            world,
            ReplicaEvents(
                lambda offset: events[0].confirmed.append(offset),
                lambda epoch: events[0].deposed.append(epoch),
                lambda error: events[0].diverged.append(error),
                lambda error: events[0].wal_failed.append(error),
                has_given_up=lambda: wal.start_offset < wal.end_offset > self.given_up_from,
            ),
            self.limits,
            self.pace,
        )
        broker = Broker(broker_id, wal, disk, door, listener, proxy, port, HotReplica(wal, tail, parts))
        events.append(broker)
        self.brokers[broker_id] = broker
        return broker

    async def start_all(self, *, master: int = 1) -> Broker:
        """Start all, elect `master`, and let the others follow."""
        for broker_id in self.wal_ids:
            await self.start(broker_id)
        broker = await self.elect(master)
        proven = [each for each in self.wal_ids if each not in self.secrets | dict.fromkeys(self.learners)]

        def is_settled() -> bool:
            status = broker.master.status()
            is_told = broker.master.configuration == self.authority.configuration
            return status["in_sync"] == status["sync_state_set"] == proven and not status["changing"] and is_told

        await until(is_settled, 20.0)
        return broker

    async def elect(self, designated: int) -> Broker:
        """Fence with the promises of all that live; `designated` leads the next epoch, or who is further."""
        self.authority.epoch += 1
        promises = []
        for each in self.brokers.values():
            position = await each.replica.promise(self.authority.epoch)
            replica = WalReplica(each.broker_id, self.wal_ids[each.broker_id])
            promises.append(Promise(replica, position.last_epoch, position.end_offset))
        winner = elected(promises, self.authority.configuration, designated=designated)
        assert winner is not None, (promises, self.authority.configuration)
        broker = self.brokers[winner.replica.broker_id]
        self.authority.configuration = self.authority.configuration._replace(
            number=self.authority.configuration.number + 1
        )
        await broker.replica.lead(self.authority.epoch, self.authority.configuration)
        await self.let_follow()
        return broker

    def leader(self) -> Broker:
        """The master of the present epoch."""
        epoch = self.authority.epoch
        (leader,) = [each for each in self.brokers.values() if each.replica.master and each.master.epoch == epoch]
        return leader

    def target(self, master: Broker) -> MasterTarget:
        return MasterTarget(self.authority.epoch, master.broker_id, "127.0.0.1", master.proxy_port)

    async def let_follow(self) -> None:
        """Tell everybody who does not lead the present epoch whom to follow."""
        master = self.leader()
        for broker in self.brokers.values():
            if broker is not master:
                await broker.replica.follow(self.target(master))

    async def kill(self, broker_id: int, *, wipe: bool = False) -> None:
        """End a broker's process; with `wipe` its disk is lost, and the next one has another WAL."""
        broker = self.brokers.pop(broker_id)
        await broker.proxy.close()
        broker.door.close()
        await broker.replica.close()
        await broker.listener.close()
        with contextlib.suppress(Exception):
            await broker.wal.close()
        await broker.disk.close()
        if wipe:
            shutil.rmtree(self.path / self.wal_ids[broker_id])
            self.wal_ids[broker_id] += "-again"

    async def close(self) -> None:
        for broker in self.brokers.values():
            await broker.replica.close()
        for broker_id in list(self.brokers):
            await self.kill(broker_id)

    # --- load ----------------------------------------------------------------------------------------------------

    async def write(self, broker: Broker, count: int, size: int = 1000) -> int:
        """Append so many records; return the end of the WAL."""
        wal = broker.wal
        for _ in range(count):
            await wal.writable(size)
            payload = random.Random(self._next).randbytes(size)
            wal.append(StreamAppend(1, 1, self._next, 1, (payload,)))
            self._next += 1
            if self._next % 16 == 0:
                await asyncio.sleep(0)
        return wal.end_offset

    async def confirmed(self, broker: Broker, offset: int | None = None) -> None:
        """Wait until everything that a master has appended is confirmed."""
        wanted = broker.wal.end_offset if offset is None else offset
        try:
            await until(lambda: broker.master.confirm_offset >= wanted, 20.0)
        except TimeoutError:
            raise AssertionError(f"{wanted} is not confirmed: {self.state()}") from None

    def state(self) -> str:
        """What each broker says of itself."""
        lines = []
        for each in self.brokers.values():
            wal, follower, master = each.wal, each.replica.follower, each.replica.master
            lines.append(f"{each.broker_id}: [{wal.start_offset}, {wal.durable_offset}, {wal.end_offset})")
            lines.append(f" confirmed {wal.confirm_offset} promised {wal.promised_epoch}")
            lines.append(f" follows {follower.target} {follower.is_following} {follower.problem}" if follower else "")
            lines.append(f" leads {master.status()}\n" if master else "\n")
        return "".join(lines)

    async def same(self, *broker_ids: int) -> None:
        """Wait until these brokers' WALs end where the master's does, and compare bytes and epochs."""
        ids = broker_ids or tuple(self.brokers)
        master = self.leader()
        others = [self.brokers[each] for each in ids if self.brokers[each] is not master]
        await until(lambda: all(each.wal.durable_offset == master.wal.end_offset for each in (master, *others)), 20.0)
        for each in others:
            assert await self._equal(each.wal, master.wal)
            mine, theirs = each.wal.epoch_history.entries, master.wal.epoch_history.entries
            assert mine == theirs[len(theirs) - len(mine) :]

    async def _equal(self, one: DiskWal, other: DiskWal) -> bool:
        """Compare what both hold. A follower that has just learned of a confirmation may trim meanwhile."""
        while True:
            start = max(one.start_offset, other.start_offset)
            try:
                return await contents(one, start) == await contents(other, start)
            except NotFound:
                assert max(one.start_offset, other.start_offset) > start, "something within the WAL is not found"


class TlsHotSet(HotSet):
    """Brokers whose connections have TLS."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.authority_of_tls = Authority(path / "tls")

    def network_of(self, broker_id: int) -> TlsNetwork:
        """With a certificate of the broker's own."""
        files = self.authority_of_tls.issue(f"broker-{broker_id}")
        return TlsNetwork(MutualTls(files, SystemClock()), SystemClock())


async def contents(wal: ReplicatedWal, start: int) -> bytes:
    """All durable bytes of a WAL from `start` on."""
    parts: list[bytes] = []
    while (raw := await wal.read_raw(start, 1 << 20)) is not None:
        parts += [bytes(buffer) for buffer in raw.buffers]
        start = raw.end_offset
    return b"".join(parts)
