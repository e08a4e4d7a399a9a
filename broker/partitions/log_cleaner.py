"""Compacts the logs of the topics with `cleanup.policy=compact` that this broker leads (docs/design/0025).

One round runs at a time: that of the partition with the largest share of dirty bytes among those that are due. It reads
the dirty part for its keys, then rewrites the log's objects, the oldest first, at `log.cleaner_bytes_per_s`.
The decisions are those of `tidelog.stream.cleaning`, made where `tidelog.broker.partitions.round_cleaning` says.

Failures and their handling:
- a crash, a close or a move of the partition, or a log start that moves past what is read: the round ends. What is
  committed stays, and the next one does the rest;
- an object was replaced meanwhile: it is looked up again, a bounded number of times in a round;
- a snapshot or a branch holds an object: it is left out, and tombstones behind it stay, until a round over the whole
  log has made up for it;
- an object is damaged or a batch does not decode: the round ends there, nothing behind it is compacted, and the
  partition is shown as a problem until a round succeeds;
- bucket or controllers do not answer, or the process that decides for a large log is lost: the round ends, and is
  repeated.

Entry: `LogCleaner`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from tidelog.broker.partitions.round_cleaning import (
    WORTH_A_PROCESS_BYTES,
    LocalCleaning,
    RoundCleaning,
    WorkerCleaning,
    WorkerLost,
)
from tidelog.broker.settings import LogSettings
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Closed, InvalidInput, Unavailable
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.types import Offload
from tidelog.storage.commits import CompactionRefused, ObjectKind, ObjectSlice
from tidelog.storage.compaction.compactor import Compactor
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import CompactionTask
from tidelog.storage.compaction.throttle import Throttle
from tidelog.storage.records import OffsetTrimmed, StreamEntry
from tidelog.stream.cleaning.messages import Begin
from tidelog.stream.cleaning.plan import Round
from tidelog.stream.log_cleaning import SegmentChanges
from tidelog.stream.partition_log import PartitionLog

logger = logging.getLogger(__name__)

MAX_REFUSALS = 16
"""How often a round looks objects up again that someone else has replaced."""
MAX_LEFT = 10_000
"""Objects of a log that are looked at for one that is held."""
PLANS_AT_ONCE = 32
"""Partitions that are planned before the loop serves requests again."""


class CleanedObjects(Protocol):
    """What the cleaner asks the metadata."""

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> Sequence[ObjectSlice]:
        """See `tidelog.storage.managers.ObjectManager.find_objects`."""
        ...

    async def catch_up(self) -> None:
        """See `tidelog.storage.managers.ObjectManager.catch_up`."""
        ...

    def is_held(self, object_id: int) -> bool:
        """Return whether a snapshot or a branch holds an object, which then stays as it is."""
        ...


@dataclass(slots=True)
class CleanerStats:
    """Counts since the start."""

    rounds: int = 0
    """Whole ones."""
    given_up: int = 0
    workers_lost: int = 0
    """Rounds given up as their process has ended or hung."""
    cleaned_bytes: int = 0
    """Bytes of objects that rounds have gone over, read or not."""
    removed_bytes: int = 0
    """By how much objects have become smaller."""
    keys: int = 0
    """In the map of the newest round."""


class _Due(NamedTuple):
    log: PartitionLog
    plan: Round


class LogCleaner:
    """The log compaction of one broker. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        logs: Callable[[], Iterable[PartitionLog]],
        is_internal: Callable[[str], bool],
        objects: CleanedObjects,
        compactor: Compactor,
        clock: Clock,
        rng: random.Random,
        settings: LogSettings,
        offload: Offload = asyncio.to_thread,
        processes: bool = False,
    ) -> None:
        """`logs`: those that this broker leads; `is_internal`: whether a topic bounds itself; `processes`: whether a
        round of a large log may have a process."""
        self._logs = logs
        self._is_internal = is_internal
        self._objects = objects
        self._compactor = compactor
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._offload = offload
        self._processes = processes
        self._throttle = Throttle(settings.cleaner_bytes_per_s)
        self._running: PartitionLog | None = None
        self._problems: dict[PartitionLog, str] = {}
        self._tasks = TaskSet("partitions.cleaning")
        self.stats = CleanerStats()

    def start(self) -> None:
        """Start compacting, if `log.cleaner_enabled`."""
        if self._settings.cleaner_enabled:
            self._tasks.keep(self._loop, "loop")

    async def close(self) -> None:
        """Stop at once. The round that runs is repeated by the next leader."""
        await self._tasks.close()

    @property
    def running(self) -> PartitionLog | None:
        """Return the log that a round goes over now."""
        return self._running

    def problems(self) -> list[str]:
        """Return the partitions that cannot be compacted, one sentence each."""
        self._forget_gone()
        return sorted(f"{log.topic}-{log.partition} is not compacted: {why}" for log, why in self._problems.items())

    def _forget_gone(self) -> None:
        """Forget the problems of logs that this broker does not lead any more, or that are not compacted any more."""
        for gone in [log for log in self._problems if log.closed or not log.config.compacts]:
            del self._problems[gone]

    def figures(self) -> dict[str, float]:
        """Return metrics: counts since the start, and the largest share of dirty bytes now (0–1)."""
        self._forget_gone()
        stats = self.stats
        ratios = [each.plan.dirty_ratio for each in self._plans()]
        return {
            "rounds": stats.rounds,
            "given_up": stats.given_up,
            "workers_lost": stats.workers_lost,
            "cleaned_bytes": stats.cleaned_bytes,
            "removed_bytes": stats.removed_bytes,
            "keys": stats.keys,
            "max_dirty_ratio": max(ratios, default=0.0),
            "uncleanable_partitions": len(self._problems),
        }

    def report(self) -> dict[str, Any]:
        """Return the compacted partitions led here as JSON."""
        found = [
            {
                "topic": log.topic,
                "partition": log.partition,
                "dirty_ratio": round(plan.dirty_ratio, 4),
                "dirty_bytes": plan.dirty_bytes,
                "first_dirty_offset": plan.first_dirty,
                "last_cleaned_ms": log.cleaning.last().cleaned_ms or None,
                "running": log is self._running,
                "problem": self._problems.get(log),
            }
            for log, plan in self._plans()
        ]
        return {**self.figures(), "partitions": found}

    # --- rounds --------------------------------------------------------------------------------------------------

    def _plans(self) -> Iterable[_Due]:
        now_ms = self._clock.time_ms()
        for log in self._logs():
            if not log.closed and log.config.compacts and not self._is_internal(log.topic) and log.cleaning.is_allowed:
                yield _Due(log, log.cleaning.plan(now_ms, log.config, is_held=self.is_left(log)))

    def is_left(self, log: PartitionLog) -> bool:
        """Return whether an object that the last round left out is held still."""
        left = log.cleaning.left
        return left > 0 and any(
            self._objects.is_held(one.object_id)
            for one in self._objects.find_objects(log.cleaning.stream_id, log.state.log_start, left, MAX_LEFT)
        )

    async def _loop(self) -> None:
        while True:
            await self._clock.sleep(self._settings.cleaner_interval_ms / 1000 * (0.5 + self._rng.random()))
            tried: set[PartitionLog] = set()
            while (due := await self._next(tried)) is not None:
                tried.add(due.log)
                await self.clean(due.log, due.plan)

    async def _next(self, tried: set[PartitionLog]) -> _Due | None:
        """Return the dirtiest partition that is due, none of `tried`."""
        best: _Due | None = None
        for number, each in enumerate(self._plans(), start=1):
            if number % PLANS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if not each.plan.is_due or each.log in tried or each.log.closed:
                continue
            if best is None or each.plan.dirty_ratio > best.plan.dirty_ratio:
                best = each
        return best

    async def clean(self, log: PartitionLog, plan: Round) -> bool:
        """Carry out one round; return whether all of it was. A failure is logged; `problems` shows one that lasts."""
        fields = {"topic": log.topic, "partition": log.partition}
        self._running = log
        cleaning: RoundCleaning | None = None
        try:
            cleaning = await self.begin(log, plan)
            end = await _CleaningRound(log, plan, self, cleaning).run()
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            error = expected("partitions.cleaning", failure)
            self.stats.given_up += 1
            self.stats.workers_lost += isinstance(error, WorkerLost)
            if log.closed or isinstance(error, (Closed, OffsetTrimmed, Unavailable)):
                logger.info("log compaction interrupted", extra={**fields, "error": str(error)})
            else:
                self._problems[log] = error.message
                logger.warning("log compaction given up", extra={**fields, "error": str(error)})
            return False
        finally:
            self._running = None
            if cleaning is not None:
                await cleaning.close()
        self._problems.pop(log, None)
        self.stats.rounds += 1
        logger.info("log compacted", extra={**fields, "first_dirty": plan.first_dirty, "end": end})
        return True

    # --- what a round needs --------------------------------------------------------------------------------------

    @property
    def compactor(self) -> Compactor:
        """Return what reads, writes and commits objects."""
        return self._compactor

    @property
    def objects(self) -> CleanedObjects:
        """Return the metadata."""
        return self._objects

    async def begin(self, log: PartitionLog, plan: Round) -> RoundCleaning:
        """Return the decisions of a round that begins now. Raises `WorkerLost`."""
        begin = Begin(
            plan.first_dirty,
            plan.end,
            self._settings.cleaner_map_bytes,
            self._clock.time_ms(),
            log.config.delete_retention_ms,
        )
        if not self._processes or plan.total_bytes < WORTH_A_PROCESS_BYTES:
            return LocalCleaning(begin, self._offload)
        worker = WorkerCleaning()
        await worker.begin(begin)
        return worker

    def now_ms(self) -> int:
        """Return the wall clock."""
        return self._clock.time_ms()

    async def pace(self, size: int) -> None:
        """Wait until so many bytes may be used."""
        if (delay_s := self._throttle.delay_s(self._clock.monotonic(), size, busy=False)) > 0:
            await self._clock.sleep(delay_s)

    def led_streams(self) -> frozenset[int]:
        """Return the data streams of all compacted logs: what is gathered for one serves the others."""
        return frozenset(each.log.cleaning.stream_id for each in self._plans())


