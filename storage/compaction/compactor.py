"""Executes compactions planned by `tidelog.storage.compaction.plan`.

For each task: the inputs' indexes are read, the outputs laid out, ids prepared (with a TTL), blocks read and checked
against their CRC32C (rule 10), outputs written, and when everything is in the bucket, one commit replaces the inputs
by the outputs. Reading and writing are throttled.

Failures and their handling:
- a crash or cancellation at any point: the task is committed as a whole or not at all. Ids that were prepared and not
  committed expire, and their objects are deleted;
- an input is corrupt, or not in the bucket, which is asked `_LOOKS` times more: it is *excluded* from compaction with a
  logged error, and the task is abandoned. The input stays unchanged, readable where it is intact; its neighbours are
  compacted without it;
- an input was destroyed meanwhile (another compaction, a deleted topic), or the ids expired: the controller refuses,
  the task is abandoned, the next plan starts from the current objects;
- the bucket or the controller does not answer: the task is abandoned and planned again in the next round. Only the
  commit is retried, since its outcome is unknown, until the ids have certainly expired;
- the master epoch is stale: another master has replaced this one. Compaction stops permanently in this process.

Entry: `Compactor`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple, Protocol

import msgspec

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, Fenced, TidelogError, Unavailable
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.types import Offload
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore
from tidelog.storage.commits import CompactionRefused, CompactObjects, ObjectKind
from tidelog.storage.compaction.check import check_conserved
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.partly_read import PartlyRead
from tidelog.storage.compaction.plan import CompactionTask, OutputPlan, lay_out, plan
from tidelog.storage.compaction.reader import BadInput, InputReader
from tidelog.storage.compaction.rewriting import OutputIdentity, blamed, build_output, merge_holes
from tidelog.storage.compaction.throttle import BUSY_SHARE, Throttle
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import get_range
from tidelog.storage.objects.writer import BuiltObject, build_object
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import CompactionSettings, UploadSettings

logger = logging.getLogger(__name__)

MAX_TTL_MS = 24 * 3_600_000
"""The longest TTL for which the controller prepares an id."""
_LOOKS = 3
"""How often an input is looked for that the bucket does not have: nothing takes it in again by itself once it is
excluded."""
_LOOK_S = 0.1
"""Pause before the second look; twice that before the third."""


class CompactionObjects(Protocol):
    """The controller's commands used by the compactor."""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        """See `tidelog.storage.managers.ObjectManager.prepare_objects`."""
        ...

    async def compact_objects(self, compaction: CompactObjects) -> None:
        """Replace the inputs by the outputs. The same compaction twice is success.

        Raises `CompactionRefused`, `Fenced`, `Unavailable` (outcome unknown).
        """
        ...

    async def catch_up(self) -> None:
        """See `tidelog.storage.managers.ObjectManager.catch_up`."""
        ...


class CompactionView(Protocol):
    """The local metadata used by the compactor."""

    async def objects(self) -> list[ObjectFacts]:
        """Return the committed objects that this replica set compacts."""
        ...

    def facts(self, object_id: int) -> ObjectFacts | None:
        """Return what is known of an object; None if it is not committed."""
        ...

    def is_committed(self, object_id: int) -> bool:
        """Return whether the metadata still names the object."""
        ...

    def was_committed(self, object_id: int) -> bool:
        """Return whether the metadata names the object, or did so and shows that it was destroyed since."""
        ...

    def start_offset(self, stream_id: int) -> int | None:
        """Return the start offset of a stream; None if it no longer exists."""
        ...


class CommittingTerm(NamedTuple):
    """A master's term: results are committed in its name, and refused when it is over."""

    replica_set_id: int
    master_epoch: int
    """int32."""


@dataclass(frozen=True, slots=True)
class CompactedData:
    """The location of a broker's objects, and the interfaces to their metadata."""

    cluster_id: str
    term: Callable[[], CommittingTerm | None]
    """A term of this broker that goes on, as far as it is known; None: it is the master of no replica set."""
    store: ObjectStore
    objects: CompactionObjects
    view: CompactionView


