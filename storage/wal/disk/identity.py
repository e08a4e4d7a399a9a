"""The id of a WAL: a random number that is made with it, and kept in its directory.

A member of a replica set is a broker *and* its WAL (docs/design/0015-hot-tier.md, section 1): a broker whose disk was
replaced has another id, and nothing that was counted. File `id`: `{"format": 1, "id": …, "crc32c": …}`, JSON, the
checksum over the other keys (docs/formats.md). A WAL that was written before WALs had ids gets one when it is first
opened by a replica.

Invariant: the file is durable before the id is told to anybody.

Entry: `read_wal_id`, `renew_wal_id`.
"""

from __future__ import annotations

import random

import msgspec
from crc32c import crc32c

from tidelog.runtime.disk import Disk
from tidelog.runtime.errors import DamagedFile
from tidelog.runtime.msgpack import DECODE_ERRORS

ID_FILE = "id"
ID_BITS = 128
FORMAT = 1


class _IdFile(msgspec.Struct, frozen=True):
    format: int
    id: str
    crc32c: int


def _checksum(wal_id: str) -> int:
    return crc32c(f"{FORMAT}:{wal_id}".encode())


async def read_wal_id(disk: Disk, rng: random.Random) -> str:
    """Return the id of the WAL on a disk; makes one if it has none. Raises `DamagedFile`, `OSError`."""
    found = await stored_wal_id(disk)
    return await renew_wal_id(disk, rng) if found is None else found


async def stored_wal_id(disk: Disk) -> str | None:
    """Return the id of the WAL on a disk, if it has one. Raises `DamagedFile`, `OSError`."""
    data = await disk.load(ID_FILE)
    if data is None:
        return None
    try:
        found = msgspec.json.decode(data, type=_IdFile)
    except DECODE_ERRORS as error:
        raise _damaged(str(error)) from error
    if found.format != FORMAT or found.crc32c != _checksum(found.id):
        raise _damaged(f"format {found.format}, or its checksum, is wrong")
    return found.id


async def renew_wal_id(disk: Disk, rng: random.Random) -> str:
    """Give the WAL on a disk another id, which nobody knows, and return it. Raises `OSError`."""
    wal_id = f"{rng.getrandbits(ID_BITS):032x}"
    await disk.replace(ID_FILE, msgspec.json.encode(_IdFile(FORMAT, wal_id, _checksum(wal_id))))
    return wal_id


def _damaged(why: str) -> DamagedFile:
    return DamagedFile(
        f"{ID_FILE} in the WAL's directory",
        0,
        why,
        hint="restore it, or delete it: the WAL then joins its replica set as one that nobody knows",
    )
