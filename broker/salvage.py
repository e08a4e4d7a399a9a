"""`Salvager`: brings what a dead broker left in its bucket WAL into the metadata (docs/design/0007-failover.md).

The image names this broker the salvager of a replica set, under a master epoch of its own. It opens that replica set's
WAL, which shuts every older writer out by a fence, recovers it, uploads and commits the tail, and has the controller
place the partitions on living brokers, which open them side by side. It serves nothing of it.

Everything is fenced by the epoch: when the image names another salvager or a master, the attempt is given up wherever
it is. What fails is tried again, then passed on to another broker; all of it can be seen (`problems`, `report`).

It also notices when this broker itself has been replaced while it was away (`on_deposed`): no acknowledgement depends
on that, for the fence has the last word, but the process must start anew to take part.

Entry: `Salvager.start`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from broker.bucket_health import WatchedObjectStore
from controller.client import ControllerClient
from controller.commands import MAX_MOVES_PER_COMMAND
from controller.image import Delta, Image
from controller.lost import Salvaging, lost_replica_sets, next_salvager
from controller.model import NO_BROKER, StreamState
from runtime.clock import Clock
from runtime.errors import Fenced, TidelogError, Unavailable
from runtime.tasks import Backoff, TaskSet
from storage.settings import CacheSettings, UploadSettings
from storage.storage import Storage
from storage.wal import Wal

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Replica sets salvaged side by side: each may hold a whole WAL in memory."""
ATTEMPTS = 3
"""After so many failures another broker is asked to try."""
STUCK_S = 15.0
"""An attempt whose bucket has answered nothing but errors is given up when this has passed."""
HISTORY = 64
RETURN_WAIT_S = 10.0
"""How long a broker that comes back lets others finish the salvage of what it had left."""

OpenWal = Callable[[str, int], Wal]
"""`(cluster id, replica set id)`: a WAL in the bucket."""


async def let_salvage_end(controller: ControllerClient, replica_set: int) -> None:
    """Wait, for a bounded time, while a living broker salvages this replica set.

    For its own broker that has come back. An election now would make that work stale, and its partitions would wait
    until this process has recovered the same WAL and opened them all: longer than the rest of the salvage takes.
    """

    def goes_on() -> bool:
        lost = (each for each in lost_replica_sets(controller.image) if each.replica_set == replica_set)
        return any(each.state is Salvaging.RECOVERING for each in lost)

    if not goes_on():
        return
    log.info("what this broker left is being salvaged; waiting for that", extra={"replica_set": replica_set})
    changed = asyncio.Event()
    unsubscribe = controller.subscribe(lambda _delta: changed.set())
    try:
        async with asyncio.timeout(RETURN_WAIT_S):
            while goes_on():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        log.warning("the salvage does not end; this broker takes over", extra={"replica_set": replica_set})
    finally:
        unsubscribe()


