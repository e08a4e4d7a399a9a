"""`LiveTail`: the newest bytes that a master has appended, in memory, for followers that keep up. Sans-IO.

A WAL tells what it passes to its disk (`ReplicatedWal.set_on_submitted`). The tail keeps the buffers of that, in which
the master wrote them, so a follower that keeps up is sent them without a copy and without a read, and while the
master's own sync is under way. Who is behind the tail is read for from the files.

Invariants: what is kept is contiguous and ends at `end_offset`; at most `bound_bytes` of records are kept, or the last
submission alone (rule 12); a piece that is taken has whole records of one master epoch.

Entry: `LiveTail`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.runtime.types import Buffer
from tidelog.storage.wal.base import Submitted
from tidelog.storage.wal.format import HEADER_BYTES, read_header


class LivePiece(NamedTuple):
    """Whole records to send."""

    end_offset: int
    """WAL offset after them (int64 bytes)."""
    buffers: list[Buffer]


class LiveTail:
    """The submissions that are kept, by the WAL offset at which they begin."""

    def __init__(self, end_offset: int, bound_bytes: int) -> None:
        """`end_offset`: the end of what was submitted; nothing of that is kept. `bound_bytes`: above 0."""
        self._bound_bytes = bound_bytes
        self._kept: dict[int, Submitted] = {}
        self.start_offset = self.end_offset = end_offset

    def add(self, submitted: Submitted) -> None:
        """Add what was submitted next, and drop the oldest beyond the bound."""
        assert submitted.offset == self.end_offset, (submitted.offset, self.end_offset)
        self._kept[submitted.offset] = submitted
        self.end_offset = submitted.end_offset
        while self.end_offset - self.start_offset > self._bound_bytes and len(self._kept) > 1:
            self.start_offset = self._kept.pop(self.start_offset).end_offset

    def clear(self) -> None:
        """Keep nothing, because nobody follows."""
        self._kept.clear()
        self.start_offset = self.end_offset

    def take(self, offset: int, max_end: int) -> LivePiece | None:
        """Return records from `offset` on that end at or before `max_end`, or the first one, however long it is.

        None if no kept piece begins at `offset`: the bytes are older than what is kept, or a reader of the files has
        stopped inside a submission; it goes on from the files until it is at the start of one.
        """
        end, buffers = offset, []
        while (piece := self._kept.get(end)) is not None and piece.end_offset <= max_end:
            buffers += piece.buffers
            end = piece.end_offset
        if end > offset:
            return LivePiece(end, buffers)
        if piece is None:
            return None
        head = self._split(piece, max_end)
        return LivePiece(head.end_offset, head.buffers)

    def _split(self, piece: Submitted, max_end: int) -> Submitted:
        """Divide a kept piece after its last record that ends by `max_end`, but after one at least; return the head."""
        buffers, at, cut = piece.buffers, piece.offset, 0
        while cut < len(buffers):
            following = at + HEADER_BYTES + read_header(buffers[cut], 0).payload_length
            if cut and following > max_end:
                break
            while at < following or (cut < len(buffers) and not len(buffers[cut])):
                at += len(buffers[cut])
                cut += 1
            assert at == following, f"the record before WAL offset {following} does not end with a buffer"
        self._kept[piece.offset] = head = Submitted(piece.offset, at, buffers[:cut])
        if cut < len(buffers):
            self._kept[at] = Submitted(at, piece.end_offset, buffers[cut:])
        return head
