"""Recovery of a WAL directory: find the end, distinguish a torn tail from damage, truncate durably.

Every record of every file is checked. All files but the last must be intact up to the start of the next one: a file is
renamed to its segment name only after everything before it was synced. In the last file the first place without a whole
record is the end, unless there is proof that the bytes there had been durable:

- a whole record after it that shows it (`find_evidence`), or
- the epoch file: its last epoch's start, or the durable offset noted when the WAL was closed, or after the first
  write to its newest file. So the newest file is missed, too, when it is gone.

Then it is damage: `CorruptData`, and nothing is changed. Otherwise the rest of the file is overwritten with zeros and
synced before `recover` returns, so that no stale bytes can be taken for a record later.

A truncation that the epoch file says may not be complete (`ReplicaMarks.cut_at`) is completed before anything is read.
It may be done any number of times.

Entry: `recover`; `cut_files` for a truncation.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tidelog.runtime.disk import Disk, DiskFile, FileInfo
from tidelog.runtime.errors import CorruptData
from tidelog.storage.wal.base import WalRecord
from tidelog.storage.wal.disk.scan import (
    RECEIVE_GROUP_BYTES,
    EvidenceRule,
    ScanEnd,
    ScanState,
    find_dirty_end,
    find_evidence,
    scan,
)
from tidelog.storage.wal.disk.segments import SPARE_SUFFIX, TEMPORARY_SUFFIX, WalSegment, parse_segment_name
from tidelog.storage.wal.epochs import (
    EPOCH_FILE,
    NO_MARKS,
    EpochFile,
    EpochHistory,
    ReplicaMarks,
    decode_epoch_file,
    decode_marks,
    encode_epoch_file,
)
from tidelog.storage.wal.format import HEADER_BYTES, WalHeader, misplaced, read_header, record_of

logger = logging.getLogger(__name__)

_HINT = (
    "examine it with `tidelog wal verify`, and restore what is missing; without it, move the directory away: the next"
    " start says which records are at stake"
)


@dataclass(slots=True)
class WalRecovery:
    """The result of a recovery. The segments' files are open and belong to the caller."""

    segments: list[WalSegment]
    start_offset: int
    end_offset: int
    confirm_offset: int
    history: EpochHistory
    marks: ReplicaMarks
    spare_names: list[str]


async def recover(
    disk: Disk, on_record: Callable[[WalRecord], None], *, group_bytes: int = RECEIVE_GROUP_BYTES
) -> WalRecovery:
    """Read the directory as described above and call `on_record` for each whole record, in order.

    `group_bytes`: the bound that received records were written with. Raises `CorruptData` and `OSError`s; then all
    files are closed, and nothing was changed but `*.tmp` files removed and a truncation completed.
    """
    files = await disk.entries()
    for info in files:
        if info.name.endswith(TEMPORARY_SUFFIX):
            await disk.remove(info.name)
    epochs, marks = await load_epochs(disk)
    segments = await open_segments(disk, files)
    try:
        if marks.cut_at >= 0:
            assert epochs is not None
            marks = await _complete_cut(disk, segments, epochs, marks)
        found = await _scan_all(segments, epochs, marks, group_bytes, on_record)
    except BaseException:
        for segment in segments:
            await segment.file.close()
        raise
    found.spare_names = [info.name for info in files if info.name.endswith(SPARE_SUFFIX)]
    return found


async def load_epochs(disk: Disk) -> tuple[EpochFile | None, ReplicaMarks]:
    """Read the epoch file, None if there is none, and the marks in it. Raises `CorruptData`."""
    data = await disk.load(EPOCH_FILE)
    if data is None:
        return None, NO_MARKS
    try:
        return decode_epoch_file(data), decode_marks(data)
    except CorruptData as error:
        raise CorruptData(
            f"{EPOCH_FILE}: {error.message}", hint="move the file away: it is rebuilt from the WAL's records"
        ) from error


async def open_segments(disk: Disk, files: list[FileInfo], *, read_only: bool = False) -> list[WalSegment]:
    """Open all segment files, in order of their offsets. Files trimmed meanwhile are left out."""
    segments: list[WalSegment] = []
    for info in files:
        start = parse_segment_name(info.name)
        if start is None:
            continue
        try:
            segments.append(WalSegment(start, await disk.open(info.name, read_only=read_only)))
        except FileNotFoundError:
            if not read_only:
                raise
    return segments


async def cut_files(segments: list[WalSegment], offset: int, discard: Callable[[DiskFile], Awaitable[None]]) -> None:
    """Remove what follows WAL offset `offset`, durably: newer files, the newest first, then bytes of the last one.

    `discard` closes and removes a file. A file that is removed is not used again: its records could come to lie in
    their old places. Interrupted, it may be repeated.
    """
    while len(segments) > 1 and segments[-1].start >= offset:
        await discard(segments[-1].file)
        segments.pop()
    if segments:
        last = segments[-1]
        await last.file.settle()  # zeros that an earlier attempt left may be in memory only
        dirty_end = await find_dirty_end(last, offset)
        if dirty_end > offset:
            await last.file.fill_zeros(offset - last.start, dirty_end - offset)


