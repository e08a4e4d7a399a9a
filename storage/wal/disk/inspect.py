"""Inspection of a WAL directory without a broker, for `tidelog wal inspect` and `tidelog wal verify`.

Everything here is read-only, so it may be used while a broker runs on the directory. Then the last file grows, and a
file may be trimmed while it is being read: a bad place in a file that no longer exists is not reported, and one in the
last file is checked twice.

Entry: `inspect`, `verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Literal

import msgspec

from tidelog.runtime.disk import Disk
from tidelog.runtime.errors import CorruptData
from tidelog.storage.wal.base import WalRecord, WalRecordType
from tidelog.storage.wal.disk.recovery import EpochCheck, is_begun, load_epochs, open_segments, proven_offset
from tidelog.storage.wal.disk.scan import EvidenceRule, ScanEnd, ScanState, find_evidence, scan
from tidelog.storage.wal.disk.segments import SPARE_SUFFIX, TEMPORARY_SUFFIX, WalSegment, segment_name
from tidelog.storage.wal.epochs import EPOCH_FILE, NO_MARKS, NOTHING_OWN, EpochFile, EpochHistory, ReplicaMarks
from tidelog.storage.wal.format import WalHeader, record_of

OnRecord = Callable[[WalRecord], None]
Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the log. Offsets are WAL offsets in bytes (int64)."""

    name: str
    file_bytes: int
    start_offset: int
    end_offset: int
    """After the last whole record."""
    records: int
    data_records: int
    payload_bytes: int
    streams: int
    """Distinct stream ids."""
    first_epoch: int
    """Master epoch of the first record; -1 if there is no record."""
    last_epoch: int
    confirm_offset: int
    """The largest confirm offset in a header."""
    stopped: str
    """Why reading stopped at `end_offset`; empty: the next file begins there, or the file is full."""


class WalInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A WAL directory."""

    segments: list[SegmentInfo]
    start_offset: int
    end_offset: int
    spare_files: int
    spare_bytes: int
    epochs: list[tuple[int, int]]
    """`<epoch, start offset>` of the epoch file."""
    epoch_file: Literal["ok", "missing", "corrupt"]
    noted_durable_offset: int
    """The durable offset in the epoch file when it was written."""
    promised_epoch: int = -1
    """Of a replica among several, as the epoch file says (`ReplicaMarks`)."""
    own_from: int = 0
    """WAL offset from which on this disk wrote the records as master; -1: none of them."""
    cut_at: int = -1
    noted_confirm_offset: int = 0


class WalFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of `verify`."""

    kind: Literal["corrupt", "torn", "epochs", "foreign", "missing", "lost", "leftover"]
    """`corrupt`: durable bytes are damaged. `torn`: the log's last write did not complete; recovery cuts it.
    `epochs`: the epoch file contradicts the records or is unreadable. `foreign`: the log is another replica set's than
    its directory is for. `missing`: there is no epoch file. `lost`: an acknowledged object of a log in the bucket is
    missing. `leftover`: something that recovery removes or ignores."""
    file: str
    """Name of the file, or key of the object."""
    file_offset: int
    """Byte in it; -1 if not applicable."""
    wal_offset: int
    message: str

    @property
    def is_error(self) -> bool:
        """Return whether a broker would refuse to start because of it."""
        return self.kind in ("corrupt", "epochs", "foreign", "lost")


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `verify`; without findings of kind `corrupt` or `epochs` a broker can start on the directory."""

    info: WalInfo
    findings: list[WalFinding]

    @property
    def is_sound(self) -> bool:
        """Return whether a broker would start."""
        return not any(finding.is_error for finding in self.findings)


async def inspect(disk: Disk, *, on_record: OnRecord | None = None, progress: Progress | None = None) -> WalInfo:
    """Describe the directory; `on_record` is called for each whole record, in order. Raises `OSError`."""
    return (await _examine(disk, on_record, progress)).info


async def verify(disk: Disk, *, progress: Progress | None = None) -> VerifyReport:
    """Check every record, the chain of files and the epoch file. Changes nothing. Raises `OSError`."""
    return await _examine(disk, None, progress)


class _Counts:
    """Collects the values of `SegmentInfo` for one file."""

    def __init__(self, segment: WalSegment, check: EpochCheck, on_record: OnRecord | None) -> None:
        self._segment = segment
        self._check = check
        self._on_record = on_record
        self.records = self.data_records = self.payload_bytes = 0
        self.streams: set[int] = set()
        self.first_epoch = self.last_epoch = -1
        self.confirm_offset = 0
        self.epoch_error: WalFinding | None = None

    def on_header(self, header: WalHeader, window: memoryview, position: int) -> None:
        if self.records == 0:
            self.first_epoch = header.master_epoch
        self.records += 1
        self.last_epoch = header.master_epoch
        self.confirm_offset = max(self.confirm_offset, header.confirm_offset)
        self.payload_bytes += header.payload_length
        if header.type == WalRecordType.DATA:
            self.data_records += 1
            self.streams.add(header.stream_id)
        try:
            self._check.on_header(header)
        except CorruptData as error:
            self.epoch_error = self.epoch_error or self.finding("epochs", header.wal_offset, error.message)
        if self._on_record is not None:
            self._on_record(record_of(header, window, position))

    def finding(self, kind: Literal["corrupt", "torn", "epochs", "missing"], offset: int, message: str) -> WalFinding:
        segment = self._segment
        at = offset - segment.start
        return WalFinding(kind=kind, file=segment.file.name, file_offset=at, wal_offset=offset, message=message)

    def info(self, end_offset: int, stopped: str) -> SegmentInfo:
        return SegmentInfo(
            name=self._segment.file.name,
            file_bytes=self._segment.file.size,
            start_offset=self._segment.start,
            end_offset=end_offset,
            records=self.records,
            data_records=self.data_records,
            payload_bytes=self.payload_bytes,
            streams=len(self.streams),
            first_epoch=self.first_epoch,
            last_epoch=self.last_epoch,
            confirm_offset=self.confirm_offset,
            stopped=stopped,
        )


async def _examine(disk: Disk, on_record: OnRecord | None, progress: Progress | None) -> VerifyReport:
    findings: list[WalFinding] = []
    epochs, marks, epoch_state = await _read_epochs(disk, findings)
    files = await disk.entries()  # after the epoch file: it says what is in the files, and a broker may be writing
    findings += [
        WalFinding(kind="leftover", file=info.name, file_offset=-1, wal_offset=-1, message="recovery removes it")
        for info in files
        if info.name.endswith(TEMPORARY_SUFFIX)
    ]
    async with AsyncExitStack() as stack:
        segments = await open_segments(disk, files, read_only=True)
        for segment in segments:
            stack.push_async_callback(segment.file.close)
        infos = await _walk(disk, _uncut(segments, marks, findings), epochs, marks, findings, on_record, progress)
    if segments and epochs is None and epoch_state == "missing":
        message = "there is no epoch file; a broker rebuilds it from the records"
        findings.append(WalFinding(kind="missing", file=EPOCH_FILE, file_offset=-1, wal_offset=-1, message=message))
    spares = [info.size for info in files if info.name.endswith(SPARE_SUFFIX)]
    info = WalInfo(
        segments=infos,
        start_offset=infos[0].start_offset if infos else 0,
        end_offset=infos[-1].end_offset if infos else 0,
        spare_files=len(spares),
        spare_bytes=sum(spares),
        epochs=[(entry.epoch, entry.start_offset) for entry in epochs.history.entries] if epochs is not None else [],
        epoch_file=epoch_state,
        noted_durable_offset=epochs.durable_offset if epochs is not None else 0,
        promised_epoch=marks.promised_epoch,
        own_from=marks.own_from if marks.own_from != NOTHING_OWN else -1,
        cut_at=marks.cut_at,
        noted_confirm_offset=marks.confirm_offset,
    )
    return VerifyReport(info=info, findings=findings)


async def _read_epochs(
    disk: Disk, findings: list[WalFinding]
) -> tuple[EpochFile | None, ReplicaMarks, Literal["ok", "missing", "corrupt"]]:
    try:
        epochs, marks = await load_epochs(disk)
    except CorruptData as error:
        findings.append(
            WalFinding(kind="epochs", file=EPOCH_FILE, file_offset=-1, wal_offset=-1, message=error.message)
        )
        return None, NO_MARKS, "corrupt"
    return epochs, marks, "ok" if epochs is not None else "missing"


def _uncut(segments: list[WalSegment], marks: ReplicaMarks, findings: list[WalFinding]) -> list[WalSegment]:
    """Return the files that are left when a truncation is completed."""
    if marks.cut_at < 0:
        return segments
    kept = [segment for number, segment in enumerate(segments) if number == 0 or segment.start < marks.cut_at]
    file, at = (kept[-1].file.name, marks.cut_at - kept[-1].start) if kept else (EPOCH_FILE, -1)
    message = f"a truncation at {marks.cut_at} is not complete; recovery completes it"
    findings.append(WalFinding(kind="leftover", file=file, file_offset=at, wal_offset=marks.cut_at, message=message))
    return kept


async def _walk(
    disk: Disk,
    segments: list[WalSegment],
    epochs: EpochFile | None,
    marks: ReplicaMarks,
    findings: list[WalFinding],
    on_record: OnRecord | None,
    progress: Progress | None,
) -> list[SegmentInfo]:
    infos: list[SegmentInfo] = []
    total = sum(segment.file.size for segment in segments)
    state = ScanState()
    history: EpochHistory | None = epochs.history if epochs is not None else None
    check = EpochCheck(history, segments[0].start if segments else 0)
    done = 0
    for index, segment in enumerate(segments):
        following = segments[index + 1] if index + 1 < len(segments) else None
        counts = _Counts(segment, check, on_record)
        stop = following.start if following is not None else _stop(segment, marks)
        finding: WalFinding | None = None
        offset, stopped = segment.start, ""
        try:
            offset, stopped = await scan(segment, segment.start, stop, state, counts.on_header)
        except CorruptData as error:  # an unknown version or type
            stopped = error.message
            finding = counts.finding("corrupt", offset, error.message)
        if finding is None:
            finding = await _judge(segment, following, ScanEnd(offset, stopped), state, epochs, marks, counts)
            if finding is not None and following is None and await _has_moved_on(disk, segment, offset, state):
                finding = None
        found = [one for one in (finding, counts.epoch_error) if one is not None]
        if found and await _is_still_there(disk, segment):
            findings.extend(found)
        infos.append(counts.info(offset, stopped))
        done += segment.file.size
        if progress is not None:
            progress(done, total)
    return infos


def _stop(segment: WalSegment, marks: ReplicaMarks) -> int:
    """Return where the last file ends at the latest."""
    return segment.limit if marks.cut_at < 0 else min(segment.limit, marks.cut_at)


async def _judge(
    segment: WalSegment,
    following: WalSegment | None,
    end: ScanEnd,
    state: ScanState,
    epochs: EpochFile | None,
    marks: ReplicaMarks,
    counts: _Counts,
) -> WalFinding | None:
    """Return the finding for the place where reading stopped, or None."""
    offset, stopped = end
    if following is not None:
        if offset == following.start:
            return None
        why = stopped or f"the next file begins at {following.start}, a file between is missing"
        return counts.finding("corrupt", offset, why)
    if offset == marks.cut_at:
        return None
    rule = EvidenceRule(marks.own_from)
    evidence = await find_evidence(segment, offset, state.last_epoch, rule)
    if evidence.proof is not None:
        return counts.finding("corrupt", offset, f"{stopped}; {rule.words(evidence.proof)}")
    if epochs is not None and proven_offset(epochs) > offset:
        return counts.finding("corrupt", offset, f"{stopped}; the epoch file says {proven_offset(epochs)} was durable")
    if await is_begun(segment, offset):
        return counts.finding("torn", offset, f"{stopped}; recovery cuts the log here")
    return None


async def _has_moved_on(disk: Disk, segment: WalSegment, offset: int, state: ScanState) -> bool:
    """Return whether a whole record is there now, or the next file: a broker has appended since the scan.

    To be asked after everything else was read: what was read later than the scan may be newer than it, too.
    """
    again = await scan(segment, offset, offset + 1, ScanState(state.last_epoch), lambda *_: None)
    if again.offset > offset:
        return True
    return offset > segment.start and any(info.name == segment_name(offset) for info in await disk.entries())


async def _is_still_there(disk: Disk, segment: WalSegment) -> bool:
    """Return whether the file was not trimmed (and perhaps recycled) while it was being read."""
    name = segment_name(segment.start)
    return any(info.name == name for info in await disk.entries())
