"""A coordinator's partition on the whole storage, while the controller does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.kafka_world import KafkaWorld
from tidelog.broker.groups.coordinator import GroupCoordinator
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.records import OffsetKey, OffsetValue
from tidelog.stream.partition_log import PartitionLog

OFFSETS = "__consumer_offsets"


async def commit(groups: GroupCoordinator, offset: int) -> GroupError:
    offsets = [(OffsetKey("g", "t", 0), OffsetValue(offset, -1, "m" * 30_000, offset))]
    return await groups.commit("g", MemberIdentity("", None), -1, offsets)


async def commit_past(groups: GroupCoordinator, log: PartitionLog, log_start: int, offset: int) -> int:
    """Commit until the log starts after an offset; returns the last one committed."""
    async with asyncio.timeout(30):
        while log.log_start_offset <= log_start:
            offset += 1
            assert await commit(groups, offset) is GroupError.NONE
    return offset


async def test_commits_do_not_wait_for_a_controller_that_is_to_trim_their_partition() -> None:
    async with KafkaWorld(groups=True) as world:
        groups, controller = world.services.groups, world.controller
        await world.topic("t")
        await world.topic(OFFSETS, 2)
        index = await groups.find_partition("g")
        async with asyncio.timeout(30):
            await groups.wait_until_loaded(index)
        log = world.log(OFFSETS, index)
        offset = await commit_past(groups, log, 0, 0)
        await world.storage.upload_now()  # the controller may trim the streams now

        asked, answers = asyncio.Event(), asyncio.Event()
        trim_stream = controller.trim_stream

        async def away(*args: Any) -> None:
            asked.set()
            await answers.wait()
            await trim_stream(*args)

        unanswered: Any = away
        controller.trim_stream = unanswered  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            while not asked.is_set():
                offset += 1
                assert await commit(groups, offset) is GroupError.NONE
        for _ in range(100):
            offset += 1
            assert await commit(groups, offset) is GroupError.NONE

        answers.set()
        offset = await commit_past(groups, log, log.log_start_offset, offset)
        found = groups.committed("g", {"t": [0]})["t"][0]
        assert found is not None and found.offset == offset
