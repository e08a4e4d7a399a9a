"""`EpochHistory`: which master epoch wrote which part of a WAL (docs/protocols.md, Epoch history).

The history is an ordered list of `<epoch, start offset>`. An entry ends where the next one starts; the last one ends
at the log's end. Two replicas compare their histories to find where their logs diverge. The class does no I/O; its file
is replaced atomically through the `Disk` interface.

Invariants: epochs grow strictly, start offsets grow strictly. (An epoch in which nothing was written is replaced by
the next one at the same start: if it were kept, an old master with unreplicated records could match the wrong entry.)

File `epochs`, all numbers big-endian. Version 1, of a log that was never a replica among several:

| offset | bytes | field | meaning |
|---|---|---|---|
| 0 | 4 | magic | `TLEH` |
| 4 | 2 | version | uint16, 1 |
| 6 | 2 | reserved | 0 |
| 8 | 8 | durable offset | int64, every WAL byte before it was durable when the file was written |
| 16 | 4 | n | uint32, entries |
| 20 | 12 · n | entries | epoch int32, start offset int64 |
| 20 + 12 · n | 4 | crc32c | uint32, over all bytes before it |

Version 2, written as soon as one of its fields is not the default, has the `ReplicaMarks` between `n` and the entries,
which then begin at 48:

| offset | bytes | field | default |
|---|---|---|---|
| 20 | 4 | promised epoch | int32, -1 |
| 24 | 8 | own from | int64, 0 |
| 32 | 8 | cut at | int64, -1 |
| 40 | 8 | confirm offset | int64, 0; at most the durable offset |

Entry: `EpochHistory`, `ReplicaMarks`, `encode_epoch_file`, `decode_epoch_file`, `decode_marks`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from crc32c import crc32c

from tidelog.runtime.errors import CorruptData, Fenced
from tidelog.runtime.types import Buffer

EPOCH_FILE = "epochs"
"""Name of the file in the WAL's directory."""
NOTHING_OWN = (1 << 63) - 1
"""`ReplicaMarks.own_from` of a log that receives: no record proves anything by its header."""
_MAGIC = 0x544C4548
_VERSION = 1
_REPLICA_VERSION = 2
_HEAD = struct.Struct(">IHHqI")
_MARKS = struct.Struct(">iqqq")
_ENTRY = struct.Struct(">iq")
_CRC = struct.Struct(">I")


class EpochEntry(NamedTuple):
    """One epoch of the WAL."""

    epoch: int
    """int32, ≥ 0."""
    start_offset: int
    """int64: the WAL offset of its first byte."""


class EpochFile(NamedTuple):
    """The contents of the epoch file."""

    history: EpochHistory
    durable_offset: int
    """Every WAL byte before it was durable when the file was written (int64)."""


class ReplicaMarks(NamedTuple):
    """What the epoch file says of a log that is one of several replicas; the defaults hold for every other log.

    docs/design/0015-hot-tier.md, sections 2, 6 and 7.
    """

    promised_epoch: int = -1
    """The replica takes nothing from a master of an older epoch (int32); -1: nothing was promised."""
    own_from: int = 0
    """WAL offset (int64) from which on this disk wrote the records as master; `NOTHING_OWN`: it receives them."""
    cut_at: int = -1
    """WAL offset (int64) of a truncation that may not be complete: what follows it is not part of the log; -1: none."""
    confirm_offset: int = 0
    """What was both confirmed and durable on this disk (int64)."""

    @property
    def is_replica(self) -> bool:
        """Return whether the log was ever one of several; the confirm offset alone does not say so."""
        return self._replace(confirm_offset=0) != NO_MARKS


NO_MARKS = ReplicaMarks()
"""The marks of a log that was never a replica among several."""


