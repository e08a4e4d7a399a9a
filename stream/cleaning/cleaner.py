"""One round over a log: fills the map, then decides of each record batch what is left of it.

The order of calls: `note` for the batches of the dirty part, until one does not fit; `seal`; then `clean` for
all records of the log from its start to the round's end, in order. `clean` may be asked again about the records since a
`mark`, after `rewind`: another one may have replaced the object that they came from. What lies before these comes back
as it is.

Of the dirty part, the offsets that stay are known when the map is sealed: a batch without any is not decoded, and
`remains` tells of a whole stretch that it need not even be read.

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
    RecordScan,
    RecordTooLarge,
    control_type,
    cut,
    iter_records,
    parse_header,
    rebuild,
    scan,
)
from tidelog.storage.records import StreamEntry
from tidelog.stream.cleaning.aborted import AbortedTxns
from tidelog.stream.cleaning.key_map import KeyMap
from tidelog.stream.cleaning.offset_set import CHUNK_BYTES, CHUNK_OFFSETS, OffsetSet, Remains

NOTHING_ABORTED = AbortedTxns(())
KEYS_SHARE = 15 / 16
"""Share of a round's memory for the keys. The rest, a bit for each offset, bounds the offsets of a round."""


class Mark(NamedTuple):
    """What `Cleaning` knows at some offset."""

    offset: int
    open_txns: frozenset[int]
    is_readable: bool


class Cleaning:
    """The decisions of one round. Offsets int64, times in ms since the Unix epoch."""

    def __init__(self, first_dirty: int, end: int, *, map_bytes: int, now_ms: int, delete_retention_ms: int) -> None:
        """A round that fills its map from `[first_dirty, end)`, both of them batches' bounds."""
        self._keys = KeyMap(int(map_bytes * KEYS_SHARE))
        self._chunks_left = max(2, int(map_bytes * (1 - KEYS_SHARE)) // CHUNK_BYTES)
        self._chunk = -1
        """The newest chunk of offsets with a batch in it."""
        self._first_dirty = first_dirty
        self._noted = first_dirty
        self._limit = end
        self._left = OffsetSet()
        """See `Remains`. Complete when the map is sealed."""
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
            if not record.is_hole and not self._note(record, aborted):
                return False
            self._noted = next_offset
        return self._noted < self._limit

    def _note(self, record: StreamEntry, aborted: AbortedTxns) -> bool:
        first, last = record.base_offset // CHUNK_OFFSETS, (record.base_offset + record.count - 1) // CHUNK_OFFSETS
        chunks = last - max(self._chunk, first - 1)
        if chunks > self._chunks_left and self._chunk >= 0:
            return False
        header = parse_header(record.payload)
        if header.is_control:
            self._left.add(header.base_offset)
        elif not aborted.covers(header):
            try:
                records = scan(record.payload, header)
            except RecordTooLarge:
                self._left.add(header.base_offset)
            else:
                if not self._add(header, records):
                    return False
        self._chunks_left -= chunks
        self._chunk = last
        return True

    def _add(self, header: BatchHeader, records: RecordScan) -> bool:
        base, keys = header.base_offset, [key for key in records.keys if key is not None]
        if len(keys) == len(records.keys):
            return self._keys.add(keys, [base + delta for delta in records.offset_deltas])
        pairs = zip(records.keys, records.offset_deltas, strict=True)
        return self._keys.add(keys, [base + delta for key, delta in pairs if key is not None])

    def seal(self) -> int:
        """End the filling; return where the round ends. From here on `clean` and `remains` may be called."""
        for offset in self._keys.offsets():
            self._left.add(offset)
        self._end = self._noted
        return self._end

    def remains(self) -> Remains:
        """Return what is known now of the dirty part. The map is sealed."""
        return Remains(self._first_dirty, self._end, self._left)

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
        is_last = self._is_last(header)
        if aborted.covers(header) or self._is_superseded(header):
            if header.count == 0 and is_last:
                return record.payload
            return rebuild(header, []) if is_last else b""
        try:
            records = scan(record.payload, header)
        except RecordTooLarge:
            self._is_readable = False
            if header.is_transactional:
                self._open_txns.add(header.producer_id)
            return record.payload
        left = self._positions(header, records)
        if left and header.is_transactional:
            self._open_txns.add(header.producer_id)
        horizon = self._horizon(header) if not set(records.nulls).isdisjoint(left) else None
        if len(left) == header.count and horizon is None:
            return b"" if not left and not is_last else record.payload
        if not left:
            return rebuild(header, []) if is_last else b""
        if horizon is None:
            return cut(header, records, left)
        whole = list(iter_records(record.payload, header=header))
        return rebuild(header, [whole[each] for each in left], delete_horizon_ms=horizon)

    def _is_superseded(self, header: BatchHeader) -> bool:
        """Return whether nothing is left of a batch of the dirty part, which was read into."""
        return header.base_offset >= self._first_dirty and not self._left.any(header.base_offset, header.next_offset)

    def _positions(self, header: BatchHeader, records: RecordScan) -> list[int]:
        """Return which records of a batch stay, by their positions."""
        base = header.base_offset
        if base >= self._first_dirty:
            flags = self._left.flags(base, header.next_offset)
            left = [at for at, delta in enumerate(records.offset_deltas) if flags[delta] == "1"]
        else:
            with_key = [at for at, key in enumerate(records.keys) if key is not None]
            lasts = self._keys.last_offsets([key for key in records.keys if key is not None])
            deltas = records.offset_deltas
            left = [at for at, last in zip(with_key, lasts, strict=True) if last <= base + deltas[at]]
        if records.nulls and self._is_over(header):
            gone = set(records.nulls)
            return [at for at in left if at not in gone]
        return left

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
