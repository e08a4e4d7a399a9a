"""Reads a WAL file record by record, and searches for proof of durability after a place where reading stops.

A file is named by the WAL offset of its first byte, so a record's position in the file and its WAL offset verify each
other. `scan` continues until a stop offset or the first place without a whole record. That place is the log's end, a
torn tail, or damage: `find_evidence` searches the rest of the file for whole records that show that the bad place had
been durable. What a record shows depends on who wrote it (`EvidenceRule`).

Used by recovery, by `DiskWal.read_records` and by `tidelog.storage.wal.disk.inspect`. Entry: `scan`, `find_evidence`,
`find_dirty_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.runtime.errors import CorruptData
from tidelog.storage.wal.disk.segments import WalSegment
from tidelog.storage.wal.format import (
    HEADER_BYTES,
    MAGIC_BYTES,
    WalHeader,
    crc_matches,
    misplaced,
    read_header,
    unsupported,
)

_WINDOW = 4 << 20
"""Bytes per read; a larger record is read whole."""
_ZERO_WINDOW = bytes(_WINDOW)

RECEIVE_GROUP_BYTES = 1 << 20
"""Bound on the received bytes that are written and not synced; one larger record is written alone.

A disk that syncs in 5 ms still takes 200 MB/s. A smaller value finds more damage after a crash (`EvidenceRule`). Logs
that were written with a larger one must be read with that larger one.
"""

OnHeader = Callable[[WalHeader, memoryview, int], None]
"""Called with a checked header, its buffer and its position in it (see `wal_format.record_of`)."""


class ScanEnd(NamedTuple):
    """Where and why a scan stopped."""

    offset: int
    """WAL offset up to which everything is intact."""
    reason: str
    """Why the bytes there are not a record; empty: the stop offset was reached."""


@dataclass(slots=True)
class ScanState:
    """State across the files of a log."""

    last_epoch: int = -1
    """Master epoch of the last record; a smaller one after it is stale."""
    confirm_offset: int = 0
    """The largest confirm offset in a header."""
    records: int = 0


class EvidenceRule(NamedTuple):
    """What a whole record on this disk proves about the bytes before it (docs/design/0015-hot-tier.md, section 6).

    A record that this disk wrote as master names an offset in its header before which everything was durable here. A
    received record has the same header, which speaks of its master's disk. It proves what lies more than a group before
    its end: at most `group_bytes` that were received are ever written and not synced, or one larger record alone.
    """

    own_from: int = 0
    """WAL offset from which on this disk wrote the records as master."""
    group_bytes: int = RECEIVE_GROUP_BYTES

    def durable_before(self, header: WalHeader) -> int:
        """Return the offset before which everything was durable on this disk when the record was written."""
        if header.wal_offset >= self.own_from:
            return header.confirm_offset
        if header.end_offset - header.wal_offset > self.group_bytes:
            return header.wal_offset
        return header.end_offset - self.group_bytes

    def words(self, header: WalHeader) -> str:
        """Return what the record proves, for a message."""
        durable = self.durable_before(header)
        if header.wal_offset >= self.own_from:
            return f"the whole record at {header.wal_offset} says {durable} was durable"
        return f"the whole record at {header.wal_offset} was received when everything before {durable} was durable"


OWN_RECORDS = EvidenceRule()
"""The rule for a log that this disk alone wrote."""


class Evidence(NamedTuple):
    """The result of searching after a bad place."""

    proof: WalHeader | None
    """A whole record that proves that the bad place had been durable."""
    dirty_end: int
    """WAL offset after the last byte that may not be zero."""


async def scan(segment: WalSegment, start: int, stop: int, state: ScanState, on_header: OnHeader) -> ScanEnd:
    """Check the records of one file from WAL offset `start`, at most to `stop`.

    Raises `CorruptData` for a whole record that this version of Tidelog cannot understand, and `OSError`s.
    """
    file, base = segment.file, segment.start
    offset = start
    stop = min(stop, segment.limit)
    need = HEADER_BYTES
    while offset < stop:
        if offset + need > segment.limit:
            return ScanEnd(offset, "the file ends inside a record")
        size = min(max(need, min(_WINDOW, stop - offset)), segment.limit - offset)
        window = memoryview(await file.read(offset - base, size))
        if len(window) < need:
            return ScanEnd(offset, "the file is shorter than when it was opened")
        begun = offset
        while offset < stop:
            position = offset - begun
            if position + HEADER_BYTES > len(window):
                need = HEADER_BYTES
                break
            header = read_header(window, position)
            reason = misplaced(header, offset)
            if reason:
                return ScanEnd(offset, reason)
            end = header.end_offset
            if end > segment.limit:
                return ScanEnd(offset, "the record would not fit into its file")
            if end - begun > len(window):
                need = end - offset
                break
            reason = _accept(header, window, position, state)
            if reason:
                return ScanEnd(offset, reason)
            on_header(header, window, position)
            offset = end
    return ScanEnd(offset, "")


def _accept(header: WalHeader, window: memoryview, position: int, state: ScanState) -> str:
    if not crc_matches(header, window, position):
        return "the CRC32C of the record does not match"
    if reason := unsupported(header):
        raise CorruptData(
            f"WAL offset {header.wal_offset}: {reason}", hint="start the Tidelog version that wrote this WAL"
        )
    if header.master_epoch < state.last_epoch:
        return f"the master epoch goes back from {state.last_epoch} to {header.master_epoch}"
    state.last_epoch = header.master_epoch
    state.confirm_offset = max(state.confirm_offset, header.confirm_offset)
    state.records += 1
    return ""


async def find_evidence(
    segment: WalSegment, bad_offset: int, last_epoch: int, rule: EvidenceRule = OWN_RECORDS
) -> Evidence:
    """Search the file from `bad_offset` to its end for a whole record that proves the bad place durable.

    A record that does not prove it (e.g. written in the same torn batch) is no evidence.
    """

    def proves(header: WalHeader) -> bool:
        if header.master_epoch < last_epoch or not 0 <= header.confirm_offset <= header.wal_offset:
            return False
        return rule.durable_before(header) > bad_offset

    file, base = segment.file, segment.start
    dirty_end = bad_offset
    proof: WalHeader | None = None
    position = bad_offset - base
    while position < file.size:
        data = await file.read(position, min(_WINDOW, file.size - position))
        if not data:
            break
        if data != _ZERO_WINDOW[: len(data)]:
            dirty_end = base + position + len(data)
            found = data.find(MAGIC_BYTES)
            while 0 <= found <= len(data) - HEADER_BYTES and proof is None:
                proof = await _proof_at(segment, data, found, position + found, proves)
                found = data.find(MAGIC_BYTES, found + 1)
        if len(data) <= HEADER_BYTES or position + len(data) >= file.size:
            break
        position += len(data) - HEADER_BYTES  # windows overlap: a header may cross the border
    return Evidence(proof, dirty_end)


async def find_dirty_end(segment: WalSegment, offset: int) -> int:
    """Return the WAL offset after the last byte from `offset` on that may not be zero; `offset` if all are zero."""
    dirty_end = offset
    position = offset - segment.start
    while position < segment.file.size:
        data = await segment.file.read(position, min(_WINDOW, segment.file.size - position))
        if not data:
            break
        if data != _ZERO_WINDOW[: len(data)]:
            dirty_end = segment.start + position + len(data)
        position += len(data)
    return dirty_end


async def _proof_at(
    segment: WalSegment, data: bytes, found: int, position: int, proves: Callable[[WalHeader], bool]
) -> WalHeader | None:
    """Return the header at `found` in `data` (byte `position` of the file) if its record is whole and a proof."""
    header = read_header(data, found)
    offset = segment.start + position
    if misplaced(header, offset) or header.end_offset > segment.limit:
        return None
    if not proves(header):
        return None
    whole = memoryview(await segment.file.read(position, header.end_offset - offset))
    if len(whole) < header.end_offset - offset or not crc_matches(header, whole, 0):
        return None
    return header
