"""FindCoordinator and the group APIs (join, sync, heartbeat, leave, describe, list, delete): each version, as bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.group_calls import APIS, call, part, versions
from tests.support.group_world import World
from tests.support.loops import VIRTUAL_LOOP
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.groups.members import MemberIdentity

LOOPS = VIRTUAL_LOOP

JOIN, HEARTBEAT, LEAVE, SYNC, DESCRIBE, LIST, DELETE, FIND = 11, 12, 13, 14, 15, 16, 42, 10


async def join(world: World, version: int, member_id: str = "", **how: Any) -> Any:
    fields = {
        "group_id": "g",
        "session_timeout": 10_000,
        "rebalance_timeout": 30_000,
        "member_id": member_id,
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocols": [part(JOIN, version, "JoinGroupRequestProtocol", name="range", metadata=b"\x00meta")],
    } | how
    return await call(world, JOIN, version, **fields)


async def enter(world: World, version: int, **how: Any) -> Any:
    answer = await join(world, version, **how)
    if answer.error_code == E.MEMBER_ID_REQUIRED:
        answer = await join(world, version, answer.member_id, **how)
    return answer


async def sync(world: World, joined: Any, version: int, assignments: dict[str, bytes], **how: Any) -> Any:
    fields = {
        "group_id": "g",
        "generation_id": joined.generation_id,
        "member_id": joined.member_id,
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [
            part(SYNC, version, "SyncGroupRequestAssignment", member_id=member_id, assignment=data)
            for member_id, data in assignments.items()
        ],
    } | how
    return await call(world, SYNC, version, **fields)


async def leave(world: World, version: int, *members: tuple[str, str | None]) -> Any:
    named = (
        [
            part(LEAVE, version, "MemberIdentity", member_id=member_id, group_instance_id=instance)
            for member_id, instance in members
        ]
        if version >= 3
        else []
    )
    return await call(world, LEAVE, version, group_id="g", member_id=members[0][0], members=named)


def test_the_advertised_ranges() -> None:
    assert {key: (api.min_version, api.max_version) for key, api in APIS.items()} == {
        8: (2, 10), 9: (1, 10), 10: (0, 6), 11: (0, 9), 12: (0, 4), 13: (0, 5), 14: (0, 5),
        15: (0, 6), 16: (0, 5), 28: (0, 5), 42: (0, 2), 47: (0, 0),
    }  # fmt: skip


@pytest.mark.parametrize("version", versions(JOIN))
async def test_a_member_joins_and_leads(version: int) -> None:
    async with World() as world:
        first = await join(world, version)
        assert first.error_code == (E.MEMBER_ID_REQUIRED if version >= 4 else E.NONE)
        assert first.member_id.startswith("app-")
        answer = await join(world, version, first.member_id) if version >= 4 else first
        assert answer.error_code == E.NONE
        assert (answer.generation_id, answer.protocol_name) == (1, "range")
        assert answer.leader == answer.member_id == first.member_id
        ((member_id, metadata),) = [(one.member_id, one.metadata) for one in answer.members]
        assert (member_id, metadata) == (answer.member_id, b"\x00meta")
        assert getattr(answer, "protocol_type", "consumer") == "consumer"
        assert not getattr(answer, "skip_assignment", False)
        synced = await sync(world, answer, 3, {answer.member_id: b"\x00\x01\x02"})
        assert (synced.error_code, synced.assignment) == (E.NONE, b"\x00\x01\x02")


@pytest.mark.parametrize("version", versions(JOIN))
async def test_how_a_refused_join_looks(version: int) -> None:
    async with World() as world:
        answer = await join(world, version, "who")
        assert answer.error_code == E.UNKNOWN_MEMBER_ID
        assert (answer.generation_id, answer.leader, answer.member_id, answer.members) == (-1, "", "who", ())
        assert answer.protocol_name == (None if version >= 7 else "")
        assert (await join(world, version, group_id="")).error_code == E.INVALID_GROUP_ID
        assert (await join(world, version, session_timeout=5_999)).error_code == E.INVALID_SESSION_TIMEOUT
        assert (await join(world, version, session_timeout=1_800_001)).error_code == E.INVALID_SESSION_TIMEOUT
        assert (await join(world, version, protocols=[])).error_code == E.INCONSISTENT_GROUP_PROTOCOL
        world.partitions.close(0)
        assert (await join(world, version)).error_code == E.NOT_COORDINATOR


async def test_the_rebalance_timeout_of_v0_is_its_session_timeout() -> None:
    async with World() as world:
        await join(world, 0, session_timeout=7_000)
        (group,) = world.coordinator.list_groups()
        assert [member.rebalance_timeout_ms for member in group.members] == [7_000]


@pytest.mark.parametrize("version", range(5, 10))
async def test_a_static_member_restarts_into_its_place(version: int) -> None:
    async with World() as world:
        first = await join(world, version, group_instance_id="i")
        await sync(world, first, 5, {first.member_id: b"mine"}, group_instance_id="i")
        second = await join(world, version, group_instance_id="i")
        assert second.error_code == E.NONE
        assert second.generation_id == first.generation_id
        assert second.member_id != first.member_id
        if version >= 9:
            assert second.skip_assignment
            assert [one.group_instance_id for one in second.members] == ["i"]
        else:
            assert (second.leader, second.members) == (first.member_id, ())
        synced = await sync(world, second, 5, {}, group_instance_id="i")
        assert synced.assignment == b"mine"
        beat = await call(
            world, HEARTBEAT, 3, group_id="g", generation_id=1, member_id=first.member_id, group_instance_id="i"
        )
        assert beat.error_code == E.FENCED_INSTANCE_ID


@pytest.mark.parametrize("version", versions(SYNC))
async def test_assignments_come_back_as_the_bytes_they_are(version: int) -> None:
    async with World() as world:
        joined = await enter(world, 9)
        data = bytes(range(256)) * 4
        answer = await sync(world, joined, version, {joined.member_id: data})
        assert (answer.error_code, answer.assignment) == (E.NONE, data)
        if version >= 5:
            assert (answer.protocol_type, answer.protocol_name) == ("consumer", "range")
            missing = await sync(world, joined, version, {}, protocol_name=None)
            assert missing.error_code == E.INCONSISTENT_GROUP_PROTOCOL
        refused = await sync(world, joined, version, {}, generation_id=9)
        assert (refused.error_code, refused.assignment) == (E.ILLEGAL_GENERATION, b"")
        empty = await sync(world, joined, version, {}, group_id="")
        assert empty.error_code == E.INVALID_GROUP_ID


@pytest.mark.parametrize("version", versions(HEARTBEAT))
async def test_heartbeats(version: int) -> None:
    async with World() as world:
        joined = await enter(world, 9)
        await sync(world, joined, 5, {})

        async def beat(**how: Any) -> int:
            fields = {"group_id": "g", "generation_id": 1, "member_id": joined.member_id, "group_instance_id": None}
            return int((await call(world, HEARTBEAT, version, **fields | how)).error_code)

        assert await beat() == E.NONE
        assert await beat(generation_id=2) == E.ILLEGAL_GENERATION
        assert await beat(member_id="who") == E.UNKNOWN_MEMBER_ID
        assert await beat(group_id="other") == E.UNKNOWN_MEMBER_ID
        assert await beat(group_id="") == E.INVALID_GROUP_ID


@pytest.mark.parametrize("version", versions(HEARTBEAT))
async def test_members_of_a_group_that_is_loaded_for_long_hear_nothing_that_ends_them(version: int) -> None:
    async with World() as world:
        joined = await enter(world, 9)
        await sync(world, joined, 5, {joined.member_id: b"mine"})
        member = {"group_id": "g", "generation_id": 1, "member_id": joined.member_id, "group_instance_id": None}
        log = world.log
        world.partitions.close(0)
        world.partitions.opening.add(0)
        assert (await call(world, HEARTBEAT, version, **member)).error_code == E.NONE
        assert (await sync(world, joined, version, {})).error_code == E.REBALANCE_IN_PROGRESS
        assert (await join(world, 9, joined.member_id)).error_code == E.COORDINATOR_LOAD_IN_PROGRESS
        world.partitions.open(log)
        await world.loaded()
        assert (await call(world, HEARTBEAT, version, **member)).error_code == E.NONE
        assert (await sync(world, joined, version, {})).assignment == b"mine"


@pytest.mark.parametrize("version", versions(LEAVE))
async def test_leaving(version: int) -> None:
    async with World() as world:
        joined = await enter(world, 9)
        await sync(world, joined, 5, {})
        if version < 3:
            assert (await leave(world, version, ("who", None))).error_code == E.UNKNOWN_MEMBER_ID
            assert (await leave(world, version, (joined.member_id, None))).error_code == E.NONE
            return
        answer = await leave(world, version, ("who", None), (joined.member_id, None), ("", "nobody"))
        assert answer.error_code == E.NONE
        assert [(one.member_id, one.group_instance_id, one.error_code) for one in answer.members] == [
            ("who", None, E.UNKNOWN_MEMBER_ID),
            (joined.member_id, None, E.NONE),
            ("", "nobody", E.UNKNOWN_MEMBER_ID),
        ]


@pytest.mark.parametrize("version", versions(DESCRIBE))
async def test_describing(version: int) -> None:
    async with World(initial_rebalance_delay_ms=3_000) as world:
        waiting = asyncio.create_task(enter(world, 9))
        await asyncio.sleep(1)

        async def describe(group_id: str = "g") -> Any:
            answer = await call(world, DESCRIBE, version, groups=[group_id], include_authorized_operations=False)
            (group,) = answer.groups
            return group

        group = await describe()
        assert (group.error_code, group.group_state, group.protocol_type) == (0, "PreparingRebalance", "consumer")
        assert (group.protocol_data, group.members[0].member_metadata) == ("", b"")
        joined = await waiting
        await sync(world, joined, 5, {joined.member_id: b"mine"})
        group = await describe()
        assert (group.group_state, group.protocol_data) == ("Stable", "range")
        ((member),) = group.members
        assert (member.client_id, member.client_host) == ("app", "/10.0.0.7")
        assert (member.member_metadata, member.member_assignment) == (b"\x00meta", b"mine")
        if version >= 3:
            assert group.authorized_operations == -2147483648
            asked = await call(world, DESCRIBE, version, groups=["g", "nobody"], include_authorized_operations=True)
            assert [one.authorized_operations for one in asked.groups] == [3400, -2147483648 if version >= 6 else 3400]
        unknown = await describe("nobody")
        assert unknown.group_state == "Dead"
        assert unknown.error_code == (E.GROUP_ID_NOT_FOUND if version >= 6 else E.NONE)
        assert (await describe("")).error_code == E.INVALID_GROUP_ID
        world.partitions.close(0)
        assert (await describe()).error_code == E.NOT_COORDINATOR


@pytest.mark.parametrize("version", versions(LIST))
async def test_listing(version: int) -> None:
    async with World() as world:
        joined = await enter(world, 9)
        await sync(world, joined, 5, {})
        empty = await enter(world, 9, group_id="empty", protocol_type="connect")
        world.coordinator.leave("empty", [MemberIdentity(empty.member_id)])

        async def listed(**filters: Any) -> set[str]:
            answer = await call(world, LIST, version, **{"states_filter": [], "types_filter": []} | filters)
            assert answer.error_code == 0
            for group in answer.groups:
                assert group.protocol_type == ("consumer" if group.group_id == "g" else "connect")
                if version >= 4:
                    assert group.group_state == ("Stable" if group.group_id == "g" else "Empty")
                if version >= 5:
                    assert group.group_type == "classic"
            return {group.group_id for group in answer.groups}

        assert await listed() == {"g", "empty"}
        if version >= 4:
            assert await listed(states_filter=["stable"]) == {"g"}
            assert await listed(states_filter=["Empty", "Dead"]) == {"empty"}
        if version >= 5:
            assert await listed(types_filter=["Classic"]) == {"g", "empty"}
            assert await listed(types_filter=["consumer"]) == set()


@pytest.mark.parametrize("version", versions(DELETE))
async def test_deleting(version: int) -> None:
    async with World() as world:
        joined = await enter(world, 9)

        async def delete() -> list[int]:
            answer = await call(world, DELETE, version, groups_names=["g", "nobody"])
            return [int(one.error_code) for one in answer.results]

        assert await delete() == [E.NON_EMPTY_GROUP, E.GROUP_ID_NOT_FOUND]
        await leave(world, 5, (joined.member_id, None))
        assert await delete() == [E.NONE, E.GROUP_ID_NOT_FOUND]


@pytest.mark.parametrize("version", versions(FIND))
async def test_finding(version: int) -> None:
    async with World() as world:

        async def find(key_type: int) -> Any:
            answer = await call(world, FIND, version, key="g", key_type=key_type, coordinator_keys=["g"])
            return answer.coordinators[0] if version >= 4 else answer

        found = await find(0)
        assert (found.error_code, found.node_id, found.host, found.port) == (0, 1, "127.0.0.1", 9092)
        if version >= 1:
            refused = await find(2)
            assert (refused.error_code, refused.node_id) == (42, -1)
        if version >= 4:
            assert found.key == "g"
