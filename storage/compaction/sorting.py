"""Chooses full stream-set objects whose data is sorted by stream: together they become as many, each with few streams.

An upload has a little of each of thousands of streams, and each of these *ranges* is a slice in every process's
metadata for as long as its data is kept. Sorting k such objects gives each stream one range where it had up to k.
Outputs are cut where the streams' ids are cut, so an output has about a k-th of the streams; sorted again with its
likes, k times later, it has a k-th of these. A stream that comes to `compaction.stream_bytes` leaves for objects of
its own. Thus a byte is sorted about log_k(stream_bytes / range of an upload) times and once more; docs/performance.md
has what was measured.

A group is worth it when it is large enough and leaves at most `1 / MIN_GAIN` of its ranges, which are counted, not
estimated: planning therefore ends. Objects that lie mostly beside each other must leave at most `1 / MIN_GAIN_APART`,
and usually wait for others. The members have about as many ranges as the oldest, and lie mostly among its streams: data
that was sorted is not sorted again with data that was not.

Entry: `may_be_sorted`, `groups`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter, itemgetter

from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.settings import CompactionSettings

MAX_RANGES = 50_000
"""Limit on the stream ranges of all inputs of a task, so that the command that commits it stays near 1 MB."""
MAX_INPUTS = 16
"""Limit on the objects that are sorted together."""
MIN_GAIN = 1.25
"""Ranges of a group's objects for each range of what they become."""
MIN_GAIN_APART = 2.0
"""The same for objects that lie mostly beside each other. They wait for others, among the same streams: sorted sooner,
they took most of the writing and left their streams as scattered as before."""
_ALIKE = 3
"""Objects with at most so many times the ranges of another one were sorted as often."""

_stream_id = attrgetter("stream_id")


def may_be_sorted(one: ObjectFacts, settings: CompactionSettings) -> bool:
    """Return whether a stream-set object is full, and its streams have less in it than makes objects of their own."""
    many = len(one.ranges)
    return 2 * one.size >= settings.target_bytes and 2 <= many <= MAX_RANGES and one.size < many * settings.stream_bytes


def ranges_left(group: Sequence[ObjectFacts]) -> int:
    """Return the number of ranges that remain when adjoining ones of all these objects are joined."""
    pieces = sorted((piece.stream_id, piece.start_offset, piece.end_offset) for one in group for piece in one.ranges)
    joined = sum(one[0] == two[0] and one[2] == two[1] for one, two in pairwise(pieces))
    return len(pieces) - joined


def groups(candidates: Sequence[ObjectFacts], settings: CompactionSettings) -> Iterator[tuple[ObjectFacts, ...]]:
    """Yield disjoint groups of `may_be_sorted` objects that are worth a task, those with the oldest objects first."""
    shelf = _Shelf(sorted(candidates))
    tried: set[int] = set()
    for anchor in shelf.in_order:
        if anchor.object_id in tried or anchor.object_id in shelf.taken:
            continue
        found: list[ObjectFacts] = []
        for share, gain in ((0.5, MIN_GAIN), (0.0, MIN_GAIN_APART)):
            found = shelf.around(anchor, share, settings)
            if not found:
                continue
            tried.update(one.object_id for one in found)
            if gain * ranges_left(found) <= sum(len(one.ranges) for one in found):
                shelf.taken.update(one.object_id for one in found)
                yield tuple(found)
                break


class _Shelf:
    """The candidates by the size of their ranges, and there by their first streams."""

    def __init__(self, in_order: Sequence[ObjectFacts]) -> None:
        self.in_order = in_order
        self.taken: set[int] = set()
        self._rows: dict[int, list[tuple[int, int, ObjectFacts]]] = {}
        """By the binary logarithm of the number of ranges: first and last stream, and the object."""
        for one in in_order:
            self._rows.setdefault(len(one.ranges).bit_length(), []).append(
                (one.ranges[0].stream_id, one.ranges[-1].stream_id, one)
            )
        self._widest = {key: max(last - first for first, last, _ in row) for key, row in self._rows.items()}
        for row in self._rows.values():
            row.sort(key=itemgetter(0))

    def around(self, anchor: ObjectFacts, share: float, settings: CompactionSettings) -> list[ObjectFacts]:
        """Return the oldest objects like `anchor` with over `share` of their ranges among its streams, or [] if few."""
        need = min(MAX_INPUTS, settings.max_objects, 2 * settings.min_objects)
        limit = min(MAX_INPUTS, settings.max_objects)
        found: list[ObjectFacts] = []
        ranges = 0
        for one in sorted(self._alike(anchor, share)):
            ranges += len(one.ranges)
            if ranges > MAX_RANGES:  # no more fit into one command: two are enough
                return found if len(found) >= 2 else []
            found.append(one)
            if len(found) == limit:
                return found
        return found if len(found) >= need else []

    def _alike(self, anchor: ObjectFacts, share: float) -> Iterator[ObjectFacts]:
        first, last, many = anchor.ranges[0].stream_id, anchor.ranges[-1].stream_id, len(anchor.ranges)
        for key in range((many // _ALIKE).bit_length(), (many * _ALIKE).bit_length() + 1):
            row = self._rows.get(key, [])
            at = bisect_left(row, first - self._widest.get(key, 0), key=itemgetter(0))
            for _, end, one in row[at : bisect_left(row, last + 1, key=itemgetter(0))]:
                if end < first or one.object_id in self.taken or not many <= len(one.ranges) * _ALIKE <= many * 9:
                    continue
                upper = bisect_left(one.ranges, last + 1, key=_stream_id)
                if upper - bisect_left(one.ranges, first, key=_stream_id) > share * len(one.ranges):
                    yield one
