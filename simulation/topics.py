"""Those who delete records, and who create and delete topics.

Entry: `Deleter.run`, `TopicKeeper.run`.
"""

from __future__ import annotations

import asyncio

from simulation import kafka
from simulation.client import Lost
from simulation.history import Op
from simulation.kafka import LATEST
from simulation.workload import ASK_S, Actor, Topic

MAX_EXTRA_TOPICS = 3


class Deleter(Actor):
    """DeleteRecords on the topics that allow it."""

    async def run(self) -> None:
        """Go on until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.uniform(1.0, 6.0))
            topics = [topic for topic in w.existing() if topic.deletes]
            if topics:
                topic = rng.choice(topics)
                await self._delete(topic.name, rng.randrange(topic.partitions))
        self._client.close()

    async def _delete(self, topic: str, partition: int) -> None:
        w = self._w
        op: Op | None = None
        try:
            address = await self._client.leader(topic, partition)
            if address is None:
                return
            error, end = await self._client.ask(address, kafka.list_offsets(topic, partition, LATEST), ASK_S)
            if error or end <= 0:
                return
            offset = self._rng.randint(0, end)
            op = w.history.begin(
                "delete_records", self._process, w.now_us(), topic=topic, partition=partition, offset=offset
            )
            error, start = await self._client.ask(address, kafka.delete_records(topic, partition, offset, 3_000), ASK_S)
        except Lost as lost:
            self._client.forget(topic, partition)
            if op is not None:
                w.history.end(op, "info", w.now_us(), error=str(lost))
            return
        if error:
            self._client.forget(topic, partition)
            w.history.end(op, "info", w.now_us(), error=f"error {error}")
        else:
            w.history.end(op, "ok", w.now_us(), log_start=start)


class TopicKeeper(Actor):
    """Creates topics, and deletes them again."""

    async def run(self) -> None:
        """Go on until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.uniform(2.0, 10.0))
            extra = [topic for topic in w.existing() if topic.temporary]
            if extra and rng.random() < 0.5:
                await self._delete(rng.choice(extra))
            elif len(extra) < MAX_EXTRA_TOPICS:
                topic = Topic(f"t{len(w.topics) + 1}", rng.randint(1, 3), rng.random() < 0.3, temporary=True)
                w.topics.append(topic)
                await w.create(topic)
        self._client.close()

    async def _delete(self, topic: Topic) -> None:
        w = self._w
        topic.gone = True
        op = w.history.begin("delete_topic", self._process, w.now_us(), topic=topic.name)
        try:
            error = await self._client.ask_any(kafka.delete_topic(topic.name, 3_000), ASK_S)
        except Lost as lost:
            w.history.end(op, "info", w.now_us(), error=str(lost))
            return
        w.history.end(op, "info" if error else "ok", w.now_us(), error=f"error {error}" if error else "")
