"""What must hold between a WAL and the committed offset when a storage begins."""

from __future__ import annotations

import pytest

from tidelog.runtime.errors import CorruptData
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.memory import MemoryWal
from tidelog.storage.wal_start import meet


async def empty_wal(at: int) -> MemoryWal:
    wal = MemoryWal(WalSettings())
    await wal.recover(lambda _record: None)
    await wal.reset(at)
    return wal


async def test_a_wal_that_ends_before_what_is_committed_begins_anew_there() -> None:
    wal = await empty_wal(100)
    await meet(wal, 1, 500, is_handed=False)
    assert (wal.start_offset, wal.end_offset) == (500, 500)


async def test_the_wal_of_a_replica_that_leads_never_ends_before_what_is_committed() -> None:
    wal = await empty_wal(100)
    with pytest.raises(CorruptData, match="replica set 1 ends at 100, and 500 is committed"):
        await meet(wal, 1, 500, is_handed=True)
    assert wal.end_offset == 100
    await meet(wal, 1, 100, is_handed=True)


@pytest.mark.parametrize("is_handed", [False, True])
async def test_a_wal_that_begins_after_what_is_committed_has_lost_bytes(is_handed: bool) -> None:
    wal = await empty_wal(100)
    with pytest.raises(CorruptData, match="starts at 100, but only 99 is committed"):
        await meet(wal, 1, 99, is_handed=is_handed)
