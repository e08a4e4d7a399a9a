"""What members of groups may take of a broker's memory and time, whatever their clients send. Time is virtual."""

from __future__ import annotations

import asyncio
import struct

import pytest

from tests.support.group_world import Consumer, World
from tests.support.loops import VIRTUAL_LOOP
from tidelog.broker.coordinators.errors import CoordinatorNotAvailable
from tidelog.broker.groups.coordinator import MAX_PROTOCOLS
from tidelog.broker.groups.errors import GroupError, InvalidGroupRequest
from tidelog.broker.groups.members import (
    MAX_SUBSCRIBED,
    MEMBER_BYTES,
    MemberIdentity,
    protocols_bytes,
    subscribed_topics,
)
from tidelog.broker.groups.messages import JoinRequest

LOOPS = VIRTUAL_LOOP

BOUND = 1 << 20
QUARTER = bytes(BOUND // 4)


async def test_members_of_all_groups_share_a_bound_of_memory() -> None:
    async with World(members_max_bytes=BOUND, partitions=4) as world:
        for group in range(3):
            await Consumer(world, f"g{group}", metadata=QUARTER).run_round()
        late = Consumer(world, "late", metadata=QUARTER, session_ms=20_000)
        with pytest.raises(CoordinatorNotAvailable):
            await late.join()
        assert world.coordinator.describe("late") is None
        small = Consumer(world, "small")
        assert (await small.join()).error is GroupError.NONE
        await asyncio.sleep(10)  # the sessions of the first three end
        assert (await late.join()).error is GroupError.NONE


async def test_a_member_that_is_there_may_join_again_at_the_bound() -> None:
    async with World(members_max_bytes=BOUND) as world:
        members = [Consumer(world, f"g{group}", metadata=QUARTER) for group in range(3)]
        for member in members:
            await member.run_round()
        assert (await members[0].run_round()).error is GroupError.NONE
        members[1].metadata = QUARTER * 3
        with pytest.raises(CoordinatorNotAvailable):
            await members[1].join()


async def test_a_member_with_thousands_of_protocols_is_refused() -> None:
    """A name of two characters takes a hundred bytes, and each join compares those of all members of its group."""
    async with World(members_max_bytes=BOUND) as world:
        protocols = tuple((f"{number:x}", b"") for number in range(MAX_PROTOCOLS + 1))
        wanted = JoinRequest(MemberIdentity("", None), "c", "/h", 30_000, 60_000, "consumer", protocols)
        with pytest.raises(InvalidGroupRequest):
            await world.coordinator.join("g", wanted)
        assert world.coordinator.describe("g") is None
        assert protocols_bytes(protocols) > 100 * MAX_PROTOCOLS


async def test_assignments_count_for_the_bound() -> None:
    async with World(members_max_bytes=BOUND) as world:
        first, second = Consumer(world, "a"), Consumer(world, "b")
        await first.join()
        with pytest.raises(CoordinatorNotAvailable):
            await first.sync({first.member_id: bytes(BOUND)})
        assert (await first.sync({first.member_id: QUARTER * 3})).error is GroupError.NONE
        await second.join()
        with pytest.raises(CoordinatorNotAvailable):
            await second.sync({second.member_id: QUARTER * 2})


async def test_assigned_ids_that_nobody_joins_with_count_for_the_bound() -> None:
    request = JoinRequest(MemberIdentity(""), "client", "/127.0.0.1", 10_000, 30_000, "consumer", (("range", b""),))
    async with World(members_max_bytes=BOUND) as world:
        assigned = 0
        with pytest.raises(CoordinatorNotAvailable):
            for assigned in range(BOUND // MEMBER_BYTES + 1):  # noqa: B007  # it is looked at below
                assert (await world.coordinator.join("g", request)).error is GroupError.MEMBER_ID_REQUIRED
        assert assigned > BOUND // MEMBER_BYTES // 2
        await asyncio.sleep(10)
        assert (await world.coordinator.join("g", request)).error is GroupError.MEMBER_ID_REQUIRED


async def test_what_members_take_is_known_after_a_restart() -> None:
    async with World(members_max_bytes=BOUND) as world:
        for group in range(3):
            await Consumer(world, f"g{group}", metadata=QUARTER).run_round()
        await world.restart()
        with pytest.raises(CoordinatorNotAvailable):
            await Consumer(world, "late", metadata=QUARTER).join()


def subscription(topics: int, name: bytes) -> bytes:
    return struct.pack(">hi", 0, topics) + (struct.pack(">h", len(name)) + name) * topics


def test_more_subscribed_topics_than_the_bound_are_not_read() -> None:
    assert subscribed_topics([subscription(MAX_SUBSCRIBED, b"")]) == frozenset([""])
    assert subscribed_topics([subscription(MAX_SUBSCRIBED + 1, b"")]) is None
    half = MAX_SUBSCRIBED // 2 + 1
    assert subscribed_topics([subscription(half, b"a")] * 3) == frozenset("a")
    assert subscribed_topics([subscription(half, b"a"), subscription(half, b"b")]) is None
