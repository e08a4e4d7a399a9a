"""When a WAL's positions passed which offsets: how times are told of records that went through it (docs/design/0029).

A position (durable, confirmed, uploaded) only grows. `PositionHistory` keeps its advances as spans that follow one
another: a span says that everything up to its end was passed between two moments. New spans are two milliseconds wide;
older ones are joined to coarser ones, and the oldest are dropped. So an answer is never wrong, only less exact the
older it is, and None when it is not known any more.

`StreamPlaces` keeps, at a bounded rate, which offset of a stream lies where in the WAL: a sample of appends, from which
bounds follow for those between. `WalHistory` has both, for one term of a replica set's master.

Invariants: the memory is bounded (`BOUND_BYTES`) and grows only with use; no time is invented: what is told lies
between two moments that were read from the clock, or is one of them.

Entry: `WalHistory`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from tidelog.runtime.clock import Clock

TIERS = ((0.002, 1024), (0.1, 1024), (5.0, 768), (60.0, 1440))
"""Width in seconds and number of spans, from new to old: two seconds or more at 2 ms, 100 s at 100 ms, an hour at five
seconds, a day at a minute."""
PLACES = (8_192, 24_576)
"""Samples of appends: the newest, and of those before them one for each stream in `COARSE_S`."""
COARSE_S = 10.0
TICK_S = 0.02
"""A stream's appends are sampled once in a tick, which ends with a sync."""
PLACES_PER_TICK = 16
"""Samples of all streams in a tick: 800 a second at most, some microseconds each."""
STARTS = UPLOADS = 1_024
"""Moves of log starts, and uploads, that are remembered."""
_END = itemgetter(0)
_NO_SPAN = -1.0
"""A second before all others."""
_SPARE = 1024
"""Samples at the front of an array that are dropped together."""
_SPAN_BYTES, _PLACE_BYTES, _START_BYTES = 200, 40, 200
BOUND_BYTES = (
    3 * _SPAN_BYTES * sum(2 * count for _, count in TIERS)
    + _PLACE_BYTES * (sum(PLACES) + 2 * _SPARE)
    + 2 * _START_BYTES * STARTS
)
"""Bytes of one WAL's history, at most: 6.9 MB."""


class Passing(NamedTuple):
    """When a position passed an offset: at one moment between the two, or at it, if they are the same."""

    after_s: float
    """Monotonic seconds."""
    by_s: float
    after_ms: int
    """Wall clock."""
    by_ms: int


class Place(NamedTuple):
    """An append that was sampled."""

    base_offset: int
    wal_end: int
    """WAL byte offset after it."""
    at_s: float
    """Monotonic seconds of the append."""
    at_ms: int
    """Wall clock."""


class Placed(NamedTuple):
    """Where a stream's offset lies in the WAL: between the two samples, or at the first if it begins there."""

    low: Place | None
    high: Place | None
    exact: bool
    """`low` is the append that was asked for."""


_Span = tuple[int, float, float, float]
"""Everything up to an offset, from the end of the span before it, was passed between two moments: that offset, the two
in monotonic seconds, and by how many ms the wall clock led at the first."""


def _passing(span: _Span) -> Passing:
    """Return when the offsets of a span were passed."""
    _, first_s, last_s, lead_ms = span
    return Passing(first_s, last_s, int(first_s * 1000 + lead_ms), int(last_s * 1000 + lead_ms))


