"""A group whose record the WAL refuses for its size, on the whole storage."""

from __future__ import annotations

import asyncio

from tests.support.kafka_world import KafkaWorld
from tidelog.broker.groups.coordinator import GroupCoordinator
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import JoinRequest, SyncRequest
from tidelog.broker.groups.records import OffsetKey, OffsetValue
from tidelog.storage.settings import MIB, WalSettings

OFFSETS = "__consumer_offsets"


async def commit(groups: GroupCoordinator, group_id: str, metadata: str) -> GroupError:
    offsets = [(OffsetKey(group_id, "t", n), OffsetValue(5, -1, metadata, 0)) for n in range(20)]
    return await groups.commit(group_id, MemberIdentity("", None), -1, offsets)


async def test_a_group_that_is_too_large_for_the_wal_disturbs_no_other() -> None:
    async with KafkaWorld(groups=True, wal=WalSettings(max_record_bytes=MIB)) as world:
        groups = world.services.groups
        await world.topic("t", 20)
        await world.topic(OFFSETS, 2)
        index = await groups.find_partition("large")
        async with asyncio.timeout(30):
            await groups.wait_until_loaded(index)
        others = [name for name in map(str, range(20)) if groups.partition_of(name) == index][:2]
        protocols = (("range", b"s" * (MIB // 2)),)
        request = JoinRequest(
            MemberIdentity("", None), "app", "/", 10_000, 10_000, "consumer", protocols, needs_member_id=False
        )
        joined = await groups.join("large", request)
        assert joined.error is GroupError.NONE
        identity = MemberIdentity(joined.member_id, None)
        sync = SyncRequest(identity, joined.generation, None, None, {joined.member_id: b"a" * (MIB // 2)})
        first, synced, second = await asyncio.gather(
            commit(groups, others[0], "m" * 20_000),
            groups.sync("large", sync),
            commit(groups, others[1], "m"),
        )
        assert synced.error is GroupError.UNKNOWN_SERVER_ERROR
        assert (first, second) == (GroupError.NONE, GroupError.NONE)
        assert groups.describe("large") is not None, "its partition was not read again"
