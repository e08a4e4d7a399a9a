"""What clients are told while a partition is being handed over: its next leader, under the epoch that it will lead
in."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.support import schema
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.held import Held
from tests.support.kafka_client import KafkaClient
from tests.support.kafka_world import batch
from tests.support.load import Load
from tidelog.broker.settings import LogSettings
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.records import NO_REPLICA_SET
from tidelog.runtime.errors import TidelogError
from tidelog.stream.partition_log import PartitionLog

TOPIC = "moved"
NOT_LEADER_OR_FOLLOWER = 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, log=LogSettings(move_drain_timeout_ms=1_000)) as cluster:
        create_topic(cluster.bootstrap, TOPIC, 1)
        wait_until(lambda: cluster.serves(cluster.leader(TOPIC, 0), TOPIC, 0), "the partition is served")
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


@pytest.mark.gate_cases("well")
@pytest.mark.parametrize("goes", ["well", "cancelled"])
async def test_a_producer_is_told_the_next_leader_and_no_smaller_epoch_is_ever_led_in(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    hand_overs = Held(monkeypatch, ControllerClient, "hand_over")
    source, target = cluster.elsewhere(TOPIC)
    epoch = cluster.image.leader(cluster.partition(TOPIC, 0))[1]

    def target_there() -> int:
        record = cluster.nodes[source].controller.image.partition(cluster.image.topic_ids[TOPIC], 0)
        assert record is not None
        return record.target

    async with contextlib.AsyncExitStack() as stack:
        at_source, at_target = [
            await stack.enter_async_context(KafkaClient(*cluster.nodes[each].bootstrap)) for each in (source, target)
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


@pytest.mark.long
def test_a_producer_that_followed_its_next_leader_in_vain_comes_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_overs = Held(monkeypatch, ControllerClient, "hand_over")
    source, target = cluster.elsewhere(TOPIC)
    at_target = cluster.nodes[target].parts.partitions.manager
    get, refused = at_target.get, threading.Event()

    def note(topic: str, partition: int) -> PartitionLog:
        try:
            return get(topic, partition)
        except TidelogError:
            refused.set()
            raise

    monkeypatch.setattr(at_target, "get", note)
    with Load(cluster.bootstrap, TOPIC, 1) as load:
        load.more()
        cluster.place(TOPIC, 0, target)
        wait_until(refused.is_set, "the producer has gone to the next leader")
        assert not hand_overs.go_on.is_set()
        cluster.place(TOPIC, 0, NO_REPLICA_SET)
        hand_overs.go_on.set()
        wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves again")
        load.more()
    load.check(cluster.bootstrap)


@pytest.mark.long
async def test_a_fetch_that_waits_is_not_answered_before_it_can_be_told_the_new_leader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cluster.elsewhere(TOPIC)
    close = Held(monkeypatch, PartitionLog, "close_for_move", after=True)

    def listened_to(broker: int) -> bool:
        logs = cluster.nodes[broker].parts.partitions.manager.all()
        return any((one.topic, one.partition) == (TOPIC, 0) and one.watermark_listeners > 0 for one in logs)

    async def fetch(client: KafkaClient) -> Any:
        make = schema.request(1, 16).make
        partition = make("FetchPartition", partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
        topic_id = uuid.UUID(bytes=cluster.image.topic_ids[TOPIC])
        topics = [make("FetchTopic", topic_id=topic_id, partitions=[partition])]
        return await client.send(
            1, 16, max_wait=15_000, min_bytes=1, session_epoch=-1, topics=topics, forgotten_topics_data=[]
        )

    async with KafkaClient(*cluster.nodes[source].bootstrap) as client:
        waiting = asyncio.create_task(fetch(client))
        await asyncio.to_thread(wait_until, lambda: waiting.done() or listened_to(source), "the fetch waits")
        assert not waiting.done(), await waiting
        cluster.place(TOPIC, 0, target)
        await asyncio.to_thread(wait_until, close.reached.is_set, "the source has closed the partition")
        assert not waiting.done()
        close.go_on.set()
        (partition,) = (await waiting).responses[0].partitions
        assert partition.error_code == 6
        told = (partition.current_leader.leader_id, partition.current_leader.leader_epoch)
        assert told == cluster.image.leader(cluster.partition(TOPIC, 0))
        assert told[0] == target