async def _complete_cut(disk: Disk, segments: list[WalSegment], epochs: EpochFile, marks: ReplicaMarks) -> ReplicaMarks:
    """Complete the truncation that the marks name, and return the marks without it."""
    if segments and segments[0].start > marks.cut_at:
        raise CorruptData(f"the WAL was cut at {marks.cut_at}, but begins at {segments[0].start}", hint=_HINT)

    async def discard(file: DiskFile) -> None:
        await file.close()
        await disk.remove(file.name)

    await cut_files(segments, marks.cut_at, discard)
    done = marks._replace(cut_at=-1)
    await disk.replace(EPOCH_FILE, encode_epoch_file(epochs.history, epochs.durable_offset, done))
    logger.warning("completed a truncation of the WAL", extra={"wal_offset": marks.cut_at})
    return done


async def _scan_all(
    segments: list[WalSegment],
    epochs: EpochFile | None,
    marks: ReplicaMarks,
    group_bytes: int,
    on_record: Callable[[WalRecord], None],
) -> WalRecovery:
    if not segments:
        if marks.is_replica and epochs is not None and not epochs.history.entries:
            # It has started over there and received nothing yet: an epoch's entry is durable before its first byte.
            offset = epochs.durable_offset
            return WalRecovery([], offset, offset, max(offset, marks.confirm_offset), EpochHistory(), marks, [])
        if epochs is not None and proven_offset(epochs) > 0:
            logger.warning(
                "the WAL has no files; it starts empty",
                extra={"proven_offset": proven_offset(epochs)},
            )
        if marks.is_replica and epochs is not None:  # what it has promised holds without its bytes, too
            promised = max(marks.promised_epoch, epochs.history.last_epoch)
            marks = ReplicaMarks(promised_epoch=promised, own_from=marks.own_from)
        return WalRecovery([], 0, 0, 0, EpochHistory(), marks, [])
    state = ScanState()
    check = EpochCheck(epochs.history if epochs is not None else None, segments[0].start)

    def on_header(header: WalHeader, window: memoryview, position: int) -> None:
        check.on_header(header)
        on_record(record_of(header, window, position))

    for segment, following in itertools.pairwise(segments):
        end = await scan(segment, segment.start, following.start, state, on_header)
        if end.offset != following.start:
            reason = end.reason or f"the next file begins at {following.start}"
            raise damage(segment, end.offset, reason, f"{following.file.name} follows")
    last = segments[-1]
    await last.file.settle()
    end = await scan(last, last.start, last.limit, state, on_header)
    await _cut(last, end, state.last_epoch, epochs, EvidenceRule(marks.own_from, group_bytes))
    confirm_offset = max(state.confirm_offset, marks.confirm_offset)
    return WalRecovery(segments, segments[0].start, end.offset, confirm_offset, check.history, marks, [])


def proven_offset(epochs: EpochFile) -> int:
    """Return the WAL offset up to which the epoch file proves durability: its note, or the last epoch's start."""
    entries = epochs.history.entries
    return max(epochs.durable_offset, entries[-1].start_offset if entries else 0)


async def _cut(last: WalSegment, found: ScanEnd, last_epoch: int, epochs: EpochFile | None, rule: EvidenceRule) -> None:
    """End the log where the scan ended: raise if that loses durable bytes, else zero the rest of the file."""
    end, reason = found
    evidence = await find_evidence(last, end, last_epoch, rule)
    if evidence.proof is not None:
        raise damage(last, end, reason, rule.words(evidence.proof))
    if epochs is not None and proven_offset(epochs) > end:
        raise damage(last, end, reason, f"the epoch file says {proven_offset(epochs)} was durable")
    dirty_bytes = evidence.dirty_end - end
    if dirty_bytes > 0:
        # Stale bytes of a recycled file are expected; a record that was begun here is incomplete, or damaged.
        logger.log(
            logging.WARNING if await is_begun(last, end) else logging.INFO,
            "truncated the WAL after its last whole record",
            extra={"file": last.file.name, "wal_offset": end, "reason": reason, "zeroed_bytes": dirty_bytes},
        )
        await last.file.fill_zeros(end - last.start, dirty_bytes)


async def is_begun(segment: WalSegment, offset: int) -> bool:
    """Return whether a record was begun here; zeros and stale bytes of a recycled file are just the end."""
    window = await segment.file.read(offset - segment.start, HEADER_BYTES)
    return len(window) == HEADER_BYTES and not misplaced(read_header(window, 0), offset)


def damage(segment: WalSegment, offset: int, reason: str, proof: str) -> CorruptData:
    """Return the error for damaged durable bytes."""
    return CorruptData(
        f"WAL file {segment.file.name} is damaged at byte {offset - segment.start} (WAL offset {offset}): {reason},"
        f" but {proof}",
        hint=_HINT,
    )


class EpochCheck:
    """Checks that records and epoch history agree; without a history it builds one from the records.

    An empty history is none: a log that starts over forgets its epochs first, and may be found before its files are
    removed.
    """

    def __init__(self, history: EpochHistory | None, log_start: int) -> None:
        self._rebuild = history is None or not history.entries
        self._log_start = log_start
        self._epoch = -1
        self.history = history.copy() if history is not None else EpochHistory()

    def on_header(self, header: WalHeader) -> None:
        """Check the next record. Raises `CorruptData` when its epoch differs from the history's."""
        if header.master_epoch == self._epoch:
            return
        self._epoch = header.master_epoch
        if self._rebuild:
            # The first record kept may lie in the middle of its epoch: the log's start is the best known start.
            self.history.append(header.master_epoch, header.wal_offset if self.history.entries else self._log_start)
            return
        expected = self.history.epoch_at(header.wal_offset)
        if expected != header.master_epoch:
            raise CorruptData(
                f"the WAL record at {header.wal_offset} is of master epoch {header.master_epoch},"
                f" the epoch file says {expected}",
                hint=_HINT,
            )
