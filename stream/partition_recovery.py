"""Recovery of a partition log when its streams are opened.

Clean (the `clean` record exists and matches the streams): the meta stream is trusted, nothing is scanned. Unclean: the
last checkpoint is loaded, then the batch headers from there to the end of the data stream are read. This rebuilds
producers, the active segment, leader epochs and the unwritten entries of the time and txn indexes. If the producers
were written in pieces, batches from their snapshot's offset on are read as well, for producers only.

Released: an operator released a quarantined stream without the records set aside, so the streams are inconsistent: a
checkpoint may cover records that are gone. Then the segments up to the data's end are kept, the segment that contains
the end is read again, and all state is written again. Producers without a batch since that segment's start are removed,
and the time index restarts: lookups in older segments read from their start. The txn index loses what it has of
transactions that were aborted among the records that are gone, and the last round of log compaction ends where the data
ends: others may be written at their offsets.

Records that an earlier master appended and that are not confirmed yet count like others, except that the high watermark
and the log start that consumers see are those without them, and that their markers decide nothing yet. A checkpoint may
cover such a marker, and the table of producers has forgotten its transaction then: the producers of the checkpoint that
is confirmed are replayed beside it up to there.

Invariant: the result is the state of an uninterrupted process, except that the wall-clock times of appends since the
checkpoint become the time of recovery.

Entry: `recover`, `confirmed_end`; for what is to be gathered before, `meta_to_read` and `scan_to_read`, and
`checkpoint_after` for those who have not opened the streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from tidelog.batch.batch import BatchHeader, ControlType, control_epoch, control_type, iter_records, parse_header
from tidelog.runtime.errors import CorruptData, Overloaded
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.storage.commits import StreamRange
from tidelog.storage.records import StreamEntry
from tidelog.stream.errors import require_version
from tidelog.stream.leader_epochs import LeaderEpochs
from tidelog.stream.log_cleaning import cut_rounds
from tidelog.stream.log_config import LogConfig
from tidelog.stream.meta_stream import MetaStream, decode_entries
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_state import (
    ACTIVE,
    CHECKPOINT,
    CLEAN,
    EPOCHS,
    PIECE_PREFIX,
    PIECES_VERSION,
    PRODUCERS,
    SEGMENT_PREFIX,
    START,
    VERSION,
    Checkpoint,
    Clean,
    PartitionState,
    Start,
    piece_key,
)
from tidelog.stream.producer_state import CompletedTxn, ProducerStates
from tidelog.stream.segments import Segment
from tidelog.stream.txn_index import AbortedTxn

logger = logging.getLogger(__name__)

_SCAN_BYTES = 1 << 20
_SCANNED_AT_ONCE = 16
"""Batches replayed per iteration of the event loop: some 0.5 ms, and tens of partitions are scanned at once."""
_T = TypeVar("_T")


class _Producers(NamedTuple):
    """A complete snapshot of producers."""

    producers: ProducerStates
    offset: int
    """The data offset that it covers."""
    pieces: tuple[int, int]
    """As `PartitionState.pieces`."""


async def nothing_first(_start_offset: int) -> None:
    """Default `before_scan`."""


async def recover(
    state: PartitionState,
    config: LogConfig,
    now_ms: int,
    before_scan: Callable[[int], Awaitable[None]] = nothing_first,
) -> int:
    """Fill `state` from its streams. Returns the number of scanned batches. Raises `CorruptData`, `Unavailable`.

    `before_scan` is awaited, with the offset of the first one, if there are batches to scan.
    """
    meta, confirmed = state.meta.stream, dict[str, bytes]()
    tail = meta.unconfirmed()
    await state.meta.load(
        tail[0].base_offset if tail else meta.next_offset, lambda: confirmed.update(_values_of(state.meta))
    )
    state.rows_per_piece = config.producers_per_piece
    try:
        state.confirmed_log_start = _log_start(state, confirmed.get(START))
        _load(state, now_ms)
        state.load_branch()
        await _load_producers(state)
        if state.data.is_released:
            await state.txn.cut(state.data.next_offset)
            cut_rounds(state)
        if _needs_fitting(state):
            return await _fit(state, config, now_ms)
        if confirmed_end(state) < state.producers_offset:
            await _hold_unconfirmed_markers(state, confirmed, now_ms)
        clean = _is_clean(state)
    except (*DECODE_ERRORS, ValueError) as error:
        raise CorruptData(f"stream {state.meta.stream.stream_id}: a meta value does not parse: {error}") from error
    if clean:
        state.dirty = False
        return 0
    if (first := _scan_start(state)) < state.data.next_offset:
        await before_scan(first)
    scanned = await _scan(state, config, now_ms)
    # Without a clean record there is none to remove, and a close must write one.
    state.dirty = scanned > 0 or state.data.next_offset > 0
    if state.bytes_since_checkpoint > config.checkpoint_bytes // 4 or state.has_many_batches(
        config.checkpoint_batches // 16
    ):
        try:
            state.checkpoint()
        except Overloaded as error:  # the checkpoint only shortens the next recovery
            logger.info("checkpoint after recovery postponed", extra={"error": str(error)})
    return scanned


def meta_to_read(meta: OpenedStream) -> list[StreamRange]:
    """Return what `recover` reads of the bucket in any case: all of the meta stream."""
    return _committed(meta, meta.start_offset)


def scan_to_read(streams: Sequence[OpenedStream], start_offset: int) -> list[StreamRange]:
    """Return what a scan from this data offset reads of the bucket: the ends of the indexes, and the batches.

    `streams`: meta, data, time and txn.
    """
    _, data, time, txn = streams
    return [
        *_committed(time, time.end_offset - 1),
        *_committed(txn, txn.end_offset - 1),
        *_committed(data, start_offset),
    ]


def checkpoint_after(entries: Iterable[StreamEntry], known: int) -> int:
    """Return the data offset from which `recover` scans, after these further appends of the meta stream.

    `known`: the same before them; 0 before the first one. Raises `CorruptData`.
    """
    value: bytes | None = None
    for entry in entries:
        for key, data in () if entry.is_hole else decode_entries(entry.payload):
            if key == CHECKPOINT and data is not None:
                value = data
    if value is None:
        return known
    try:
        checkpoint = msgspec.msgpack.decode(value, type=Checkpoint)
    except DECODE_ERRORS as error:
        raise CorruptData(f"a checkpoint does not parse: {error}") from error
    return checkpoint.producers_offset if checkpoint.version == PIECES_VERSION else checkpoint.data_offset


def _committed(one: OpenedStream, start_offset: int) -> list[StreamRange]:
    start = max(start_offset, one.start_offset)
    return [StreamRange(one.stream_id, start, one.end_offset)] if start < one.end_offset else []


def _value(state: PartitionState, key: str, kind: type[_T]) -> _T | None:
    data = state.meta.get(key)
    return None if data is None else msgspec.msgpack.decode(data, type=kind)


def _log_start(state: PartitionState, value: bytes | None) -> int:
    if value is None:
        return state.data.start_offset
    start = msgspec.msgpack.decode(value, type=Start)
    require_version(start.version, VERSION, "the log start")
    return max(state.data.start_offset, start.log_start_offset)


def _load(state: PartitionState, now_ms: int) -> None:
    """Load the last checkpoint."""
    state.log_start = _log_start(state, state.meta.get(START))
    checkpoint = _value(state, CHECKPOINT, Checkpoint)
    is_ahead = checkpoint is not None and checkpoint.data_offset > state.data.next_offset
    if checkpoint is not None and is_ahead and not state.data.is_released:
        raise CorruptData(
            f"stream {state.data.stream_id} ends at {state.data.next_offset}, "
            f"but its partition's checkpoint covers offsets up to {checkpoint.data_offset}"
        )
    if (epochs := state.meta.get(EPOCHS)) is not None:
        state.epochs = LeaderEpochs.decode(epochs)
    segments = [msgspec.msgpack.decode(data, type=Segment) for _, data in state.meta.items(SEGMENT_PREFIX)]
    active = _value(state, ACTIVE, Segment)
    if active is None:
        active = Segment(state.data.start_offset, now_ms, state.time.stream.start_offset)
    segments.append(active)
    # A crash between a move of the log start and its trim leaves nothing here, but a missing key must not break
    # lookups.
    state.segments = [
        segment
        for index, segment in enumerate(segments)
        if segment is active or segments[index + 1].base_offset > state.log_start
    ]
    state.checkpoint_offset = state.producers_offset = checkpoint.data_offset if checkpoint is not None else 0


async def _load_producers(state: PartitionState) -> None:
    """Load the last complete snapshot of producers. Raises `CorruptData`."""
    state.generation = max((int(key.split("/")[1]) for key in state.meta.keys(PIECE_PREFIX)), default=0)
    found = await _read_producers(_values_of(state.meta), state.meta.stream.stream_id)
    state.producers, state.producers_offset, state.pieces = found


def _values_of(meta: MetaStream) -> dict[str, bytes]:
    """Return the values that tell the log start and the producers, as they are now."""
    values = ((key, meta.get(key)) for key in (START, CHECKPOINT, *meta.keys(PRODUCERS)))
    return {key: value for key, value in values if value is not None}


async def _read_producers(values: dict[str, bytes], stream_id: int) -> _Producers:
    """Decode the snapshot that the checkpoint names; the loop is free between its pieces. Raises `CorruptData`."""
    value = values.get(CHECKPOINT)
    checkpoint = None if value is None else msgspec.msgpack.decode(value, type=Checkpoint)
    offset, generation, pieces = 0, 0, 0
    if checkpoint is not None:
        offset = checkpoint.data_offset
        if checkpoint.version != VERSION:
            if checkpoint.version != PIECES_VERSION or not 0 <= checkpoint.producers_offset <= offset:
                raise CorruptData(f"stream {stream_id}: its checkpoint cannot be read: {checkpoint}")
            offset, generation, pieces = checkpoint.producers_offset, checkpoint.generation, checkpoint.pieces
    if not pieces:
        whole = values.get(PRODUCERS)
        producers = ProducerStates() if whole is None else ProducerStates.decode(whole)
        return _Producers(producers, offset, (generation, pieces))
    producers = ProducerStates()
    for number in range(pieces):
        piece = values.get(piece_key(generation, number))
        if piece is None:
            raise CorruptData(
                f"stream {stream_id}: piece {number} of {pieces} of the producers, generation {generation}, is missing"
            )
        producers.add_piece(piece)
        await asyncio.sleep(0)
    producers.complete()
    return _Producers(producers, offset, (generation, pieces))


async def _hold_unconfirmed_markers(state: PartitionState, confirmed: dict[str, bytes], now_ms: int) -> None:
    """Let the markers that the table of producers has, and that are not confirmed yet, decide nothing until they are.

    `confirmed`: the values of the meta stream without what is not confirmed. Raises `CorruptData`, `Unavailable`.
    """
    end, covered = confirmed_end(state), state.producers_offset
    if not await _has_marker(state, end, covered):
        return
    before, at, _ = await _read_producers(confirmed, state.meta.stream.stream_id)
    held: list[CompletedTxn] = []
    at = max(at, state.data.start_offset)
    while at < covered:
        for record in await state.data.read(at, covered, _SCAN_BYTES):
            at = record.base_offset + record.count
            if record.is_hole:
                continue
            header = parse_header(record.payload)
            if header.is_control:
                completed = _replay_marker(before, header, record.payload, record.base_offset, now_ms)[1]
                if completed is not None and record.base_offset >= end:
                    held.append(completed)
            elif header.producer_id >= 0:
                before.append(header, record.base_offset, header.max_timestamp, now_ms)
    state.producers.hold(held)


async def _has_marker(state: PartitionState, start: int, end: int) -> bool:
    at = max(start, state.data.start_offset)
    while at < end:
        for record in await state.data.read(at, end, _SCAN_BYTES):
            at = record.base_offset + record.count
            if not record.is_hole and parse_header(record.payload).is_control:
                return True
    return False


def _needs_fitting(state: PartitionState) -> bool:
    """Whether a stream was released and the others do not match it yet. A rewrite of all state makes them match."""
    time = state.time.stream
    return (
        state.meta.stream.is_released
        or (state.data.is_released and state.checkpoint_offset > state.data.next_offset)
        or (time.is_released and state.segments[-1].time_start > time.next_offset)
    )


async def _fit(state: PartitionState, config: LogConfig, now_ms: int) -> int:
    """Adapt all state to the current streams; see the module docstring. Raises `WalFull`, `Overloaded`: retry."""
    end, time = state.data.next_offset, state.time.stream
    ends = [segment.base_offset for segment in state.segments[1:]]
    kept = [segment for segment, its_end in zip(state.segments, ends, strict=False) if its_end <= end]
    base = min(state.segments[len(kept)].base_offset, end)
    logger.warning(
        "a stream was released: the partition continues without the records set aside",
        extra={
            "stream": state.data.stream_id,
            "log_end": end,
            "checkpoint": state.checkpoint_offset,
            "read_from": base,
        },
    )
    await time.trim(time.next_offset)
    for segment in kept:
        segment.time_start = time.next_offset
    state.segments = [*kept, Segment(base, now_ms, time.next_offset)]
    state.epochs = LeaderEpochs(entry for entry in state.epochs.entries() if entry[1] < base)
    state.producers = ProducerStates()
    state.log_start = min(state.log_start, end)
    state.checkpoint_offset = state.producers_offset = base
    scanned = await _scan(state, config, now_ms)
    state.rewrite(base)
    return scanned


def _is_clean(state: PartitionState) -> bool:
    clean = _value(state, CLEAN, Clean)
    if clean is None:
        return False
    require_version(clean.version, VERSION, "the record of a clean close")
    found = (state.data.next_offset, state.time.stream.next_offset, state.txn.stream.next_offset)
    if found == (clean.data_end, clean.time_end, clean.txn_end):
        return True
    logger.warning(
        "streams do not end at the offsets of the clean close; scanning",
        extra={"stream": state.data.stream_id, "expected": str(clean), "found": str(found)},
    )
    return False


def _scan_start(state: PartitionState) -> int:
    return max(min(state.checkpoint_offset, state.producers_offset), state.data.start_offset)


async def _scan(state: PartitionState, config: LogConfig, now_ms: int) -> int:
    data = state.data
    at, end = _scan_start(state), data.next_offset
    if at >= end:
        return 0
    last_aborted = await state.txn.last_offset()
    scanned = 0
    while at < end:
        for record in await data.read(at, end, _SCAN_BYTES):
            _replay(state, record, config, now_ms, last_aborted)
            at = record.base_offset + record.count
            scanned += 1
            if scanned % _SCANNED_AT_ONCE == 0:
                await asyncio.sleep(0)
    await state.time.forget_flushed()
    state.producers.confirmed(confirmed_end(state))
    return scanned


def confirmed_end(state: PartitionState) -> int:
    """Return the offset after the last confirmed record of a partition that is being opened."""
    tail = state.data.unconfirmed()
    return tail[0].base_offset if tail else state.data.next_offset


def _replay(state: PartitionState, record: StreamEntry, config: LogConfig, now_ms: int, last_aborted: int) -> None:
    if record.is_hole:  # a released partition is read from its segment's start
        return
    header = parse_header(record.payload)
    if (header.base_offset, header.last_offset_delta + 1, header.size_bytes) != (
        record.base_offset,
        record.count,
        len(record.payload),
    ):
        raise CorruptData(
            f"stream {state.data.stream_id}: the batch at {record.base_offset} does not match its stream record"
        )
    is_own = record.base_offset >= state.own_from
    if record.base_offset >= state.checkpoint_offset:
        state.epochs.assign(header.partition_leader_epoch, record.base_offset)
        state.track(header, record.base_offset, header.max_timestamp, now_ms, config, is_own)
    elif is_own and header.producer_id >= 0 and not header.is_control:
        state.producers.append(header, record.base_offset, header.max_timestamp, now_ms)
    if is_own and header.is_control:
        aborted = apply_marker(state, header, record.payload, record.base_offset, now_ms)
        if aborted is not None and aborted.last_offset > last_aborted:
            state.txn.add(aborted)


def apply_marker(
    state: PartitionState, header: BatchHeader, batch: bytes | memoryview, offset: int, now_ms: int
) -> AbortedTxn | None:
    """End the transaction of the marker at `offset`. Returns the index entry if it was aborted."""
    kind, completed = _replay_marker(state.producers, header, batch, offset, now_ms)
    if completed is None or kind == ControlType.COMMIT:
        return None
    ongoing = state.producers.first_ongoing()
    return AbortedTxn(*completed, offset + 1 if ongoing is None else ongoing)


def _replay_marker(
    producers: ProducerStates, header: BatchHeader, batch: bytes | memoryview, offset: int, now_ms: int
) -> tuple[int, CompletedTxn | None]:
    """Return the kind of the control record, and the transaction that it has ended."""
    record = next(iter_records(batch, header=header))
    kind = control_type(record)
    if kind not in (ControlType.ABORT, ControlType.COMMIT):
        return kind, None  # an unknown kind of control record does not concern transactions
    return kind, producers.append_marker(header, offset, control_epoch(record), now_ms)
