"""The clients of a simulation, and the history of their operations.

Each actor is a task with its own random generator, in a life that no fault ends, on a host that faults can cut off like
any other. Actors run until `World.closing`; every result, with its time, is in the history.

`tidelog.simulation.actors.cast` draws the actors. This module has the producers; `consumers`, `groups` and `topics` of
`tidelog.simulation.actors` have others. Entry: `Workload.settle`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from tidelog.batch.batch import Record, build_batch
from tidelog.simulation.actors import kafka, kafka_ids
from tidelog.simulation.actors.client import Client, Lost
from tidelog.simulation.actors.kafka import Request
from tidelog.simulation.checkers import Finding
from tidelog.simulation.checkers.history import History, Op
from tidelog.simulation.world.clock import EPOCH_MS
from tidelog.simulation.world.cluster import SimCluster
from tidelog.simulation.world.loop import START_S, Life, VirtualLoop

ASK_S = 4.0
"""How long a client waits for a response."""
DELIVERY_S = 12.0
"""How long a producer tries to deliver a batch."""
MISSED_ANSWERS = 0.03
"""The share of acknowledgements that a producer ignores."""
MISSED_FOR_S = 3.0
OLDER_EVERY, OLDER_MS, OLDER_STEP = 7, 20_000, 7_919
"""One value in `OLDER_EVERY` has a timestamp that is older than the time when it is sent, by up to `OLDER_MS` ms."""

RETENTION = frozenset(("retention.bytes", "retention.ms"))
"""Configs by which retention deletes."""

MAX_RECORD_BYTES = 1_200
"""The most that a record of these producers takes in a log, with a batch of its own."""

MAX_FOUND = 5
"""Maximum number of findings of clients: their cause recurs with each retry."""

OUT_OF_ORDER = 45
DUPLICATE_SEQUENCE = 46
FOR_GOOD = (32,)
"""INVALID_TIMESTAMP, while a clock is wrong: a producer gives such a batch up, and what follows it is out of order."""
SESSION_ENDED = (OUT_OF_ORDER, 47, 59)
"""OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH, UNKNOWN_PRODUCER_ID."""


@dataclass(slots=True)
class Topic:
    """A topic of the workload."""

    name: str
    """In the history: `t3@2` is the second topic of the name t3."""
    partitions: int
    deletes: bool
    """Records may be deleted from it by DeleteRecords. Each such request is in the history."""
    configs: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """What else of it is in the history."""
    temporary: bool = False
    """The topic may be deleted."""
    exists: bool = False
    gone: bool = False
    """Its deletion was requested; with topic ids, it was acknowledged."""
    deleted: bool = False
    """Its deletion was acknowledged as done, not as that of an unknown topic."""
    id: bytes = b""
    """Known if clients use topic ids."""

    @property
    def wire(self) -> str:
        """Its name in Kafka requests."""
        return self.name.partition("@")[0]

    @property
    def expires(self) -> bool:
        """Whether retention may delete from it while a simulation lasts. By default it would after a week."""
        return not RETENTION.isdisjoint(self.configs)

    @property
    def keeps(self) -> int:
        """How many of its newest records retention leaves at least, if all that deletes is retention by size."""
        deletes = {name for name in self.configs if name in RETENTION or name == "cleanup.policy"}
        return int(self.configs["retention.bytes"]) // MAX_RECORD_BYTES if deletes == {"retention.bytes"} else 0


@dataclass(slots=True)
class Workload:
    """All actors, and their shared state."""

    loop: VirtualLoop
    cluster: SimCluster
    rng: random.Random
    history: History
    topics: list[Topic] = field(default_factory=list)
    by_id: bool = False
    """Whether clients use topic ids, so that topic names may be reused."""
    ids: dict[str, bytes] = field(default_factory=dict)
    """Topic ids by the topic's name in the history, if clients use topic ids."""
    closing: bool = False
    findings: list[Finding] = field(default_factory=list)
    """Findings of clients that the history cannot express."""
    commits: dict[str, list[Op]] = field(default_factory=dict)
    """By topic name in requests: commits that may apply to a later topic of that name."""
    life: Life = field(default_factory=lambda: Life("clients"))
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _processes: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _values: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _transactions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _hosts: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def now_us(self) -> int:
        """Virtual microseconds since the start."""
        return round((self.loop.time() - START_S) * 1e6)

    def time_ms(self) -> int:
        """The clients' wall clock, for timestamps of records."""
        return EPOCH_MS + self.now_us() // 1000

    def record_times(self, values: list[int]) -> list[int]:
        """Timestamps of the records with these values, in ms: now, and of some an older time."""
        now_ms = self.time_ms()
        return [now_ms if value % OLDER_EVERY else now_ms - value * OLDER_STEP % OLDER_MS for value in values]

    def process(self) -> int:
        """A new process of the history."""
        return next(self._processes)

    def transaction(self) -> int:
        """A new number of a transaction."""
        return next(self._transactions)

    def values(self, count: int) -> list[int]:
        """Return unused values."""
        return [next(self._values) for _ in range(count)]

    def client(self) -> Client:
        """Return a client on its own host."""
        host = f"k{next(self._hosts)}"
        return Client(self.cluster.network.host(host), host, self.cluster.bootstrap, self.ids)

    def random(self) -> random.Random:
        """Return a random generator for one actor, so that actors do not affect each other's draws."""
        return random.Random(self.rng.getrandbits(64))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start an actor."""
        self.tasks.append(self.life.spawn(self.loop, work, name))

    def found(self, rule: str, message: str) -> None:
        """Record a result that a client must never get."""
        if len(self.findings) < MAX_FOUND:
            self.findings.append(Finding(rule=rule, message=message))

    def refused(self, topic: Topic, partition: int, process: int, code: int) -> None:
        """Record an idempotent producer's batch, after an acknowledged one, that was refused as out of order."""
        if not topic.gone:
            said = (
                f"{topic.name}-{partition}: process {process} sent the batch that follows what was acknowledged to it"
            )
            self.found("sequence-refused", f"{said}, and got error {code}")

    def gap_refused(self, topic: Topic, partition: int, process: int) -> None:
        """Record an idempotent producer's batch behind a refused one that was refused as out of order.

        librdkafka takes that for a loss, and doubles records of other partitions.
        """
        if not topic.gone:
            said = f"{topic.name}-{partition}: process {process} sent a batch behind one that was refused"
            self.found("sequence-refused", f"{said}, and got error {OUT_OF_ORDER}")

    def existing(self) -> list[Topic]:
        """The topics that exist."""
        return [topic for topic in self.topics if topic.exists and not topic.gone]

    def produce(self, topic: Topic, partition: int, batch: bytes, acks: int) -> Request:
        """Build the request that sends a batch."""
        if self.by_id:
            return kafka_ids.produce(topic.id, partition, batch, acks, 3_000)
        return kafka.produce(topic.name, partition, batch, acks, 3_000)

    def doubt(self, op: Op) -> None:
        """Record a commit by topic name that may have been applied to any topic of that name."""
        topics = [topic for topic in self.topics if topic.wire == op.topic.partition("@")[0]]
        self.commits.setdefault(topics[0].name, []).append(op)
        at = [topic.name for topic in topics].index(op.topic)
        for topic in topics[at + 1 :]:
            self.inherit(op, topic)

    def inherit(self, op: Op, topic: Topic) -> None:
        """Attribute the doubtful commits to `topic`, too."""
        other = self.history.begin(
            "commit",
            op.process,
            op.began_us,
            topic=topic.name,
            partition=op.partition,
            offset=op.offset,
            group=op.group,
        )
        self.history.end(other, "info", self.now_us(), error=f"commit {op.index}, by name")

    # Start and end

    async def create(self, topic: Topic) -> None:
        """Create a topic; retry until it exists."""
        rng, client = self.random(), self.client()
        about = {"topic": topic.name, "deletes": topic.expires, "keeps": topic.keeps, **topic.about}
        op = self.history.begin("create_topic", self.process(), self.now_us(), **about)
        while True:
            try:
                error, _ = await client.ask_any(
                    kafka.create_topic(topic.wire, topic.partitions, topic.configs, 3_000), ASK_S
                )
                # TOPIC_ALREADY_EXISTS: an earlier attempt succeeded
                if error in (0, 36) and (not self.by_id or await self._learn_id(client, topic)):
                    break
            except Lost:
                pass
            await asyncio.sleep(rng.uniform(0.1, 0.5))
        self.history.end(op, "ok", self.now_us())
        topic.exists = True
        client.close()

    async def _learn_id(self, client: Client, topic: Topic) -> bool:
        """Request the id of the topic just created; False if the existing topic is older."""
        _, error, found, partitions = await client.ask_any(kafka_ids.metadata(kafka_ids.NO_ID, topic.wire), ASK_S)
        if error or not partitions:
            return False
        older = next((each for each in self.topics if each.id == found), None)
        if older is not None:  # this broker is behind, or the one was that did not know it when it was to be deleted
            if not older.deleted:
                await client.ask_any(kafka_ids.delete_topic(found, 3_000), ASK_S)
            return False
        topic.id = self.ids[topic.name] = found
        topic.partitions = len(partitions)  # a lost attempt may be applied late, and with another number of partitions
        return True

    async def settle(self) -> None:
        """Let all actors complete."""
        self.closing = True
        await asyncio.wait(self.tasks)
        for task in self.tasks:
            task.result()


