"""Lookup of offsets by timestamp: by segments' largest timestamps, time index, batch headers, then one batch's records.

Records at or above `bound` (the high watermark or the last stable offset) and below the log start are not found, nor
those that tell an offset outside of their batch: what records say is not checked when they are appended. The
state may change while a lookup waits for a read, so a lookup works on a copy of the segments.

Bound: of all lookups of an event loop `MAX_UNPACKED` have a batch decompressed at a time: anybody may ask, as often as
he likes, for the time of a batch that takes a thousand times its size.

Entry: `first_at_or_after`, `largest`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tidelog.batch.batch import BatchHeader, Compression, RecordTooLarge, iter_times, parse_header
from tidelog.stream.partition_state import PartitionState

_INT64_MIN = -1 << 63
_SCAN_BYTES = 256 * 1024
_RECORDS_A_TURN = 1000
"""Records decoded before yielding to the event loop: a compressed batch of 1 MiB may hold millions."""
MAX_UNPACKED = 4
"""Batches that all lookups of an event loop have decompressed at a time, 64 MiB each at most."""

_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


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


def _times(payload: bytes | memoryview, header: BatchHeader, start: int) -> Iterator[tuple[int, int]]:
    """Iterate over timestamp and offset of a batch's records.

    A batch that decompresses to more than the bound yields one record with the batch's largest timestamp, so that a
    reader that starts there misses nothing.
    """
    try:
        yield from iter_times(payload, header)
    except RecordTooLarge:
        yield header.max_timestamp, max(header.base_offset, start)


async def _in_batch(payload: bytes | memoryview, start: int, wanted: int | None, above: int) -> TimestampOffset | None:
    """Return the first record at or after `wanted` of a batch; None: that with the largest timestamp above `above`."""
    header = parse_header(payload)
    if header.max_timestamp < wanted if wanted is not None else header.max_timestamp <= above:
        return None
    gate = _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_UNPACKED))
    best: TimestampOffset | None = None
    async with nullcontext() if header.compression == Compression.NONE else gate:
        for number, (timestamp, offset) in enumerate(_times(payload, header, start)):
            if number % _RECORDS_A_TURN == _RECORDS_A_TURN - 1:
                await asyncio.sleep(0)
            if not start <= offset <= header.last_offset:
                continue
            if wanted is None:
                if timestamp > above:
                    best, above = TimestampOffset(offset, timestamp, header.partition_leader_epoch), timestamp
            elif timestamp >= wanted:
                return TimestampOffset(offset, timestamp, header.partition_leader_epoch)
    return best


async def _first_in(state: PartitionState, piece: _Slice, timestamp: int) -> TimestampOffset | None:
    start = await state.time.floor(*piece.entries, timestamp)
    at = max(piece.start, start or 0)
    while at < piece.end:
        for stored in await state.data.read(at, piece.end, _SCAN_BYTES):
            at = stored.base_offset + stored.count
            found = None if stored.is_hole else await _in_batch(stored.payload, piece.start, timestamp, 0)
            if found is not None:
                return found
    return None


async def _largest_in(state: PartitionState, piece: _Slice) -> TimestampOffset | None:
    best: TimestampOffset | None = None
    at = piece.start
    while at < piece.end:
        for stored in await state.data.read(at, piece.end, _SCAN_BYTES):
            at = stored.base_offset + stored.count
            if not stored.is_hole:
                above = _INT64_MIN - 1 if best is None else best.timestamp
                best = await _in_batch(stored.payload, piece.start, None, above) or best
    return best
