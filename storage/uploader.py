"""Carries confirmed data from the log cache to the bucket: the thin shell around `storage.upload_plan`.

For each task: ids are prepared (with a TTL), the objects are built and put, and when all earlier tasks are committed,
this one is. Several tasks are on their way at once; they commit strictly in order. Then the records may leave the
cache and the WAL is trimmed (rule 3).

What can go wrong, and what happens:
- a put or prepare fails: tried again, with back-off, for as long as it takes (rule 11). The data is safe in the WAL;
- the outcome of a commit is unknown: the same commit is asked again; the controller knows it;
- prepared ids expired before the commit: new ids, and the objects are put again;
- a gap (rule 5): that stream is quarantined, loudly; its records are kept in the bucket under a quarantine key, and the
  range commits without it. A gap in the WAL range itself stops all uploads;
- a stream was deleted or moved meanwhile: the task is laid out again without it;
- the commit is refused for good: somebody newer owns the WAL (rule 4). Uploads stop and `on_fenced` is told.

A crash at any point leaves either nothing or a committed range; the next process begins at the committed WAL offset.

Entry: `Uploader`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.clock import Clock
from runtime.errors import Fenced, NotFound, TidelogError, Unavailable
from runtime.tasks import Backoff, TaskSet
from storage.confirm import ConfirmOffset
from storage.log_cache import Fate, StreamLog
from storage.managers import CommitGap, CommitObjects, ObjectKind, ObjectManager
from storage.object_format import QUARANTINE_OBJECT_ID
from storage.object_key import object_key, quarantine_key
from storage.object_store import ObjectStore
from storage.object_writer import BuiltObject, build_object
from storage.purpose import with_receipt
from storage.records import StreamRecord
from storage.settings import UploadSettings
from storage.upload_plan import Layout, ObjectPlan, StreamPart, UploadPlanner, UploadTask, layout

log = logging.getLogger(__name__)
_T = TypeVar("_T")
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]

_OFFLOAD_BYTES = 1 << 20
"""Work on more than this many bytes (about 1 ms) runs in a thread."""
_TTL_SHARE = 0.7
"""Objects are put again when this share of the TTL of their ids has passed before the first try to commit."""
_RESERVED = 2
"""Ids at hand: the next upload may be another one than the one that they were asked for."""
_RESERVED_SHARE = 0.5
"""An id at hand is used within this share of its TTL; from there to `_TTL_SHARE` there is time to commit it."""
_REFUSALS = 5
"""How often a refused commit is asked again, about 3 s in all: our copy of the metadata may lag behind a deletion."""


@dataclass(frozen=True, slots=True)
class _Upload:
    """A task's objects in the bucket, not yet committed."""

    layout: Layout
    objects: list[BuiltObject]
    stale_at: float
    """Monotonic seconds from which the ids may be gone."""


@dataclass(slots=True)
class UploadStats:
    """Counts since the start."""

    commits: int = 0
    objects: int = 0
    bytes: int = 0
    retries: int = 0
    rebuilt: int = 0
    """Tasks laid out again (expired ids, a stream gone or quarantined)."""
    quarantined_records: int = 0


def _contiguous(records: list[StreamRecord]) -> list[list[StreamRecord]]:
    """Cut records where one does not follow the other."""
    runs: list[list[StreamRecord]] = []
    following = -1
    for record in records:
        if record.base_offset != following:
            runs.append([])
        runs[-1].append(record)
        following = record.base_offset + record.count
    return runs


