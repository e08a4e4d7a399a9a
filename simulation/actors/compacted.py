"""A compacted topic: records with keys, tombstones, transactions, and readers that begin anywhere meanwhile.

Writers overwrite a few keys again and again, and write others once: those must stay for ever. In some seeds the topic
is deleted from, too, by retention and by DeleteRecords, and some of its records are written in transactions, which may
be aborted, left open, or gone on with by a zombie. Readers begin at any offset, over and over. The topic's settings are
such that rounds happen within seconds; the brokers' are drawn by `Shape.draw_table`.

All of it is in the history; `tidelog.simulation.checkers.compaction` judges it. Entry: `CompactedTopic.open`;
`CompactedTopic.audit` at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from tidelog.batch.batch import Record
from tidelog.controller.model.levels import TRANSACTIONS_LEVEL
from tidelog.simulation.actors.audit import SETTLE_S, Auditor
from tidelog.simulation.actors.client import Client
from tidelog.simulation.actors.consumers import Consumer, Fetcher, Position
from tidelog.simulation.actors.keyed import keyed_record
from tidelog.simulation.actors.topics import Deleter
from tidelog.simulation.actors.transactional import Entry, TxnSession
from tidelog.simulation.actors.txn_worker import SLEEPS, TIMEOUTS_MS, TxnWorker
from tidelog.simulation.actors.workload import Actor, Producer, Topic, Workload
from tidelog.simulation.checkers.history import UNKNOWN

TABLE = "table"
KEEPER = "keeper"
"""The transactional id of those who write in transactions."""
FIRST_RARE = 1_000_000
"""Keys from here on are written once."""
RARE = 0.1
"""The share of records with such a key."""
TOMBSTONES = 0.15
"""The share of records without a value."""
MAX_SKEW_MS = 1_000
"""By how much the clocks of two processes may differ, as long as none jumps."""
PACE_S = (0.15, 0.6)
"""Bounds of a writer's mean time between two batches, or transactions."""
RESTS = 0.05
"""The share of batches after which a writer writes nothing for a while, so that its last one may be compacted away."""
REST_S = (3.0, 12.0)


@dataclass(slots=True)
class CompactedTopic:
    """The topic, and who works there."""

    workload: Workload
    topic: Topic
    keys: int
    """How many keys are overwritten."""
    writers: int = 1
    transactions: bool = False
    pace_s: tuple[float, float] = PACE_S
    timeouts_ms: dict[str, int] = field(default_factory=dict)
    """By transactional id."""
    rare: itertools.count[int] = field(default_factory=lambda: itertools.count(FIRST_RARE))

    @classmethod
    def open(cls, workload: Workload, rng: random.Random) -> CompactedTopic:
        """Draw the topic and start everybody."""
        deletes = rng.random() < 0.35
        lag_ms, tombstones_ms = rng.choice((0, 0, 0, 2_500)), rng.choice((0, 3_000, 15_000))
        configs = {
            "cleanup.policy": "compact,delete" if deletes else "compact",
            "segment.bytes": str(rng.choice((1_500, 4_000, 10_000))),
            "min.cleanable.dirty.ratio": rng.choice(("0.01", "0.2", "0.5")),
            "min.compaction.lag.ms": str(lag_ms),
            "delete.retention.ms": str(tombstones_ms),
            "index.interval.bytes": str(rng.choice((0, 200, 4096))),
        }
        if rng.random() < 0.3:
            configs["max.compaction.lag.ms"] = "5000"
        if deletes and rng.random() < 0.5:
            configs |= rng.choice(({"retention.bytes": "12000"}, {"retention.ms": "20000"}))
        topic = Topic(TABLE, rng.randint(1, 2), deletes, configs, promises(lag_ms, tombstones_ms))
        table = cls(
            workload, topic, rng.choice((3, 12, 40)), rng.randint(1, 2), transactions=workload.cluster.shape.keeper
        )
        table.start()
        return table

    def start(self) -> None:
        """Create the topic, and start everybody."""
        workload = self.workload
        workload.spawn(workload.create(self.topic), f"create-{self.topic.name}")
        for number in range(self.writers):
            writer = TableWriter(self, idempotent=number == 0 or workload.rng.random() < 0.5)
            workload.spawn(writer.run(), f"table-writer-{number}")
        if self.transactions:
            workload.spawn(Keeper(self).run(), KEEPER)
        for committed in (False, True) if self.transactions else (False,):
            workload.spawn(AnywhereReader(self, committed=committed).run(), f"anywhere-reader-{committed}")
        follower = Consumer(workload, self.places(), committed=self.transactions)
        workload.spawn(follower.run(), "table-reader")
        if self.topic.deletes:
            workload.spawn(Deleter(workload, [self.topic]).run(), "table-deleter")

    @property
    def topics(self) -> tuple[Topic, ...]:
        """The topic alone."""
        return (self.topic,)

    def places(self) -> list[tuple[Topic, int]]:
        """All partitions."""
        return [(self.topic, index) for index in range(self.topic.partitions)]

    def session(self, client: Client, transactional_id: str, rng: random.Random) -> TxnSession:
        """Return a new session, old or new; not started."""
        timeout_ms = self.timeouts_ms[transactional_id] = rng.choice(TIMEOUTS_MS)
        return TxnSession(self.workload, client, transactional_id, timeout_ms, new=rng.random() < 0.5)

    def draw(self, rng: random.Random) -> tuple[int, bool]:
        """A key, and whether its record has no value."""
        if rng.random() < RARE:
            return next(self.rare), False
        return rng.randrange(self.keys), rng.random() < TOMBSTONES

    def note_cleaned(self, cleaned: dict[int, int], *, may_have_left: bool = False) -> None:
        """Record up to which offset partitions are compacted, and whether objects may have been left alone."""
        w, process = self.workload, self.workload.process()
        for partition, offset in sorted(cleaned.items()):
            w.history.note("cleaned", process, w.now_us(), topic=self.topic.name, partition=partition, offset=offset)
        for partition in range(self.topic.partitions if may_have_left else 0):
            w.history.note("left", process, w.now_us(), topic=self.topic.name, partition=partition)

    def forget_times(self) -> None:
        """Record that the brokers' clocks have jumped, so that they may have compacted at any time."""
        for op in self.workload.history.ops:
            if op.kind == "create_topic" and op.topic == self.topic.name:
                op.lag_us = op.tombstones_us = 0

    async def audit(self, settle_s: float = SETTLE_S) -> None:
        """Read all partitions from start to end, with either isolation level, when all others have ended."""
        auditor = Auditor(self.workload, settle_s)
        if self.workload.cluster.level >= TRANSACTIONS_LEVEL:
            for transactional_id in sorted(self.timeouts_ms):
                await auditor.describe(transactional_id)
        for place in self.places():
            await auditor.read(*place)
        auditor.close()


