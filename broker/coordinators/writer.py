"""The writer of a partition of an internal topic: batches writes, applies them in order once confirmed, bounds the log.

Every change goes through a queue. The writer combines waiting writes into one batch with one wait for the confirm
offset, and calls each `done` in order when the batch is confirmed: the state in memory always equals the content of the
log. A write that depends on the latest state (a removal) is processed alone, and built only then. Records of a
producer's transaction and markers pass through the same queue; the log may refuse one of these by itself.

Bound of the log: when it has grown by more than `max(1 MiB, 2 × live)` over its live content, all live records are
appended again (a snapshot); once these are confirmed, the records before them are deleted. A crash in between leaves
old records followed by the same state, so replaying gives the same result; readers see ordinary records throughout.
To delete may take a word of the controller, which may be away for long: writes do not wait for it.

Pending records are part of a snapshot: they are written again as batches of the same producers, and belong to the
same transactions. To keep the old ones instead, from the first open transaction on, would be less to write, but nothing
could be deleted while one producer's transaction hangs.

Invariants: `done` is called exactly once for each write, with NOT_COORDINATOR after the partition is lost; nothing is
deleted before its replacement is confirmed. A write of several batches of which only some were appended loses the
partition too: it is loaded again, so that what is in memory is never less than what is in the log. So does an
exception that no interface documents, after a pause.

Entry: `StateWriter.submit`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog.batch.batch import ControlType, Record, build_batch, build_control_batch
from tidelog.broker.coordinators.errors import WriteError
from tidelog.broker.coordinators.store import KeyValue, StateStore, TransactionalStore, TxnProducer
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, Overloaded, TidelogError, Unavailable
from tidelog.runtime.task_errors import ERRORS, expected
from tidelog.runtime.tasks import TaskSet
from tidelog.stream.errors import FencedCoordinator, InvalidProducerEpoch, TransactionNotVerified

if TYPE_CHECKING:
    from tidelog.stream.partition_log import AppendResult, PartitionLog
    from tidelog.stream.producer_state import VerificationGuard

logger = logging.getLogger(__name__)

BATCH_BYTES = 256 * 1024
"""Maximum size of a batch; a larger record is written alone."""
MIN_GARBAGE_BYTES = 1 << 20
GARBAGE_FACTOR = 2
WRITABLE_BUDGET_S = 5.0
"""How long a write waits while the WAL is full (Kafka: offsets.commit.timeout.ms)."""
RETRY_PAUSE_S = 0.05
TIDY_RETRY_S = 30.0
"""Pause after a failed snapshot: a retry writes the whole live content again."""
DEFECT_PAUSE_S = 1.0
"""Pause before the partition is loaded again after an exception that nobody expected: the same may end it again."""
MAX_QUEUED = 100_000
"""Maximum number of waiting writes; at the bound requests fail with a retriable error."""


class OfTransaction(NamedTuple):
    """How the records of a producer's open transaction are appended: a batch of their own, without a sequence."""

    producer: TxnProducer
    guard: VerificationGuard | None
    """From `PartitionLog.begin_verification`, if the transaction is not open in this log."""


class TxnMarker(NamedTuple):
    """The end of a producer's transaction; a write of it has no records."""

    producer: TxnProducer
    coordinator_epoch: int
    """int32."""
    commit: bool
    transaction_version: int
    """2: the producer's epoch is above that of the transaction's batches (KIP-890)."""


class Write(NamedTuple):
    """One change."""

    build: Callable[[], Sequence[KeyValue]]
    """Called when the write is at the head of the queue."""
    done: Callable[[WriteError], None]
    alone: bool = False
    """`build` requires that all earlier writes are applied."""
    of: OfTransaction | TxnMarker | None = None
    """None: plain records, which share batches with those of other writes."""


class _Part(NamedTuple):
    """Writes that succeed or fail together."""

    writes: Sequence[Write]
    batches: Iterable[bytes]
    append: Callable[[bytes], AppendResult]


class _Appended(NamedTuple):
    error: WriteError
    first_offset: int = -1
    size_bytes: int = 0
    """Size of the batches appended; with COORDINATOR_NOT_AVAILABLE or UNKNOWN_SERVER_ERROR, before the one refused."""
    wal_end: int = -1

    @property
    def is_torn(self) -> bool:
        """Whether a part of the batches is in the log, and the rest is not."""
        return self.error is not WriteError.NONE and self.size_bytes > 0


