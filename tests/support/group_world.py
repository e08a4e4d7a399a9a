"""A world for the group coordinator: virtual time, a log in memory, an image; and clients that speak plain requests.

Nothing here sleeps: `run` drives a loop whose clock jumps to the next timer whenever there is nothing else to do.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from tests.support.loops import LoopClock
from tidelog.batch.batch import BatchHeader, control_epoch, iter_batches, iter_records, parse_header, set_base_offset
from tidelog.broker.coordinators.handover import read_passed
from tidelog.broker.coordinators.loader import NO_LOSS, load_store
from tidelog.broker.coordinators.store import StateStore, TransactionalStore
from tidelog.broker.coordinators.timers import Now
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC
from tidelog.broker.groups.coordinator import GroupCoordinator
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import JoinRequest, JoinResult, Limits, SyncRequest, SyncResult
from tidelog.broker.groups.store import GroupStore
from tidelog.broker.settings import GroupSettings
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.levels import SUPPORTED
from tidelog.controller.model.records import (
    BrokerRecord,
    ClusterRecord,
    PartitionRecord,
    ReplicaSetRecord,
    TopicRecord,
)
from tidelog.runtime.errors import NotFound, TidelogError, Unavailable
from tidelog.storage.confirm import ConfirmOffset
from tidelog.stream.errors import FencedCoordinator, InvalidProducerEpoch, TransactionNotVerified
from tidelog.stream.partition_close import Note, no_note

NODE = 1


class Appended(NamedTuple):
    base_offset: int
    wal_end: int


class FakeStorage:
    """A WAL end that is confirmed a little later, or when the test says so."""

    def __init__(self) -> None:
        self.confirm = ConfirmOffset()
        self.wal_end = 0
        self.auto_confirm = True
        self.room = asyncio.Event()
        self.room.set()

    async def writable(self) -> None:
        await self.room.wait()

    def appended(self, size: int) -> int:
        self.wal_end += size
        if self.auto_confirm:
            asyncio.get_running_loop().call_later(0.001, self.confirm.advance, self.wal_end)
        return self.wal_end

    def confirm_all(self) -> None:
        self.confirm.advance(self.wal_end)


class FakeLog:
    """The partition log of an internal topic: batches with offsets, and faults on request."""

    def __init__(self, partition: int, storage: FakeStorage, leader_epoch: int = 1, topic: str = OFFSETS_TOPIC) -> None:
        self.topic = topic
        self.topic_id = b""
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.log_start_offset = 0
        self.log_end_offset = 0
        self.batches: list[tuple[int, int, bytes]] = []
        """First offset, WAL end, bytes."""
        self.hint_note: Note = no_note
        self.read_from = -1
        """The first offset that was read; -1 if none was."""
        self.errors: list[TidelogError | None] = []
        """Raised by the next appends, one each; None: that append succeeds."""
        self.too_few: list[TidelogError] = []
        """Raised before the next appends, one each: too few replicas are in sync."""
        self.read_errors: list[TidelogError] = []
        self.trim_errors: list[TidelogError] = []
        self.trims: list[int] = []
        self.epochs: dict[int, int] = {}
        """Of each producer with batches or markers."""
        self.open: set[int] = set()
        """Producers with an open transaction."""
        self._guards: dict[int, object] = {}
        self._coordinators: dict[int, int] = {}
        self._storage = storage
        self._listeners: list[Callable[[], None]] = []

    def reopened(self, storage: FakeStorage, *, confirmed_only: bool = False) -> FakeLog:
        """The same log after a restart, everything in it confirmed."""
        again = FakeLog(self.partition, storage, self.leader_epoch + 1, self.topic)
        confirmed = self._storage.confirm.value
        again.batches = [
            (base, 0, data) for base, wal_end, data in self.batches if not confirmed_only or wal_end <= confirmed
        ]
        again.log_start_offset = self.log_start_offset
        again.log_end_offset = again.log_start_offset
        for _, _, data in again.batches:
            header = parse_header(data)
            again.log_end_offset = header.next_offset
            if header.is_transactional:
                again.note(header)
        return again

    def note(self, header: BatchHeader) -> None:
        """A transaction goes on, or ends."""
        self._guards.pop(header.producer_id, None)
        self.epochs[header.producer_id] = header.producer_epoch
        (self.open.discard if header.is_control else self.open.add)(header.producer_id)

    @property
    def high_watermark(self) -> int:
        confirmed = [
            parse_header(data).next_offset for _, end, data in self.batches if end <= self._storage.confirm.value
        ]
        return max(confirmed, default=self.log_start_offset)

    def size_bytes(self) -> int:
        return sum(len(data) for _, _, data in self.batches)

    def check_writable(self) -> None:
        if self.too_few:
            raise self.too_few.pop(0)

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        return producer_id in self.open and self.epochs[producer_id] == producer_epoch

    def begin_verification(self, producer_id: int, producer_epoch: int) -> object:
        if producer_epoch < self.epochs.get(producer_id, -1):
            raise InvalidProducerEpoch(f"epoch {producer_epoch} is old")
        return self._guards.setdefault(producer_id, object())

    def _check(self, header: BatchHeader, batch: bytes | memoryview, guard: object, transaction_version: int) -> None:
        producer, epoch = header.producer_id, header.producer_epoch
        known = self.epochs.get(producer, -1)
        if header.is_control:
            coordinator_epoch = control_epoch(next(iter_records(batch)))
            if epoch < known or (transaction_version >= 2 and epoch == known and producer in self.open):
                raise InvalidProducerEpoch(f"a marker has epoch {epoch}, {known} is current")
            if coordinator_epoch < self._coordinators.get(producer, -1):
                raise FencedCoordinator(f"coordinator epoch {coordinator_epoch} is old")
            self._coordinators[producer] = coordinator_epoch
        elif epoch < known:
            raise InvalidProducerEpoch(f"a batch has epoch {epoch}, {known} is current")
        elif (producer not in self.open or epoch != known) and (
            guard is None or self._guards.get(producer) is not guard
        ):
            raise TransactionNotVerified("the transaction is not open, and not verified")

    def append_internal(
        self, batch: bytes | memoryview, *, guard: object | None = None, transaction_version: int = 0
    ) -> Appended:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        header = parse_header(batch)
        if header.is_transactional:
            self._check(header, batch, guard, transaction_version)
            self.note(header)
        data = bytearray(batch)
        base = self.log_end_offset
        set_base_offset(data, base)
        self.log_end_offset = parse_header(data).next_offset
        wal_end = self._storage.appended(len(data))
        self.batches.append((base, wal_end, bytes(data)))
        self._storage.confirm.add_listener(wal_end, self._moved)
        return Appended(base, wal_end)

    async def wait_acked(self, wal_end: int) -> None:
        await self._storage.confirm.wait(wal_end)

    async def writable(self) -> None:
        await self._storage.writable()

    async def read(self, offset: int, max_bytes: int, *, committed: bool, is_urgent: bool = False) -> Any:
        assert is_urgent, "clients wait for the coordinator"
        assert not committed
        if self.read_errors:
            raise self.read_errors.pop(0)
        self.read_from = offset if self.read_from < 0 else self.read_from
        found: list[memoryview] = []
        for _, wal_end, data in self.batches:
            if parse_header(data).next_offset <= offset or wal_end > self._storage.confirm.value:
                continue
            if found and sum(map(len, found)) + len(data) > max_bytes:
                break
            found.append(memoryview(data))
        return type("Fetched", (), {"records": found})

    async def delete_records(self, before_offset: int) -> int:
        if self.trim_errors:
            raise self.trim_errors.pop(0)
        assert self.log_start_offset <= before_offset <= self.high_watermark
        self.trims.append(before_offset)
        self.log_start_offset = before_offset
        self.batches = [one for one in self.batches if parse_header(one[2]).next_offset > before_offset]
        return before_offset

    def add_watermark_listener(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def _moved(self) -> None:
        for listener in list(self._listeners):
            listener()

    def records(self) -> list[tuple[bytes, bytes | None]]:
        return [
            (bytes(record.key or b""), record.value)
            for _, _, data in self.batches
            for _, batch in iter_batches(data)
            for record in iter_records(batch)
        ]


class LeaderNotAvailable(Unavailable):
    kafka_code = 5


class FakePartitions:
    def __init__(self, storage: FakeStorage) -> None:
        self.storage = storage
        self.logs: dict[int, FakeLog] = {}
        self.opening: set[int] = set()
        self._opened: list[Callable[[FakeLog], None]] = []
        self._closed: list[Callable[[FakeLog], None]] = []

    def all(self) -> list[FakeLog]:
        return list(self.logs.values())

    def get(self, topic: str, partition: int) -> FakeLog:
        if partition in self.opening:
            raise LeaderNotAvailable("opening")
        if partition not in self.logs:
            raise NotFound("no such partition")
        return self.logs[partition]

    def on_opened(self, callback: Callable[[FakeLog], None]) -> None:
        self._opened.append(callback)

    def on_closed(self, callback: Callable[[FakeLog], None]) -> None:
        self._closed.append(callback)

    def open(self, log: FakeLog) -> None:
        self.opening.discard(log.partition)
        self.logs[log.partition] = log
        for callback in self._opened:
            callback(log)

    def close(self, partition: int) -> None:
        self.tell_closed(self.logs.pop(partition))

    def tell_closed(self, log: FakeLog) -> None:
        for callback in self._closed:
            callback(log)


class FakeController:
    def __init__(self) -> None:
        self.image = Image()
        self.create_errors: list[TidelogError] = []
        self.created: list[tuple[str, int, dict[str, str], bool]] = []
        self.leaderless = False
        self.on_created: Callable[[TopicRecord], None] | None = None
        self._subscribers: list[Callable[[Delta], None]] = []
        self._next_id = 0
        self.apply(
            RowChange("cluster", "", ClusterRecord("c", NODE, 1, 0, level=SUPPORTED.newest)),
            RowChange("brokers", NODE, BrokerRecord(NODE, "c", "127.0.0.1", 9092, "", "", "i", 1, True)),
            RowChange("replica_sets", NODE, ReplicaSetRecord(NODE, (NODE,), (), NODE, 1, (NODE,), 0, 0)),
        )

    def subscribe(self, callback: Callable[[Delta], None]) -> Callable[[], None]:
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def apply(self, *mutations: RowChange) -> None:
        delta = Delta(self.image.version + 1, list(mutations))
        self.image.apply(delta)
        for subscriber in list(self._subscribers):
            subscriber(delta)

    def add_topic(self, name: str, partitions: int) -> TopicRecord:
        self._next_id += 1
        topic = TopicRecord(self._next_id.to_bytes(16), name, partitions, {}, name.startswith("__"), 0)
        return self.add_again(topic)

    def add_again(self, topic: TopicRecord) -> TopicRecord:
        """A topic that another controller has."""
        self.apply(
            RowChange("topics", topic.id, topic),
            *(
                RowChange("partitions", (topic.id, index), PartitionRecord(topic.id, index, NODE, 0, index * 4))
                for index in range(topic.partitions)
            ),
        )
        return topic

    def delete_topic(self, topic: TopicRecord) -> None:
        self.apply(
            *(RowChange("partitions", (topic.id, index), None) for index in range(topic.partitions)),
            RowChange("topics", topic.id, None),
        )

    def give_all_to(self, broker: int) -> None:
        """Another broker has become the master of the replica set."""
        record = replace(self.image.replica_sets[NODE], members=(broker,), master=broker, sync_state_set=(broker,))
        self.apply(
            RowChange("brokers", broker, BrokerRecord(broker, "c", "127.0.0.1", 9093, "", "", "i", 1, True)),
            RowChange("replica_sets", NODE, record),
        )

    async def create_topic(
        self, name: str, partitions: int, configs: dict[str, str], *, internal: bool = False
    ) -> TopicRecord:
        await asyncio.sleep(0.01)
        if self.create_errors:
            raise self.create_errors.pop(0)
        self.created.append((name, partitions, configs, internal))
        topic = self.add_topic(name, partitions)
        if self.on_created is not None:
            self.on_created(topic)
        return topic


class Admissions:
    """The coordinators of transactions: they answer what the test says, and remember what they were asked."""

    def __init__(self) -> None:
        self.codes: list[int | TidelogError] = []
        """The next answers; 0 after them."""
        self.asked: list[tuple[str, int, int, list[tuple[str, int]], bool]] = []

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        add: bool,
        timeout_s: float,
    ) -> dict[tuple[str, int], int]:
        assert timeout_s > 0
        self.asked.append((transactional_id, producer_id, producer_epoch, list(partitions), add))
        code = self.codes.pop(0) if self.codes else 0
        if isinstance(code, TidelogError):
            raise code
        return dict.fromkeys(partitions, code)


async def check_passed(log: FakeLog, note: bytes, new_store: Callable[[], StateStore], lost_at: int = NO_LOSS) -> None:
    """What was passed on (if anything was), with the rest of the log, is what the whole log is."""
    passed = read_passed(note)
    if passed is None:
        return
    assert passed.offset <= log.log_end_offset
    found = []
    for each in (passed, None):
        store = new_store()
        await load_store(log, store, each, lost_at)  # type: ignore[arg-type]
        store.finish_loading(Now(0, 0))
        pending = list(store.pending_records()) if isinstance(store, TransactionalStore) else []
        found.append((sorted(store.live_records()), pending))
    assert found[0] == found[1]
    log.read_from = -1


class World:
    """One broker that leads all partitions of the offsets topic."""

    def __init__(self, *, partitions: int = 1, create: bool = True, **settings: Any) -> None:
        self.storage = FakeStorage()
        self.controller = FakeController()
        self.partitions = FakePartitions(self.storage)
        self.settings = GroupSettings(
            **{"initial_rebalance_delay_ms": 0, "offsets_topic_partitions": partitions} | settings
        )
        self.clock = LoopClock()
        self.transactions = Admissions()
        self.seed = 0
        self.coordinator = self._coordinator()
        if create:
            self.topic = self.controller.add_topic("orders", 8)
            self.controller.add_topic(OFFSETS_TOPIC, partitions)
            for index in range(partitions):
                self.partitions.logs[index] = FakeLog(index, self.storage)

    def _coordinator(self) -> GroupCoordinator:
        self.seed += 1
        rng = random.Random(self.seed)
        return GroupCoordinator(self.partitions, self.controller, self.clock, self.settings, rng)  # type: ignore[arg-type]

    async def __aenter__(self) -> World:
        await self.coordinator.start()
        await self.loaded()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.coordinator.close()

    async def loaded(self) -> None:
        async with asyncio.timeout(60):
            for index in range(self.settings.offsets_topic_partitions):
                await self.coordinator.wait_until_loaded(index)

    def _new_store(self) -> GroupStore:
        return GroupStore(Limits(0, self.settings.max_size), random.Random(0))

    async def move(self) -> None:
        """All partitions move to another broker, which loads what this one passes on; the log says the same."""
        await self._restart(confirmed_only=False, passes_on=True)

    async def restart(self, *, confirmed_only: bool = True) -> None:
        """kill -9: nothing is closed; a new process reads what is durable."""
        await self._restart(confirmed_only=confirmed_only, passes_on=False)

    async def _restart(self, *, confirmed_only: bool, passes_on: bool) -> None:
        old, before = self.coordinator, self.partitions
        self.storage = FakeStorage()
        self.partitions = FakePartitions(self.storage)
        for log in list(before.logs.values()):
            again = self.partitions.logs[log.partition] = log.reopened(self.storage, confirmed_only=confirmed_only)
            before.close(log.partition)
            note = log.hint_note()
            await check_passed(again, note, self._new_store)
            if passes_on:
                assert note
                again.hint_note = functools.partial(bytes, note)
        self.coordinator = self._coordinator()
        await self.coordinator.start()
        await self.loaded()
        await old.close()  # only so that no task of it is left behind

    @property
    def log(self) -> FakeLog:
        return self.partitions.logs[0]


class Consumer:
    """A member of a group, as a client library is one."""

    def __init__(
        self,
        world: World,
        group: str = "g",
        *,
        instance: str | None = None,
        metadata: bytes = b"meta",
        protocols: tuple[str, ...] = ("range",),
        protocol_type: str = "consumer",
        session_ms: int = 10_000,
        rebalance_ms: int = 30_000,
        version: int = 9,
    ) -> None:
        self.world = world
        self.group = group
        self.instance = instance
        self.member_id = ""
        self.generation = -1
        self.metadata = metadata
        self.protocols = protocols
        self.protocol_type = protocol_type
        self.session_ms = session_ms
        self.rebalance_ms = rebalance_ms
        self.version = version
        self.joined: JoinResult | None = None

    @property
    def identity(self) -> MemberIdentity:
        return MemberIdentity(self.member_id, self.instance)

    async def join(self) -> JoinResult:
        for _ in range(2):
            request = JoinRequest(
                self.identity,
                "client",
                "/127.0.0.1",
                self.session_ms,
                self.rebalance_ms,
                self.protocol_type,
                tuple((name, self.metadata) for name in self.protocols),
                needs_member_id=self.version >= 4,
                can_skip_assignment=self.version >= 9,
            )
            result = await self.world.coordinator.join(self.group, request)
            if result.error is GroupError.MEMBER_ID_REQUIRED:
                self.member_id = result.member_id
                continue
            break
        if result.error is GroupError.NONE:
            self.member_id = result.member_id
            self.generation = result.generation
        self.joined = result
        return result

    async def sync(self, assignments: dict[str, bytes] | None = None) -> SyncResult:
        request = SyncRequest(self.identity, self.generation, None, None, assignments or {})
        return await self.world.coordinator.sync(self.group, request)

    async def run_round(self, assign: Callable[[str], bytes] = lambda member_id: member_id.encode()) -> SyncResult:
        """Join and sync; the leader assigns."""
        result = await self.join()
        assert result.error is GroupError.NONE, result
        return await self.sync({one.member_id: assign(one.member_id) for one in result.members})

    def heartbeat(self) -> GroupError:
        return self.world.coordinator.heartbeat(self.group, self.identity, self.generation)

    def leave(self) -> GroupError:
        return self.world.coordinator.leave(self.group, [self.identity])[0]
