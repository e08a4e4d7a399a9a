"""The shards of the group coordinator: effects and deadlines of groups, removals, expiry, deleted topics.

This module drives `GroupStore` and `ClassicGroup` in the shards of `tidelog.broker.coordinators.shards`, and is the
only one of this package with futures and writes. It executes the effects of groups: results complete the futures of
waiting requests, records go to the partition's writer.

Invariants: after `settle` a group has no effects left and its next deadline is set; when a partition closes, all its
waiting requests are completed.

Entry: `GroupShards`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from tidelog.broker.coordinators.errors import WriteError
from tidelog.broker.coordinators.shards import Shard, ShardTable
from tidelog.broker.coordinators.store import KeyValue
from tidelog.broker.coordinators.timers import Now
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC
from tidelog.broker.coordinators.writer import Write
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.messages import JoinResult, Limits, Reply, SyncResult
from tidelog.broker.groups.records import OffsetValue, encode_group_key, encode_group_value
from tidelog.broker.groups.state import ClassicGroup
from tidelog.broker.groups.store import GroupStore, Removal
from tidelog.broker.settings import GroupSettings
from tidelog.runtime.clock import Clock

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient

GroupShard = Shard[GroupStore]
_EXPIRY = "expiry"
"""The table's deadline for the next search for expired offsets; those of shards are named by group ids."""


class GroupShards:
    """The shards of the offsets partitions that this broker leads. It is the owner of `table`."""

    def __init__(
        self,
        partitions: PartitionManager,
        controller: ControllerClient,
        clock: Clock,
        settings: GroupSettings,
        rng: random.Random,
    ) -> None:
        self._controller = controller
        self._settings = settings
        self._rng = rng
        self._limits = Limits(settings.initial_rebalance_delay_ms, settings.max_size)
        self.table = ShardTable(OFFSETS_TOPIC, self, partitions=partitions, controller=controller, clock=clock, rng=rng)
        self._waiting: dict[int, asyncio.Future[JoinResult | SyncResult]] = {}
        self._waiters = itertools.count(1)

    def start(self) -> None:
        """Load the open partitions, and those that open."""
        self.table.start()
        self._expire_later()

    # --- what the table asks for ---------------------------------------------------------------------------------

    def new_store(self) -> GroupStore:
        """Return an empty store."""
        return GroupStore(self._limits, self._rng)

    def activated(self, shard: GroupShard) -> None:
        """Carry out what the loaded groups want, and start their sessions."""
        for group in list(shard.store.groups.values()):
            self.settle(shard, group)

    def unloading(self, shard: GroupShard) -> None:
        """Complete the waiting requests with NOT_COORDINATOR."""
        for group in shard.store.groups.values():
            group.shut(GroupError.NOT_COORDINATOR)
            self._carry_out(shard, group)

    def due(self, shard: GroupShard | None, key: Hashable, now: Now) -> None:
        """A group's deadline, or the time to search for expired offsets."""
        if shard is None:
            for one in self.table.active():
                self._submit_removal(one, functools.partial(self._plan_expiry, one))
            self._expire_later()
            return
        group = shard.store.groups.get(str(key))
        if group is not None:
            group.tick(now)
            self.settle(shard, group)

    def topics_deleted(self, shard: GroupShard, names: set[str]) -> None:
        """Drop the offsets of deleted topics, so that a new topic of the same name starts at its beginning."""
        self._submit_removal(shard, lambda: shard.store.plan_topics_deleted(names))

    # --- effects -------------------------------------------------------------------------------------------------

    def members_bytes(self) -> int:
        """The memory of the members of all groups that are coordinated here."""
        return sum(shard.store.members_bytes for shard in self.table.all())

    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    async def wait_for(
        self, shard: GroupShard, group: ClassicGroup, event: Callable[[int], None]
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

    def settle(self, shard: GroupShard, group: ClassicGroup) -> None:
        """After any event: execute the effects and store the group's next deadline."""
        self._carry_out(shard, group)
        shard.store.count(group)
        shard.store.drop_if_blank(group)
        deadline_ms = group.next_deadline_ms()
        if deadline_ms is None:
            self.table.cancel_timer(group.group_id, shard)
        else:
            self.table.set_timer(group.group_id, deadline_ms, shard)

    def _carry_out(self, shard: GroupShard, group: ClassicGroup) -> None:
        for effect in group.take_effects():
            if isinstance(effect, Reply):
                future = self._waiting.pop(effect.waiter, None)
                if future is not None and not future.done():
                    future.set_result(effect.result)
                continue
            record = (encode_group_key(group.group_id), encode_group_value(effect.value))
            done = functools.partial(self._persisted, shard, group, effect.ticket)
            shard.writer.submit(Write(functools.partial(list, [record]), done))

    def _persisted(self, shard: GroupShard, group: ClassicGroup, ticket: int, error: WriteError) -> None:
        group.persisted(ticket, GroupError(error), self.table.now())
        self.settle(shard, group)

    # --- removals ------------------------------------------------------------------------------------------------

    async def remove(self, shard: GroupShard, plan: Callable[[], Removal]) -> GroupError:
        """Plan a removal on the latest state, persist and apply it. Raises `CoordinatorNotAvailable` on time-out."""
        return GroupError(await self.table.submit(shard, self._removal(shard, plan)))

    def _submit_removal(self, shard: GroupShard, plan: Callable[[], Removal]) -> None:
        shard.writer.submit(self._removal(shard, plan))

    def _removal(self, shard: GroupShard, plan: Callable[[], Removal]) -> Write:
        planned = Removal()

        def build() -> Sequence[KeyValue]:
            nonlocal planned
            planned = plan()
            return shard.store.tombstones(planned)

        def done(error: WriteError) -> None:
            if error is WriteError.NONE:
                shard.store.apply(planned)
            elif self.table.is_current(shard):
                shard.store.undo(planned)
            for group in planned.groups:
                self.settle(shard, group)

        return Write(build, done, alone=True)

    def _expire_later(self) -> None:
        interval_ms = max(1, self._settings.offsets_check_interval_ms)
        self.table.set_timer(_EXPIRY, self.table.now().mono_ms + interval_ms)

    def _plan_expiry(self, shard: GroupShard) -> Removal:
        return shard.store.plan_expiry(self._settings.offsets_retention_ms, self.table.now())

    def is_of(self, topic: str, value: OffsetValue) -> bool:
        """Whether the offset was committed for the current topic of this name. Offsets without a topic id match."""
        if not value.topic_id:
            return True
        record = self._controller.image.topic(topic)
        return record is not None and record.id == value.topic_id