@dataclass(slots=True)
class _Work:
    """One replica set in work."""

    replica_set: int
    master_epoch: int
    since_ms: int
    """When the master was replaced by a salvager, the first one if there were several."""
    task: asyncio.Task[None] | None = None
    settled: bool = False
    """Whether the image says that everything is placed."""
    step: str = "waiting"
    error: str = ""
    wal_bytes: int = 0
    placed: int = 0
    steps_ms: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For operators."""
        return {
            "broker": self.replica_set,
            "master_epoch": self.master_epoch,
            "since_ms": self.since_ms,
            "step": self.step,
            "error": self.error or None,
            "wal_bytes": self.wal_bytes,
            "partitions_placed": self.placed,
            "steps_ms": {name: round(took, 1) for name, took in self.steps_ms.items()},
        }


class Salvager:
    """See the module."""

    def __init__(
        self,
        *,
        node_id: int,
        controller: ControllerClient,
        open_wal: OpenWal,
        store: WatchedObjectStore,
        clock: Clock,
        rng: random.Random,
        upload: UploadSettings,
        cache: CacheSettings,
        on_deposed: Callable[[BaseException], None],
    ) -> None:
        self._node_id = node_id
        self._controller = controller
        self._open_wal = open_wal
        self._store = store
        self._clock = clock
        self._rng = rng
        self._upload = upload
        self._cache = cache
        self._on_deposed = on_deposed
        self._master_epoch = -1
        self._work: dict[int, _Work] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._tasks = TaskSet("salvage", on_deposed)
        self._unsubscribe: Callable[[], None] | None = None
        self.finished: deque[_Work] = deque(maxlen=HISTORY)
        self.counts = {"done": 0, "superseded": 0, "failed_attempts": 0}

    def start(self, master_epoch: int) -> None:
        """Follow the image from now on; `master_epoch` is that of this broker's own replica set."""
        self._master_epoch = master_epoch
        self._unsubscribe = self._controller.subscribe(self._image_changed)
        self._look()

    async def close(self) -> None:
        """Give up what is in work: another broker goes on with it."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        await self._tasks.close()

    def problems(self) -> list[str]:
        """Which partitions have no broker, and what becomes of them; what fails here."""
        found = [lost.sentence() for lost in lost_replica_sets(self._image)]
        return found + [
            f"the recovery of broker {work.replica_set}'s WAL fails here: {work.error}"
            for work in self._work.values()
            if work.error
        ]

    def report(self) -> dict[str, Any]:
        """What dead brokers left, all over the cluster; and what this broker salvages and has salvaged."""
        return {
            "lost": [lost.as_dict() for lost in lost_replica_sets(self._image)],
            "salvaging": [work.as_dict() for work in self._work.values()],
            "salvaged": [work.as_dict() for work in self.finished],
        }

    def waiting(self) -> dict[str, int]:
        """Partitions in the cluster without a living broker, by what becomes of them."""
        found = {"due": 0, "recovering": 0, "waiting": 0}
        for lost in lost_replica_sets(self._image):
            found[lost.state.value] += lost.partitions
        return found

    # --- following the image -------------------------------------------------------------------------------------

    @property
    def _image(self) -> Image:
        return self._controller.image

    def _image_changed(self, delta: Delta) -> None:
        if delta.version == self._image.placement_version:
            self._look()

    def _look(self) -> None:
        own = self._image.replica_sets.get(self._node_id)
        if own is not None and own.master_epoch > self._master_epoch:
            self._on_deposed(
                Fenced(
                    f"master epoch {self._master_epoch} of replica set {own.id} is over; it is {own.master_epoch}",
                    hint="this broker was taken for dead, or a copy of its directory was started",
                )
            )
        sets = self._image.replica_sets
        wanted = {each.id: each.master_epoch for each in sets.values() if each.salvager == self._node_id}
        for work in self._work.values():
            record = sets.get(work.replica_set)
            if record is None or record.master_epoch != work.master_epoch:
                if work.task is not None:
                    work.task.cancel()
            elif record.salvager == NO_BROKER:
                work.settled = True  # the image may bring this, and the next master, before the reply that says so
        for replica_set, epoch in wanted.items():
            old = self._work.get(replica_set)
            if old is None or old.master_epoch != epoch:
                work = self._work[replica_set] = _Work(replica_set, epoch, sets[replica_set].salvage_since_ms)
                work.task = self._tasks.spawn(self._run(work), f"{replica_set}-{epoch}")

    def _is_ours(self, work: _Work) -> bool:
        record = self._image.replica_sets.get(work.replica_set)
        return (
            record is not None
            and record.salvager == self._node_id
            and record.master_epoch == work.master_epoch
            and self._work.get(work.replica_set) is work
        )

    # --- one replica set -----------------------------------------------------------------------------------------

    async def _run(self, work: _Work) -> None:
        fields = {"replica_set": work.replica_set, "master_epoch": work.master_epoch}
        outcome = "superseded"
        try:
            async with self._gate:
                if await self._until_done(work):
                    outcome = "done"
        finally:
            if self._work.get(work.replica_set) is work:
                del self._work[work.replica_set]
            if work.settled:
                outcome = "done"
            self.counts[outcome] += 1
            work.step, work.error = outcome, ""
            self.finished.append(work)
            log.info("salvage ended", extra={**fields, "outcome": outcome, "partitions": work.placed, **work.steps_ms})

    async def _until_done(self, work: _Work) -> bool:
        """Attempts until one succeeds (true) or the image says that it is not ours any more."""
        backoff = Backoff(0.05, 2.0, self._rng)
        while self._is_ours(work):
            try:
                await self._bounded_attempt(work)
                return True
            except TidelogError as error:
                self.counts["failed_attempts"] += 1
                work.error = str(error)
                log.warning("a salvage failed", extra={"replica_set": work.replica_set, "error": str(error)})
            if backoff.attempts >= ATTEMPTS:
                await self._pass_on(work)
            await self._clock.sleep(backoff.next_delay_s())
        return False

    async def _pass_on(self, work: _Work) -> None:
        """It may be this broker's way to the bucket that is bad."""
        lost = next((each for each in lost_replica_sets(self._image) if each.replica_set == work.replica_set), None)
        other = next_salvager(self._image, lost) if lost is not None else None
        if other is None or not self._is_ours(work):
            return
        try:
            await self._controller.salvage(work.replica_set, other, work.master_epoch)
        except TidelogError as error:
            log.info("nobody else takes over", extra={"replica_set": work.replica_set, "error": str(error)})

    async def _bounded_attempt(self, work: _Work) -> None:
        """As `_attempt`; raises `Unavailable` if it does not end and the bucket answers nothing but errors."""
        attempt = asyncio.ensure_future(self._attempt(work))
        try:
            while not (await asyncio.wait([attempt], timeout=STUCK_S))[0]:
                if self._store.health.failures_in_a_row:
                    raise Unavailable(f"the bucket fails: {self._store.health.last_error}")
            attempt.result()
        finally:
            if not attempt.done():
                attempt.cancel()
                await asyncio.wait([attempt])
                if not attempt.cancelled() and attempt.exception() is not None:
                    log.info("a salvage ended while it was given up", extra={"error": str(attempt.exception())})

    async def _attempt(self, work: _Work) -> None:
        storage, wal = self._open(work)
        at = self._clock.monotonic()
        try:
            work.step = "recovering"
            await storage.recover()
            at = self._step(work, "read", at)
            await storage.start(work.master_epoch)
            at = self._step(work, "fence", at)
            work.wal_bytes = wal.end_offset - storage.committed_offset
            work.step = "uploading"
            storage.recovered_done()
            await storage.upload_now()
            at = self._step(work, "upload", at)
            work.step = "placing"
            await self._place(work, storage.committed_offset)
            self._step(work, "place", at)
        finally:
            await storage.close(upload=False)

    def _open(self, work: _Work) -> tuple[Storage, Wal]:
        wal = self._open_wal(self._image.cluster_id, work.replica_set)
        storage = Storage(
            wal=wal,
            store=self._store,
            objects=self._controller,
            clock=self._clock,
            cluster_id=self._image.cluster_id,
            replica_set_id=work.replica_set,
            upload=self._upload,
            cache=self._cache,
            rng=self._rng,
            owns_stream=lambda stream_id: self._facts(work.replica_set, stream_id) is not None,
            stream_facts=lambda stream_id: self._facts(work.replica_set, stream_id),
        )
        return storage, wal

    def _facts(self, replica_set: int, stream_id: int) -> tuple[int, int] | None:
        """Committed end and first epoch of ownership of a stream that the dead broker had open."""
        record = self._image.streams.get(stream_id)
        if record is None or record.replica_set != replica_set or record.state != StreamState.OPENED:
            return None
        return record.end_offset, record.owner_since_epoch

    async def _place(self, work: _Work, wal_offset: int) -> None:
        while True:
            image = self._image
            keys = [
                (each.topic_id, each.index) for each in image.all_partitions() if each.replica_set == work.replica_set
            ]
            some = keys[:MAX_MOVES_PER_COMMAND]
            left = await self._controller.place_salvaged(work.replica_set, work.master_epoch, wal_offset, some)
            work.placed += len(some)
            if left == 0:
                return

    def _step(self, work: _Work, name: str, since: float) -> float:
        now = self._clock.monotonic()
        work.steps_ms[name] = (now - since) * 1000
        return now
