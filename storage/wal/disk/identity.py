"""The id of a WAL: a random number that is made with it, and kept in its directory.

A member of a replica set is a broker *and* its WAL (docs/design/0015-hot-tier.md, section 1): a broker whose disk was
replaced has another id, and nothing that was counted. File `id`: `{"format": 1, "id": …, "crc32c": …, "replica_set": …,
"replica_set_crc32c": …}`, JSON, the checksums over what precedes them (docs/formats.md). A WAL that was written before
WALs had ids, or their files a replica set, gets that when it is first opened by a replica.

Two sets have records of one size at the same WAL offsets and under the same master epochs often enough that nothing in
the segments tells one's WAL from the other's: a directory that was put in another one's place would be followed with.

Invariant: the file is durable before the id is told to anybody.

Entry: `read_wal_id`, `renew_wal_id`; `check_wal_set` for those who only look.
"""

from __future__ import annotations

import logging
import random

import msgspec
from crc32c import crc32c

from tidelog.runtime.disk import Disk
from tidelog.runtime.errors import DamagedFile, TidelogError
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.storage.wal.disk.segments import is_passing

logger = logging.getLogger(__name__)

ID_FILE = "id"
ID_BITS = 128
FORMAT = 1


class ForeignWal(TidelogError):
    """A directory has the WAL of another replica set than it is named for."""


class _IdFile(msgspec.Struct, frozen=True):
    format: int
    id: str
    crc32c: int
    replica_set: int | None = None
    """None: written before files named it."""
    replica_set_crc32c: int = 0


def _checksum(text: str) -> int:
    return crc32c(f"{FORMAT}:{text}".encode())


async def read_wal_id(disk: Disk, rng: random.Random, replica_set: int) -> str:
    """Return the id of a set's WAL on a disk; makes one if it has none.

    Raises `DamagedFile`, `ForeignWal`, `OSError`.
    """
    found = await _load(disk)
    if found is None:
        return await renew_wal_id(disk, rng, replica_set)
    if found.replica_set is None:
        await _name_set(disk, found.id, replica_set)
    _require_set(found, replica_set)
    return found.id


def _require_set(found: _IdFile, replica_set: int) -> None:
    if found.replica_set not in (None, replica_set):
        raise ForeignWal(
            f"this directory has the WAL of replica set {found.replica_set}, not of {replica_set}: it was moved or"
            " copied",
            hint="put each WAL back into the directory of its set, with the broker stopped; delete one only if it is a"
            " copy",
        )


async def check_wal_set(disk: Disk, replica_set: int) -> None:
    """Check, without changing anything, that the WAL on a disk is this set's as far as it tells.

    Raises `DamagedFile`, `ForeignWal`, `OSError`.
    """
    found = await _load(disk)
    if found is not None:
        _require_set(found, replica_set)


async def stored_wal_id(disk: Disk) -> str | None:
    """Return the id of the WAL on a disk, if it has one. Raises `DamagedFile`, `OSError`."""
    found = await _load(disk)
    return found.id if found is not None else None


async def _load(disk: Disk) -> _IdFile | None:
    data = await disk.load(ID_FILE)
    if data is None:
        return None
    try:
        found = msgspec.json.decode(data, type=_IdFile)
    except DECODE_ERRORS as error:
        raise _damaged(str(error)) from error
    is_whole = found.format == FORMAT and found.crc32c == _checksum(found.id)
    if is_whole and found.replica_set is not None:
        is_whole = found.replica_set_crc32c == _checksum(f"{found.id}:{found.replica_set}")
    if not is_whole:
        raise _damaged(f"format {found.format}, or its checksum, is wrong")
    return found


async def _name_set(disk: Disk, wal_id: str, replica_set: int) -> None:
    """Add the set to a file without it, unless the disk is full: the WAL must be opened then, to make room."""
    try:
        await _store(disk, wal_id, replica_set)
    except OSError as error:
        if not is_passing(error):
            raise
        logger.warning("a WAL's directory does not name its replica set yet", extra={"error": str(error)})


async def _store(disk: Disk, wal_id: str, replica_set: int) -> None:
    body = _IdFile(FORMAT, wal_id, _checksum(wal_id), replica_set, _checksum(f"{wal_id}:{replica_set}"))
    await disk.replace(ID_FILE, msgspec.json.encode(body))


async def renew_wal_id(disk: Disk, rng: random.Random, replica_set: int) -> str:
    """Give the WAL on a disk another id, which nobody knows, and return it. Raises `OSError`."""
    wal_id = f"{rng.getrandbits(ID_BITS):032x}"
    await _store(disk, wal_id, replica_set)
    return wal_id


def _damaged(why: str) -> DamagedFile:
    return DamagedFile(
        f"{ID_FILE} in the WAL's directory",
        0,
        why,
        hint="restore it, or delete it: the WAL then joins its replica set as one that nobody knows",
    )
