"""One broker's services for the admin handlers: the real controller state and image, partition logs that only remember.

    world = AdminWorld()
    answer = world.call(topics.APIS, 19, version, topics=[...])

`call` sends the request through bytes both ways, so that what it returns is what a client would read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from kio.index import load_request_schema

from tests.support import schema
from tidelog.broker.kafka.client_subscriptions import ClientSubscriptions
from tidelog.broker.kafka.client_telemetry import ClientTelemetry
from tidelog.broker.kafka.election_waits import ElectionWaits
from tidelog.broker.kafka.fetch_sessions import FetchSessions
from tidelog.broker.kafka.services import ApiHandler, RequestContext, Services
from tidelog.broker.kafka.wire.messages import REQUESTS
from tidelog.broker.kafka.wire.messages.base import KafkaResponse
from tidelog.broker.kafka.wire.reader import request_reader
from tidelog.broker.partitions.topic_config import log_config
from tidelog.broker.settings import GroupSettings, KafkaSettings, LogSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.controller.active.levels import LevelRaise
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.client.leases import LeaseClient
from tidelog.controller.client.replica_sets import ReplicaSetClient
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import ErrorInfo, UnknownTopicId, from_wire
from tidelog.controller.model.levels import NEWEST
from tidelog.controller.model.records import STREAMS_PER_PARTITION, TopicRecord
from tidelog.controller.model.replication import PolicyRecord
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import NotFound, NotLeader, TidelogError, Unavailable
from tidelog.stream.partition_log import ProducerInfo

NODE_ID = 1
CLUSTER_ID = "admin-world-cluster-id"


class Opening(Unavailable):
    kafka_code = 5


class OutOfRange(NotFound):
    kafka_code = 1


class WorldController:
    """`ControllerClient`'s commands, applied at once to a real state machine."""

    def __init__(self, level: int = NEWEST) -> None:
        self.format_version = level + 1
        self.state = ControllerState()
        self.image = Image()
        self.commands: list[str] = []
        self.subscribers: list[Callable[[Delta], None]] = []
        self.gate: asyncio.Event | None = None
        """While set and not triggered, commands hang."""
        self.late: list[Delta] | None = None
        """Deltas that the image does not have yet; None: it is never behind."""
        self.members: dict[int, str] = {}
        """Controllers of the quorum; none but this one answers."""
        self.opens_at_once = False
        """Partitions are opened as soon as they are created."""
        self.replica_sets = ReplicaSetClient(self._send)
        self.leases = LeaseClient(self._send)
        self._index = 0
        self._ids = 0
        self.apply(c.BecomeActive(1, 1, CLUSTER_ID, 60_000))
        self.commands.clear()

    def apply(self, command: Any) -> Any:
        self._index += 1
        self.commands.append(type(command).__name__)
        applied = self.state.apply(
            c.Envelope(self.format_version, 1, 1_700_000_000_000, "", 0, 0, command), self._index
        )
        delta = Delta(self._index, applied.mutations)
        if self.late is None:
            self._learn(delta)
        else:
            self.late.append(delta)
        result = msgspec.msgpack.decode(applied.result, type=c.Result)
        if result.error is not None:
            raise from_wire(result.error)
        return msgspec.msgpack.decode(result.value)

    def _learn(self, delta: Delta) -> None:
        self.image.apply(delta)
        for callback in list(self.subscribers):
            callback(delta)

    async def _ask(self, command: Any) -> Any:
        """Apply a command; the image has its effect, or what it was refused for."""
        if self.gate is not None:
            await self.gate.wait()
        try:
            return self.apply(command)
        finally:
            await self.catch_up()

    async def _send(self, command: c.AnyCommand, kind: Any, *, after_all: bool = False) -> Any:
        return msgspec.convert(await self._ask(command), kind)

    def subscribe(self, callback: Callable[[Delta], None]) -> Callable[[], None]:
        self.subscribers.append(callback)
        return lambda: self.subscribers.remove(callback)

    def register(self, broker_id: int, port: int = 0) -> None:
        port = port or 9091 + broker_id
        self.apply(c.RegisterBroker(broker_id, f"code{broker_id}", f"inc{broker_id}", "127.0.0.1", port, "", ""))
        self.apply(c.Elect(broker_id, broker_id))

    def replicate(self, replica_set: int, *members: int, learner: int = -1) -> None:
        """Make these brokers members of a replica set, all in sync."""
        home = self.image.replica_sets[replica_set].master
        self.apply(r.SetReplicaSetPolicy(replica_set, PolicyRecord(len(members), len(members) // 2 + 1, 1)))
        for each in sorted({*members, *([learner] if learner >= 0 else [])}, key=lambda each: (each != home, each)):
            epoch = self.image.brokers[each].registration_epoch
            if each != home:
                self.apply(r.AssignReplica(replica_set, each, each == learner))
            self.apply(r.AddReplica(replica_set, each, epoch, f"wal-{each}", each == learner))
        self.put_in_sync(replica_set, *members)

    def put_in_sync(self, replica_set: int, *members: int) -> None:
        """The master asks for this SyncStateSet."""
        record = self.image.replica_sets[replica_set]
        told = tuple(r.ReportedMember(each, f"wal-{each}") for each in sorted(members))
        master = self.image.brokers[record.master]
        numbers = master.id, master.registration_epoch, record.master_epoch, record.sync_state_set_epoch
        quorum = self.image.replication[replica_set].policy.in_sync_replicas
        self.apply(r.AlterSyncStateSet(replica_set, *numbers, told, quorum))

    def promise(self, replica_set: int, *members: int, end_offset: int = 100) -> None:
        """Members promise the epoch of the election."""
        for each in members:
            record, epoch = self.image.replica_sets[replica_set], self.image.brokers[each].registration_epoch
            last = record.master_epoch - 1
            self.apply(
                r.PromiseEpoch(replica_set, record.master_epoch, each, epoch, f"wal-{each}", last, end_offset, 0)
            )

    def set_alive(self, broker_id: int, alive: bool) -> None:
        epoch = self.image.brokers[broker_id].registration_epoch
        self.apply(c.SetBrokerAlive(broker_id, epoch, alive))

    async def upgrade(self, level: int = -1, *, dry_run: bool) -> dict[str, Any]:
        role = ActiveRole(lambda: self.image, self._ask, lambda: True, lambda: 0)
        raising = LevelRaise(role, NODE_ID, lambda: self.members, self._no_member, lambda: 0, asyncio.Lock())
        return await raising.run(level, dry_run=dry_run)

    @staticmethod
    async def _no_member(address: str) -> dict[str, Any]:
        raise Unavailable(f"no controller is at {address}")

    async def create_topic(
        self,
        name: str,
        partitions: int,
        configs: dict[str, str],
        *,
        internal: bool = False,
        validate_only: bool = False,
        assignment: list[int] | None = None,
        replicas: int = 0,
    ) -> TopicRecord:
        self._ids += 1
        topic_id = self._ids.to_bytes(16, "big")
        chosen = None if assignment is None else tuple(assignment)
        value = await self._ask(
            c.CreateTopic(topic_id, name, partitions, configs, internal, validate_only, chosen, replicas=replicas)
        )
        return self._created(msgspec.convert(value, TopicRecord))

    def open_partitions(self, name: str) -> None:
        """Open the streams of a topic's partitions, as their leaders do: only then clients are told of the leaders."""
        for partition in self.image.partitions(self.image.topic_ids[name]):
            placed = self.image.replica_sets[partition.replica_set]
            epoch = self.image.leader(partition)[1]
            streams = tuple((partition.first_stream + n, epoch) for n in range(STREAMS_PER_PARTITION))
            self.apply(c.OpenStreams(placed.id, placed.master_epoch, streams))

    async def delete_topic(self, topic_id: bytes) -> None:
        await self._ask(c.DeleteTopic(topic_id))

    async def create_partitions(
        self, topic_id: bytes, total: int, *, assignment: Sequence[int] | None = None, validate_only: bool = False
    ) -> TopicRecord:
        chosen = None if assignment is None else tuple(assignment)
        value = await self._ask(c.CreatePartitions(topic_id, total, chosen, validate_only))
        return self._created(msgspec.convert(value, TopicRecord))

    def _created(self, topic: TopicRecord) -> TopicRecord:
        if self.opens_at_once and topic.name in self.image.topic_ids:
            self.open_partitions(topic.name)
        return topic

    async def catch_up(self) -> None:
        while self.late:
            self._learn(self.late.pop(0))

    async def alter_topic_configs(self, topic_id: bytes, changes: dict[str, str | None], *, base: bytes = b"") -> None:
        await self._ask(c.AlterTopicConfigs(topic_id, changes, base))

    async def put_kv(self, key: str, value: bytes) -> None:
        await self._ask(c.PutKv(key, value))

    async def alter_configs(self, kind: str, name: str, changes: dict[str, str | None], *, base: bytes = b"") -> None:
        await self._ask(c.AlterConfigs(kind, name, changes, base))

    async def move_partitions(self, moves: Sequence[c.PartitionMove]) -> list[TidelogError | None]:
        return judged(await self._ask(c.MovePartitions(tuple(moves))))

    async def elect_partitions(self, partitions: Sequence[tuple[bytes, int]]) -> list[TidelogError | None]:
        return judged(await self._ask(c.ElectPartitions(tuple(partitions))))


def judged(found: list[Any]) -> list[TidelogError | None]:
    return [None if info is None else from_wire(msgspec.convert(info, ErrorInfo)) for info in found]


class WorldLog:
    """What the admin handlers use of a partition log."""

    def __init__(self, topic: TopicRecord, partition: int) -> None:
        self.topic = topic.name
        self.topic_id = topic.id
        self.partition = partition
        self.config = log_config(topic.configs, KafkaSettings(), LogSettings())
        self.log_start_offset = 0
        self.high_watermark = 100
        self.states: list[ProducerInfo] = []

    def size_bytes(self) -> int:
        return 1000 + self.partition

    def producers(self) -> list[ProducerInfo]:
        return self.states

    async def wait_inherited(self) -> bool:
        return True

    async def delete_records(self, before_offset: int) -> int:
        wanted = self.high_watermark if before_offset == -1 else before_offset
        if not 0 <= wanted <= self.high_watermark:
            raise OutOfRange(f"offset {before_offset} is past the high watermark {self.high_watermark}")
        self.log_start_offset = max(self.log_start_offset, wanted)
        return self.log_start_offset


class WorldPartitions:
    """`PartitionManager`: opens what the image places here after it was asked for `lag` times."""

    def __init__(self, controller: WorldController, lag: int = 0) -> None:
        self._controller = controller
        self._logs: dict[tuple[bytes, int], WorldLog] = {}
        self._asked: dict[tuple[bytes, int], int] = {}
        self.lag = lag

    def get(self, topic: str, partition: int) -> WorldLog:
        record = self._controller.image.topic(topic)
        if record is None:
            raise NotFound(f"topic {topic[:249]!r} does not exist")
        return self.get_by_id(record.id, partition)

    def get_by_id(self, topic_id: bytes, partition: int) -> WorldLog:
        image = self._controller.image
        topic = image.topics.get(topic_id)
        if topic is None:
            raise UnknownTopicId(f"no topic {topic_id.hex()}")
        placed = image.partition(topic_id, partition)
        if placed is None:
            raise NotFound(f"no partition {partition}")
        if image.leader(placed)[0] != NODE_ID:
            raise NotLeader("led elsewhere")
        key = (topic_id, partition)
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] <= self.lag:
            raise Opening("opening")
        return self._logs.setdefault(key, WorldLog(topic, partition))

    def all(self) -> Iterable[WorldLog]:
        return list(self._logs.values())


class AdminWorld:
    """A broker with id 1 in a cluster of `brokers` (default: only itself)."""

    def __init__(
        self, brokers: Sequence[int] = (NODE_ID,), lag: int = 0, level: int = NEWEST, **broker_configs: str
    ) -> None:
        self.controller = WorldController(level)
        for broker in brokers:
            self.controller.register(broker)
        self.partitions = WorldPartitions(self.controller, lag)
        configs = {key.replace("__", "."): value for key, value in broker_configs.items()}
        parts: Any = SimpleNamespace()
        self.subscriptions = ClientSubscriptions(lambda: self.controller.image)
        self.services = Services(
            node_id=NODE_ID,
            clock=SystemClock(),
            kafka=KafkaSettings(),
            log=LogSettings(),
            group=GroupSettings(),
            controller=self.controller,  # type: ignore[arg-type]
            partitions=self.partitions,  # type: ignore[arg-type]
            groups=parts,
            txn=parts,
            txn_requests=parts,
            marker_writer=parts,
            producer_ids=parts,
            metrics=Metrics(process=False),
            fetch_sessions=FetchSessions(0, random.Random(3)),
            telemetry=ClientTelemetry(
                1 << 20, random.Random(4), ClientSubscriptions(lambda: self.controller.image).current
            ),
            elections=ElectionWaits(lambda: self.controller.image, SystemClock(), tuple),
            broker_configs=lambda: configs,
        )

    def topic(self, name: str, partitions: int = 1, **configs: str) -> TopicRecord:
        """Create a topic directly; `retention_ms="1"` stands for `retention.ms`."""
        overrides = {key.replace("_", "."): value for key, value in configs.items()}
        return asyncio.run(self.controller.create_topic(name, partitions, overrides))

    def call(self, apis: list[ApiHandler], api_key: int, version: int, **fields: Any) -> Any:
        return asyncio.run(self.acall(apis, api_key, version, **fields))

    async def acall(self, apis: list[ApiHandler], api_key: int, version: int, **fields: Any) -> Any:
        """One request through its bytes, its handler, and the response's bytes."""
        handler = next(api for api in apis if api.api_key == api_key)
        assert handler.min_version <= version <= handler.max_version
        request_class = load_request_schema(api_key, version)
        entity = schema.request(api_key, version).make(request_class.__name__, **fields)
        request = request_reader(request_class, REQUESTS[api_key])(schema.body(entity), 0)
        context = RequestContext(self.services, api_key, version, 7, "test", "127.0.0.1")
        response = await handler.handle(context, request)
        assert isinstance(response, KafkaResponse)
        return schema.read_response(api_key, version, response)


def versions(apis: list[ApiHandler], api_key: int) -> range:
    """Every version served of an API."""
    handler = next(api for api in apis if api.api_key == api_key)
    return range(handler.min_version, handler.max_version + 1)


def part(api_key: int, version: int, message: str, /, **fields: Any) -> Any:
    """A nested message of a request."""
    return schema.request(api_key, version).make(message, **fields)
