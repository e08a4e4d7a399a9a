"""Uploads confirmed data from the log cache to the bucket: the I/O around `tidelog.storage.uploads.pipeline`.

For each upload: ids are prepared (with a TTL), the objects are built and put, and the upload is committed after all
earlier ones. Then the records may leave the cache and the WAL is trimmed (rule 3). The pipeline decides which upload
may begin or commit, and how a refusal is handled; its table lists the failures. A put or prepare that fails is retried
with back-off without a limit (rule 11): the data is safe in the WAL. The records of a quarantined stream are kept in
the bucket under a quarantine key. When uploads stop, `fenced` is called.

A crash at any point leaves either nothing or a committed range; the next process begins at the committed WAL offset.

Entry: `Uploader`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Closed, Fenced, TidelogError
from tidelog.runtime.health import OperationHealth
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.types import Offload
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.cache.log_cache import StreamLog
from tidelog.storage.commits import CommitObjects, ObjectKind
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.inputs import FinishedUpload, ReplicaSetData
from tidelog.storage.objects.format import QUARANTINE_OBJECT_ID
from tidelog.storage.objects.key import object_key, quarantine_key
from tidelog.storage.objects.writer import BuiltObject, build_object
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import UploadSettings
from tidelog.storage.uploads.pipeline import RETRY_BASE_S, RETRY_CAP_S, NextStep, PreparedIds, Upload, UploadPipeline
from tidelog.storage.uploads.plan import ObjectLayout, ObjectPlan, StreamPart, UploadPlanner, UploadTask, layout

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

SLOW_S = 30.0
"""An upload without an error may take so long before it is a problem: objects are large, and links may be slow."""
_OFFLOAD_BYTES = 1 << 20
"""Work on more than this many bytes (about 1 ms) runs in a worker thread."""


@dataclass(slots=True)
class UploadStats:
    """Counts since the start."""

    commits: int = 0
    objects: int = 0
    bytes: int = 0
    retries: int = 0
    quarantined_records: int = 0


def _ignore_objects(_wal_end: int, _first_object: int, _objects: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class UploadOwner:
    """Callbacks of the uploads' owner, and its knowledge of streams."""

    committed: Callable[[UploadTask], Awaitable[None]]
    """Called when a task is in the metadata: its records may leave memory and the WAL."""
    quarantine: Callable[[StreamLog, str], None]
    """Called with the reason when the controller has quarantined a stream."""
    fenced: Callable[[Exception], None]
    """Called when uploads have stopped permanently."""
    owns_stream: Callable[[int], bool]
    """Whether a stream exists and is placed on this replica set."""
    wrote: Callable[[int, int, int], None] = _ignore_objects
    """Called before `committed` with the task's WAL end, its first object's id, and how many there are."""
    ended: Callable[[FinishedUpload], None] | None = None
    """Called with each upload that has ended."""


