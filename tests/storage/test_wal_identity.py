"""The id of a WAL is made once, kept in its directory, and another one only when somebody says so."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from tests.storage.faulty_disk import FaultyDisk, Inode
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import DamagedFile
from tidelog.storage.wal.disk.identity import ID_FILE, ForeignWal, read_wal_id, renew_wal_id, stored_wal_id


async def test_an_id_is_made_once_and_renewed_on_request(tmp_path: Path) -> None:
    disk, rng = FileDisk(tmp_path), random.Random(1)
    assert await stored_wal_id(disk) is None
    first = await read_wal_id(disk, rng, 3)
    assert len(first) == 32 and await read_wal_id(disk, rng, 3) == first == await stored_wal_id(disk)
    second = await renew_wal_id(disk, rng, 3)
    assert second != first and await read_wal_id(disk, rng, 3) == second
    await disk.close()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 2, "id": "00", "crc32c": 0}', b'{"format": 1}'])
async def test_a_damaged_file_is_no_new_wal(tmp_path: Path, damage: bytes) -> None:
    disk = FileDisk(tmp_path)
    (tmp_path / ID_FILE).write_bytes(damage)
    with pytest.raises(DamagedFile):
        await read_wal_id(disk, random.Random(1), 3)
    assert (tmp_path / ID_FILE).read_bytes() == damage
    await disk.close()


async def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    known = await read_wal_id(disk, random.Random(1), 3)
    data = (tmp_path / ID_FILE).read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / ID_FILE).write_bytes(flipped)
        try:
            assert await read_wal_id(disk, random.Random(2), 3) == known  # a key's name, of no meaning
        except DamagedFile:
            continue
    await disk.close()


async def test_the_wal_of_another_replica_set_is_refused(tmp_path: Path) -> None:
    disk, rng = FileDisk(tmp_path), random.Random(1)
    known = await read_wal_id(disk, rng, 3)
    with pytest.raises(ForeignWal, match="the WAL of replica set 3, not of 2"):
        await read_wal_id(disk, rng, 2)
    assert await read_wal_id(disk, rng, 3) == known
    await disk.close()


async def test_a_file_of_an_older_version_keeps_its_id_and_gets_the_replica_set(tmp_path: Path) -> None:
    disk, rng = FileDisk(tmp_path), random.Random(1)
    (tmp_path / ID_FILE).write_bytes(b'{"format":1,"id":"fddd12a7cc53171c9ffe33ca989cd4a6","crc32c":1921910007}')
    assert await read_wal_id(disk, rng, 2) == "fddd12a7cc53171c9ffe33ca989cd4a6"
    with pytest.raises(ForeignWal):
        await read_wal_id(disk, rng, 3)
    await disk.close()


async def test_a_wal_of_an_older_version_is_opened_on_a_full_disk() -> None:
    """Only its opening makes room: what it has is uploaded and trimmed then."""
    known = b'{"format":1,"id":"fddd12a7cc53171c9ffe33ca989cd4a6","crc32c":1921910007}'
    disk = FaultyDisk({ID_FILE: Inode(known)})
    disk.capacity_bytes = len(known)
    assert await read_wal_id(disk, random.Random(1), 2) == "fddd12a7cc53171c9ffe33ca989cd4a6"
    assert await disk.load(ID_FILE) == known
    disk.fail_at = {"replace": (1, errno.EIO)}
    with pytest.raises(OSError, match="Input/output"):
        await read_wal_id(disk, random.Random(1), 2)
