"""What snapshots and branches hold of the objects' ranges: for each stream, intervals of offsets by their holder.

A pure function of the tables `snapshots`, `branches` and `streams`, kept by `tidelog.controller.machine.index`. The
interval of a branch shrinks with the start of its stream: what the branch has trimmed it does not hold.

Entry: `Pins`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidelog.controller.model.records import STREAMS_PER_PARTITION, StreamRecord
from tidelog.controller.model.snapshots import BranchRecord, SnapshotRecord

Holder = tuple[str, int]
"""The snapshot's name, or "" for a branch, and the first stream of the partition for which the offsets are held."""
Interval = tuple[int, int]


def described(holder: Holder) -> str:
    """Return a holder as operators know it."""
    name, first_stream = holder
    return f"snapshot {name!r}" if name else f"the branch with stream {first_stream}"


class Pins:
    """Held intervals. Those methods that may end a hold return the streams of which less may be held than before."""

    def __init__(self) -> None:
        self._intervals: dict[int, dict[Holder, Interval]] = {}
        self._branches: dict[int, BranchRecord] = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pins):
            return NotImplemented
        return (self._intervals, self._branches) == (other._intervals, other._branches)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self._intervals)

    def note_snapshot(self, old: SnapshotRecord | None, new: SnapshotRecord | None) -> list[int]:
        """A row of table `snapshots` has changed. Rows are added and deleted, and never replaced by others."""
        if old is not None:
            for first_stream, extent in old.extents():
                self._put(extent.stream_id, (old.name, first_stream), None)
        if new is not None:
            for first_stream, extent in new.extents():
                self._put(extent.stream_id, (new.name, first_stream), (extent.start_offset, extent.end_offset))
        return [] if old is None else [extent.stream_id for _, extent in old.extents()]

    def note_branch(
        self, old: BranchRecord | None, new: BranchRecord | None, streams: dict[int, StreamRecord]
    ) -> list[int]:
        """A row of table `branches` has changed."""
        if old is not None:
            del self._branches[old.first_stream]
            for extents in old.extents:
                for extent in extents:
                    self._put(extent.stream_id, ("", old.first_stream), None)
        if new is not None:
            self._branches[new.first_stream] = new
            for place in range(STREAMS_PER_PARTITION):
                self._hold_for(new, place, streams.get(new.first_stream + place))
        return [] if old is None else [extent.stream_id for extents in old.extents for extent in extents]

    def note_start(self, stream: StreamRecord) -> list[int]:
        """A stream's start may have moved."""
        place = stream.id % STREAMS_PER_PARTITION
        branch = self._branches.get(stream.id - place)
        return [] if branch is None else self._hold_for(branch, place, stream)

    def _hold_for(self, branch: BranchRecord, place: int, stream: StreamRecord | None) -> list[int]:
        least = stream.start_offset if stream is not None else 0
        extents = branch.extents[place]
        for extent in extents:
            start = max(extent.start_offset, least)
            interval = (start, extent.end_offset) if start < extent.end_offset else None
            self._put(extent.stream_id, ("", branch.first_stream), interval)
        return [extent.stream_id for extent in extents]

    def _put(self, stream_id: int, holder: Holder, interval: Interval | None) -> None:
        mine = self._intervals.get(stream_id)
        if interval is not None:
            if mine is None:
                mine = self._intervals[stream_id] = {}
            mine[holder] = interval
        elif mine is not None:
            mine.pop(holder, None)
            if not mine:
                del self._intervals[stream_id]

    def is_held(self, stream_id: int) -> bool:
        """Return whether any offset of a stream is held."""
        return stream_id in self._intervals

    def holders(self, stream_id: int, start: int, end: int) -> Iterator[Holder]:
        """Iterate over the holders of offsets in `[start, end)`."""
        for holder, (first, last) in self._intervals.get(stream_id, {}).items():
            if first < end and start < last:
                yield holder

    def holds(self, stream_id: int, start: int, end: int) -> bool:
        """Return whether an offset in `[start, end)` is held."""
        return any(True for _ in self.holders(stream_id, start, end))

    def holds_any(self, ranges: Iterable[tuple[int, int, int]]) -> bool:
        """Return whether an object with these ranges (stream id, start, end) is held."""
        return any(each[0] in self._intervals and self.holds(*each) for each in ranges)

    def holder_of(self, ranges: Iterable[tuple[int, int, int]]) -> Holder | None:
        """Return a holder of an object with these ranges (stream id, start, end): the first by name; None: nobody."""
        if not self._intervals:
            return None
        found = {
            holder
            for stream_id, start, end in ranges
            if stream_id in self._intervals
            for holder in self.holders(stream_id, start, end)
        }
        return min(found, default=None)
