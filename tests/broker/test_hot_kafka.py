"""What Kafka's clients are told of a replicated WAL across its elections: epochs, their ends, and writes that wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.test_hot_storage import ServingSet, contents, produce, values
from tests.controller.controller_helpers import until
from tests.support.kafka_world import batch
from tests.support.kept_set import SET
from tidelog.broker.kafka.client_telemetry import ClientTelemetry
from tidelog.broker.kafka.election_waits import ElectionWaits
from tidelog.broker.kafka.fetch_sessions import FetchSessions
from tidelog.broker.kafka.handlers import leader_epoch
from tidelog.broker.kafka.handlers import produce as produce_api
from tidelog.broker.kafka.services import RequestContext, Services
from tidelog.broker.kafka.wire.messages.logs import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from tidelog.broker.kafka.wire.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.broker.settings import GroupSettings, KafkaSettings, LogSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.runtime.clock import SystemClock
from tidelog.storage.inputs import takes_every_write
from tidelog.storage.wal.base import WalFailed

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[ServingSet]:
    here = ServingSet(tmp_path)
    await here.begin()
    await here.processes[1].client.create_topic("t", 1, {}, assignment=[SET])
    yield here
    await here.finish()


def context(serving: ServingSet, broker_id: int, api_key: int, version: int) -> RequestContext:
    """A request to this broker."""
    parts: Any = None
    services = Services(
        node_id=broker_id,
        clock=SystemClock(),
        kafka=KafkaSettings(),
        log=LogSettings(),
        group=GroupSettings(),
        controller=serving.processes[broker_id].client,
        partitions=serving.serving[broker_id].partitions,
        groups=parts,
        txn=parts,
        txn_requests=parts,
        marker_writer=parts,
        producer_ids=parts,
        metrics=Metrics(process=False),
        fetch_sessions=FetchSessions(0, random.Random(3)),
        telemetry=ClientTelemetry(1 << 20, random.Random(4), tuple),
        elections=ElectionWaits(lambda: serving.processes[broker_id].client.image, SystemClock(), tuple),
    )
    return RequestContext(services, api_key, version, 7, "test", "127.0.0.1")


async def end_of(serving: ServingSet, epoch: int, *, current: int = -1) -> tuple[int, int, int]:
    """Ask the leader for the end of an epoch: `(error, epoch, end offset)`."""
    asked = OffsetForLeaderPartition(partition=0, current_leader_epoch=current, leader_epoch=epoch)
    request = OffsetForLeaderEpochRequest(topics=(OffsetForLeaderTopic(topic="t", partitions=(asked,)),))
    response = await leader_epoch.handle(context(serving, serving.leader().broker_id, 23, 4), request)
    found = response.topics[0].partitions[0]
    return found.error_code, found.leader_epoch, found.end_offset


async def sent(serving: ServingSet, broker_id: int, value: bytes, acks: int = -1) -> PartitionProduceResponse:
    """Produce one record."""
    return await sent_batch(serving, broker_id, batch(value), acks)


async def sent_batch(serving: ServingSet, broker_id: int, data_bytes: bytes, acks: int) -> PartitionProduceResponse:
    data = PartitionProduceData(0, memoryview(bytearray(data_bytes)))
    request = ProduceRequest(None, acks, 120_000, [TopicProduceData("t", b"", [data])])
    response = await produce_api.handle(context(serving, broker_id, 0, 12), request)
    assert response is not None
    return response.topics[0].partitions[0]


async def test_the_leader_epoch_grows_with_each_election_and_the_ends_of_epochs_stay(serving: ServingSet) -> None:
    ends: dict[int, int] = {}
    for step in range(4):
        log = await serving.partition()
        partition = next(serving.node.image.all_partitions())
        assert serving.node.image.leader(partition) == (serving.leader().broker_id, log.leader_epoch)
        assert all(epoch < log.leader_epoch for epoch in ends)
        await produce(log, values(10 * step, 10))
        ends[log.leader_epoch] = 10 * (step + 1)
        for epoch, end in ends.items():
            assert await end_of(serving, epoch, current=log.leader_epoch) == (0, epoch, end)
            if epoch < log.leader_epoch:
                assert (await end_of(serving, epoch, current=epoch))[0] == 74
        assert (await end_of(serving, log.leader_epoch, current=log.leader_epoch + 1))[0] == 75
        epoch = serving.node.image.replica_sets[SET].master_epoch
        await serving.processes[2].client.replica_sets.begin_election(SET, epoch, f"again {step}")
        await serving.later_than(epoch)
    log = await serving.partition()
    await until(lambda: log.high_watermark == 40)
    assert await contents(log) == values(0, 40)


@pytest.mark.parametrize("wanted", [3, 4])
async def test_acks_all_is_refused_while_too_few_replicas_are_in_sync(serving: ServingSet, wanted: int) -> None:
    """More than the set is to have, which is three, count as that many."""
    log = await serving.partition()
    master = serving.leader().replica.master
    assert master is not None and serving.leader().broker_id == 1
    serving.serving[1].storages.get(SET).check_writable = master.check_writable
    await serving.processes[1].client.alter_topic_configs(log.topic_id, {"min.insync.replicas": str(wanted)})
    await until(lambda: log.config.min_insync_replicas == wanted)
    assert (await sent(serving, 1, b"value-0", acks=-1)).error_code == 0
    await serving.end(3)
    await until(lambda: len(master.configuration.members) == 2)
    refused = await sent(serving, 1, b"never", acks=-1)
    assert refused.error_code == 19
    assert f"the sync-state set has 2 members; min.insync.replicas is {wanted}" in (refused.error_message or "")
    assert (await sent(serving, 1, b"value-1", acks=1)).error_code == 0
    await serving.end(2)  # the set's own rule: its quorum is two
    await serving.processes[1].client.alter_topic_configs(log.topic_id, {"min.insync.replicas": None})
    await until(lambda: log.config.min_insync_replicas == 1 and bool(master.refusal()))
    assert (await sent(serving, 1, b"never", acks=-1)).error_code == 19
    await serving.launch(2)
    await until(lambda: not master.refusal())
    assert (await sent(serving, 1, b"value-2", acks=-1)).error_code == 0
    await until(lambda: log.high_watermark == 3)
    assert await contents(log) == values(0, 3)


async def test_a_write_that_waits_for_its_quorum_is_told_at_once_that_the_term_has_ended(serving: ServingSet) -> None:
    log = await serving.partition()
    await produce(log, values(0, 5))
    for follower in (2, 3):
        await serving.end(follower)
    # as if it had been appended just before the followers were missed
    serving.serving[1].storages.get(SET).check_writable = takes_every_write
    writing = asyncio.create_task(sent(serving, 1, b"value-5"))
    await until(lambda: log.log_end_offset == 6)
    assert not writing.done() and log.high_watermark == 5
    epoch = serving.node.image.replica_sets[SET].master_epoch
    await serving.processes[1].client.replica_sets.begin_election(SET, epoch, "a follower may be elected")
    outcome = await writing
    assert outcome.error_code == 6 and "has ended" in (outcome.error_message or "")
    await serving.launch(2)
    again = await serving.partition()
    await until(lambda: again.high_watermark == 6)
    assert await contents(again) == values(0, 6), "what was refused may be in the log all the same, as in Kafka"


async def test_acks_1_is_answered_by_the_masters_disk_alone_and_nobody_reads_it_before_the_quorum_has_it(
    serving: ServingSet,
) -> None:
    log = await serving.partition()
    await produce(log, values(0, 5))
    for follower in (2, 3):
        await serving.end(follower)
    answer = await asyncio.wait_for(sent(serving, 1, b"value-5", acks=1), 30)
    assert (answer.error_code, answer.base_offset) == (0, 5)
    master = serving.leader().replica.master
    assert master is not None
    assert master.durable.value == serving.leader().wal.end_offset > master.confirm_offset, "it is on its own disk"
    assert log.high_watermark == 5 and await contents(log) == values(0, 5)
    await serving.launch(2)
    await until(lambda: log.high_watermark == 6)
    assert await contents(log) == values(0, 6)


async def test_a_write_of_acks_1_is_told_that_the_wal_has_failed(serving: ServingSet) -> None:
    log = await serving.partition()
    await produce(log, values(0, 5))
    serving.serving[1].hot.wal_failed(WalFailed("the disk is gone"))
    assert (await sent(serving, 1, b"never", acks=1)).error_code != 0
    assert log.high_watermark == 5


async def takes_acks_all(serving: ServingSet) -> None:
    """Wait until enough followers are in sync."""
    master = serving.leader().replica.master
    assert master is not None
    await until(lambda: not master.refusal())


def numbered(sequence: int) -> bytes:
    """The batch of an idempotent producer that has this sequence number."""
    return batch(b"value-%d" % sequence, producer_id=77, producer_epoch=0, base_sequence=sequence)


async def test_what_acks_1_promised_is_lost_with_the_master_and_producer_state_with_it(serving: ServingSet) -> None:
    log = await serving.partition()
    assert (await sent_batch(serving, 1, numbered(0), -1)).error_code == 0
    for follower in (2, 3):
        await serving.end(follower)
    lost = await sent_batch(serving, 1, numbered(1), 1)
    again = await sent_batch(serving, 1, numbered(1), 1)
    assert (lost.error_code, lost.base_offset) == (again.error_code, again.base_offset) == (0, 1), "a retry finds it"
    assert log.log_end_offset == 2
    await serving.end(1)
    for follower in (2, 3):
        await serving.launch(follower)
    log = await serving.partition()
    master = serving.leader().broker_id
    assert master in (2, 3) and log.log_end_offset == 1
    await takes_acks_all(serving)
    gap = await sent_batch(serving, master, numbered(2), -1)
    assert gap.error_code in (6, 45), "the new master never had number 1 (OUT_OF_ORDER_SEQUENCE_NUMBER; first: retry)"
    assert log.log_end_offset == 1
    await serving.launch(1)
    await serving.settled()  # its own tail is cut
    for sequence in (1, 2, 2):
        answer = await sent_batch(serving, master, numbered(sequence), -1)
        assert (answer.error_code, answer.base_offset) == (0, sequence)
    epoch = serving.node.image.replica_sets[SET].master_epoch
    await serving.same()
    await serving.processes[2].client.replica_sets.begin_election(SET, epoch, "again", designated=1)
    await serving.later_than(epoch)
    log = await serving.partition()
    assert serving.leader().broker_id == 1
    await until(lambda: log.high_watermark == 3)
    await takes_acks_all(serving)
    answer = await sent_batch(serving, 1, numbered(2), -1)
    assert (answer.error_code, answer.base_offset) == (0, 2), "and it knows what came in its place"
    assert await contents(log) == values(0, 3)