class _Tier:
    """Spans of one width, oldest first.

    A quarter more than `capacity` are kept, so that the oldest go to the next tier many at a time: five hundred a
    second may be added, and each Python function that one of them calls runs with cold caches.
    """

    __slots__ = ("capacity", "full", "spans", "width_s")

    def __init__(self, width_s: float, capacity: int) -> None:
        self.width_s = width_s
        self.capacity = capacity
        self.full = capacity + capacity // 4
        """With more spans than these, it is time to take the oldest."""
        self.spans: list[_Span] = []

    def join(self, newer: list[_Span]) -> bool:
        """Add spans, joined as far as they stay narrow; return whether there are more than `full`."""
        spans, width_s = self.spans, self.width_s
        end, first_s, last_s, lead_ms = spans.pop() if spans else newer[0]
        for next_end, next_first_s, next_last_s, next_lead_ms in newer:
            if next_last_s - first_s > width_s:
                spans.append((end, first_s, last_s, lead_ms))
                first_s, lead_ms = next_first_s, next_lead_ms
            end, last_s = next_end, next_last_s
        spans.append((end, first_s, last_s, lead_ms))
        return len(spans) > self.full

    def take_oldest(self) -> list[_Span]:
        """Remove all but the newest `capacity`, and return them."""
        oldest = self.spans[: -self.capacity]
        del self.spans[: -self.capacity]
        return oldest

    def find(self, offset: int) -> _Span | None:
        """Return the span that `offset` is in; None if it is after the last one."""
        at = bisect_left(self.spans, offset, key=_END)
        return self.spans[at] if at < len(self.spans) else None


class PositionHistory:
    """The advances of one position, which only grows.

    The newest span is in attributes, where to widen it is cheap; it is handed to the tiers when it is as wide as it may
    be.
    """

    __slots__ = ("_clock", "_first_s", "_last_s", "_lead_ms", "_open_until_s", "_tiers", "end", "floor")

    def __init__(self, clock: Clock, start: int = 0, tiers: Sequence[tuple[float, int]] = TIERS) -> None:
        self._clock = clock
        self._tiers = [_Tier(width_s, count) for width_s, count in tiers]
        self._first_s = self._last_s = self._lead_ms = 0.0
        self._open_until_s = _NO_SPAN
        """Until then the newest span takes what comes."""
        self.floor = start
        """Of what was passed up to here nothing is known."""
        self.end = start
        """The position."""

    def note(self, offset: int, now_s: float) -> None:
        """The position has just come to `offset`; not less than the last one. `now_s`: monotonic."""
        if offset <= self.end:
            return
        if now_s > self._open_until_s:
            self._begin_span(now_s)
        self.end = offset
        self._last_s = now_s

    def _begin_span(self, now_s: float) -> None:
        """Hand the newest span to the tiers, and begin another one."""
        newest = self._tiers[0]
        if self._open_until_s != _NO_SPAN:
            newest.spans.append((self.end, self._first_s, self._last_s, self._lead_ms))
            if len(newest.spans) > newest.full:
                self._age()
        self._first_s = now_s
        self._lead_ms = self._clock.time_ms() - now_s * 1000
        self._open_until_s = now_s + newest.width_s

    def _age(self) -> None:
        """Hand the oldest spans of each full tier to the next one."""
        for fine, coarse in zip(self._tiers, self._tiers[1:], strict=False):
            if not coarse.join(fine.take_oldest()):
                return
        self.floor = self._tiers[-1].take_oldest()[-1][0]

    def passing(self, offset: int) -> Passing | None:
        """Return when the position passed `offset`; None if it has not, or that is not known any more."""
        if not self.floor < offset <= self.end:
            return None
        for tier in reversed(self._tiers):
            found = tier.find(offset)
            if found is not None:
                return _passing(found)
        return _passing((self.end, self._first_s, self._last_s, self._lead_ms))

    def passed_by(self, offset: int, now_s: float) -> float:
        """Return the monotonic second by which the position passed `offset`: `now_s` if it has not, and 0 if that is
        not known any more."""
        if offset > self.end:
            return now_s
        found = self.passing(offset)
        return 0.0 if found is None else found.by_s

    def size_bytes(self) -> int:
        """Bytes of the spans."""
        return _SPAN_BYTES * sum(len(tier.spans) for tier in self._tiers)


