"""Finding offsets by timestamp: segment by its largest timestamp, time index, batch headers, then one batch's records.

Nothing past `bound` (the high watermark or the last stable offset) and nothing before the log start is found. State may
change while a lookup waits for a read; segments are therefore looked at as they were at the start.

Entry: `first_at_or_after`, `largest`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from storage.record_batch import BatchHeader, Record, RecordTooLarge, iter_records, parse_header
from stream.partition_state import PartitionState

_SCAN_BYTES = 256 * 1024
_RECORDS_A_TURN = 1000
"""Decoded before others have their turn: a compressed batch of 1 MiB may hold millions."""


class TimestampOffset(NamedTuple):
    """One record's place in time."""

    offset: int
    timestamp: int
    """ms."""
    leader_epoch: int


class _Slice(NamedTuple):
    """A segment, copied."""

    start: int
    end: int
    max_timestamp: int
    entries: tuple[int, int]


def _slices(state: PartitionState, bound: int) -> list[_Slice]:
    found = []
    for index, segment in enumerate(state.segments):
        start = max(segment.base_offset, state.log_start)
        end = min(state.segment_end(index), bound)
        if start < end:
            found.append(_Slice(start, end, segment.max_timestamp, state.segment_entries(index)))
    return found


async def first_at_or_after(state: PartitionState, timestamp: int, bound: int) -> TimestampOffset | None:
    """The first record with a timestamp ≥ `timestamp` (ms), or None. Raises `CorruptData`, `Unavailable`."""
    for piece in _slices(state, bound):
        if piece.max_timestamp >= timestamp:
            found = await _first_in(state, piece, timestamp)
            if found is not None:
                return found
    return None


async def largest(state: PartitionState, bound: int) -> TimestampOffset | None:
    """The first record that has the largest timestamp, or None without any. Raises `CorruptData`, `Unavailable`."""
    best: TimestampOffset | None = None
    for piece in sorted(_slices(state, bound), key=lambda piece: (-piece.max_timestamp, piece.start)):
        if best is not None and best.timestamp >= piece.max_timestamp:
            break
        found = await _first_in(state, piece, piece.max_timestamp)
        if found is None:  # the record it was counts no more: deleted, or past the bound
            found = await _largest_in(state, piece)
        if found is not None and (best is None or found.timestamp > best.timestamp):
            best = found
    return best if best is not None and best.timestamp >= 0 else None


def _records(payload: bytes | memoryview, header: BatchHeader, start: int) -> Iterator[Record]:
    """A batch's records. One that decompresses to more than the bound is one record with the batch's largest time:
    a reader that starts there misses nothing."""
    try:
        yield from iter_records(payload, header=header)
    except RecordTooLarge:
        yield Record(max(header.base_offset, start), header.max_timestamp, None, None)


async def _first_in(state: PartitionState, piece: _Slice, timestamp: int) -> TimestampOffset | None:
    start = await state.time.floor(*piece.entries, timestamp)
    at = max(piece.start, start or 0)
    while at < piece.end:
        for stored in await state.data.read(at, piece.end, _SCAN_BYTES):
            header = parse_header(stored.payload)
            if header.max_timestamp >= timestamp:
                for number, record in enumerate(_records(stored.payload, header, piece.start)):
                    if number % _RECORDS_A_TURN == _RECORDS_A_TURN - 1:
                        await asyncio.sleep(0)
                    if record.timestamp >= timestamp and record.offset >= piece.start:
                        return TimestampOffset(record.offset, record.timestamp, header.partition_leader_epoch)
            at = stored.base_offset + stored.count
    return None


async def _largest_in(state: PartitionState, piece: _Slice) -> TimestampOffset | None:
    best: TimestampOffset | None = None
    at = piece.start
    while at < piece.end:
        for stored in await state.data.read(at, piece.end, _SCAN_BYTES):
            header = parse_header(stored.payload)
            if best is None or header.max_timestamp > best.timestamp:
                for number, record in enumerate(_records(stored.payload, header, piece.start)):
                    if number % _RECORDS_A_TURN == _RECORDS_A_TURN - 1:
                        await asyncio.sleep(0)
                    if record.offset >= piece.start and (best is None or record.timestamp > best.timestamp):
                        best = TimestampOffset(record.offset, record.timestamp, header.partition_leader_epoch)
            at = stored.base_offset + stored.count
    return best
