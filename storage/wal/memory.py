"""`MemoryWal`: a WAL that keeps offsets and no bytes, for tests and for replica sets that rely on replication alone.

An append is durable after one iteration of the event loop, in the sense of this backend: as durable as the memory
of this process, which does not fail. The records themselves live in the log cache. A restart recovers nothing; `reset`
puts the empty log at the committed WAL offset.

Entry: `MemoryWal`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidelog.runtime.errors import Fenced, InvalidInput
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import WalFull, WalRecord
from tidelog.storage.wal.format import HEADER_BYTES
from tidelog.storage.wal.state import WalState


class MemoryWal(WalState):
    """See `tidelog.storage.wal.base.Wal`. Offsets advance as in `DiskWal`, headers included."""

    def __init__(self, settings: WalSettings, *, start_offset: int = 0) -> None:
        super().__init__(start_offset)
        self._max_bytes = settings.max_bytes
        self._max_record_bytes = settings.max_record_bytes
        self._report_scheduled = False

    def stats(self) -> dict[str, int]:
        """Return metrics; bytes."""
        return {"record_bytes": self._end - self._start, "unsynced_bytes": self._end - self._durable}

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """See `Wal.recover`: there is nothing to recover."""
        return self._start

    async def reset(self, offset: int, kept_as: str = "") -> None:
        """Restart the log, empty, at WAL offset `offset`, before `begin_epoch`."""
        assert self._epoch < 0
        self._start = self._end = self._durable = offset

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`. Raises `Fenced` for an epoch that is not newer."""
        if epoch <= self._history.last_epoch:
            raise Fenced(f"master epoch {epoch} is not newer than {self._history.last_epoch}, which the WAL has seen")
        self._history.append(epoch, self._end)
        self._epoch = epoch
        self._advance(HEADER_BYTES)
        self._report()

    def append(self, record: StreamAppend) -> int:
        """See `Wal.append`."""
        self._check_usable()
        assert self._epoch >= 0, "begin_epoch must precede append"
        length = sum(map(len, record.payload))
        if length > self._max_record_bytes:
            raise InvalidInput(f"a WAL record of {length} bytes is over the limit of {self._max_record_bytes}")
        if not self._has_space(length):
            raise WalFull("the WAL is at its bound (wal.max_bytes)", hint="retry; uploads to the bucket make room")
        self._advance(HEADER_BYTES + length)
        return self._end

    async def writable(self, payload_bytes: int = 0) -> None:
        """Wait until an append of `payload_bytes` would not raise `WalFull`. Raises `Closed`."""
        self._check_usable()
        while not self._has_space(payload_bytes):
            await self._changed()
            self._check_usable()

    def note_confirmed(self, confirm_offset: int) -> None:
        """See `Wal.note_confirmed`: this backend has no headers."""

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`."""
        assert offset <= self._durable
        if offset > self._start:
            self._start = offset
            self._history.forget_before(offset)
            self._wake()

    async def close(self) -> None:
        """See `Wal.close`."""
        self._report()
        self._closed = True
        self._wake()

    def _has_space(self, length: int) -> bool:
        return self._end - self._start + HEADER_BYTES + length <= self._max_bytes

    def _advance(self, size: int) -> None:
        self._end += size
        if not self._report_scheduled:
            self._report_scheduled = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._report_scheduled = False
        if self._durable < self._end:
            self._durable = self._end
            self._on_durable(self._durable)
