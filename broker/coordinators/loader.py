"""Loads a partition of an internal topic from its start to its end into a store.

The end is the log end offset when loading began: nothing is appended before loading completes. Loading waits for the
unconfirmed part of the log, because only confirmed records may be visible (rule 2).

Records of transactions and their markers are replayed in the order of the log into a `TransactionalStore`. For a
coordinator whose store is none they are damage.

Of plain records that follow each other only the last one of each key is told to the store: it replaces those before,
and to parse them is most of the work.

Clients wait for it, so it does not wait with reads of history while the broker is busy.

A state that the coordinator before this one has passed on stands for the records before its offset, which are not read.

Entry: `load_store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidelog.batch.batch import (
    BatchHeader,
    ControlType,
    CorruptRecord,
    Record,
    check_crc,
    control_type,
    iter_batches,
    iter_records,
)
from tidelog.broker.coordinators.handover import PassedState
from tidelog.broker.coordinators.store import KeyValue, LossAwareStore, StateStore, TransactionalStore, TxnProducer

if TYPE_CHECKING:
    from tidelog.stream.partition_log import PartitionLog

READ_BYTES = 512 << 10
"""Some thousands of records, whose parsing holds up the event loop."""


NO_LOSS = -1


async def load_store(
    partition_log: PartitionLog, store: StateStore, passed: PassedState | None = None, lost_at: int = NO_LOSS
) -> int:
    """Replay the log into an empty store; returns its size in bytes. Raises `Unavailable`, `CorruptData`, `Closed`.

    `passed`: from the leader before this one, if the log is the one that it has closed. `lost_at`: the last offset from
    which on records of this log were lost, and given to others; a `LossAwareStore` is told of it at that place.
    """
    what = f"{partition_log.topic}-{partition_log.partition}"
    end_offset = partition_log.log_end_offset
    offset = partition_log.log_start_offset
    size_bytes = 0
    if passed is not None and offset <= passed.offset <= end_offset:
        passed.replay(store)
        offset, size_bytes = passed.offset, passed.log_bytes
    loss = _Loss(store, lost_at if lost_at >= offset else NO_LOSS)
    while offset < end_offset:
        if partition_log.high_watermark <= offset:
            await _confirmed_past(partition_log, offset)
        fetched = await partition_log.read(offset, READ_BYTES, committed=False, is_urgent=True)
        before = offset
        plain: dict[bytes, bytes | None] = {}
        for buffer in fetched.records:
            for header, batch in iter_batches(buffer):
                if not check_crc(batch):
                    raise CorruptRecord(f"batch {header.base_offset} of {what} fails its CRC32C")
                size_bytes += len(batch)
                offset = max(offset, header.next_offset)
                if loss.is_before(header.base_offset):
                    _replay_newest(store, plain)
                    loss.tell()
                records = iter_records(batch, header=header)
                if header.is_transactional:
                    _replay_newest(store, plain)
                    _replay_transactional(store, header, records, before)
                elif not header.is_control:
                    _note_newest(plain, records, before)
        _replay_newest(store, plain)
        if offset == before:
            raise CorruptRecord(f"{what} returns no records at offset {offset} and ends at {end_offset}")
        await asyncio.sleep(0)
    loss.tell()
    return size_bytes


class _Loss:
    """The place of the log where a store is told, once, that records were lost."""

    def __init__(self, store: StateStore, at: int) -> None:
        self._store = store if isinstance(store, LossAwareStore) and at != NO_LOSS else None
        self._at = at

    def is_before(self, offset: int) -> bool:
        """Whether the record at an offset came after the loss, and the store does not know of that."""
        return self._store is not None and self._at <= offset

    def tell(self) -> None:
        """Tell the store, if it does not know."""
        store, self._store = self._store, None
        if store is not None:
            store.records_lost()


def _note_newest(newest: dict[bytes, bytes | None], records: Iterator[Record], start: int) -> None:
    """Note the records from the offset `start` on, by their keys, in the order of the last one of each."""
    for record in records:
        if record.offset >= start and record.key is not None:
            key, value = _key_value(record)
            newest.pop(key, None)
            newest[key] = value


def _replay_newest(store: StateStore, newest: dict[bytes, bytes | None]) -> None:
    for key, value in newest.items():
        store.replay(key, value)
    newest.clear()


def _replay_transactional(store: StateStore, header: BatchHeader, records: Iterator[Record], start: int) -> None:
    """Replay the records of a transaction's batch, or its marker, from the offset `start` on."""
    if not isinstance(store, TransactionalStore):
        raise CorruptRecord(f"batch {header.base_offset} is of a transaction of producer {header.producer_id}")
    for record in records:
        if record.offset < start:
            continue
        if not header.is_control:
            if record.key is not None:
                store.replay_pending(TxnProducer(header.producer_id, header.producer_epoch), *_key_value(record))
        elif (kind := control_type(record)) in (ControlType.COMMIT, ControlType.ABORT):
            store.replay_marker(header.producer_id, commit=kind == ControlType.COMMIT)


def _key_value(record: Record) -> KeyValue:
    return bytes(record.key or b""), None if record.value is None else bytes(record.value)


async def _confirmed_past(partition_log: PartitionLog, offset: int) -> None:
    moved = asyncio.Event()
    remove = partition_log.add_watermark_listener(moved.set)
    try:
        while partition_log.high_watermark <= offset:
            moved.clear()
            await moved.wait()
    finally:
        remove()
