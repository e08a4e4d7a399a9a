"""`EpochHistory`: which master epoch wrote which part of a WAL (docs/protocols.md, Epoch history).

The history is an ordered list of `<epoch, start offset>`. An entry ends where the next one starts; the last one ends
at the log's end. Two replicas compare their histories to find where their logs diverge. The class does no I/O; its file
is replaced atomically through the `Disk` interface.

Invariants: epochs grow strictly, start offsets grow strictly. (An epoch in which nothing was written is replaced by
the next one at the same start: if it were kept, an old master with unreplicated records could match the wrong entry.)

File `epochs`, all numbers big-endian:

| offset | bytes | field | meaning |
|---|---|---|---|
| 0 | 4 | magic | `TLEH` |
| 4 | 2 | version | uint16, 1 |
| 6 | 2 | reserved | 0 |
| 8 | 8 | durable offset | int64, every WAL byte before it was durable when the file was written |
| 16 | 4 | n | uint32, entries |
| 20 | 12 · n | entries | epoch int32, start offset int64 |
| 20 + 12 · n | 4 | crc32c | uint32, over all bytes before it |

Entry: `EpochHistory`, `encode_epoch_file`, `decode_epoch_file`.
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
_MAGIC = 0x544C4548
_VERSION = 1
_HEAD = struct.Struct(">IHHqI")
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


def encode_epoch_file(history: EpochHistory, durable_offset: int) -> bytes:
    """Return the bytes of the epoch file."""
    assert durable_offset >= 0
    entries = history.entries
    parts = [_HEAD.pack(_MAGIC, _VERSION, 0, durable_offset, len(entries))]
    parts.extend(_ENTRY.pack(*entry) for entry in entries)
    body = b"".join(parts)
    return body + _CRC.pack(crc32c(body))


def decode_epoch_file(data: Buffer) -> EpochFile:
    """Decode and check the epoch file. Raises `CorruptData`."""
    size = len(data) - _CRC.size
    if size < _HEAD.size or _CRC.unpack_from(data, size)[0] != crc32c(memoryview(data)[:size]):
        raise CorruptData("the epoch file fails its CRC32C check")
    magic, version, _, durable_offset, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptData(
            f"the epoch file has magic {magic:#x}, version {version}; this Tidelog reads version {_VERSION}"
        )
    if size != _HEAD.size + count * _ENTRY.size:
        raise CorruptData(f"the epoch file says {count} entries but has {size} bytes")
    history = EpochHistory()
    last = -1
    for epoch, start_offset in _ENTRY.iter_unpack(memoryview(data)[_HEAD.size : size]):
        if epoch <= history.last_epoch or start_offset <= last:
            raise CorruptData(f"the epoch file's entry <{epoch}, {start_offset}> is out of order")
        history.append(epoch, start_offset)
        last = start_offset
    return EpochFile(history, durable_offset)