def promises(lag_ms: int, tombstones_ms: int) -> dict[str, Any]:
    """What the history says of a topic with these settings, whatever the clocks are like."""
    promised = {"lag_us": lag_ms - MAX_SKEW_MS, "tombstones_us": tombstones_ms - MAX_SKEW_MS}
    return {"compacts": True, **{name: 1_000 * max(0, ms) for name, ms in promised.items()}}


class TableWriter(Producer):
    """Sends batches one after the other, as `Producer`, and rests now and then; its session goes on afterwards."""

    def __init__(self, table: CompactedTopic, *, idempotent: bool) -> None:
        super().__init__(table.workload, idempotent=idempotent)
        self._table = table
        self._interval_s = self._rng.uniform(*table.pace_s)
        self._rests_until = 0.0

    def topics(self) -> list[Topic]:
        """See `Producer.topics`."""
        if self._w.loop.time() < self._rests_until:
            return []
        return [topic for topic in self._table.topics if topic.exists]

    def records(self, values: list[int]) -> tuple[list[Record], dict[str, Any]]:
        """See `Producer.records`."""
        now_ms, rng = self._w.time_ms(), self._rng
        if rng.random() < RESTS:
            self._rests_until = self._w.loop.time() + rng.uniform(*REST_S)
        drawn = [self._table.draw(rng) for _ in values]
        padding = b"x" * rng.choice((0, 10, 100))
        records = [
            keyed_record(now_ms, key, value, tombstone=tombstone, padding=padding)
            for value, (key, tombstone) in zip(values, drawn, strict=True)
        ]
        tombstones = [value for value, (_, tombstone) in zip(values, drawn, strict=True) if tombstone]
        return records, {
            "keys": [key for key, _ in drawn],
            "tombstones": tombstones,
            "times": [now_ms] * len(values),
        }


class Keeper(TxnWorker):
    """Writes in transactions."""

    def __init__(self, table: CompactedTopic) -> None:
        super().__init__(table, KEEPER)
        self._table = table

    async def work(self, session: TxnSession) -> None:
        """See `TxnWorker.work`."""
        w, rng, topic = self._w, self._rng, self._table.topic
        while not (w.closing or session.over):
            entries = []
            for value in w.values(rng.randint(1, 4)):
                key, tombstone = self._table.draw(rng)
                entries.append(Entry(topic, rng.randrange(topic.partitions), value, UNKNOWN, 0, key, tombstone))
            if rng.random() < SLEEPS:
                self._leave(session, entries, UNKNOWN)
                return
            await self._transaction(session, entries, UNKNOWN, slow=False)
            await asyncio.sleep(rng.expovariate(1 / self._interval_s))


class AnywhereReader(Actor):
    """Begins to read at any offset, reads for a while, and begins again as another process."""

    def __init__(self, table: CompactedTopic, *, committed: bool) -> None:
        super().__init__(table.workload)
        self._table = table
        self._committed = committed
        self._ends = dict.fromkeys(range(table.topic.partitions), 0)
        """The largest high watermark seen."""

    async def run(self) -> None:
        """Run until the end."""
        w, rng, topic = self._w, self._rng, self._table.topic
        while not w.closing:
            await asyncio.sleep(rng.uniform(0.05, 0.8))
            if not topic.exists:
                continue
            partition = rng.randrange(topic.partitions)
            rack = w.cluster.shape.rack_of(rng.randrange(12))
            fetcher = Fetcher(w, self._client, w.process(), rack, committed=self._committed)
            position = Position(topic, partition)
            if rng.random() < 0.7:
                fetcher.assign_at(position, rng.randint(0, self._ends[partition]))
            for _ in range(rng.choice((1, 3, 10))):
                came = await fetcher.fetch([position])
                self._ends[partition] = max(self._ends[partition], position.told[0], position.offset)
                if not came and rng.random() < 0.5:
                    break
        self._client.close()
