"""The partitions of an internal topic that this broker leads: loading, requests, writes, timers, unloading.

A `Shard` is one led partition with its store. `ShardTable` has those of one topic; it reads each log when the partition
opens, tells its owner that the shard is active, and unloads it when the partition closes or is lost. One timer of the
event loop covers all deadlines of all shards.

Invariants: a shard serves requests only while it is loaded and led; the owner hears of each shard once that it is
active and then once that it is unloaded, before its waiting writes fail; a deadline of a shard ends with it.

Entry: `ShardTable`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tidelog.broker.coordinators.errors import (
    CoordinatorLoading,
    CoordinatorNotAvailable,
    NotCoordinator,
    WriteError,
)
from tidelog.broker.coordinators.handover import encode_state, read_passed
from tidelog.broker.coordinators.loader import load_store
from tidelog.broker.coordinators.store import KeyValue, StateStore
from tidelog.broker.coordinators.timers import Now, TimerTable
from tidelog.broker.coordinators.writer import StateWriter, Write
from tidelog.controller.model.wal_notes import lost_at
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.stream.partition_close import no_note

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.image.image import Delta
    from tidelog.stream.partition_log import PartitionLog

logger = logging.getLogger(__name__)

PERSIST_TIMEOUT_S = 5.0
"""How long a request waits for its write before the client gets a retriable error (offsets.commit.timeout.ms)."""
LOADING_S = 30.0
"""A partition that takes longer to load is a problem: a log of 100 MB takes some seconds."""
_LEADER_NOT_AVAILABLE = 5
"""Kafka code of `PartitionManager.get` while a partition that this broker leads is opening."""
_NO_SHARD = -1
"""Index of the deadlines that belong to the table."""

S = TypeVar("S", bound=StateStore)


class ShardPhase(Enum):
    """The phases of a shard."""

    LOADING = "loading"
    ACTIVE = "active"
    BROKEN = "broken"
    """The log is damaged. Loading is retried, so the shard becomes active once the data is restored."""


@dataclass(slots=True, eq=False)
class Shard(Generic[S]):
    """One led partition."""

    log: PartitionLog
    store: S
    phase: ShardPhase = ShardPhase.LOADING
    since_s: float = 0.0
    """When it began to load, in monotonic seconds."""
    error: str = ""
    """Why the last attempt to load it failed; empty: none did."""
    _writer: StateWriter | None = None
    loading: asyncio.Task[None] | None = None
    deleted_topics: set[str] = field(default_factory=set)
    """Topics deleted while the shard was loading."""
    timers: TimerTable[Hashable] = field(default_factory=TimerTable)
    """Its deadlines, for the table."""

    @property
    def index(self) -> int:
        """The index of the partition."""
        return self.log.partition

    @property
    def writer(self) -> StateWriter:
        """The writer, which exists once the shard is active."""
        assert self._writer is not None, f"{self.log.topic}-{self.index} is not active"
        return self._writer

    def activate(self, writer: StateWriter) -> None:
        """Start serving requests."""
        self._writer = writer
        self.phase = ShardPhase.ACTIVE

    def pass_on(self) -> None:
        """Leave the state to the next leader, if the partition moves to one; the shard is active, and closes now."""
        self.log.hint_note = functools.partial(encode_state, self.store, self.writer.applied_to, self.writer.log_bytes)

    def close(self) -> None:
        """Cancel pending reads and writes."""
        if self.loading is not None:
            self.loading.cancel()
        if self._writer is not None:
            self._writer.close()


class ShardOwner(Protocol[S]):
    """The coordinator whose shards a table has. Its methods must not raise."""

    def new_store(self) -> S:
        """Return an empty store."""
        ...

    def activated(self, shard: Shard[S]) -> None:
        """The shard is loaded, and serves requests from now on."""
        ...

    def unloading(self, shard: Shard[S]) -> None:
        """An active shard has left the table: fail its waiting requests. Its waiting writes fail after this."""
        ...

    def due(self, shard: Shard[S] | None, key: Hashable, now: Now) -> None:
        """The deadline `key` has come: of an active shard, or of the table (None). It is no longer set."""
        ...

    def topics_deleted(self, shard: Shard[S], names: set[str]) -> None:
        """These topics were deleted, at the latest since the active shard began to load."""
        ...


class ShardTable(Generic[S]):
    """All shards of one topic on one broker."""

    def __init__(
        self,
        topic: str,
        owner: ShardOwner[S],
        *,
        partitions: PartitionManager,
        controller: ControllerClient,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._topic = topic
        self._owner = owner
        self._partitions = partitions
        self._controller = controller
        self._clock = clock
        self._rng = rng
        self._shards: dict[int, Shard[S]] = {}
        self._own_timers: TimerTable[Hashable] = TimerTable()
        self._alarms: TimerTable[int] = TimerTable()
        """The next deadline of each shard, and of the table."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = 0
        self._tasks = TaskSet(topic)
        self._phase_changed = asyncio.Event()
        self._topic_names: dict[bytes, str] = {}
        self._unsubscribe: Callable[[], None] | None = None
        self._closed = False

    # --- life cycle ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Subscribe to openings and closings of partitions, and load the open ones."""
        self._topic_names = {topic.id: topic.name for topic in self._controller.image.topics.values()}
        self._unsubscribe = self._controller.subscribe(self._image_changed)
        self._partitions.on_opened(self.partition_opened)
        self._partitions.on_closed(self.partition_closed)
        for partition_log in self._partitions.all():
            self.partition_opened(partition_log)

    async def close(self) -> None:
        """Unload all shards and stop. The logs stay open."""
        self._closed = True
        if self._unsubscribe is not None:
            self._unsubscribe()
        for index in list(self._shards):
            self.unload(index)
        self._phase_changed.set()
        if self._alarm is not None:
            self._alarm.cancel()
        await self._tasks.close()

    def partition_opened(self, partition_log: PartitionLog) -> None:
        """Handle the opening of a log on this broker; other topics are ignored."""
        if partition_log.topic != self._topic or self._closed:
            return
        shard = self._admit(partition_log)
        if shard is not None:
            shard.loading = self._tasks.spawn(self._load(shard), f"load-{shard.index}")

    def partition_closed(self, partition_log: PartitionLog) -> None:
        """Handle the closing of a log on this broker."""
        shard = self._shards.get(partition_log.partition)
        if partition_log.topic == self._topic and shard is not None and shard.log is partition_log:
            if shard.phase is ShardPhase.ACTIVE:
                shard.pass_on()
            self.unload(partition_log.partition)

    async def load(self, partition_log: PartitionLog) -> None:
        """Read a partition of the topic; it is served afterwards. Retries while it is unavailable."""
        shard = self._admit(partition_log)
        if shard is not None:
            await self._load(shard)

    def _admit(self, partition_log: PartitionLog) -> Shard[S] | None:
        """Create a shard that replaces an older one; None if the same or a newer one exists."""
        index = partition_log.partition
        known = self._shards.get(index)
        if known is not None and (known.log is partition_log or self._is_newer(known.log, partition_log)):
            return None
        self.unload(index)
        shard = self._shards[index] = Shard(partition_log, self._owner.new_store(), since_s=self._clock.monotonic())
        return shard

    def _is_newer(self, one: PartitionLog, other: PartitionLog) -> bool:
        """Whether `one` counts, and not `other`: one of a deleted topic may be open for a while, beside that of a topic
        that was created again, whose leader epochs begin anew."""
        if one.topic_id == other.topic_id:
            return one.leader_epoch > other.leader_epoch
        record = self._controller.image.topic(self._topic)
        return record is None or record.id != other.topic_id

    async def _load(self, shard: Shard[S]) -> None:
        size_bytes = await self._read(shard)
        if size_bytes is not None and self.is_current(shard):
            self._activate(shard, size_bytes)
        self._phase_changed.set()

    def unload(self, index: int) -> None:
        """Drop a partition that this broker no longer leads: waiting requests and writes fail with NOT_COORDINATOR."""
        shard = self._shards.pop(index, None)
        if shard is None:
            return
        self._alarms.cancel(index)
        if shard.phase is ShardPhase.ACTIVE:
            self._owner.unloading(shard)
        shard.close()
        self._phase_changed.set()

    async def _read(self, shard: Shard[S]) -> int | None:
        """Load the log; returns the bytes read, or None if the partition closed."""
        backoff = Backoff(0.1, 5.0, self._rng)
        passed, shard.log.hint_note = read_passed(shard.log.hint_note()), no_note
        while self.is_current(shard):
            try:
                lost = lost_at(self._controller.image.kv, self._topic, shard.index)
                return await load_store(shard.log, shard.store, passed, lost)
            except CorruptData as error:
                shard.error = str(error)
                if shard.phase is not ShardPhase.BROKEN:
                    shard.phase = ShardPhase.BROKEN
                    self._phase_changed.set()
                    logger.error(
                        "a coordinator's partition is corrupt; it is not served",
                        extra={"topic": self._topic, "partition": shard.index, "error": str(error)},
                    )
            except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
                shard.error = str(expected(self._topic, failure))
                fields = {"topic": self._topic, "partition": shard.index, "error": shard.error}
                logger.warning("a coordinator's partition cannot be read; will try again", extra=fields)
            shard.store, passed = self._owner.new_store(), None
            await self._clock.sleep(backoff.next_delay_s())
        return None

    def _activate(self, shard: Shard[S], size_bytes: int) -> None:
        shard.store.finish_loading(self.now())
        writer = StateWriter(
            shard.log,
            self._clock,
            self._tasks,
            shard.store,
            functools.partial(self._lost, shard),
        )
        shard.activate(writer)
        writer.loaded(size_bytes)
        self._owner.activated(shard)
        if shard.deleted_topics:
            self._owner.topics_deleted(shard, shard.deleted_topics)
        fields = {"partition": shard.index, "leader_epoch": shard.log.leader_epoch, "bytes": size_bytes}
        logger.log(
            logging.INFO if size_bytes else logging.DEBUG,
            "a coordinator's partition is loaded",
            extra={"topic": self._topic, **fields, **shard.store.counts()},
        )

    def _lost(self, shard: Shard[S], log_goes_on: bool) -> None:
        if self.is_current(shard):
            self.unload(shard.index)
            if log_goes_on:
                self.partition_opened(shard.log)

    def is_current(self, shard: Shard[S]) -> bool:
        """Whether the shard is still in the table."""
        return self._shards.get(shard.index) is shard

    # --- lookup --------------------------------------------------------------------------------------------------

    def now(self) -> Now:
        """Read both clocks."""
        return Now(int(self._clock.monotonic() * 1000), self._clock.time_ms())

    def all(self) -> list[Shard[S]]:
        """All shards, in any phase."""
        return list(self._shards.values())

    def active(self) -> list[Shard[S]]:
        """The shards that serve requests."""
        return [shard for shard in self._shards.values() if shard.phase is ShardPhase.ACTIVE]

    def problems(self) -> list[str]:
        """Return the partitions that are led here and not served, one sentence each, for operators."""
        now_s, found = self._clock.monotonic(), []
        for shard in self._shards.values():
            name, loading_s = f"{self._topic}-{shard.index}", now_s - shard.since_s
            if shard.phase is ShardPhase.BROKEN:
                found.append(f"{name} is damaged, its coordinator answers nobody: {shard.error}")
            elif shard.phase is ShardPhase.LOADING and loading_s >= LOADING_S:
                why = f": {shard.error}" if shard.error else ""
                found.append(f"{name} has been loading for {loading_s:.0f} s, its coordinator answers nobody{why}")
        return found

    def get(self, index: int | None) -> Shard[S]:
        """Return the active shard. Raises `NotCoordinator`, `CoordinatorLoading`, `CoordinatorNotAvailable`.

        None, the partition of a key before the topic exists, is a partition that this broker does not lead.
        """
        shard = self._shards.get(index) if index is not None else None
        if shard is not None and shard.phase is ShardPhase.ACTIVE:
            return shard
        if self.is_coming(index):
            raise CoordinatorLoading(f"{self._topic}-{index} is being loaded")
        if index is None:
            raise NotCoordinator(f"{self._topic} does not exist yet")
        if shard is None:
            raise NotCoordinator(f"this broker does not lead {self._topic}-{index}")
        raise CoordinatorNotAvailable(f"{self._topic}-{index} is corrupt", hint="see `tidelog status`")

    async def wait_until_loaded(self, index: int | None) -> None:
        """Wait while the partition is moving to or from this broker, until it is loaded here or served elsewhere. The
        caller applies a time-out.
        """
        while self.is_coming(index):
            self._phase_changed.clear()
            await self._phase_changed.wait()

    def is_coming(self, index: int | None) -> bool:
        """Whether this broker leads the partition but does not serve it: it is opening, loading or closing."""
        if index is None or self._closed:
            return False
        shard = self._shards.get(index)
        if shard is not None:
            return shard.phase is ShardPhase.LOADING
        try:
            self._partitions.get(self._topic, index)
        except TidelogError as error:
            return error.kafka_code == _LEADER_NOT_AVAILABLE
        return False

    # --- persistence ---------------------------------------------------------------------------------------------

    async def write(self, shard: Shard[S], records: Sequence[KeyValue], apply: Callable[[], None]) -> WriteError:
        """Persist records, then apply. Raises `CoordinatorNotAvailable` on time-out; the write may still succeed."""

        def done(error: WriteError) -> None:
            if error is WriteError.NONE:
                apply()

        return await self.submit(shard, Write(lambda: records, done))

    async def submit(self, shard: Shard[S], write: Write) -> WriteError:
        """Queue a write and return its outcome after `done`. Raises `CoordinatorNotAvailable` as `write`."""
        future: asyncio.Future[WriteError] = asyncio.get_running_loop().create_future()

        def done(error: WriteError) -> None:
            write.done(error)
            if not future.done():
                future.set_result(error)

        shard.writer.submit(write._replace(done=done))
        try:
            async with asyncio.timeout(PERSIST_TIMEOUT_S):
                return await future
        except TimeoutError as error:
            raise CoordinatorNotAvailable(f"{self._topic}-{shard.index} does not confirm a write in time") from error

    # --- timers --------------------------------------------------------------------------------------------------

    def set_timer(self, key: Hashable, deadline_ms: int, shard: Shard[S] | None = None) -> None:
        """Set a deadline of a shard, or of the table (None), replacing that of the same key. Monotonic ms, as `now`.

        One of a shard that is not in the table is ignored.
        """
        if shard is not None and not self.is_current(shard):
            return
        timers = self._own_timers if shard is None else shard.timers
        timers.set(key, deadline_ms)
        self._follow(_NO_SHARD if shard is None else shard.index, timers)
        self._arm()

    def cancel_timer(self, key: Hashable, shard: Shard[S] | None = None) -> None:
        """Remove a deadline, if it is set."""
        (self._own_timers if shard is None else shard.timers).cancel(key)

    def _follow(self, index: int, timers: TimerTable[Hashable]) -> None:
        next_ms = timers.next_ms()
        if next_ms is None:
            self._alarms.cancel(index)
        else:
            self._alarms.set(index, next_ms)

    def _arm(self) -> None:
        """Set the timer of the event loop to the earliest deadline."""
        next_ms = self._alarms.next_ms()
        if next_ms is None or self._closed:
            return
        if self._alarm is not None:
            if self._alarm_ms <= next_ms:
                return
            self._alarm.cancel()
        delay_s = max(0, next_ms - self.now().mono_ms) / 1000  # whole ms: a rounded float may fire early, repeatedly
        self._alarm_ms = next_ms
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = self.now()
        while (index := self._alarms.pop(now.mono_ms)) is not None:
            shard = self._shards.get(index)
            timers = self._own_timers if shard is None else shard.timers
            while (key := timers.pop(now.mono_ms)) is not None:
                self._owner.due(shard, key, now)
                if shard is not None and not self.is_current(shard):
                    break
            else:
                self._follow(index, timers)
        self._arm()

    # --- deleted topics ------------------------------------------------------------------------------------------

    def _image_changed(self, delta: Delta) -> None:
        """Tell the owner of deleted topics. Wake the requests that wait for the new broker of a closed partition."""
        self._phase_changed.set()
        deleted = set()
        for _, topic_id, record in delta.of("topics"):
            if record is not None:
                self._topic_names[topic_id] = record.name
            else:
                deleted.add(self._topic_names.pop(topic_id, ""))
        if not deleted:
            return
        for shard in self.all():
            if shard.phase is ShardPhase.ACTIVE:
                self._owner.topics_deleted(shard, deleted)
            else:
                shard.deleted_topics |= deleted
