"""A quorum that is slower than its master's disk is the stage `replication` of a slow request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.broker.test_hot_kafka import context
from tests.broker.test_hot_storage import ServingSet
from tests.controller.controller_helpers import until
from tests.support.hung_disk import hung_syncs
from tests.support.kafka_world import batch
from tests.support.kept_set import SET
from tidelog.broker.kafka.handlers import produce as produce_api
from tidelog.broker.kafka.wire.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tidelog.runtime.clock import SystemClock

STALL_S = 0.3


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[ServingSet]:
    here = ServingSet(tmp_path)
    await here.begin()
    await here.processes[1].client.create_topic("t", 1, {}, assignment=[SET])
    yield here
    await here.finish()


@pytest.mark.parametrize("slow", ["replicas", "master"])
async def test_slow_replicas_and_a_slow_disk_are_told_apart(
    serving: ServingSet, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    log = await serving.partition()
    leader, clock = serving.leader().broker_id, SystemClock()
    others = [each for each in serving.processes if each != leader]
    hung = [leader] if slow == "master" else others
    asked = context(serving, leader, 0, 12)
    data = PartitionProduceData(0, memoryview(bytearray(batch(b"a"))))
    request = ProduceRequest(None, -1, 120_000, [TopicProduceData("t", b"", [data])])
    with ExitStack() as disks:
        for each in hung:
            disks.enter_context(hung_syncs(monkeypatch, f"wal-{each}"))
        started = clock.monotonic()
        answer = asyncio.ensure_future(produce_api.handle(asked, request))
        handled = clock.monotonic()
        await until(lambda: clock.monotonic() > started + STALL_S)
        assert not answer.done()
    response = await answer
    assert response is not None and response.topics[0].partitions[0].error_code == 0
    assert log.high_watermark == 1 and asked.timed is not None
    stages = asked.timed.timing(started, handled, clock.monotonic()).stages
    slow_s, quick_s = stages.replication, stages.sync
    if slow == "master":
        slow_s, quick_s = quick_s, slow_s
    assert slow_s > STALL_S / 2 and slow_s > 3 * quick_s
