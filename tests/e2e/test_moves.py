"""Partitions move between brokers while real clients produce and consume: nothing lost, doubled or reordered."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.support import schema
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.held import Held
from tests.support.kafka_client import KafkaClient
from tests.support.kafka_world import batch
from tests.support.load import Load
from tidelog.broker.settings import LogSettings
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.commands import ClosedPartition, PartitionMove
from tidelog.controller.model.errors import NoReassignmentInProgress, OutcomeUnknown
from tidelog.controller.model.records import NO_REPLICA_SET
from tidelog.runtime.errors import TidelogError
from tidelog.storage.storage import Storage
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_close import ClosedLog
from tidelog.stream.partition_log import PartitionLog

PARTITIONS = 3
TOPIC = "moved"
MANY = 24


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


@pytest.mark.gate_cases("True")
@pytest.mark.parametrize("hinted", [True, False])
async def test_a_partition_is_after_a_move_what_it_was_before(cluster: Cluster, hinted: bool) -> None:
    """Offsets, timestamps, leader epochs, producers' sequences, and what retention goes by; also over two moves."""
    create_topic(cluster.bootstrap, "kept", 1, **{"segment.bytes": "4000", "retention.ms": "-1"})
    if not hinted:
        for node in cluster.nodes.values():
            node.parts.partitions.hints.take = lambda params: None  # type: ignore[method-assign]
    first_ms = 1_700_000_000_000
    producer = 77

    def numbered(sequence: int) -> bytes:
        return batch(
            b"%04d" % sequence + bytes(400),
            timestamp=first_ms + sequence,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=sequence,
        )

    async def produce(client: KafkaClient, sequence: int) -> tuple[int, int]:
        make = schema.request(0, 10).make
        data = make("PartitionProduceData", index=0, records=numbered(sequence))
        topics = [make("TopicProduceData", name="kept", partition_data=[data])]
        answer = await client.send(0, 10, transactional_id=None, acks=-1, timeout=10_000, topic_data=topics)
        found = answer.responses[0].partition_responses[0]
        return int(found.error_code), int(found.base_offset)

    async def facts(client: KafkaClient, epochs: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        make = schema.request(2, 7).make
        for stamp in (-2, -1, -3, first_ms + 13):
            one = make("ListOffsetsPartition", partition_index=0, current_leader_epoch=-1, timestamp=stamp)
            topics = [make("ListOffsetsTopic", name="kept", partitions=[one])]
            answer = await client.send(2, 7, replica_id=-1, isolation_level=0, topics=topics)
            row = answer.topics[0].partitions[0]
            assert row.error_code == 0
            epoch = row.leader_epoch if stamp != -1 else None  # of the end it is the new leader's, as in Kafka
            found.append((stamp, row.offset, row.timestamp, epoch))
        make = schema.request(23, 4).make
        for each in epochs:
            asked = make("OffsetForLeaderPartition", partition=0, current_leader_epoch=-1, leader_epoch=each)
            answer = await client.send(
                23, 4, replica_id=-1, topics=[make("OffsetForLeaderTopic", topic="kept", partitions=[asked])]
            )
            row = answer.topics[0].partitions[0]
            found.append((each, row.leader_epoch, row.end_offset))
        return found

    async def client_of(stack: contextlib.AsyncExitStack, broker: int) -> KafkaClient:
        return await stack.enter_async_context(KafkaClient(*cluster.nodes[broker].bootstrap))

    async with contextlib.AsyncExitStack() as stack:
        epochs: list[int] = []
        sequence = 0
        for number in range(3):
            leader = cluster.leader("kept", 0)
            client = await client_of(stack, leader)
            for _ in range(20):
                assert await produce(client, sequence) == (0, sequence)
                sequence += 1
            epochs.append(cluster.image.leader(cluster.partition("kept", 0))[1])
            if number == 0:
                make = schema.request(21, 2).make
                one = make("DeleteRecordsPartition", partition_index=0, offset=5)
                topics = [make("DeleteRecordsTopic", name="kept", partitions=[one])]
                await client.send(21, 2, topics=topics, timeout=10_000)
            before = await facts(client, epochs)
            target = leader % 3 + 1
            await asyncio.to_thread(cluster.move, "kept", 0, target)
            client = await client_of(stack, target)
            assert await facts(client, epochs) == before
            assert before[0][1] == 5 and before[1][1] == sequence and before[3][1] == 13
            assert await produce(client, sequence - 3) == (0, sequence - 3)  # sent again: known by its sequence
            assert (await produce(client, sequence + 1))[0] == 6  # a gap: refused as the batch before it was
        assert epochs == sorted(set(epochs))
    partitions = cluster.nodes[cluster.leader("kept", 0)].parts.partitions.manager
    kept = partitions.get("kept", 0)
    kept.config = msgspec.structs.replace(kept.config, retention_bytes=10_000)
    start = cluster.run(kept.apply_retention())
    assert 30 < start < 40 and cluster.run(kept.apply_retention()) == start  # segments of all three owners are known


def phases(cluster: Cluster, broker: int) -> list[tuple[str, str]]:
    return [(move["phase"], move["error"] or "") for move in cluster.moves(broker)]


@pytest.mark.long
def test_while_the_bucket_is_away_a_partition_stays_where_it_is_and_serves(cluster: Cluster) -> None:
    source, target = cluster.elsewhere(TOPIC)
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
    source, target = cluster.elsewhere(TOPIC)
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


@pytest.mark.long
def test_an_upload_that_ends_while_the_source_opens_the_partition_again_loses_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cluster.elsewhere(TOPIC)
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


@pytest.mark.gate_cases("took effect")
@pytest.mark.parametrize("arrives", [True, False], ids=["took effect", "did not arrive"])
def test_a_hand_over_without_an_answer_is_cleared_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    _, target = cluster.elsewhere(TOPIC)
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


def place_all(cluster: Cluster, topic: str, to: dict[int, int]) -> None:
    """Commit placements of many partitions by one command."""
    topic_id = cluster.image.topic_ids[topic]
    moves = [PartitionMove(topic_id, index, broker) for index, broker in to.items()]
    client = next(iter(cluster.nodes.values())).controller
    assert cluster.run(client.move_partitions(moves)) == [None] * len(moves)


def arrived(cluster: Cluster, topic: str, to: dict[int, int]) -> bool:
    """Whether every partition is served where it was sent."""
    return all(cluster.serves(broker, topic, index) for index, broker in to.items())


@pytest.mark.long
def test_partitions_that_leave_together_ask_together_and_each_arrives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[int] = []
    hand_over = ControllerClient.hand_over

    async def counted(
        self: ControllerClient, replica_set_id: int, master_epoch: int, partitions: Sequence[ClosedPartition]
    ) -> list[TidelogError | None]:
        commands.append(len(partitions))
        return await hand_over(self, replica_set_id, master_epoch, partitions)

    monkeypatch.setattr(ControllerClient, "hand_over", counted)
    create_topic(cluster.bootstrap, "many", MANY)
    with Load(cluster.bootstrap, "many", MANY) as load:
        load.more()
        for turn in (1, 2):  # all to one broker, then evenly over the others
            source = cluster.leader("many", 0)
            to = {each: source if turn == 1 else (source + each % 2) % 3 + 1 for each in range(MANY)}
            to = {each: broker for each, broker in to.items() if cluster.leader("many", each) != broker}
            place_all(cluster, "many", to)
            wait_until(partial(arrived, cluster, "many", to), "all have moved")
            load.more()
    load.check(cluster.bootstrap)
    done = sum(move["phase"] == "done" for broker in cluster.nodes for move in cluster.moves(broker))
    assert done >= MANY, "most of the first turn, all of the second"
    assert len(commands) <= done // 2, commands


@pytest.mark.long
@pytest.mark.parametrize("arrives", [True, False])
def test_a_hand_over_of_many_without_an_answer_leaves_each_with_one_owner(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    lost: list[int] = []
    hand_over = ControllerClient.hand_over

    async def unanswered(
        self: ControllerClient, replica_set_id: int, master_epoch: int, partitions: Sequence[ClosedPartition]
    ) -> list[TidelogError | None]:
        if len(lost) >= 3 or len(partitions) == 1:
            return await hand_over(self, replica_set_id, master_epoch, partitions)
        lost.append(len(partitions))
        if arrives:
            await hand_over(self, replica_set_id, master_epoch, partitions)
        raise OutcomeUnknown("no answer, on purpose")

    monkeypatch.setattr(ControllerClient, "hand_over", unanswered)
    create_topic(cluster.bootstrap, "many", MANY)
    with Load(cluster.bootstrap, "many", MANY) as load:
        load.more()
        to = {each: cluster.leader("many", each) % 3 + 1 for each in range(MANY)}
        place_all(cluster, "many", to)
        wait_until(partial(arrived, cluster, "many", to), "all have moved")
        load.more()
        assert {each: cluster.leader("many", each) for each in to} == to
        assert not cluster.image.moving()
    assert lost, "some left together"
    load.check(cluster.bootstrap)


def test_a_cancel_after_the_close_leaves_the_partition_with_its_source(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cluster.elsewhere(TOPIC)
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        close = Held(monkeypatch, PartitionLog, "close_for_move", after=True)
        cluster.place(TOPIC, 0, target)
        wait_until(close.reached.is_set, "the source has closed the partition")
        cluster.place(TOPIC, 0, NO_REPLICA_SET)
        close.go_on.set()
        wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves again")
        load.more()
        wait_until(lambda: ("cancelled", "") in phases(cluster, source), "the move ended")
    load.check(cluster.bootstrap)
    assert not cluster.serves(target, TOPIC, 0)


@pytest.mark.long
def test_the_last_of_several_placements_wins(cluster: Cluster) -> None:
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        wanted = {}
        for number in range(60):
            index = number % PARTITIONS
            wanted[index] = number * 7 % 3 + 1
            cluster.place(TOPIC, index, wanted[index])
        for index, broker in wanted.items():
            wait_until(partial(cluster.serves, broker, TOPIC, index), "it is where it should")
        load.more()
        assert {index: cluster.leader(TOPIC, index) for index in wanted} == wanted
        assert not cluster.image.moving()
    load.check(cluster.bootstrap)


@pytest.mark.long
def test_a_target_that_dies_before_the_hand_over_leaves_the_partition_served(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cluster.elsewhere(TOPIC)
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


@pytest.mark.long
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


async def test_any_broker_takes_a_reassignment_and_all_tell_the_new_leader_at_once(cluster: Cluster) -> None:
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
                async with asyncio.timeout(60):
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


@pytest.mark.gate_cases("draining")
@pytest.mark.parametrize("step", ["uploading", "draining", "handing over", "done"])
def test_a_cancel_leaves_the_partition_with_its_source_unless_it_comes_too_late(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    source, target = cluster.elsewhere(TOPIC)
    held: Held | None = None
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        if step == "uploading":
            cluster.bucket.failing = True
        elif step == "draining":
            held = Held(monkeypatch, Storage, "send_now")
        elif step == "handing over":
            held = Held(monkeypatch, ControllerClient, "hand_over")
        cluster.place(TOPIC, 0, target)
        if step == "done":
            wait_until(lambda: cluster.serves(target, TOPIC, 0), "it has moved")
            with pytest.raises(NoReassignmentInProgress):
                cluster.place(TOPIC, 0, NO_REPLICA_SET)
            load.more()
        else:
            reached = held.reached.is_set if held is not None else lambda: (step, "") in phases(cluster, source)
            wait_until(reached, "the step is reached")
            cluster.place(TOPIC, 0, NO_REPLICA_SET)
            if held is not None:
                held.go_on.set()
            cluster.bucket.failing = False
            wait_until(lambda: ("cancelled", "") in phases(cluster, source), "the move ended")
            wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves")
            load.more()
            assert not cluster.serves(target, TOPIC, 0)
    load.check(cluster.bootstrap)
    assert not cluster.image.moving()


@pytest.mark.long
def test_a_bucket_that_takes_seconds_for_a_put_gives_the_partition_back_and_says_why(cluster: Cluster) -> None:
    source, target = cluster.elsewhere(TOPIC)
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        cluster.bucket.delay_s = 1.5  # longer than `move_drain_timeout_ms`
        cluster.place(TOPIC, 0, target)
        wait_until(lambda: any("after the close" in error for _, error in phases(cluster, source)), "it is shown", 60)
        wait_until(lambda: cluster.serves(source, TOPIC, 0), "the source serves again")
        load.more()
        cluster.bucket.delay_s = 0.4  # slow, but within it
        wait_until(lambda: cluster.serves(target, TOPIC, 0), "the move ends", 60)
        cluster.bucket.delay_s = 0.0
        load.more()
    load.check(cluster.bootstrap)


@pytest.mark.long
def test_a_target_that_dies_between_the_opening_of_the_streams_and_its_first_append(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cluster.elsewhere(TOPIC)
    opened, open_streams = threading.Event(), ControllerClient.open_streams

    async def open_and_hang(
        self: ControllerClient, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]
    ) -> list[OpenedStream]:
        answer = await open_streams(self, replica_set_id, master_epoch, streams)
        opened.set()
        await asyncio.Event().wait()
        return answer

    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        for index in (1, 2):  # what the target leads would stop with it
            cluster.move(TOPIC, index, source)
        monkeypatch.setattr(ControllerClient, "open_streams", open_and_hang)
        cluster.place(TOPIC, 0, target)
        wait_until(opened.is_set, "the controller has opened the streams for the target")
        cluster.run(cluster.stop_broker(target))
        monkeypatch.undo()
        assert cluster.partition(TOPIC, 0).replica_set == target
        assert not cluster.serves(source, TOPIC, 0), "one owner, and it is not the source any more"
        cluster.run(cluster.start_broker(target))
        wait_until(lambda: cluster.serves(target, TOPIC, 0), "the target serves when it is back")
        load.more()
    load.check(cluster.bootstrap)