class _CleaningRound:
    """One round over one log."""

    def __init__(self, log: PartitionLog, plan: Round, cleaner: LogCleaner, cleaning: RoundCleaning) -> None:
        self._log = log
        self._plan = plan
        self._cleaner = cleaner
        self._stream_id = log.cleaning.stream_id
        self._log_start = log.state.log_start
        self._cleaning = cleaning
        self._changes: SegmentChanges = log.cleaning.changes()
        self._at = 0
        self._pending: tuple[list[StreamEntry], list[StreamEntry]] = ([], [])
        self._refusals = 0
        self._left = plan.left
        """Up to where something was left out, because a snapshot or a branch holds it, or did in an earlier round."""

    def _require_open(self) -> None:
        if self._log.closed:
            raise Closed(f"{self._log.topic}-{self._log.partition} is closed on this broker")

    async def run(self) -> int:
        """Return where the round ended."""
        log, cleaner, cleaning = self._log, self._cleaner, self._cleaning
        await log.cleaning.fill(cleaning, self._plan.end, self._changes, cleaner.pace)
        end = await cleaning.seal()
        cleaner.stats.keys = cleaning.keys
        if end <= self._plan.first_dirty:
            raise InvalidInput(
                f"the keys of the batch at offset {end} do not fit into the map of {cleaning.capacity} keys",
                hint="raise log.cleaner_map_bytes",
            )
        if self._left:
            self._keep_tombstones()
        at = self._log_start
        while at < end:
            self._require_open()
            at = max(at, log.state.log_start)  # it may have moved
            mark = cleaning.mark()
            try:
                at = await self._step(at, end)
            except CompactionRefused:
                self._refusals += 1
                if self._refusals > MAX_REFUSALS:
                    raise
                cleaning.rewind(mark)
                await cleaner.objects.catch_up()
        self._require_open()
        log.cleaning.finish(end, cleaner.now_ms(), self._changes, self._log_start, self._left)
        return end

    async def _step(self, at: int, end: int) -> int:
        """Clean the objects from the one that holds `at`, as many as go together; return the offset after them."""
        cleaner = self._cleaner
        settings = cleaner.compactor.settings
        slices = cleaner.objects.find_objects(self._stream_id, at, end, settings.max_objects)
        if not slices or slices[0].start_offset > at:
            raise CompactionRefused(f"no object holds offset {at} of stream {self._stream_id}: it may be trimmed")
        if cleaner.objects.is_held(slices[0].object_id):
            return self._leave(at, slices[0].end_offset)
        free = list(takewhile(lambda one: not cleaner.objects.is_held(one.object_id), slices))
        window = _window(free, settings.target_bytes, self._cleaning)
        inputs = tuple(self._facts(one) for one in window)
        if window[0].kind != ObjectKind.STREAM:
            apart = cleaner.led_streams() | {self._stream_id}
            await cleaner.compactor.carry_out(CompactionTask("gather", inputs, "for log compaction", apart))
            return at
        following = window[-1].end_offset
        task = CompactionTask("merge", inputs, "log compaction")
        self._at, self._pending = at, ([], [])
        removed = await cleaner.compactor.rewrite(task, self._stream_id, self)
        cleaner.stats.cleaned_bytes += task.size
        cleaner.stats.removed_bytes += removed
        before, after = self._pending
        clean_end = min(self._plan.first_dirty, self._cleaning.noted)
        self._changes.note_before(before, self._log_start, clean_end)
        self._changes.note_after(after, self._log_start, self._cleaning.noted)
        self._pending = ([], [])
        return following

    def _leave(self, at: int, end: int) -> int:
        """Leave an object out. Older values of keys may be in it, so no tombstone behind it is removed."""
        self._keep_tombstones()
        self._changes.leave(at, end)
        self._left = max(self._left, end)
        return end

    def _keep_tombstones(self) -> None:
        """From here on neither set a delete horizon nor act upon one."""
        self._cleaning.rewind(self._cleaning.mark()._replace(is_readable=False))

    def _facts(self, one: ObjectSlice) -> ObjectFacts:
        facts = self._cleaner.compactor.data.view.facts(one.object_id)
        if facts is None:
            raise CompactionRefused(f"object {one.object_id} was destroyed meanwhile")
        return facts

    def is_gone(self, start: int, end: int) -> bool:
        """See `tidelog.storage.compaction.compactor.RecordChange`."""
        return self._cleaning.is_gone(start, end)

    async def pace(self, size: int) -> None:
        """See `tidelog.storage.compaction.compactor.RecordChange`."""
        await self._cleaner.pace(size)

    async def __call__(self, records: list[StreamEntry]) -> list[StreamEntry]:
        """See `tidelog.storage.compaction.compactor.RecordChange`."""
        self._require_open()
        at, following = self._at, records[-1].base_offset + records[-1].count
        aborted = await self._log.cleaning.aborted(min(at, records[0].base_offset), following)
        changed = await self._cleaning.clean(records, aborted)
        self._require_open()
        begun = next((n for n, one in enumerate(records) if one.base_offset >= at), len(records))
        self._pending = (records[begun:], changed[begun:])
        return changed


def _window(slices: Sequence[ObjectSlice], target_bytes: int, cleaning: RoundCleaning) -> list[ObjectSlice]:
    """Return the first objects of one kind that go into one task: contiguous, and at most `target_bytes` to read."""
    window: list[ObjectSlice] = []
    size = 0
    for one in slices:
        is_next = not window or (one.kind == window[0].kind and one.start_offset == window[-1].end_offset)
        if one.kind != ObjectKind.STREAM or not cleaning.is_gone(one.start_offset, one.end_offset):
            size += one.size
        if window and not (is_next and size <= target_bytes):
            break
        window.append(one)
    return window
