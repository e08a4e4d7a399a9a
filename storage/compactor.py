"""Carries compactions out: the thin shell around `storage.compaction_plan`.

For each task: the inputs' indexes are read, the outputs laid out, ids prepared (with a TTL), blocks read and checked
against their CRC32C (rule 10), outputs written, and when everything is in the bucket, the controller is asked to
replace the one by the other at once. Reading and writing keep to a pace.

What can go wrong, and what happens:
- a crash or cancellation at any point: nothing, or the whole, is committed. Ids that were prepared and not committed
  expire, and their objects are deleted;
- an input is corrupt, or not in the bucket: it is *quarantined* from compaction, loudly, and the task given up. It
  stays as it is, readable as far as it is right; what surrounds it is compacted without it. Never silently dropped;
- an input was destroyed meanwhile (another compaction, a deleted topic), or the ids expired: the controller refuses,
  the task is given up, the next plan sees what is left;
- the bucket or the controller does not answer: the task is given up and found again by the next round. Only the commit
  is asked again, since its outcome is unknown, until the ids have surely expired;
- the master epoch is stale: somebody else is the master now. Compaction stops for good here.

Entry: `Compactor`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.clock import Clock
from runtime.errors import CorruptData, Fenced, TidelogError, Unavailable
from runtime.tasks import Backoff, TaskSet
from storage.compaction_check import check_conserved
from storage.compaction_pace import BUSY_SHARE, Pace
from storage.compaction_plan import CompactionTask, ObjectFacts, OutputPlan, lay_out, plan
from storage.compaction_reader import BadInput, InputReader, Offload
from storage.managers import CompactionRefused, CompactObjects, ObjectKind
from storage.object_format import Block, ObjectIndex
from storage.object_key import object_key
from storage.object_store import ObjectNotFound, ObjectStore
from storage.object_writer import BuiltObject, build_object
from storage.purpose import with_receipt
from storage.records import StreamRecord
from storage.settings import CompactionSettings

log = logging.getLogger(__name__)

MAX_TTL_MS = 24 * 3_600_000
"""The longest that the controller prepares an id for."""


class CompactionObjects(Protocol):
    """The controller, as the compactor sees it."""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        """See `storage.managers.ObjectManager.prepare_objects`."""
        ...

    async def compact_objects(self, compaction: CompactObjects) -> None:
        """Replace the inputs by the outputs. The same compaction twice is success.

        Raises `CompactionRefused`, `Fenced`, `Unavailable` (outcome unknown).
        """
        ...


class CompactionView(Protocol):
    """The local metadata, as the compactor sees it."""

    async def objects(self) -> list[ObjectFacts]:
        """The committed objects that this replica set compacts."""
        ...

    def is_committed(self, object_id: int) -> bool:
        """Whether the metadata still names the object."""
        ...

    def start_offset(self, stream_id: int) -> int | None:
        """Where a stream starts; None if it does not exist any more."""
        ...


@dataclass(slots=True)
class CompactionStats:
    """Counts since the start."""

    rounds: int = 0
    tasks: int = 0
    """Committed."""
    given_up: int = 0
    """Tasks not committed: refused, or something did not answer."""
    inputs: int = 0
    outputs: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


Event = dict[str, Any]
OnEvent = Callable[[Event], None]


class Compactor:
    """The compaction of one replica set. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        objects: CompactionObjects,
        view: CompactionView,
        clock: Clock,
        rng: random.Random,
        settings: CompactionSettings,
        cluster_id: str,
        replica_set_id: int,
        block_bytes: int,
        prepare_ttl_ms: int,
        busy: Callable[[], bool] = lambda: False,
        on_quarantined: Callable[[int, str], None] | None = None,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        self._store = store
        self._objects = objects
        self._view = view
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._cluster_id = cluster_id
        self._replica_set_id = replica_set_id
        self._block_bytes = block_bytes
        self._prepare_ttl_ms = prepare_ttl_ms
        self._busy = busy
        self._on_quarantined = on_quarantined
        self._offload = offload
        self._pace = Pace(settings.pace_bytes_per_s)
        self._round = asyncio.Lock()
        self._full_pace = False
        self._left = 0
        self._running: list[CompactionTask] = []
        self._master_epoch = -1
        self._closed = False
        self._tasks = TaskSet("storage.compaction", self._failed)
        self.stats = CompactionStats()
        self.quarantined: dict[int, str] = {}
        """Objects that are not compacted, and why, until `readmit`. A new process finds them again."""
        self.stopped: Exception | None = None
        """Why compaction has ended here, if it has."""
        self.last_round_ms = 0

    def start(self, master_epoch: int) -> None:
        """Compact from here on in this master epoch, if `compaction.enabled`; `run` works either way."""
        self._master_epoch = master_epoch
        if self._settings.enabled:
            self._tasks.spawn(self._loop(), "loop")

    async def close(self) -> None:
        """Stop at once. What is half done is given up when its ids expire."""
        self._closed = True
        await self._tasks.close()

    @property
    def active(self) -> bool:
        """Whether tasks are being carried out: another run would wait for them."""
        return self._left > 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def started(self) -> bool:
        """Whether `start` was called: the broker is master."""
        return self._master_epoch >= 0

    def status(self) -> dict[str, Any]:
        """As JSON."""
        stats = self.stats
        return {
            "enabled": self._settings.enabled,
            "active": self.active,
            "tasks_left": self._left,
            "full_pace": self._full_pace,
            "busy": self._busy(),
            "pace_bytes_per_s": self._settings.pace_bytes_per_s,
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
            "quarantined": [{"object": object_id, "why": why} for object_id, why in sorted(self.quarantined.items())],
            "stopped": str(self.stopped) if self.stopped is not None else None,
        }

    def figures(self) -> dict[str, int]:
        """For metrics: counts since the start, and how many objects are quarantined now."""
        stats = self.stats
        return {
            "tasks": stats.tasks,
            "given_up": stats.given_up,
            "inputs": stats.inputs,
            "outputs": stats.outputs,
            "read_bytes": stats.read_bytes,
            "written_bytes": stats.written_bytes,
            "quarantined": len(self.quarantined),
            "tasks_left": self._left,
        }

    def problems(self) -> list[str]:
        """What an operator should look at, one sentence each."""
        found = [
            f"object {object_id} cannot be compacted: {why}" for object_id, why in sorted(self.quarantined.items())
        ]
        if self.stopped is not None:
            found.append(f"compaction has ended: {self.stopped}")
        return found

    # -- rounds

    async def _loop(self) -> None:
        while self.stopped is None:
            await self._clock.sleep(self._settings.interval_ms / 1000 * (0.5 + self._rng.random()))
            while self.stopped is None and await self.run() > 0:
                continue

    async def plan(
        self, *, eager: bool = False, wanted: Callable[[CompactionTask], bool] | None = None
    ) -> list[CompactionTask]:
        """What would be done now. `eager`: two small neighbours are enough, whatever their age."""
        settings = self._settings
        if eager:
            settings = CompactionSettings(
                min_objects=2,
                max_objects=settings.max_objects,
                target_bytes=settings.target_bytes,
                stream_bytes=settings.stream_bytes,
                age_ms=0,
            )
        tasks = plan(await self._view.objects(), self._clock.time_ms(), settings, self.quarantined)
        return [task for task in tasks if wanted is None or wanted(task)]

    def launch(
        self,
        *,
        eager: bool = False,
        wanted: Callable[[CompactionTask], bool] | None = None,
        on_event: OnEvent | None = None,
        full_pace: bool = False,
    ) -> asyncio.Task[int]:
        """`run` for as long as there is something to do, as a task that ends with this compactor.

        Cancelling it stops at once; what is half done is given up. The caller has looked at `active` and `closed`.
        """
        run = self.run(eager=eager, wanted=wanted, on_event=on_event, full_pace=full_pace, until_done=True)
        return self._tasks.spawn(run, "launched")

    async def run(
        self,
        *,
        eager: bool = False,
        wanted: Callable[[CompactionTask], bool] | None = None,
        on_event: OnEvent | None = None,
        full_pace: bool = False,
        until_done: bool = False,
    ) -> int:
        """Plan once and carry it out; returns how many tasks were committed. One run at a time, others wait.

        `full_pace` keeps to no pace, however busy the broker is; `until_done` plans again until nothing is left that
        can be done. `on_event` hears `{"event": "plan" | "task" | "skipped", …}`.
        """
        tell = on_event or (lambda event: None)
        committed = 0
        async with self._round:
            self._full_pace = full_pace
            try:
                while True:
                    now = await self._run_once(eager, wanted, tell)
                    committed += now
                    if not until_done or now == 0 or self.stopped is not None:
                        return committed
            finally:
                self._full_pace = False

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
        """One task; what goes wrong is told and leaves everything as it was."""
        self._running.append(task)
        fields: Event = {"kind": task.kind, "inputs": len(task.inputs), "bytes": task.size}
        try:
            outputs = await self._compact(task)
        except BadInput as error:
            self._quarantine(error.object_id, error.message)
            problem: TidelogError = error
        except Fenced as error:
            self.stopped = problem = error
            log.warning("compaction ends here", extra={"replica_set": self._replica_set_id, "error": error})
        except TidelogError as error:
            problem = error
        else:
            self.stats.tasks += 1
            self.stats.inputs += len(task.inputs)
            self.stats.outputs += len(outputs)
            done = {"outputs": len(outputs), "written_bytes": sum(one.size for one in outputs)}
            log.info("objects compacted", extra={**fields, **done, "replica_set": self._replica_set_id})
            tell({"event": "task", **fields, **done})
            return
        finally:
            self._running.remove(task)
        self.stats.given_up += 1
        log.warning("a compaction is given up", extra={**fields, "error": str(problem)})
        tell({"event": "skipped", **fields, "error": str(problem)})

    def _failed(self, error: BaseException) -> None:
        """A defect: nothing is lost, and nothing more is compacted."""
        self.stopped = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _quarantine(self, object_id: int, why: str) -> None:
        self.quarantined[object_id] = why
        log.error("an object cannot be compacted and is left as it is", extra={"object": object_id, "why": why})
        if self._on_quarantined is not None:
            self._on_quarantined(object_id, why)

    def readmit(self, object_id: int) -> None:
        """The object was verified and is right: it may be compacted again, if it was left alone before."""
        if self.quarantined.pop(object_id, None) is not None:
            log.info("an object may be compacted again", extra={"object": object_id})

    # -- one task

    async def _compact(self, task: CompactionTask) -> list[BuiltObject]:
        """Write and commit; returns the outputs."""
        reader = InputReader(
            store=self._store,
            cluster_id=self._cluster_id,
            on_read=self._read,
            missing=self._missing,
            offload=self._offload,
        )
        indexes = {one.object_id: await reader.index(one) for one in task.inputs}
        starts = {
            stream_id: start for stream_id in task.streams if (start := self._view.start_offset(stream_id)) is not None
        }
        try:
            outputs = lay_out(task, indexes, starts, self._settings.stream_bytes)
        except CorruptData as error:
            raise BadInput(_blamed(indexes, error), error.message) from error
        if not outputs:
            raise CompactionRefused("everything in the inputs is trimmed or deleted: there is nothing to write")
        ttl_ms = self._ttl_ms(sum(output.size for output in outputs))
        deadline = self._clock.monotonic() + ttl_ms / 1000
        first = await self._objects.prepare_objects(len(outputs), ttl_ms)
        built = [await self._write(reader, first + number, output, starts) for number, output in enumerate(outputs)]
        await self._commit(task, built, deadline)
        return built

    def _ttl_ms(self, size: int) -> int:
        """How long the ids of outputs of `size` bytes are prepared: a slow pace must not outlast them, or the work
        would be done again and again for nothing."""
        slowest_s = 2 * size / (self._settings.pace_bytes_per_s * BUSY_SHARE)
        return min(MAX_TTL_MS, self._prepare_ttl_ms + int(1000 * slowest_s))

    async def _write(
        self, reader: InputReader, object_id: int, output: OutputPlan, starts: dict[int, int]
    ) -> BuiltObject:
        blocks = await reader.blocks(output)

        def build() -> BuiltObject:
            return build_object(
                object_id=object_id,
                kind=ObjectKind(output.kind),
                cluster_id=self._cluster_id,
                created_ms=self._clock.time_ms(),
                parts=[
                    (stream_id, [*_records((blocks[source] for source in sources), starts[stream_id])])
                    for stream_id, sources in output.parts
                ],
                block_bytes=self._block_bytes,
            )

        built: BuiltObject = await self._offload(build)
        await self._keep_pace(built.size)
        store, receipt = with_receipt(self._store)
        await store.put(object_key(self._cluster_id, object_id), built.body)
        receipt.settle((stream_id, source.entry.length) for stream_id, sources in output.parts for source in sources)
        self.stats.written_bytes += built.size
        # The body is not needed any more, and there may be many.
        return BuiltObject(built.object_id, built.kind, [], built.size, built.ranges)

    async def _commit(self, task: CompactionTask, built: Sequence[BuiltObject], deadline: float) -> None:
        """Rule 7 is checked here, and by the controller again."""
        compaction = CompactObjects(
            self._replica_set_id,
            self._master_epoch,
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
            except Unavailable:
                delay_s = backoff.next_delay_s()
                if self._clock.monotonic() + delay_s > deadline:
                    raise
                await self._clock.sleep(delay_s)

    async def _keep_pace(self, size: int) -> None:
        """Keep the pace: wait before `size` bytes are read or written."""
        if self._full_pace:
            return
        delay_s = self._pace.delay_s(self._clock.monotonic(), size, self._busy())
        if delay_s > 0:
            await self._clock.sleep(delay_s)

    def _missing(self, object_id: int, error: ObjectNotFound) -> TidelogError:
        """What it means that an input is not in the bucket."""
        if self._view.is_committed(object_id):
            return BadInput(object_id, f"the metadata names an object that is not in the bucket: {error.message}")
        return CompactionRefused(f"input object {object_id} was destroyed meanwhile")

    async def _read(self, size: int) -> None:
        self.stats.read_bytes += size
        await self._keep_pace(size)


def _records(blocks: Iterable[Block], start_offset: int) -> Iterator[StreamRecord]:
    """The records that hold anything at or above `start_offset`."""
    for block in blocks:
        for record in block:
            if record.base_offset + record.count > start_offset:
                yield record


def _blamed(indexes: dict[int, ObjectIndex], error: CorruptData) -> int:
    """The input that an error of the layout is about: the one whose key it names."""
    return next(object_id for object_id, index in indexes.items() if index.key in error.message)
