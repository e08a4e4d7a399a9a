"""The Raft journal of one member: an append-only file of checksummed frames, one for each fdatasync.

Format (little-endian; docs/formats/controller.md has the table): a file header, then frames. A frame holds everything
that was buffered when `sync` was called: header with its own CRC32C, sequence number and body length; body of records;
body CRC32C and an end marker. A frame is synced before the next one is written, so only the last frame can be torn by a
crash: a bad frame followed by a complete frame is corruption, never cut (`CorruptData`). The file only grows into new
space, so a torn write shows as a missing end or as sectors of zeros; a *complete* last frame that fails its checksum is
corruption too. So is a file without a complete first frame, an empty one included: that frame was durable before the
file had its name.

Invariants: nothing for which `sync` returned is lost by a kill or power loss; a failed fdatasync is never repeated
(`StorageFailed`: the kernel may have dropped the pages); a failed write (disk full) is undone and may be retried
(`JournalStalled`). Compaction writes a new file, syncs it, renames it and syncs the directory: after a crash either the
old or the new file is in place.

A journal is used by one thread. Entry: `Journal.open`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from crc32c import crc32c

from tidelog.controller.raft.files import SYSTEM_FILES, RaftFile, RaftFiles
from tidelog.runtime.errors import DamagedFile, StorageFailed, Unavailable

Entry = tuple[bytes, int, int]
"""`(command, index, term)`, in pysyncobj's order."""

FILE_MAGIC: Final = b"TLRAFTJ\x01"
FILE_VERSION: Final = 1
FRAME_MAGIC: Final = 0x464A4C54
END_MARKER: Final = 0xE5A1F5E9
"""Has no zero byte, so the last sector of a complete frame is never all zeros."""
SECTOR_BYTES: Final = 512
RESTORE: Final = "restore the controller's directory from another member or a backup; nothing was changed"

_FILE_HEADER = struct.Struct("<8sII")
_FRAME_PREFIX = struct.Struct("<IQI")
_U32 = struct.Struct("<I")
_TRAILER = struct.Struct("<II")
_RECORD = struct.Struct("<BI")
_ENTRY = struct.Struct("<QQ")
_INDEX = struct.Struct("<Q")
_META = struct.Struct("<QQ")
_HEADER_BYTES: Final = _FRAME_PREFIX.size + _U32.size

_ENTRY_RECORD, _TRUNCATE_RECORD, _META_RECORD, _CLEAR_RECORD = 1, 2, 3, 4


class JournalStalled(Unavailable):
    """A write failed and was undone (disk full). Nothing is lost; retry later."""


