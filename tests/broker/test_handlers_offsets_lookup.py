"""ListOffsets, OffsetForLeaderEpoch and InitProducerId over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest

from tests.broker.test_handlers_fetch import fetch_request
from tests.support import schema
from tests.support.fake_storage import FakeClock, FakeWorld, Process
from tests.support.guarded import append_guarded
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.kafka_world import APIS, KafkaWorld, batch, until
from tidelog.batch.batch import Compression, Record, build_batch
from tidelog.broker.kafka.handlers import delete_records
from tidelog.broker.kafka.producer_ids import ProducerIds
from tidelog.controller.model.levels import TRANSACTIONS_LEVEL
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Unavailable
from tidelog.stream import partition_log

LIST_OFFSETS, DELETE_RECORDS, INIT_PRODUCER_ID, LEADER_EPOCH = 2, 21, 22, 23


async def appended(world: KafkaWorld, *batches: bytes) -> None:
    log = world.log("t")
    for one in batches:
        log.append_internal(one)
    await until(lambda: log.high_watermark == log.log_end_offset, "confirmation")


# --- ListOffsets ---------------------------------------------------------------------------------------------------


async def list_offsets(
    client: KafkaClient,
    version: int,
    *timestamps: int,
    topic: str = "t",
    partitions: list[int] | None = None,
    **fields: Any,
) -> list[tuple[int, int, int]]:
    """`(error, offset, timestamp)` for each timestamp, of one partition each (default: 0, one request each)."""
    make = schema.request(LIST_OFFSETS, version).make
    found = []
    epoch = {"current_leader_epoch": fields.pop("epoch", -1)} if version >= 4 else {}
    if version >= 2:
        fields.setdefault("isolation_level", 0)
    if version >= 10:
        fields.setdefault("timeout", 1000)
    for timestamp in timestamps:
        asked = [
            make("ListOffsetsPartition", partition_index=index, timestamp=timestamp, **epoch)
            for index in partitions or [0]
        ]
        topics = [make("ListOffsetsTopic", name=topic, partitions=asked)]
        client.post(request_entity(LIST_OFFSETS, version, replica_id=-1, topics=topics, **fields))
        response = await client.receive()
        found += [(p.error_code, p.offset, p.timestamp) for p in response.topics[0].partitions]
    return found


@pytest.mark.parametrize("version", range(1, 12))
async def test_every_version_finds_special_offsets_and_timestamps(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, *[batch(b"a", b"b", timestamp=1000 * n) for n in (1, 3, 2)])
        await world.log("t").delete_records(2)
        assert await list_offsets(client, version, -1, -2) == [(0, 6, -1), (0, 2, -1)]
        assert await list_offsets(client, version, 0, 2001, 3001, 9999) == [
            (0, 2, 3000),
            (0, 2, 3000),
            (0, 3, 3001),
            (0, -1, -1),
        ]
        expected = {
            -3: (0, 3, 3001) if version >= 7 else (35, -1, -1),
            -4: (0, 2, -1) if version >= 8 else (35, -1, -1),
            -5: (0, -1, -1) if version >= 9 else (35, -1, -1),
            -6: (0, -1, -1) if version >= 11 else (35, -1, -1),
            -7: (35, -1, -1),
        }
        assert await list_offsets(client, version, *expected) == list(expected.values())


async def test_the_leader_epoch_of_an_offset_is_told_from_version_4() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t")
        await appended(world, batch(b"a", timestamp=1000))
        first = world.log("t").leader_epoch
        await world.log("t").close()
        await world.open(topic, 0, leader_epoch=first + 3)
        make = schema.request(LIST_OFFSETS, 4).make
        for timestamp, epoch in ((-2, first), (500, first), (-1, first + 3)):
            partition = make(
                "ListOffsetsPartition", partition_index=0, timestamp=timestamp, current_leader_epoch=first + 3
            )
            topics = [make("ListOffsetsTopic", name="t", partitions=[partition])]
            response = await client.send(LIST_OFFSETS, 4, replica_id=-1, isolation_level=0, topics=topics)
            assert response.topics[0].partitions[0].leader_epoch == epoch


async def test_latest_is_the_last_stable_offset_for_a_committed_reader() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        open_transaction = batch(b"x", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
        append_guarded(world.log("t"), batch(b"a"))
        append_guarded(world.log("t"), open_transaction)
        await until(lambda: world.log("t").high_watermark == 2, "confirmation")
        assert await list_offsets(client, 5, -1, isolation_level=1) == [(0, 1, -1)]
        assert await list_offsets(client, 5, -1) == [(0, 2, -1)]


async def test_what_is_not_confirmed_is_not_listed() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.hold()
        world.log("t").append_internal(batch(b"a", timestamp=1000))
        assert await list_offsets(client, 5, -1, 0) == [(0, 0, -1), (0, -1, -1)]


class NewMaster:
    """A partition whose next master knows of less that is confirmed than the one before did (KIP-207)."""

    def __init__(self, world: KafkaWorld) -> None:
        self._world = world
        self._clock = FakeClock(SystemClock().time_ms())
        self.process = Process(FakeWorld(), self._clock, auto_confirm=False)

    async def __aenter__(self) -> Self:
        topic = await self._world.topic("t")
        log = await self.process.open()
        for index, timestamp in enumerate((1000, 3000, 2000)):
            log.append_internal(batch(b"a", timestamp=timestamp))
            if index == 0:
                self.process.storage.confirm_all()
        self.process = Process(self.process.world, self._clock, auto_confirm=False)
        self._world.partitions.logs[topic.id, 0] = await self.process.open()
        return self

    def confirm(self) -> None:
        self.process.storage.confirm_all()

    async def __aexit__(self, *_: object) -> None:
        self.confirm()
        self.process.storage.auto_confirm = True  # for the checkpoint of the close


@pytest.mark.parametrize("version", [1, 4, 5, 10])
async def test_the_end_is_not_told_before_a_new_master_has_confirmed_what_it_inherited(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_log, "CONFIRM_WAIT_S", 0.05)
    async with KafkaWorld() as world, world.client() as client, NewMaster(world):
        assert world.log("t").high_watermark == 1
        not_available = (78 if version >= 5 else 5, -1, -1)
        for isolation in (0, 1) if version >= 2 else (0,):
            level: dict[str, Any] = {"isolation_level": isolation} if version >= 2 else {}
            assert await list_offsets(client, version, -1, 2500, **level) == [not_available] * 2
            assert await list_offsets(client, version, -2, 500, **level) == [(0, 0, -1), (0, 0, 1000)]
        if version >= 7:
            assert await list_offsets(client, version, -3) == [not_available]


async def test_the_end_is_told_as_soon_as_what_a_new_master_inherited_is_confirmed() -> None:
    async with KafkaWorld() as world, world.client() as client, NewMaster(world) as master:
        asking = asyncio.create_task(list_offsets(client, 7, -1, 2500, -3))
        await asyncio.sleep(0.05)
        assert not asking.done()
        master.confirm()
        assert await asking == [(0, 3, -1), (0, 1, 3000), (0, 1, 3000)]
        world.log("t").append_internal(batch(b"a", timestamp=9000))
        assert await list_offsets(client, 7, -1, 9000) == [(0, 3, -1), (0, -1, -1)], "not what this master appends"


async def test_records_are_deleted_up_to_the_end_that_the_leader_before_may_have_told() -> None:
    async with (
        KafkaWorld(apis=[*APIS, *delete_records.APIS]) as world,
        world.client() as client,
        NewMaster(world) as master,
    ):
        make = schema.request(DELETE_RECORDS, 2).make
        partition = make("DeleteRecordsPartition", partition_index=0, offset=-1)
        topics = [make("DeleteRecordsTopic", name="t", partitions=[partition])]
        asking = asyncio.create_task(client.send(DELETE_RECORDS, 2, topics=topics, timeout=20_000))
        await asyncio.sleep(0.05)
        master.process.storage.auto_confirm = True
        master.confirm()
        answer = (await asking).topics[0].partitions[0]
        assert (answer.error_code, answer.low_watermark) == (0, 3)


async def test_no_log_start_is_told_before_a_new_master_has_confirmed_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader before had told that of DeleteRecords (simulated seeds 770013, 2026112603598)."""
    monkeypatch.setattr(partition_log, "CONFIRM_WAIT_S", 0.05)
    async with KafkaWorld(apis=[*APIS, *delete_records.APIS]) as world, world.client() as client:
        topic = await world.topic("t")
        clock = FakeClock(SystemClock().time_ms())
        old = Process(FakeWorld(), clock, auto_confirm=False)
        log = await old.open()
        for _ in range(3):
            log.append_internal(batch(b"a"))
        old.storage.confirm_all()
        before = len(old.world.wal)
        deleting = asyncio.create_task(log.delete_records(2))
        await until(lambda: len(old.world.wal) > before, "the record is appended")
        deleting.cancel()
        new = Process(old.world, clock, auto_confirm=False)
        log = world.partitions.logs[topic.id, 0] = await new.open()
        assert (log.high_watermark, log.log_start_offset) == (3, 0)

        async def told() -> tuple[int, int]:
            client.post(fetch_request(11, {"t": {0: 3}}))
            (found,) = (await client.receive()).responses[0].partitions
            client.post(fetch_request(11, {"t": {0: 2}}))  # of one partition, from memory
            (same,) = (await client.receive()).responses[0].partitions
            assert found.log_start_offset == same.log_start_offset
            return found.log_start_offset, log.append_internal(batch(b"a")).log_start_offset

        async def deleted(before: int) -> tuple[int, int]:
            make = schema.request(DELETE_RECORDS, 2).make
            partition = make("DeleteRecordsPartition", partition_index=0, offset=before)
            topics = [make("DeleteRecordsTopic", name="t", partitions=[partition])]
            answer = (await client.send(DELETE_RECORDS, 2, topics=topics, timeout=20_000)).topics[0].partitions[0]
            return answer.error_code, answer.low_watermark

        try:
            assert await told() == (-1, -1)
            assert await list_offsets(client, 5, -2) == [(78, -1, -1)]
            assert await deleted(0) == (78, -1), "nothing is to be deleted, and where the log starts is not known"
        finally:
            new.storage.confirm_all()
            new.storage.auto_confirm = True  # also for the checkpoint of the close
        assert await told() == (2, 2)
        assert await list_offsets(client, 5, -2) == [(0, 2, -1)]
        assert await deleted(0) == (0, 2)


