"""Opens and closes the partition logs that the controller's image assigns to this broker.

One reconciler compares what the image wants (partitions whose replica set this broker is master of, with their leader
epochs) with what is open, and starts the difference: streams are opened at the controller many partitions to a call,
logs open side by side, failures are retried with back-off and shown in `problems()`. Invariants: a partition is
opened, moved, closed or dropped by one task at a time (`_busy`); the last placement in the image wins; a log is in the
tables only while it may serve; whatever differs from what is wanted is in `_pending`, so that a change costs what it
changes and not a look at all partitions.

Entry: `PartitionManager.start`, then `get` for every request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from broker.hints import HintBox
from broker.moves import PartitionMoves, SendHint, no_hint
from broker.settings import KafkaSettings, LogSettings
from broker.topic_config import log_config
from controller.client import ControllerClient
from controller.errors import UnknownTopicId
from controller.image import Delta
from controller.model import NO_REPLICA_SET, PartitionRecord, StreamState, TopicRecord
from runtime.clock import Clock
from runtime.errors import CorruptData, NotFound, NotLeader, TidelogError, Unavailable
from runtime.tasks import Backoff, TaskSet
from storage.storage import Storage
from stream.log_config import LogConfig
from stream.managers import OpenedStream
from stream.partition_log import PartitionLog

log = logging.getLogger(__name__)

STREAMS_A_PARTITION = 4
PARTITIONS_A_CALL = 1024
"""4,096 streams, the controller's bound for one command."""
OPENS_AT_ONCE = 32
"""Logs opening side by side: enough to hide the bucket's latency, few enough to leave it room."""
_PLACES_ALL = frozenset({"replica_sets", "configs"})
"""Tables whose changes may concern every partition."""
ARRIVALS = 1_024
"""Openings that operators can still read."""
RETENTION_AT_ONCE = 16
"""Partitions whose retention is looked at before requests get their turn: less than 1 ms."""

Key = tuple[bytes, int]


class LeaderNotAvailable(Unavailable):
    """This broker leads the partition and is still opening it. Kafka: LEADER_NOT_AVAILABLE (5), retriable."""

    kafka_code = 5


class PartitionDamaged(CorruptData):
    """This broker leads the partition and cannot open it: what it must read first is damaged or quarantined.

    It is tried again, so that it opens when the data was restored. Kafka: KAFKA_STORAGE_ERROR (56); in Fetch
    CORRUPT_MESSAGE (2).
    """

    kafka_code = 56


@dataclass(slots=True)
class _Wanted:
    topic: TopicRecord
    partition: PartitionRecord
    leader_epoch: int
    master_epoch: int
    since: float
    """Monotonic time at which this leader epoch was first seen here."""


@dataclass(slots=True)
class _Failure:
    error: TidelogError
    backoff: Backoff
    retry_at: float


