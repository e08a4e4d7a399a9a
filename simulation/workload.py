"""What clients do in a simulation, and the history that they write of it.

Each actor is a task with a random generator of its own, in one life that nothing ends, on hosts that faults can cut off
like any other. Actors go on until `World.closing`; whatever they were told, and when, is in the history.

Who takes part is drawn in `simulation.cast`. Here are those who produce; `simulation.consumers`, `groups` and `topics`
have others. Entry: `Workload.settle`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from simulation import kafka, kafka_ids
from simulation.checkers import Finding
from simulation.client import Client, Lost
from simulation.clock import EPOCH_MS
from simulation.cluster import Cluster
from simulation.history import History, Op
from simulation.kafka import Request
from simulation.loop import START_S, Life, VirtualLoop
from storage.record_batch import Record, build_batch

ASK_S = 4.0
"""How long a client waits for an answer."""
DELIVERY_S = 12.0
"""How long a producer tries to deliver a batch."""
MISSED_ANSWERS = 0.03
"""The share of acknowledgements that a producer does not take notice of."""
MISSED_FOR_S = 3.0

MAX_FOUND = 5
"""Findings of clients: what leads to them is tried again and again."""

DUPLICATE_SEQUENCE = 46
SESSION_ENDED = (45, 47, 59)
"""OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH, UNKNOWN_PRODUCER_ID."""


@dataclass(slots=True)
class Topic:
    """A topic as the workload knows it."""

    name: str
    """In the history: `t3@2` is the second topic of the name t3."""
    partitions: int
    deletes: bool
    """Records are deleted from it on purpose."""
    configs: dict[str, str] = field(default_factory=dict)
    temporary: bool = False
    """It may be deleted as a whole."""
    exists: bool = False
    gone: bool = False
    """Its deletion was asked for; if topics are named by id, it was answered."""
    id: bytes = b""
    """Known if topics are named by id."""

    @property
    def wire(self) -> str:
        """Its name, as brokers know it."""
        return self.name.partition("@")[0]


@dataclass(slots=True)
class Workload:
    """All actors, and what they have in common."""

    loop: VirtualLoop
    cluster: Cluster
    rng: random.Random
    history: History
    topics: list[Topic] = field(default_factory=list)
    by_id: bool = False
    """Whether clients name topics by id, so that topics may be created again under an old name."""
    ids: dict[str, bytes] = field(default_factory=dict)
    """By the topic's name in the history, if topics are named by id."""
    closing: bool = False
    findings: list[Finding] = field(default_factory=list)
    """What clients saw that no history has a place for."""
    commits: dict[str, list[Op]] = field(default_factory=dict)
    """By topic name as brokers know it: commits that may have been, or may still be, of a later topic of that name."""
    life: Life = field(default_factory=lambda: Life("clients"))
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _processes: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _values: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _hosts: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def now_us(self) -> int:
        """Virtual microseconds since the beginning."""
        return round((self.loop.time() - START_S) * 1e6)

    def process(self) -> int:
        """A new process of the history."""
        return next(self._processes)

    def values(self, count: int) -> list[int]:
        """Values that nobody used before."""
        return [next(self._values) for _ in range(count)]

    def client(self) -> Client:
        """A client on a host of its own."""
        host = f"k{next(self._hosts)}"
        return Client(self.cluster.network.host(host), host, self.cluster.bootstrap, self.ids)

    def random(self) -> random.Random:
        """A generator for one actor: what one does leaves the others' draws alone."""
        return random.Random(self.rng.getrandbits(64))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start an actor."""
        self.tasks.append(self.life.spawn(self.loop, work, name))

    def found(self, rule: str, message: str) -> None:
        """A client was told what it must never be told."""
        if len(self.findings) < MAX_FOUND:
            self.findings.append(Finding(rule=rule, message=message))

    def refused(self, topic: Topic, partition: int, process: int, code: int) -> None:
        """The batch that follows one that was acknowledged to the same idempotent producer is out of order."""
        if not topic.gone:
            said = (
                f"{topic.name}-{partition}: process {process} sent the batch that follows what was acknowledged to it"
            )
            self.found("sequence-refused", f"{said}, and was told error {code}")

    def existing(self) -> list[Topic]:
        """Topics that can be used."""
        return [topic for topic in self.topics if topic.exists and not topic.gone]

    def produce(self, topic: Topic, partition: int, batch: bytes, acks: int) -> Request:
        """The request that sends a batch."""
        if self.by_id:
            return kafka_ids.produce(topic.id, partition, batch, acks, 3_000)
        return kafka.produce(topic.name, partition, batch, acks, 3_000)

    def doubt(self, op: Op) -> None:
        """A commit names its topic, and nobody knows which one of that name was there when a broker took it."""
        topics = [topic for topic in self.topics if topic.wire == op.topic.partition("@")[0]]
        self.commits.setdefault(topics[0].name, []).append(op)
        at = [topic.name for topic in topics].index(op.topic)
        for topic in topics[at + 1 :]:
            self.inherit(op, topic)

    def inherit(self, op: Op, topic: Topic) -> None:
        """A doubtful commit may be one of `topic`."""
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

    # Beginning and end

    async def create(self, topic: Topic) -> None:
        """Create a topic; tries until it is there."""
        rng, client = self.random(), self.client()
        op = self.history.begin("create_topic", self.process(), self.now_us(), topic=topic.name, deletes=topic.deletes)
        while True:
            try:
                error, _ = await client.ask_any(
                    kafka.create_topic(topic.wire, topic.partitions, topic.configs, 3_000), ASK_S
                )
                # TOPIC_ALREADY_EXISTS: an earlier attempt did it
                if error in (0, 36) and (not self.by_id or await self._learn_id(client, topic)):
                    break
            except Lost:
                pass
            await asyncio.sleep(rng.uniform(0.1, 0.5))
        self.history.end(op, "ok", self.now_us())
        topic.exists = True
        client.close()

    async def _learn_id(self, client: Client, topic: Topic) -> bool:
        """Ask for the id of what has just been created; False if what is there is older."""
        _, error, found, partitions = await client.ask_any(kafka_ids.metadata(kafka_ids.NO_ID, topic.wire), ASK_S)
        if error or not partitions:
            return False
        if found in self.ids.values():  # whoever deleted it was told too early that it is gone
            await client.ask_any(kafka_ids.delete_topic(found, 3_000), ASK_S)
            return False
        topic.id = self.ids[topic.name] = found
        topic.partitions = len(partitions)  # an attempt that was lost may come late, and with another number
        return True

    async def settle(self) -> None:
        """Have all actors come to their end."""
        self.closing = True
        await asyncio.wait(self.tasks)
        for task in self.tasks:
            task.result()


class Actor:
    """Somebody with a client and draws of its own, and a process in the history."""

    def __init__(self, workload: Workload) -> None:
        self._w = workload
        self._rng = workload.random()
        self._client = workload.client()
        self._process = workload.process()


class Producer(Actor):
    """Sends batches one after the other to partitions of its choice, and tries each until `DELIVERY_S` are over."""

    def __init__(self, workload: Workload, *, idempotent: bool) -> None:
        super().__init__(workload)
        self._idempotent = idempotent
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[tuple[str, int], int] = {}
        self._pace_s = self._rng.uniform(0.05, 0.5)

    async def run(self) -> None:
        """Go on until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.expovariate(1 / self._pace_s))
            topics = w.existing()
            if not topics:
                continue
            topic = rng.choice(topics)
            if self._idempotent and self._producer is None and not await self._begin_session():
                continue
            await self._send(topic, rng.randrange(topic.partitions))
        self._client.close()

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
        batch = self._batch(values, self._sequences.get((topic.name, partition), 0))
        op = w.history.begin(
            "send", self._process, w.now_us(), topic=topic.name, partition=partition, values=values,
            idempotent=self._idempotent, acks=acks,
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
        self._producer = None  # its sequence is not known any more
        if not self._idempotent:
            self._process = w.process()

    async def _attempt(self, topic: Topic, partition: int, batch: bytes, acks: int) -> tuple[int, int, bool]:
        """Error, offset, and whether a broker was asked at all."""
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
        elif self._rng.random() < MISSED_ANSWERS:  # and it is sent again when much may have happened
            await asyncio.sleep(self._rng.uniform(0, MISSED_FOR_S))
            raise Lost("the answer was missed")
        return found.error, found.offset, True

    def _batch(self, values: list[int], sequence: int) -> bytes:
        now_ms = EPOCH_MS + self._w.now_us() // 1000
        padding = b"x" * self._rng.choice((0, 10, 100, 1000))
        records = [Record(0, now_ms, None, b"%d|%b" % (value, padding), ()) for value in values]
        if self._producer is None:
            return build_batch(records)
        producer_id, epoch = self._producer
        return build_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