async def test_the_largest_timestamp_of_what_is_confirmed_is_told_while_more_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition_log, "CONFIRM_WAIT_S", 0.05)
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        await appended(world, batch(b"a", timestamp=1000))
        world.hold()
        world.log("t").append_internal(batch(b"b", timestamp=2000))
        async with asyncio.timeout(20):
            assert await list_offsets(client, 7, -3) == [(0, 0, 1000)]
        world.release()
        assert await list_offsets(client, 7, -3) == [(0, 1, 2000)]


async def test_list_offsets_errors_are_per_partition() -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        await world.topic("t", 2)
        await world.controller.create_topic("u", 1, {}, assignment=[2])
        assert await list_offsets(client, 5, -1, partitions=[0, 9]) == [(0, 0, -1), (3, -1, -1)]
        assert await list_offsets(client, 5, -1, partitions=[0, 1, 0]) == [(42, -1, -1), (0, 0, -1), (42, -1, -1)]
        assert await list_offsets(client, 5, -1, topic="missing") == [(3, -1, -1)]
        assert await list_offsets(client, 5, -1, topic="u") == [(6, -1, -1)]
        epoch = world.log("t").leader_epoch
        assert await list_offsets(client, 5, -1, epoch=epoch - 1) == [(74, -1, -1)]
        assert await list_offsets(client, 5, -1, epoch=epoch + 1) == [(75, -1, -1)]


