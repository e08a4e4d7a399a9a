"""Another id for the WAL of a broker that is stopped, by the command line.

A WAL that is an older copy is refused as long as it goes by the id under which more of it is known. Where the WALs of
all members of a replica set are such copies, one of them may go on under another id: its broker promises with it as
with the WAL of another replica, and an operator elects it and accepts the loss (docs/hot-tier.md, "A WAL that is
refused"). The records stay as they are.

Entry: `renew_id`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

from tidelog.process.data_dir import lock_file
from tidelog.process.replica_disks import OWN, PREFIX
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import NotFound, StorageFailed
from tidelog.storage.wal.disk.identity import read_wal_id, renew_wal_id


class RenewedId(NamedTuple):
    """The directory of a WAL, and its id before and now."""

    path: Path
    before: str
    now: str


async def renew_id(data_dir: Path, replica_set: int, own_id: int) -> RenewedId:
    """Give the WAL of a replica set in a data directory another id, durably. `own_id`: the broker's.

    Raises `NotFound`, `WrongDataDirectory` while a process uses the directory, `DamagedFile` or `ForeignWal` for the
    present id, and `StorageFailed`.
    """
    path = data_dir / (OWN if replica_set == own_id else f"{PREFIX}{replica_set}")
    if not path.is_dir():
        raise NotFound(
            f"{data_dir} has no WAL of replica set {replica_set}",
            hint="`tidelog wal inspect --data-dir DIR` shows those that are there; name a broker's own directory, as"
            " DIR/node-1 of `tidelog up --brokers N`",
        )
    lock_fd = lock_file(data_dir, "lock")
    try:
        disk, rng = FileDisk(path), random.SystemRandom()
        try:
            before = await read_wal_id(disk, rng, replica_set)
            return RenewedId(path, before, await renew_wal_id(disk, rng, replica_set))
        finally:
            await disk.close()
    except OSError as error:
        raise StorageFailed(
            f"cannot write the id of {path}: {error}", hint="check its permissions, and space"
        ) from error
    finally:
        os.close(lock_fd)
