"""What clients are told while a partition is being handed over: its heir, under the epoch that it will lead in."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.partitions import PartitionManager
from broker.settings import LogSettings
from broker.wire import schema
from controller.client import ControllerClient
from controller.commands import ClosedPartition
from controller.model import NO_REPLICA_SET, TopicRecord
from runtime.errors import TidelogError
from tests.e2e.backends import create_topic
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.kafka_client import KafkaClient
from tests.support.kafka_world import batch
from tests.support.load import Load

TOPIC = "moved"
NOT_LEADER_OR_FOLLOWER = 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, log=LogSettings(move_drain_timeout_ms=1_000)) as cluster:
        create_topic(cluster.bootstrap, TOPIC, 1)
        yield cluster


async def produce(client: KafkaClient) -> Any:
    make = schema.request(0, 10).make
    data = make("PartitionProduceData", index=0, records=batch(b"told"))
    topics = [make("TopicProduceData", name=TOPIC, partition_data=[data])]
    answer = await client.send(0, 10, transactional_id=None, acks=-1, timeout=10_000, topic_data=topics)
    return answer.responses[0].partition_responses[0], answer.node_endpoints


def told(outcome: Any) -> tuple[int, int]:
    assert outcome.error_code == NOT_LEADER_OR_FOLLOWER
    return outcome.current_leader.leader_id, outcome.current_leader.leader_epoch


class HandOvers:
    """Every hand-over of the cluster stops before it is sent, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        hand_over = ControllerClient.hand_over

        async def wait(
            client: ControllerClient, replica_set_id: int, master_epoch: int, partitions: Sequence[ClosedPartition]
        ) -> list[TidelogError | None]:
            self.reached.set()
            while not self.go_on.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return await hand_over(client, replica_set_id, master_epoch, partitions)

        monkeypatch.setattr(ControllerClient, "hand_over", wait)


@pytest.mark.parametrize("goes", ["well", "cancelled"])
def test_a_producer_is_told_the_heir_and_no_smaller_epoch_is_ever_led_in(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    hand_overs = HandOvers(monkeypatch)
    source = cluster.leader(TOPIC, 0)
    target = source % 3 + 1
    epoch = cluster.image.leader(cluster.partition(TOPIC, 0))[1]

    def target_there() -> int:
        record = cluster.nodes[source].controller.image.partition(cluster.image.topic_ids[TOPIC], 0)
        assert record is not None
        return record.target

    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            at_source, at_target = [
                await stack.enter_async_context(KafkaClient(*cluster.nodes[each].bootstrap))
                for each in (source, target)
            ]
            cluster.place(TOPIC, 0, target)
            await asyncio.to_thread(wait_until, hand_overs.reached.is_set, "the partition is closed")
            refused, endpoints = await produce(at_source)
            assert told(refused) == (target, epoch + 1)
            (endpoint,) = endpoints
            assert (endpoint.node_id, endpoint.host, endpoint.port) == (target, *cluster.nodes[target].bootstrap)
            refused, _ = await produce(at_target)
            assert told(refused) == (source, epoch)  # as its image has it: no client goes back to a smaller epoch
            if goes == "cancelled":
                cluster.place(TOPIC, 0, NO_REPLICA_SET)
                await asyncio.to_thread(
                    wait_until,
                    lambda: target_there() == NO_REPLICA_SET,
                    "the source sees the cancel",
                )
                refused, _ = await produce(at_source)
                assert told(refused) == (source, epoch)  # nobody is to inherit any more
            hand_overs.go_on.set()
            leader, loser = (target, at_source) if goes == "well" else (source, at_target)
            await asyncio.to_thread(wait_until, partial(cluster.serves, leader, TOPIC, 0), "it is served again")
            assert cluster.image.leader(cluster.partition(TOPIC, 0)) == (leader, epoch + 1)
            accepted, _ = await produce(at_target if goes == "well" else at_source)
            assert accepted.error_code == 0
            refused, _ = await produce(loser)
            assert told(refused) == (leader, epoch + 1)

    asyncio.run(work())


def test_a_producer_that_followed_its_heir_in_vain_comes_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_overs = HandOvers(monkeypatch)
    source = cluster.leader(TOPIC, 0)
    target = source % 3 + 1
    asked: set[int] = set()
    why_not = PartitionManager._why_not

    def note(self: PartitionManager, topic: TopicRecord, index: int) -> TidelogError:
        asked.add(self._node_id)
        return why_not(self, topic, index)

    monkeypatch.setattr(PartitionManager, "_why_not", note)
    with Load(cluster.bootstrap, TOPIC, 1) as load:
        load.more()
        cluster.place(TOPIC, 0, target)
        wait_until(lambda: target in asked, "the producer has gone to the heir")
        assert not hand_overs.go_on.is_set()
        cluster.place(TOPIC, 0, NO_REPLICA_SET)
        hand_overs.go_on.set()
        wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves again")
        load.more()
    load.check(cluster.bootstrap)
