"""Live slices of one stream in offset order: start, end and object id, packed as three int64 in native order.

Nearly all streams have few slices, every upload adds one to each stream that was written to, and every process keeps
several indexes. A slice costs 24 bytes here, and a stream 33 more. The packed bytes are immutable; a change creates new
ones. They exist in memory only.

Entry: `Slices`, and the functions over it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Slices = bytes
"""Packed slices, see the module docstring; empty for no slices."""
Slice = tuple[int, int, int]
"""Start offset, end offset, object id."""

_SLICE = struct.Struct("=qqq")
_SIZE = _SLICE.size


def unpack(slices: Slices) -> list[Slice]:
    """Return all slices."""
    return list(_SLICE.iter_unpack(slices))


def pack(slices: Iterable[Slice]) -> Slices:
    """Return slices that are in order."""
    return b"".join(_SLICE.pack(*each) for each in slices)


def object_ids(slices: Slices) -> list[int]:
    """Return the object ids of all slices."""
    return memoryview(slices).cast("q")[2::3].tolist()


def _starts_before(slices: Slices, offset: int) -> int:
    """Return the number of slices that start below `offset`."""
    starts = memoryview(slices).cast("q")[::3]
    return bisect_left(starts, offset)


def _ends_up_to(slices: Slices, offset: int) -> int:
    """Return the number of slices that end at or below `offset`."""
    ends = memoryview(slices).cast("q")[1::3]
    return bisect_right(ends, offset)


def added(slices: Slices, start: int, end: int, object_id: int) -> Slices:
    """Return the slices with one added, nearly always at the end."""
    new = _SLICE.pack(start, end, object_id)
    if not slices or start > _SLICE.unpack_from(slices, len(slices) - _SIZE)[0]:
        return slices + new
    at = _SIZE * _starts_before(slices, start)
    return slices[:at] + new + slices[at:]


def removed(slices: Slices, start: int, object_id: int) -> Slices:
    """Return the slices without one, or the same slices if it is absent."""
    at = _SIZE * _starts_before(slices, start)
    if at == len(slices):
        return slices
    found, _, of = _SLICE.unpack_from(slices, at)
    return slices[:at] + slices[at + _SIZE :] if (found, of) == (start, object_id) else slices


def trimmed(slices: Slices, start_offset: int) -> tuple[Slices, list[int]]:
    """Return the slices that do not end at or below `start_offset`, and the object ids of the removed ones."""
    cut = _SIZE * _ends_up_to(slices, start_offset)
    return slices[cut:], object_ids(slices[:cut])


def find(slices: Slices, start_offset: int, end_offset: int, limit: int) -> list[Slice]:
    """Return at most `limit` slices that overlap `[start_offset, end_offset)`."""
    first = _ends_up_to(slices, start_offset)
    last = min(_starts_before(slices, end_offset), first + limit)
    return list(_SLICE.iter_unpack(slices[_SIZE * first : _SIZE * last])) if last > first else []
