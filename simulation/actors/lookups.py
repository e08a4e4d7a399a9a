"""Clients that look up offsets: by time (ListOffsets), and the ends of leader epochs (OffsetForLeaderEpoch, KIP-320).

They ask for times of records, times between them, the largest one, and ends, of every partition that has a topic of its
name for ever, while clients write, brokers fail and partitions move; and once more when all has ended. The answers are
in the history; `tidelog.simulation.checkers.lookups` compares them with the records that others have written and read.

Entry: `Seeker.run`; `Seeker.audit` at the end.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tidelog.simulation.actors.client import Lost
from tidelog.simulation.actors.consumers import Position, is_deposed
from tidelog.simulation.actors.kafka import EARLIEST, LATEST, Request
from tidelog.simulation.actors.kafka_flexible import FlexibleReader, compact, request, rows
from tidelog.simulation.actors.workload import ASK_S, OLDER_MS, Actor, Topic, Workload
from tidelog.simulation.checkers.history import LARGEST_TIME, UNKNOWN, Op

PAUSE_S = (0.1, 0.8)
"""Bounds of the mean time between two questions."""
EPOCHS = 0.25
"""The share of questions that ask for the end of a leader epoch."""
HURRIES, HURRY_S = 40, 0.02
"""After a question without an answer the next one comes at once: a new leader should be asked as soon as it answers."""
AT_THE_END = 4
"""Questions for times, of each partition, when all has ended."""

Builder = Callable[[int], Request]
"""Returns the request for a leader of that epoch."""


class FoundOffset(NamedTuple):
    """The result of ListOffsets for one partition."""

    error: int
    time_ms: int
    offset: int
    """-1: there is no such record."""
    epoch: int


class EpochEnd(NamedTuple):
    """The result of OffsetForLeaderEpoch for one partition."""

    error: int
    epoch: int
    offset: int


def offset_for_time(topic: str, partition: int, time_ms: int, epoch: int, *, committed: bool) -> Request:
    """Ask a leader of that epoch (-1: any) by ListOffsets v7. Returns `FoundOffset`."""
    part = struct.pack(">iiq", partition, epoch, time_ms)
    body = struct.pack(">ib", -1, committed) + rows([compact(topic.encode()) + rows([part])])

    def read(r: FlexibleReader) -> FoundOffset:
        _partition = r.i32()
        return FoundOffset(r.i16(), r.i64(), r.i64(), r.i32())

    return request(2, 7, body, lambda r: _only(r, read))


def epoch_end(topic: str, partition: int, wanted: int, epoch: int) -> Request:
    """Ask a leader of that epoch (-1: any) for the end of the epoch `wanted`, by v4. Returns `EpochEnd`."""
    part = struct.pack(">iii", partition, epoch, wanted)
    body = struct.pack(">i", -1) + rows([compact(topic.encode()) + rows([part])])

    def read(r: FlexibleReader) -> EpochEnd:
        error, _partition = r.i16(), r.i32()
        return EpochEnd(error, r.i32(), r.i64())

    return request(23, 4, body, lambda r: _only(r, read))


def _only(r: FlexibleReader, read: Callable[[FlexibleReader], Any]) -> Any:
    """Return what a response says of its only partition."""

    def per_topic() -> list[Any]:
        r.compact()
        return r.rows(lambda: read(r))

    _throttle_ms = r.i32()
    return r.rows(per_topic)[0][0]


class Seeker(Actor):
    """Asks one question after the other."""

    def __init__(self, workload: Workload, others: Sequence[Topic] = ()) -> None:
        """`others` are asked for beside the topics of the workload."""
        super().__init__(workload)
        self._others = others
        self._pause_s = self._rng.uniform(*PAUSE_S)
        self._told = deque[int](maxlen=50)
        """Times of records, as found, to ask for exactly these."""

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.expovariate(1 / self._pause_s))
            topics = self._topics()
            if not topics:
                continue
            topic = rng.choice(topics)
            partition = rng.randrange(topic.partitions)
            if rng.random() < EPOCHS:
                await self._ask_epoch(topic, partition)
            elif not await self._ask_time(topic, partition):
                await self._hurry(topic, partition)
        self._client.close()

    async def _hurry(self, topic: Topic, partition: int) -> None:
        """Ask for the end until there is an answer."""
        for _ in range(HURRIES):
            if self._w.closing or await self._ask_bound(topic, partition, LATEST):
                return
            await asyncio.sleep(HURRY_S)

    async def audit(self) -> None:
        """Ask for some times and each epoch, of all partitions, until each is answered."""
        for topic in self._topics():
            for partition in range(topic.partitions):
                for _ in range(AT_THE_END):
                    while not await self._ask_time(topic, partition):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                for epoch in range(self._client.epoch(topic.name, partition) + 1):
                    while not await self._ask_epoch(topic, partition, epoch):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                while not await self._ask_bound(topic, partition, EARLIEST):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # retention may have moved it since anybody read here
        self._client.close()

    def _topics(self) -> list[Topic]:
        """Those that exist for ever: a name is of one topic."""
        return [one for one in (*self._w.existing(), *self._others) if one.exists and not one.temporary]

    def _draw_time(self) -> int:
        """Return a time of the past or of now, or the largest one."""
        rng = self._rng
        if rng.random() < 0.15:
            return LARGEST_TIME
        if self._told and rng.random() < 0.4:
            return rng.choice(self._told) + rng.choice((0, 0, 1))
        back_ms = rng.choice((100, 1_000, 5_000, OLDER_MS, 60_000))
        return self._w.time_ms() - rng.randint(-50, back_ms)

    async def _ask_time(self, topic: Topic, partition: int) -> bool:
        """Ask for a time, and return whether there was an answer."""
        w, committed, time_ms = self._w, self._rng.random() < 0.3, self._draw_time()
        op = w.history.begin(
            "offset_for_time", self._process, w.now_us(), topic=topic.name, partition=partition, time_ms=time_ms,
            committed_only=committed,
        )  # fmt: skip

        def build(epoch: int) -> Request:
            return offset_for_time(topic.wire, partition, time_ms, epoch, committed=committed)

        found = await self._ask(op, topic, partition, build)
        if not isinstance(found, FoundOffset):
            return False
        if found.offset != UNKNOWN:
            self._told.append(found.time_ms)
        w.history.end(op, "ok", w.now_us(), offset=found.offset, found_ms=found.time_ms, epoch=found.epoch)
        return True

    async def _ask_bound(self, topic: Topic, partition: int, which: int) -> bool:
        """Ask for the high watermark (`LATEST`) or the log start, and return whether there was an answer."""
        w = self._w
        op = w.history.begin("list_offsets", self._process, w.now_us(), topic=topic.name, partition=partition)

        def build(epoch: int) -> Request:
            return offset_for_time(topic.wire, partition, which, epoch, committed=False)

        found = await self._ask(op, topic, partition, build)
        if not isinstance(found, FoundOffset):
            return False
        told = {"high_watermark" if which == LATEST else "log_start": found.offset}
        w.history.end(op, "ok", w.now_us(), **told)
        return True

    async def _ask_epoch(self, topic: Topic, partition: int, wanted: int = UNKNOWN) -> bool:
        """Ask for the end of an epoch, or of any, and return whether there was an answer."""
        w = self._w
        if wanted == UNKNOWN:
            wanted = self._rng.randint(0, max(0, self._client.epoch(topic.name, partition)))
        op = w.history.begin(
            "epoch_end", self._process, w.now_us(), topic=topic.name, partition=partition, wanted_epoch=wanted
        )
        found = await self._ask(op, topic, partition, lambda epoch: epoch_end(topic.wire, partition, wanted, epoch))
        if not isinstance(found, EpochEnd):
            return False
        w.history.end(op, "ok", w.now_us(), epoch=found.epoch, offset=found.offset)
        return True

    async def _ask(self, op: Op, topic: Topic, partition: int, build: Builder) -> FoundOffset | EpochEnd | None:
        """Ask the leader; None: no answer that counts, and the operation is ended."""
        w, error = self._w, "no leader"
        try:
            address = await self._client.leader(topic.name, partition)
            if address is not None:
                epoch = self._client.epoch(topic.name, partition) if self._rng.random() < 0.5 else UNKNOWN
                found: FoundOffset | EpochEnd = await self._client.ask(address, build(epoch), ASK_S)
                if not found.error:
                    if not is_deposed(w.cluster, Position(topic, partition), address):
                        return found
                    error = "the leader is deposed"
                else:
                    error = f"error {found.error}"
        except Lost as lost:
            error = str(lost)
        self._client.forget(topic.name, partition)
        w.history.end(op, "fail", w.now_us(), error=error)
        return None
