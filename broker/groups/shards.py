"""The offsets partitions that this broker leads, each with its groups: loading, timers, effects, persistence.

This module drives `GroupStore` and `ClassicGroup`, and is the only one of this package with tasks and timers. It
executes the effects of groups: results complete the futures of waiting requests, records go to the partition's
`OffsetsWriter`, and a single timer of the event loop covers all deadlines of all groups.

Invariants: a shard serves requests only while it is loaded and led; after `settle` a group has no effects left and its
next deadline is in the table; when a partition closes, all its waiting requests are completed.

Entry: `ShardTable`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tidelog.broker.groups.errors import CoordinatorLoading, CoordinatorNotAvailable, GroupError, NotCoordinator
from tidelog.broker.groups.loader import load_store
from tidelog.broker.groups.messages import JoinResult, Limits, Now, Reply, SyncResult
from tidelog.broker.groups.offsets_topic import OFFSETS_TOPIC
from tidelog.broker.groups.records import OffsetValue, encode_group_key, encode_group_value
from tidelog.broker.groups.state import ClassicGroup
from tidelog.broker.groups.store import GroupStore, KeyValue, Removal
from tidelog.broker.groups.timers import TimerTable
from tidelog.broker.groups.writer import OffsetsWriter, Write
from tidelog.broker.settings import GroupSettings
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.image.image import Delta
    from tidelog.stream.partition_log import PartitionLog

logger = logging.getLogger(__name__)

PERSIST_TIMEOUT_S = 5.0
"""How long a commit waits to be durable before the client gets a retriable error (offsets.commit.timeout.ms)."""
_LEADER_NOT_AVAILABLE = 5
"""Kafka code of `PartitionManager.get` while a partition that this broker leads is opening."""

_GroupTimer = tuple[int, str]
"""Partition and group id."""
_EXPIRY: _GroupTimer = (-1, "")


class ShardPhase(Enum):
    """The phases of a shard."""

    LOADING = "loading"
    ACTIVE = "active"
    BROKEN = "broken"
    """The log is damaged. Loading is retried, so the shard becomes active once the data is restored."""


@dataclass(slots=True)
class Shard:
    """One led partition."""

    log: PartitionLog
    store: GroupStore
    phase: ShardPhase = ShardPhase.LOADING
    _writer: OffsetsWriter | None = None
    loading: asyncio.Task[None] | None = None
    deleted_topics: set[str] = field(default_factory=set)
    """Topics deleted while the shard was loading."""

    @property
    def index(self) -> int:
        """The index of the partition."""
        return self.log.partition

    @property
    def writer(self) -> OffsetsWriter:
        """The writer, which exists once the shard is active."""
        assert self._writer is not None, f"offsets partition {self.index} is not active"
        return self._writer

    def activate(self, writer: OffsetsWriter) -> None:
        """Start serving requests."""
        self._writer = writer
        self.phase = ShardPhase.ACTIVE

    def close(self) -> None:
        """Cancel pending reads and writes."""
        if self.loading is not None:
            self.loading.cancel()
        if self._writer is not None:
            self._writer.close()


class ShardTable:
    """All shards of one broker."""

    def __init__(
        self,
        partitions: PartitionManager,
        controller: ControllerClient,
        clock: Clock,
        settings: GroupSettings,
        rng: random.Random,
    ) -> None:
        self._partitions = partitions
        self._controller = controller
        self._clock = clock
        self._settings = settings
        self._rng = rng
        self._limits = Limits(settings.initial_rebalance_delay_ms, settings.max_size)
        self._shards: dict[int, Shard] = {}
        self._waiting: dict[int, asyncio.Future[JoinResult | SyncResult]] = {}
        self._waiters = itertools.count(1)
        self._timers: TimerTable[_GroupTimer] = TimerTable()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms = 0
        self._tasks = TaskSet("groups")
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
        self._set_timer(_EXPIRY, self.now().mono_ms + max(1, self._settings.offsets_check_interval_ms))

    async def close(self) -> None:
        """Complete all waiting requests with NOT_COORDINATOR and stop. The logs stay open."""
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
        if partition_log.topic != OFFSETS_TOPIC or self._closed:
            return
        shard = self._admit(partition_log)
        if shard is not None:
            shard.loading = self._tasks.spawn(self._load(shard), f"load-{shard.index}")

    def partition_closed(self, partition_log: PartitionLog) -> None:
        """Handle the closing of a log on this broker."""
        shard = self._shards.get(partition_log.partition)
        if partition_log.topic == OFFSETS_TOPIC and shard is not None and shard.log is partition_log:
            self.unload(partition_log.partition)

    async def load(self, partition_log: PartitionLog) -> None:
        """Read a partition of the offsets topic; its groups are served afterwards. Retries while it is unavailable."""
        shard = self._admit(partition_log)
        if shard is not None:
            await self._load(shard)

    def _admit(self, partition_log: PartitionLog) -> Shard | None:
        """Create a shard that replaces an older one; None if the same or a newer one exists."""
        index = partition_log.partition
        known = self._shards.get(index)
        if known is not None and (known.log is partition_log or known.log.leader_epoch > partition_log.leader_epoch):
            return None
        self.unload(index)
        shard = self._shards[index] = Shard(partition_log, GroupStore(self._limits, self._rng))
        return shard

    async def _load(self, shard: Shard) -> None:
        size_bytes = await self._read(shard)
        if size_bytes is not None and self._is_current(shard):
            self._activate(shard, size_bytes)
        self._phase_changed.set()

    def unload(self, index: int) -> None:
        """Drop a partition that this broker no longer leads: waiting requests fail with NOT_COORDINATOR."""
        shard = self._shards.pop(index, None)
        if shard is None:
            return
        for group in shard.store.groups.values():
            group.shut(GroupError.NOT_COORDINATOR)
            self._carry_out(shard, group)
            self._timers.cancel((index, group.group_id))
        shard.close()
        self._phase_changed.set()

    async def _read(self, shard: Shard) -> int | None:
        """Load the log; returns the bytes read, or None if the partition closed."""
        backoff = Backoff(0.1, 5.0, self._rng)
        while self._is_current(shard):
            try:
                return await load_store(shard.log, shard.store)
            except CorruptData as error:
                if shard.phase is not ShardPhase.BROKEN:
                    shard.phase = ShardPhase.BROKEN
                    self._phase_changed.set()
                    logger.error(
                        "offsets partition is corrupt; its groups are not served",
                        extra={"partition": shard.index, "error": str(error)},
                    )
            except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
                fields = {"partition": shard.index, "error": str(expected("groups", failure))}
                logger.warning("offsets partition cannot be read; will try again", extra=fields)
            shard.store = GroupStore(self._limits, self._rng)
            await self._clock.sleep(backoff.next_delay_s())
        return None

    def _activate(self, shard: Shard, size_bytes: int) -> None:
        shard.store.finish_loading(self.now())
        writer = OffsetsWriter(
            shard.log,
            self._clock,
            self._tasks,
            shard.store.live_records,
            functools.partial(self._lost, shard),
        )
        shard.activate(writer)
        writer.loaded(size_bytes)
        for group in list(shard.store.groups.values()):
            self.settle(shard, group)
        self._forget_topics(shard, shard.deleted_topics)
        logger.log(
            logging.INFO if size_bytes else logging.DEBUG,
            "offsets partition loaded",
            extra={
                "partition": shard.index,
                "leader_epoch": shard.log.leader_epoch,
                "bytes": size_bytes,
                "groups": len(shard.store.groups),
                "offsets": shard.store.offsets.count,
            },
        )

    def _lost(self, shard: Shard) -> None:
        if self._is_current(shard):
            self.unload(shard.index)

    def _is_current(self, shard: Shard) -> bool:
        return self._shards.get(shard.index) is shard

    # --- lookup --------------------------------------------------------------------------------------------------

    def now(self) -> Now:
        """Read both clocks."""
        return Now(int(self._clock.monotonic() * 1000), self._clock.time_ms())

    def all(self) -> list[Shard]:
        """All shards, in any phase."""
        return list(self._shards.values())

    def get(self, index: int | None) -> Shard:
        """Return the active shard. Raises `NotCoordinator`, `CoordinatorLoading`, `CoordinatorNotAvailable`."""
        shard = self._shards.get(index) if index is not None else None
        if shard is not None and shard.phase is ShardPhase.ACTIVE:
            return shard
        if self.is_coming(index):
            raise CoordinatorLoading(f"offsets partition {index} is being loaded")
        if shard is None:
            raise NotCoordinator(f"this broker does not lead offsets partition {index}")
        raise CoordinatorNotAvailable(f"offsets partition {index} is corrupt", hint="see `tidelog status`")

    async def wait_until_loaded(self, index: int | None) -> None:
        """Wait while the partition is moving to or from this broker, until it is loaded here or served elsewhere. The
        caller applies a time-out.
        """
        while self.is_coming(index):
            self._phase_changed.clear()
            await self._phase_changed.wait()

    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    def is_coming(self, index: int | None) -> bool:
        """Whether this broker leads the partition but does not serve it: it is opening, loading or closing."""
        if index is None or self._closed:
            return False
        shard = self._shards.get(index)
        if shard is not None:
            return shard.phase is ShardPhase.LOADING
        try:
            self._partitions.get(OFFSETS_TOPIC, index)
        except TidelogError as error:
            return error.kafka_code == _LEADER_NOT_AVAILABLE
        return False

    # --- effects -------------------------------------------------------------------------------------------------

    async def wait_for(
        self, shard: Shard, group: ClassicGroup, event: Callable[[int], None]
    ) -> JoinResult | SyncResult:
        """Pass an event to a group and wait for the result. If the client disconnects, the result is discarded."""
        waiter = next(self._waiters)
        future: asyncio.Future[JoinResult | SyncResult] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = future
        try:
            event(waiter)
            self.settle(shard, group)
            return await future
        finally:
            self._waiting.pop(waiter, None)

    def settle(self, shard: Shard, group: ClassicGroup) -> None:
        """After any event: execute the effects and store the group's next deadline."""
        self._carry_out(shard, group)
        shard.store.drop_if_blank(group)
        if not self._is_current(shard):
            return
        key = (shard.index, group.group_id)
        deadline_ms = group.next_deadline_ms()
        if deadline_ms is None:
            self._timers.cancel(key)
        else:
            self._set_timer(key, deadline_ms)

    def _carry_out(self, shard: Shard, group: ClassicGroup) -> None:
        for effect in group.take_effects():
            if isinstance(effect, Reply):
                future = self._waiting.pop(effect.waiter, None)
                if future is not None and not future.done():
                    future.set_result(effect.result)
                continue
            record = (encode_group_key(group.group_id), encode_group_value(effect.value))
            done = functools.partial(self._persisted, shard, group, effect.ticket)
            shard.writer.submit(Write(functools.partial(list, [record]), done))

    def _persisted(self, shard: Shard, group: ClassicGroup, ticket: int, error: GroupError) -> None:
        group.persisted(ticket, error, self.now())
        self.settle(shard, group)

    # --- persistence ---------------------------------------------------------------------------------------------

    async def write(self, shard: Shard, records: Sequence[KeyValue], apply: Callable[[], None]) -> GroupError:
        """Persist records, then apply. Raises `CoordinatorNotAvailable` on time-out; the write may still succeed."""
        future: asyncio.Future[GroupError] = asyncio.get_running_loop().create_future()

        def done(error: GroupError) -> None:
            if error is GroupError.NONE:
                apply()
            if not future.done():
                future.set_result(error)

        shard.writer.submit(Write(lambda: records, done))
        return await self._outcome(shard, future)

    async def remove(self, shard: Shard, plan: Callable[[], Removal]) -> GroupError:
        """Plan a removal on the latest state, persist and apply it. Raises `CoordinatorNotAvailable` as `write`."""
        future: asyncio.Future[GroupError] = asyncio.get_running_loop().create_future()
        self._submit_removal(shard, plan, lambda error: None if future.done() else future.set_result(error))
        return await self._outcome(shard, future)

    async def _outcome(self, shard: Shard, future: asyncio.Future[GroupError]) -> GroupError:
        try:
            async with asyncio.timeout(PERSIST_TIMEOUT_S):
                return await future
        except TimeoutError as error:
            raise CoordinatorNotAvailable(f"offsets partition {shard.index} is not confirmed in time") from error

    def _submit_removal(
        self, shard: Shard, plan: Callable[[], Removal], then: Callable[[GroupError], None] | None = None
    ) -> None:
        planned = Removal()

        def build() -> Sequence[KeyValue]:
            nonlocal planned
            planned = plan()
            return shard.store.tombstones(planned)

        def done(error: GroupError) -> None:
            if error is GroupError.NONE:
                shard.store.apply(planned)
            elif self._is_current(shard):
                shard.store.undo(planned)
            for group in planned.groups:
                self.settle(shard, group)
            if then is not None:
                then(error)

        shard.writer.submit(Write(build, done, alone=True))

    # --- timers --------------------------------------------------------------------------------------------------

    def _set_timer(self, key: _GroupTimer, deadline_ms: int) -> None:
        self._timers.set(key, deadline_ms)
        self._arm()

    def _arm(self) -> None:
        """Set the timer of the event loop to the earliest deadline."""
        next_ms = self._timers.next_ms()
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
        while (key := self._timers.pop(now.mono_ms)) is not None:
            if key == _EXPIRY:
                self._expire_offsets()
                continue
            index, group_id = key
            shard = self._shards.get(index)
            group = shard.store.groups.get(group_id) if shard is not None else None
            if shard is not None and group is not None:
                group.tick(now)
                self.settle(shard, group)
        self._arm()

    def _expire_offsets(self) -> None:
        for shard in self.all():
            if shard.phase is ShardPhase.ACTIVE:
                self._submit_removal(shard, functools.partial(self._plan_expiry, shard))
        self._set_timer(_EXPIRY, self.now().mono_ms + max(1, self._settings.offsets_check_interval_ms))

    def _plan_expiry(self, shard: Shard) -> Removal:
        return shard.store.plan_expiry(self._settings.offsets_retention_ms, self.now())

    # --- deleted topics ------------------------------------------------------------------------------------------

    def _image_changed(self, delta: Delta) -> None:
        """Drop the offsets of deleted topics, so that a new topic of the same name starts at its beginning. Wake the
        requests that wait for the new broker of a closed partition.
        """
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
            if shard.phase is ShardPhase.LOADING:
                shard.deleted_topics |= deleted
            elif shard.phase is ShardPhase.ACTIVE:
                self._forget_topics(shard, deleted)

    def is_of(self, topic: str, value: OffsetValue) -> bool:
        """Whether the offset was committed for the current topic of this name. Offsets without a topic id match."""
        if not value.topic_id:
            return True
        record = self._controller.image.topic(topic)
        return record is not None and record.id == value.topic_id

    def _forget_topics(self, shard: Shard, names: set[str]) -> None:
        if names:
            self._submit_removal(shard, lambda: shard.store.plan_topics_deleted(names))