class EpochHistory:
    """The epochs of one WAL replica, oldest first."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._entries: list[EpochEntry] = []
        for epoch, start_offset in entries:
            self.append(epoch, start_offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochHistory) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EpochHistory({[tuple(entry) for entry in self._entries]})"

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        """Return all entries, oldest first."""
        return tuple(self._entries)

    @property
    def last_epoch(self) -> int:
        """Return the newest epoch; -1 if there is none."""
        return self._entries[-1].epoch if self._entries else -1

    def copy(self) -> EpochHistory:
        """Return an independent copy."""
        other = EpochHistory()
        other._entries = self._entries.copy()
        return other

    def append(self, epoch: int, start_offset: int) -> None:
        """Add `epoch` (int32, larger than any before) at `start_offset`, the current end of the log.

        An entry at the same start, in which therefore nothing was written, is replaced. Raises `Fenced` for an
        epoch that is not newer.
        """
        assert 0 <= epoch < 1 << 31 and start_offset >= 0
        if epoch <= self.last_epoch:
            raise Fenced(f"master epoch {epoch} is not newer than {self.last_epoch}, which the WAL has seen")
        if self._entries:
            last_start = self._entries[-1].start_offset
            assert start_offset >= last_start, f"epoch {epoch} would start at {start_offset}, before {last_start}"
            if start_offset == last_start:
                self._entries.pop()
        self._entries.append(EpochEntry(epoch, start_offset))

    def epoch_at(self, offset: int) -> int:
        """Return the epoch that wrote (or writes) the byte at `offset`; -1 before the first entry."""
        index = bisect_right(self._entries, offset, key=_start) - 1
        return self._entries[index].epoch if index >= 0 else -1

    def entry_at(self, offset: int) -> EpochEntry | None:
        """Return the entry of the byte at `offset`; None before the first entry."""
        index = bisect_right(self._entries, offset, key=_start) - 1
        return self._entries[index] if index >= 0 else None

    def end_after(self, offset: int, max_offset: int) -> int:
        """Return where the epoch of the byte at `offset` ends; `max_offset`, the log's end, for the last one."""
        index = bisect_right(self._entries, offset, key=_start)
        return self._entries[index].start_offset if index < len(self._entries) else max_offset

    def truncate_to(self, offset: int) -> None:
        """Drop the epochs without a byte left after the log was truncated to `offset`."""
        while self._entries and self._entries[-1].start_offset >= offset:
            self._entries.pop()

    def forget_before(self, offset: int) -> None:
        """Drop the epochs that end at or before `offset`, the new start of the log, but never the last."""
        keep_from = max(0, bisect_right(self._entries, offset, key=_start) - 1)
        del self._entries[:keep_from]

    def common_point(self, max_offset: int, other: EpochHistory, other_max_offset: int) -> int | None:
        """Return where this log (ending at `max_offset`) must be cut to be a prefix of `other`'s; None: no match.

        Searches its own epochs from the newest; the first with equal epoch and equal start gives the cut: the smaller
        of the two ends.
        """
        others = {entry.epoch: index for index, entry in enumerate(other._entries)}
        for index in range(len(self._entries) - 1, -1, -1):
            entry = self._entries[index]
            match = others.get(entry.epoch)
            if match is not None and other._entries[match].start_offset == entry.start_offset:
                return min(self._end(index, max_offset), other._end(match, other_max_offset))
        return None

    def _end(self, index: int, max_offset: int) -> int:
        return self._entries[index + 1].start_offset if index + 1 < len(self._entries) else max_offset


def _start(entry: EpochEntry) -> int:
    return entry.start_offset


def encode_epoch_file(history: EpochHistory, durable_offset: int, marks: ReplicaMarks = NO_MARKS) -> bytes:
    """Return the bytes of the epoch file: version 1 while all marks have their defaults."""
    assert durable_offset >= 0
    entries = history.entries
    if marks == NO_MARKS:
        parts = [_HEAD.pack(_MAGIC, _VERSION, 0, durable_offset, len(entries))]
    else:
        assert 0 <= marks.confirm_offset <= durable_offset, (marks, durable_offset)
        parts = [_HEAD.pack(_MAGIC, _REPLICA_VERSION, 0, durable_offset, len(entries)), _MARKS.pack(*marks)]
    parts.extend(_ENTRY.pack(*entry) for entry in entries)
    body = b"".join(parts)
    return body + _CRC.pack(crc32c(body))


def decode_epoch_file(data: Buffer) -> EpochFile:
    """Decode and check history and durable offset of the epoch file, of either version. Raises `CorruptData`."""
    durable_offset, _, entries = _checked(data)
    history = EpochHistory()
    last = -1
    for epoch, start_offset in _ENTRY.iter_unpack(entries):
        if epoch <= history.last_epoch or start_offset <= last:
            raise CorruptData(f"the epoch file's entry <{epoch}, {start_offset}> is out of order")
        history.append(epoch, start_offset)
        last = start_offset
    return EpochFile(history, durable_offset)


def decode_marks(data: Buffer) -> ReplicaMarks:
    """Decode and check the marks in the epoch file; a file of version 1 has the defaults. Raises `CorruptData`."""
    durable_offset, marks, _ = _checked(data)
    if marks.promised_epoch < -1 or marks.own_from < 0 or marks.cut_at < -1:
        raise CorruptData(f"the epoch file's {marks} has a value out of range")
    if not 0 <= marks.confirm_offset <= durable_offset:
        raise CorruptData(
            f"the epoch file's confirm offset {marks.confirm_offset} is past {durable_offset}, its durable"
        )
    return marks


def _checked(data: Buffer) -> tuple[int, ReplicaMarks, memoryview]:
    """Return durable offset, marks and the bytes of the entries, checked. Raises `CorruptData`."""
    size = len(data) - _CRC.size
    if size < _HEAD.size or _CRC.unpack_from(data, size)[0] != crc32c(memoryview(data)[:size]):
        raise CorruptData("the epoch file fails its CRC32C check")
    magic, version, _, durable_offset, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version not in (_VERSION, _REPLICA_VERSION):
        raise CorruptData(
            f"the epoch file has magic {magic:#x}, version {version}; this Tidelog reads versions {_VERSION} and"
            f" {_REPLICA_VERSION}"
        )
    begin = _HEAD.size + (_MARKS.size if version == _REPLICA_VERSION else 0)
    if size != begin + count * _ENTRY.size:
        raise CorruptData(f"the epoch file says {count} entries but has {size} bytes")
    marks = ReplicaMarks._make(_MARKS.unpack_from(data, _HEAD.size)) if version == _REPLICA_VERSION else NO_MARKS
    return durable_offset, marks, memoryview(data)[begin:size]
