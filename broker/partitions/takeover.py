"""`TakeoverRunner`: recovers a dead broker's WAL from the bucket (docs/design/0007-failover.md).

The image names this broker the successor of a replica set, under a new master epoch. It opens that replica set's
WAL, fences every older writer, recovers it, uploads and commits the tail, and makes the controller
place the partitions on living brokers, which open them in parallel. It serves none of them itself.

The epoch fences everything: when the image names another successor or a master, the attempt is abandoned at any
point. Failures are retried, then passed on to another broker; all of it is reported (`problems`, `report`). A WAL
takes each epoch from one writer only, so an attempt that may have planted its fence is repeated under a new epoch, for
which this broker has itself elected again: its own fence, also that of an earlier process, does not stop it (rule 14).

It also detects when this broker itself has been replaced while it was paused or disconnected (`on_deposed`). No
acknowledgement depends on that, since the fence decides, but the process must restart to rejoin.

Entry: `TakeoverRunner.start`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidelog.broker.partitions.local_streams import ImageStreams
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.image.lost import TakeoverState, lost_replica_sets, next_successor
from tidelog.controller.model.commands import MAX_MOVES_PER_COMMAND
from tidelog.controller.model.records import NO_BROKER
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Fenced, TidelogError, Unavailable
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.inputs import LocalStreams, ReplicaSetData
from tidelog.storage.settings import StorageSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import Wal

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Replica sets taken over concurrently: each may hold a whole WAL in memory."""
ATTEMPTS = 3
"""Number of failures after which the takeover is passed on to another broker."""
STUCK_S = 15.0
"""An attempt is abandoned after this time if the bucket has returned nothing but errors."""
HISTORY = 64
RETURN_WAIT_S = 10.0
"""How long a restarted broker waits for others to complete the takeover of its replica set."""

OpenWal = Callable[[str, int], Wal]
"""`(cluster id, replica set id)`: opens a WAL in the bucket."""


async def wait_for_takeover(controller: ControllerClient, replica_set: int) -> None:
    """Wait, for a bounded time, while a living broker is taking this replica set over.

    For the restarted broker of that replica set. An election now would invalidate that work, and its partitions would
    wait until this process has recovered the same WAL and opened them all: longer than the rest of the takeover takes.
    """

    def goes_on() -> bool:
        lost = (each for each in lost_replica_sets(controller.image) if each.replica_set == replica_set)
        return any(each.state is TakeoverState.RECOVERING for each in lost)

    if not goes_on():
        return
    logger.info("another broker takes over; waiting for the takeover", extra={"replica_set": replica_set})
    changed = asyncio.Event()
    unsubscribe = controller.subscribe(lambda _delta: changed.set())
    try:
        async with asyncio.timeout(RETURN_WAIT_S):
            while goes_on():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        logger.warning("the takeover has not ended; this broker takes over", extra={"replica_set": replica_set})
    finally:
        unsubscribe()


