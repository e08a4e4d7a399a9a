"""What a partition log is made of, and how it is kept in the meta stream.

Four streams (data: record batches, one to an append; meta: keys and values; time and txn: indexes) and what is derived
from them in memory: segments, producers, leader epochs. Keys of the meta stream (docs/formats/partition.md):

- `checkpoint`: the data offset up to which `producers`, `epochs`, `active` and the time stream are complete. Written
  together with them when a segment rolls, every `checkpoint_bytes` of batches, and at a clean close.
- `segment/<base offset, 20 digits>`: a sealed segment, written when it rolls. `active`: the one that grows.
- `start`: the log start offset, where DeleteRecords or retention has moved it.
- `clean`: the ends of the data, time and txn streams at a clean close; removed before the first append after it.

Invariants: all that a checkpoint covers was appended before it, to the same WAL. While `clean` is there nothing has
been appended since. Everything here is synchronous: no step sees another one half done.

Entry: `PartitionState`; `stream.partition_recovery` fills one.
"""

from __future__ import annotations

import msgspec

from runtime.errors import Overloaded
from storage.record_batch import BatchHeader
from stream.leader_epochs import LeaderEpochs
from stream.log_config import LogConfig
from stream.meta_stream import MetaStream
from stream.producer_state import ProducerStates
from stream.segments import Segment
from stream.stream import Stream
from stream.time_index import TimeIndex
from stream.txn_index import AbortedTxn, TxnIndex

CHECKPOINT = "checkpoint"
CLEAN = "clean"
START = "start"
EPOCHS = "epochs"
PRODUCERS = "producers"
ACTIVE = "active"
SEGMENT_PREFIX = "segment/"
VERSION = 1
"""Of the values of `checkpoint`, `clean` and `start`, their first field."""


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """Value of `checkpoint`."""

    version: int
    data_offset: int
    """Recovery starts here (int64)."""


class Clean(msgspec.Struct, frozen=True, array_like=True):
    """Value of `clean`: next offsets of three streams (int64)."""

    version: int
    data_end: int
    time_end: int
    txn_end: int


class Start(msgspec.Struct, frozen=True, array_like=True):
    """Value of `start`."""

    version: int
    log_start_offset: int


def segment_key(base_offset: int) -> str:
    """The meta key of a sealed segment; keys sort as offsets do."""
    return f"{SEGMENT_PREFIX}{base_offset:020d}"


