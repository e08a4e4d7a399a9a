"""One broker's data path for protocol tests: all parts real, on a WAL and a bucket in memory.

    async with KafkaWorld() as world:
        await world.topic("t", partitions=2)
        async with world.client() as client:
            await client.send(3, 12, topics=None)

The controller is the real state machine, applied at once. `hold()` stops confirmations, `release()` lets them go on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from tests.support.admin_world import WorldController, judged
from tests.support.kafka_client import KafkaClient
from tests.support.scripted_transactions import ScriptedTransactions
from tidelog.batch.batch import Record, build_batch
from tidelog.broker.groups.coordinator import GroupCoordinator
from tidelog.broker.kafka.client_subscriptions import ClientSubscriptions
from tidelog.broker.kafka.client_telemetry import ClientTelemetry
from tidelog.broker.kafka.election_waits import ElectionWaits
from tidelog.broker.kafka.fetch_sessions import FetchSessions
from tidelog.broker.kafka.handlers import fetch, init_producer_id, leader_epoch, list_offsets, metadata, produce
from tidelog.broker.kafka.producer_ids import ProducerIds
from tidelog.broker.kafka.server import KafkaServer
from tidelog.broker.kafka.services import ApiHandler, Services
from tidelog.broker.partitions.openings import LeaderNotAvailable, Openings
from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.broker.partitions.topic_config import log_config
from tidelog.broker.settings import GroupSettings, KafkaSettings, LogSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.slow_requests import SlowRequests
from tidelog.broker.txn.parts import TxnParts
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import UnknownTopicId
from tidelog.controller.model.levels import NEWEST
from tidelog.controller.model.records import TopicRecord
from tidelog.runtime.clock import Clock, SystemClock
from tidelog.runtime.errors import NotFound, NotLeader, TidelogError
from tidelog.runtime.network import Network, TcpNetwork
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import CommitObjects, CompactObjects, ObjectSlice
from tidelog.storage.inputs import ReplicaSetData
from tidelog.storage.settings import CacheSettings, StorageSettings, UploadSettings, WalSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.memory import MemoryWal
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_log import LedPartition, PartitionLog

APIS: list[ApiHandler] = [
    *produce.APIS,
    *fetch.APIS,
    *list_offsets.APIS,
    *leader_epoch.APIS,
    *init_producer_id.APIS,
    *metadata.APIS,
]
NODE_ID = 1
CLUSTER_ID = "admin-world-cluster-id"
DEADLINE_S = 60.0


class DataController(WorldController):
    """The controller's commands that storage and streams use."""

    @property
    def feature_level(self) -> int:
        return self.state.level

    async def open_streams(
        self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]
    ) -> list[OpenedStream]:
        rows = self.apply(c.OpenStreams(replica_set_id, master_epoch, tuple(streams)))
        return [OpenedStream(*row) for row in rows]

    async def close_streams(self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]) -> None:
        self.apply(c.CloseStreams(replica_set_id, master_epoch, tuple(streams)))

    async def trim_stream(
        self, replica_set_id: int, master_epoch: int, stream_id: int, epoch: int, start_offset: int
    ) -> None:
        self.apply(c.TrimStream(stream_id, epoch, start_offset, replica_set_id, master_epoch))

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        return int(self.apply(c.PrepareObjects(count, ttl_ms)))

    async def commit_objects(self, commit: CommitObjects) -> None:
        self.apply(c.Commit(commit))

    async def compact_objects(self, compaction: CompactObjects) -> None:
        self.apply(c.Compact(compaction))

    def check_current(self) -> None:
        """The metadata is current here."""

    def is_held(self, object_id: int) -> bool:
        return self.image.is_held(object_id)

    async def catch_up(self) -> None:
        """The metadata is current here."""

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        return self.image.resolve(stream_id, start_offset, end_offset)

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> Sequence[ObjectSlice]:
        return self.image.find_objects(stream_id, start_offset, end_offset, limit)

    def committed_wal_offset(self, replica_set_id: int) -> int:
        return self.image.replica_sets[replica_set_id].committed_wal_offset

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        self.apply(c.QuarantineStream(replica_set_id, master_epoch, stream_id, reason))

    def quarantined(self, stream_id: int) -> str:
        record = self.image.streams.get(stream_id)
        return record.quarantined if record is not None else ""

    async def hand_over(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[c.ClosedPartition]
    ) -> list[TidelogError | None]:
        return judged(await self._ask(c.HandOver(replica_set_id, master_epoch, tuple(partitions))))

    async def reclaim_partitions(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[tuple[bytes, int]]
    ) -> list[TidelogError | None]:
        return judged(await self._ask(c.ReclaimPartitions(replica_set_id, master_epoch, tuple(partitions))))

    async def allocate_producer_ids(self, broker_id: int, registration_epoch: int) -> tuple[int, int]:
        first, count = await self._ask(c.AllocateProducerIds(broker_id, registration_epoch))
        return first, count


