"""What clients do in a simulation, and the history that they write of it.

Each actor is a task with a random generator of its own, in one life that nothing ends, on hosts that faults can cut off
like any other. Actors go on until `World.closing`; whatever they were told, and when, is in the history.

Who takes part is drawn in `simulation.cast`. Entry: `Workload.settle`, `Workload.read_all`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from simulation import kafka
from simulation.checkers import Finding
from simulation.client import Address, Client, Lost
from simulation.clock import EPOCH_MS
from simulation.cluster import Cluster
from simulation.history import UNKNOWN, History
from simulation.kafka import EARLIEST, LATEST, Fetched
from simulation.loop import START_S, Life, VirtualLoop
from storage.record_batch import CorruptRecord, Record, build_batch, check_crc, iter_batches, iter_records

ASK_S = 4.0
"""How long a client waits for an answer."""
DELIVERY_S = 12.0
"""How long a producer tries to deliver a batch."""
MISSED_ANSWERS = 0.03
"""The share of acknowledgements that a producer does not take notice of."""
MISSED_FOR_S = 3.0
FETCH_WAIT_MS = 700
FETCH_BYTES = 8 << 10

MAX_FOUND = 5
"""Findings of clients: what leads to them is tried again and again."""

OFFSET_OUT_OF_RANGE = 1
UNKNOWN_TOPIC = 3
DUPLICATE_SEQUENCE = 46
SESSION_ENDED = (45, 47, 59)
"""OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH, UNKNOWN_PRODUCER_ID."""


@dataclass(slots=True)
class Topic:
    """A topic as the workload knows it."""

    name: str
    partitions: int
    deletes: bool
    """Records are deleted from it on purpose."""
    configs: dict[str, str] = field(default_factory=dict)
    temporary: bool = False
    """It may be deleted as a whole."""
    exists: bool = False
    gone: bool = False
    """Its deletion was asked for."""


@dataclass(slots=True)
class Workload:
    """All actors, and what they have in common."""

    loop: VirtualLoop
    cluster: Cluster
    rng: random.Random
    history: History
    topics: list[Topic] = field(default_factory=list)
    closing: bool = False
    findings: list[Finding] = field(default_factory=list)
    """What clients saw that no history has a place for."""
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
        return Client(self.cluster.network.host(host), host, self.cluster.bootstrap)

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

    # Beginning and end

    async def create(self, topic: Topic) -> None:
        """Create a topic; tries until it is there."""
        rng, client = self.random(), self.client()
        op = self.history.begin("create_topic", self.process(), self.now_us(), topic=topic.name, deletes=topic.deletes)
        while True:
            try:
                error, _ = await client.ask_any(
                    kafka.create_topic(topic.name, topic.partitions, topic.configs, 3_000), ASK_S
                )
            except Lost:
                error = -1
            if error in (0, 36):  # TOPIC_ALREADY_EXISTS: an earlier attempt did it
                break
            await asyncio.sleep(rng.uniform(0.1, 0.5))
        self.history.end(op, "ok", self.now_us())
        topic.exists = True
        client.close()

    async def settle(self) -> None:
        """Have all actors come to their end."""
        self.closing = True
        await asyncio.wait(self.tasks)
        for task in self.tasks:
            task.result()

    async def read_all(self) -> None:
        """Read every partition from its start to its high watermark, as a new process each."""
        client = self.client()
        for topic in self.existing():
            for partition in range(topic.partitions):
                await Reader(self, client, topic, partition).run()
        client.close()


def decode(fetched: Fetched, offset: int) -> tuple[list[int], list[int], list[int], int]:
    """Values, offsets and leader epochs of the records from `offset` on, and where the next fetch begins.

    Raises `CorruptRecord`.
    """
    values: list[int] = []
    offsets: list[int] = []
    epochs: list[int] = []
    following = offset
    for header, batch in iter_batches(fetched.records):
        if not check_crc(batch):
            raise CorruptRecord(f"batch {header.base_offset} fails its CRC32C")
        for record in iter_records(batch, header=header):
            if record.offset >= offset:
                values.append(int(bytes(record.value or b"").split(b"|")[0]))
                offsets.append(record.offset)
                epochs.append(header.partition_leader_epoch)
        following = max(following, header.base_offset + header.last_offset_delta + 1)
    return values, offsets, epochs, following


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
                code, offset, answered = await self._attempt(topic.name, partition, batch, acks)
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

    async def _attempt(self, topic: str, partition: int, batch: bytes, acks: int) -> tuple[int, int, bool]:
        """Error, offset, and whether a broker was asked at all."""
        try:
            address = await self._client.leader(topic, partition)
        except Lost:
            address = None
        if address is None:
            await asyncio.sleep(0.1)
            return -1, -1, False
        try:
            found = await self._client.ask(address, kafka.produce(topic, partition, batch, acks, 3_000), ASK_S)
        except Lost:
            self._client.forget(topic, partition)
            raise
        if found.error:
            self._client.forget(topic, partition)
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


class Position:
    """Where a consumer is in one partition."""

    def __init__(self, topic: Topic, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = UNKNOWN
        self.told = (UNKNOWN, UNKNOWN)
        """High watermark and log start of the last answer that is in the history."""


class Fetcher:
    """Fetches partitions and notes what came."""

    def __init__(self, workload: Workload, client: Client, process: int) -> None:
        self._w = workload
        self._client = client
        self.process = process

    async def assign(self, position: Position, timestamp: int = EARLIEST) -> bool:
        """Find where to begin."""
        topic, partition = position.topic.name, position.partition
        try:
            address = await self._client.leader(topic, partition)
            if address is None:
                return False
            request = kafka.list_offsets(topic, partition, timestamp)
            error, offset = await self._client.ask(address, request, ASK_S)
        except Lost:
            self._client.forget(topic, partition)
            return False
        if error:
            self._client.forget(topic, partition)
            return False
        self.assign_at(position, offset)
        return True

    def assign_at(self, position: Position, offset: int) -> None:
        """Begin at `offset`."""
        w = self._w
        fields = {"topic": position.topic.name, "partition": position.partition, "offset": offset}
        w.history.note("assign", self.process, w.now_us(), **fields)
        position.offset = offset

    async def fetch(self, positions: list[Position]) -> bool:
        """One request to each leader; returns whether records came."""
        by_leader: dict[Address, list[Position]] = {}
        for position in positions:
            if position.offset < 0 and not await self.assign(position):
                continue
            try:
                address = await self._client.leader(position.topic.name, position.partition)
            except Lost:
                continue
            if address is not None:
                by_leader.setdefault(address, []).append(position)
        if not by_leader:
            await asyncio.sleep(0.2)
            return False
        found = await asyncio.gather(*(self._ask(address, ours) for address, ours in by_leader.items()))
        if not any(found):
            await asyncio.sleep(0.02)
        return any(found)

    async def _ask(self, address: Address, positions: list[Position]) -> bool:
        w = self._w
        began_us = w.now_us()
        wanted = {(one.topic.name, one.partition): one.offset for one in positions}
        try:
            error, found = await self._client.ask(address, kafka.fetch(wanted, FETCH_WAIT_MS, FETCH_BYTES), ASK_S)
        except Lost:
            error, found = -1, []
        if error or not found:
            for one in positions:
                self._client.forget(one.topic.name, one.partition)
            await asyncio.sleep(0.1)
            return False
        places = {(one.topic.name, one.partition): one for one in positions}
        came = [self._take(places[one.topic, one.partition], one, began_us) for one in found]
        if any(one.error for one in found):
            await asyncio.sleep(0.05)
        return any(came)

    def _take(self, position: Position, found: Fetched, began_us: int) -> bool:
        w = self._w
        if found.error:
            self._client.forget(found.topic, found.partition)
            if found.error == OFFSET_OUT_OF_RANGE:
                position.offset = UNKNOWN
            return False
        try:
            values, offsets, epochs, following = decode(found, position.offset)
        except CorruptRecord as error:
            w.found("corrupt-read", f"{found.topic}-{found.partition} from offset {position.offset} on: {error}")
            return False
        told = found.high_watermark, found.log_start
        if values or told != position.told:
            position.told = told
            op = w.history.begin(
                "poll", self.process, began_us, topic=found.topic, partition=found.partition, offset=position.offset,
                values=values, offsets=offsets, epochs=epochs, next_offset=following,
                high_watermark=found.high_watermark, log_start=found.log_start,
            )  # fmt: skip
            w.history.end(op, "ok", w.now_us())
        position.offset = following
        return bool(values)


class Consumer:
    """Reads some partitions, by assignment; begins anew sometimes."""

    def __init__(self, workload: Workload) -> None:
        self._w = workload
        self._rng = workload.random()
        self._client = workload.client()
        self._fetcher = Fetcher(workload, self._client, workload.process())
        self._positions: list[Position] = []

    async def run(self) -> None:
        """Go on until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            positions = [one for one in self._positions if not one.topic.gone]
            if not positions or rng.random() < 0.005:
                self._choose()
                await asyncio.sleep(0.1)
                continue
            await self._fetcher.fetch(positions)
        self._client.close()

    def _choose(self) -> None:
        w = self._w
        places = [(topic, index) for topic in w.existing() for index in range(topic.partitions)]
        self._rng.shuffle(places)
        self._fetcher.process = w.process()
        self._positions = [Position(*place) for place in places[: self._rng.randint(1, 6)]]


class Reader:
    """Reads one partition from its start to its end, after all was healed."""

    def __init__(self, workload: Workload, client: Client, topic: Topic, partition: int) -> None:
        self._client = client
        self._fetcher = Fetcher(workload, client, workload.process())
        self._position = Position(topic, partition)

    async def run(self) -> None:
        """Return at the high watermark."""
        position = self._position
        while not await self._fetcher.assign(position):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        while position.offset < await self._end():
            await self._fetcher.fetch([position])

    async def _end(self) -> int:
        topic, partition = self._position.topic.name, self._position.partition
        while True:
            try:
                address = await self._client.leader(topic, partition)
                if address is not None:
                    request = kafka.list_offsets(topic, partition, LATEST)
                    error, offset = await self._client.ask(address, request, ASK_S)
                    if not error:
                        return int(offset)
            except Lost:
                pass
            self._client.forget(topic, partition)
            await asyncio.sleep(0.1)
