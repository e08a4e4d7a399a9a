"""Opens and closes the partition logs that the controller's image assigns to this broker.

One loop asks the reconciler (`tidelog.broker.partitions.reconciler`) for the differences between the image and the open
logs, and starts tasks for them: streams are opened at the controller, many partitions per call; logs open concurrently;
failures are retried with back-off and shown in `problems()`. This module does the I/O: it holds the logs, opens, closes
and moves them, and reports the outcomes to the reconciler. Invariant: a log is in the tables only while it may serve.

Entry: `PartitionManager.start`, then `get` for every request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tidelog.broker.partitions import checkpoints
from tidelog.broker.partitions.gathering import Gathering
from tidelog.broker.partitions.hints import NOTHING_CLAIMED
from tidelog.broker.partitions.move_table import Move
from tidelog.broker.partitions.moves import NO_HINTS, HintExchange, PartitionMoves
from tidelog.broker.partitions.openings import LeaderNotAvailable, Openings
from tidelog.broker.partitions.reconciler import PartitionReconciler, WantedPartition, streams_to_open
from tidelog.broker.partitions.storages import Mastership, MasterStorages
from tidelog.broker.partitions.topic_config import log_config
from tidelog.broker.settings import KafkaSettings, LogSettings
from tidelog.broker.telemetry.traced import TracedOpen
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.image import Delta
from tidelog.controller.model.errors import UnknownTopicId
from tidelog.controller.model.records import MAX_TOPIC_CHARS, NO_REPLICA_SET, PartitionKey, PartitionRecord, TopicRecord
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, Fenced, NotFound, NotLeader, TidelogError, Unavailable
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.task_errors import ERRORS, expected
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.commits import StreamRange
from tidelog.stream.log_config import LogConfig
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_log import LedPartition, PartitionLog
from tidelog.stream.partition_recovery import meta_to_read, scan_to_read

logger = logging.getLogger(__name__)

OPENS_AT_ONCE = 32
"""Logs opened concurrently: enough to hide the bucket's latency, few enough not to saturate it."""
ARRIVALS = 1_024
"""Number of past openings kept for operators."""
RETENTION_AT_ONCE = 16
"""Partitions whose retention is checked before the loop serves requests again: less than 1 ms."""


class PartitionDamaged(CorruptData):
    """This broker leads the partition and cannot open it: data that it must read first is damaged or quarantined.

    Opening is retried, so the partition opens once the data was restored. Kafka: KAFKA_STORAGE_ERROR (56); in Fetch
    CORRUPT_MESSAGE (2).
    """

    kafka_code = 56