class DataPartitions:
    """`PartitionManager` as far as the data path needs it."""

    def __init__(self, controller: DataController, storage: Storage, clock: Clock) -> None:
        self.storage = storage
        self._since = clock.monotonic
        self._controller = controller
        self.logs: dict[tuple[bytes, int], PartitionLog] = {}
        self.opened: list[Callable[[PartitionLog], None]] = []
        self.openings: Openings | None = None
        """Set: requests wait for partitions that are not open."""

    def on_opened(self, callback: Callable[[PartitionLog], None]) -> None:
        self.opened.append(callback)

    def on_closed(self, callback: Callable[[PartitionLog], None]) -> None:
        """Logs close only at the end."""

    def get(self, topic: str, partition: int) -> PartitionLog:
        topic_id = self._controller.image.topic_ids.get(topic)
        if topic_id is None:
            raise NotFound(f"topic {topic[:249]!r} does not exist")
        return self.get_by_id(topic_id, partition)

    def get_by_id(self, topic_id: bytes, partition: int) -> PartitionLog:
        log = self.logs.get((topic_id, partition))
        if log is not None:
            return log
        if topic_id not in self._controller.image.topics:
            raise UnknownTopicId(f"no topic {topic_id.hex()}")
        record = self._controller.image.partition(topic_id, partition)
        if record is None:
            raise NotFound(f"no partition {partition}")
        if self._controller.image.leader(record)[0] != NODE_ID:
            raise NotLeader("led elsewhere")
        opening = None
        if self.openings is not None:
            opening = self.openings.get((topic_id, partition), self._since())
        raise LeaderNotAvailable("opening", opening=opening)

    def leaving(self, topic_id: bytes, partition: int) -> None:
        """Nothing moves here."""

    def next_leader(self, topic_id: bytes, partition: int) -> tuple[int, int] | None:
        """Nothing moves here."""
        return None

    def all(self) -> Iterable[PartitionLog]:
        return list(self.logs.values())


