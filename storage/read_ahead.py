"""How far to read ahead. Sans-IO: blocks read in, bytes wanted out.

A reader that comes back for the offset where its last read ended is sequential, and gets a window: how many bytes of
blocks to have ahead of it, fetched or on their way. The window

- begins at `FIRST_WINDOW_BYTES` with the second read in a row;
- doubles whenever half of it is used up, to `STEADY_WINDOW_BYTES`, so that GETs become large and few;
- doubles beyond that, to `MAX_WINDOW_BYTES`, when the reader had to wait for a block that was on its way: what is ahead
  does not cover the bucket's latency;
- halves when a block that was read ahead is gone unread: the cache is too small for all that is read ahead.

It is refilled by pieces of half a window, at most one GET each, so that several GETs are on their way.

A reader that jumps begins with nothing. All windows together keep within a bound; each reader's share of it is what
there is divided by how many read ahead now, and one that has not come back for `IDLE_S` gives its part back.

Entry: `ReadAhead`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

FIRST_WINDOW_BYTES = 1 << 20
STEADY_WINDOW_BYTES = 16 << 20
MAX_WINDOW_BYTES = 64 << 20
MAX_GET_BYTES = 6 << 20
"""Neighbouring blocks are merged into one GET up to this size: from a server larger ones cost less, on a local disk
smaller ones keep it busier. It is large enough for its check to be worth a thread."""
MAX_SEQUENCES = 4096
"""Readers remembered; the one that has not read for longest is forgotten."""
IDLE_S = 30.0


class Reader:
    """One reader's way through one stream."""

    __slots__ = ("_ahead", "ahead_bytes", "ahead_offset", "busy", "last_read_s", "reads", "window_bytes")

    def __init__(self) -> None:
        self.window_bytes = 0
        """How much to have ahead; 0 until it is known to read on."""
        self.reads = 0
        """Reads in a row."""
        self.ahead_bytes = 0
        """Bytes of blocks asked for ahead of the reader and not read by it yet."""
        self.ahead_offset = 0
        """The stream offset up to which blocks were asked for."""
        self.busy = False
        """Its next blocks are being looked up."""
        self.last_read_s = 0.0
        self._ahead: deque[tuple[int, int]] | None = None
        """Made when something is read ahead: most readers read once, and a deque takes 600 bytes."""

    @property
    def is_sequential(self) -> bool:
        """Whether it has read on at least once."""
        return self.reads > 1

    def expects(self, start_offset: int) -> bool:
        """Whether the block that begins at `start_offset` was read ahead for this reader."""
        return self._ahead is not None and bool(self._ahead) and start_offset < self._ahead[-1][0]

    def note(self, end_offset: int, length: int) -> None:
        """A block of `length` bytes that ends at `end_offset` was asked for ahead."""
        if self._ahead is None:
            self._ahead = deque()
        self._ahead.append((end_offset, length))
        self.ahead_bytes += length
        self.ahead_offset = end_offset

    def pass_to(self, offset: int) -> int:
        """The reader stands at `offset`: what lies before it is not ahead any more. Returns those bytes."""
        if self._ahead is None:
            return 0
        passed = 0
        while self._ahead and self._ahead[0][0] <= offset:
            passed += self._ahead.popleft()[1]
        self.ahead_bytes -= passed
        return passed

    def forget_ahead(self) -> int:
        """Nothing that was read ahead counts any more. Returns how many bytes it was."""
        forgotten, self.ahead_bytes = self.ahead_bytes, 0
        self.ahead_offset = 0
        self._ahead = None
        return forgotten


class ReadAhead:
    """The windows of all readers, and the bound on them together."""

    def __init__(self, bound_bytes: int, now_s: Callable[[], float]) -> None:
        self._bound_bytes = bound_bytes
        self._now_s = now_s
        self._sequences: OrderedDict[tuple[int, int], Reader] = OrderedDict()
        self.ahead_bytes = 0
        """Bytes read ahead and not read yet, of all readers."""
        self.shrinks = 0
        """How often a window was halved because blocks were evicted unread."""

    def take(self, stream_id: int, offset: int) -> Reader:
        """The reader that goes on at this offset, or a new one; it stands at `offset` now."""
        reader = self._sequences.pop((stream_id, offset), None) or Reader()
        reader.reads += 1
        reader.last_read_s = self._now_s()
        self.ahead_bytes -= reader.pass_to(offset)
        reader.ahead_offset = max(reader.ahead_offset, offset)
        return reader

    def adapt(self, reader: Reader, *, waited: bool, lost: bool) -> None:
        """Fit the window to what the read found: it waited for blocks on their way, or some were evicted unread."""
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

    def wanted(self, reader: Reader) -> int:
        """Bytes to ask for ahead of it now; 0: none, or not worth a GET yet."""
        active = 1 + sum(1 for one in self._newest(64) if one.ahead_bytes)
        window = min(reader.window_bytes, max(self._bound_bytes // active, FIRST_WINDOW_BYTES))
        room = min(window - reader.ahead_bytes, self._bound_bytes - self.ahead_bytes)
        if room < window // 2 and self.ahead_bytes + window > self._bound_bytes:
            self._expire()
            room = min(window - reader.ahead_bytes, self._bound_bytes - self.ahead_bytes)
        if room >= MAX_GET_BYTES:
            return room - room % MAX_GET_BYTES  # whole GETs, no crumbs
        return room if room > 0 and room * 2 >= window else 0

    def _newest(self, count: int) -> Iterable[Reader]:
        for number, reader in enumerate(reversed(self._sequences.values())):
            if number == count:
                return
            yield reader

    def note(self, reader: Reader, end_offset: int, length: int) -> None:
        """See `Reader.note`. A reader that was dropped meanwhile has nothing ahead."""
        if reader.window_bytes:
            reader.note(end_offset, length)
            self.ahead_bytes += length

    def give(self, stream_id: int, following: int, reader: Reader) -> None:
        """Remember where the reader goes on. Of two that stand at one place, the one with more ahead stays."""
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

    def drop(self, reader: Reader) -> None:
        """The reader is gone; what is ahead of it counts no more."""
        self.ahead_bytes -= reader.forget_ahead()
        reader.window_bytes = 0

    def _expire(self) -> None:
        """Readers that have not come back give their part back."""
        horizon = self._now_s() - IDLE_S
        while self._sequences:
            key, reader = next(iter(self._sequences.items()))
            if reader.last_read_s > horizon:
                return
            del self._sequences[key]
            self.drop(reader)