class StateWriter:
    """Writes one partition."""

    def __init__(
        self,
        partition_log: PartitionLog,
        clock: Clock,
        tasks: TaskSet,
        store: StateStore,
        on_lost: Callable[[bool], None],
    ) -> None:
        """`on_lost` is called when no more is written, with whether the log goes on: then it must be loaded again."""
        self._log = partition_log
        self._clock = clock
        self._tasks = tasks
        self._store = store
        self._on_lost = on_lost
        self._queue: deque[Write] = deque()
        self._current: list[Write] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._applied_to = partition_log.log_end_offset
        self._appended_to = self._applied_to
        self._log_bytes = 0
        self._live_bytes = 0
        self._is_counted = False
        """Whether `_live_bytes` is known."""
        self._trim_to: int | None = None
        """Records before this offset are replaced by a confirmed snapshot."""
        self._trimming: asyncio.Task[None] | None = None
        self._tidy_not_before = 0.0

    @property
    def is_full(self) -> bool:
        """Whether a new request should be refused."""
        return len(self._queue) >= MAX_QUEUED

    def stats(self) -> dict[str, int]:
        """Bytes of the log, its live bytes at the last count, and waiting writes."""
        return {"log_bytes": self._log_bytes, "live_bytes": self._live_bytes, "queued": len(self._queue)}

    @property
    def applied_to(self) -> int:
        """Return the offset before which all of the log is in the store, and nothing from it on."""
        return self._applied_to

    @property
    def log_bytes(self) -> int:
        """Return the size of the log."""
        return self._log_bytes

    def loaded(self, log_bytes: int) -> None:
        """Set the size of the loaded log, and start a snapshot if it is needed."""
        self._log_bytes = log_bytes
        self._wake()

    def submit(self, write: Write) -> None:
        """Queue a change. `done` may be called immediately if the partition is lost."""
        if self._closed:
            write.done(WriteError.NOT_COORDINATOR)
            return
        self._queue.append(write)
        self._wake()

    def close(self) -> None:
        """Stop because this broker no longer leads: fail all waiting writes."""
        self._closed = True
        for task in (self._task, self._trimming):
            if task is not None:
                task.cancel()
        self._fail_all()

    def _wake(self) -> None:
        if self._task is None and not self._closed:
            self._task = self._tasks.spawn(self._run(), f"{self._log.topic}-{self._log.partition}")

    async def _run(self) -> None:
        try:
            if not self._is_counted:
                await self._count()
            await self._tidy()
            while self._queue and not self._closed:
                await self._write_next()
                await self._tidy()
            self._task = None
        except Exception as error:  # noqa: BLE001  # nobody knows what was done: the log does
            ERRORS.note(self._log.topic, error, ended=False)
            self._closed = True
            self._fail_all()
            await self._clock.sleep(DEFECT_PAUSE_S)
            self._task = None
            self._lose(log_goes_on=True)
        finally:
            if self._task is not None:  # cancelled
                self._closed = True
                self._fail_all()

    def _fail_all(self) -> None:
        writes = [*self._current, *self._queue]
        self._current = []
        self._queue.clear()
        for write in writes:
            write.done(WriteError.NOT_COORDINATOR)

    async def _write_next(self) -> None:
        self._current = self._take()
        parts = self._parts(self._current)
        appended = await self._append(parts)
        errors = [WriteError.NOT_COORDINATOR if one.is_torn else one.error for one in appended]
        is_lost = WriteError.NOT_COORDINATOR in errors
        self._current = []
        self._closed |= is_lost  # what `done` submits fails
        for part, error in zip(parts, errors, strict=True):
            for write in part.writes:
                write.done(error)
        if is_lost:
            self._lose(log_goes_on=all(one.error is not WriteError.NOT_COORDINATOR for one in appended))
        else:
            self._applied_to = self._appended_to

    def _take(self) -> list[Write]:
        writes = [self._queue.popleft()]
        while not writes[0].alone and self._queue and not self._queue[0].alone:
            writes.append(self._queue.popleft())
        return writes

    def _lose(self, *, log_goes_on: bool = False) -> None:
        self._closed = True
        self._fail_all()
        self._on_lost(log_goes_on)

    # --- appending -----------------------------------------------------------------------------------------------

    def _parts(self, writes: Sequence[Write]) -> list[_Part]:
        """Plain writes that follow each other share batches; each of the others has its own."""
        parts: list[_Part] = []
        for is_plain, some in itertools.groupby(writes, lambda write: write.of is None):
            each = list(some)
            parts += self._plain_parts(each) if is_plain else map(self._special_part, each)
        return parts

    def _plain_parts(self, writes: Sequence[Write]) -> Iterator[_Part]:
        """A write larger than a batch shares none: the log may refuse it for its size, and all that is in its part."""
        built = [(write, write.build()) for write in writes]
        for is_large, some in itertools.groupby(built, lambda one: _size(one[1]) > BATCH_BYTES):
            run = list(some)
            for together in [[one] for one in run] if is_large else [run]:
                records = [record for _, records in together for record in records]
                yield _Part([write for write, _ in together], self._batches(records), self._log.append_internal)

    def _special_part(self, write: Write) -> _Part:
        of = write.of
        assert of is not None
        if isinstance(of, TxnMarker):
            marker = build_control_batch(
                ControlType.COMMIT if of.commit else ControlType.ABORT,
                producer_id=of.producer.id,
                producer_epoch=of.producer.epoch,
                coordinator_epoch=of.coordinator_epoch,
                timestamp=self._clock.time_ms(),
            )
            append = functools.partial(self._log.append_internal, transaction_version=of.transaction_version)
            return _Part([write], [marker], append)
        append = functools.partial(self._log.append_internal, guard=of.guard)
        return _Part([write], self._batches(write.build(), of.producer), append)

    async def _append(self, parts: Sequence[_Part]) -> list[_Appended]:
        """Append the batches of all parts, and wait until they are confirmed. Returns the outcome of each part.

        After a part that the log has no room for, the others are not tried; all parts of a lost partition are lost.
        """
        found: list[_Appended] = []
        wal_end = -1
        for part in parts:
            if found and found[-1].error is WriteError.COORDINATOR_NOT_AVAILABLE:
                found.append(_Appended(WriteError.COORDINATOR_NOT_AVAILABLE))
                continue
            found.append(await self._append_part(part))
            wal_end = max(wal_end, found[-1].wal_end)
            if found[-1].error is WriteError.NOT_COORDINATOR:
                return [found[-1]] * len(parts)
        self._appended_to = self._log.log_end_offset
        try:
            if wal_end >= 0:
                await self._log.wait_acked(wal_end)
        except TidelogError as error:
            return [self._is_lost(error)] * len(parts)
        return found

    async def _append_part(self, part: _Part) -> _Appended:
        first_offset, size, wal_end = -1, 0, -1
        outcome = WriteError.NONE
        try:
            for batch in part.batches:
                if wal_end >= 0:
                    await self._clock.sleep(0)  # a long snapshot yields to the event loop between its batches
                result = await self._append_batch(batch, part.append)
                wal_end = result.wal_end
                size += len(batch)
                self._log_bytes += len(batch)
                if first_offset < 0:
                    first_offset = result.base_offset
        except TransactionNotVerified as error:
            logger.info("coordinator's partition refuses a producer", extra=self._ids(error))
            outcome = WriteError.INVALID_TXN_STATE
        except (InvalidProducerEpoch, FencedCoordinator) as error:
            logger.info("coordinator's partition refuses a producer", extra=self._ids(error))
            outcome = WriteError(error.kafka_code)
        except InvalidInput as error:
            logger.error("coordinator's partition rejects a record", extra=self._ids(error))
            outcome = WriteError.UNKNOWN_SERVER_ERROR
        except (Overloaded, Unavailable) as error:
            logger.warning("coordinator's partition cannot be written now", extra=self._ids(error))
            outcome = WriteError.COORDINATOR_NOT_AVAILABLE
        except TidelogError as error:
            return self._is_lost(error)
        return _Appended(outcome, first_offset, size, wal_end)

    def _is_lost(self, error: TidelogError) -> _Appended:
        """Not the leader, fenced, closed, or the WAL failed: the durable state is unknown here."""
        logger.warning("coordinator's partition is lost", extra=self._ids(error))
        return _Appended(WriteError.NOT_COORDINATOR)

    def _batches(self, records: Iterable[KeyValue], producer: TxnProducer | None = None) -> Iterator[bytes]:
        """Plain batches, or those of the producer's transaction."""
        build = build_batch
        if producer is not None:
            build = functools.partial(
                build_batch, producer_id=producer.id, producer_epoch=producer.epoch, transactional=True
            )
        timestamp = self._clock.time_ms()
        waiting: list[Record] = []
        size = 0
        for key, value in records:
            record_bytes = len(key) + len(value or b"")
            if waiting and size + record_bytes > BATCH_BYTES:
                yield build(waiting)
                waiting, size = [], 0
            waiting.append(Record(0, timestamp, key, value))
            size += record_bytes
        if waiting:
            yield build(waiting)

    async def _append_batch(self, batch: bytes, append: Callable[[bytes], AppendResult]) -> AppendResult:
        deadline = self._clock.monotonic() + WRITABLE_BUDGET_S
        while True:
            try:
                self._log.check_writable()
                return append(batch)
            except Overloaded:
                remaining_s = deadline - self._clock.monotonic()
                if remaining_s <= 0:
                    raise
            try:
                async with asyncio.timeout(remaining_s):
                    await self._log.writable()
            except TimeoutError:
                continue
            await self._clock.sleep(RETRY_PAUSE_S)

    # --- bounding the log ----------------------------------------------------------------------------------------

    async def _count(self) -> None:
        """Count the live bytes, `BATCH_BYTES` in one turn of the event loop. Nothing is written meanwhile.

        There may be a hundred thousand committed offsets, each of which is encoded for that.
        """
        size = counted = 0
        for key, value in self._all_live():
            size += len(key) + len(value or b"")
            if size - counted >= BATCH_BYTES:
                counted = size
                await self._clock.sleep(0)
        self._live_bytes, self._is_counted = size, True

    def _all_live(self) -> Iterator[KeyValue]:
        yield from self._store.live_records()
        if isinstance(self._store, TransactionalStore):
            for _, records in self._store.pending_records():
                yield from records

    async def _tidy(self) -> None:
        garbage = self._log_bytes - self._live_bytes
        if self._closed or self._trimming is not None:
            return
        due = self._trim_to is not None or garbage > max(MIN_GARBAGE_BYTES, GARBAGE_FACTOR * self._live_bytes)
        if not due or self._clock.monotonic() < self._tidy_not_before:
            return
        self._tidy_not_before = self._clock.monotonic() + TIDY_RETRY_S
        if self._trim_to is None and not await self._snapshot():
            return
        assert self._trim_to is not None
        name = f"trim-{self._log.topic}-{self._log.partition}"
        self._trimming = self._tasks.spawn(self._trim(self._trim_to), name)

    async def _trim(self, offset: int) -> None:
        """Delete what a snapshot has replaced."""
        try:
            await self._log.delete_records(offset)
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            error = expected(self._log.topic, failure)
            logger.warning("coordinator's partition is not trimmed; will try again", extra=self._ids(error))
        else:
            self._trim_to = None
            self._tidy_not_before = 0.0
        finally:
            self._trimming = None

    async def _snapshot(self) -> bool:
        """Append all live records and wait until they are confirmed. Nothing else is appended meanwhile."""
        end_offset = self._log.log_end_offset
        (appended,) = await self._append([_Part((), self._live_batches(), self._log.append_internal)])
        if appended.error is not WriteError.NONE:
            if appended.error is WriteError.NOT_COORDINATOR:
                self._lose()
            return False
        self._applied_to = self._appended_to
        self._trim_to = appended.first_offset if appended.size_bytes else end_offset
        self._log_bytes = self._live_bytes = appended.size_bytes
        logger.debug(
            "coordinator's partition rewritten",
            extra={
                "topic": self._log.topic,
                "partition": self._log.partition,
                "bytes": appended.size_bytes,
                "start_offset": self._trim_to,
            },
        )
        return True

    def _live_batches(self) -> Iterator[bytes]:
        yield from self._batches(self._store.live_records())
        if isinstance(self._store, TransactionalStore):
            for producer, records in self._store.pending_records():
                yield from self._batches(records, producer)

    def _ids(self, error: TidelogError) -> dict[str, object]:
        return {
            "topic": self._log.topic,
            "partition": self._log.partition,
            "leader_epoch": self._log.leader_epoch,
            "error": str(error),
        }


def _size(records: Iterable[KeyValue]) -> int:
    return sum(len(key) + len(value or b"") for key, value in records)
