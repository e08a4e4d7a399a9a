"""Recovery of a WAL directory: find the end, tell a torn tail from damage, make the cut durable.

Every record of every file is checked. All files but the last must be whole up to the start of the next one: a file is
given its name only after everything before it was synced. In the last file the first thing that is not a whole record
is the end, unless something proves that the bytes there had been durable:

- a whole record behind it whose confirm offset lies past it (`wal_scan.find_evidence`), or
- the epoch file: its last epoch's start, or the durable offset noted when the WAL was closed.

Then it is damage: `CorruptData`, and nothing is changed. Otherwise the rest of the file is overwritten with zeros and
synced before `recover` returns, so that no left-over can ever be taken for a record.

Entry: `recover`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from runtime.disk import Disk, FileInfo
from runtime.errors import CorruptData
from storage.epoch_history import EPOCH_FILE, EpochFile, EpochHistory, decode_epoch_file
from storage.wal import WalRecord
from storage.wal_format import HEADER_BYTES, WalHeader, misplaced, read_header, record_of
from storage.wal_scan import ScanState, find_evidence, scan
from storage.wal_segments import SPARE_SUFFIX, TEMPORARY_SUFFIX, Segment, parse_segment_name

log = logging.getLogger(__name__)

_HINT = "look with `tidelog wal verify`; a copy of the directory on another member can replace it"


@dataclass(slots=True)
class Recovered:
    """What was found. The segments' files are open and belong to the caller."""

    segments: list[Segment]
    start_offset: int
    end_offset: int
    confirm_offset: int
    history: EpochHistory
    spare_names: list[str]


async def recover(disk: Disk, on_record: Callable[[WalRecord], None]) -> Recovered:
    """Read the directory as described above and call `on_record` for each whole record, in order.

    Raises `CorruptData` and `OSError`s; then all files are closed and nothing was changed but `*.tmp` files removed.
    """
    files = await disk.entries()
    for info in files:
        if info.name.endswith(TEMPORARY_SUFFIX):
            await disk.remove(info.name)
    epochs = await load_epochs(disk)
    segments = await open_segments(disk, files)
    try:
        found = await _scan_all(segments, epochs, on_record)
    except BaseException:
        for segment in segments:
            await segment.file.close()
        raise
    found.spare_names = [info.name for info in files if info.name.endswith(SPARE_SUFFIX)]
    return found


async def load_epochs(disk: Disk) -> EpochFile | None:
    """Read the epoch file; None if there is none. Raises `CorruptData`."""
    data = await disk.load(EPOCH_FILE)
    if data is None:
        return None
    try:
        return decode_epoch_file(data)
    except CorruptData as error:
        raise CorruptData(
            f"{EPOCH_FILE}: {error.message}", hint="move the file away: it is made anew from the WAL's records"
        ) from error


async def open_segments(disk: Disk, files: list[FileInfo], *, read_only: bool = False) -> list[Segment]:
    """Open all segment files, in order of their offsets. One that is gone meanwhile (trimmed) is left out."""
    segments: list[Segment] = []
    for info in files:
        start = parse_segment_name(info.name)
        if start is None:
            continue
        try:
            segments.append(Segment(start, await disk.open(info.name, read_only=read_only)))
        except FileNotFoundError:
            if not read_only:
                raise
    return segments


async def _scan_all(
    segments: list[Segment], epochs: EpochFile | None, on_record: Callable[[WalRecord], None]
) -> Recovered:
    if not segments:
        if epochs is not None and proven_offset(epochs) > 0:
            log.warning("the WAL's files are gone; it starts over", extra={"proven_offset": proven_offset(epochs)})
        return Recovered([], 0, 0, 0, EpochHistory(), [])
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
    await _cut(last, end.offset, end.reason, state.last_epoch, epochs)
    return Recovered(segments, segments[0].start, end.offset, state.confirm_offset, check.history, [])


def proven_offset(epochs: EpochFile) -> int:
    """Up to which WAL offset all was durable by the word of the epoch file: its note, or the last epoch's start."""
    entries = epochs.history.entries
    return max(epochs.durable_offset, entries[-1].start_offset if entries else 0)


async def _cut(last: Segment, end: int, reason: str, last_epoch: int, epochs: EpochFile | None) -> None:
    """Settle that the log ends at `end`: refuse if that loses durable bytes, else zero what lies behind it."""
    evidence = await find_evidence(last, end, last_epoch)
    if evidence.proof is not None:
        proof = f"the whole record at {evidence.proof.wal_offset} says {evidence.proof.confirm_offset} was durable"
        raise damage(last, end, reason, proof)
    if epochs is not None and proven_offset(epochs) > end:
        raise damage(last, end, reason, f"the epoch file says {proven_offset(epochs)} was durable")
    dirty_bytes = evidence.dirty_end - end
    if dirty_bytes > 0:
        # Left-overs of a recycled file are nothing; a record that was begun here did not complete, or is damaged.
        log.log(
            logging.WARNING if await is_begun(last, end) else logging.INFO,
            "cut the WAL behind its last whole record",
            extra={"file": last.file.name, "wal_offset": end, "reason": reason, "zeroed_bytes": dirty_bytes},
        )
        await last.file.fill_zeros(end - last.start, dirty_bytes)


async def is_begun(segment: Segment, offset: int) -> bool:
    """Whether a record of this place was begun; zeros and stale bytes of a recycled file are just the end."""
    window = await segment.file.read(offset - segment.start, HEADER_BYTES)
    return len(window) == HEADER_BYTES and not misplaced(read_header(window, 0), offset)


def damage(segment: Segment, offset: int, reason: str, proof: str) -> CorruptData:
    """The error for durable bytes that are not whole any more."""
    return CorruptData(
        f"WAL file {segment.file.name} is damaged at byte {offset - segment.start} (WAL offset {offset}): {reason},"
        f" but {proof}",
        hint=_HINT,
    )


class EpochCheck:
    """Checks that records and epoch history agree; without a history it makes one from the records."""

    def __init__(self, history: EpochHistory | None, log_start: int) -> None:
        self._rebuild = history is None
        self._log_start = log_start
        self._epoch = -1
        self.history = history.copy() if history is not None else EpochHistory()

    def on_header(self, header: WalHeader) -> None:
        """Look at the next record. Raises `CorruptData` when its epoch is not the one the history has there."""
        if header.master_epoch == self._epoch:
            return
        self._epoch = header.master_epoch
        if self._rebuild:
            # The first record kept may lie in the middle of its epoch: nothing better is known than the log's start.
            self.history.append(header.master_epoch, header.wal_offset if self.history.entries else self._log_start)
            return
        expected = self.history.epoch_at(header.wal_offset)
        if expected != header.master_epoch:
            raise CorruptData(
                f"the WAL record at {header.wal_offset} is of master epoch {header.master_epoch},"
                f" the epoch file says {expected}",
                hint=_HINT,
            )