# --- OffsetForLeaderEpoch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(2, 5))
async def test_the_end_of_an_epoch_is_found(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t")
        await appended(world, batch(b"a", b"b"))
        first = world.log("t").leader_epoch
        await world.log("t").close()
        await world.open(topic, 0, leader_epoch=first + 3)
        await appended(world, batch(b"c"))
        make = schema.request(LEADER_EPOCH, version).make

        async def ask(epoch: int, current: int = -1, name: str = "t") -> tuple[int, int, int]:
            wanted = make("OffsetForLeaderPartition", partition=0, current_leader_epoch=current, leader_epoch=epoch)
            topics = [make("OffsetForLeaderTopic", topic=name, partitions=[wanted])]
            fields = {"replica_id": -1} if version >= 3 else {}
            (found,) = (await client.send(LEADER_EPOCH, version, topics=topics, **fields)).topics[0].partitions
            return found.error_code, found.leader_epoch, found.end_offset

        assert await ask(first) == (0, first, 2)
        assert await ask(first + 2) == (0, first, 2)
        assert await ask(first + 3) == (0, first + 3, 3)
        assert await ask(first + 4) == (0, -1, -1)
        assert await ask(first, current=first) == (74, -1, -1)
        assert await ask(first, current=first + 9) == (75, -1, -1)
        assert await ask(first, name="missing") == (3, -1, -1)


# --- InitProducerId ------------------------------------------------------------------------------------------------


async def init_producer_id(client: KafkaClient, version: int, transactional_id: str | None = None) -> Any:
    known = {"producer_id": 77, "producer_epoch": 3} if version >= 3 else {}
    return await client.send(
        INIT_PRODUCER_ID, version, transactional_id=transactional_id, transaction_timeout=1000, **known
    )


@pytest.mark.parametrize("version", range(6))
async def test_every_producer_gets_an_id_of_its_own(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        answers = [await init_producer_id(client, version) for _ in range(3)]
        assert {(answer.error_code, answer.producer_epoch) for answer in answers} == {(0, 0)}
        assert len({answer.producer_id for answer in answers}) == 3


async def test_transactional_ids_are_refused_below_their_feature_level() -> None:
    async with KafkaWorld(level=TRANSACTIONS_LEVEL - 1) as world, world.client() as client:
        refused = await init_producer_id(client, 4, "tx")
        assert (refused.error_code, refused.producer_id, refused.producer_epoch) == (35, -1, -1)


async def test_without_a_controller_a_producer_is_told_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    async with KafkaWorld() as world, world.client() as client:

        async def away(*args: Any) -> Any:
            raise Unavailable("the controller does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(world.controller, "allocate_producer_ids", away)
            assert (await init_producer_id(client, 4)).error_code == 14
        assert (await init_producer_id(client, 4)).error_code == 0


class Blocks:
    """A controller that gives blocks of ten, when it is let."""

    def __init__(self) -> None:
        self.given = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing = False

    async def allocate_producer_ids(self, broker_id: int, registration_epoch: int) -> tuple[int, int]:
        assert (broker_id, registration_epoch) == (4, 9)
        await self.gate.wait()
        if self.failing:
            raise Unavailable("away")
        self.given += 1
        return self.given * 1000, 10


async def test_producer_ids_are_never_given_twice() -> None:
    blocks = Blocks()
    ids = ProducerIds(blocks, 4, lambda: 9)
    given = await asyncio.gather(*(ids.next_id() for _ in range(95)))
    assert len(set(given)) == 95 and all(value >= 1000 for value in given)
    assert blocks.given <= 11
    await ids.close()


async def test_the_next_block_is_fetched_before_the_last_one_is_empty() -> None:
    blocks = Blocks()
    ids = ProducerIds(blocks, 4, lambda: 9)
    for _ in range(8):
        await ids.next_id()
    await until(lambda: blocks.given == 2, "prefetch")
    blocks.gate.clear()  # the controller hangs: two more of the first block and ten of the second are there
    async with asyncio.timeout(30):
        for _ in range(12):
            await ids.next_id()
    await ids.close()


async def test_a_failed_prefetch_is_tried_again_by_whoever_needs_it() -> None:
    blocks = Blocks()
    ids = ProducerIds(blocks, 4, lambda: 9)
    await ids.next_id()
    blocks.failing = True
    for _ in range(9):
        await ids.next_id()
    with pytest.raises(Unavailable):
        await ids.next_id()
    blocks.failing = False
    assert await ids.next_id() == 2000
    await ids.close()


async def test_a_batch_that_decompresses_to_too_much_is_found_as_a_whole() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        bomb = bytes(build_batch([Record(0, 5000, None, bytes(100 << 20), ())], compression=Compression.GZIP))
        assert len(bomb) < 1 << 20
        await appended(world, batch(b"before", timestamp=1000), bomb, batch(b"after", timestamp=9000))
        assert await list_offsets(client, 7, 3000, 9000) == [(0, 1, 5000), (0, 2, 9000)]