class PartitionState:
    """One partition's streams and what is derived from them. Offsets int64."""

    __slots__ = (
        "bytes_since_checkpoint",
        "checkpoint_offset",
        "data",
        "dirty",
        "epochs",
        "high_watermark",
        "log_start",
        "meta",
        "producers",
        "segments",
        "time",
        "txn",
    )

    def __init__(self, meta: MetaStream, data: Stream, time: TimeIndex, txn: TxnIndex) -> None:
        self.meta = meta
        self.data = data
        self.time = time
        self.txn = txn
        self.epochs = LeaderEpochs()
        self.producers = ProducerStates()
        self.segments: list[Segment] = []
        """Sorted, never empty once recovered; the last is the active one."""
        self.log_start = data.start_offset
        self.high_watermark = 0
        self.dirty = False
        """Something was appended that no clean close has covered."""
        self.bytes_since_checkpoint = 0
        self.checkpoint_offset = 0
        """What the last checkpoint covers: recovery reads on from here."""

    @property
    def last_stable_offset(self) -> int:
        """Up to where all transactions are decided, never past the high watermark."""
        unstable = self.producers.first_unstable()
        return self.high_watermark if unstable is None else min(unstable, self.high_watermark)

    # --- appending -----------------------------------------------------------------------------------------------

    def track(self, header: BatchHeader, base_offset: int, timestamp: int, now_ms: int, config: LogConfig) -> None:
        """Count a batch that is in the data stream; recovery replays batches through here too.

        `timestamp` is the batch's largest, as stored. Control batches leave producers to the caller.
        """
        size = header.length + 12
        active = self.segments[-1]
        self.time.note(active.max_timestamp, base_offset, size, config.index_interval_bytes)
        active.add(size, timestamp, now_ms)
        self.bytes_since_checkpoint += size
        if header.producer_id >= 0 and not header.is_control:
            self.producers.append(header, base_offset, timestamp, now_ms)

    def note_aborted(self, entry: AbortedTxn) -> int:
        """Index an aborted transaction whose marker was appended; the WAL end, or 0 if it must wait for room.

        The marker cannot be taken back, so a full WAL does not fail it: the entry goes with the next append or
        checkpoint, and a crash before that makes recovery find the marker again.
        """
        self.txn.add(entry)
        try:
            return self.txn.flush()
        except Overloaded:
            return 0

    def mark_dirty(self) -> None:
        """Before the first append after opening: take the clean flag away. Raises `WalFull`, `Overloaded`."""
        if self.meta.get(CLEAN) is not None:
            self.meta.put({CLEAN: None, EPOCHS: self.epochs.encode()})
        self.dirty = True

    def checkpoint(self, *, clean: bool = False) -> int:
        """Write all that recovery needs; the WAL end. Raises `WalFull`, `Overloaded`, `WalFailed`."""
        return self._write_checkpoint({}, self.segments[-1], clean=clean)

    def rewrite(self) -> int:
        """Write everything anew, whatever the meta stream says of segments and log start. Raises as `checkpoint`."""
        entries: dict[str, bytes | None] = {key: None for key, _ in self.meta.items(SEGMENT_PREFIX)}
        entries |= {segment_key(one.base_offset): msgspec.msgpack.encode(one) for one in self.segments[:-1]}
        entries[START] = msgspec.msgpack.encode(Start(VERSION, self.log_start))
        self.dirty = True
        return self._write_checkpoint(entries, self.segments[-1])

    def roll(self, now_ms: int) -> None:
        """Seal the active segment and begin one at the log's end. Raises as `checkpoint`."""
        sealed = self.segments[-1]
        active = Segment(self.data.next_offset, now_ms, self.time.end)
        self._write_checkpoint({segment_key(sealed.base_offset): msgspec.msgpack.encode(sealed)}, active)
        self.segments.append(active)
        self.time.roll()

    def _write_checkpoint(self, entries: dict[str, bytes | None], active: Segment, *, clean: bool = False) -> int:
        self.time.flush()
        self.txn.flush()
        entries[EPOCHS] = self.epochs.encode()
        entries[PRODUCERS] = self.producers.encode()
        entries[ACTIVE] = msgspec.msgpack.encode(active)
        entries[CHECKPOINT] = msgspec.msgpack.encode(Checkpoint(VERSION, self.data.next_offset))
        if clean:
            ends = Clean(VERSION, self.data.next_offset, self.time.stream.next_offset, self.txn.stream.next_offset)
            entries[CLEAN] = msgspec.msgpack.encode(ends)
        elif self.dirty and self.meta.get(CLEAN) is not None:
            entries[CLEAN] = None  # one that did not match: recovery left it
        wal_end = self.meta.put(entries)
        self.bytes_since_checkpoint = 0
        self.checkpoint_offset = self.data.next_offset
        if clean:
            self.dirty = False
        return wal_end

    # --- the log start -------------------------------------------------------------------------------------------

    def move_start(self, offset: int, now_ms: int) -> int:
        """Move the log start to `offset` (≤ log end), drop segments wholly before it; the WAL end to wait for.

        Raises `WalFull`, `Overloaded`, `WalFailed`: nothing has moved then. The streams are trimmed by the caller, once
        this is durable.
        """
        assert self.log_start < offset <= self.data.next_offset
        entries: dict[str, bytes | None] = {START: msgspec.msgpack.encode(Start(VERSION, offset))}
        kept = self._segments_from(offset)
        for segment in self.segments[: len(self.segments) - len(kept)]:
            if self.meta.get(segment_key(segment.base_offset)) is not None:
                entries[segment_key(segment.base_offset)] = None
        if not kept:
            kept = [Segment(self.data.next_offset, now_ms, self.time.end)]
            wal_end = self._write_checkpoint(entries, kept[0])
            self.time.roll()
        elif offset > self.checkpoint_offset:  # recovery could not read what lies between any more
            wal_end = self._write_checkpoint(entries, kept[-1])
        else:
            wal_end = self.meta.put(entries)
        self.segments = kept
        self.log_start = offset
        self.epochs.truncate_start(offset)
        return wal_end

    def _segments_from(self, offset: int) -> list[Segment]:
        """Segments that hold anything at or after `offset`; an empty active one stays."""
        for index, segment in enumerate(self.segments):
            last = index + 1 == len(self.segments)
            end = self.data.next_offset if last else self.segments[index + 1].base_offset
            if end > offset or (last and not segment.size_bytes):
                return self.segments[index:]
        return []

    def segment_end(self, index: int) -> int:
        """The offset after the segment at `index`."""
        last = index + 1 == len(self.segments)
        return self.data.next_offset if last else self.segments[index + 1].base_offset

    def segment_entries(self, index: int) -> tuple[int, int]:
        """The segment's range of entries of the time index."""
        last = index + 1 == len(self.segments)
        return self.segments[index].time_start, (self.time.end if last else self.segments[index + 1].time_start)
