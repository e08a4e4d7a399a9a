"""The group coordinator when the WAL is full or slow, and when partitions load, leave, or are damaged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.broker.test_group_coordinator import commit, committed
from tests.support.group_world import Consumer, World
from tests.support.loops import VIRTUAL_LOOP
from tidelog.broker.coordinators.errors import CoordinatorLoading, CoordinatorNotAvailable, NotCoordinator
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.records import OffsetKey, OffsetValue, parse_key
from tidelog.broker.replication.inputs import NotEnoughReplicas
from tidelog.runtime.errors import CorruptData, NotLeader, Overloaded, Unavailable
from tidelog.storage.wal.base import WalFailed, WalFull
from tidelog.stream.partition_close import no_note

LOOPS = VIRTUAL_LOOP


async def test_a_full_wal_is_waited_for() -> None:
    async with World() as world:
        world.log.errors = [WalFull("full"), WalFull("full")]
        world.storage.room.clear()
        waiting = asyncio.create_task(commit(world, "g", 1))
        await asyncio.sleep(2)
        assert not waiting.done()
        world.storage.room.set()
        assert await waiting is GroupError.NONE


async def test_a_wal_that_stays_full_is_a_retriable_error() -> None:
    async with World() as world:
        world.log.errors = [Overloaded("full")] * 10_000
        with pytest.raises(CoordinatorNotAvailable):
            await commit(world, "g", 1)
        await asyncio.sleep(10)
        world.log.errors = []
        assert await commit(world, "g", 2) is GroupError.NONE
        assert committed(world, "g") == 2


async def test_a_group_goes_on_when_the_wal_has_room_again() -> None:
    async with World() as world:
        world.log.errors = [Overloaded("full")] * 10_000
        member = Consumer(world)
        await member.join()
        assert (await member.sync({member.member_id: b"x"})).error is GroupError.COORDINATOR_NOT_AVAILABLE
        world.log.errors = []
        assert (await member.run_round()).error is GroupError.NONE


async def test_a_commit_that_is_not_confirmed_in_time_is_a_retriable_error_and_may_count_later() -> None:
    async with World() as world:
        world.storage.auto_confirm = False
        with pytest.raises(CoordinatorNotAvailable):
            await commit(world, "g", 1)
        world.storage.confirm_all()
        await asyncio.sleep(0.1)
        assert committed(world, "g") == 1


@pytest.mark.parametrize("error", [NotLeader("moved"), WalFailed("disk")])
async def test_a_partition_that_is_lost_while_persisting_is_not_coordinated_any_more(error: Any) -> None:
    async with World() as world:
        member = Consumer(world)
        await member.join()
        world.log.errors = [error]
        assert (await member.sync({member.member_id: b"x"})).error is GroupError.NOT_COORDINATOR
        with pytest.raises(NotCoordinator):
            member.heartbeat()


async def test_a_commit_is_refused_while_too_few_replicas_are_in_sync_and_the_partition_stays() -> None:
    async with World() as world:
        assert await commit(world, "g", 1) is GroupError.NONE
        before = world.log.log_end_offset
        world.log.too_few = [NotEnoughReplicas("1 replica is in sync")]
        assert await commit(world, "g", 2) is GroupError.COORDINATOR_NOT_AVAILABLE
        assert committed(world, "g") == 1 and world.log.log_end_offset == before
        assert await commit(world, "g", 3) is GroupError.NONE
        assert committed(world, "g") == 3


async def test_a_write_of_which_only_a_part_was_appended_is_loaded_again() -> None:
    async with World() as world:
        assert await commit(world, "g", 1) is GroupError.NONE
        world.log.errors = [None, NotEnoughReplicas("1 replica is in sync")]
        large = [(OffsetKey("g", "orders", partition), OffsetValue(7, -1, "x" * 30_000, 0)) for partition in range(16)]
        identity = MemberIdentity("", None)
        assert await world.coordinator.commit("g", identity, -1, large) is GroupError.NOT_COORDINATOR
        await world.loaded()
        written = {parse_key(key) for key, _ in world.log.records()[1:]}
        assert 0 < len(written) < 16
        found = world.coordinator.committed("g", {"orders": range(16)})["orders"]
        assert written == {OffsetKey("g", "orders", at) for at, one in found.items() if one is not None}
        assert await commit(world, "g", 8) is GroupError.NONE


async def test_a_confirm_offset_that_fails_loses_the_partition() -> None:
    async with World() as world:
        world.storage.auto_confirm = False
        waiting = asyncio.create_task(commit(world, "g", 1))
        await asyncio.sleep(0.1)
        world.storage.confirm.fail(WalFailed("fsync"))
        assert await waiting is GroupError.NOT_COORDINATOR
        with pytest.raises(NotCoordinator):
            committed(world, "g")


async def test_a_partition_that_moves_away_answers_all_who_wait() -> None:
    async with World(initial_rebalance_delay_ms=3_000) as world:
        joining = [asyncio.create_task(Consumer(world).join()) for _ in range(3)]
        world.storage.auto_confirm = False
        committing = asyncio.create_task(commit(world, "h", 1))
        await asyncio.sleep(1)
        world.partitions.close(0)
        assert [(await one).error for one in joining] == [GroupError.NOT_COORDINATOR] * 3
        assert await committing is GroupError.NOT_COORDINATOR
        assert world.coordinator.stats()["waiting"] == 0
        with pytest.raises(NotCoordinator):
            await Consumer(world).join()


async def test_while_a_partition_loads_clients_are_told_so() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        log = world.log
        world.partitions.close(0)
        log.read_errors = [Unavailable("bucket"), Unavailable("bucket")]
        world.partitions.open(log)
        with pytest.raises(CoordinatorLoading):
            world.coordinator.committed("g", None)
        with pytest.raises(CoordinatorLoading):
            world.coordinator.list_groups()
        await world.loaded()
        assert committed(world, "g") == 1


async def test_requests_wait_while_a_partition_loads() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        log = world.log
        world.partitions.close(0)
        log.read_errors = [Unavailable("bucket"), Unavailable("bucket")]
        world.partitions.open(log)
        await commit(world, "g", 2)  # two pauses later
        assert committed(world, "g") == 2
        consumer = Consumer(world)
        world.partitions.close(0)
        world.partitions.opening.add(0)
        joining = asyncio.create_task(consumer.join())
        await asyncio.sleep(0.5)
        assert not joining.done()
        world.partitions.open(log)
        assert (await joining).error is GroupError.NONE


async def test_a_partition_that_does_not_come_in_time_is_told_as_loading() -> None:
    async with World() as world:
        log = world.log
        world.partitions.close(0)
        world.partitions.opening.add(0)
        with pytest.raises(CoordinatorLoading):
            await commit(world, "g", 1)
        world.partitions.open(log)


async def test_who_waits_while_a_partition_leaves_is_sent_away_when_its_new_owner_is_known() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        world.storage.auto_confirm = False
        under_way = asyncio.create_task(commit(world, "g", 2))
        await asyncio.sleep(0.1)
        world.partitions.close(0)
        world.partitions.opening.add(0)  # it is still this broker's by the image
        asked_now = asyncio.create_task(commit(world, "g", 3))
        looking = asyncio.create_task(world.coordinator.find("g"))
        await asyncio.sleep(0.2)
        assert not under_way.done() and not asked_now.done() and not looking.done()
        world.partitions.opening.discard(0)
        world.controller.give_all_to(2)
        assert await under_way is GroupError.NOT_COORDINATOR
        with pytest.raises(NotCoordinator):
            await asked_now
        assert (await looking).id == 2
        assert (await world.coordinator.find("g")).id == 2


async def test_loading_waits_for_what_is_not_confirmed_yet() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        log = world.log
        world.storage.auto_confirm = False
        waiting = asyncio.create_task(commit(world, "g", 2))
        await asyncio.sleep(0.1)
        world.partitions.close(0)
        await waiting
        world.partitions.open(log)
        await asyncio.sleep(1)
        with pytest.raises(CoordinatorLoading):
            world.coordinator.committed("g", None)
        world.storage.confirm_all()
        await world.loaded()
        assert committed(world, "g") == 2


async def test_a_partition_that_opens_is_loading_even_before_its_log_is_there() -> None:
    async with World() as world:
        log = world.log
        world.partitions.close(0)
        world.partitions.opening.add(0)
        with pytest.raises(CoordinatorLoading):
            world.coordinator.committed("g", None)
        world.partitions.open(log)
        await world.loaded()
        assert committed(world, "g") is None


async def test_a_corrupt_partition_is_loud_and_not_served_until_it_is_restored() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        log = world.log
        world.partitions.close(0)
        log.hint_note = no_note
        log.read_errors = [CorruptData("block 3 fails its CRC32C")] * 20
        world.partitions.open(log)
        await asyncio.sleep(1)
        with pytest.raises(CoordinatorNotAvailable):
            world.coordinator.committed("g", None)
        assert log.read_errors
        log.read_errors = []
        await asyncio.sleep(10)
        assert committed(world, "g") == 1


async def test_a_newer_log_of_the_same_partition_replaces_the_older_and_not_the_other_way() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        old = world.log
        new = old.reopened(world.storage)
        await world.coordinator.load_partition(new)  # type: ignore[arg-type]
        await world.coordinator.load_partition(old)  # type: ignore[arg-type]
        world.partitions.tell_closed(old)
        assert await commit(world, "g", 2) is GroupError.NONE
        assert parse_key(new.records()[-1][0]) == OffsetKey("g", "orders", 0)
        assert len(new.batches) == len(old.batches) + 1
