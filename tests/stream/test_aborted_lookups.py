"""The list of aborted transactions of a read_committed reader, over what happens while the index is read from the
bucket: other readers, appends, trims."""

from __future__ import annotations

import asyncio

import pytest

from tests.stream.test_partition_on_storage import Cluster, batch
from tests.support.fake_storage import DATA, TXN
from tests.support.guarded import append_guarded
from tests.support.storage_world import until
from tidelog.runtime.errors import CorruptData
from tidelog.storage.objects.reader import load_index
from tidelog.storage.settings import CacheSettings
from tidelog.stream.partition_log import PartitionLog

PRODUCER = 4


def abort(log: PartitionLog, sequence: int) -> int:
    """Append a batch and the marker that aborts it; the WAL end."""
    append_guarded(log, batch(sequence, pid=PRODUCER, txn=True))
    marker = log.write_marker(PRODUCER, 0, commit=False, coordinator_epoch=0, transaction_version=1)
    return marker.wal_end


async def opened_elsewhere(cluster: Cluster, aborted: int) -> PartitionLog:
    """A log with aborted transactions at 0, 2, 4, … and a batch of another producer, opened where nothing of it is in
    memory."""
    log = await cluster.boot()
    for sequence in range(aborted):
        abort(log, sequence)
    await log.wait_acked(log.append(batch(0)).wal_end)
    await log.close()
    await cluster.world.storage.upload_now()
    await cluster.lose_the_disk()
    cluster.world.cache = CacheSettings(log_bytes=1 << 20, block_bytes=1)
    return await cluster.boot()


async def test_readers_that_load_the_index_together_are_told_of_each_transaction_once() -> None:
    """librdkafka takes one entry off for each abort marker: what a second one covers is not given to its user."""
    log = await opened_elsewhere(Cluster(), 3)
    expected = [(PRODUCER, 0), (PRODUCER, 2), (PRODUCER, 4)]
    readers = (log.read(0, 1 << 20, committed=True) for _ in range(3))
    assert [found.aborted for found in await asyncio.gather(*readers)] == [expected] * 3
    assert (await log.read(0, 1 << 20, committed=True)).aborted == expected


async def test_a_transaction_that_is_aborted_while_the_index_is_loaded_is_told_after_those_before() -> None:
    cluster = Cluster()
    log = await opened_elsewhere(cluster, 2)
    gets = len(cluster.world.store.gets)
    cluster.world.store.get_gate = asyncio.Event()
    reading = asyncio.ensure_future(log.read(0, 1 << 20, committed=True))
    await until(lambda: len(cluster.world.store.gets) > gets)
    await log.wait_acked(abort(log, 2))
    cluster.world.store.get_gate.set()
    assert (await reading).aborted == [(PRODUCER, 0), (PRODUCER, 2)]
    assert (await log.read(0, 1 << 20, committed=True)).aborted == [(PRODUCER, 0), (PRODUCER, 2)]
    assert (await log.read(5, 1 << 20, committed=True)).aborted == [(PRODUCER, 5)]


async def damage(cluster: Cluster, stream: int) -> None:
    """Flip a bit in each block of a stream in the bucket."""
    store = cluster.world.store
    for info in [each async for each in store.list("")]:
        body = bytearray(await store.get(info.key))
        for entry in await load_index(store, info.key, info.size):
            if entry.stream_id == stream:
                body[entry.end_position - 1] ^= 1
        await store.put(info.key, [bytes(body)])


async def test_a_damaged_index_stops_neither_delete_records_nor_retention() -> None:
    """How far it may be trimmed is read from it: a log with one damaged block of it grew for good."""
    cluster = Cluster()
    log = await opened_elsewhere(cluster, 3)
    await damage(cluster, TXN)
    with pytest.raises(CorruptData):
        await log.read(0, 1 << 20, committed=True)
    for start in (2, 4, 6):
        assert await log.delete_records(start) == start
        await cluster.world.storage.upload_now()
    assert await log.apply_retention() == 6
    assert cluster.starts[DATA] == 6
    assert TXN not in cluster.starts, "nobody can tell which of its entries are needed"


async def test_a_damaged_index_is_left_behind_when_nothing_of_its_log_is_left() -> None:
    cluster = Cluster()
    log = await opened_elsewhere(cluster, 3)
    await damage(cluster, TXN)
    assert await log.delete_records(-1) == 7
    await cluster.world.storage.upload_now()
    assert await log.apply_retention() == 7
    assert cluster.starts[TXN] == 3
    await log.wait_acked(log.append(batch(1)).wal_end)
    assert (await log.read(7, 1 << 20, committed=True)).aborted == []


async def test_a_damaged_index_is_left_behind_when_the_log_start_passes_a_transaction_that_is_in_memory() -> None:
    cluster = Cluster()
    log = await opened_elsewhere(cluster, 3)
    await damage(cluster, TXN)
    for sequence in (3, 4):
        await log.wait_acked(abort(log, sequence))  # 7 and 8, 9 and 10
    assert await log.delete_records(9) == 9
    await cluster.world.storage.upload_now()
    assert await log.apply_retention() == 9
    assert cluster.starts[TXN] == 4
    assert (await log.read(9, 1 << 20, committed=True)).aborted == [(PRODUCER, 9)]
