"""Partitions move between brokers while real clients produce and consume: nothing lost, doubled or reordered."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from broker.settings import LogSettings
from broker.wire import schema
from controller.client import ControllerClient
from controller.commands import ClosedPartition
from controller.errors import OutcomeUnknown
from controller.model import NO_REPLICA_SET
from runtime.errors import TidelogError
from stream.managers import OpenedStream
from stream.partition_log import ClosedLog, PartitionLog
from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.kafka_client import KafkaClient
from tests.support.kafka_world import batch
from tests.support.load import Load

PARTITIONS = 3
TOPIC = "moved"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, log=LogSettings(move_drain_timeout_ms=1_000)) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        yield cluster


def test_an_idempotent_producer_survives_thirty_moves_without_loss_or_double(cluster: Cluster) -> None:
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        epochs = []
        for number in range(30):
            index = number % PARTITIONS
            to = cluster.leader(TOPIC, index) % 3 + 1
            cluster.move(TOPIC, index, to)
            epochs.append(cluster.image.leader(cluster.partition(TOPIC, index))[1])
            load.more(10)
    load.check(cluster.bootstrap)
    assert all(later > earlier for earlier, later in zip(epochs, epochs[3:], strict=False))
    done = [move for broker in cluster.nodes for move in cluster.moves(broker) if move["phase"] == "done"]
    assert len(done) == 30


def test_a_consumer_group_reads_every_record_once_while_its_partitions_and_its_coordinator_move(
    cluster: Cluster,
) -> None:
    seen: dict[int, list[int]] = {}
    stopping = threading.Event()
    problems: list[str] = []
    final: list[tuple[int, int]] = []
    refused: list[str] = []

    def consume() -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 10_000,
                "retry.backoff.ms": 10,
                **QUIET,
            }
        )
        consumer.subscribe([TOPIC])

        def commit() -> list[TopicPartition]:
            positions = consumer.position(consumer.assignment())
            for attempt in range(50):
                try:
                    done = consumer.commit(offsets=positions, asynchronous=False) or []
                except KafkaException as error:
                    refused.append(f"{attempt}: {error}")
                    continue
                if all(each.error is None for each in done):
                    return positions
            raise AssertionError(f"a commit did not get through: {refused[-3:]}")

        try:
            while not stopping.is_set():
                messages = consumer.consume(500, 0.1)
                for message in messages:
                    if message.error() is not None:
                        problems.append(str(message.error()))
                        continue
                    partition, offset = message.partition(), message.offset()
                    assert partition is not None and offset is not None
                    seen.setdefault(partition, []).append(offset)
                if messages:  # one at a time: librdkafka may send an asynchronous one again, after newer ones
                    commit()
            final.extend((each.partition, each.offset) for each in commit())
        finally:
            consumer.close()

    thread = threading.Thread(target=consume, daemon=True)
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        thread.start()
        wait_until(lambda: len(seen) == PARTITIONS, "the group reads all partitions")
        for number in range(12):
            index = number % PARTITIONS
            cluster.move(TOPIC, index, cluster.leader(TOPIC, index) % 3 + 1)
            if number % 3 == 0:
                offsets = number // 3 % 2
                cluster.move("__consumer_offsets", offsets, cluster.leader("__consumer_offsets", offsets) % 3 + 1)
            load.more(10)
    load.check(cluster.bootstrap)
    wait_until(lambda: all(len(seen[each]) >= load.sent for each in range(PARTITIONS)), "the group has read it all")
    stopping.set()
    thread.join(30)
    assert not problems, problems[:5]
    for partition in range(PARTITIONS):
        assert seen[partition] == list(range(load.sent)), "read twice, or not in order"
    assert sorted(final) == [(each, load.sent) for each in range(PARTITIONS)]
    reader = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "g", **QUIET})
    committed = reader.committed([TopicPartition(TOPIC, each) for each in range(PARTITIONS)], timeout=30)
    reader.close()
    assert [each.offset for each in committed] == [load.sent] * PARTITIONS


def phases(cluster: Cluster, broker: int) -> list[tuple[str, str]]:
    return [(move["phase"], move["error"] or "") for move in cluster.moves(broker)]


def elsewhere(cluster: Cluster) -> tuple[int, int]:
    """The broker that leads partition 0, and another one."""
    source = cluster.leader(TOPIC, 0)
    return source, source % 3 + 1


def test_while_the_bucket_is_away_a_partition_stays_where_it_is_and_serves(cluster: Cluster) -> None:
    source, target = elsewhere(cluster)
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        cluster.bucket.failing = True
        cluster.place(TOPIC, 0, target)
        wait_until(lambda: ("uploading", "") in phases(cluster, source), "the move has begun")
        load.more(100)
        assert cluster.leader(TOPIC, 0) == source
        cluster.bucket.failing = False
        wait_until(lambda: cluster.serves(target, TOPIC, 0), "the move ends when the bucket is back")
        load.more()
    load.check(cluster.bootstrap)


def test_a_bucket_that_fails_after_the_close_gives_the_partition_back_to_its_source(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = elsewhere(cluster)
    close = PartitionLog.close_for_move

    async def close_and_fail(self: PartitionLog) -> ClosedLog:
        cluster.bucket.failing = True
        return await close(self)

    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        monkeypatch.setattr(PartitionLog, "close_for_move", close_and_fail)
        cluster.place(TOPIC, 0, target)
        wait_until(lambda: cluster.bucket.failing, "the source has closed the partition")
        monkeypatch.undo()
        wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves again")
        load.more()
        assert cluster.leader(TOPIC, 0) == source
        wait_until(lambda: any("upload" in error for _, error in phases(cluster, source)), "the reason is shown")
        cluster.bucket.failing = False
        wait_until(lambda: cluster.serves(target, TOPIC, 0), "a later attempt succeeds")
        load.more()
    load.check(cluster.bootstrap)


def test_an_upload_that_ends_while_the_source_opens_the_partition_again_loses_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = elsewhere(cluster)
    close, open_streams = PartitionLog.close_for_move, ControllerClient.open_streams
    overtaken: list[int] = []

    async def close_and_fail(self: PartitionLog) -> ClosedLog:
        cluster.bucket.failing = not overtaken
        return await close(self)

    async def late(
        self: ControllerClient, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]
    ) -> list[OpenedStream]:
        answer = await open_streams(self, replica_set_id, master_epoch, streams)
        if cluster.bucket.failing:
            cluster.bucket.failing = False
            await cluster.storage(source).upload_now()
            now = {each.stream_id: self.image.streams[each.stream_id].end_offset for each in answer}
            overtaken.extend(each.stream_id for each in answer if each.end_offset < now[each.stream_id])
        return answer

    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        monkeypatch.setattr(PartitionLog, "close_for_move", close_and_fail)
        monkeypatch.setattr(ControllerClient, "open_streams", late)
        cluster.place(TOPIC, 0, target)
        wait_until(lambda: cluster.serves(target, TOPIC, 0), "a later attempt succeeds")
        load.more()
    load.check(cluster.bootstrap)
    assert overtaken, "the answer of the second opening was not older than the upload"
    assert cluster.storage(source).stats()["quarantined_streams"] == 0


@pytest.mark.parametrize("arrives", [True, False], ids=["took effect", "did not arrive"])
def test_a_hand_over_without_an_answer_is_cleared_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    _, target = elsewhere(cluster)
    asked = threading.Event()
    hand_over = ControllerClient.hand_over

    async def unanswered(
        self: ControllerClient, replica_set_id: int, master_epoch: int, partitions: Sequence[ClosedPartition]
    ) -> list[TidelogError | None]:
        if asked.is_set():
            return await hand_over(self, replica_set_id, master_epoch, partitions)
        if arrives:
            assert await hand_over(self, replica_set_id, master_epoch, partitions) == [None]
        asked.set()
        raise OutcomeUnknown("no answer, on purpose")

    monkeypatch.setattr(ControllerClient, "hand_over", unanswered)
    epoch = cluster.image.leader(cluster.partition(TOPIC, 0))[1]
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        cluster.place(TOPIC, 0, target)
        wait_until(asked.is_set, "the hand-over is sent")
        wait_until(lambda: cluster.serves(target, TOPIC, 0), "the move ends")
        load.more()
    load.check(cluster.bootstrap)
    now = cluster.image.leader(cluster.partition(TOPIC, 0))[1]
    assert now == epoch + 1 if arrives else now > epoch + 1, "a reclaim costs an epoch"


def test_a_cancel_after_the_close_leaves_the_partition_with_its_source(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = elsewhere(cluster)
    close = PartitionLog.close_for_move
    closed, cancelled = threading.Event(), threading.Event()

    async def close_and_wait(self: PartitionLog) -> ClosedLog:
        found = await close(self)
        closed.set()
        while not cancelled.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return found

    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        monkeypatch.setattr(PartitionLog, "close_for_move", close_and_wait)
        cluster.place(TOPIC, 0, target)
        wait_until(closed.is_set, "the source has closed the partition")
        cluster.place(TOPIC, 0, NO_REPLICA_SET)
        cancelled.set()
        wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves again")
        load.more()
        wait_until(lambda: ("cancelled", "") in phases(cluster, source), "the move ended")
    load.check(cluster.bootstrap)
    assert not cluster.serves(target, TOPIC, 0)


def test_the_last_of_several_placements_wins(cluster: Cluster) -> None:
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        wanted = {}
        for number in range(60):
            index = number % PARTITIONS
            wanted[index] = number * 7 % 3 + 1
            cluster.place(TOPIC, index, wanted[index])
        for index, broker in wanted.items():
            wait_until(lambda index=index, broker=broker: cluster.serves(broker, TOPIC, index), "it is where it should")
        load.more()
        assert {index: cluster.leader(TOPIC, index) for index in wanted} == wanted
        assert not cluster.image.moving()
    load.check(cluster.bootstrap)


def test_a_target_that_dies_before_the_hand_over_leaves_the_partition_served(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = elsewhere(cluster)
    close = PartitionLog.close_for_move
    died = threading.Event()

    async def close_and_bury(self: PartitionLog) -> ClosedLog:
        found = await close(self)
        if not died.is_set():
            died.set()
            await cluster.stop_broker(target)
        return found

    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        cluster.move(TOPIC, 1, source)  # what the target leads would stop with it
        cluster.move(TOPIC, 2, source)
        monkeypatch.setattr(PartitionLog, "close_for_move", close_and_bury)
        cluster.place(TOPIC, 0, target)
        wait_until(died.is_set, "the target died")
        wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves again")
        load.more()
        wait_until(lambda: any("not alive" in error for _, error in phases(cluster, source)), "the reason is shown")
        cluster.run(cluster.start_broker(target))
        wait_until(lambda: cluster.serves(target, TOPIC, 0), "the move ends when the target is back")
        load.more()
    load.check(cluster.bootstrap)


def test_what_a_target_reads_does_not_grow_with_the_partition(cluster: Cluster) -> None:
    create_topic(cluster.bootstrap, "long", 1, **{"segment.bytes": "2000"})
    source = cluster.leader("long", 0)
    reads = []
    for rounds in (1, 20):
        for _ in range(rounds):  # each leaves segments in the meta stream, and objects of its own in the bucket
            with Load(cluster.bootstrap, "long", 1) as load:
                load.more(200)
            cluster.run(cluster.storage(source).upload_now())
        target = source % 3 + 1
        before = cluster.bucket.reads
        cluster.move("long", 0, target)
        reads.append(cluster.bucket.reads - before)
        source = target
    assert reads[1] <= reads[0] <= 2


def test_any_broker_takes_a_reassignment_and_all_tell_the_new_leader_at_once(cluster: Cluster) -> None:
    """AlterPartitionReassignments through each broker in turn; then Metadata from all, and what the old leader says."""

    async def reassign(client: KafkaClient, index: int, to: int) -> int:
        make = schema.request(45, 1).make
        partitions = [make("ReassignablePartition", partition_index=index, replicas=[to])]
        topics = [make("ReassignableTopic", name=TOPIC, partitions=partitions)]
        answer = await client.send(45, 1, timeout=10_000, allow_replication_factor_change=False, topics=topics)
        return int(answer.responses[0].partitions[0].error_code)

    async def leaders(client: KafkaClient) -> dict[int, tuple[int, int]]:
        answer = await client.send(
            3, 12, topics=None, allow_auto_topic_creation=False, include_topic_authorized_operations=False
        )
        (topic,) = (topic for topic in answer.topics if topic.name == TOPIC)
        return {each.partition_index: (each.leader_id, each.leader_epoch) for each in topic.partitions}

    async def produce(client: KafkaClient, index: int) -> Any:
        make = schema.request(0, 10).make
        data = make("PartitionProduceData", index=index, records=batch(b"late"))
        topics = [make("TopicProduceData", name=TOPIC, partition_data=[data])]
        return await client.send(0, 10, transactional_id=None, acks=-1, timeout=10_000, topic_data=topics)

    async def work() -> None:
        clients = {broker: KafkaClient(*node.bootstrap) for broker, node in cluster.nodes.items()}
        async with contextlib.AsyncExitStack() as stack:
            for client in clients.values():
                await stack.enter_async_context(client)
            for index, broker in enumerate(clients):
                source = cluster.leader(TOPIC, index)
                target = source % 3 + 1
                assert await reassign(clients[broker], index, target) == 0
                await asyncio.to_thread(wait_until, partial(cluster.serves, target, TOPIC, index), "it has moved")
                told = cluster.image.leader(cluster.partition(TOPIC, index))
                for client in clients.values():
                    async with asyncio.timeout(10):
                        while (await leaders(client))[index] != told:  # noqa: ASYNC110
                            await asyncio.sleep(0.001)
                answer = await produce(clients[source], index)
                refused = answer.responses[0].partition_responses[0]
                assert refused.error_code == 6
                assert (refused.current_leader.leader_id, refused.current_leader.leader_epoch) == told
                (endpoint,) = answer.node_endpoints
                assert (endpoint.node_id, endpoint.host, endpoint.port) == (target, *cluster.nodes[target].bootstrap)
                accepted = await produce(clients[target], index)
                assert accepted.responses[0].partition_responses[0].error_code == 0

    asyncio.run(work())
