"""Decides how far to read ahead. Sans-IO: blocks read in, bytes wanted out.

A reader that continues at the offset where its last read ended is sequential, and gets a window: how many bytes of
blocks to have ahead of it, cached or in flight. The window

- begins at `FIRST_WINDOW_BYTES` with the second consecutive read;
- doubles whenever half of it is used up, to `STEADY_WINDOW_BYTES`, so that GETs become large and few;
- doubles beyond that, to `MAX_WINDOW_BYTES`, when the reader had to wait for a block in flight: the window
  does not cover the bucket's latency;
- halves when a block that was read ahead was evicted unread: the cache is too small for all read-ahead.

It is refilled in steps of half a window, at most one GET each, so that several GETs are in flight.

A reader that seeks starts without a window. All windows together stay within a bound; each reader's share is the bound
divided by the number of readers with read-ahead, and a reader that has not read for `IDLE_S` loses its share.

Entry: `ReadAhead`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

FIRST_WINDOW_BYTES = 1 << 20
STEADY_WINDOW_BYTES = 16 << 20
MAX_WINDOW_BYTES = 64 << 20
MAX_GET_BYTES = 6 << 20
"""Neighbouring blocks are merged into one GET up to this size: larger GETs cost less on a server, smaller ones use a
local disk better. Large enough for the check to be worth a worker thread."""
MAX_SEQUENCES = 4096
"""Number of readers remembered; the one that has not read for longest is dropped."""
IDLE_S = 30.0


class ReadSequence:
    """The position of one reader in one stream."""

    __slots__ = ("_ahead", "ahead_bytes", "ahead_offset", "busy", "last_read_s", "reads", "window_bytes")

    def __init__(self) -> None:
        self.window_bytes = 0
        """How many bytes to have ahead; 0 until the reader is known to be sequential."""
        self.reads = 0
        """Consecutive reads."""
        self.ahead_bytes = 0
        """Bytes of blocks requested ahead of the reader and not read by it yet."""
        self.ahead_offset = 0
        """The stream offset up to which blocks were requested."""
        self.busy = False
        """Whether its next blocks are being looked up."""
        self.last_read_s = 0.0
        self._ahead: deque[tuple[int, int]] | None = None
        """Created on the first read-ahead: most readers read once, and a deque takes 600 bytes."""

    @property
    def is_sequential(self) -> bool:
        """Return whether it has continued at least once."""
        return self.reads > 1

    def expects(self, start_offset: int) -> bool:
        """Return whether the block that begins at `start_offset` was read ahead for this reader."""
        return self._ahead is not None and bool(self._ahead) and start_offset < self._ahead[-1][0]

    def note(self, end_offset: int, length: int) -> None:
        """Record that a block of `length` bytes that ends at `end_offset` was requested ahead."""
        if self._ahead is None:
            self._ahead = deque()
        self._ahead.append((end_offset, length))
        self.ahead_bytes += length
        self.ahead_offset = end_offset

    def pass_to(self, offset: int) -> int:
        """Move the reader to `offset`; return the bytes of the blocks before it, which are no longer ahead."""
        if self._ahead is None:
            return 0
        passed = 0
        while self._ahead and self._ahead[0][0] <= offset:
            passed += self._ahead.popleft()[1]
        self.ahead_bytes -= passed
        return passed

    def forget_ahead(self) -> int:
        """Forget all read-ahead; return its bytes."""
        forgotten, self.ahead_bytes = self.ahead_bytes, 0
        self.ahead_offset = 0
        self._ahead = None
        return forgotten


class ReadAhead:
    """The windows of all readers, and the bound on their sum."""

    def __init__(self, bound_bytes: int, now_s: Callable[[], float]) -> None:
        self._bound_bytes = bound_bytes
        self._now_s = now_s
        self._sequences: OrderedDict[tuple[int, int], ReadSequence] = OrderedDict()
        self.ahead_bytes = 0
        """Bytes read ahead and not read yet, of all readers."""
        self.shrinks = 0
        """How often a window was halved because blocks were evicted unread."""

    def take(self, stream_id: int, offset: int) -> ReadSequence:
        """Return the reader that continues at this offset, or a new one; its position is now `offset`."""
        reader = self._sequences.pop((stream_id, offset), None) or ReadSequence()
        reader.reads += 1
        reader.last_read_s = self._now_s()
        self.ahead_bytes -= reader.pass_to(offset)
        reader.ahead_offset = max(reader.ahead_offset, offset)
        return reader

    def adapt(self, reader: ReadSequence, *, waited: bool, lost: bool) -> None:
        """Adapt the window: the read waited for blocks in flight, or found some evicted unread."""
        if not reader.is_sequential:
            return
        if lost:
            self.shrinks += 1
            self.ahead_bytes -= reader.forget_ahead()
            reader.window_bytes = max(reader.window_bytes // 2, FIRST_WINDOW_BYTES // 4)
        elif reader.window_bytes == 0:
            reader.window_bytes = FIRST_WINDOW_BYTES
        elif waited or (reader.window_bytes < STEADY_WINDOW_BYTES and reader.ahead_bytes * 2 <= reader.window_bytes):
            reader.window_bytes = min(reader.window_bytes * 2, MAX_WINDOW_BYTES)

    def wanted(self, reader: ReadSequence) -> int:
        """Return the bytes to request ahead of it now; 0: none, or not worth a GET yet."""
        active = 1 + sum(1 for one in self._newest(64) if one.ahead_bytes)
        window = min(reader.window_bytes, max(self._bound_bytes // active, FIRST_WINDOW_BYTES))
        room = min(window - reader.ahead_bytes, self._bound_bytes - self.ahead_bytes)
        if room < window // 2 and self.ahead_bytes + window > self._bound_bytes:
            self._expire()
            room = min(window - reader.ahead_bytes, self._bound_bytes - self.ahead_bytes)
        if room >= MAX_GET_BYTES:
            return room - room % MAX_GET_BYTES  # whole GETs only
        return room if room > 0 and room * 2 >= window else 0

    def _newest(self, count: int) -> Iterable[ReadSequence]:
        for number, reader in enumerate(reversed(self._sequences.values())):
            if number == count:
                return
            yield reader

    def note(self, reader: ReadSequence, end_offset: int, length: int) -> None:
        """See `ReadSequence.note`. No effect for a reader that was dropped meanwhile."""
        if reader.window_bytes:
            reader.note(end_offset, length)
            self.ahead_bytes += length

    def give(self, stream_id: int, following: int, reader: ReadSequence) -> None:
        """Remember where the reader continues. Of two at the same offset, the one with more ahead is kept."""
        key = stream_id, following
        self.ahead_bytes -= reader.pass_to(following)
        other = self._sequences.pop(key, None)
        if other is not None and other is not reader:
            if other.ahead_bytes > reader.ahead_bytes:
                reader, other = other, reader
            self.drop(other)
        self._sequences[key] = reader
        if len(self._sequences) > MAX_SEQUENCES:
            self.drop(self._sequences.popitem(last=False)[1])

    def drop(self, reader: ReadSequence) -> None:
        """Drop a reader and the account of its read-ahead."""
        self.ahead_bytes -= reader.forget_ahead()
        reader.window_bytes = 0

    def _expire(self) -> None:
        """Drop readers that have been idle for too long."""
        horizon = self._now_s() - IDLE_S
        while self._sequences:
            key, reader = next(iter(self._sequences.items()))
            if reader.last_read_s > horizon:
                return
            del self._sequences[key]
            self.drop(reader)
