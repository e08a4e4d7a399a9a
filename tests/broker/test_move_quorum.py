"""Moves away from a replica set that has no write quorum: what the close of a log writes could not be confirmed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.test_hot_storage import ServingSet, contents, produce, values
from tests.controller.controller_helpers import until
from tests.support.kept_set import SET
from tidelog.controller.model.commands import PartitionMove

pytestmark = pytest.mark.timeout(300)
ELSEWHERE = 4


@pytest.fixture
async def moving(tmp_path: Path) -> AsyncIterator[ServingSet]:
    """A set of three, and a broker with a set of its own."""
    here = ServingSet(tmp_path)
    await here.begin()
    client, proxy = await here.register(ELSEWHERE)
    await client.elect(ELSEWHERE, ELSEWHERE)
    await here.processes[1].client.create_topic("t", 1, {}, assignment=[SET])
    yield here
    await here.finish()
    await proxy.close()
    await client.close()


async def test_a_partition_is_not_closed_for_a_move_while_no_quorum_would_confirm_that(moving: ServingSet) -> None:
    log = await moving.partition()
    await produce(log, values(0, 5))
    for follower in (2, 3):
        await moving.end(follower)
    master = moving.leader().replica.master
    assert master is not None
    await until(lambda: bool(master.refusal()))

    partitions = moving.serving[SET].partitions
    client = moving.processes[SET].client
    assert await client.move_partitions([PartitionMove(log.topic_id, 0, ELSEWHERE)]) == [None]
    await until(lambda: bool(partitions.moves_report()["moves"]))
    await until(lambda: log.closed or bool(partitions.problems()))
    assert not log.closed and partitions.get("t", 0) is log
    assert "in sync" in partitions.problems()[0]
    assert await contents(log) == values(0, 5)

    await moving.launch(2)
    await until(lambda: client.image.index.partition_counts.get(ELSEWHERE) == 1)
    await until(lambda: partitions.problems() == [])
    assert log.closed