@dataclass(slots=True)
class CompactionStats:
    """Counts since the start."""

    rounds: int = 0
    tasks: int = 0
    """Committed tasks."""
    given_up: int = 0
    """Tasks not committed: refused, or without an answer."""
    inputs: int = 0
    outputs: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


Event = dict[str, Any]


class RecordChange(Protocol):
    """What becomes of the records of a stream."""

    def is_gone(self, start: int, end: int) -> bool:
        """Return whether offsets `[start, end)`, whole records, become a hole, and need not be read for that."""
        ...

    async def pace(self, size: int) -> None:
        """Wait when `size` bytes were read, or before they are written."""
        ...

    async def __call__(self, records: list[StreamEntry]) -> list[StreamEntry]:
        """Return what becomes of contiguous records: each itself, another payload, or a hole.

        A hole stands for what is gone and was not read.
        """
        ...


OnEvent = Callable[[Event], None]
Pace = Callable[[int], Awaitable[None]]


class Compactor:
    """The compaction of the objects of a broker's replica sets. All methods are called on the event loop's thread."""

    def __init__(
        self,
        data: CompactedData,
        settings: CompactionSettings,
        upload: UploadSettings,
        clock: Clock,
        rng: random.Random,
        *,
        busy: Callable[[], bool] = lambda: False,
        on_excluded: Callable[[int, str], None] | None = None,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """`upload` defines the layout of objects and the time for which ids are reserved."""
        self._data = data
        self._store = data.store
        self._objects = data.objects
        self._view = data.view
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._cluster_id = data.cluster_id
        self._term = data.term
        self._block_bytes = upload.block_bytes
        self._prepare_ttl_ms = upload.prepare_ttl_ms
        self._busy = busy
        self._on_excluded = on_excluded
        self._offload = offload
        self._throttle = Throttle(settings.throttle_bytes_per_s)
        self._round = asyncio.Lock()
        self._unthrottled = False
        self._left = 0
        self._running: list[CompactionTask] = []
        self._reserved: set[int] = set()
        """Objects that are being rewritten by `rewrite` or `carry_out`."""
        self._started = False
        self._closed = False
        self._tasks = TaskSet("storage.compaction", self._failed)
        self.stats = CompactionStats()
        self.excluded: dict[int, str] = {}
        """Objects that are not compacted, with the reason, until `readmit`, or until they are destroyed. A new process
        detects them again."""
        self.stopped: Exception | None = None
        """Why compaction has ended in this process; empty while it has not."""
        self.last_round_ms = 0

    def start(self) -> None:
        """Start compacting, if `compaction.enabled`; `run` works either way."""
        self._started = True
        if self._settings.enabled:
            self._tasks.keep(self._loop, "loop")

    async def close(self) -> None:
        """Stop at once. The ids of unfinished tasks expire."""
        self._closed = True
        await self._tasks.close()

    @property
    def data(self) -> CompactedData:
        """Return what it was made with."""
        return self._data

    @property
    def settings(self) -> CompactionSettings:
        """Return what it was made with."""
        return self._settings

    @property
    def block_bytes(self) -> int:
        """Return the size of the blocks of outputs."""
        return self._block_bytes

    @property
    def active(self) -> bool:
        """Return whether tasks are being executed: another run would wait for them."""
        return self._left > 0

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    @property
    def started(self) -> bool:
        """Return whether `start` was called."""
        return self._started

    def status(self) -> dict[str, Any]:
        """Return the status as JSON."""
        self._forget_destroyed()
        stats = self.stats
        return {
            "enabled": self._settings.enabled,
            "active": self.active,
            "tasks_left": self._left,
            "unthrottled": self._unthrottled,
            "busy": self._busy(),
            "throttle_bytes_per_s": self._settings.throttle_bytes_per_s,
            "running": [
                {"kind": task.kind, "objects": len(task.inputs), "bytes": task.size, "reason": task.reason}
                for task in self._running
            ],
            "rounds": stats.rounds,
            "last_round_ms": self.last_round_ms or None,
            "tasks": stats.tasks,
            "given_up": stats.given_up,
            "inputs": stats.inputs,
            "outputs": stats.outputs,
            "read_bytes": stats.read_bytes,
            "written_bytes": stats.written_bytes,
            "excluded": [{"object": object_id, "why": why} for object_id, why in sorted(self.excluded.items())],
            "stopped": str(self.stopped) if self.stopped is not None else None,
        }

    def figures(self) -> dict[str, int]:
        """Return metrics: counts since the start, and the number of objects excluded now."""
        self._forget_destroyed()
        stats = self.stats
        return {
            "tasks": stats.tasks,
            "given_up": stats.given_up,
            "inputs": stats.inputs,
            "outputs": stats.outputs,
            "read_bytes": stats.read_bytes,
            "written_bytes": stats.written_bytes,
            "excluded": len(self.excluded),
            "tasks_left": self._left,
        }

    def problems(self) -> list[str]:
        """Return the problems that need an operator's attention, one sentence each."""
        self._forget_destroyed()
        found = [f"object {object_id} cannot be compacted: {why}" for object_id, why in sorted(self.excluded.items())]
        if self.stopped is not None:
            found.append(f"compaction has ended: {self.stopped}")
        return found

    def _forget_destroyed(self) -> None:
        """Forget excluded objects that were trimmed, or deleted with their topic: nobody can verify them any more."""
        for gone in [each for each in self.excluded if not self._view.is_committed(each)]:
            del self.excluded[gone]

    # -- rounds

    async def _loop(self) -> None:
        while self.stopped is None:
            await self._clock.sleep(self._settings.interval_ms / 1000 * (0.5 + self._rng.random()))
            while self.stopped is None and await self.run() > 0:
                continue

    async def plan(
        self,
        *,
        eager: bool = False,
        wanted: Callable[[CompactionTask], bool] | None = None,
        settings: CompactionSettings | None = None,
        excluded: Sequence[int] = (),
    ) -> list[CompactionTask]:
        """Return the tasks due now. `eager`: two small neighbours are enough, whatever their age. `settings`: others
        than this compactor's. `excluded`: ids to leave alone, besides those that this compactor excludes."""
        settings = settings or self._settings
        if eager:
            settings = msgspec.structs.replace(settings, min_objects=2, age_ms=0)
        left_alone = (*self.excluded, *self._reserved, *excluded)
        work = partial(plan, await self._view.objects(), self._clock.time_ms(), settings, left_alone)
        tasks: list[CompactionTask] = await self._offload(work)
        return [task for task in tasks if wanted is None or wanted(task)]

    def launch(
        self,
        *,
        eager: bool = False,
        wanted: Callable[[CompactionTask], bool] | None = None,
        on_event: OnEvent | None = None,
        unthrottled: bool = False,
    ) -> asyncio.Task[int]:
        """Start `run` with `until_done` as a task that ends with this compactor.

        Cancelling it stops at once; the unfinished task is abandoned. The caller has checked `active` and `closed`.
        """
        run = self.run(eager=eager, wanted=wanted, on_event=on_event, unthrottled=unthrottled, until_done=True)
        return self._tasks.spawn(run, "launched")

    async def run(
        self,
        *,
        eager: bool = False,
        wanted: Callable[[CompactionTask], bool] | None = None,
        on_event: OnEvent | None = None,
        unthrottled: bool = False,
        until_done: bool = False,
    ) -> int:
        """Plan once and execute the plan; return the number of committed tasks. One run at a time, others wait.

        `unthrottled` ignores the throttle, however busy the broker is; `until_done` plans again until no task is left
        that can be done. `on_event` is called with `{"event": "plan" | "task" | "skipped", …}`.
        """
        tell = on_event or (lambda event: None)
        committed = 0
        async with self._round:
            self._unthrottled = unthrottled
            try:
                while True:
                    now = await self._run_once(eager, wanted, tell)
                    committed += now
                    if not until_done or now == 0 or self.stopped is not None:
                        return committed
            finally:
                self._unthrottled = False

    async def _run_once(self, eager: bool, wanted: Callable[[CompactionTask], bool] | None, tell: OnEvent) -> int:
        tasks = await self.plan(eager=eager, wanted=wanted)
        self.stats.rounds += 1
        self.last_round_ms = self._clock.time_ms()
        tell({"event": "plan", "tasks": len(tasks), "bytes": sum(task.size for task in tasks)})
        slots = asyncio.Semaphore(self._settings.concurrency)
        before = self.stats.tasks

        async def carry(task: CompactionTask) -> None:
            async with slots:
                if self.stopped is None:
                    await self._carry(task, tell)
                self._left -= 1

        self._left = len(tasks)
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(carry(task))
        finally:
            self._left = 0
        return self.stats.tasks - before

    async def _carry(self, task: CompactionTask, tell: OnEvent) -> None:
        """Execute one task; a failure is reported to `tell` and changes nothing."""
        self._running.append(task)
        fields: Event = {"kind": task.kind, "inputs": len(task.inputs), "bytes": task.size}
        try:
            outputs = await self._compact(task)
        except BadInput as error:
            self._exclude(error.object_id, error.message)
            problem: TidelogError = error
        except Fenced as error:
            problem = error
            await self._fenced(error)
        except Exception as error:  # noqa: BLE001  # whatever it is: an assertion is raised again
            problem = expected("storage.compaction", error)
        else:
            self.stats.tasks += 1
            self.stats.inputs += len(task.inputs)
            self.stats.outputs += len(outputs)
            done = {"outputs": len(outputs), "written_bytes": sum(one.size for one in outputs)}
            logger.info("objects compacted", extra={**fields, **done})
            tell({"event": "task", **fields, **done})
            return
        finally:
            self._running.remove(task)
        self.stats.given_up += 1
        logger.warning("compaction task abandoned", extra={**fields, "error": str(problem)})
        tell({"event": "skipped", **fields, "error": str(problem)})

    async def _fenced(self, error: Fenced) -> None:
        """End compaction, unless the term has ended since: the broker may lead other replica sets."""
        try:
            await self._objects.catch_up()
        except Unavailable:
            return
        if isinstance(error, _TermOver) and self._term() == error.term:
            self.stopped = error
            logger.warning("compaction ends here", extra={"replica_set": error.term.replica_set_id, "error": error})

    def _failed(self, error: BaseException) -> None:
        """Record a defect: no data is lost, and nothing more is compacted."""
        self.stopped = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _exclude(self, object_id: int, why: str) -> None:
        self.excluded[object_id] = why
        logger.error("object excluded from compaction", extra={"object": object_id, "why": why})
        if self._on_excluded is not None:
            self._on_excluded(object_id, why)

    def readmit(self, object_id: int) -> None:
        """Allow an object to be compacted again after a verification found it intact."""
        if self.excluded.pop(object_id, None) is not None:
            logger.info("object included in compaction again", extra={"object": object_id})

    # -- for log compaction

    @contextmanager
    def _keeping(self, task: CompactionTask) -> Iterator[None]:
        """Plan nothing else for the inputs. Raises `CompactionRefused` if one is known to be corrupt."""
        ids = {one.object_id for one in task.inputs}
        for object_id in sorted(ids & self.excluded.keys()):
            raise BadInput(object_id, self.excluded[object_id])
        self._reserved |= ids
        try:
            yield
        except BadInput as error:
            self._exclude(error.object_id, error.message)
            raise
        finally:
            self._reserved -= ids

    async def carry_out(self, task: CompactionTask) -> None:
        """Execute one task of the caller's. Raises `CompactionRefused`, `CorruptData`, `Fenced`, `Unavailable`."""
        with self._keeping(task):
            await self._compact(task)

    async def rewrite(self, task: CompactionTask, stream_id: int, change: RecordChange) -> int:
        """Replace contiguous stream objects of a stream by one with what `change` makes of their records.

        What `change` knows to be gone is not read. Nothing is written if nothing changes. Returns by how many bytes the
        objects have become smaller. Raises `CompactionRefused` (nothing has changed: look the objects up again),
        `CorruptData`, `Fenced`, `Unavailable`.
        """
        with self._keeping(task):
            return await self._rewrite(task, stream_id, change)

    async def _rewrite(self, task: CompactionTask, stream_id: int, change: RecordChange) -> int:
        start_offset = self._view.start_offset(stream_id)
        if start_offset is None:
            raise CompactionRefused(f"stream {stream_id} was deleted")
        read = await self._read_for(task, stream_id, start_offset, change)
        records = read.records()
        if not records:
            raise CompactionRefused(f"the objects of stream {stream_id} are trimmed")
        changed = list(merge_holes(await change(records)))
        is_same = len(changed) == len(records) and all(map(is_, changed, records))
        if is_same and not read.is_changed:
            return 0
        ttl_ms = self._ttl_ms(sum(len(one.payload) for one in changed))
        deadline = self._clock.monotonic() + ttl_ms / 1000
        built: BuiltObject = await self._offload(
            partial(
                build_object,
                object_id=await self._objects.prepare_objects(1, ttl_ms),
                kind=ObjectKind.STREAM,
                cluster_id=self._cluster_id,
                created_ms=self._clock.time_ms(),
                parts=[(stream_id, changed)],
                block_bytes=self._block_bytes,
            )
        )
        await self._put(built, [(stream_id, built.size)], change.pace)
        await self._commit(task, [built], deadline)
        self.stats.inputs += len(task.inputs)
        self.stats.outputs += 1
        return task.size - built.size

    async def _read_for(
        self, task: CompactionTask, stream_id: int, start_offset: int, change: RecordChange
    ) -> PartlyRead:
        """Read the blocks of a task of which something may be left."""
        reader = self._input_reader(change.pace)
        read = PartlyRead(stream_id, start_offset, change.is_gone)
        indexes = {one.object_id: await reader.index(one) for one in task.inputs if not read.takes_as_gone(one)}
        rest = CompactionTask(task.kind, tuple(one for one in task.inputs if one.object_id in indexes), task.reason)
        try:
            outputs = lay_out(rest, indexes, {stream_id: start_offset}, 0, self._settings.target_bytes)
        except CorruptData as error:
            raise BadInput(blamed(indexes, error), error.message) from error
        wanted = [source for output in outputs for _, sources in output.parts for source in sources]
        wanted = [source for source in wanted if not read.takes_block_as_gone(source.entry)]
        if wanted:
            read.blocks = await reader.blocks(OutputPlan(ObjectKind.STREAM, ((stream_id, tuple(wanted)),)))
        return read

    # -- one task

    def _input_reader(self, pace: Pace) -> InputReader:
        async def on_read(size: int) -> None:
            self.stats.read_bytes += size
            await pace(size)

        return InputReader(
            store=self._store,
            cluster_id=self._cluster_id,
            on_read=on_read,
            missing=self._missing,
            offload=self._offload,
        )

    async def _put(self, built: BuiltObject, used: Sequence[tuple[int, int]], pace: Pace) -> None:
        """Write an output. `used`: bytes by stream, for the accounts."""
        await pace(built.size)
        store, receipt = self._store.with_receipt()
        await store.put(object_key(self._cluster_id, built.object_id), built.body)
        receipt.settle(used)
        self.stats.written_bytes += built.size

    async def _compact(self, task: CompactionTask) -> list[BuiltObject]:
        """Write and commit a task; return the outputs."""
        reader = self._input_reader(self._wait_for_throttle)
        indexes = {one.object_id: await reader.index(one) for one in task.inputs}
        starts = {
            stream_id: start for stream_id in task.streams if (start := self._view.start_offset(stream_id)) is not None
        }
        try:
            outputs = lay_out(task, indexes, starts, self._settings.stream_bytes, self._settings.target_bytes)
        except CorruptData as error:
            raise BadInput(blamed(indexes, error), error.message) from error
        if not outputs:
            raise CompactionRefused("everything in the inputs is trimmed or deleted: there is nothing to write")
        ttl_ms = self._ttl_ms(sum(output.size for output in outputs))
        deadline = self._clock.monotonic() + ttl_ms / 1000
        first = await self._objects.prepare_objects(len(outputs), ttl_ms)
        built = [await self._write(reader, first + number, output, starts) for number, output in enumerate(outputs)]
        await self._commit(task, built, deadline)
        return built

    def _ttl_ms(self, size: int) -> int:
        """Return the TTL for the ids of outputs of `size` bytes. It must outlast a slow throttle, or the work
        would be repeated in vain."""
        slowest_s = 2 * size / (self._settings.throttle_bytes_per_s * BUSY_SHARE)
        return min(MAX_TTL_MS, self._prepare_ttl_ms + int(1000 * slowest_s))

    async def _write(
        self, reader: InputReader, object_id: int, output: OutputPlan, starts: dict[int, int]
    ) -> BuiltObject:
        blocks = await reader.blocks(output)

        identity = OutputIdentity(object_id, self._cluster_id, self._clock.time_ms(), self._block_bytes)
        built: BuiltObject = await self._offload(partial(build_output, output, blocks, starts, identity))
        used = [(stream_id, source.entry.length) for stream_id, sources in output.parts for source in sources]
        await self._put(built, used, self._wait_for_throttle)
        # The body is not needed any more, and there may be many outputs.
        return BuiltObject(built.object_id, built.kind, [], built.size, built.ranges)

    async def _commit(self, task: CompactionTask, built: Sequence[BuiltObject], deadline: float) -> None:
        """Check rule 7 and commit; the controller checks it again."""
        term = self._term()
        if term is None:
            raise CompactionRefused("this broker is the master of no replica set any more")
        compaction = CompactObjects(
            *term,
            tuple(one.object_id for one in task.inputs),
            tuple(one.as_new_object() for one in built),
        )
        check_conserved(
            (piece for one in task.inputs for piece in one.ranges),
            (piece for one in built for piece in one.ranges),
            self._view.start_offset,
        )
        backoff = Backoff(0.05, 5.0, self._rng)
        while True:
            try:
                await self._objects.compact_objects(compaction)
                return
            except Fenced as error:
                raise _TermOver(error, term) from error
            except Unavailable:
                delay_s = backoff.next_delay_s()
                if self._clock.monotonic() + delay_s > deadline:
                    raise
                await self._clock.sleep(delay_s)

    async def _wait_for_throttle(self, size: int) -> None:
        """Wait for the throttle before `size` bytes are read or written."""
        if self._unthrottled:
            return
        delay_s = self._throttle.delay_s(self._clock.monotonic(), size, self._busy())
        if delay_s > 0:
            await self._clock.sleep(delay_s)

    async def _missing(self, object_id: int, error: ObjectNotFound) -> TidelogError:
        """Return the error for an input that is not in the bucket. Raises `Unavailable` if no controller can tell."""
        await self._objects.catch_up()
        for look in range(_LOOKS):
            if not self._view.is_committed(object_id):
                return CompactionRefused(f"input object {object_id} was destroyed meanwhile")
            if look:
                await self._clock.sleep(_LOOK_S * look)
            with suppress(ObjectNotFound):
                await get_range(self._store, object_key(self._cluster_id, object_id), 0, 1)
                return Unavailable(
                    f"the bucket has an input, and said that it has not: {error.message}",
                    hint="is the bucket consistent, or is there a proxy before it?",
                )
        return BadInput(object_id, f"the metadata names an object that is not in the bucket: {error.message}")


class _TermOver(Fenced):
    """A commit was refused because of its term."""

    def __init__(self, error: Fenced, term: CommittingTerm) -> None:
        super().__init__(error.message, hint=error.hint)
        self.term = term