class _Samples:
    """Sampled appends of all streams, oldest first."""

    __slots__ = ("_at_ms", "_at_s", "_bases", "_ends", "_head", "_streams", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._streams, self._bases, self._ends = array("q"), array("q"), array("q")
        self._at_s, self._at_ms = array("d"), array("q")
        self._head = 0

    def __len__(self) -> int:
        return len(self._streams) - self._head

    def add(self, stream_id: int, place: Place) -> bool:
        """Add the newest; return whether there is one too many."""
        base_offset, wal_end, at_s, at_ms = place
        self._streams.append(stream_id)
        self._bases.append(base_offset)
        self._ends.append(wal_end)
        self._at_s.append(at_s)
        self._at_ms.append(at_ms)
        return len(self._streams) - self._head > self.capacity

    def take_oldest(self) -> tuple[int, Place]:
        """Remove the oldest and return it."""
        stream_id, found = self._streams[self._head], self._at(self._head)
        self._head += 1
        if self._head >= _SPARE:
            for column in (self._streams, self._bases, self._ends, self._at_s, self._at_ms):
                del column[: self._head]
            self._head = 0
        return stream_id, found

    def of(self, stream_id: int) -> list[Place]:
        """Return those of a stream, oldest first."""
        head = self._head
        return [self._at(at) for at, each in enumerate(self._streams) if each == stream_id and at >= head]

    def streams(self) -> set[int]:
        """Return the streams that have a sample."""
        return set(self._streams[self._head :])

    def _at(self, at: int) -> Place:
        return Place(self._bases[at], self._ends[at], self._at_s[at], self._at_ms[at])

    def size_bytes(self) -> int:
        """Bytes of the entries, spare ones included."""
        return _PLACE_BYTES * len(self._streams)


class StreamPlaces:
    """Which offsets of streams lie where in the WAL, by samples of their appends."""

    __slots__ = ("_coarse", "_fine", "_kept_at")

    def __init__(self, places: tuple[int, int] = PLACES) -> None:
        self._fine, self._coarse = (_Samples(count) for count in places)
        self._kept_at: dict[int, float] = {}
        """When the newest coarse sample of a stream was appended, in monotonic seconds."""

    def add(self, stream_id: int, place: Place) -> None:
        """Add an append, after all that were added."""
        if not self._fine.add(stream_id, place):
            return
        old_id, old = self._fine.take_oldest()
        kept_at = self._kept_at.get(old_id)
        if kept_at is not None and old.at_s - kept_at < COARSE_S:
            return
        self._kept_at[old_id] = old.at_s
        if self._coarse.add(old_id, old):
            self._coarse.take_oldest()
        if len(self._kept_at) > self._coarse.capacity:
            known = self._coarse.streams()
            self._kept_at = {each: at for each, at in self._kept_at.items() if each in known}

    def find(self, stream_id: int, base_offset: int) -> Placed:
        """Return the samples around the append that begins at `base_offset`."""
        low = high = None
        for samples in (self._coarse, self._fine):
            for place in samples.of(stream_id):
                if place.base_offset <= base_offset:
                    low, high = place, None
                elif high is None:
                    high = place
        return Placed(low, high, low is not None and low.base_offset == base_offset)

    def size_bytes(self) -> int:
        """Bytes of the samples."""
        return self._fine.size_bytes() + self._coarse.size_bytes()


class StartMove(NamedTuple):
    """A partition's log start was moved."""

    stream_id: int
    """The partition's first stream."""
    offset: int
    """The new log start."""
    at_ms: int
    """Wall clock at which that was confirmed here."""


class UploadNote(NamedTuple):
    """An upload that was committed."""

    wal_end: int
    """WAL offset after what it covers, from the end of the one before it."""
    first_object: int
    objects: int
    """Number of its objects, with consecutive ids."""


class WalHistory:
    """What one term of a master remembers of its WAL."""

    __slots__ = (
        "_clock",
        "_monotonic",
        "_next_tick_s",
        "_places",
        "_starts",
        "_uploads",
        "confirmed",
        "durable",
        "left",
        "since_ms",
        "tick",
        "uploaded",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._monotonic = clock.monotonic
        self._next_tick_s = 0.0
        self._places = StreamPlaces()
        self._starts: deque[StartMove] = deque(maxlen=STARTS)
        self._uploads: deque[UploadNote] = deque(maxlen=UPLOADS)
        self.durable = PositionHistory(clock)
        """Of the master's own WAL; the same object as `confirmed` where that is the quorum."""
        self.confirmed = PositionHistory(clock)
        self.uploaded = PositionHistory(clock)
        """What the bucket has and the metadata name."""
        self.since_ms = 0
        """Wall clock at which this history begins; 0: it has not begun."""
        self.tick = 0
        """Number of the tick: `appended` is to be called once in a tick for a stream, while `left` is not 0."""
        self.left = 0
        """Samples that may still be taken in this tick."""

    def begin(self, *, durable: int | None, confirmed: int, uploaded: int) -> None:
        """Begin, at these WAL offsets. `durable` None: this WAL alone is the quorum."""
        self.confirmed = PositionHistory(self._clock, confirmed)
        self.durable = self.confirmed if durable is None else PositionHistory(self._clock, durable)
        self.uploaded = PositionHistory(self._clock, uploaded)
        self.since_ms = self._clock.time_ms()
        self.tick, self.left = 1, PLACES_PER_TICK

    def note_durable(self, offset: int) -> None:
        """The master's own WAL is durable up to `offset`. Called before those who wait for that."""
        now_s = self._monotonic()
        self.durable.note(offset, now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self.tick += 1
            self.left = PLACES_PER_TICK

    def note_confirmed(self, offset: int) -> None:
        """The quorum has everything up to `offset`. Called before those who wait for that."""
        self.confirmed.note(offset, self._monotonic())

    def note_uploaded(self, offset: int) -> None:
        """Everything up to `offset` is in the bucket and committed."""
        self.uploaded.note(offset, self._monotonic())

    def appended(self, stream_id: int, base_offset: int, wal_end: int) -> None:
        """Sample an append, which has just been queued in the WAL."""
        self.left -= 1
        self._places.add(stream_id, Place(base_offset, wal_end, self._clock.monotonic(), self._clock.time_ms()))

    def reached(self, wal_end: int, now_s: float) -> tuple[float, float]:
        """Return by when all up to `wal_end` was durable here, and confirmed. See `PositionHistory.passed_by`."""
        return self.durable.passed_by(wal_end, now_s), self.confirmed.passed_by(wal_end, now_s)

    def place(self, stream_id: int, base_offset: int) -> Placed:
        """Return where the append that begins at `base_offset` lies; takes a millisecond."""
        return self._places.find(stream_id, base_offset)

    def note_objects(self, wal_end: int, first_object: int, objects: int) -> None:
        """An upload up to `wal_end` was committed with these objects, in the order of the WAL."""
        self._uploads.append(UploadNote(wal_end, first_object, objects))

    def upload_of(self, placed: Placed) -> UploadNote | None:
        """Return the upload that covers an append; None if it is not remembered, or could be one of two."""
        if placed.low is None or not (placed.exact or placed.high is not None):
            return None
        ends = [each.wal_end for each in self._uploads]
        first = bisect_left(ends, placed.low.wal_end)
        last = first if placed.exact or placed.high is None else bisect_left(ends, placed.high.wal_end)
        if first != last or first == len(ends) or (first == 0 and len(ends) == UPLOADS):
            return None  # what the oldest one begins at is forgotten when others were before it
        return self._uploads[first]

    def start_moved(self, stream_id: int, offset: int) -> None:
        """A partition's log start has moved to `offset`, confirmed. `stream_id`: its first stream."""
        self._starts.append(StartMove(stream_id, offset, self._clock.time_ms()))

    def deletion_of(self, stream_id: int, offset: int) -> StartMove | None:
        """Return the move of the log start that took `offset` away; None if it is not remembered."""
        for move in self._starts:
            if move.stream_id == stream_id and move.offset > offset:
                return move
        return None

    def size_bytes(self) -> int:
        """Bytes of what is remembered; at most `BOUND_BYTES`."""
        positions = {id(each): each for each in (self.durable, self.confirmed, self.uploaded)}
        marks = sum(each.size_bytes() for each in positions.values())
        return marks + self._places.size_bytes() + _START_BYTES * (len(self._starts) + len(self._uploads))
