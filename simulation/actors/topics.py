"""Actors that delete records, that grow topics, and that create and delete them.

Entry: `Deleter.run`, `Grower.run`, `TopicKeeper.run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidelog.simulation.actors import kafka, kafka_ids
from tidelog.simulation.actors.client import Lost
from tidelog.simulation.actors.consumers import Position, is_deposed
from tidelog.simulation.actors.kafka import LATEST
from tidelog.simulation.actors.workload import ASK_S, Actor, Topic, Workload
from tidelog.simulation.checkers.history import UNKNOWN, Op

MAX_EXTRA_TOPICS = 3
MAX_GROWN = 2
"""Number of partitions that are added to a topic."""
INVALID_PARTITIONS = 37
AGAIN = 0.8
"""The share of deleted topics whose name is reused."""


class Deleter(Actor):
    """Calls DeleteRecords on the topics that allow it."""

    def __init__(self, workload: Workload, topics: Sequence[Topic] = ()) -> None:
        """On `topics`, or else on those of the workload."""
        super().__init__(workload)
        self._topics = topics

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.uniform(1.0, 6.0))
            topics = [topic for topic in self._topics or w.existing() if topic.deletes and topic.exists]
            if topics:
                topic = rng.choice(topics)
                await self._delete(topic, rng.randrange(topic.partitions))
        self._client.close()

    async def _delete(self, topic: Topic, partition: int) -> None:
        w, name = self._w, topic.name
        op: Op | None = None
        try:
            address = await self._client.leader(name, partition)
            if address is None:
                return
            error, end = await self._client.ask(address, kafka.list_offsets(name, partition, LATEST), ASK_S)
            if error or end <= 0:
                return
            offset = self._rng.randint(0, end)
            op = w.history.begin(
                "delete_records", self._process, w.now_us(), topic=name, partition=partition, offset=offset
            )
            error, start = await self._client.ask(address, kafka.delete_records(name, partition, offset, 3_000), ASK_S)
        except Lost as lost:
            self._client.forget(name, partition)
            if op is not None:
                w.history.end(op, "info", w.now_us(), error=str(lost))
            return
        if error:
            self._client.forget(name, partition)
            w.history.end(op, "info", w.now_us(), error=f"error {error}")
        else:
            # one that deletes nothing is answered by a leader, too, that does not know its successor yet
            deposed = is_deposed(w.cluster, Position(topic, partition), address)
            w.history.end(op, "ok", w.now_us(), log_start=UNKNOWN if deposed else start)


class Grower(Actor):
    """Adds a partition to a topic now and then, at any broker."""

    def __init__(self, workload: Workload, topic: Topic) -> None:
        super().__init__(workload)
        self._topic = topic

    async def run(self) -> None:
        """Run until the end."""
        w, rng, topic = self._w, self._rng, self._topic
        for _ in range(rng.randint(1, MAX_GROWN)):
            await asyncio.sleep(rng.uniform(2.0, 25.0))
            total = topic.partitions + 1
            while topic.exists and not w.closing:
                try:
                    error = await self._client.ask_any(kafka.create_partitions(topic.wire, total, 3_000), ASK_S)
                except Lost:
                    error = -1
                if error in (0, INVALID_PARTITIONS):  # the latter: an earlier attempt succeeded
                    topic.partitions = total
                    break
                await asyncio.sleep(rng.uniform(0.1, 0.5))
        self._client.close()


class TopicKeeper(Actor):
    """Creates and deletes topics and, if clients use topic ids, creates topics again under the old name.

    Other clients then continue with the deleted topic for a while, although the new one exists.
    """

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.uniform(2.0, 10.0))
            extra = [topic for topic in w.existing() if topic.temporary]
            if extra and rng.random() < 0.5:
                await (self._replace if w.by_id else self._delete)(rng.choice(extra))
            elif len(extra) < MAX_EXTRA_TOPICS:
                deletes = rng.random() < 0.3 and not w.by_id  # DeleteRecords identifies topics by name
                await self._create(Topic(f"t{len(w.topics) + 1}", rng.randint(1, 3), deletes, temporary=True))
        self._client.close()

    async def _create(self, topic: Topic) -> None:
        w = self._w
        for op in w.commits.get(topic.wire, []):
            w.inherit(op, topic)
        w.topics.append(topic)
        await w.create(topic)

    async def _replace(self, topic: Topic) -> None:
        """Delete the topic for certain, and often create another one of the same name."""
        w, rng = self._w, self._rng
        op = w.history.begin("delete_topic", self._process, w.now_us(), topic=topic.name)
        while True:
            try:
                error = await self._client.ask_any(kafka_ids.delete_topic(topic.id, 3_000), ASK_S)
            except Lost:
                error = -1
            if error in (0, kafka_ids.UNKNOWN_TOPIC_ID):
                break
            await asyncio.sleep(rng.uniform(0.1, 0.5))
        topic.deleted = error == 0
        w.history.end(op, "ok", w.now_us())
        if rng.random() < AGAIN and not w.closing:
            await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 2))))
            number = int(topic.name.partition("@")[2] or 1) + 1
            await self._create(Topic(f"{topic.wire}@{number}", rng.randint(1, 3), False, temporary=True))
            await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 3))))  # clients continue with the deleted topic
        topic.gone = True

    async def _delete(self, topic: Topic) -> None:
        w = self._w
        topic.gone = True
        op = w.history.begin("delete_topic", self._process, w.now_us(), topic=topic.name)
        try:
            error = await self._client.ask_any(kafka.delete_topic(topic.name, 3_000), ASK_S)
        except Lost as lost:
            w.history.end(op, "info", w.now_us(), error=str(lost))
            return
        topic.deleted = error == 0
        w.history.end(op, "info" if error else "ok", w.now_us(), error=f"error {error}" if error else "")
