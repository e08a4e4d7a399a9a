"""The coordinator's shell: whole groups over a log, restarts, bounds, faults. Time is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.group_world import Consumer, FakeLog, World
from tests.support.loops import VIRTUAL_LOOP
from tidelog.batch.batch import Record, build_batch
from tidelog.broker.coordinators.errors import CoordinatorNotAvailable, NotCoordinator
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC, java_hash, partition_for
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import JoinRequest
from tidelog.broker.groups.records import OffsetKey, OffsetValue
from tidelog.broker.groups.state import GroupState
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.records import BrokerRecord, TopicRecord
from tidelog.runtime.errors import Unavailable

LOOPS = VIRTUAL_LOOP

NOBODY = MemberIdentity("")


async def commit(
    world: World, group: str, offset: int, *, topic: str = "orders", partition: int = 0, topic_id: bytes = b""
) -> GroupError:
    value = OffsetValue(offset, 3, f"at {offset}", world.clock.time_ms(), topic_id=topic_id)
    return await world.coordinator.commit(group, NOBODY, -1, [(OffsetKey(group, topic, partition), value)])


def committed(world: World, group: str, topic: str = "orders", partition: int = 0) -> int | None:
    value = world.coordinator.committed(group, {topic: [partition]})[topic][partition]
    return None if value is None else value.offset


async def form(*members: Consumer) -> None:
    """One round for all of them."""
    for result in await asyncio.gather(*(member.run_round() for member in members)):
        assert result.error is GroupError.NONE, result


# --- the partition of a group -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0), ("a", 97), ("hello", 99162322), ("polygenelubricants", -(2**31)), ("日本", 835047), ("😀", 1772899)],
)
def test_java_hash(text: str, value: int) -> None:
    assert java_hash(text) == value


def test_the_smallest_hash_goes_to_partition_0_as_in_kafka() -> None:
    assert partition_for("polygenelubricants", 50) == 0
    assert partition_for("console-consumer-1", 50) == abs(java_hash("console-consumer-1")) % 50


# --- groups -----------------------------------------------------------------------------------------------------------


async def test_a_group_forms_and_each_member_gets_its_assignment() -> None:
    async with World(initial_rebalance_delay_ms=3_000) as world:
        members = [Consumer(world) for _ in range(3)]
        results = await asyncio.gather(*(member.run_round() for member in members))
        assert [result.assignment for result in results] == [member.member_id.encode() for member in members]
        description = world.coordinator.describe("g")
        assert description is not None
        assert description.state is GroupState.STABLE
        assert [member.heartbeat() for member in members] == [GroupError.NONE] * 3


async def test_a_sync_is_answered_only_after_its_record_is_confirmed() -> None:
    async with World() as world:
        world.storage.auto_confirm = False
        member = Consumer(world)
        await member.join()
        waiting = asyncio.create_task(member.sync({member.member_id: b"x"}))
        await asyncio.sleep(100)
        assert not waiting.done()
        world.storage.confirm_all()
        assert (await waiting).assignment == b"x"


async def test_sessions_end_on_the_loops_timer() -> None:
    async with World() as world:
        member = Consumer(world, session_ms=6_000)
        await form(member)
        await asyncio.sleep(5.9)
        assert member.heartbeat() is GroupError.NONE
        await asyncio.sleep(6.1)
        assert member.heartbeat() is GroupError.UNKNOWN_MEMBER_ID
        description = world.coordinator.describe("g")
        assert description is not None
        assert description.state is GroupState.EMPTY


async def test_a_client_that_disconnects_while_joining_leaks_nothing() -> None:
    async with World(initial_rebalance_delay_ms=3_000) as world:
        member = Consumer(world)
        joining = asyncio.create_task(member.join())
        await asyncio.sleep(1)
        assert world.coordinator.stats()["waiting"] == 1
        joining.cancel()
        await asyncio.sleep(0)
        assert world.coordinator.stats()["waiting"] == 0
        await asyncio.sleep(60)
        description = world.coordinator.describe("g")
        assert description is None or description.members == ()


async def test_a_refused_join_leaves_no_group_behind() -> None:
    async with World() as world:
        assert (await Consumer(world, protocols=()).join()).error is GroupError.INCONSISTENT_GROUP_PROTOCOL
        assert (await Consumer(world, session_ms=1).join()).error is GroupError.INVALID_SESSION_TIMEOUT
        stranger = Consumer(world)
        stranger.member_id = "who"
        assert (await stranger.join()).error is GroupError.UNKNOWN_MEMBER_ID
        assert world.coordinator.stats()["groups"] == 0


async def test_an_id_that_is_never_used_is_forgotten_with_its_group() -> None:
    async with World() as world:
        first = JoinRequest(NOBODY, "client", "/h", 10_000, 30_000, "consumer", (("range", b""),))
        assert (await world.coordinator.join("g", first)).error is GroupError.MEMBER_ID_REQUIRED
        assert world.coordinator.stats()["groups"] == 1
        await asyncio.sleep(10.1)
        assert world.coordinator.stats()["groups"] == 0


# --- offsets ----------------------------------------------------------------------------------------------------------


async def test_offsets_are_visible_only_when_durable() -> None:
    async with World() as world:
        world.storage.auto_confirm = False
        waiting = asyncio.create_task(commit(world, "g", 7))
        await asyncio.sleep(1)
        assert committed(world, "g") is None
        world.storage.confirm_all()
        assert await waiting is GroupError.NONE
        assert world.coordinator.committed("g", None) == {
            "orders": {0: OffsetValue(7, 3, "at 7", world.clock.time_ms() - 1000)}
        }


async def test_many_commits_share_a_batch_and_the_last_one_counts() -> None:
    async with World() as world:
        results = await asyncio.gather(*(commit(world, "g", offset) for offset in range(500)))
        assert set(results) == {GroupError.NONE}
        assert committed(world, "g") == 499
        assert len(world.log.batches) < 10


async def test_a_commit_with_a_generation_to_a_group_that_is_not_there_is_refused() -> None:
    async with World() as world:
        value = OffsetValue(1, -1, "", 0)
        result = await world.coordinator.commit("g", MemberIdentity("m"), 3, [(OffsetKey("g", "orders", 0), value)])
        assert result is GroupError.ILLEGAL_GENERATION
        assert world.coordinator.describe("g") is None


async def test_a_simple_consumers_offsets_expire_after_the_retention() -> None:
    async with World(offsets_retention_ms=60_000, offsets_check_interval_ms=10_000) as world:
        await commit(world, "g", 1)
        await asyncio.sleep(40)
        await commit(world, "g", 2, partition=1)
        await asyncio.sleep(31)
        assert committed(world, "g") is None
        assert committed(world, "g", partition=1) == 2
        await asyncio.sleep(60)
        assert world.coordinator.stats() == {
            "partitions": 1,
            "loading": 0,
            "groups": 0,
            "offsets": 0,
            "pending": 0,
            "waiting": 0,
        }
        await world.restart()
        assert world.coordinator.stats()["offsets"] == 0


async def test_offsets_of_a_live_group_stay_and_the_retention_counts_from_when_it_empties() -> None:
    async with World(offsets_retention_ms=60_000, offsets_check_interval_ms=10_000) as world:
        member = Consumer(world, protocol_type="connect")
        await form(member)
        value = OffsetValue(5, -1, "", world.clock.time_ms())
        await world.coordinator.commit("g", member.identity, member.generation, [(OffsetKey("g", "orders", 0), value)])
        for _ in range(40):
            await asyncio.sleep(5)
            assert member.heartbeat() is GroupError.NONE
        assert committed(world, "g") == 5
        member.leave()
        await asyncio.sleep(55)
        assert committed(world, "g") == 5
        await asyncio.sleep(25)
        assert committed(world, "g") is None
        assert world.coordinator.describe("g") is None


async def test_a_deleted_topic_takes_its_offsets_along() -> None:
    async with World() as world:
        world.controller.add_topic("others", 1)
        await commit(world, "g", 1)
        await commit(world, "g", 2, topic="others")
        world.controller.delete_topic(world.topic)
        world.controller.add_topic("orders", 8)
        await asyncio.sleep(1)
        assert committed(world, "g") is None
        assert committed(world, "g", "others") == 2
        await world.restart()
        assert committed(world, "g") is None


async def test_a_topic_deleted_while_the_partition_loads_takes_its_offsets_along() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        log = world.log
        world.partitions.close(0)
        log.read_errors = [Unavailable("bucket")]
        world.partitions.open(log)
        await asyncio.sleep(0)
        world.controller.delete_topic(world.topic)
        await world.loaded()
        await asyncio.sleep(1)
        assert world.coordinator.stats()["offsets"] == 0


async def test_a_topic_that_was_deleted_and_made_again_unseen_by_its_coordinator_has_no_offsets() -> None:
    async with World() as world:
        old = world.topic
        await commit(world, "g", 7, topic_id=old.id)
        assert committed(world, "g") == 7
        log = world.log
        world.partitions.close(0)  # nobody coordinates the group while it happens
        world.controller.delete_topic(old)
        new = world.controller.add_topic("orders", 8)
        world.partitions.open(log)
        await world.loaded()
        assert committed(world, "g") is None
        assert world.coordinator.committed("g", None) == {}
        await commit(world, "g", 3, topic_id=new.id)
        assert await commit(world, "g", 9, topic_id=old.id) is GroupError.NONE  # it was on its way at the deletion
        assert committed(world, "g") == 3
        await world.restart()
        assert committed(world, "g") == 3


# --- deleting ---------------------------------------------------------------------------------------------------------


async def test_deleting_groups() -> None:
    async with World() as world:
        member = Consumer(world)
        await form(member)
        await commit(world, "simple", 1)
        delete = world.coordinator.delete_group
        assert await delete("nobody") is GroupError.GROUP_ID_NOT_FOUND
        assert await delete("g") is GroupError.NON_EMPTY_GROUP
        assert await delete("simple") is GroupError.NONE
        assert await delete("simple") is GroupError.GROUP_ID_NOT_FOUND
        member.leave()
        assert await delete("g") is GroupError.NONE
        await world.restart()
        assert world.coordinator.list_groups() == []


async def test_nobody_gets_into_a_group_that_is_being_deleted() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        world.storage.auto_confirm = False
        deleting = asyncio.create_task(world.coordinator.delete_group("g"))
        await asyncio.sleep(0.1)
        assert (await Consumer(world).join()).error is GroupError.COORDINATOR_NOT_AVAILABLE
        assert await commit(world, "g", 2) is GroupError.COORDINATOR_NOT_AVAILABLE
        assert world.coordinator.describe("g") is None
        world.storage.confirm_all()
        assert await deleting is GroupError.NONE
        assert world.coordinator.stats()["groups"] == 0


async def test_a_deletion_that_cannot_be_written_changes_nothing() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        world.log.errors = [Unavailable("no")]
        assert await world.coordinator.delete_group("g") is GroupError.COORDINATOR_NOT_AVAILABLE
        assert committed(world, "g") == 1
        assert await commit(world, "g", 2) is GroupError.NONE


async def test_a_removal_is_decided_after_the_commits_before_it() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        world.storage.auto_confirm = False
        early = asyncio.create_task(commit(world, "g", 2, partition=5))
        await asyncio.sleep(0)
        deleting = asyncio.create_task(world.coordinator.delete_group("g"))
        await asyncio.sleep(0.1)
        world.storage.auto_confirm = True
        world.storage.confirm_all()
        assert await early is await deleting is GroupError.NONE
        assert world.coordinator.stats()["offsets"] == 0
        await world.restart()
        assert world.coordinator.stats()["offsets"] == 0


async def test_deleting_offsets() -> None:
    subscription = bytes.fromhex("0001000000010006") + b"orders" + bytes.fromhex("ffffffff")
    async with World() as world:
        world.controller.add_topic("others", 1)
        await commit(world, "g", 1)
        await commit(world, "g", 2, topic="others")
        member = Consumer(world, metadata=subscription)
        delete = world.coordinator.delete_offsets
        assert await delete("nobody", []) == (GroupError.GROUP_ID_NOT_FOUND, [])
        await form(member)
        assert await delete("g", [("orders", 0), ("others", 0), ("others", 0)]) == (
            GroupError.NONE,
            [GroupError.GROUP_SUBSCRIBED_TO_TOPIC, GroupError.NONE, GroupError.NONE],
        )
        assert (committed(world, "g"), committed(world, "g", "others")) == (1, None)
        await form(connect := Consumer(world, "c", protocol_type="connect"))
        assert await delete("c", [("orders", 0)]) == (GroupError.NON_EMPTY_GROUP, [])
        connect.leave()
        assert await delete("c", [("orders", 0)]) == (GroupError.NONE, [GroupError.NONE])


# --- restarts ---------------------------------------------------------------------------------------------------------


async def test_after_a_restart_everything_is_as_it_was() -> None:
    async with World(partitions=4) as world:
        members = [Consumer(world, f"group-{n}", instance=f"i-{n}" if n % 2 else None) for n in range(8)]
        await asyncio.gather(*(form(member) for member in members))
        for n in range(8):
            await commit(world, f"simple-{n}", n, partition=n)
        members[0].leave()
        await asyncio.sleep(1)
        before = sorted(world.coordinator.list_groups())
        offsets = {f"simple-{n}": world.coordinator.committed(f"simple-{n}", None) for n in range(8)}
        await world.restart()
        assert sorted(world.coordinator.list_groups()) == before
        assert {group: world.coordinator.committed(group, None) for group in offsets} == offsets
        for member in members[1:]:
            assert member.heartbeat() is GroupError.NONE
            assert (await member.sync()).assignment == member.member_id.encode()


async def test_members_that_died_with_the_coordinator_time_out_after_it_returns() -> None:
    async with World() as world:
        await form(Consumer(world))
        await world.restart()
        await asyncio.sleep(10.1)
        description = world.coordinator.describe("g")
        assert description is not None
        assert description.state is GroupState.EMPTY


async def test_what_was_not_confirmed_before_a_crash_was_not_acknowledged_either() -> None:
    async with World() as world:
        await commit(world, "g", 1)
        world.storage.auto_confirm = False
        waiting = asyncio.create_task(commit(world, "g", 2))
        await asyncio.sleep(1)
        assert not waiting.done()
        await world.restart(confirmed_only=True)
        assert committed(world, "g") == 1
        assert await waiting is GroupError.NOT_COORDINATOR


async def test_records_of_kinds_unknown_here_survive_snapshots() -> None:
    async with World() as world:
        batch = build_batch([Record(0, 1, b"\x00\x63new", b"value"), Record(0, 1, b"\x00\x63old", None)])
        world.log.append_internal(memoryview(batch))
        world.storage.confirm_all()
        await world.restart()
        await _churn(world)
        assert world.log.trims
        assert (b"\x00\x63new", b"value") in world.log.records()


# --- the bound on the log ---------------------------------------------------------------------------------------------


async def _churn(world: World, *, mib: int = 3) -> None:
    """Commit until this much has been appended."""
    metadata = "x" * 1000
    total = 0
    while total < mib << 20:
        keys = [OffsetKey("g", "orders", partition) for partition in range(8)]
        offsets = [(key, OffsetValue(total, 1, metadata, world.clock.time_ms())) for key in keys]
        results = await asyncio.gather(*(world.coordinator.commit("g", NOBODY, -1, offsets) for _ in range(10)))
        assert set(results) == {GroupError.NONE}
        total += 80 * 1050


async def test_the_log_stays_bounded_under_endless_commits() -> None:
    async with World() as world:
        member = Consumer(world, "live")
        await form(member)
        largest = 0
        for _ in range(12):
            await _churn(world, mib=1)
            largest = max(largest, world.log.size_bytes())
        assert len(world.log.trims) >= 4
        assert largest < 3 << 20
        before = sorted(world.coordinator.list_groups())
        await world.restart()
        assert sorted(world.coordinator.list_groups()) == before
        assert committed(world, "g") is not None
        assert member.heartbeat() is GroupError.NONE


async def test_a_crash_between_the_snapshot_and_the_trim_changes_nothing() -> None:
    async with World() as world:
        member = Consumer(world, "live", session_ms=60_000)
        await form(member)
        world.log.trim_errors = [Unavailable("controller")] * 1000
        await _churn(world)
        assert not world.log.trims
        before = sorted(world.coordinator.list_groups())
        offsets = world.coordinator.committed("g", None)
        await world.restart()
        assert sorted(world.coordinator.list_groups()) == before
        assert world.coordinator.committed("g", None) == offsets
        await asyncio.sleep(1)
        assert world.log.trims, "loading noticed that the log is too long"
        assert world.log.size_bytes() < 1 << 20
        await world.restart()
        assert world.coordinator.committed("g", None) == offsets


async def test_a_crash_in_the_middle_of_a_snapshot_changes_nothing() -> None:
    async with World() as world:
        for n in range(40):
            offsets = [
                (OffsetKey(f"g-{n}", f"orders-{n}", p), OffsetValue(n, 1, "x" * 1000, world.clock.time_ms()))
                for p in range(50)
            ]
            await world.coordinator.commit(f"g-{n}", NOBODY, -1, offsets)
        expected = {f"g-{n}": world.coordinator.committed(f"g-{n}", None) for n in range(40)}
        live = list(dict(world.log.records()).items())
        half = [Record(0, 1, key, value) for key, value in live[: len(live) // 2]]
        world.log.append_internal(memoryview(build_batch(half)))
        await asyncio.sleep(1)
        await world.restart()
        assert {group: world.coordinator.committed(group, None) for group in expected} == expected


async def test_a_log_whose_content_is_all_live_is_left_alone() -> None:
    async with World() as world:
        for n in range(300):
            keys = [OffsetKey(f"g-{n}", "orders", partition) for partition in range(8)]
            await world.coordinator.commit(
                f"g-{n}", NOBODY, -1, [(key, OffsetValue(1, 1, "x" * 500, 0)) for key in keys]
            )
        await world.restart()
        await asyncio.sleep(1)
        rewrites = len(world.log.trims)
        await commit(world, "g-1", 5)
        assert len(world.log.trims) == rewrites <= 1


async def test_a_snapshot_of_nothing_empties_the_log() -> None:
    async with World() as world:
        await _churn(world, mib=1)
        world.log.trim_errors = []
        assert await world.coordinator.delete_group("g") is GroupError.NONE
        await _churn(world, mib=1)
        assert await world.coordinator.delete_group("g") is GroupError.NONE
        await asyncio.sleep(1)
        await world.restart()
        assert world.coordinator.list_groups() == []


# --- finding ----------------------------------------------------------------------------------------------------------


def _open_all(world: World) -> Callable[[TopicRecord], None]:
    def opened(topic: TopicRecord) -> None:
        for index in range(topic.partitions):
            world.partitions.opening.add(index)
            log = FakeLog(index, world.storage)
            asyncio.get_running_loop().call_later(0.5, world.partitions.open, log)

    return opened


async def test_the_first_question_creates_the_topic_once_and_waits_until_the_group_can_be_served() -> None:
    async with World(partitions=4, create=False) as world:
        world.controller.on_created = _open_all(world)
        found = await asyncio.gather(*(world.coordinator.find(f"g-{n}") for n in range(10)))
        assert {broker.id for broker in found} == {1}
        ((name, partitions, configs, internal),) = world.controller.created
        assert (name, partitions, internal) == (OFFSETS_TOPIC, 4, True)
        assert configs["cleanup.policy"] == "compact"
        await form(Consumer(world, "g-1"))


async def test_a_topic_that_cannot_be_created_is_a_retriable_error() -> None:
    async with World(create=False) as world:
        world.controller.create_errors = [Unavailable("controller")]
        with pytest.raises(CoordinatorNotAvailable):
            await world.coordinator.find("g")
        with pytest.raises(NotCoordinator):
            world.coordinator.committed("g", None)


async def test_a_partition_without_a_leader_is_waited_for_a_little() -> None:
    async with World() as world:
        broker = world.controller.image.brokers[1]
        gone = BrokerRecord(1, "c", "127.0.0.1", 9092, "", "", "i", 1, False)
        world.controller.apply(RowChange("brokers", 1, gone))
        with pytest.raises(CoordinatorNotAvailable):
            await world.coordinator.find("g")
        asyncio.get_running_loop().call_later(1, world.controller.apply, RowChange("brokers", 1, broker))
        assert (await world.coordinator.find("g")).id == 1


async def test_groups_of_many_partitions_are_listed_together() -> None:
    async with World(partitions=8) as world:
        for n in range(20):
            await commit(world, f"g-{n}", n)
        assert {group.group_id for group in world.coordinator.list_groups()} == {f"g-{n}" for n in range(20)}
        assert len({partition_for(f"g-{n}", 8) for n in range(20)}) > 3
