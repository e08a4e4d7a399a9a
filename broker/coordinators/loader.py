"""Loads a partition of an internal topic from its start to its end into a store.

The end is the log end offset when loading began: nothing is appended before loading completes. Loading waits for the
unconfirmed part of the log, because only confirmed records may be visible (rule 2).

Entry: `load_store`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidelog.batch.batch import CorruptRecord, check_crc, iter_batches, iter_records
from tidelog.broker.coordinators.store import StateStore

if TYPE_CHECKING:
    from tidelog.stream.partition_log import PartitionLog

READ_BYTES = 4 << 20


async def load_store(partition_log: PartitionLog, store: StateStore) -> int:
    """Replay the log into an empty store; returns the bytes read. Raises `Unavailable`, `CorruptData`, `Closed`."""
    what = f"{partition_log.topic}-{partition_log.partition}"
    end_offset = partition_log.log_end_offset
    offset = partition_log.log_start_offset
    size_bytes = 0
    while offset < end_offset:
        if partition_log.high_watermark <= offset:
            await _confirmed_past(partition_log, offset)
        fetched = await partition_log.read(offset, READ_BYTES, committed=False)
        before = offset
        for buffer in fetched.records:
            for header, batch in iter_batches(buffer):
                if not check_crc(batch):
                    raise CorruptRecord(f"batch {header.base_offset} of {what} fails its CRC32C")
                size_bytes += len(batch)
                offset = max(offset, header.next_offset)
                if header.is_control:
                    continue
                for record in iter_records(batch, header=header):
                    if record.offset >= before and record.key is not None:
                        store.replay(bytes(record.key), None if record.value is None else bytes(record.value))
        if offset == before:
            raise CorruptRecord(f"{what} returns no records at offset {offset} and ends at {end_offset}")
        await asyncio.sleep(0)
    return size_bytes


async def _confirmed_past(partition_log: PartitionLog, offset: int) -> None:
    moved = asyncio.Event()
    remove = partition_log.add_watermark_listener(moved.set)
    try:
        while partition_log.high_watermark <= offset:
            moved.clear()
            await moved.wait()
    finally:
        remove()
