"""What log compaction has done to a partition, and the reads and writes of it that a round needs (docs/design/0025).

The state is the key `cleaning` of the meta stream: where the last whole round ended. It is written together with the
sizes of the segments that the round has changed. A round whose record is lost is done again.

A round leaves out what a snapshot or a branch holds (docs/design/0031), and behind it removes no tombstone. The key
`cleaning/left` says so: when nobody holds anything of the log any more, all of it is dirty. Until a round over all of
it has ended, the key stays and no tombstone is removed, even if what it tells of was released meanwhile: older values
are there, and the maps of the rounds in between do not have their keys.

Entry: `LogCleaning`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from tidelog.batch.batch import parse_header
from tidelog.runtime.errors import CorruptData
from tidelog.storage.records import StreamEntry
from tidelog.stream.cleaning.aborted import AbortedTxns
from tidelog.stream.cleaning.plan import LogFacts, RecoverableOffset, Round, plan_round
from tidelog.stream.errors import require_version
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_state import PartitionState, segment_key
from tidelog.stream.segments import NO_TIMESTAMP

if TYPE_CHECKING:
    from tidelog.storage.storage import Storage

CLEANING = "cleaning"
LEFT = "cleaning/left"
"""Value: msgpack of the offset up to which the last round left something out."""
VERSION = 1
CLEANING_LEVEL = 4
"""Feature level from which on logs are compacted: versions before it know no holes."""
_READ_BYTES = 1 << 20


class Cleaned(msgspec.Struct, frozen=True, array_like=True):
    """Value of `cleaning`."""

    version: int
    first_dirty: int
    """Everything before this offset was cleaned by a whole round (int64)."""
    cleaned_ms: int
    """Wall clock at the end of that round."""


@dataclass(slots=True)
class SegmentChange:
    """What a round did to one segment."""

    before_bytes: int = 0
    kept_bytes: int = 0
    max_timestamp: int = NO_TIMESTAMP


@dataclass(slots=True)
class SegmentChanges:
    """What a round did to all segments, by base offset.

    Before, the bytes of the dirty part are counted where they are read for the keys, since not all of it is read again.
    """

    bases: list[int]
    by_base: dict[int, SegmentChange] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """Bases of the segments that have something that the round has left out."""

    def _at(self, offset: int) -> SegmentChange:
        return self.by_base.setdefault(self.bases[max(0, bisect_right(self.bases, offset) - 1)], SegmentChange())

    def leave(self, start: int, end: int) -> None:
        """Forget about the segments with offsets in `[start, end)`, which a round leaves out: they keep their sizes."""
        first, last = bisect_right(self.bases, start) - 1, bisect_right(self.bases, end - 1)
        self.left.update(self.bases[max(0, first) : last])

    def note_before(self, records: Iterable[StreamEntry], start: int, end: int) -> None:
        """Count records in `[start, end)` as they were before the round."""
        for one in records:
            if start <= one.base_offset < end:
                self._at(one.base_offset).before_bytes += len(one.payload)

    def note_after(self, records: Iterable[StreamEntry], start: int, end: int) -> None:
        """Count records in `[start, end)` as the round leaves them."""
        for one in records:
            if start <= one.base_offset < end:
                change = self._at(one.base_offset)
                change.kept_bytes += len(one.payload)
                if one.payload:
                    change.max_timestamp = max(change.max_timestamp, parse_header(one.payload).max_timestamp)


class KeyFilling(Protocol):
    """The first part of a round; see `tidelog.stream.cleaning.cleaner.Cleaning`."""

    @property
    def noted(self) -> int:
        """Return the offset up to which the map is filled."""
        ...

    async def note(self, records: Sequence[StreamEntry], aborted: AbortedTxns) -> bool:
        """Take the keys of the next records; return whether to go on."""
        ...


Pace = Callable[[int], Awaitable[None]]
"""Waits until so many bytes may be used."""


def last_round(state: PartitionState) -> Cleaned:
    """Return the last whole round; `cleaned_ms` is 0 if there was none. Raises `CorruptData`."""
    value = state.meta.get(CLEANING)
    if value is None:
        return Cleaned(VERSION, 0, 0)
    try:
        cleaned = msgspec.msgpack.decode(value, type=Cleaned)
    except msgspec.DecodeError as error:
        raise CorruptData(f"stream {state.meta.stream.stream_id}: `cleaning` does not parse") from error
    require_version(cleaned.version, VERSION, "the state of log compaction")
    return cleaned


def cut_rounds(state: PartitionState) -> None:
    """Let the last whole round end where the log ends, if it went on: what is written from there on is dirty.

    Raises as `MetaStream.put`, and `CorruptData`.
    """
    cleaned = last_round(state)
    if cleaned.first_dirty > state.data.next_offset:
        cut = msgspec.structs.replace(cleaned, first_dirty=state.data.next_offset)
        state.meta.put({CLEANING: msgspec.msgpack.encode(cut)})


class LogCleaning:
    """The compaction of one open partition log."""

    __slots__ = ("_recoverable", "_state", "_storage")

    def __init__(self, state: PartitionState, storage: Storage) -> None:
        self._state = state
        self._storage = storage
        self._recoverable = RecoverableOffset()

    @property
    def is_allowed(self) -> bool:
        """Return whether every member of the cluster knows holes."""
        return self._state.data.feature_level >= CLEANING_LEVEL

    @property
    def stream_id(self) -> int:
        """Return the data stream's."""
        return self._state.data.stream_id

    def last(self) -> Cleaned:
        """Return the last whole round; `cleaned_ms` is 0 if there was none. Raises `CorruptData`."""
        return last_round(self._state)

    @property
    def left(self) -> int:
        """Return up to where the last round left something out; 0: nothing. Raises `CorruptData`."""
        value = self._state.meta.get(LEFT)
        try:
            return 0 if value is None else msgspec.msgpack.decode(value, type=int)
        except msgspec.DecodeError as error:
            raise CorruptData(f"stream {self._state.meta.stream.stream_id}: `{LEFT}` does not parse") from error

    def plan(self, now_ms: int, config: LogConfig, *, is_held: bool = False) -> Round:
        """Return the next round, due or not. Raises `CorruptData`.

        `is_held`: what the last round left out has to be left out still.
        """
        state = self._state
        left = self.left if is_held else 0
        first_dirty = self.last().first_dirty if left or not self.left else 0
        scan_from = min(state.checkpoint_offset, state.producers_offset)
        recoverable = self._recoverable.look(scan_from, self._storage.data_end, self._storage.committed_offset)
        facts = LogFacts(state.segments, state.log_start, state.last_stable_offset, first_dirty, recoverable)
        return plan_round(facts, now_ms, config)._replace(left=left)

    async def fill(self, cleaning: KeyFilling, end: int, changes: SegmentChanges, pace: Pace) -> None:
        """Read the dirty part up to `end` and note its keys. Raises as `Stream.read`, and as `cleaning`."""
        at = first = cleaning.noted
        while at < end:
            records = await self._state.data.read(at, end, _READ_BYTES)
            following = records[-1].base_offset + records[-1].count
            await pace(sum(len(each.payload) for each in records))
            goes_on = await cleaning.note(records, await self.aborted(at, following))
            changes.note_before(records, first, cleaning.noted)
            if not goes_on:
                return
            at = first = following

    async def aborted(self, start: int, end: int) -> AbortedTxns:
        """Return what was aborted of offsets `[start, end)`. Raises `CorruptData`, `Unavailable`."""
        return AbortedTxns(await self._state.txn.lookup(start, end))

    def changes(self) -> SegmentChanges:
        """Return a place to note what a round does to the segments as they are now."""
        return SegmentChanges([segment.base_offset for segment in self._state.segments])

    def finish(self, end: int, now_ms: int, changes: SegmentChanges, log_start: int, left: int = 0) -> None:
        """Record a round over `[log_start, end)`. Raises `WalFull`, `Overloaded`, `WalFailed`: it is then done again.

        `left`: up to where it, or one before it, left something out; 0: nothing. The log is open: nothing else may
        write its meta stream.
        """
        state = self._state
        entries: dict[str, bytes | None] = {CLEANING: msgspec.msgpack.encode(Cleaned(VERSION, end, now_ms))}
        if left or state.meta.get(LEFT) is not None:
            entries[LEFT] = msgspec.msgpack.encode(left) if left else None
        updates: list[tuple[int, int, int]] = []
        for index, segment in enumerate(state.segments[:-1]):
            change = changes.by_base.get(segment.base_offset)
            if change is None or segment.base_offset in changes.left:
                continue
            removed = change.before_bytes - change.kept_bytes
            size, newest = max(0, segment.size_bytes - removed), segment.max_timestamp
            if log_start <= segment.base_offset and state.segment_end(index) <= end:
                size, newest = change.kept_bytes, change.max_timestamp
            if (size, newest) != (segment.size_bytes, segment.max_timestamp):
                updates.append((index, size, newest))
                again = msgspec.structs.replace(segment, size_bytes=size, max_timestamp=newest)
                entries[segment_key(segment.base_offset)] = msgspec.msgpack.encode(again)
        state.mark_dirty()
        state.meta.put(entries)
        self._storage.forget_before(self.stream_id, end)
        for index, size, newest in updates:
            state.segments[index].size_bytes, state.segments[index].max_timestamp = size, newest
