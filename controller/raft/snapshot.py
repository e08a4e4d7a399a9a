"""The snapshot file of one Raft member: header, CRC32C, msgpack.

Format (little-endian): magic "TLSNAPS\\x01" (8), format version (uint32), body length (uint64), CRC32C of the body
(uint32), CRC32C of the header so far (uint32); body = msgpack `[last entry, entry before it, state, members,
directories]`, an entry being `[command, index, term]`, the state the machine's own versioned bytes, the members
`[[id, address], …]` of the quorum and the ids of their directories `[[id, directory], …]` (both missing in older files
and of a member that is alone).

A snapshot is written beside the old one, synced and renamed: after a crash either the old or the new file is in place.
Entry: `write_snapshot`, `read_snapshot`, `require_journal`, `check_joined`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from crc32c import crc32c

from tidelog.controller.model.levels import NewerLevel
from tidelog.controller.raft.files import SYSTEM_FILES, RaftFiles
from tidelog.controller.raft.journal import RESTORE, Entry
from tidelog.runtime.errors import CorruptData, DamagedFile, StorageFailed
from tidelog.runtime.msgpack import DECODE_ERRORS

MAGIC: Final = b"TLSNAPS\x01"
FORMAT_VERSION: Final = 1
_HEADER = struct.Struct("<8sIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size


class Snapshot(NamedTuple):
    """Content of the file. `last` is the newest entry that `state` contains."""

    last: Entry
    previous: Entry
    state: bytes
    members: tuple[tuple[int, str], ...] = ()
    directories: tuple[tuple[int, str], ...] = ()


class _Body(msgspec.Struct, array_like=True):
    last: tuple[bytes, int, int]
    previous: tuple[bytes, int, int]
    state: bytes
    members: tuple[tuple[int, str], ...] = ()
    directories: tuple[tuple[int, str], ...] = ()


_decoder = msgspec.msgpack.Decoder(_Body)


def write_snapshot(path: Path, snapshot: Snapshot, files: RaftFiles = SYSTEM_FILES) -> None:
    """Write and sync `path` (the caller renames it into place). Raises `OSError`."""
    body = msgspec.msgpack.encode(tuple(snapshot))
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, len(body), crc32c(body))
    file = files.create(path)
    try:
        file.write(header + _CRC.pack(crc32c(header)))
        file.write(body)
        file.sync()
    finally:
        file.close()


def read_snapshot(path: Path, files: RaftFiles = SYSTEM_FILES) -> Snapshot | None:
    """Read and check a snapshot; None if there is no file. Raises `CorruptData`, `NewerLevel`, `StorageFailed`."""
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed(f"cannot read the snapshot {path}: {error}") from error
    if len(data) < HEADER_BYTES:
        raise _corrupt(path, 0, "the header is incomplete")
    magic, version, length, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or _CRC.unpack_from(data, _HEADER.size)[0] != crc32c(data[: _HEADER.size]):
        raise _corrupt(path, 0, "this is not a snapshot, or its header is damaged")
    if version != FORMAT_VERSION:
        raise NewerLevel(
            f"{path}: format version {version} is not known; this process reads {FORMAT_VERSION}",
            hint="start the version that wrote it, or a newer one",
        )
    body = data[HEADER_BYTES:]
    if len(body) != length or crc32c(body) != crc:
        raise _corrupt(path, HEADER_BYTES, f"the body ({len(body)} of {length} bytes) fails its checksum")
    try:
        found = _decoder.decode(body)
        return Snapshot(found.last, found.previous, found.state, found.members, found.directories)
    except DECODE_ERRORS as error:
        raise _corrupt(path, HEADER_BYTES, f"the body does not decode: {error}") from error


def require_journal(journal: Path, snapshot: Path, files: RaftFiles = SYSTEM_FILES) -> None:
    """A journal is made before the first snapshot and never removed. Raises `CorruptData` when it is not there.

    A new journal beside a snapshot would lose acknowledged entries, and this member's term and vote.
    """
    if files.exists(snapshot) and not files.exists(journal):
        raise DamagedFile(str(journal), 0, "it is missing, and the snapshot beside it is not the whole", hint=RESTORE)


def check_joined(journal: Path, entries: Sequence[Entry], snapshot: Snapshot | None) -> None:
    """Check that the journal continues the snapshot. Raises `CorruptData` if entries between them are missing."""
    if not entries:
        return
    begins = f"{journal} begins at entry {entries[0][1]}"
    if snapshot is None and entries[0][1] != 1:
        raise CorruptData(f"{begins} and the snapshot before it is missing", hint=RESTORE)
    if snapshot is not None and entries[0][1] > snapshot.previous[1]:
        raise CorruptData(f"{begins} and the snapshot ends at {snapshot.last[1]}: entries are missing", hint=RESTORE)


def _corrupt(path: Path, offset: int, what: str) -> DamagedFile:
    return DamagedFile(str(path), offset, what, hint=RESTORE)