class KafkaWorld:
    """A broker with id 1; with `brokers=(1, 2)` a second one exists in the metadata.

    `groups`: it coordinates groups and transactions. Their topics are to be created (`__consumer_offsets` and
    `__transaction_state`, 2 partitions each). Without them, `transactions` answers for the coordinators.
    """

    def __init__(
        self,
        *,
        brokers: Sequence[int] = (NODE_ID,),
        kafka: KafkaSettings | None = None,
        wal: WalSettings | None = None,
        upload: UploadSettings | None = None,
        cache: CacheSettings | None = None,
        apis: Sequence[ApiHandler] = APIS,
        clock: Clock | None = None,
        network: Network | None = None,
        groups: bool = False,
        level: int = NEWEST,
    ) -> None:
        self.kafka = kafka or KafkaSettings(port=0)
        self.controller = DataController(level)
        for broker in brokers:
            self.controller.register(broker)
        self._clock = clock or SystemClock()
        self._wal_settings = wal or WalSettings()
        self._upload = upload or UploadSettings(age_ms=3_600_000)
        self._cache = cache or CacheSettings()
        self._apis = apis
        self._network = network or TcpNetwork()
        self._with_groups = groups
        self._groups: GroupCoordinator | None = None
        self._txn: TxnParts | None = None
        self._held: int | None = None
        self._holding = False
        self.storage: Storage
        self.partitions: DataPartitions
        self.services: Services
        self.server: KafkaServer

    async def __aenter__(self) -> Self:
        self.transactions = ScriptedTransactions()
        self.wal = MemoryWal(self._wal_settings)
        self.store = MemoryObjectStore()
        self.storage = Storage(
            ReplicaSetData(CLUSTER_ID, NODE_ID, self.wal, self.store, self.controller, single_member=False),
            StorageSettings(self._upload, self._cache),
            self._clock,
            random.Random(1),
        )
        self.wal.set_on_durable(self._durable)
        await self.storage.recover()
        self._master_epoch = self.controller.image.replica_sets[NODE_ID].master_epoch
        await self.storage.start(self._master_epoch)
        self.partitions = DataPartitions(self.controller, self.storage, self._clock)
        parts: Any = SimpleNamespace()
        controller: Any = self.controller
        partitions: Any = self.partitions
        group = GroupSettings(offsets_topic_partitions=2)
        epoch = self.controller.image.brokers[NODE_ID].registration_epoch
        producer_ids = ProducerIds(controller, NODE_ID, lambda: epoch)
        if self._with_groups:
            self._groups = GroupCoordinator(partitions, controller, self._clock, group, random.Random(2))
            self._txn = TxnParts(
                NODE_ID,
                partitions=partitions,
                groups=self._groups,
                controller=controller,
                calls=PeerCalls(controller, self._network, None),
                clock=self._clock,
                settings=group,
                rng=random.Random(4),
            )
            await self._groups.start()
            self._txn.start(producer_ids.next_id)
        self.services = Services(
            node_id=NODE_ID,
            clock=self._clock,
            kafka=self.kafka,
            log=LogSettings(),
            group=group,
            controller=controller,
            partitions=partitions,
            groups=self._groups or parts,
            txn=self._txn.coordinator if self._txn is not None else parts,
            txn_requests=self._txn.requests if self._txn is not None else parts,
            marker_writer=self._txn.writer if self._txn is not None else parts,
            producer_ids=producer_ids,
            metrics=Metrics(process=False),
            fetch_sessions=FetchSessions(self.kafka.fetch_session_partitions, random.Random(3)),
            telemetry=ClientTelemetry(1 << 20, random.Random(4), ClientSubscriptions(lambda: controller.image).current),
            elections=ElectionWaits(lambda: controller.image, self._clock, tuple),
            slow_requests=SlowRequests(self.kafka.slow_requests) if self.kafka.slow_requests else None,
            transactions=self._txn.admission if self._txn is not None else self.transactions,
        )
        self.server = KafkaServer(self.services, self._apis, self._network, self.kafka)
        await self.server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        if self._groups is not None:
            await self._groups.close()
        if self._txn is not None:
            await self._txn.close()
        await self.server.close(grace_s=1.0)
        await self.services.producer_ids.close()
        for log in self.partitions.all():
            await log.close()
        await self.storage.close(upload=False)

    def _durable(self, offset: int) -> None:
        if self._holding:
            self._held = offset
        else:
            self.storage.confirm.advance(offset)

    def hold(self) -> None:
        """Confirm nothing from now on."""
        self._holding = True

    def release(self) -> None:
        """Confirm what became durable meanwhile, and what comes."""
        self._holding = False
        if self._held is not None:
            self.storage.confirm.advance(self._held)
            self._held = None

    def client(self) -> KafkaClient:
        return KafkaClient(*self.server.address)

    async def topic(self, name: str, partitions: int = 1, *, open_logs: bool = True, **configs: str) -> TopicRecord:
        """Create a topic and open its partitions here. `retention_ms="1"` stands for `retention.ms`."""
        overrides = {key.replace("_", "."): value for key, value in configs.items()}
        record = await self.controller.create_topic(name, partitions, overrides, assignment=[NODE_ID] * partitions)
        if open_logs:
            for index in range(partitions):
                await self.open(record, index)
        return record

    async def open(self, topic: TopicRecord, index: int, *, leader_epoch: int | None = None) -> PartitionLog:
        """Open a partition's log, with its leader epoch or a larger one."""
        record = self.controller.image.partition(topic.id, index)
        assert record is not None
        epoch = self.controller.image.leader(record)[1] if leader_epoch is None else leader_epoch
        wanted = [(record.first_stream + n, epoch) for n in range(4)]
        meta, data, time, txn = await self.controller.open_streams(NODE_ID, self._master_epoch, wanted)
        log = self.partitions.logs[topic.id, index] = await PartitionLog.open(
            led=LedPartition(topic.name, topic.id, index, epoch, record.first_stream in self.controller.image.branches),
            streams=(meta, data, time, txn),
            storage=self.storage,
            manager=self.controller,
            config=log_config(topic.configs, self.kafka, LogSettings()),
            clock=self._clock,
        )
        for callback in self.partitions.opened:
            callback(log)
        if self.partitions.openings is not None:
            self.partitions.openings.end((topic.id, index))
        return log

    async def chill(self) -> None:
        """Put all that is confirmed into the bucket and none of it in memory."""
        await self.storage.upload_now()
        self.storage.forget_uploaded()

    def log(self, topic: str, partition: int = 0) -> PartitionLog:
        return self.partitions.get(topic, partition)


def batch(*values: bytes, timestamp: int = -1, **options: Any) -> bytes:
    """A record batch as a producer sends it."""
    now = SystemClock().time_ms() if timestamp < 0 else timestamp
    return bytes(build_batch([Record(n, now + n, None, value, ()) for n, value in enumerate(values)], **options))


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds, with a deadline."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not in time: {what}") from None