class Uploader:
    """The upload loop of one replica set. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        planner: UploadPlanner,
        confirm: ConfirmOffset,
        store: ObjectStore,
        objects: ObjectManager,
        clock: Clock,
        rng: random.Random,
        settings: UploadSettings,
        cluster_id: str,
        replica_set_id: int,
        on_committed: Callable[[UploadTask], Awaitable[None]],
        on_quarantine: Callable[[StreamLog, str], None],
        on_fenced: Callable[[Exception], None],
        owns_stream: Callable[[int], bool],
        offload: Offload = asyncio.to_thread,
    ) -> None:
        self._planner = planner
        self._confirm = confirm
        self._store = store
        self._objects = objects
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._cluster_id = cluster_id
        self._replica_set_id = replica_set_id
        self._on_committed = on_committed
        self._on_quarantine = on_quarantine
        self._on_fenced = on_fenced
        self._owns_stream = owns_stream
        self._offload = offload
        self._master_epoch = -1
        self._running = False
        self._wake = asyncio.Event()
        self._turns: dict[asyncio.Task[None], None] = {}
        self._tasks = TaskSet("storage.upload", self._failed)
        self._reserved: deque[tuple[int, float]] = deque()
        """Object ids at hand, and since when (monotonic seconds)."""
        self.sent = ConfirmOffset(planner.planned)
        """What the commits sent so far cover; fails as `committed` does. What they are answered is not known yet."""
        self.committed = ConfirmOffset(planner.planned)
        """What is committed of the WAL; fails when uploads have stopped for good."""
        self.stats = UploadStats()

    @property
    def in_flight(self) -> int:
        """Tasks between plan and commit."""
        return len(self._turns)

    def start(self, master_epoch: int) -> None:
        """Begin to upload in this master epoch, which every commit names."""
        assert self._master_epoch < 0, "the uploader is started once"
        self._master_epoch = master_epoch
        self.sent.advance(self._planner.planned)
        self.committed.advance(self._planner.planned)
        self._running = True
        self._tasks.spawn(self._run(), "loop")

    def kick(self) -> None:
        """Something changed (a force, a release): look again what is due."""
        self._wake.set()

    async def upload_to(self, wal_offset: int) -> None:
        """Upload everything before `wal_offset` (≤ the confirm offset) now; return when it is committed.

        Raises the reason when uploads have stopped: `Fenced`, `CommitGap`.
        """
        self._force(wal_offset)
        await self.committed.wait(wal_offset)

    async def send_to(self, wal_offset: int) -> None:
        """As `upload_to`, but return when the commit is on its way: commands asked from now on come after it, unless it
        has to be asked again."""
        self._force(wal_offset)
        await self.sent.wait(wal_offset)

    def _force(self, wal_offset: int) -> None:
        """Begin at once, not when the loop gets its turn: whoever asks for it waits."""
        self._planner.force(wal_offset)
        if self._running and self.committed.error is None:
            self._launch_what_is_due()
        self.kick()

    async def reserve(self) -> None:
        """Have object ids at hand, so that the next small uploads need not ask for them. Raises `Unavailable`."""
        now = self._clock.monotonic()
        while self._reserved and not self._is_fresh(self._reserved[0][1]):
            self._reserved.popleft()
        missing = _RESERVED - len(self._reserved)
        if missing > 0:
            first = await self._objects.prepare_objects(missing, self._settings.prepare_ttl_ms)
            self._reserved.extend((first + number, now) for number in range(missing))

    def _is_fresh(self, since: float) -> bool:
        return self._clock.monotonic() < since + _RESERVED_SHARE * self._settings.prepare_ttl_ms / 1000

    async def close(self) -> None:
        """Stop at once; what is not committed stays in the WAL."""
        self._running = False
        await self._tasks.close()

    # -- the loop

    async def _run(self) -> None:
        while self.committed.error is None:
            self._wake.clear()
            now = self._clock.monotonic()
            full = self._launch_what_is_due()
            timeout = None
            if not full:
                watch_at = self._planner.watch_at()
                if watch_at is not None:
                    self._confirm.watch(watch_at, self._wake.set)
                timeout = self._planner.wait_s(now)
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):  # wait_for can swallow a cancellation (Python 3.11)
                    await self._wake.wait()

    def _launch_what_is_due(self) -> bool:
        """Start what may be started now; whether as much is on its way as may be."""
        now = self._clock.monotonic()
        self._planner.observe(now, self._confirm.value)
        while len(self._turns) < self._settings.max_in_flight:
            task = self._planner.next_task(now)
            if task is None:
                return False
            self._launch(task)
        return True

    def _launch(self, task: UploadTask) -> None:
        previous = next(reversed(self._turns), None)
        carrier = self._tasks.spawn(self._carry(task, previous), f"{task.wal_start}")
        self._turns[carrier] = None
        carrier.add_done_callback(self._landed)

    def _landed(self, carrier: asyncio.Task[None]) -> None:
        del self._turns[carrier]
        self._wake.set()

    async def _carry(self, task: UploadTask, previous: asyncio.Task[None] | None) -> None:
        """Bring one task to the bucket and into the metadata; commits after `previous` has."""
        while True:
            upload = await self._put_all(task)
            if previous is not None:
                await asyncio.wait([previous])
                if previous.cancelled() or previous.exception() is not None:
                    return
                previous = None
            if not upload.layout.is_current or self._clock.monotonic() >= upload.stale_at:
                self.stats.rebuilt += 1
            elif await self._commit(task, upload):
                break
        self.stats.commits += 1
        self.stats.objects += len(upload.objects)
        await self._on_committed(task)
        self.committed.advance(task.wal_end)

    # -- prepare and put

    async def _put_all(self, task: UploadTask) -> _Upload:
        """Write the task's objects under fresh ids, and set quarantined records aside."""
        wal_bytes = task.wal_end - task.wal_start
        plan: Layout = await self._compute(lambda: layout(task, self._settings.split_bytes), wal_bytes)
        stale_at = self._clock.monotonic() + _TTL_SHARE * self._settings.prepare_ttl_ms / 1000
        built: list[BuiltObject] = []
        if plan.objects:
            first, since = await self._prepare(len(plan.objects))
            stale_at = since + _TTL_SHARE * self._settings.prepare_ttl_ms / 1000
            built = [await self._build(first + number, part) for number, part in enumerate(plan.objects)]
        puts = [
            self._put(object_key(self._cluster_id, one.object_id), one, part)
            for one, part in zip(built, plan.objects, strict=True)
        ]
        puts += [self._set_aside(task, part) for part in plan.quarantined]
        if len(puts) == 1:
            await puts[0]  # no task for it, whose beginning and end would each wait for a turn of the event loop
        else:
            await asyncio.gather(*puts)
        return _Upload(plan, built, stale_at)

    async def _prepare(self, count: int) -> tuple[int, float]:
        """The first of `count` ids in a row, and since when its TTL runs; a single one may be at hand."""
        while count == 1 and self._reserved:
            object_id, since = self._reserved.popleft()
            if self._is_fresh(since):
                return object_id, since
        now, ttl_ms = self._clock.monotonic(), self._settings.prepare_ttl_ms
        return await self._retry(lambda: self._objects.prepare_objects(count, ttl_ms), "prepare objects"), now

    async def _compute(self, work: Callable[[], _T], size: int) -> _T:
        result: _T = await self._offload(work) if size >= _OFFLOAD_BYTES else work()
        return result

    async def _build(self, object_id: int, plan: ObjectPlan) -> BuiltObject:
        def build() -> BuiltObject:
            return build_object(
                object_id=object_id,
                kind=plan.kind,
                cluster_id=self._cluster_id,
                created_ms=self._clock.time_ms(),
                parts=[(part.log.stream_id, part.records) for part in plan.parts],
                block_bytes=self._settings.block_bytes,
            )

        return await self._compute(build, sum(part.size for part in plan.parts))

    async def _put(self, key: str, built: BuiltObject, plan: ObjectPlan) -> None:
        store, receipt = with_receipt(self._store)
        await self._retry(lambda: store.put(key, built.body), f"put object {key}")
        receipt.settle((part.log.stream_id, part.size) for part in plan.parts)
        self.stats.bytes += built.size

    async def _set_aside(self, task: UploadTask, part: StreamPart) -> None:
        """Keep the records of a quarantined stream where a person can find them, before their WAL range commits.

        The quarantine itself is made durable first: once the WAL is trimmed nothing else would tell the next process.
        """
        stream_id, reason = part.log.stream_id, part.log.reason
        await self._retry(lambda: self._note_quarantine(stream_id, reason), f"quarantine stream {stream_id}")
        part.log.is_noted = True
        for number, records in enumerate(_contiguous(part.records)):
            key = quarantine_key(self._cluster_id, stream_id, task.wal_start, number)
            plan = ObjectPlan(ObjectKind.STREAM, [StreamPart(part.log, records, part.size)])
            await self._put(key, await self._build(QUARANTINE_OBJECT_ID, plan), plan)
            self.stats.quarantined_records += len(records)
            log.error(
                "records of a quarantined stream set aside",
                extra={"stream": stream_id, "key": key, "records": len(records), "reason": part.log.reason},
            )

    async def _note_quarantine(self, stream_id: int, reason: str) -> None:
        try:
            await self._objects.quarantine_stream(self._replica_set_id, self._master_epoch, stream_id, reason)
        except Fenced as error:  # the commit will be refused for the same reason, so nothing is trimmed
            log.warning("the quarantine was not noted", extra={"stream": stream_id, "error": error})

    async def _retry(self, attempt: Callable[[], Coroutine[Any, Any, _T]], what: str) -> _T:
        """Try until it succeeds: the WAL holds the data meanwhile, and producers feel back-pressure in the end."""
        backoff = self._new_backoff()
        while True:
            try:
                return await attempt()
            except TidelogError as error:
                await self._pause(backoff, what, error)

    def _new_backoff(self) -> Backoff:
        return Backoff(0.05, 5.0, self._rng)

    async def _pause(self, backoff: Backoff, what: str, error: TidelogError) -> None:
        """Back off after a failure; says so at the 1st, 2nd, 4th, 8th… time."""
        self.stats.retries += 1
        delay_s = backoff.next_delay_s()
        if backoff.attempts & (backoff.attempts - 1) == 0:
            fields = {"replica_set": self._replica_set_id, "what": what, "attempt": backoff.attempts, "error": error}
            level = logging.WARNING if error.retriable else logging.ERROR
            log.log(level, "upload step failed, will be tried again", extra=fields)
        await self._clock.sleep(delay_s)

    # -- commit

    async def _commit(self, task: UploadTask, upload: _Upload) -> bool:
        """True: committed. False: lay the task out again. Raises when uploads must stop."""
        built = tuple(one.as_new_object() for one in upload.objects)
        commit = CommitObjects(self._replica_set_id, self._master_epoch, task.wal_start, task.wal_end, built)
        backoff, refusals = self._new_backoff(), 0
        while True:
            self.sent.advance(task.wal_end)
            try:
                await self._objects.commit_objects(commit)
                return True
            except CommitGap as error:
                if not self._is_committed(task):
                    self._quarantine(upload, error)
                    return False
                return True
            except NotFound as error:
                return self._is_committed(task) or await self._after_loss(upload, error, backoff)
            except Fenced as error:
                refusals += 1
                if self._drop_lost_streams(upload) or self._clock.monotonic() >= upload.stale_at:
                    return False  # a controller refuses expired ids in the same way as a stale epoch
                if refusals > _REFUSALS:
                    raise
                await self._pause(backoff, "commit objects", error)
            except TidelogError as error:
                await self._pause(backoff, "commit objects", error)
                if isinstance(error, Unavailable) and self._is_committed(task):
                    return True

    def _is_committed(self, task: UploadTask) -> bool:
        """Whether our copy of the metadata shows the range committed: an earlier try got through."""
        return self._objects.committed_wal_offset(self._replica_set_id) >= task.wal_end

    async def _after_loss(self, upload: _Upload, error: NotFound, backoff: Backoff) -> bool:
        """The controller does not know an id (expired) or a stream (deleted): start over without it."""
        if not self._drop_lost_streams(upload):
            await self._pause(backoff, "commit objects", error)
        self.stats.rebuilt += 1
        return False

    def _drop_lost_streams(self, upload: _Upload) -> bool:
        """Give up streams that are not ours any more; whether there were any."""
        lost = [
            one for one, fate in upload.layout.fates if fate is Fate.UPLOAD and not self._owns_stream(one.stream_id)
        ]
        for stream_log in lost:
            log.warning("stream is gone, its records need no upload", extra={"stream": stream_log.stream_id})
            stream_log.fate = Fate.DROP
        return not upload.layout.is_current

    def _quarantine(self, upload: _Upload, error: CommitGap) -> None:
        """A gap in one stream takes that stream out; a gap in the WAL stops everything (raises)."""
        for stream_log, fate in upload.layout.fates:
            if stream_log.stream_id == error.stream_id and fate is Fate.UPLOAD:
                self._on_quarantine(stream_log, error.message)
                return
        raise error

    def _failed(self, error: BaseException) -> None:
        """A carrier or the loop ended by an error: nothing after it may commit."""
        for carrier in self._turns:
            carrier.cancel()
        reason = error if isinstance(error, Exception) else RuntimeError(repr(error))
        log.error("uploads stopped", extra={"replica_set": self._replica_set_id, "error": reason})
        self.sent.fail(reason)
        self.committed.fail(reason)
        self._on_fenced(reason)
