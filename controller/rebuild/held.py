"""What snapshots and branches hold, in a rebuild (docs/design/0031-snapshots-and-branches.md).

A held object is replaced by no other one, so the bucket has it as long as somebody holds it. If it is missing, its
holder was deleted, or has trimmed it, after the state was written.

Entry: `shared_pieces`, `branches_of`, `lost_snapshots`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidelog.controller.machine.slices import find
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.records import STREAMS_PER_PARTITION
from tidelog.storage.commits import StreamRange

_ALL = 1 << 30


class StreamPiece(NamedTuple):
    """Offsets of one stream in one object."""

    start: int
    end: int
    object_id: int
    is_known: bool
    """The state names it as committed."""


def _pieces(tables: Tables, extent: StreamRange) -> Iterator[StreamPiece]:
    """Yield the part of each object that is in an extent."""
    slices = tables.index.slices.get(extent.stream_id, b"")
    for start, end, object_id in find(slices, extent.start_offset, extent.end_offset, _ALL):
        yield StreamPiece(max(start, extent.start_offset), min(end, extent.end_offset), object_id, True)


def shared_pieces(tables: Tables, stream_id: int) -> list[StreamPiece]:
    """Return the first pieces of a branch's stream: objects that have them under another stream's id."""
    place = stream_id % STREAMS_PER_PARTITION
    branch, stream = tables.branches.get(stream_id - place), tables.streams.get(stream_id)
    if branch is None or stream is None:
        return []
    pieces = (piece for extent in branch.extents[place] for piece in _pieces(tables, extent))
    return [piece for piece in pieces if piece.end > stream.start_offset]


def branches_of(tables: Tables, missing: set[int]) -> set[int]:
    """Return the streams of branches that share any of these objects."""
    streams = (row.first_stream + place for row in tables.branches.values() for place in range(STREAMS_PER_PARTITION))
    return {each for each in streams if any(piece.object_id in missing for piece in shared_pieces(tables, each))}


def lost_snapshots(tables: Tables, missing: set[int]) -> tuple[str, ...]:
    """Return the names of the snapshots that miss any of these objects."""
    return tuple(
        name
        for name, record in sorted(tables.snapshots.rows.items())
        if any(piece.object_id in missing for _, extent in record.extents() for piece in _pieces(tables, extent))
    )