class PartitionManager:
    """The partition logs of one broker."""

    def __init__(
        self,
        *,
        node_id: int,
        controller: ControllerClient,
        storage: Storage,
        clock: Clock,
        kafka: KafkaSettings,
        defaults: LogSettings,
        rng: random.Random,
        hints: HintBox | None = None,
        send_hint: SendHint = no_hint,
    ) -> None:
        """`hints` holds what other brokers told of partitions that move here; `send_hint` tells them."""
        self._hints = hints
        self.storage = storage
        self._node_id = node_id
        self._controller = controller
        self._clock = clock
        self._kafka = kafka
        self._defaults = defaults
        self._rng = rng
        self._logs: dict[Key, PartitionLog] = {}
        self._by_name: dict[tuple[str, int], PartitionLog] = {}
        self._wanted: dict[Key, _Wanted] = {}
        self._configs: dict[bytes, LogConfig] = {}
        self.moves = PartitionMoves(
            node_id=node_id,
            controller=controller,
            storage=storage,
            clock=clock,
            rng=rng,
            settings=defaults,
            send_hint=send_hint,
        )
        """Partitions that leave."""
        self.arrivals: deque[dict[str, Any]] = deque(maxlen=ARRIVALS)
        """How long the newest openings took: `topic`, `partition`, `leader_epoch`, `open_ms`, `hinted`, `at_ms`."""
        self._leaving: dict[Key, PartitionLog] = {}
        """Closed here, and not yet known to be elsewhere."""
        self._busy: set[Key] = set()
        self._failures: dict[Key, _Failure] = {}
        self._changed = asyncio.Event()
        self._pending: dict[Key, None] = {}
        self._sizes: dict[bytes, int] = {}
        self._changed_topics: set[bytes] = set()
        self._changed_partitions: set[Key] = set()
        self._all_changed = True
        self._settled = asyncio.Event()
        self._gate = asyncio.Semaphore(OPENS_AT_ONCE)
        self._tasks = TaskSet("partitions")
        self._on_opened: list[Callable[[PartitionLog], None]] = []
        self._on_closed: list[Callable[[PartitionLog], None]] = []
        self._unsubscribe: Callable[[], None] | None = None

    # --- what requests ask ---------------------------------------------------------------------------------------

    def get(self, topic: str, partition: int) -> PartitionLog:
        """The open log of a partition. Raises `NotFound`, `NotLeader`, `LeaderNotAvailable`,
        `PartitionDamaged`."""
        found = self._by_name.get((topic, partition))
        if found is not None:
            return found
        record = self._controller.image.topic(topic)
        if record is None:
            raise NotFound(f"topic {topic!r} does not exist")
        raise self._why_not(record, partition)

    def get_by_id(self, topic_id: bytes, partition: int) -> PartitionLog:
        """The open log of a partition by topic id. Raises `UnknownTopicId`, and as `get`."""
        found = self._logs.get((topic_id, partition))
        if found is not None:
            return found
        record = self._controller.image.topics.get(topic_id)
        if record is None:
            raise UnknownTopicId(f"no topic has the id {topic_id.hex()}")
        raise self._why_not(record, partition)

    def _why_not(self, topic: TopicRecord, index: int) -> TidelogError:
        partition = self._controller.image.partition(topic.id, index)
        if partition is None:
            return NotFound(f"topic {topic.name!r} has {topic.partitions} partitions, not one with index {index}")
        leader, _ = self._controller.image.leader(partition)
        if leader != self._node_id:
            return NotLeader(f"broker {leader} leads {topic.name}-{index}, not this one ({self._node_id})")
        failure = self._failures.get((topic.id, index))
        if failure is not None and isinstance(failure.error, CorruptData):
            return PartitionDamaged(
                f"{topic.name}-{index} cannot be opened: {failure.error.message}", hint=failure.error.hint
            )
        return LeaderNotAvailable(f"{topic.name}-{index} is still opening on broker {self._node_id}")

    def leaving(self, topic_id: bytes, partition: int) -> PartitionLog | None:
        """The closed log of a partition that is being handed over. Its watermark listeners are called when the outcome
        is known: whoever only waits for news may as well wait for the name of the new leader."""
        return self._leaving.get((topic_id, partition))

    def heir(self, topic_id: bytes, partition: int) -> tuple[int, int] | None:
        """`(broker id, leader epoch)` of who leads a partition next that is being handed over, if that goes well.

        A client that is told so goes there and finds a leader, or asks again; the sooner it goes the better. If it does
        not go well, the partition is led here again under an epoch that is no smaller (`PartitionMoves`).
        """
        one, record = self._leaving.get((topic_id, partition)), self._controller.image.partition(topic_id, partition)
        if one is None or record is None or record.target == NO_REPLICA_SET:
            return None
        master = self._controller.image.master_of(record.target)
        if master is None or self._controller.image.leader(record) != (self._node_id, one.leader_epoch):
            return None
        return master.id, one.leader_epoch + 1

    def all(self) -> Iterable[PartitionLog]:
        """Every open log, in no particular order."""
        return list(self._logs.values())

    def problems(self) -> list[str]:
        """What could not be opened and why, for operators."""
        found = []
        for key, failure in self._failures.items():
            wanted = self._wanted.get(key)
            if wanted is not None:
                found.append(f"{wanted.topic.name}-{key[1]} does not open: {failure.error}")
        return found + self.moves.problems()

    def counts(self) -> dict[str, int]:
        """`led` (wanted here), `open`, `failing`, `moving` (being moved away now)."""
        return {
            "led": len(self._wanted),
            "open": len(self._logs),
            "failing": len(self._failures),
            "moving": self.moves.in_flight,
        }

    def moves_report(self) -> dict[str, Any]:
        """`moves`: those that go on, then the last that ended; `opened`: the last openings, with how long they took."""
        return {"moves": self.moves.report(), "opened": list(self.arrivals)}

    def on_opened(self, callback: Callable[[PartitionLog], None]) -> None:
        """Call back for each log that opens from now on."""
        self._on_opened.append(callback)

    def on_closed(self, callback: Callable[[PartitionLog], None]) -> None:
        """Call back for each log that stops serving from now on."""
        self._on_closed.append(callback)

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Follow the image from now on, and keep retention."""
        self._unsubscribe = self._controller.subscribe(self._image_changed)
        self._tasks.spawn(self._reconcile_forever(), "reconcile")
        self._tasks.spawn(self._keep_retention(), "retention")
        self._changed.set()

    async def wait_settled(self) -> None:
        """Until everything wanted has been opened or has failed once."""
        await self._settled.wait()

    def _unsettled(self) -> list[Key]:
        """What has neither been opened nor failed once. What is open and leaves already was opened.

        That matters: to leave, a partition waits for an upload, and a start holds uploads back until all is settled.
        """
        return [
            key
            for key in {*self._busy, *self._pending}
            if key not in self._logs and key not in self._leaving and key not in self._failures
        ]

    def unsettled(self, limit: int = 10) -> list[str]:
        """The names of what `wait_settled` waits for, at most `limit`."""
        topics = self._controller.image.topics
        some = self._unsettled()[:limit]
        return [f"{topics[key[0]].name if key[0] in topics else key[0].hex()}-{key[1]}" for key in some]

    async def close(self) -> None:
        """Close every log cleanly. The storage stays open: its last upload comes after this."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._tasks.close()
        await self.moves.close()
        logs = list(self._logs.values())
        self._logs.clear()
        self._by_name.clear()

        async def close_one(one: PartitionLog) -> None:
            async with self._gate:
                try:
                    await one.close()
                except TidelogError as error:
                    log.error(
                        "partition did not close cleanly; it will be recovered",
                        extra={"topic": one.topic, "partition": one.partition, "error": str(error)},
                    )

        await asyncio.gather(*(close_one(one) for one in logs))

    def _image_changed(self, delta: Delta) -> None:
        if delta.version != self._controller.image.placement_version:
            return  # an upload's commit, say
        for table, key, _ in delta.mutations:
            if table == "topics":
                self._changed_topics.add(key)
            elif table == "partitions":
                self._changed_partitions.add(key)
            elif table in _PLACES_ALL:
                self._all_changed = True
        self._changed.set()

    # --- reconciling ---------------------------------------------------------------------------------------------

    async def _reconcile_forever(self) -> None:
        while True:
            self._changed.clear()
            self._refresh_wanted()
            wait_s = self._start_what_is_due()
            if not self._unsettled():
                self._settled.set()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _refresh_wanted(self) -> None:
        """Take over what has changed of the image since the last time."""
        image = self._controller.image
        topics, self._changed_topics = self._changed_topics, set()
        partitions, self._changed_partitions = self._changed_partitions, set()
        if self._all_changed:
            self._all_changed = False
            topics = {*image.topics, *self._sizes}
        if not topics and not partitions:
            return
        mine = {
            record.id: record.master_epoch for record in image.replica_sets.values() if record.master == self._node_id
        }
        for topic_id in sorted(topics):
            self._configs.pop(topic_id, None)
            self._refresh_topic(topic_id, mine)
        for topic_id, index in sorted(partitions):
            topic, partition = image.topics.get(topic_id), image.partition(topic_id, index)
            if topic_id not in topics and topic is not None and partition is not None:  # else the topic has changed
                self._refresh_partition(topic, partition, mine)

    def _refresh_topic(self, topic_id: bytes, mine: dict[int, int]) -> None:
        """What is wanted of a topic; what differs from that is looked at. `mine`: master epochs by replica set."""
        image = self._controller.image
        topic = image.topics.get(topic_id)
        partitions = image.partitions(topic_id)
        for index in range(len(partitions), self._sizes.pop(topic_id, 0)):
            self._want((topic_id, index), None)
            if topic is None:
                self._forget_name((topic_id, index))
        if topic is None:
            return
        self._sizes[topic_id] = len(partitions)
        for partition in partitions:
            self._refresh_partition(topic, partition, mine)

    def _forget_name(self, key: Key) -> None:
        """What is deleted, or closes, is not served under its name any more, which another topic may have by now."""
        one = self._logs.get(key)
        if one is not None and self._by_name.get((one.topic, one.partition)) is one:
            del self._by_name[one.topic, one.partition]

    def _refresh_partition(self, topic: TopicRecord, partition: PartitionRecord, mine: dict[int, int]) -> None:
        key, wanted = (topic.id, partition.index), None
        master_epoch = mine.get(partition.replica_set)
        if master_epoch is not None:
            _, epoch = self._controller.image.leader(partition)
            old = self._wanted.get(key)
            since = old.since if old is not None and old.leader_epoch == epoch else self._clock.monotonic()
            wanted = _Wanted(topic, partition, epoch, master_epoch, since)
        self._want(key, wanted)

    def _want(self, key: Key, wanted: _Wanted | None) -> None:
        one = self._logs.get(key)
        if wanted is None:
            if self._wanted.pop(key, None) is not None or one is not None:
                self._pending[key] = None
            return
        self._wanted[key] = wanted
        if one is None or wanted.leader_epoch > one.leader_epoch:
            self._pending[key] = None
        else:
            config = self._config(wanted.topic)
            if config != one.config:
                one.config = config

    def _config(self, topic: TopicRecord) -> LogConfig:
        """The effective configuration now; logs of one topic share one object."""
        config = self._configs.get(topic.id)
        if config is None:
            image = self._controller.image
            config = self._configs[topic.id] = log_config(
                image.topics.get(topic.id, topic).configs,
                self._kafka,
                self._defaults,
                cluster=image.configs.get(("cluster", ""), {}),
                broker=image.configs.get(("broker", str(self._node_id)), {}),
            )
        return config

    def _start_what_is_due(self) -> float | None:
        """Start tasks for all that differs and may be started; returns the seconds to the next retry."""
        now = self._clock.monotonic()
        due: list[Key] = []
        next_retry = self._start_moves()
        for key in list(self._pending):
            if key in self._busy:
                continue
            one, wanted = self._logs.get(key), self._wanted.get(key)
            if one is not None and (wanted is None or wanted.leader_epoch > one.leader_epoch):
                self._busy.add(key)
                self._withdraw(key)
                self._tasks.spawn(self._finish(key, one, dropped=key[0] not in self._controller.image.topics), "close")
            elif one is not None or wanted is None:
                del self._pending[key]
                self._failures.pop(key, None)
            else:
                failure = self._failures.get(key)
                if failure is None or failure.retry_at <= now:
                    due.append(key)
                else:
                    remaining = failure.retry_at - now
                    next_retry = remaining if next_retry is None else min(next_retry, remaining)
        handed_over = {key: found for key in due if (found := self._handed_over(key)) is not None}
        for key, opened in handed_over.items():
            self._busy.add(key)
            self._tasks.spawn(self._open_batch({key: self._wanted[key]}, opened), "open")
        asked = [key for key in due if key not in handed_over]
        for start in range(0, len(asked), PARTITIONS_A_CALL):
            batch = {key: self._wanted[key] for key in asked[start : start + PARTITIONS_A_CALL]}
            self._busy.update(batch)
            self._tasks.spawn(self._open_batch(batch), "open")
        return next_retry

    def _handed_over(self, key: Key) -> dict[int, OpenedStream] | None:
        """The streams of a partition that a hand-over opened for this broker, which had said that it is ready.

        Only for the first opening, which has the hint: what the image tells is then what the controller would answer.
        """
        wanted = self._wanted[key]
        if self._hints is None or not self._hints.holds(key, wanted.leader_epoch):
            return None
        first, opened = wanted.partition.first_stream, {}
        for stream_id in range(first, first + STREAMS_A_PARTITION):
            one = self._controller.image.streams.get(stream_id)
            ours = (StreamState.OPENED, wanted.partition.replica_set, wanted.leader_epoch)
            if one is None or (one.state, one.replica_set, one.epoch) != ours:
                return None
            opened[stream_id] = one.as_opened()
        return opened

    def _start_moves(self) -> float | None:
        """Start to move away what has a target and is open; returns the seconds to the next retry."""
        next_retry: float | None = None
        leaving: set[Key] = set()
        for key in sorted(self._controller.image.index.moving):
            wanted, one = self._wanted.get(key), self._logs.get(key)
            if wanted is None or wanted.partition.target == NO_REPLICA_SET:
                continue
            leaving.add(key)
            self.moves.follow(wanted.topic.name, wanted.partition)
            if one is None or key in self._busy or wanted.leader_epoch > one.leader_epoch:
                continue
            wait_s = self.moves.wait_s(key)
            if wait_s == 0:
                self._busy.add(key)
                self.moves.take(key)
                self._tasks.spawn(self._move(key, one, wanted.master_epoch), "move")
            elif wait_s is not None:
                next_retry = wait_s if next_retry is None else min(next_retry, wait_s)
        self.moves.keep(leaving)
        return next_retry

    async def _move(self, key: Key, one: PartitionLog, master_epoch: int) -> None:
        def withdraw() -> None:
            self._leaving[key] = one
            self._withdraw(key)

        try:
            await self.moves.run(key, one, master_epoch, withdraw)
        finally:
            if self._leaving.pop(key, None) is not None:
                one.tell_listeners()
            self._busy.discard(key)
            self._pending[key] = None  # the image says whether to open it here again
            self._changed.set()

    def _withdraw(self, key: Key) -> None:
        self._forget_name(key)
        one = self._logs.pop(key)
        for callback in self._on_closed:
            callback(one)

    async def _finish(self, key: Key, one: PartitionLog, *, dropped: bool) -> None:
        try:
            if dropped:
                await one.drop()
            else:
                await one.close()
        except TidelogError as error:
            log.error(
                "partition did not close cleanly",
                extra={"topic": one.topic, "partition": one.partition, "error": str(error)},
            )
        finally:
            self._busy.discard(key)
            self._changed.set()

    async def _open_batch(self, batch: dict[Key, _Wanted], opened: dict[int, OpenedStream] | None = None) -> None:
        try:
            if opened is None:
                opened = await self._open_streams(batch)
        except TidelogError as error:
            for key in batch:
                self._failed(key, error)
        else:
            async with asyncio.TaskGroup() as group:
                for key, wanted in batch.items():
                    group.create_task(self._open_one(key, wanted, opened))
        finally:
            self._busy.difference_update(batch)
            self._changed.set()

    async def _open_streams(self, batch: dict[Key, _Wanted]) -> dict[int, OpenedStream]:
        by_replica_set: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for wanted in batch.values():
            streams = by_replica_set.setdefault((wanted.partition.replica_set, wanted.master_epoch), [])
            first = wanted.partition.first_stream
            streams.extend((first + n, wanted.leader_epoch) for n in range(STREAMS_A_PARTITION))
        opened: dict[int, OpenedStream] = {}
        for (replica_set, master_epoch), streams in by_replica_set.items():
            for one in await self._controller.open_streams(replica_set, master_epoch, streams):
                opened[one.stream_id] = one
        return opened

    async def _open_one(self, key: Key, wanted: _Wanted, opened: dict[int, OpenedStream]) -> None:
        first = wanted.partition.first_stream
        streams = (opened[first], opened[first + 1], opened[first + 2], opened[first + 3])
        tails = self._hints.claim(key, wanted.leader_epoch, streams) if self._hints is not None else {}
        async with self._gate:
            try:
                one = await PartitionLog.open(
                    topic=wanted.topic.name,
                    topic_id=wanted.topic.id,
                    partition=wanted.partition.index,
                    leader_epoch=wanted.leader_epoch,
                    streams=streams,
                    storage=self.storage,
                    manager=self._controller,
                    config=self._config(wanted.topic),
                    clock=self._clock,
                    tails=tails,
                )
            except TidelogError as error:
                self._failed(key, error)
                return
        self._failures.pop(key, None)
        if tails:
            one.came_at = self._clock.monotonic()
        self._note_arrival(one, wanted, hinted=bool(tails))
        self._logs[key] = one
        named = self._controller.image.topic(one.topic)
        if named is not None and named.id == one.topic_id:  # else it was deleted while it opened
            self._by_name[one.topic, one.partition] = one
        for callback in self._on_opened:
            callback(one)

    def _note_arrival(self, one: PartitionLog, wanted: _Wanted, *, hinted: bool) -> None:
        self.arrivals.append(
            {
                "topic": one.topic,
                "partition": one.partition,
                "leader_epoch": one.leader_epoch,
                "open_ms": round((self._clock.monotonic() - wanted.since) * 1000, 1),
                "hinted": hinted,
                "at_ms": self._clock.time_ms(),
            }
        )

    def _failed(self, key: Key, error: TidelogError) -> None:
        failure = self._failures.get(key)
        backoff = failure.backoff if failure is not None else Backoff(0.1, 5.0, self._rng)
        self._failures[key] = _Failure(error, backoff, self._clock.monotonic() + backoff.next_delay_s())
        wanted = self._wanted.get(key)
        log.warning(
            "partition does not open; will try again",
            extra={"topic": wanted.topic.name if wanted else key[0].hex(), "partition": key[1], "error": str(error)},
        )

    # --- retention -----------------------------------------------------------------------------------------------

    async def _keep_retention(self) -> None:
        while True:
            await self._clock.sleep(self._defaults.retention_check_interval_ms / 1000)
            for number, one in enumerate(self.all(), start=1):
                if number % RETENTION_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if one.closed:
                    continue
                try:
                    await one.apply_retention()
                except TidelogError as error:
                    log.warning(
                        "retention could not be applied; will try again",
                        extra={"topic": one.topic, "partition": one.partition, "error": str(error)},
                    )
