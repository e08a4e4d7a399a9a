"""TxnOffsetCommit and what OffsetFetch says of it, in every version, byte for byte by kio."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.test_offsets_handlers import commit, fetch
from tests.support.group_calls import call, part, versions
from tests.support.group_world import Consumer, World
from tests.support.loops import VIRTUAL_LOOP
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC
from tidelog.broker.groups.errors import GroupError as E
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.levels import TRANSACTIONS_LEVEL
from tidelog.controller.model.records import ClusterRecord
from tidelog.runtime.errors import Fenced, TidelogError, Unavailable

LOOPS = VIRTUAL_LOOP
TXN_COMMIT = 28
CONCURRENT_TRANSACTIONS = 51
ABORTABLE = 120


async def txn_commit(
    world: World, version: int, rows: list[tuple[str, int, int, str | None]], **fields: Any
) -> list[int]:
    """Commit `(topic, partition, offset, metadata)` rows; the error of each."""
    topics = [
        part(
            TXN_COMMIT,
            version,
            "TxnOffsetCommitRequestTopic",
            name=name,
            partitions=[
                part(
                    TXN_COMMIT,
                    version,
                    "TxnOffsetCommitRequestPartition",
                    partition_index=partition,
                    committed_offset=offset,
                    committed_metadata=metadata,
                    committed_leader_epoch=4,
                )
            ],
        )
        for name, partition, offset, metadata in rows
    ]
    of = {"generation_id": -1, "member_id": "", "group_instance_id": None} | fields
    answer = await call(
        world,
        TXN_COMMIT,
        version,
        transactional_id="app",
        group_id=of.pop("group_id", "g"),
        producer_id=7,
        producer_epoch=of.pop("producer_epoch", 2),
        topics=topics,
        **of,
    )
    assert [topic.name for topic in answer.topics] == [row[0] for row in rows]
    return [int(one.error_code) for topic in answer.topics for one in topic.partitions]


async def end(world: World, is_commit: bool = True) -> None:
    assert await world.coordinator.write_marker(0, 7, 2, 0, is_commit, 1) == 0


@pytest.mark.parametrize("version", versions(TXN_COMMIT))
async def test_offsets_are_pending_and_then_committed_with_all_that_was_told(version: int) -> None:
    async with World() as world:
        rows = [("orders", 1, 17, "m"), ("orders", 2, 18, None), ("nothing", 0, 1, ""), ("orders", 8, 1, "")]
        unknown = E.UNKNOWN_TOPIC_OR_PARTITION
        assert await txn_commit(world, version, rows) == [0, 0, unknown, unknown]
        assert world.transactions.asked == [("app", 7, 2, [(OFFSETS_TOPIC, 0)], version >= 5)]
        wanted = {"orders": [1, 2, 3]}
        unstable = (-1, -1, "", E.UNSTABLE_OFFSET_COMMIT)
        nothing = (-1, -1, "", 0)
        assert await fetch(world, 7, wanted) == (
            0,
            {("orders", 1): unstable, ("orders", 2): unstable, ("orders", 3): nothing},
        )
        await end(world)
        epoch = 4 if version >= 2 else -1
        assert await fetch(world, 7, wanted) == (
            0,
            {("orders", 1): (17, epoch, "m", 0), ("orders", 2): (18, epoch, "", 0), ("orders", 3): nothing},
        )


@pytest.mark.parametrize("version", versions(9))
async def test_fetches_that_require_stable_offsets_are_refused_partition_by_partition(version: int) -> None:
    async with World() as world:
        await commit(world, 9, [("orders", 0, 5, None), ("orders", 1, 6, None)])
        await txn_commit(world, 5, [("orders", 1, 7, None), ("orders", 2, 8, None)])
        epoch = -1 if version >= 5 else None
        error, found = await fetch(world, version, {"orders": [0, 1, 2]})
        if version < 7:  # nobody can ask for stable offsets
            assert (error, [one[0] for one in found.values()]) == (0, [5, 6, -1])
            return
        unstable = (-1, epoch, "", E.UNSTABLE_OFFSET_COMMIT)
        assert error == 0
        assert found["orders", 0][0] == 5
        assert (found["orders", 1], found["orders", 2]) == (unstable, unstable)
        assert (await fetch(world, version, None))[1] == found
        await end(world, is_commit=False)
        error, found = await fetch(world, version, {"orders": [0, 1, 2]})
        assert [(one[0], one[3]) for one in found.values()] == [(5, 0), (6, 0), (-1, 0)]


async def test_a_metadata_string_that_is_too_long_is_refused_alone() -> None:
    async with World(offset_metadata_max_bytes=3) as world:
        found = await txn_commit(world, 5, [("orders", 0, 1, "long"), ("orders", 1, 1, "abc")])
        assert found == [E.OFFSET_METADATA_TOO_LARGE, 0]


async def test_nobody_is_asked_if_nothing_is_left_to_commit() -> None:
    async with World() as world:
        assert await txn_commit(world, 5, [("nothing", 0, 1, "")]) == [E.UNKNOWN_TOPIC_OR_PARTITION]
        assert await txn_commit(world, 5, []) == []
        assert world.transactions.asked == []


@pytest.mark.parametrize("version", range(3, 6))
async def test_members_are_checked_from_version_3_on(version: int) -> None:
    async with World() as world:
        member = Consumer(world)
        await member.run_round()
        rows: list[tuple[str, int, int, str | None]] = [("orders", 0, 1, None)]
        stale = {"member_id": member.member_id, "generation_id": member.generation - 1}
        assert await txn_commit(world, version, rows, **stale) == [E.ILLEGAL_GENERATION]
        assert await txn_commit(world, version, rows, member_id="x", generation_id=1) == [E.UNKNOWN_MEMBER_ID]
        assert await txn_commit(world, version, rows, group_id="new", generation_id=1) == [E.ILLEGAL_GENERATION]
        assert await txn_commit(world, version, rows, group_id="") == [E.INVALID_GROUP_ID]
        assert world.transactions.asked == []
        now = {"member_id": member.member_id, "generation_id": member.generation}
        assert await txn_commit(world, version, rows, **now) == [0]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (90, (47, 47, 47, 47)),
        (49, (49, 49, 49, 49)),
        (48, (48, 48, 48, 48)),
        (ABORTABLE, (48, 48, ABORTABLE, ABORTABLE)),
        (CONCURRENT_TRANSACTIONS, (15, 15, 15, 0)),
        (13, (15, 14, 14, 14)),
        (14, (15, 15, 15, 15)),
        (16, (15, 15, 15, 15)),
        (Unavailable("no peer"), (15, 14, 14, 14)),
        (Fenced("odd"), (Fenced.kafka_code,) * 4),
    ],
)
async def test_the_refusals_of_the_transactions_coordinator(
    code: int | TidelogError, told: tuple[int, int, int, int]
) -> None:
    async with World() as world:
        for version, expected in zip((1, 3, 4, 5), told, strict=True):
            world.transactions.codes = [code]
            assert await txn_commit(world, version, [("orders", 0, 1, None)]) == [expected], version
            assert world.transactions.codes == []


async def test_the_end_of_the_last_transaction_is_waited_for_shortly() -> None:
    async with World() as world:
        world.transactions.codes = [CONCURRENT_TRANSACTIONS] * 100
        before = world.clock.monotonic()
        assert await txn_commit(world, 5, [("orders", 0, 1, None)]) == [CONCURRENT_TRANSACTIONS]
        assert 0.1 <= world.clock.monotonic() - before < 0.2
        assert 4 <= len(world.transactions.asked) <= 7


async def test_a_loading_partition_is_told_to_old_producers_as_not_available() -> None:
    async with World() as world:
        world.partitions.close(0)
        world.partitions.opening.add(0)
        rows: list[tuple[str, int, int, str | None]] = [("orders", 0, 1, None)]
        assert await txn_commit(world, 1, rows) == [E.COORDINATOR_NOT_AVAILABLE]
        assert await txn_commit(world, 2, rows) == [E.COORDINATOR_LOAD_IN_PROGRESS]


async def test_below_the_level_of_transactions_they_are_refused() -> None:
    async with World() as world:
        row = ClusterRecord("c", 1, 1, 0, level=TRANSACTIONS_LEVEL - 1)
        world.controller.apply(RowChange("cluster", "", row))
        rows: list[tuple[str, int, int, str | None]] = [("orders", 0, 1, None)]
        assert await txn_commit(world, 5, rows) == [E.INVALID_TXN_STATE]
        assert world.log.batches == []


async def test_an_older_epoch_is_told_as_invalid() -> None:
    async with World() as world:
        rows: list[tuple[str, int, int, str | None]] = [("orders", 0, 1, None)]
        assert await txn_commit(world, 3, rows) == [0]
        assert await txn_commit(world, 3, rows, producer_epoch=1) == [E.INVALID_PRODUCER_EPOCH]
