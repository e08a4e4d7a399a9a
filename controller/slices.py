"""The live slices of one stream in offset order: start, end and object id of each, three int64 in native order, packed.

Nearly all streams have one slice or a few, every upload adds one to each stream that was written to, and every process
keeps several indexes: a slice costs 24 bytes here, and a stream 33 more. The packed bytes never change; what changes
them gives new ones. They live in memory alone.

Entry: `Slices`, and the functions over it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right

Slices = bytes
"""See the module; empty: no slice."""
Slice = tuple[int, int, int]
"""Start offset, end offset, object id."""

_SLICE = struct.Struct("=qqq")
_SIZE = _SLICE.size


def unpack(slices: Slices) -> list[Slice]:
    """All slices."""
    return list(_SLICE.iter_unpack(slices))


def object_ids(slices: Slices) -> list[int]:
    """The objects of all slices."""
    return memoryview(slices).cast("q")[2::3].tolist()


def _starts_before(slices: Slices, offset: int) -> int:
    """How many slices start below `offset`."""
    starts = memoryview(slices).cast("q")[::3]
    return bisect_left(starts, offset)


def _ends_up_to(slices: Slices, offset: int) -> int:
    """How many slices end at or below `offset`."""
    ends = memoryview(slices).cast("q")[1::3]
    return bisect_right(ends, offset)


def added(slices: Slices, start: int, end: int, object_id: int) -> Slices:
    """With one slice more; nearly always at the end."""
    new = _SLICE.pack(start, end, object_id)
    if not slices or start > _SLICE.unpack_from(slices, len(slices) - _SIZE)[0]:
        return slices + new
    at = _SIZE * _starts_before(slices, start)
    return slices[:at] + new + slices[at:]


def removed(slices: Slices, start: int, object_id: int) -> Slices:
    """Without one slice; the same if it is not here."""
    at = _SIZE * _starts_before(slices, start)
    if at == len(slices):
        return slices
    found, _, of = _SLICE.unpack_from(slices, at)
    return slices[:at] + slices[at + _SIZE :] if (found, of) == (start, object_id) else slices


def trimmed(slices: Slices, start_offset: int) -> tuple[Slices, list[int]]:
    """Without what lies wholly below `start_offset`; and the object ids of that."""
    cut = _SIZE * _ends_up_to(slices, start_offset)
    return slices[cut:], object_ids(slices[:cut])


def find(slices: Slices, start_offset: int, end_offset: int, limit: int) -> list[Slice]:
    """At most `limit` slices that overlap `[start_offset, end_offset)`."""
    first = _ends_up_to(slices, start_offset)
    last = min(_starts_before(slices, end_offset), first + limit)
    return list(_SLICE.iter_unpack(slices[_SIZE * first : _SIZE * last])) if last > first else []
