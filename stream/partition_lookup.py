"""Lookup of offsets by timestamp: by segments' largest timestamps, time index, batch headers, then one batch's records.

Records at or above `bound` (the high watermark or the last stable offset) and below the log start are not found, nor
those that tell an offset outside of their batch: what records say is not checked when they are appended. The
state may change while a lookup waits for a read, so a lookup works on a copy of the segments.

Entry: `first_at_or_after`, `largest`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from tidelog.batch.batch import BatchHeader, Record, RecordTooLarge, iter_records, parse_header
from tidelog.stream.partition_state import PartitionState

_SCAN_BYTES = 256 * 1024
_RECORDS_A_TURN = 1000
"""Records decoded before yielding to the event loop: a compressed batch of 1 MiB may hold millions."""


class TimestampOffset(NamedTuple):
    """Offset, timestamp and leader epoch of one record."""

    offset: int
    timestamp: int
    """ms."""
    leader_epoch: int


class _Slice(NamedTuple):
    """A copy of a segment."""

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
    """Return the first record with a timestamp ≥ `timestamp` (ms), or None. Raises `CorruptData`, `Unavailable`."""
    for piece in _slices(state, bound):
        if piece.max_timestamp >= timestamp:
            found = await _first_in(state, piece, timestamp)
            if found is not None:
                return found
    return None


async def largest(state: PartitionState, bound: int) -> TimestampOffset | None:
    """Return the first record with the largest timestamp, or None without any. Raises `CorruptData`, `Unavailable`."""
    best: TimestampOffset | None = None
    for piece in sorted(_slices(state, bound), key=lambda piece: (-piece.max_timestamp, piece.start)):
        if best is not None and best.timestamp >= piece.max_timestamp:
            break
        found = await _first_in(state, piece, piece.max_timestamp)
        if found is None:  # the record with that timestamp was deleted, or is past the bound
            found = await _largest_in(state, piece)
        if found is not None and (best is None or found.timestamp > best.timestamp):
            best = found
    return best if best is not None and best.timestamp >= 0 else None


def _records(payload: bytes | memoryview, header: BatchHeader, start: int) -> Iterator[Record]:
    """Iterate over a batch's records.

    A batch that decompresses to more than the bound yields one record with the batch's largest timestamp, so that a
    reader that starts there misses nothing.
    """
    try:
        yield from iter_records(payload, header=header)
    except RecordTooLarge:
        yield Record(max(header.base_offset, start), header.max_timestamp, None, None)


async def _first_in(state: PartitionState, piece: _Slice, timestamp: int) -> TimestampOffset | None:
    start = await state.time.floor(*piece.entries, timestamp)
    at = max(piece.start, start or 0)
    while at < piece.end:
        for stored in await state.data.read(at, piece.end, _SCAN_BYTES):
            at = stored.base_offset + stored.count
            if stored.is_hole:
                continue
            header = parse_header(stored.payload)
            if header.max_timestamp >= timestamp:
                for number, record in enumerate(_records(stored.payload, header, piece.start)):
                    if number % _RECORDS_A_TURN == _RECORDS_A_TURN - 1:
                        await asyncio.sleep(0)
                    if record.timestamp >= timestamp and piece.start <= record.offset <= header.last_offset:
                        return TimestampOffset(record.offset, record.timestamp, header.partition_leader_epoch)
    return None


async def _largest_in(state: PartitionState, piece: _Slice) -> TimestampOffset | None:
    best: TimestampOffset | None = None
    at = piece.start
    while at < piece.end:
        for stored in await state.data.read(at, piece.end, _SCAN_BYTES):
            at = stored.base_offset + stored.count
            if stored.is_hole:
                continue
            header = parse_header(stored.payload)
            if best is None or header.max_timestamp > best.timestamp:
                for number, record in enumerate(_records(stored.payload, header, piece.start)):
                    if number % _RECORDS_A_TURN == _RECORDS_A_TURN - 1:
                        await asyncio.sleep(0)
                    if not piece.start <= record.offset <= header.last_offset:
                        continue
                    if best is None or record.timestamp > best.timestamp:
                        best = TimestampOffset(record.offset, record.timestamp, header.partition_leader_epoch)
    return best