def _contiguous(records: list[StreamEntry]) -> list[list[StreamEntry]]:
    """Split records where one does not follow the previous one."""
    runs: list[list[StreamEntry]] = []
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
        planner: UploadPlanner,
        confirm: ConfirmOffset,
        data: ReplicaSetData,
        settings: UploadSettings,
        clock: Clock,
        rng: random.Random,
        *,
        owner: UploadOwner,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        self._planner = planner
        self._confirm = confirm
        self._store = data.store.for_purpose(Purpose.UPLOAD)
        self._objects = data.objects
        self._clock = clock
        self._rng = rng
        self._pipeline = UploadPipeline(planner, settings, rng, owner.owns_stream)
        self._ids = PreparedIds(settings.prepare_ttl_ms)
        self._settings = settings
        self._cluster_id = data.cluster_id
        self._replica_set_id = data.replica_set_id
        self._owner = owner
        self._offload = offload
        self._master_epoch = -1
        self._running = False
        self._wake = asyncio.Event()
        self._carriers: dict[Upload, tuple[asyncio.Task[None], asyncio.Event]] = {}
        """The task of each upload, and the event that it is the oldest and may commit."""
        self._tasks = TaskSet("storage.upload", self._failed)
        self.sent = ConfirmOffset(planner.planned)
        """The WAL offset covered by the commits sent so far, whatever their outcome; fails as `committed` does."""
        self.committed = ConfirmOffset(planner.planned)
        """The WAL offset covered by commits; fails when uploads have stopped permanently."""
        self.stats = UploadStats()
        self.health = OperationHealth("upload", stuck_s=SLOW_S)

    @property
    def in_flight(self) -> int:
        """Return the number of uploads between plan and commit."""
        return self._pipeline.in_flight

    @property
    def pending_age_s(self) -> float:
        """Return for how long the oldest confirmed byte has not been in the bucket; 0 if all are."""
        return self._pipeline.pending_age_s(self._clock.monotonic())

    @property
    def rebuilt(self) -> int:
        """Return how often an upload was laid out again: expired ids, a stream gone or quarantined."""
        return self._pipeline.rebuilt

    def start(self, master_epoch: int) -> None:
        """Start uploading in this master epoch, which every commit carries."""
        assert self._master_epoch < 0, "the uploader is started once"
        self._master_epoch = master_epoch
        self._pipeline.start()
        self.sent.advance(self._planner.planned)
        self.committed.advance(self._planner.planned)
        self._running = True
        self._tasks.keep(self._run, "loop")

    def wake(self) -> None:
        """Check for due uploads again after a change (a force, a release)."""
        self._wake.set()

    async def upload_to(self, wal_offset: int) -> None:
        """Upload everything before `wal_offset` (≤ the confirm offset) now; return when it is committed.

        Raises the error that stopped uploads: `Fenced`, `CommitGap`, `Closed`.
        """
        self._force(wal_offset)
        await self.committed.wait(wal_offset)

    async def send_to(self, wal_offset: int) -> None:
        """As `upload_to`, but return when the commit has been sent: later commands follow it, unless it has to be
        retried."""
        self._force(wal_offset)
        await self.sent.wait(wal_offset)

    def _force(self, wal_offset: int) -> None:
        """Begin at once, not in the next iteration of the loop: the caller waits."""
        self._planner.force(wal_offset)
        if self._running:
            self._launch_what_is_due()
        self.wake()

    async def reserve(self) -> None:
        """Reserve object ids, so that the next small uploads need not request them. Raises `Unavailable`."""
        now = self._clock.monotonic()
        missing = self._ids.missing(now)
        if missing:
            self._ids.add(await self._objects.prepare_objects(missing, self._ids.ttl_ms), missing, now)

    async def close(self) -> None:
        """Stop at once; everything not committed stays in the WAL. Who waits for an upload gets `Closed`."""
        self._running = False
        await self._tasks.close()
        ended = Closed("the uploads of this term have ended")
        self.sent.fail(ended)
        self.committed.fail(ended)

    # -- the loop

    async def _run(self) -> None:
        while not self._pipeline.stopped:
            self._wake.clear()
            now = self._clock.monotonic()
            self._launch_what_is_due()
            watch_at = self._pipeline.watch_at()
            if watch_at is not None:
                self._confirm.watch(watch_at, self._wake.set)
            with suppress(TimeoutError):
                # wait_for can swallow a cancellation (Python 3.11)
                async with asyncio.timeout(self._pipeline.wait_s(now)):
                    await self._wake.wait()

    def _launch_what_is_due(self) -> None:
        for upload in self._pipeline.begin_due(self._clock.monotonic(), self._confirm.value):
            turn = asyncio.Event()
            carrier = self._tasks.spawn(self._carry(upload, turn), f"{upload.task.wal_start}")
            self._carriers[upload] = carrier, turn
            carrier.add_done_callback(partial(self._landed, upload))

    def _landed(self, upload: Upload, carrier: asyncio.Task[None]) -> None:
        del self._carriers[upload]
        self._wake.set()

    async def _carry(self, upload: Upload, turn: asyncio.Event) -> None:
        """Put one upload into the bucket and commit it, after all older ones."""
        upload.began = self._clock.monotonic()
        token = self.health.begin(upload.began)
        try:
            await self._carry_out(upload, turn)
        except Exception as error:
            self._tell(upload, str(error))
            raise
        else:
            self._tell(upload)
        finally:
            self.health.dropped(token)

    def _tell(self, upload: Upload, error: str = "") -> None:
        if self._owner.ended is None:
            return
        built, task = upload.objects, upload.task
        self._owner.ended(
            FinishedUpload(
                self._replica_set_id,
                task.wal_start,
                task.wal_end,
                built[0].object_id if built else -1,
                len(built),
                sum(one.size for one in built),
                upload.began,
                upload.put_at,
                self._clock.monotonic(),
                error,
            )
        )

    async def _carry_out(self, upload: Upload, turn: asyncio.Event) -> None:
        task = upload.task
        while True:
            await self._put_all(upload)
            upload.put_at = self._clock.monotonic()
            while not self._pipeline.has_turn(upload):
                await turn.wait()
            if self._pipeline.begin_commit(upload, self._clock.monotonic()) and await self._commit(upload):
                break
        self.health.succeeded(self._clock.monotonic())
        self.stats.commits += 1
        self.stats.objects += len(upload.objects)
        if upload.objects:
            self._owner.wrote(task.wal_end, upload.objects[0].object_id, len(upload.objects))
        await self._owner.committed(task)
        following = self._pipeline.finish(upload)
        self.committed.advance(self._pipeline.committed_offset)
        if following is not None and following in self._carriers:
            self._carriers[following][1].set()

    # -- prepare and put

    async def _put_all(self, upload: Upload) -> None:
        """As `_put_objects`, again after an unexpected error: nothing is committed yet."""
        backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)
        while True:
            try:
                return await self._put_objects(upload)
            except TidelogError:
                raise
            except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
                error = expected("storage.upload", failure)
            await self._pause(backoff.next_delay_s(), backoff.attempts, "build objects", error)

    async def _put_objects(self, upload: Upload) -> None:
        """Write an upload's objects under new ids, and set quarantined records aside."""
        task = upload.task
        wal_bytes = task.wal_end - task.wal_start
        plan: ObjectLayout = await self._compute(lambda: layout(task, self._settings.split_bytes), wal_bytes)
        since = self._clock.monotonic()
        built: list[BuiltObject] = []
        if plan.objects:
            first, since = await self._prepare(len(plan.objects))
            built = [await self._build(first + number, part) for number, part in enumerate(plan.objects)]
        puts = [
            self._put(object_key(self._cluster_id, one.object_id), one, part)
            for one, part in zip(built, plan.objects, strict=True)
        ]
        puts += [self._set_aside(task, part) for part in plan.quarantined]
        if len(puts) == 1:
            await puts[0]  # without a task, whose start and end would each wait for an iteration of the loop
        else:
            await asyncio.gather(*puts)
        self._pipeline.landed(upload, plan, built, self._ids.stale_at(since))

    async def _prepare(self, count: int) -> tuple[int, float]:
        """Return the first of `count` consecutive ids, and the start of their TTL; a single one may be reserved."""
        now = self._clock.monotonic()
        at_hand = self._ids.take(count, now)
        if at_hand is not None:
            return at_hand
        return await self._retry(lambda: self._objects.prepare_objects(count, self._ids.ttl_ms), "prepare objects"), now

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
        store, receipt = self._store.with_receipt()
        await self._retry(lambda: store.put(key, built.body), f"put object {key}")
        receipt.settle((part.log.stream_id, part.size) for part in plan.parts)
        self.stats.bytes += built.size

    async def _set_aside(self, task: UploadTask, part: StreamPart) -> None:
        """Keep the records of a quarantined stream for an operator, before their WAL range commits.

        The quarantine itself is made durable first: after the WAL is trimmed the next process could not detect it.
        """
        stream_id = part.log.stream_id
        await self._retry(lambda: self._note_quarantine(part.log), f"quarantine stream {stream_id}")
        for number, records in enumerate(_contiguous(part.records)):
            key = quarantine_key(self._cluster_id, stream_id, self._replica_set_id, task.wal_start, number)
            plan = ObjectPlan(ObjectKind.STREAM, [StreamPart(part.log, records, part.size)])
            await self._put(key, await self._build(QUARANTINE_OBJECT_ID, plan), plan)
            self.stats.quarantined_records += len(records)
            logger.error(
                "records of a quarantined stream set aside",
                extra={"stream": stream_id, "key": key, "records": len(records), "reason": part.log.reason},
            )

    async def _note_quarantine(self, log: StreamLog) -> None:
        if log.is_noted:
            return  # an operator may have released the stream since
        try:
            await self._objects.quarantine_stream(self._replica_set_id, self._master_epoch, log.stream_id, log.reason)
        except Fenced as error:  # the commit will be refused for the same reason, so nothing is trimmed
            logger.warning("the quarantine was not recorded", extra={"stream": log.stream_id, "error": error})
        log.is_noted = True

    async def _retry(self, attempt: Callable[[], Coroutine[Any, Any, _T]], what: str) -> _T:
        """Retry until success: the WAL holds the data meanwhile, and producers get back-pressure in the end."""
        backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)
        while True:
            try:
                return await attempt()
            except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
                error = expected("storage.upload", failure)
            await self._pause(backoff.next_delay_s(), backoff.attempts, what, error)

    async def _pause(self, delay_s: float, attempts: int, what: str, error: TidelogError) -> None:
        """Wait after a failure; log the 1st, 2nd, 4th, 8th… one."""
        self.stats.retries += 1
        self.health.failed(self._clock.monotonic(), error)
        if attempts & (attempts - 1) == 0:
            fields = {"replica_set": self._replica_set_id, "what": what, "attempt": attempts, "error": error}
            level = logging.WARNING if error.retriable else logging.ERROR
            logger.log(level, "upload step failed, retrying", extra=fields)
        await self._clock.sleep(delay_s)

    # -- commit

    async def _commit(self, upload: Upload) -> bool:
        """Return True if committed, False to lay the upload out again. Raises when uploads must stop."""
        task = upload.task
        built = tuple(one.as_new_object() for one in upload.objects)
        commit = CommitObjects(self._replica_set_id, self._master_epoch, task.wal_start, task.wal_end, built)
        while True:
            self.sent.advance(task.wal_end)
            try:
                await self._objects.commit_objects(commit)
            except Exception as failure:
                next_ = await self._after_refusal(upload, expected("storage.upload", failure))
                if next_ is NextStep.STOP:
                    raise
                if next_ is not NextStep.COMMIT:
                    return next_ is NextStep.FINISH
            else:
                self._pipeline.committed(upload)
                return True

    async def _after_refusal(self, upload: Upload, error: TidelogError) -> NextStep:
        answer = self._pipeline.refused(
            upload, error, self._clock.monotonic(), is_committed=self._is_committed(upload.task)
        )
        if answer.delay_s > 0:
            await self._pause(answer.delay_s, upload.backoff.attempts, "commit objects", error)
        if answer.stream is not None:
            self._owner.quarantine(answer.stream, error.message)
        if answer.next is NextStep.COMMIT and self._pipeline.found_committed(
            upload, is_committed=self._is_committed(upload.task)
        ):
            return NextStep.FINISH
        return answer.next

    def _is_committed(self, task: UploadTask) -> bool:
        """Return whether our copy of the metadata shows the range committed by an earlier attempt."""
        return self._objects.committed_wal_offset(self._replica_set_id) >= task.wal_end

    def _failed(self, error: BaseException) -> None:
        """Handle an error that ended an upload or the loop: nothing after it may commit."""
        self._pipeline.stop()
        for carrier, _ in self._carriers.values():
            carrier.cancel()
        reason = error if isinstance(error, Exception) else RuntimeError(repr(error))
        logger.error("uploads stopped", extra={"replica_set": self._replica_set_id, "error": reason})
        self.sent.fail(reason)
        self.committed.fail(reason)
        self._owner.fenced(reason)
