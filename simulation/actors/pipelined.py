"""An idempotent producer with several requests in flight, like librdkafka's with `max.in.flight=5`.

Each partition has a *lane*: its batches in the order of their sequence numbers, starting at the first unacknowledged
one. The first `MAX_IN_FLIGHT` of them may be in flight, on one connection, in order. When one fails, those after it
are refused, too; nothing new is sent until every response has arrived, and then all failed batches are sent again in
order. Acknowledged batches leave a lane only at its front, so a broker that stores the last five batches of a producer
knows every batch that may be sent again. Where it knows the producer, it must not refuse a batch behind a failed one as
out of order: librdkafka takes that for a loss.

A lane ends with its session when its first batch is permanently refused or not delivered in time. It may be refused as
out of order only while nothing of the session was acknowledged in the partition: a broker that does not know a producer
accepts any sequence number, so the second batch may have been accepted after the first was refused (as in Kafka).

Entry: `PipelinedProducer.run`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tidelog.simulation.actors.client import ClientConnection, Lost
from tidelog.simulation.actors.kafka import Produced
from tidelog.simulation.actors.workload import (
    ASK_S,
    DELIVERY_S,
    DUPLICATE_SEQUENCE,
    FOR_GOOD,
    MISSED_ANSWERS,
    MISSED_FOR_S,
    OUT_OF_ORDER,
    SESSION_ENDED,
    Producer,
    Topic,
    Workload,
)
from tidelog.simulation.checkers.history import Op

MAX_IN_FLIGHT = 5
MAX_BURST = 8
"""Batches added to a lane at a time: more than may be in flight."""


@dataclass(slots=True)
class _Batch:
    op: Op
    data: bytes
    deadline_s: float
    sent: bool = False
    """A broker may have received it."""
    done: bool = False
    code: int = 0
    error: str = ""
    """The result of the last attempt."""


@dataclass(slots=True)
class _Lane:
    """The batches of one session for one partition."""

    topic: Topic
    partition: int
    process: int
    batches: deque[_Batch] = field(default_factory=deque)
    """Batches that are unacknowledged, or after an unacknowledged one."""
    next_sequence: int = 0
    acknowledged: bool = False
    """A batch of the session was acknowledged, so the broker knows its producer."""
    running: bool = False


class PipelinedProducer(Producer):
    """A producer with several requests in flight; see the module."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, idempotent=True)
        self._interval_s *= MAX_BURST  # other producers wait for each acknowledgement
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until the end, and until every lane is empty."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.expovariate(1 / self._interval_s))
            topics = w.existing()
            if not topics:
                continue
            topic = rng.choice(topics)
            if self._producer is None:
                if not await self._begin_session():
                    continue
                self._lanes.clear()
            self._put(topic, rng.randrange(topic.partitions))
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._client.close()

    def _put(self, topic: Topic, partition: int) -> None:
        """Add a burst of batches for one partition."""
        w, rng = self._w, self._rng
        lane = self._lanes.get((topic.name, partition))
        if lane is None:
            lane = self._lanes[topic.name, partition] = _Lane(topic, partition, self._process)
        if len(lane.batches) > MAX_IN_FLIGHT:
            return  # the partition accepts nothing: do not queue more
        for _ in range(rng.randint(1, MAX_BURST)):
            values = w.values(rng.randint(1, 5))
            records, told = self.records(values)
            op = w.history.begin(
                "send", self._process, w.now_us(), topic=topic.name, partition=partition, values=values,
                idempotent=True, **told,
            )  # fmt: skip
            lane.batches.append(_Batch(op, self._batch(records, lane.next_sequence), w.loop.time() + DELIVERY_S))
            lane.next_sequence += len(values)
        if not lane.running:
            lane.running = True
            task = asyncio.create_task(self._run_lane(lane), name=f"lane-{topic.name}-{partition}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_lane(self, lane: _Lane) -> None:
        rng, loop = self._rng, self._w.loop
        while lane.batches:
            await self._deliver(lane)
            if not lane.batches:
                break
            first = lane.batches[0]  # this batch failed, and possibly others
            if first.code in SESSION_ENDED and lane.acknowledged:
                self._w.refused(lane.topic, lane.partition, lane.process, first.code)
            if first.code in SESSION_ENDED or lane.topic.gone or loop.time() >= first.deadline_s:
                self._give_up(lane)
                break
            await asyncio.sleep(rng.uniform(0.02, 0.2))
        lane.running = False

    def _give_up(self, lane: _Lane) -> None:
        """Abandon the remaining batches and end the session: its sequence number is unknown from here on."""
        w = self._w
        for batch in lane.batches:
            if not batch.done:
                w.history.end(batch.op, "info" if batch.sent else "fail", w.now_us(), error=batch.error)
        lane.batches.clear()
        if self._process == lane.process:
            self._producer = None

    async def _deliver(self, lane: _Lane) -> None:
        """Send the batches in the window until all are acknowledged or one fails; then wait for every response."""
        connection = await self._connect(lane)
        if connection is None:
            return
        waiting: dict[asyncio.Future[Any], _Batch] = {}
        failed = False
        while True:
            if not failed:
                self._fill(lane, connection, waiting)
            if not waiting:
                return
            done, _ = await asyncio.wait(waiting, timeout=ASK_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                connection.transport.abort()  # missing responses become `Lost` immediately
                failed = True
                continue
            for future in [one for one in waiting if one in done]:
                if not self._take(lane, waiting.pop(future), future):
                    failed = True
                elif waiting and self._rng.random() < MISSED_ANSWERS:
                    connection.transport.abort()  # the batches after it are sent again after a long pause
                    failed = True
                    await asyncio.sleep(self._rng.uniform(0, MISSED_FOR_S))
            while lane.batches and lane.batches[0].done:
                lane.batches.popleft()

    async def _connect(self, lane: _Lane) -> ClientConnection | None:
        first, topic, partition = lane.batches[0], lane.topic, lane.partition
        first.code, first.error = -1, "there is no leader"
        try:
            address = await self._client.leader(topic.name, partition)
            if address is not None:
                return await self._client.connection(address)
        except Lost as lost:
            first.error = str(lost)
            self._client.forget(topic.name, partition)
        await asyncio.sleep(0.1)
        return None

    def _fill(self, lane: _Lane, connection: ClientConnection, waiting: dict[asyncio.Future[Any], _Batch]) -> None:
        """Send, in order, the batches that may be in flight and are not."""
        on_their_way = {id(batch) for batch in waiting.values()}
        for batch in islice(lane.batches, MAX_IN_FLIGHT):
            if not batch.done and id(batch) not in on_their_way:
                request = self._w.produce(lane.topic, lane.partition, batch.data, -1)
                batch.sent = batch.sent or not connection.lost
                waiting[connection.send(request)] = batch

    def _take(self, lane: _Lane, batch: _Batch, future: asyncio.Future[Any]) -> bool:
        """Process a response; return whether it acknowledges the batch."""
        w = self._w
        try:
            found: Produced = future.result()
        except Lost as lost:
            found = Produced(-1, -1, -1)
            batch.error = str(lost)
        else:
            batch.error = f"error {found.error}"
        batch.code = found.error
        if found.error not in (0, DUPLICATE_SEQUENCE):
            first = lane.batches[0]
            if found.error == OUT_OF_ORDER and lane.acknowledged and batch is not first and first.code not in FOR_GOOD:
                w.gap_refused(lane.topic, lane.partition, lane.process)
            self._client.forget(lane.topic.name, lane.partition, found.leader)
            return False
        offsets = list(range(found.offset, found.offset + len(batch.op.values))) if found.error == 0 else []
        w.history.end(batch.op, "ok", w.now_us(), offsets=offsets)
        batch.done = lane.acknowledged = True
        return True