@dataclass(slots=True)
class _Work:
    """The takeover of one replica set."""

    replica_set: int
    master_epoch: int
    since_ms: int
    """When the master was replaced by a successor, the first one if there were several."""
    backoff: Backoff
    """Of all attempts, also under earlier epochs."""
    task: asyncio.Task[None] | None = None
    settled: bool = False
    """Whether the image says that everything is placed."""
    may_have_fenced: bool = False
    """Whether the WAL may have seen `master_epoch`: it takes no other writer under it."""
    continued: bool = False
    """Whether this broker continues it under a new epoch."""
    step: str = "waiting"
    error: str = ""
    wal_bytes: int = 0
    placed: int = 0
    steps_ms: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the takeover as JSON for operators."""
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


class TakeoverRunner:
    """The takeovers of one broker; see the module."""

    def __init__(
        self,
        *,
        node_id: int,
        controller: ControllerClient,
        open_wal: OpenWal,
        store: GuardedObjectStore,
        clock: Clock,
        rng: random.Random,
        settings: StorageSettings,
        on_deposed: Callable[[BaseException], None],
    ) -> None:
        self._node_id = node_id
        self._controller = controller
        self._open_wal = open_wal
        self._store = store
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._on_deposed = on_deposed
        self._master_epoch: int | None = None
        self._work: dict[int, _Work] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._tasks = TaskSet("takeover", on_deposed)
        self._unsubscribe: Callable[[], None] | None = None
        self.finished: deque[_Work] = deque(maxlen=HISTORY)
        self.counts = {"done": 0, "superseded": 0, "failed_attempts": 0}

    def start(self, master_epoch: int | None) -> None:
        """Start following the image; `master_epoch` is that of this broker's own replica set, if it has one member.

        With None the broker is not deposed by a newer epoch: the set has several members, and elects another master.
        """
        self._master_epoch = master_epoch
        self._unsubscribe = self._controller.subscribe(self._image_changed)
        self._look()

    async def close(self) -> None:
        """Abandon takeovers in progress: another broker continues them."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        await self._tasks.close()

    def problems(self) -> list[str]:
        """Return which partitions have no broker, and their state; and the failures of this broker's takeovers."""
        found = [lost.sentence() for lost in lost_replica_sets(self._image)]
        return found + [
            f"the recovery of broker {work.replica_set}'s WAL fails here: {work.error}"
            for work in self._work.values()
            if work.error
        ]

    def report(self) -> dict[str, Any]:
        """Return the takeovers pending in the cluster, and those that this broker runs and has completed."""
        return {
            "lost": [lost.as_dict() for lost in lost_replica_sets(self._image)],
            "taking_over": [work.as_dict() for work in self._work.values()],
            "taken_over": [work.as_dict() for work in self.finished],
        }

    def waiting(self) -> dict[str, int]:
        """Return the number of partitions in the cluster without a living broker, by state."""
        found = {each.value: 0 for each in TakeoverState}
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
        if own is not None and self._master_epoch is not None and own.master_epoch > self._master_epoch:
            self._on_deposed(
                Fenced(
                    f"master epoch {self._master_epoch} of replica set {own.id} is over; it is {own.master_epoch}",
                    hint="this broker was declared dead, or a copy of its directory was started",
                )
            )
        sets = self._image.replica_sets
        wanted = {each.id: each.master_epoch for each in sets.values() if each.successor == self._node_id}
        for work in self._work.values():
            record = sets.get(work.replica_set)
            if record is None or record.master_epoch != work.master_epoch:
                if work.task is not None:
                    work.task.cancel()
            elif record.successor == NO_BROKER:
                work.settled = True  # the image may show this, and the next master, before the reply arrives
        for replica_set, epoch in wanted.items():
            old = self._work.get(replica_set)
            if old is None or old.master_epoch != epoch:
                backoff = Backoff(0.05, 2.0, self._rng) if old is None else old.backoff
                work = _Work(replica_set, epoch, sets[replica_set].takeover_since_ms, backoff)
                if old is not None:
                    old.continued, work.placed, work.error = True, old.placed, old.error
                self._work[replica_set] = work
                work.task = self._tasks.spawn(self._run(work), f"{replica_set}-{epoch}")

    def _is_ours(self, work: _Work) -> bool:
        record = self._image.replica_sets.get(work.replica_set)
        return (
            record is not None
            and record.successor == self._node_id
            and record.master_epoch == work.master_epoch
            and self._work.get(work.replica_set) is work
        )

    # --- one replica set -----------------------------------------------------------------------------------------

    async def _run(self, work: _Work) -> None:
        outcome = "superseded"
        try:
            async with self._gate:
                if await self._until_done(work):
                    outcome = "done"
        finally:
            if self._work.get(work.replica_set) is work:
                del self._work[work.replica_set]
            if not work.continued:
                self._finish(work, "done" if work.settled else outcome)

    def _finish(self, work: _Work, outcome: str) -> None:
        self.counts[outcome] += 1
        work.step, work.error = outcome, ""
        self.finished.append(work)
        fields = {"replica_set": work.replica_set, "master_epoch": work.master_epoch, "outcome": outcome}
        logger.info("takeover ended", extra={**fields, "partitions": work.placed, **work.steps_ms})

    async def _until_done(self, work: _Work) -> bool:
        """Attempt until success (True) or until the image names another successor or a master."""
        while self._is_ours(work):
            try:
                await self._bounded_attempt(work)
                return True
            except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
                error = expected("takeover", failure)
                self.counts["failed_attempts"] += 1
                work.error = str(error)
                work.may_have_fenced = work.may_have_fenced or isinstance(error, Fenced)  # perhaps an earlier process
                logger.warning("a takeover failed", extra={"replica_set": work.replica_set, "error": str(error)})
            delay_s = work.backoff.next_delay_s()
            if work.backoff.attempts >= ATTEMPTS:
                await self._pass_on(work)
            await self._clock.sleep(delay_s)
            if work.may_have_fenced:
                await self._elect(work, self._node_id)
        return False

    async def _pass_on(self, work: _Work) -> None:
        """Pass the takeover on: this broker's connection to the bucket may be at fault."""
        lost = next((each for each in lost_replica_sets(self._image) if each.replica_set == work.replica_set), None)
        other = next_successor(self._image, lost) if lost is not None else None
        if other is not None:
            await self._elect(work, other)

    async def _elect(self, work: _Work, successor: int) -> None:
        """Elect `successor` under a new epoch. The image then names it, which ends this task."""
        if not self._is_ours(work):
            return
        try:
            await self._controller.takeover(work.replica_set, successor, work.master_epoch)
        except TidelogError as error:
            fields = {"replica_set": work.replica_set, "successor": successor}
            logger.info("no successor was elected", extra={**fields, "error": str(error)})

    async def _bounded_attempt(self, work: _Work) -> None:
        """As `_attempt`; raises `Unavailable` if it does not end and the bucket returns nothing but errors."""
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
                    logger.info("an abandoned takeover ended with an error", extra={"error": str(attempt.exception())})

    async def _attempt(self, work: _Work) -> None:
        storage, wal = self._open(work)
        at = self._clock.monotonic()
        try:
            work.step = "recovering"
            await storage.recover()
            at = self._step(work, "read", at)
            work.may_have_fenced = True
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
        streams = ImageStreams(self._controller, work.replica_set)
        storage = Storage(
            ReplicaSetData(self._image.cluster_id, work.replica_set, wal, self._store, self._controller),
            self._settings,
            self._clock,
            self._rng,
            streams=LocalStreams(streams.is_open, streams.facts),
        )
        return storage, wal

    async def _place(self, work: _Work, wal_offset: int) -> None:
        while True:
            keys = [(each.topic_id, each.index) for each in self._image.owned(work.replica_set)]
            some = keys[:MAX_MOVES_PER_COMMAND]
            left = await self._controller.place_taken_over(work.replica_set, work.master_epoch, wal_offset, some)
            work.placed += len(some)
            if left == 0:
                return

    def _step(self, work: _Work, name: str, since: float) -> float:
        now = self._clock.monotonic()
        work.steps_ms[name] = (now - since) * 1000
        return now
