"""One round over a log: fills the map, then decides of each record batch what is left of it.

The order of calls: `note` for the batches of the dirty part, until one does not fit; `seal`; then `clean` for
all records of the log from its start to the round's end, in order. `clean` may be asked again about the records since a
`mark`, after `rewind`: another one may have replaced the object that they came from. What lies before these comes back
as it is.

Invariants: records go in and come out with the same offsets; the batch that ends the round stays; a batch that loses
nothing comes out as the same bytes, so a second round changes nothing. A delete horizon is set, and acted upon, only
while everything before it was readable.

Entry: `Cleaning`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidelog.batch.batch import (
    BatchHeader,
    ControlType,
    CorruptRecord,
    Record,
    RecordTooLarge,
    control_type,
    iter_records,
    parse_header,
    rebuild,
)
from tidelog.storage.records import StreamEntry
from tidelog.stream.cleaning.aborted import AbortedTxns
from tidelog.stream.cleaning.key_map import KeyMap

NOTHING_ABORTED = AbortedTxns(())


class Mark(NamedTuple):
    """What `Cleaning` knows at some offset."""

    offset: int
    open_txns: frozenset[int]
    is_readable: bool


class Cleaning:
    """The decisions of one round. Offsets int64, times in ms since the Unix epoch."""

    def __init__(self, first_dirty: int, end: int, *, map_bytes: int, now_ms: int, delete_retention_ms: int) -> None:
        """A round that fills its map from `[first_dirty, end)`, both of them batches' bounds."""
        self._keys = KeyMap(map_bytes)
        self._noted = first_dirty
        self._limit = end
        self._end = -1
        self._now_ms = now_ms
        self._delete_retention_ms = delete_retention_ms
        self._at = -1
        self._open_txns: set[int] = set()
        """Producers of whose open transaction a record is left."""
        self._is_readable = True
        """Every batch before was read into: no older value of a key may be left there."""

    # --- the map -------------------------------------------------------------------------------------------------

    @property
    def noted(self) -> int:
        """Return the offset up to which the map is filled."""
        return self._noted

    @property
    def keys(self) -> int:
        """Return the number of keys in the map."""
        return len(self._keys)

    @property
    def capacity(self) -> int:
        """Return how many keys fit into the map."""
        return self._keys.capacity

    def note(self, records: Iterable[StreamEntry], aborted: AbortedTxns) -> bool:
        """Take the keys of the next records; return False at one whose keys do not all fit, or at the round's limit.

        Raises `CorruptRecord`.
        """
        for record in records:
            next_offset = record.base_offset + record.count
            if next_offset <= self._noted:
                continue
            if record.base_offset >= self._limit:
                return False
            if not record.is_hole and not self._keys.add(_keys_of(record, aborted)):
                return False
            self._noted = next_offset
        return self._noted < self._limit

    def seal(self) -> int:
        """End the filling; return where the round ends. From here on `clean` may be called."""
        self._end = self._noted
        return self._end

    # --- the records ---------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Return the state before the next record, for `rewind`."""
        return Mark(self._at, frozenset(self._open_txns), self._is_readable)

    def rewind(self, mark: Mark) -> None:
        """Continue from there: the records since then come again."""
        self._at, self._open_txns, self._is_readable = mark.offset, set(mark.open_txns), mark.is_readable

    def clean(self, records: Iterable[StreamEntry], aborted: AbortedTxns) -> list[StreamEntry]:
        """Return what is left of the log's next records: each itself, another batch, or a hole. Raises `CorruptRecord`.

        Records at or after the round's end come back as they are.
        """
        assert self._end >= 0, "the map is not sealed"
        return [self._clean(record, aborted) for record in records]

    def _clean(self, record: StreamEntry, aborted: AbortedTxns) -> StreamEntry:
        if record.base_offset < self._at:  # of an object that someone merged with one that was cleaned
            return record
        self._at = record.base_offset + record.count
        if record.is_hole or record.base_offset >= self._end:
            return record
        header = parse_header(record.payload)
        if (header.base_offset, header.next_offset) != (record.base_offset, self._at):
            raise CorruptRecord(f"the batch at {record.base_offset} does not match its stream record")
        payload = self._marker(header, record, aborted) if header.is_control else self._batch(header, record, aborted)
        return record if payload is record.payload else StreamEntry(record.base_offset, record.count, payload)

    def _is_last(self, header: BatchHeader) -> bool:
        return header.next_offset >= self._end

    def _is_over(self, header: BatchHeader) -> bool:
        """Return whether the delete horizon of a batch has passed."""
        return header.has_delete_horizon and header.base_timestamp <= self._now_ms and self._is_readable

    def _horizon(self, header: BatchHeader) -> int | None:
        """Return the horizon to give to a batch; None: it has one, or may not get one yet."""
        may = self._is_readable and not header.has_delete_horizon
        return self._now_ms + self._delete_retention_ms if may else None

    def _batch(self, header: BatchHeader, record: StreamEntry, aborted: AbortedTxns) -> bytes | memoryview:
        try:
            records = [] if aborted.covers(header) else list(iter_records(record.payload, header=header))
        except RecordTooLarge:
            self._is_readable = False
            if header.is_transactional:
                self._open_txns.add(header.producer_id)
            return record.payload
        is_over = self._is_over(header)
        left = [one for one in records if self._keeps(one, is_over)]
        if left and header.is_transactional:
            self._open_txns.add(header.producer_id)
        horizon = self._horizon(header) if any(one.value is None for one in left) else None
        if len(left) == header.count and horizon is None:
            return b"" if not left and not self._is_last(header) else record.payload
        if not left and not self._is_last(header):
            return b""
        return rebuild(header, left, delete_horizon_ms=horizon)

    def _keeps(self, record: Record, is_over: bool) -> bool:
        if record.key is None or self._keys.is_superseded(record.key, record.offset):
            return False
        return record.value is not None or not is_over

    def _marker(self, header: BatchHeader, record: StreamEntry, aborted: AbortedTxns) -> bytes | memoryview:
        records = list(iter_records(record.payload, header=header))
        kind = control_type(records[0]) if records else -1
        if kind not in (ControlType.ABORT, ControlType.COMMIT):
            return record.payload
        has_data = header.producer_id in self._open_txns
        self._open_txns.discard(header.producer_id)
        if has_data or (kind == ControlType.ABORT and aborted.has_marker(header.base_offset)):
            return record.payload
        if self._is_over(header):
            return record.payload if self._is_last(header) else b""
        horizon = self._horizon(header)
        return record.payload if horizon is None else rebuild(header, records, delete_horizon_ms=horizon)


def _keys_of(record: StreamEntry, aborted: AbortedTxns) -> list[tuple[bytes, int]]:
    header = parse_header(record.payload)
    if header.is_control or aborted.covers(header):
        return []
    try:
        return [(one.key, one.offset) for one in iter_records(record.payload, header=header) if one.key is not None]
    except RecordTooLarge:
        return []
