"""A new master's partitions: what an earlier one appended is kept, and shown once it is confirmed."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fake_storage import FakeClock, FakeWorld, Process
from tests.support.guarded import append_guarded
from tests.support.kafka_world import until
from tidelog.batch.batch import Record, build_batch
from tidelog.stream.errors import OffsetOutOfRange
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import PartitionLog

NOW = 1_700_000_000_000


def batch(sequence: int, *, pid: int = 9, txn: bool = False) -> memoryview:
    records = [Record(0, NOW, b"k", b"v")]
    data = build_batch(records, producer_id=pid, producer_epoch=0, base_sequence=sequence, transactional=txn)
    return memoryview(bytearray(data))


class Replicas:
    """A partition whose master dies, and the next one, which has all its bytes and knows less of what is confirmed."""

    def __init__(self) -> None:
        self.clock = FakeClock(NOW)
        self.world = FakeWorld()

    async def master(self, config: LogConfig | None = None) -> tuple[Process, PartitionLog]:
        process = Process(self.world, self.clock, auto_confirm=False)
        return process, await process.open(config)


async def until_waiting(moving: asyncio.Task[int], process: Process) -> asyncio.Task[int]:
    """Return when the record that moves the log start was appended."""
    before = len(process.world.wal)
    await until(lambda: len(process.world.wal) > before, "the record is appended")
    return moving


async def test_the_tail_of_an_earlier_master_is_served_once_it_is_confirmed() -> None:
    replicas = Replicas()
    process, log = await replicas.master()
    for sequence in range(2):
        log.append(batch(sequence))
    process.storage.confirm_all()
    for sequence in range(2, 5):
        log.append(batch(sequence))

    process, log = await replicas.master()
    assert (log.high_watermark, log.log_end_offset) == (2, 5)
    assert len((await log.read(0, 1 << 20, committed=False)).records) == 2
    assert (await log.read(2, 1 << 20, committed=False)).records == []
    told: list[int] = []
    log.add_watermark_listener(lambda: told.append(log.high_watermark))
    again = log.append(batch(4))
    assert again.duplicate
    acked: list[str] = []
    log.when_acked(again.wal_end, lambda: acked.append("4"))
    new = log.append(batch(5))
    assert (new.base_offset, acked) == (5, [])
    process.storage.confirm_to(new.wal_end - 1)
    assert (log.high_watermark, acked) == (5, ["4"])
    assert told
    process.storage.confirm_all()
    assert log.high_watermark == 6
    assert log.append(batch(1)).wal_end == 0, "a confirmed one need not be waited for"


async def test_a_tail_that_is_confirmed_in_parts_is_shown_in_parts() -> None:
    replicas = Replicas()
    _, log = await replicas.master()
    ends = [log.append(batch(sequence)).wal_end for sequence in range(3)]
    process, log = await replicas.master()
    assert log.high_watermark == 0
    for offset, end in enumerate(ends, start=1):
        process.storage.confirm_to(end)
        assert log.high_watermark == offset


async def test_a_tail_outlives_several_masters_that_confirm_nothing() -> None:
    replicas = Replicas()
    for sequence in range(4):
        process, log = await replicas.master()
        assert (log.high_watermark, log.log_end_offset) == (0, sequence)
        assert log.append(batch(sequence)).base_offset == sequence
    process.storage.confirm_all()
    assert log.high_watermark == 4


async def test_a_log_start_that_is_not_confirmed_is_not_shown() -> None:
    replicas = Replicas()
    process, log = await replicas.master()
    for sequence in range(4):
        log.append(batch(sequence))
    process.storage.confirm_all()
    await until_waiting(asyncio.create_task(log.delete_records(1)), process)
    process.storage.confirm_all()
    assert log.log_start_offset == 1
    moving = await until_waiting(asyncio.create_task(log.delete_records(3)), process)
    assert log.log_start_offset == 1
    moving.cancel()

    process, log = await replicas.master()
    assert log.log_start_offset == 1
    assert log.high_watermark == 4
    assert len((await log.read(1, 1 << 20, committed=False)).records) == 3
    with pytest.raises(OffsetOutOfRange):
        await log.read(0, 1 << 20, committed=False)
    process.storage.confirm_all()
    assert log.log_start_offset == 3


@pytest.mark.parametrize("rows", [1, 1024], ids=["pieces", "one value"])
@pytest.mark.parametrize("checkpoints", ["none", "before", "behind", "both", "clean"])
@pytest.mark.parametrize("commit", [False, True])
async def test_a_marker_that_is_not_confirmed_decides_nothing_though_a_checkpoint_covers_it(
    rows: int, checkpoints: str, commit: bool
) -> None:
    """Two transactions are open at what is confirmed; the marker of the first one is in the tail."""
    config = LogConfig(producers_per_piece=rows)
    replicas = Replicas()
    process, log = await replicas.master(config)

    def checkpoint() -> None:
        log.state.checkpoint()
        while log.state.write_producers_to(log.log_end_offset):
            pass

    log.append(batch(0))
    append_guarded(log, batch(0, pid=1, txn=True))
    if checkpoints in ("before", "both"):
        checkpoint()
    append_guarded(log, batch(0, pid=2, txn=True))
    append_guarded(log, batch(1, pid=1, txn=True))
    process.storage.confirm_all()
    log.append(batch(1))
    before_marker = len(replicas.world.wal)
    log.write_marker(1, 0, commit=commit, coordinator_epoch=0, transaction_version=1)
    log.append(batch(2))
    if checkpoints in ("behind", "both"):
        checkpoint()
    elif checkpoints == "clean":
        closing = asyncio.ensure_future(log.close())
        await until(lambda: log.state.meta.get("clean") is not None, "the clean record is appended")
        closing.cancel()

    process, log = await replicas.master(config)
    assert (log.high_watermark, log.last_stable_offset) == (4, 1)
    process.storage.confirm_to(before_marker)
    assert log.last_stable_offset == 1
    process.storage.confirm_to(len(replicas.world.wal))
    assert log.last_stable_offset == 2, "the first offset of the second one"
    assert [one.producer_id for one in log.open_transactions()] == [2]
    log.write_marker(2, 0, commit=True, coordinator_epoch=0, transaction_version=1)
    process.storage.confirm_all()
    assert log.last_stable_offset == log.high_watermark == 8
    assert (await log.read(0, 1 << 20, committed=True)).aborted == ([] if commit else [(1, 1)])
