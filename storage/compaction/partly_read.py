"""Objects of a stream of which only some blocks are read, since of the others only a hole will be left.

Entry: `PartlyRead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tidelog.storage.commits import CompactionRefused
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import BlockSource
from tidelog.storage.compaction.rewriting import records_from
from tidelog.storage.objects.format import BLOCK_HEADER, MAX_COUNT, RECORD_HEADER, Block, IndexEntry
from tidelog.storage.records import StreamEntry

WORTH_AN_INDEX_BYTES = 64 << 10
"""Of a smaller object the index is read in any case: it may consist of holes already, and is then left as it is."""


class PartlyRead:
    """The contiguous objects of one task, from the stream's start offset on."""

    def __init__(self, stream_id: int, start_offset: int, is_gone: Callable[[int, int], bool]) -> None:
        self._stream_id = stream_id
        self._start_offset = start_offset
        self._is_gone = is_gone
        self._gone: list[tuple[int, int]] = []
        self.blocks: Mapping[BlockSource, Block] = {}
        """What was read."""
        self.is_changed = False
        """Something was taken as gone that is not a hole yet."""

    def takes_as_gone(self, one: ObjectFacts) -> bool:
        """Return whether nothing of an object need be read, not even its index."""
        (piece,) = one.ranges
        if one.size < WORTH_AN_INDEX_BYTES or not self._is_gone(piece.start_offset, piece.end_offset):
            return False
        self._gone.append((piece.start_offset, piece.end_offset))
        self.is_changed = True
        return True

    def takes_block_as_gone(self, entry: IndexEntry) -> bool:
        """Return whether a block need not be read."""
        if not self._is_gone(entry.start_offset, entry.end_offset):
            return False
        self._gone.append((entry.start_offset, entry.end_offset))
        if entry.length > BLOCK_HEADER.size + entry.record_count * RECORD_HEADER.size:
            self.is_changed = True
        return True

    def records(self) -> list[StreamEntry]:
        """Return what was read, with holes for the rest. Raises `CompactionRefused` if it is not contiguous."""
        read = [(source.entry.start_offset, source.entry.end_offset, block) for source, block in self.blocks.items()]
        found: list[StreamEntry] = []
        at: int | None = None
        for start, end, block in sorted([*read, *((*piece, None) for piece in self._gone)], key=lambda one: one[0]):
            if at is not None and start != at:
                raise CompactionRefused(f"the objects of stream {self._stream_id} are not contiguous any more")
            at = end
            found += _holes(max(start, self._start_offset), end) if block is None else self._untrimmed(block)
        return found

    def _untrimmed(self, block: Block) -> Iterator[StreamEntry]:
        return records_from((block,), self._start_offset)


def _holes(start: int, end: int) -> Iterator[StreamEntry]:
    while start < end:
        count = min(end - start, MAX_COUNT)
        yield StreamEntry(start, count, b"")
        start += count
