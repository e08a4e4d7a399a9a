"""Offsets in transactions at the group coordinator: members, admission, markers, failovers, snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.broker.test_group_coordinator import commit, committed
from tests.support.group_world import Consumer, World
from tests.support.loops import VIRTUAL_LOOP
from tidelog.batch.batch import parse_header
from tidelog.broker.coordinators.errors import CoordinatorNotAvailable
from tidelog.broker.coordinators.store import TxnProducer
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.groups.errors import InvalidGroupId
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import TxnCommitRequest
from tidelog.broker.groups.records import OffsetKey, OffsetValue
from tidelog.runtime.errors import NotLeader, Overloaded

LOOPS = VIRTUAL_LOOP
NOBODY = MemberIdentity("", None)
FIRST = TxnProducer(1, 0)
NOT_LEADER_OR_FOLLOWER = 6
FENCED_COORDINATOR = 52
CONCURRENT_TRANSACTIONS = 51

Admit = Callable[[int], Awaitable[int]]


async def yes(partition: int) -> int:
    return 0


async def never(partition: int) -> int:
    raise AssertionError("nobody is to be asked")


def value(world: World, offset: int, metadata: str = "") -> OffsetValue:
    return OffsetValue(offset, -1, metadata, world.clock.time_ms(), topic_id=world.topic.id)


async def put(
    world: World,
    offset: int,
    *,
    group: str = "g",
    producer: TxnProducer = FIRST,
    identity: MemberIdentity = NOBODY,
    generation: int = -1,
    admit: Admit = yes,
    partition: int = 0,
) -> int:
    offsets = [(OffsetKey(group, "orders", partition), value(world, offset))]
    request = TxnCommitRequest(producer, identity, generation, offsets)
    return await world.coordinator.commit_pending(group, request, admit)


async def end(
    world: World,
    commit: bool = True,
    *,
    producer: TxnProducer = FIRST,
    coordinator_epoch: int = 0,
    transaction_version: int = 1,
    partition: int = 0,
) -> int:
    return await world.coordinator.write_marker(partition, *producer, coordinator_epoch, commit, transaction_version)


@pytest.mark.parametrize("is_commit", [True, False])
async def test_an_offset_counts_from_the_marker_on(is_commit: bool) -> None:
    async with World() as world:
        assert await commit(world, "g", 1) is E.NONE
        assert await put(world, 2) == 0
        assert committed(world, "g") == 1
        assert world.coordinator.unstable("g") == {("orders", 0)}
        assert world.coordinator.unstable("h") == set()
        assert await end(world, is_commit) == 0
        assert committed(world, "g") == (2 if is_commit else 1)
        assert world.coordinator.unstable("g") == set()


async def test_neither_is_answered_before_it_is_confirmed() -> None:
    async with World() as world:
        world.storage.auto_confirm = False
        committing = asyncio.create_task(put(world, 2))
        await asyncio.sleep(1)
        assert not committing.done() and world.coordinator.unstable("g") == set()
        world.storage.confirm_all()
        assert await committing == 0
        ending = asyncio.create_task(end(world))
        await asyncio.sleep(1)
        assert not ending.done() and committed(world, "g") is None
        world.storage.confirm_all()
        assert await ending == 0
        assert committed(world, "g") == 2


async def test_the_records_are_a_transactional_batch_of_the_producer_without_a_sequence() -> None:
    async with World() as world:
        assert await put(world, 2, producer=TxnProducer(7, 3)) == 0
        assert await end(world, producer=TxnProducer(7, 3), coordinator_epoch=9) == 0
        data, marker = (parse_header(batch) for _, _, batch in world.log.batches)
        assert (data.is_transactional, data.is_control, marker.is_control) == (True, False, True)
        assert (data.producer_id, data.producer_epoch, data.base_sequence) == (7, 3, -1)
        assert (marker.producer_id, marker.producer_epoch) == (7, 3)


async def test_only_the_first_commit_of_a_transaction_asks() -> None:
    async with World(partitions=2) as world:
        asked: list[int] = []

        async def admit(partition: int) -> int:
            asked.append(partition)
            return 0

        assert await put(world, 1, admit=admit) == 0
        assert await put(world, 2, admit=never) == 0
        assert asked == [world.coordinator.partition_of("g")]
        await end(world, partition=asked[0])
        assert await put(world, 3, admit=admit) == 0
        assert len(asked) == 2


async def test_who_is_not_admitted_writes_nothing() -> None:
    async with World() as world:

        async def no(partition: int) -> int:
            return E.INVALID_TXN_STATE

        assert await put(world, 1, admit=no) == E.INVALID_TXN_STATE
        assert world.log.batches == []


async def test_a_late_yes_lets_nothing_in_behind_an_abort() -> None:
    async with World() as world:

        async def late(partition: int) -> int:
            assert await end(world, commit=False) == 0
            return 0

        assert await put(world, 1, admit=late) == E.INVALID_TXN_STATE
        assert world.coordinator.unstable("g") == set()
        assert await put(world, 2) == 0


async def test_what_comes_behind_the_marker_of_its_open_transaction_is_not_of_the_next_one() -> None:
    """The coordinator would say yes: clients of before KIP-890 have the same epoch in the next transaction."""
    async with World() as world:
        assert await put(world, 1) == 0
        marker = asyncio.create_task(end(world, commit=False))
        late = asyncio.create_task(put(world, 9))
        assert (await marker, await late) == (0, E.INVALID_TXN_STATE)
        assert await put(world, 2) == 0
        assert await end(world) == 0
        assert committed(world, "g") == 2


async def test_the_next_transaction_waits_for_the_marker_of_the_last_one() -> None:
    """KIP-890: EndTxn is answered with the next epoch before the markers are written."""
    async with World() as world:
        await put(world, 1, admit=yes)
        asked = 0

        async def busy(partition: int) -> int:
            nonlocal asked
            asked += 1
            if asked == 1:
                return CONCURRENT_TRANSACTIONS
            if asked == 2:
                assert await end(world, producer=TxnProducer(1, 1), transaction_version=2) == 0
            return 0

        assert await put(world, 2, producer=TxnProducer(1, 1), admit=busy) == 0
        assert asked == 3  # the marker came after the second question was begun
        assert committed(world, "g") == 1
        assert await end(world, False, producer=TxnProducer(1, 2), transaction_version=2) == 0
        assert committed(world, "g") == 1


async def test_a_partition_that_leaves_while_the_question_is_asked_writes_nothing() -> None:
    async with World() as world:
        log = world.log

        async def late(partition: int) -> int:
            world.partitions.close(0)
            return 0

        assert await put(world, 1, admit=late) == E.NOT_COORDINATOR
        assert log.batches == []


async def test_a_producer_of_an_older_epoch_is_refused_and_the_partition_stays() -> None:
    async with World() as world:
        assert await put(world, 1, producer=TxnProducer(1, 5)) == 0
        assert await put(world, 2, producer=TxnProducer(1, 4)) == E.INVALID_PRODUCER_EPOCH
        assert await end(world, producer=TxnProducer(1, 4)) == E.INVALID_PRODUCER_EPOCH
        assert await end(world, producer=TxnProducer(1, 5), coordinator_epoch=3) == 0
        assert committed(world, "g") == 1
        assert await end(world, producer=TxnProducer(1, 5), coordinator_epoch=2) == FENCED_COORDINATOR
        assert await commit(world, "g", 9) is E.NONE


async def test_a_refused_producer_does_not_harm_what_is_written_with_it() -> None:
    async with World() as world:
        await put(world, 1, producer=TxnProducer(1, 5))
        world.storage.auto_confirm = False
        blocking = asyncio.create_task(commit(world, "x", 1))  # what comes while it is written shares the next round
        await asyncio.sleep(0.1)
        together = asyncio.gather(
            commit(world, "h", 3),
            put(world, 2, producer=TxnProducer(1, 4)),
            put(world, 4, group="i"),
            commit(world, "j", 5),
        )
        await asyncio.sleep(0.1)
        world.storage.auto_confirm = True
        world.storage.confirm_all()
        assert await blocking is E.NONE
        assert list(await together) == [E.NONE, E.INVALID_PRODUCER_EPOCH, E.INVALID_PRODUCER_EPOCH, E.NONE]
        assert (committed(world, "h"), committed(world, "j")) == (3, 5)


async def test_a_marker_of_the_second_version_has_a_newer_epoch() -> None:
    async with World() as world:
        await put(world, 1)
        assert await end(world, transaction_version=2) == E.INVALID_PRODUCER_EPOCH
        assert await end(world, producer=TxnProducer(1, 1), transaction_version=2) == 0
        assert committed(world, "g") == 1


async def test_a_marker_of_a_producer_without_offsets_is_written_and_so_is_a_repeated_one() -> None:
    async with World() as world:
        assert await end(world) == 0
        assert await end(world) == 0
        assert len(world.log.batches) == 2


# --- members ------------------------------------------------------------------------------------------------------


async def test_member_and_generation_are_checked_if_they_are_told() -> None:
    async with World() as world:
        member = Consumer(world, instance="i")
        await member.run_round()
        good = member.identity
        assert await put(world, 1, identity=good, generation=member.generation) == 0
        assert await put(world, 2, identity=good, generation=member.generation + 1) == E.ILLEGAL_GENERATION
        stranger = MemberIdentity("stranger", None)
        assert await put(world, 2, identity=stranger, generation=member.generation) == E.UNKNOWN_MEMBER_ID
        other = MemberIdentity("other", "i")
        assert await put(world, 2, identity=other, generation=member.generation) == E.FENCED_INSTANCE_ID
        assert await put(world, 3) == 0  # a producer of before v3
        await end(world)
        assert committed(world, "g") == 3


async def test_a_commit_is_allowed_while_a_rebalance_completes() -> None:
    async with World() as world:
        member = Consumer(world)
        await member.join()
        assert await put(world, 1, identity=member.identity, generation=member.generation) == 0


async def test_a_group_that_nobody_knows_takes_offsets_without_a_generation_only() -> None:
    async with World() as world:
        assert await put(world, 1, generation=0, admit=never) == E.ILLEGAL_GENERATION
        assert await put(world, 1) == 0
        description = world.coordinator.describe("g")
        assert description is not None and description.protocol_type == ""
        with pytest.raises(InvalidGroupId):
            await put(world, 1, group="")


async def test_a_member_that_is_replaced_while_the_question_is_asked_does_not_commit() -> None:
    async with World() as world:
        member = Consumer(world)
        await member.run_round()

        async def slowly(partition: int) -> int:
            member.leave()
            return 0

        error = await put(world, 1, identity=member.identity, generation=member.generation, admit=slowly)
        assert error == E.UNKNOWN_MEMBER_ID


# --- failovers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_commit", [True, False])
async def test_a_new_coordinator_has_the_pending_offsets_and_the_marker_decides_there(is_commit: bool) -> None:
    async with World() as world:
        await commit(world, "g", 1)
        await put(world, 2)
        await world.restart()
        assert committed(world, "g") == 1
        assert world.coordinator.unstable("g") == {("orders", 0)}
        assert await put(world, 3, admit=never) == 0  # the log knows the transaction
        assert await end(world, is_commit) == 0
        await world.restart()
        assert committed(world, "g") == (3 if is_commit else 1)
        assert world.coordinator.unstable("g") == set()


async def test_a_marker_that_was_not_confirmed_before_the_failover_has_not_happened() -> None:
    async with World() as world:
        await put(world, 2)
        world.storage.auto_confirm = False
        ending = asyncio.create_task(end(world))
        await asyncio.sleep(0.1)
        await world.restart(confirmed_only=True)
        assert await ending == NOT_LEADER_OR_FOLLOWER
        assert committed(world, "g") is None
        assert world.coordinator.unstable("g") == {("orders", 0)}
        assert await end(world) == 0
        assert committed(world, "g") == 2


async def test_a_later_commit_outside_of_the_transaction_is_not_undone_by_it_after_a_failover() -> None:
    async with World() as world:
        await put(world, 2)
        await commit(world, "g", 7)
        assert world.coordinator.unstable("g") == set()  # whatever becomes of the transaction
        await world.restart()
        await end(world)
        assert committed(world, "g") == 7


async def test_a_partition_that_is_not_here_sends_the_marker_away() -> None:
    async with World() as world:
        log = world.log
        assert await end(world, partition=3) == NOT_LEADER_OR_FOLLOWER
        world.log.errors = [NotLeader("moved")]
        assert await end(world) == NOT_LEADER_OR_FOLLOWER
        world.partitions.close(0)
        assert await end(world) == NOT_LEADER_OR_FOLLOWER
        world.partitions.open(log)  # it loads
        assert await end(world) == NOT_LEADER_OR_FOLLOWER
        await world.loaded()
        assert await end(world) == 0


async def test_a_full_wal_delays_or_refuses_and_leaves_nothing_behind() -> None:
    async with World() as world:
        world.log.errors = [Overloaded("full")] * 10_000
        with pytest.raises(CoordinatorNotAvailable):
            await put(world, 1)
        assert await end(world) == NOT_LEADER_OR_FOLLOWER
        await asyncio.sleep(20)
        world.log.errors = []
        assert world.log.batches == [] and world.coordinator.unstable("g") == set()
        assert await put(world, 2) == 0


# --- the bound of the log -----------------------------------------------------------------------------------------


async def test_the_log_stays_bounded_while_a_transaction_hangs_and_its_offsets_are_carried_over() -> None:
    async with World() as world:
        await put(world, 5, partition=1)
        text = "m" * 4_000
        largest = 0
        for offset in range(2_000):
            offsets = [(OffsetKey("g", "orders", 0), value(world, offset, text))]
            assert await world.coordinator.commit("g", NOBODY, -1, offsets) is E.NONE
            largest = max(largest, world.log.size_bytes())
        assert len(world.log.trims) > 3 and largest < 2 << 20
        await world.restart()
        assert world.coordinator.unstable("g") == {("orders", 1)}
        assert await put(world, 6, partition=2, admit=never) == 0
        assert await end(world) == 0
        found = world.coordinator.committed("g", {"orders": [0, 1, 2]})["orders"]
        assert [one and one.offset for one in found.values()] == [1_999, 5, 6]


async def test_a_snapshot_that_fails_midway_changes_nothing() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        await put(world, 2)
        await put(world, 3, producer=TxnProducer(2, 0))
        text = "m" * 4_000
        while world.log.size_bytes() < (1 << 20) - 8_000:
            await world.coordinator.commit("h", NOBODY, -1, [(OffsetKey("h", "orders", 0), value(world, 1, text))])
        before = len(world.log.batches)
        world.log.errors = [None, None, None, *[Overloaded("full")] * 10_000]
        large: Any = [(OffsetKey("h", "orders", 0), value(world, 300, text * 5))]
        await world.coordinator.commit("h", NOBODY, -1, large)
        await asyncio.sleep(10)
        kinds = [parse_header(batch).is_transactional for _, _, batch in world.log.batches[before:]]
        assert kinds == [False, False, True]  # the commit, then the snapshot but for its last batch
        world.log.errors = []
        await world.restart()
        assert committed(world, "g") == 1
        await end(world, producer=TxnProducer(2, 0))
        assert committed(world, "g") == 3
        await end(world)
        assert committed(world, "g") == 3


# --- removals -----------------------------------------------------------------------------------------------------


async def test_deleted_offsets_groups_and_topics_take_their_pending_offsets_along() -> None:
    async with World() as world:
        await put(world, 1, partition=0)
        await put(world, 1, partition=1)
        assert await world.coordinator.delete_offsets("g", [("orders", 0)]) == (E.NONE, [E.NONE])
        assert world.coordinator.unstable("g") == {("orders", 1)}
        assert await world.coordinator.delete_group("g") is E.NONE
        await put(world, 1, group="h")
        world.controller.delete_topic(world.topic)
        await asyncio.sleep(0.1)
        assert world.coordinator.stats()["pending"] == 0
        await world.restart()
        await end(world)
        assert world.coordinator.stats()["offsets"] == 0
        assert world.coordinator.list_groups() == []


async def test_a_group_with_pending_offsets_only_does_not_expire_and_goes_when_they_are_aborted() -> None:
    async with World(offsets_retention_ms=1_000, offsets_check_interval_ms=500) as world:
        await put(world, 1)
        await asyncio.sleep(60)
        assert [one.group_id for one in world.coordinator.list_groups()] == ["g"]
        await end(world, commit=False)
        assert world.coordinator.list_groups() == []


async def test_the_partition_of_a_group_is_found_by_creating_the_topic() -> None:
    async with World(create=False, partitions=4) as world:
        assert world.coordinator.partition_of("g") is None
        found = await world.coordinator.find_partition("g")
        assert 0 <= found < 4 and world.coordinator.partition_of("g") == found