class Journal:
    """The journal. `entries`, `term`, `voted_for` and `commit_index` are the values in memory, synced or not."""

    def __init__(self, path: Path, files: RaftFiles = SYSTEM_FILES) -> None:
        self.path = path
        self._files = files
        self.entries: list[Entry] = []
        self.term = 0
        self.voted_for: str | None = None
        self.commit_index = 1
        """The largest index known to be committed; a hint, written with other records only."""
        self.syncs = 0
        self._buffer: list[bytes] = []
        self._sequence = 0
        self._end = 0
        self._file: RaftFile | None = None
        self._failed = False
        self._commit_dirty = False

    @classmethod
    def open(cls, path: Path, files: RaftFiles = SYSTEM_FILES) -> Journal:
        """Open or create the journal at `path`; cuts a torn tail. Raises `CorruptData`, `StorageFailed`."""
        journal = cls(path, files)
        try:
            files.make_directory(path.parent)
            files.remove(path.with_name(path.name + ".tmp"))
            if not files.exists(path):
                journal._rewrite()
                return journal
            data = files.read(path)
            good = journal._load(data)
            journal._file = file = files.open(path)
            file.cut(good)
            if good < len(data):
                file.sync()
            journal._end = good
        except OSError as error:
            raise StorageFailed(f"cannot open the journal {path}: {error}") from error
        return journal

    @classmethod
    def examine(cls, path: Path) -> tuple[Journal, int]:
        """Read a journal without changing it; it cannot be written then. Returns it and the bytes of a torn tail.

        Raises `CorruptData`, and `OSError` (`FileNotFoundError` if there is none).
        """
        journal = cls(path)
        data = path.read_bytes()
        journal._end = good = journal._load(data)
        return journal, len(data) - good

    def _corrupt(self, offset: int, what: str) -> DamagedFile:
        return DamagedFile(str(self.path), offset, what, hint=RESTORE)

    def _load(self, data: bytes) -> int:
        """Replay the frames. Returns the end of the last complete one."""
        if len(data) < _FILE_HEADER.size:
            raise self._corrupt(0, "the file header is incomplete")
        magic, version, crc = _FILE_HEADER.unpack_from(data)
        if magic != FILE_MAGIC or crc != crc32c(data[: _FILE_HEADER.size - 4]):
            raise self._corrupt(0, "this is not a Raft journal, or its header is damaged")
        if version != FILE_VERSION:
            raise self._corrupt(8, f"format version {version} is not known")
        position = _FILE_HEADER.size
        while position < len(data):
            end = self._load_frame(data, position)
            if end is None:
                break
            position = end
        if self._sequence == 0:
            raise self._corrupt(position, "its first frame is incomplete: this is a part of a journal")
        return position

    def _load_frame(self, data: bytes, position: int) -> int | None:
        """Replay one frame. Returns None if it is torn (and the last)."""
        body = position + _HEADER_BYTES
        if body > len(data):
            return None
        magic, sequence, length = _FRAME_PREFIX.unpack_from(data, position)
        prefix_crc = crc32c(data[position : position + _FRAME_PREFIX.size])
        if magic != FRAME_MAGIC or _U32.unpack_from(data, body - 4)[0] != prefix_crc:
            if self._has_unwritten_sector(data, position, body) and not self._is_followed(data, position):
                return None
            raise self._corrupt(position, "a frame header fails its checksum")
        end = body + int(length) + _TRAILER.size
        if end > len(data):
            return None
        crc, marker = _TRAILER.unpack_from(data, body + length)
        if crc != crc32c(data[body : body + length]) or marker != END_MARKER:
            if end == len(data) and self._has_unwritten_sector(data, position, end):
                return None
            raise self._corrupt(position, "a frame fails its checksum")
        if sequence != self._sequence + 1:
            raise self._corrupt(position, f"frame {sequence} follows frame {self._sequence}")
        self._sequence = sequence
        self._replay(data[body : body + length], body)
        return end

    def _has_unwritten_sector(self, data: bytes, start: int, end: int) -> bool:
        """Whether a disk sector that `[start, end)` touches was never written, which indicates a torn write."""
        at = start
        while at < end:
            stop = (at // SECTOR_BYTES + 1) * SECTOR_BYTES
            if not data[at:stop].strip(b"\x00"):
                return True
            at = stop
        return False

    def _is_followed(self, data: bytes, position: int) -> bool:
        """Whether a complete later frame follows the bad one at `position`, which had then been durable."""
        magic = _U32.pack(FRAME_MAGIC)
        at = data.find(magic, position + 1)
        while 0 <= at <= len(data) - _HEADER_BYTES:
            _, sequence, length = _FRAME_PREFIX.unpack_from(data, at)
            body = at + _HEADER_BYTES
            end = body + int(length)
            if (
                sequence > self._sequence + 1
                and _U32.unpack_from(data, body - 4)[0] == crc32c(data[at : at + _FRAME_PREFIX.size])
                and end + _TRAILER.size <= len(data)
                and _TRAILER.unpack_from(data, end) == (crc32c(data[body:end]), END_MARKER)
            ):
                return True
            at = data.find(magic, at + 1)
        return False

    def _replay(self, body: bytes, offset: int) -> None:
        at = 0
        while at < len(body):
            kind, length = _RECORD.unpack_from(body, at)
            data = body[at + _RECORD.size : at + _RECORD.size + length]
            if kind == _ENTRY_RECORD:
                index, term = _ENTRY.unpack_from(data)
                if self.entries and index != self.entries[-1][1] + 1:
                    raise self._corrupt(offset + at, f"entry {index} follows entry {self.entries[-1][1]}")
                self.entries.append((data[_ENTRY.size :], index, term))
            elif kind == _TRUNCATE_RECORD:
                (index,) = _INDEX.unpack(data)
                while self.entries and self.entries[-1][1] >= index:
                    self.entries.pop()
            elif kind == _META_RECORD:
                self.term, self.commit_index = _META.unpack_from(data)
                self.voted_for = data[_META.size :].decode() or None
            elif kind == _CLEAR_RECORD:
                self.entries.clear()
            else:
                raise self._corrupt(offset + at, f"record kind {kind} is not known")
            at += _RECORD.size + length

    @property
    def size_bytes(self) -> int:
        """Return the number of durable bytes of the file."""
        return self._end

    @property
    def last_index(self) -> int:
        """Return the index of the last entry; 0 for an empty journal."""
        return self.entries[-1][1] if self.entries else 0

    def _put(self, kind: int, data: bytes) -> None:
        self._buffer.append(_RECORD.pack(kind, len(data)) + data)

    def append(self, command: bytes, index: int, term: int) -> None:
        """Add an entry; durable after the next `sync`."""
        assert not self.entries or index == self.entries[-1][1] + 1, (index, self.last_index)
        self.entries.append((command, index, term))
        self._put(_ENTRY_RECORD, _ENTRY.pack(index, term) + command)

    def clear(self) -> None:
        """Drop all entries."""
        self.entries = []
        self._put(_CLEAR_RECORD, b"")

    def truncate_from(self, position: int) -> None:
        """Drop the entries from list position `position` on (after a conflict on a follower)."""
        if position < len(self.entries):
            self._put(_TRUNCATE_RECORD, _INDEX.pack(self.entries[position][1]))
            del self.entries[position:]

    def set_term(self, term: int, voted_for: str | None) -> None:
        """Record term and vote; durable after the next `sync` (Raft: before any message that reflects them)."""
        self.term, self.voted_for = term, voted_for
        self._put_meta()

    def note_commit(self, index: int) -> None:
        """Store the commit index; written together with the next records."""
        if index > self.commit_index:
            self.commit_index = index
            self._commit_dirty = True

    def _put_meta(self) -> None:
        self._put(_META_RECORD, _META.pack(self.term, self.commit_index) + (self.voted_for or "").encode())
        self._commit_dirty = False

    def sync(self) -> None:
        """Make all records durable with one write and one fdatasync. Raises `JournalStalled`, `StorageFailed`."""
        if not self._buffer:
            return
        if self._failed:
            raise StorageFailed(f"the journal {self.path} has failed before")
        if self._commit_dirty:
            self._put_meta()
        assert self._file is not None, "the journal is closed"
        frame = self._frame(b"".join(self._buffer), self._sequence + 1)
        try:
            self._file.write(frame)
        except OSError as error:
            self._undo_write(self._file, error)
        try:
            self._file.sync()
        except OSError as error:
            self._failed = True
            raise StorageFailed(f"fdatasync of the journal {self.path} failed: {error}") from error
        self._sequence += 1
        self._end += len(frame)
        self._buffer.clear()
        self.syncs += 1

    def _undo_write(self, file: RaftFile, error: OSError) -> None:
        try:
            file.cut(self._end)
        except OSError as second:
            self._failed = True
            raise StorageFailed(f"cannot undo a failed write to {self.path}: {second}") from error
        raise JournalStalled(f"cannot write the journal {self.path}: {error}") from error

    def _frame(self, body: bytes, sequence: int) -> bytes:
        prefix = _FRAME_PREFIX.pack(FRAME_MAGIC, sequence, len(body))
        return b"".join((prefix, _U32.pack(crc32c(prefix)), body, _TRAILER.pack(crc32c(body), END_MARKER)))

    def drop_to(self, position: int) -> None:
        """Drop the entries before list position `position`, which a durable snapshot covers; rewrites the file.

        Raises `JournalStalled` if the new file could not be written: the old one stays, and nothing is lost.
        """
        self.sync()
        self.entries = self.entries[position:]
        self._rewrite()

    def reset(self, entries: list[Entry]) -> None:
        """Replace all entries, which a durable snapshot covers; rewrites the file. Raises `JournalStalled`."""
        self.entries = list(entries)
        self._buffer.clear()
        self._rewrite()

    def _content(self) -> bytes:
        """Return a complete file with the content in memory."""
        assert not self._buffer
        self._put_meta()
        for command, index, term in self.entries:
            self._put(_ENTRY_RECORD, _ENTRY.pack(index, term) + command)
        header = _FILE_HEADER.pack(FILE_MAGIC, FILE_VERSION, 0)[:-4]
        content = header + _U32.pack(crc32c(header)) + self._frame(b"".join(self._buffer), 1)
        self._buffer.clear()
        return content

    def _rewrite(self) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        content = self._content()
        file: RaftFile | None = None
        try:
            self._files.sync_directory(self.path.parent)  # the snapshot that replaces what is dropped
            file = self._files.create(temporary)
            file.write(content)
            file.sync()
            self._files.rename(temporary, self.path)
        except OSError as error:
            if file is not None:
                file.close()
            raise JournalStalled(f"cannot rewrite the journal {self.path}: {error}") from error
        old, self._file = self._file, file
        if old is not None:
            old.close()
        self._sequence = 1
        self._end = len(content)
        try:
            self._files.sync_directory(self.path.parent)
        except OSError as error:
            self._failed = True
            raise StorageFailed(f"cannot sync {self.path.parent}: {error}") from error

    def close(self) -> None:
        """Sync and release the file."""
        if self._file is None:
            return
        try:
            if not self._failed:
                self.sync()
        finally:
            self._file.close()
            self._file = None