class Actor:
    """An actor with a client, a random generator, and a process in the history."""

    def __init__(self, workload: Workload) -> None:
        self._w = workload
        self._rng = workload.random()
        self._client = workload.client()
        self._process = workload.process()


class Producer(Actor):
    """Sends batches sequentially to random partitions, and retries each for `DELIVERY_S`."""

    def __init__(self, workload: Workload, *, idempotent: bool) -> None:
        super().__init__(workload)
        self._idempotent = idempotent
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[tuple[str, int], int] = {}
        self._interval_s = self._rng.uniform(0.05, 0.5)

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.expovariate(1 / self._interval_s))
            topics = self.topics()
            if not topics:
                continue
            topic = rng.choice(topics)
            if self._idempotent and self._producer is None and not await self._begin_session():
                continue
            await self._send(topic, rng.randrange(topic.partitions))
        self._client.close()

    def topics(self) -> list[Topic]:
        """The topics to send to."""
        return self._w.existing()

    async def _begin_session(self) -> bool:
        try:
            error, producer_id, epoch = await self._client.ask_any(kafka.init_producer_id(), ASK_S)
        except Lost:
            return False
        if error == 0:
            self._process = self._w.process()
            self._producer = producer_id, epoch
            self._sequences.clear()
        return bool(error == 0)

    async def _send(self, topic: Topic, partition: int) -> None:
        w, rng = self._w, self._rng
        values = w.values(rng.randint(1, 5))
        acks = -1 if self._idempotent or rng.random() < 0.7 else 1
        records, told = self.records(values)
        batch = self._batch(records, self._sequences.get((topic.name, partition), 0))
        op = w.history.begin(
            "send", self._process, w.now_us(), topic=topic.name, partition=partition, values=values,
            idempotent=self._idempotent, acks=acks, **told,
        )  # fmt: skip
        deadline = w.loop.time() + DELIVERY_S
        sent = False
        error = ""
        while True:
            try:
                code, offset, answered = await self._attempt(topic, partition, batch, acks)
                sent = sent or answered
                error = f"error {code}"
            except Lost as lost:
                sent = sent or not lost.unsent
                code, error = -1, str(lost)
            if code == 0:
                offsets = list(range(offset, offset + len(values))) if offset >= 0 else []
                w.history.end(op, "ok", w.now_us(), offsets=offsets)
                self._sequences[topic.name, partition] = self._sequences.get((topic.name, partition), 0) + len(values)
                return
            if code == DUPLICATE_SEQUENCE:
                w.history.end(op, "ok", w.now_us())
                self._sequences[topic.name, partition] = self._sequences.get((topic.name, partition), 0) + len(values)
                return
            if code in SESSION_ENDED and self._sequences.get((topic.name, partition)):
                w.refused(topic, partition, self._process, code)
            retry = self._idempotent or not sent
            if code in SESSION_ENDED or not retry or topic.gone or w.loop.time() >= deadline:
                break
            await asyncio.sleep(rng.uniform(0.02, 0.2))
        w.history.end(op, "info" if sent else "fail", w.now_us(), error=error)
        self._producer = None  # its sequence number is unknown from here on
        if not self._idempotent:
            self._process = w.process()

    async def _attempt(self, topic: Topic, partition: int, batch: bytes, acks: int) -> tuple[int, int, bool]:
        """Return error, offset, and whether a request was sent to a broker."""
        try:
            address = await self._client.leader(topic.name, partition)
        except Lost:
            address = None
        if address is None:
            await asyncio.sleep(0.1)
            return -1, -1, False
        try:
            found = await self._client.ask(address, self._w.produce(topic, partition, batch, acks), ASK_S)
        except Lost:
            self._client.forget(topic.name, partition)
            raise
        if found.error:
            self._client.forget(topic.name, partition, found.leader)
        elif self._rng.random() < MISSED_ANSWERS:  # the batch is sent again after a long pause
            await asyncio.sleep(self._rng.uniform(0, MISSED_FOR_S))
            raise Lost("the answer was missed")
        return found.error, found.offset, True

    def records(self, values: list[int]) -> tuple[list[Record], dict[str, Any]]:
        """Return the records of a batch, and what else of them goes into the history."""
        times = self._w.record_times(values)
        padding = b"x" * self._rng.choice((0, 10, 100, 1000))
        timed = zip(values, times, strict=True)
        return [Record(0, time_ms, None, b"%d|%b" % (value, padding), ()) for value, time_ms in timed], {"times": times}

    def _batch(self, records: list[Record], sequence: int) -> bytes:
        if self._producer is None:
            return build_batch(records)
        producer_id, epoch = self._producer
        return build_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
