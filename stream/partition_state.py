"""State of a partition log, and its representation in the meta stream.

A partition has four streams (data: record batches, one to an append; meta: keys and values; time and txn: indexes) and
state derived from them in memory: segments, producers, leader epochs. Keys of the meta stream
(docs/formats/partition.md):

- `checkpoint`: the data offset up to which `producers`, `epochs`, `active` and the time stream are complete. Written
  together with them when a segment rolls, every `checkpoint_bytes` and `checkpoint_batches`, and at a clean close. A
  large table of producers has an offset of its own, at or before the checkpoint's.
- `producers`: all producers, if they are few; else `producers/<generation>/<number>`, pieces that are written one at a
  time while the partition takes appends. The checkpoint names the generation that counts once all its pieces are there.
- `segment/<base offset, 20 digits>`: a sealed segment, written when it rolls. `active`: the segment that grows.
- `start`: the log start offset after DeleteRecords or retention has moved it.
- `branch`: of a partition that began as a branch, its data stream: whose offsets it began with is not its own state.
- `clean`: the ends of the data, time and txn streams at a clean close; removed before the next append.

Invariants: all that a checkpoint covers was appended before it, to the same WAL. While `clean` exists, nothing has been
appended since. Data stream start ≤ `producers_offset` ≤ `checkpoint_offset`, so recovery can read what it replays.
Everything here is synchronous, so no step sees another one incomplete.

Entry: `PartitionState`; `tidelog.stream.partition_recovery` fills one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tidelog.batch.batch import BatchHeader
from tidelog.runtime.errors import Overloaded
from tidelog.stream.errors import require_version
from tidelog.stream.leader_epochs import LeaderEpochs
from tidelog.stream.log_config import LogConfig
from tidelog.stream.meta_stream import MetaStream
from tidelog.stream.producer_state import ROWS_PER_PIECE, ProducerSnapshot, ProducerStates
from tidelog.stream.segments import Segment
from tidelog.stream.stream import Stream
from tidelog.stream.time_index import TimeIndex
from tidelog.stream.txn_index import AbortedTxn, TxnIndex

CHECKPOINT = "checkpoint"
CLEAN = "clean"
START = "start"
EPOCHS = "epochs"
PRODUCERS = "producers"
ACTIVE = "active"
BRANCH = "branch"
SEGMENT_PREFIX = "segment/"
PIECE_PREFIX = "producers/"
VERSION = 1
"""Version in the first field of the values of `checkpoint`, `clean`, `start` and `branch`."""
PIECES_VERSION = 2
"""Version of a `checkpoint` whose producers have an offset of their own: only where there are many."""
PIECES_LEVEL = 1
"""Feature level from which on that is written: versions of level 0 read it as a table without producers."""
_BATCHES_A_PRODUCER = 8
"""Batches whose scan takes as long as one producer of a checkpoint takes to write and read."""


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """Value of `checkpoint`."""

    version: int
    data_offset: int
    """Recovery starts at this offset (int64)."""
    producers_offset: int = -1
    """Recovery replays producers from this offset, ≤ `data_offset`; -1 (version 1): from `data_offset`."""
    generation: int = 0
    """The pieces that hold the producers; 0: they are in `producers`, or there are none."""
    pieces: int = 0


class Clean(msgspec.Struct, frozen=True, array_like=True):
    """Value of `clean`: next offsets of three streams (int64)."""

    version: int
    data_end: int
    time_end: int
    txn_end: int


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """Value of `branch`."""

    version: int
    data_stream: int
    """Id of the partition that has begun; a branch of it finds this value, and has another id."""
    own_from: int
    """The batches before this offset (int64) are of producers to another partition."""


class Start(msgspec.Struct, frozen=True, array_like=True):
    """Value of `start`."""

    version: int
    log_start_offset: int


def segment_key(base_offset: int) -> str:
    """Return the meta key of a sealed segment; keys sort as offsets do."""
    return f"{SEGMENT_PREFIX}{base_offset:020d}"


def piece_key(generation: int, number: int) -> str:
    """Return the meta key of a piece of a producer snapshot."""
    return f"{PIECE_PREFIX}{generation:010d}/{number:05d}"


@dataclass(slots=True)
class _Writing:
    """A snapshot of producers that is being written: `written` pieces are."""

    snapshot: ProducerSnapshot
    offset: int
    generation: int
    written: int = 0


class PartitionState:
    """One partition's streams and the state derived from them. Offsets int64."""

    __slots__ = (
        "batches_since_checkpoint",
        "bytes_since_checkpoint",
        "checkpoint_offset",
        "confirmed_log_start",
        "data",
        "dirty",
        "epochs",
        "generation",
        "high_watermark",
        "log_start",
        "meta",
        "own_from",
        "pieces",
        "producers",
        "producers_offset",
        "rows_per_piece",
        "segments",
        "time",
        "txn",
        "writing",
    )

    def __init__(self, meta: MetaStream, data: Stream, time: TimeIndex, txn: TxnIndex) -> None:
        self.meta = meta
        self.data = data
        self.time = time
        self.txn = txn
        self.epochs = LeaderEpochs()
        self.producers = ProducerStates()
        self.segments: list[Segment] = []
        """Sorted, never empty after recovery; the last is the active one."""
        self.log_start = data.start_offset
        self.confirmed_log_start = data.start_offset
        """At opening: the log start without the records of the meta stream that are not confirmed."""
        self.high_watermark = 0
        self.dirty = False
        """Whether there were appends since the last clean close."""
        self.bytes_since_checkpoint = self.batches_since_checkpoint = 0
        self.checkpoint_offset = 0
        """Data offset covered by the last checkpoint: recovery scans from here, for producers from the next."""
        self.producers_offset = 0
        """Data offset covered by the last complete snapshot of producers."""
        self.pieces = (0, 0)
        """Generation and number of the pieces of that snapshot; zeros: it is one value, or empty."""
        self.generation = 0
        """The largest generation that the meta stream has pieces of, complete or not."""
        self.own_from = 0
        """Batches before this offset say nothing of this partition's producers: it began as a branch there."""
        self.rows_per_piece = ROWS_PER_PIECE
        self.writing: _Writing | None = None
        """The snapshot of producers that was begun and has pieces left to write."""

    @property
    def last_stable_offset(self) -> int:
        """Return the offset up to which all transactions are decided, never past the high watermark.

        It is below the log start if a transaction is open that begins there.
        """
        unstable = self.producers.first_unstable()
        return self.high_watermark if unstable is None else min(unstable, self.high_watermark)

    # --- appending -----------------------------------------------------------------------------------------------

    def track(
        self, header: BatchHeader, base_offset: int, timestamp: int, now_ms: int, config: LogConfig, own: bool = True
    ) -> None:
        """Update the state for a batch that is in the data stream; also used by recovery to replay batches.

        `timestamp` is the batch's largest, as stored. Control batches leave producers to the caller.
        `own`: it is not of the partition that this is a branch of.
        """
        size = header.length + 12
        active = self.segments[-1]
        self.time.note(active.max_timestamp, base_offset, size, config.index_interval_bytes)
        active.add(size, timestamp, now_ms)
        self.bytes_since_checkpoint += size
        self.batches_since_checkpoint += 1
        if own and header.producer_id >= 0 and not header.is_control:
            self.producers.append(header, base_offset, timestamp, now_ms)

    def note_aborted(self, entry: AbortedTxn) -> int:
        """Index an aborted transaction whose marker was appended. Returns the WAL end, or 0 if the WAL is full.

        The marker cannot be revoked, so a full WAL does not fail it: the entry is written with the next append or
        checkpoint, and after a crash before that recovery finds the marker again.
        """
        self.txn.add(entry)
        try:
            return self.txn.flush()
        except Overloaded:
            return 0

    def mark_dirty(self) -> None:
        """Remove the clean flag before the first append after opening. Raises `WalFull`, `Overloaded`."""
        if self.meta.get(CLEAN) is not None:
            self.meta.put({CLEAN: None, EPOCHS: self.epochs.encode()})
        self.dirty = True

    def has_many_batches(self, limit: int) -> bool:
        """Whether an unclean open would scan `limit` batches or more, and a checkpoint of the producers costs less."""
        batches = self.batches_since_checkpoint
        return batches >= limit and batches >= _BATCHES_A_PRODUCER * len(self.producers)

    def checkpoint(self, *, clean: bool = False) -> int:
        """Write all state that recovery needs. Returns the WAL end. Raises `WalFull`, `Overloaded`, `WalFailed`."""
        return self._write_checkpoint({}, self.segments[-1], clean=clean)

    def rewrite(self, scanned_from: int) -> int:
        """Write all state again, whatever the meta stream has of segments and log start. Raises as `checkpoint`.

        The producers must all come from batches at or after `scanned_from`.
        """
        entries: dict[str, bytes | None] = dict.fromkeys(self.meta.keys(SEGMENT_PREFIX))
        entries |= {segment_key(one.base_offset): msgspec.msgpack.encode(one) for one in self.segments[:-1]}
        entries |= dict.fromkeys(self.meta.keys(PRODUCERS))
        entries[START] = msgspec.msgpack.encode(Start(VERSION, self.log_start))
        self.dirty = True
        self.producers_offset, self.pieces = scanned_from, (0, 0)
        return self._write_checkpoint(entries, self.segments[-1])

    def load_branch(self) -> bool:
        """Return whether `begin_branch` was called for this partition, and note where. Raises `CorruptData`."""
        value = self.meta.get(BRANCH)
        if value is None:
            return False
        branch = msgspec.msgpack.decode(value, type=Branch)
        require_version(branch.version, VERSION, "the beginning of a branch")
        if branch.data_stream != self.data.stream_id:
            return False
        self.own_from = branch.own_from
        return True

    def begin_branch(self) -> int:
        """Forget all producers, and note that this was done. No transaction is open. Raises as `checkpoint`."""
        assert self.producers.first_ongoing() is None
        entries: dict[str, bytes | None] = dict.fromkeys(self.meta.keys(PRODUCERS))
        entries[BRANCH] = msgspec.msgpack.encode(Branch(VERSION, self.data.stream_id, self.data.next_offset))
        self.abandon_snapshot()
        self.producers = ProducerStates()
        self.dirty = True
        self.own_from = self.producers_offset = self.data.next_offset
        self.pieces = (0, 0)
        return self._write_checkpoint(entries, self.segments[-1])

    def roll(self, now_ms: int) -> None:
        """Seal the active segment and start one at the log's end. Raises as `checkpoint`."""
        sealed = self.segments[-1]
        active = Segment(self.data.next_offset, now_ms, self.time.end)
        self._write_checkpoint({segment_key(sealed.base_offset): msgspec.msgpack.encode(sealed)}, active)
        self.segments.append(active)
        self.time.roll()

    def _write_checkpoint(self, entries: dict[str, bytes | None], active: Segment, *, clean: bool = False) -> int:
        self.time.flush()
        self.txn.flush()
        end = self.data.next_offset
        entries[EPOCHS] = self.epochs.encode()
        entries[ACTIVE] = msgspec.msgpack.encode(active)
        few = not self._has_many_producers
        if few:
            entries |= dict.fromkeys(self.meta.keys(PIECE_PREFIX))
            entries[PRODUCERS] = self.producers.encode()
        apart = Checkpoint(PIECES_VERSION, end, self.producers_offset, *self.pieces)
        entries[CHECKPOINT] = msgspec.msgpack.encode(Checkpoint(VERSION, end) if few else apart)
        if clean:
            assert few or self.producers_offset == end
            ends = Clean(VERSION, end, self.time.stream.next_offset, self.txn.stream.next_offset)
            entries[CLEAN] = msgspec.msgpack.encode(ends)
        elif self.dirty and self.meta.get(CLEAN) is not None:
            entries[CLEAN] = None  # one that did not match was kept by recovery
        wal_end = self.meta.put(entries)
        self.bytes_since_checkpoint = self.batches_since_checkpoint = 0
        self.checkpoint_offset = end
        if few:
            self.producers_offset, self.pieces = end, (0, 0)
            self.abandon_snapshot()
        elif self.writing is None and self.producers_offset < end:
            self.generation += 1
            snapshot = self.producers.begin_snapshot(self.rows_per_piece)
            self.writing = _Writing(snapshot, end, self.generation)
        if clean:
            self.dirty = False
        return wal_end

    # --- large tables of producers -------------------------------------------------------------------------------

    @property
    def _has_many_producers(self) -> bool:
        """Whether the table is written in pieces."""
        return len(self.producers) > self.rows_per_piece and self.data.feature_level >= PIECES_LEVEL

    def write_piece(self) -> int:
        """Write the next piece of the snapshot of producers that was begun; with the last one the snapshot counts.

        Returns the WAL end. Raises as `checkpoint`: the same piece is written by the next call.
        """
        writing = self.writing
        assert writing is not None
        entries: dict[str, bytes | None] = {}
        piece, is_last = writing.snapshot.peek(), writing.snapshot.is_last
        if is_last:
            entries = dict.fromkeys(self._superseded(writing))
            whole = (writing.offset, writing.generation, writing.written + 1)
            entries[CHECKPOINT] = msgspec.msgpack.encode(Checkpoint(PIECES_VERSION, self.checkpoint_offset, *whole))
        entries[piece_key(writing.generation, writing.written)] = piece
        wal_end = self.meta.put(entries)
        writing.snapshot.advance()
        writing.written += 1
        if is_last:
            self.producers_offset, self.pieces = writing.offset, (writing.generation, writing.written)
            self.abandon_snapshot()
        return wal_end

    def _superseded(self, writing: _Writing) -> list[str]:
        """Return the live keys of all other snapshots."""
        mine = {piece_key(writing.generation, number) for number in range(writing.written)}
        return [key for key in self.meta.keys(PRODUCERS) if key not in mine]

    def abandon_snapshot(self) -> None:
        """Forget the snapshot that is being written. Its pieces are removed with those of the last complete one."""
        self.writing = None
        self.producers.end_snapshot()

    def write_producers_to(self, offset: int) -> bool:
        """Do one bounded step towards a snapshot of producers that covers the batches before `offset` (≤ log end).

        Returns whether it did one: call again, after other work. Without a large table there is nothing to do, for the
        next checkpoint has it whole. Raises as `checkpoint`.
        """
        if self.producers_offset >= offset:
            return False
        if self.writing is not None:
            self.write_piece()
        elif self._has_many_producers:
            self.checkpoint()
        else:
            return False
        return True

    # --- the log start -------------------------------------------------------------------------------------------

    def move_start(self, offset: int, now_ms: int) -> int:
        """Move the log start to `offset` (≤ log end) and drop segments wholly before it. Returns the WAL end to wait
        for.

        The caller has called `write_producers_to(offset)` until it returned False, and trims the streams once the move
        is durable. Raises `WalFull`, `Overloaded`, `WalFailed`, and then nothing has moved.
        """
        assert self.log_start < offset <= self.data.next_offset
        assert self.producers_offset >= offset or not self._has_many_producers
        entries: dict[str, bytes | None] = {START: msgspec.msgpack.encode(Start(VERSION, offset))}
        kept = self._segments_from(offset)
        for segment in self.segments[: len(self.segments) - len(kept)]:
            if self.meta.get(segment_key(segment.base_offset)) is not None:
                entries[segment_key(segment.base_offset)] = None
        if not kept:
            kept = [Segment(self.data.next_offset, now_ms, self.time.end)]
            wal_end = self._write_checkpoint(entries, kept[0])
            self.time.roll()
        elif offset > self.producers_offset:  # recovery could no longer read the batches in between
            wal_end = self._write_checkpoint(entries, kept[-1])
        else:
            wal_end = self.meta.put(entries)
        self.segments = kept
        self.log_start = offset
        self.epochs.truncate_start(offset)
        return wal_end

    def _segments_from(self, offset: int) -> list[Segment]:
        """Return the segments with records at or after `offset`, and an empty active one."""
        for index, segment in enumerate(self.segments):
            last = index + 1 == len(self.segments)
            end = self.data.next_offset if last else self.segments[index + 1].base_offset
            if end > offset or (last and not segment.size_bytes):
                return self.segments[index:]
        return []

    def segment_end(self, index: int) -> int:
        """Return the offset after the segment at `index`."""
        last = index + 1 == len(self.segments)
        return self.data.next_offset if last else self.segments[index + 1].base_offset

    def segment_entries(self, index: int) -> tuple[int, int]:
        """Return the segment's range of entries of the time index."""
        last = index + 1 == len(self.segments)
        return self.segments[index].time_start, (self.time.end if last else self.segments[index + 1].time_start)
