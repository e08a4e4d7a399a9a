"""A batch whose predecessor was refused while the partition came here is sent again, not taken for a loss."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fake_storage import FakeClock, FakeWorld, Process
from tidelog.batch.batch import CorruptRecord, Record, build_batch
from tidelog.broker.replication.inputs import NotEnoughReplicas
from tidelog.storage.wal.base import WalFull
from tidelog.stream.admission import EARLIER_BATCH_S
from tidelog.stream.errors import EarlierBatchMissing, OutOfOrderSequence
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import PartitionLog

NOW = 1_700_000_000_000


def batch(sequence: int, *, pid: int = 9, epoch: int = 0) -> memoryview:
    data = build_batch([Record(0, NOW, b"k", b"v")], producer_id=pid, producer_epoch=epoch, base_sequence=sequence)
    return memoryview(bytearray(data))


async def moved(clock: FakeClock) -> PartitionLog:
    """A log that came here with the state of a producer whose last sequence is 2."""
    world = FakeWorld()
    log = await Process(world, clock).open(LogConfig())
    for sequence in range(3):
        log.append(batch(sequence))
    await log.close()
    return await Process(world, clock).open(LogConfig())


def test_the_batches_behind_a_refused_one_are_refused_as_it_was_and_then_taken() -> None:
    async def scenario() -> None:
        log = await moved(FakeClock(NOW))
        for sequence in (4, 5, 6):  # 3 was refused by the owner before
            with pytest.raises(EarlierBatchMissing) as caught:
                log.append(batch(sequence))
            assert caught.value.kafka_code == 6, "NOT_LEADER_OR_FOLLOWER: no client takes that for a loss"
        assert log.log_end_offset == 3
        for sequence in (3, 4, 5, 6):
            log.append(batch(sequence))
        assert log.log_end_offset == 7

    asyncio.run(scenario())


def test_a_new_epoch_of_a_producer_waits_for_its_first_batch_too() -> None:
    async def scenario() -> None:
        log = await moved(FakeClock(NOW))
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(1, epoch=1))
        log.append(batch(0, epoch=1))
        log.append(batch(1, epoch=1))

    asyncio.run(scenario())


def test_batches_behind_one_that_found_no_room_are_refused_as_it_was() -> None:
    async def scenario() -> None:
        clock, world = FakeClock(NOW), FakeWorld()
        process = Process(world, clock)
        log = await process.open(LogConfig())
        log.append(batch(0))
        clock.now_ms += 60_000
        process.storage.refusals.append(WalFull("full"))
        with pytest.raises(WalFull):
            log.append(batch(1))
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(2))
        log.append(batch(1))
        log.append(batch(2))

    asyncio.run(scenario())


def test_batches_behind_one_for_which_too_few_replicas_were_in_sync_are_refused_as_it_was() -> None:
    async def scenario() -> None:
        clock, world = FakeClock(NOW), FakeWorld()
        process = Process(world, clock)
        log = await process.open(LogConfig())
        log.append(batch(0))
        clock.now_ms += 60_000
        process.storage.missing = NotEnoughReplicas("1 replica is in sync")
        with pytest.raises(NotEnoughReplicas):
            log.check_writable()  # for sequence 1
        process.storage.missing = None
        log.check_writable()
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(2))
        log.append(batch(1))
        log.append(batch(2))

    asyncio.run(scenario())


def test_a_gap_is_a_loss_once_the_producer_has_written_here_or_time_has_passed() -> None:
    async def scenario() -> None:
        clock = FakeClock(NOW)
        log = await moved(clock)
        log.append(batch(3))
        with pytest.raises(OutOfOrderSequence):
            log.append(batch(5))
        log = await moved(clock)
        with pytest.raises(OutOfOrderSequence):
            log.append(batch(0x7FFFFFF0))  # far behind, not ahead: sequences wrap
        clock.now_ms += int(EARLIER_BATCH_S * 1000) + 1
        with pytest.raises(OutOfOrderSequence):
            log.append(batch(4))

    asyncio.run(scenario())


def test_the_second_batch_of_a_producer_that_is_new_here_waits_for_its_first() -> None:
    """Were it taken, librdkafka would take the first one for written, and report success."""

    async def scenario() -> None:
        clock, world = FakeClock(NOW), FakeWorld()
        process = Process(world, clock)
        log = await process.open(LogConfig())
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(1))  # 0 came before the log was open
        log.append(batch(0))
        log.append(batch(1))
        clock.now_ms += int(EARLIER_BATCH_S * 1000) + 1
        log.append(batch(7, pid=10))  # one that was forgotten
        process.storage.refusals.append(WalFull("full"))
        with pytest.raises(WalFull):
            log.append(batch(0, pid=11))
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(1, pid=11))
        log.append(batch(0, pid=11))
        log.append(batch(1, pid=11))
        clock.now_ms += int(EARLIER_BATCH_S * 1000) + 1
        log.note_refused()
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(1, pid=12))
        clock.now_ms += int(EARLIER_BATCH_S * 1000) + 1
        damaged = batch(0, pid=13)
        damaged[-1] ^= 1
        with pytest.raises(CorruptRecord):
            log.append(damaged)
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(1, pid=13))

    asyncio.run(scenario())


def test_a_forgotten_producer_goes_on_although_its_batches_find_no_room_at_first() -> None:
    """Each of them waits for room, and is then none that comes behind a refused one."""

    async def scenario() -> None:
        clock, world = FakeClock(NOW), FakeWorld()
        process = Process(world, clock)
        log = await process.open(LogConfig())
        clock.now_ms += int(EARLIER_BATCH_S * 1000) + 1
        process.storage.refusals.append(WalFull("full"))
        with pytest.raises(WalFull):
            log.append(batch(7))
        with pytest.raises(EarlierBatchMissing):
            log.append(batch(8))
        log.append(batch(7))
        log.append(batch(8))
        process.storage.refusals.append(WalFull("full"))
        with pytest.raises(WalFull):
            log.append(batch(0, pid=10))
        log.append(batch(7, pid=11))  # what another producer meets says nothing of it

    asyncio.run(scenario())


def test_the_producers_that_found_no_room_are_bounded_and_all_wait_beyond_that(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("tidelog.stream.admission.MAX_REFUSED", 2)
        clock, world = FakeClock(NOW), FakeWorld()
        process = Process(world, clock)
        log = await process.open(LogConfig())
        for _ in range(2):
            clock.now_ms += int(EARLIER_BATCH_S * 1000) + 1
            for pid in (10, 11):
                process.storage.refusals.append(WalFull("full"))
                with pytest.raises(WalFull):
                    log.append(batch(0, pid=pid))
        log.append(batch(7, pid=20))
        process.storage.refusals.append(WalFull("full"))
        with pytest.raises(WalFull):
            log.append(batch(0, pid=12))
        for pid in (10, 21):
            with pytest.raises(EarlierBatchMissing):
                log.append(batch(7, pid=pid))

    asyncio.run(scenario())
