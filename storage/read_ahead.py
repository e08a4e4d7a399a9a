"""How far to read ahead. Sans-IO: offsets in, windows out.

A reader that comes back for the offset where its last read ended is sequential: its window doubles with each such read
up to a cap; one that jumps begins with none. When half of the window is used up, the other half is asked for, so that
GETs stay large. What all readers together have ahead in flight is bounded; at the bound nothing is read ahead.

Entry: `ReadAhead`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

FIRST_WINDOW_BYTES = 512 << 10
MAX_WINDOW_BYTES = 8 << 20
MAX_SEQUENCES = 4096
"""Readers remembered; the one that has not read for longest is forgotten."""


class Reader:
    """One reader's way through one stream."""

    __slots__ = ("_ahead_bytes", "_window_bytes")

    def __init__(self) -> None:
        self._window_bytes = 0
        self._ahead_bytes = 0

    def read_on(self, size: int) -> int:
        """The reader took `size` bytes. Returns how many of the bytes that follow to have ahead; 0: leave it."""
        if self._window_bytes == 0:
            self._window_bytes = FIRST_WINDOW_BYTES
            return 0
        self._ahead_bytes = max(0, self._ahead_bytes - size)
        if self._ahead_bytes * 2 > self._window_bytes:
            return 0
        self._window_bytes = self._ahead_bytes = min(MAX_WINDOW_BYTES, self._window_bytes * 2)
        return self._window_bytes


class ReadAhead:
    """The sequences of all readers, and the bound on what is ahead in flight."""

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._sequences: OrderedDict[tuple[int, int], Reader] = OrderedDict()
        self.in_flight_bytes = 0

    def take(self, stream_id: int, offset: int) -> Reader:
        """The sequence that goes on at this offset, or a new one."""
        return self._sequences.pop((stream_id, offset), None) or Reader()

    def give(self, stream_id: int, following: int, sequence: Reader) -> None:
        """Remember where the sequence goes on."""
        self._sequences[stream_id, following] = sequence
        if len(self._sequences) > MAX_SEQUENCES:
            self._sequences.popitem(last=False)

    def admit(self, lengths: Sequence[int]) -> int:
        """How many of these blocks, in order, may be fetched ahead now; `done` gives their bytes back."""
        for number, length in enumerate(lengths):
            if self.in_flight_bytes + length > self._bound_bytes:
                return number
            self.in_flight_bytes += length
        return len(lengths)

    def done(self, size: int) -> None:
        """`size` bytes that were admitted have arrived or failed."""
        self.in_flight_bytes -= size
        assert self.in_flight_bytes >= 0
