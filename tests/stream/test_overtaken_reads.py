"""What readers are told whose reads from the bucket are overtaken by DeleteRecords or retention."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.stream.test_aborted_lookups import PRODUCER, opened_elsewhere
from tests.stream.test_partition_on_storage import Cluster
from tests.support.fake_storage import DATA, TIME, TXN, FakeClock, FakeWorld, Process
from tests.support.guarded import append_guarded
from tests.support.storage_world import until
from tidelog.batch.batch import Record, build_batch
from tidelog.stream.errors import OffsetOutOfRange
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import PartitionLog

NOW = 1_700_000_000_000
CONFIG = LogConfig(retention_ms=-1, index_interval_bytes=0)


async def test_a_reader_that_the_log_start_has_passed_gets_no_aborted_records_as_if_they_were_committed() -> None:
    cluster = Cluster()
    log = await opened_elsewhere(cluster, 6)
    store, txn = cluster.world.store, log.first_stream + TXN
    gets, store.get_gate = len(store.gets), asyncio.Event()
    gate, reading = store.get_gate, asyncio.ensure_future(log.read(0, 1, committed=True))
    await until(lambda: len(store.gets) > gets)
    store.get_gate = None
    assert await log.delete_records(6) == 6
    await cluster.world.storage.upload_now()
    await log.apply_retention()
    assert cluster.starts[txn] == 3, "the transactions that ended before the log start are not in the index any more"
    gate.set()
    with pytest.raises(OffsetOutOfRange):
        await reading
    assert (await log.read(6, 1 << 20, committed=True)).aborted == [(PRODUCER, 6), (PRODUCER, 8), (PRODUCER, 10)]


class Aborted:
    """A log with aborted transactions at 0, 2, 4, …, opened again, whose reads can be held up."""

    def __init__(self) -> None:
        self.world, self.clock = FakeWorld(), FakeClock(NOW)

    async def open(self, aborted: int) -> PartitionLog:
        log = await Process(self.world, self.clock).open(CONFIG)
        for n in range(aborted):
            records = [Record(0, NOW + n, b"k", b"v")]
            built = build_batch(records, producer_id=PRODUCER, producer_epoch=0, base_sequence=n, transactional=True)
            append_guarded(log, memoryview(bytearray(built)))
            self.clock.now_ms = NOW + n
            log.write_marker(PRODUCER, 0, commit=False, coordinator_epoch=0, transaction_version=1)
        await log.close()
        self.process = Process(self.world, self.clock)
        self.process.storage.hot = False
        return await self.process.open(CONFIG)

    async def overtaken(self, stream: int, reads: Callable[[], Awaitable[object]], deletes: Awaitable[int]) -> object:
        """Return what `reads` gives, whose next read of `stream` waits while `deletes` is done."""
        gate = self.process.storage.gates[stream] = asyncio.Event()
        reading = asyncio.ensure_future(reads())
        await until(lambda: not self.process.storage.gates)
        await deletes
        gate.set()
        return await reading


async def test_a_reader_behind_the_new_log_start_is_not_told_that_its_offset_is_out_of_range() -> None:
    """Its consumer would begin anew at one end of the log."""
    bench = Aborted()
    log = await bench.open(6)
    found = await bench.overtaken(TXN, lambda: log.read(8, 1 << 20, committed=True), log.delete_records(6))
    assert bench.world.starts[TXN] == 3
    assert found.aborted == [(PRODUCER, 8), (PRODUCER, 10)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [TIME, DATA])
async def test_a_lookup_by_time_that_is_overtaken_finds_what_is_left(stream: int) -> None:
    bench = Aborted()
    log = await bench.open(6)
    assert await log.offset_for_timestamp(NOW + 1) == (2, NOW + 1, 1)
    found = await bench.overtaken(stream, lambda: log.offset_for_timestamp(NOW + 1), log.delete_records(6))
    assert found == (6, NOW + 3, 1)


async def test_the_largest_timestamp_is_found_although_the_lookup_is_overtaken() -> None:
    bench = Aborted()
    log = await bench.open(6)
    found = await bench.overtaken(DATA, log.offset_of_max_timestamp, log.delete_records(10))
    assert found == (10, NOW + 5, 1)


async def test_a_deletion_that_another_overtakes_is_told_as_done() -> None:
    bench = Aborted()
    log = await bench.open(6)
    assert await bench.overtaken(TXN, lambda: log.delete_records(4), log.delete_records(8)) == 8
    assert await log.delete_records(-1) == 12
