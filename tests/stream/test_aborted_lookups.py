"""The list of aborted transactions of a read_committed reader, over what happens while the index is read from the
bucket: other readers, appends, trims."""

from __future__ import annotations

import asyncio

from tests.stream.test_partition_on_storage import Cluster, batch
from tests.support.guarded import append_guarded
from tests.support.storage_world import until
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