class PartitionManager:
    """The partition logs of one broker."""

    def __init__(
        self,
        *,
        node_id: int,
        controller: ControllerClient,
        storages: MasterStorages,
        clock: Clock,
        kafka: KafkaSettings,
        defaults: LogSettings,
        rng: random.Random,
        hints: HintExchange = NO_HINTS,
    ) -> None:
        self._hints = hints.taken
        self.storages = storages
        self._node_id = node_id
        self._controller = controller
        self._clock = clock
        self._kafka = kafka
        self._defaults = defaults
        self._logs: dict[PartitionKey, PartitionLog] = {}
        self._by_name: dict[tuple[str, int], PartitionLog] = {}
        self._configs: dict[bytes, LogConfig] = {}
        self.moves = PartitionMoves(
            controller=controller,
            storages=storages,
            clock=clock,
            rng=rng,
            settings=defaults,
            send_hint=hints.send,
        )
        """The moves of partitions away from this broker."""
        has_hint = hints.taken.holds if hints.taken is not None else lambda key, leader_epoch: False
        self._reconciler = PartitionReconciler(node_id, self.moves.table, rng, has_hint)
        self.arrivals: deque[dict[str, Any]] = deque(maxlen=ARRIVALS)
        """Durations of the newest openings: `topic`, `partition`, `leader_epoch`, `open_ms`, `hinted`, `at_ms`."""
        self._leaving: dict[PartitionKey, PartitionLog] = {}
        """Closed here; the new owner is not known yet."""
        self._in_retention: set[object] = set()
        """The WALs whose partitions' retention is being applied: one that has no quorum holds up no other."""
        self._openings = Openings(clock)
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._gate = asyncio.Semaphore(OPENS_AT_ONCE)
        self._tasks = TaskSet("partitions")
        self._limiter = LogLimiter(logger, clock)
        self._on_opened: list[Callable[[PartitionLog], None]] = []
        self._on_closed: list[Callable[[PartitionLog], None]] = []
        self.on_traced: Callable[[str, TracedOpen], None] | None = None
        """Called with `open` or `close`, and what has opened or closed, for traces."""
        self._unsubscribe: Callable[[], None] | None = None

    # --- requests ------------------------------------------------------------------------------------------------

    def get(self, topic: str, partition: int) -> PartitionLog:
        """Return the open log of a partition. Raises `NotFound`, `NotLeader`, `LeaderNotAvailable`,
        `PartitionDamaged`."""
        found = self._by_name.get((topic, partition))
        if found is not None:
            return found
        record = self._controller.image.topic(topic)
        if record is None:
            # its name may be longer than any topic's, and asked for with many partitions
            raise NotFound(f"topic {topic[:MAX_TOPIC_CHARS]!r} does not exist")
        raise self._why_not(record, partition)

    def get_by_id(self, topic_id: bytes, partition: int) -> PartitionLog:
        """Return the open log of a partition by topic id. Raises `UnknownTopicId`, and as `get`."""
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
            # Another broker may have named this one already: clients can be quicker than the metadata.
            now = self._clock.monotonic()
            is_coming = self._is_coming(partition)
            opening = self._openings.get((topic.id, index), now, leads=False) if is_coming else None
            if opening is not None:
                return LeaderNotAvailable(f"{topic.name}-{index} may be about to open here", opening=opening)
            return NotLeader(f"broker {leader} leads {topic.name}-{index}, not this one ({self._node_id})")
        error = self._reconciler.failure((topic.id, index))
        if isinstance(error, CorruptData):
            return PartitionDamaged(f"{topic.name}-{index} cannot be opened: {error.message}", hint=error.hint)
        key, opening = (topic.id, index), None
        if error is None and key not in self._leaving:
            wanted = self._reconciler.wanted.get(key)  # None: the reconciler hears of it in a moment
            opening = self._openings.get(key, wanted.since if wanted is not None else self._clock.monotonic())
        return LeaderNotAvailable(f"{topic.name}-{index} is still opening on broker {self._node_id}", opening=opening)

    def _is_coming(self, partition: PartitionRecord | None) -> bool:
        """Return whether a partition is being moved to this broker, or it may be elected master of its replica set."""
        if partition is None:
            return False
        image = self._controller.image
        row = image.replication.get(partition.replica_set)
        if row is not None and row.election is not None:
            return any(each.broker_id == self._node_id for each in row.in_sync)
        master = image.master_of(partition.target) if partition.target != NO_REPLICA_SET else None
        return master is not None and master.id == self._node_id

    def leaving(self, topic_id: bytes, partition: int) -> PartitionLog | None:
        """Return the closed log of a partition that is being handed over. Its watermark listeners are called when the
        outcome is known, so a long-polling Fetch may wait on it for the name of the new leader."""
        return self._leaving.get((topic_id, partition))

    def next_leader(self, topic_id: bytes, partition: int) -> tuple[int, int] | None:
        """Return `(broker id, leader epoch)` of the next leader of a partition that is being handed over.

        A client that gets it connects there and finds a leader, or refreshes its metadata; the sooner the better. If
        the
        hand-over fails, the partition is led here again under an epoch that is no smaller (`PartitionMoves`).
        """
        one, record = self._leaving.get((topic_id, partition)), self._controller.image.partition(topic_id, partition)
        if one is None or record is None or record.target == NO_REPLICA_SET:
            return None
        master = self._controller.image.master_of(record.target)
        if master is None or self._controller.image.leader(record) != (self._node_id, one.leader_epoch):
            return None
        return master.id, one.leader_epoch + 1

    def all(self) -> Iterable[PartitionLog]:
        """Return every open log, in no particular order."""
        return list(self._logs.values())

    def of_set(self, replica_set: int) -> list[PartitionLog]:
        """Return the open logs of the partitions of a replica set."""
        image = self._controller.image
        return [
            one
            for (topic_id, index), one in self._logs.items()
            if (record := image.partition(topic_id, index)) is not None and record.replica_set == replica_set
        ]

    def problems(self) -> list[str]:
        """Return the partitions that could not be opened, with the reason, for operators."""
        return self._reconciler.problems() + self.moves.table.problems()

    def counts(self) -> dict[str, int]:
        """Return the counts `led` (wanted here), `open`, `failing`, `moving` (being moved away now)."""
        return {
            "led": len(self._reconciler.wanted),
            "open": len(self._logs),
            "failing": self._reconciler.failing,
            "moving": self.moves.table.running,
        }

    def moves_report(self) -> dict[str, Any]:
        """Return `moves`: those in progress, then the last completed; `opened`: the last openings and their
        durations."""
        return {"moves": self.moves.table.report(), "opened": list(self.arrivals)}

    def on_opened(self, callback: Callable[[PartitionLog], None]) -> None:
        """Call `callback` for each log that opens from now on."""
        self._on_opened.append(callback)

    def on_closed(self, callback: Callable[[PartitionLog], None]) -> None:
        """Call `callback` for each log that stops serving from now on."""
        self._on_closed.append(callback)

    # --- life cycle ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start following the image and applying retention."""
        self._unsubscribe = self._controller.subscribe(self._image_changed)
        self._tasks.keep(self._reconcile_forever, "reconcile")
        self._tasks.keep(self._keep_retention, "retention")
        self._tasks.keep(self._keep_opens_short, "checkpoints")
        self.storages.on_changed(self._storages_changed)
        self._changed.set()

    def _storages_changed(self) -> None:
        self._reconciler.all_changed()
        self._changed.set()

    async def wait_settled(self) -> None:
        """Wait until every wanted partition has been opened or has failed once."""
        await self._settled.wait()

    def unsettled(self, limit: int = 10) -> list[str]:
        """Return the names of the partitions that `wait_settled` waits for, at most `limit`."""
        topics = self._controller.image.topics
        some = self._reconciler.unsettled()[:limit]
        return [f"{topics[key[0]].name if key[0] in topics else key[0].hex()}-{key[1]}" for key in some]

    async def close(self) -> None:
        """Close every log cleanly. The storage stays open: its last upload follows."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._tasks.close()
        self._openings.end_all()
        await self.moves.close()
        logs = list(self._logs.values())
        self._logs.clear()
        self._by_name.clear()

        async def close_one(one: PartitionLog) -> None:
            async with self._gate:
                try:
                    await one.close()
                except Exception as error:  # noqa: BLE001  # whatever it is: the stop goes on, with uploads and WALs
                    if not isinstance(error, TidelogError):
                        ERRORS.note("partitions", error, ended=isinstance(error, AssertionError))
                    logger.error(
                        "partition did not close cleanly; it will be recovered",
                        extra={"topic": one.topic, "partition": one.partition, "error": str(error)},
                    )

        await asyncio.gather(*(close_one(one) for one in logs))

    def _image_changed(self, delta: Delta) -> None:
        if delta.version != self._controller.image.placement_version:
            return  # e.g. the commit of an upload
        self._reconciler.image_changed(delta)
        self._changed.set()

    # --- reconciling ---------------------------------------------------------------------------------------------

    async def _reconcile_forever(self) -> None:
        self._reconciler.all_changed()  # perhaps a change was lost with an unexpected error
        while True:
            self._changed.clear()
            self._refresh()
            wait_s = self._start_what_is_due()
            if not self._reconciler.unsettled():
                self._settled.set()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _refresh(self) -> None:
        """Apply the changes of the image since the last call."""
        found = self._reconciler.refresh(self._controller.image, self._clock.monotonic(), self.storages.terms())
        for topic_id in found.topics:
            self._configs.pop(topic_id, None)
        for key in found.deleted:
            self._forget_name(key)
        for key in self._openings.pending():
            if key not in self._reconciler.wanted and not self._is_coming(self._controller.image.partition(*key)):
                self._openings.end(key)
        for key, topic in found.kept:
            one, config = self._logs[key], self._config(topic)
            if config != one.config:
                one.config = config

    def _forget_name(self, key: PartitionKey) -> None:
        """Stop serving a deleted or closing partition under its name, which another topic may have by now."""
        one = self._logs.get(key)
        if one is not None and self._by_name.get((one.topic, one.partition)) is one:
            del self._by_name[one.topic, one.partition]

    def _config(self, topic: TopicRecord) -> LogConfig:
        """Return the current effective configuration; logs of one topic share one object."""
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
        """Start tasks for all differences that are due; return the seconds to the next retry."""
        plan = self._reconciler.plan(self._controller.image, self._clock.monotonic(), self._clock.time_ms())
        for move, wanted in plan.moves:
            self._tasks.spawn(self._move(move, self._logs[move.key], wanted.term), "move")
        for key, deleted in plan.closes:
            one = self._withdraw(key)
            self._tasks.spawn(self._finish(key, one, dropped=deleted), "close")
        for key, wanted, opened in plan.handed_over:
            self._tasks.spawn(self._open_batch({key: wanted}, opened), "open")
        for batch in plan.opens:
            self._tasks.spawn(self._open_batch(batch), "open")
        return plan.wait_s

    async def _move(self, move: Move, one: PartitionLog, term: Mastership) -> None:
        key = move.key

        def withdraw() -> None:
            self._leaving[key] = one
            self._withdraw(key)
            self._reconciler.withdrawn(key)

        try:
            await self.moves.run(move, one, term, withdraw)
        finally:
            if self._leaving.pop(key, None) is not None:
                one.tell_listeners()
            self._ended([key])

    def _ended(self, keys: Iterable[PartitionKey]) -> None:
        self._reconciler.ended(keys)
        self._changed.set()

    def _withdraw(self, key: PartitionKey) -> PartitionLog:
        self._forget_name(key)
        one = self._logs.pop(key)
        for callback in self._on_closed:
            callback(one)
        return one

    async def _finish(self, key: PartitionKey, one: PartitionLog, *, dropped: bool) -> None:
        began, failure = self._clock.monotonic(), ""
        try:
            if dropped:
                await one.drop()
            else:
                await one.close()
        except TidelogError as error:
            failure = str(error)
            fields = {"topic": one.topic, "partition": one.partition, "error": str(error)}
            if isinstance(error, Fenced):  # another master has the partition, as all of its set, and recovers it
                self._limiter.line("fenced", logging.INFO, "partition did not close cleanly", fields)
            else:
                logger.error("partition did not close cleanly", extra=fields)
        finally:
            self._ended([key])
            self._trace("close", one, began, error=failure)

    def _trace(self, what: str, one: PartitionLog, began: float, *, hinted: bool = False, error: str = "") -> None:
        if self.on_traced is not None:
            ended, epoch = self._clock.monotonic(), one.leader_epoch
            self.on_traced(what, TracedOpen(one.topic, one.topic_id, one.partition, epoch, began, ended, hinted, error))

    async def _open_batch(
        self, batch: dict[PartitionKey, WantedPartition], opened: dict[int, OpenedStream] | None = None
    ) -> None:
        gathering = Gathering(self.storages, len(batch))
        try:
            if opened is None:
                opened = await self._open_streams(batch)
                await gathering.gather(self._metas(batch, opened))
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            self._not_opened(batch, failure)
        else:
            await self._open_all(batch, opened, gathering)
        finally:
            self._ended(batch)

    async def _open_all(
        self, batch: dict[PartitionKey, WantedPartition], opened: dict[int, OpenedStream], gathering: Gathering
    ) -> None:
        """Open each, whatever happens to the others."""
        began = self._clock.monotonic()
        outcomes = await asyncio.gather(
            *(self._open_one(key, wanted, opened, gathering) for key, wanted in batch.items()), return_exceptions=True
        )
        if scanned := [count for count in outcomes if isinstance(count, int) and count]:
            extra = {
                "partitions": len(scanned),
                "batches_scanned": sum(scanned),
                "ms": round((self._clock.monotonic() - began) * 1000),
            }
            logger.info("partitions opened after an unclean stop", extra=extra)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _not_opened(self, keys: Iterable[PartitionKey], failure: Exception) -> None:
        """Retry partitions after a pause; a failed assertion is raised again then."""
        is_assertion = isinstance(failure, AssertionError)
        error = Unavailable(f"a check failed: {failure}") if is_assertion else expected("partitions", failure)
        for key in keys:
            self._failed(key, error)
        if is_assertion:
            raise failure

    async def _open_streams(self, batch: dict[PartitionKey, WantedPartition]) -> dict[int, OpenedStream]:
        opened: dict[int, OpenedStream] = {}
        for (replica_set, master_epoch), streams in streams_to_open(batch.values()).items():
            for one in await self._controller.open_streams(replica_set, master_epoch, streams):
                opened[one.stream_id] = one
        return opened

    def _metas(
        self, batch: dict[PartitionKey, WantedPartition], opened: dict[int, OpenedStream]
    ) -> dict[int, list[StreamRange]]:
        """Return the meta streams of these partitions by replica set, but those of which there is a hint."""
        found: dict[int, list[StreamRange]] = {}
        for key, wanted in batch.items():
            if self._hints is None or not self._hints.holds(key, wanted.leader_epoch):
                meta = opened[wanted.partition.first_stream]
                found.setdefault(wanted.partition.replica_set, []).extend(meta_to_read(meta))
        return found

    async def _open_one(
        self,
        key: PartitionKey,
        wanted: WantedPartition,
        opened: dict[int, OpenedStream],
        gathering: Gathering,
    ) -> int:
        """Open one; return how many batches it had to scan."""
        first, replica_set = wanted.partition.first_stream, wanted.partition.replica_set
        streams = (opened[first], opened[first + 1], opened[first + 2], opened[first + 3])
        hints = self._hints
        tails, note = NOTHING_CLAIMED if hints is None else hints.claim(key, wanted.leader_epoch, streams)

        is_coming = True

        async def before_scan(start_offset: int) -> None:
            nonlocal is_coming
            is_coming = False
            needed = scan_to_read(streams, start_offset)
            if self.storages.in_term(wanted.term).holds(needed):
                gathering.ended()
                return
            self._gate.release()  # others shall come to their scans, too
            try:
                await gathering.bring(replica_set, needed)
            finally:
                await self._gate.acquire()

        try:
            async with self._gate:
                one = await PartitionLog.open(
                    led=self._led(wanted),
                    streams=streams,
                    storage=self.storages.in_term(wanted.term),
                    manager=self._controller,
                    config=self._config(wanted.topic),
                    clock=self._clock,
                    tails=tails,
                    before_scan=before_scan,
                )
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            self._not_opened([key], failure)
            return 0
        finally:
            if is_coming:
                gathering.ended()
        self._reconciler.opened(key, one.leader_epoch)
        if tails:
            one.came_at = self._clock.monotonic()
            one.hint_note = lambda: note
        self._note_arrival(one, wanted, hinted=bool(tails))
        self._trace("open", one, wanted.since, hinted=bool(tails))
        self._logs[key] = one
        named = self._controller.image.topic(one.topic)
        if named is not None and named.id == one.topic_id:  # else it was deleted while it was opening
            self._by_name[one.topic, one.partition] = one
        for callback in self._on_opened:
            callback(one)
        self._openings.end(key)
        return one.batches_scanned

    def _led(self, wanted: WantedPartition) -> LedPartition:
        is_branch = wanted.partition.first_stream in self._controller.image.branches
        topic, index = wanted.topic, wanted.partition.index
        return LedPartition(topic.name, topic.id, index, wanted.leader_epoch, is_branch)

    def _note_arrival(self, one: PartitionLog, wanted: WantedPartition, *, hinted: bool) -> None:
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

    def _failed(self, key: PartitionKey, error: TidelogError) -> None:
        self._reconciler.failed(key, error, self._clock.monotonic())
        self._openings.end(key)
        wanted = self._reconciler.wanted.get(key)
        topic = wanted.topic.name if wanted else key[0].hex()
        fields = {"topic": topic, "partition": key[1], "error": str(error)}
        self._limiter.line("open", logging.WARNING, "partition does not open; retrying", fields)

    # --- checkpoints and retention -------------------------------------------------------------------------------

    async def _keep_opens_short(self) -> None:
        while True:
            await self._clock.sleep(checkpoints.INTERVAL_S)
            await checkpoints.write_checkpoints(checkpoints.due(self.all(), self._defaults.recovery_batches))
            await checkpoints.shorten_metas(self.all())

    async def _keep_retention(self) -> None:
        while True:
            await self._clock.sleep(self._defaults.retention_check_interval_ms / 1000)
            by_wal: dict[object, list[PartitionLog]] = {}
            for one in self.all():
                by_wal.setdefault(one.wal, []).append(one)
            for wal, logs in by_wal.items():
                if wal not in self._in_retention:
                    self._in_retention.add(wal)
                    self._tasks.spawn(self._apply_retention(wal, logs), "retention of a WAL")

    async def _apply_retention(self, wal: object, logs: list[PartitionLog]) -> None:
        """Apply the retention of the partitions on one WAL. Without its quorum that waits, until it has one again."""
        try:
            for number, one in enumerate(logs, start=1):
                if number % RETENTION_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if one.closed:
                    continue
                try:
                    await one.apply_retention()
                except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
                    fields = {"topic": one.topic, "partition": one.partition}
                    error = str(expected("partitions", failure))
                    logger.warning("retention could not be applied; retrying", extra={**fields, "error": error})
        finally:
            self._in_retention.discard(wal)
