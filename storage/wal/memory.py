"""`MemoryWal`: a WAL in memory, for tests and for replica sets that rely on replication alone.

An append is durable after one iteration of the event loop, in the sense of this backend: as durable as the memory
of this process, which does not fail. It keeps references to the records until they are trimmed, so that they can be
sent to followers; their bytes are made when they are sent. A restart recovers nothing, neither records nor promises;
`reset` puts the empty log at the committed WAL offset.

Entry: `MemoryWal`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable

import msgspec

from tidelog.runtime.errors import CorruptData, Fenced, InvalidInput, NotFound
from tidelog.runtime.types import Buffer
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import RawRecords, Submitted, WalFull, WalRecord, WalRecordType
from tidelog.storage.wal.epochs import EpochHistory
from tidelog.storage.wal.format import EPOCH_START, HEADER_BYTES, encode_header
from tidelog.storage.wal.received import check_place, first_payload_bytes, parse_received
from tidelog.storage.wal.state import ReplicaState

_DATA = int(WalRecordType.DATA)
_EPOCH_START = int(WalRecordType.EPOCH_START)


class _Kept(msgspec.Struct, frozen=True, gc=False):
    """One record, as it was appended or as it was received."""

    offset: int
    end_offset: int
    epoch: int
    type: int
    record: StreamAppend
    raw: memoryview | None = None

    def encoded(self) -> memoryview:
        """Return the bytes of the record, the same each time: their confirm offset is 0, which proves nothing."""
        if self.raw is not None:
            return self.raw
        length = self.end_offset - self.offset - HEADER_BYTES
        header = encode_header(self.type, length, self.offset, 0, self.epoch, self.record)
        return memoryview(b"".join([header, *self.record.payload]))


class MemoryWal(ReplicaState):
    """See `tidelog.storage.wal.base.ReplicatedWal`. Offsets advance as in `DiskWal`, headers included."""

    def __init__(self, settings: WalSettings, *, start_offset: int = 0) -> None:
        super().__init__(start_offset)
        self._max_bytes = settings.max_bytes
        self._max_record_bytes = settings.max_record_bytes
        self._report_scheduled = False
        self._kept: list[_Kept] = []
        self._promised = -1

    def stats(self) -> dict[str, int]:
        """Return metrics; bytes."""
        return {"record_bytes": self._end - self._start, "unsynced_bytes": self._end - self._durable}

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """See `Wal.recover`: there is nothing to recover."""
        return self._start

    async def reset(self, offset: int, kept_as: str = "") -> None:
        """Restart the log, empty, at WAL offset `offset`, before `begin_epoch`."""
        assert self._epoch < 0
        self._start_over(offset)

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`. Raises `Fenced` for an epoch that is not newer."""
        self._check_new(epoch)
        self._history.append(epoch, self._end)
        self._epoch = epoch
        self._kept.append(_Kept(self._end, self._end + HEADER_BYTES, epoch, _EPOCH_START, EPOCH_START))
        self._advance(HEADER_BYTES)
        self._report()

    def append(self, record: StreamAppend) -> int:
        """See `Wal.append`."""
        self._check_usable()
        if self._epoch < 0 <= self._promised:
            raise Fenced("this replica of the WAL is not the master's")
        assert self._epoch >= 0, "begin_epoch must precede append"
        length = sum(map(len, record.payload))
        if length > self._max_record_bytes:
            raise InvalidInput(f"a WAL record of {length} bytes is over the limit of {self._max_record_bytes}")
        if not self._has_space(length):
            raise _full()
        offset = self._end
        self._kept.append(_Kept(offset, offset + HEADER_BYTES + length, self._epoch, _DATA, record))
        self._advance(HEADER_BYTES + length)
        return self._end

    async def writable(self, payload_bytes: int = 0) -> None:
        """Wait until an append of `payload_bytes` would not raise `WalFull`. Raises `Closed`."""
        self._check_usable()
        while not self._has_space(payload_bytes):
            await self._changed()
            self._check_usable()

    def note_confirmed(self, confirm_offset: int) -> None:
        """See `Wal.note_confirmed`. It is kept here only: the headers of this backend have none."""
        self._confirm = max(self._confirm, confirm_offset)

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`."""
        assert offset <= self._durable
        if offset > self._start:
            self._start = offset
            del self._kept[: bisect_left(self._kept, offset, key=_offset)]
            self._history.forget_before(offset)
            self._wake()

    async def close(self) -> None:
        """See `Wal.close`."""
        self._report()
        self._closed = True
        self._wake()

    # A replica among several

    @property
    def promised_epoch(self) -> int:
        """See `ReplicatedWal.promised_epoch`."""
        return max(self._promised, self._history.last_epoch)

    async def promise(self, epoch: int) -> None:
        """See `ReplicatedWal.promise`; it lasts as long as the records do."""
        self._check_promise(epoch)
        self._promised = epoch
        if 0 <= self._epoch < epoch:
            self._epoch = -1
        self._report()

    async def receivable(self, records: Buffer) -> None:
        """See `ReplicatedWal.receivable`."""
        await self.writable(first_payload_bytes(records))

    async def receive(
        self, offset: int, epoch: int, epoch_start: int, records: Buffer, *, master_epoch: int
    ) -> list[WalRecord]:
        """See `ReplicatedWal.receive`."""
        if epoch > master_epoch:
            raise InvalidInput(f"a master of epoch {master_epoch} has sent records of epoch {epoch}")
        self._check_asker(master_epoch)
        begins = check_place(
            offset, epoch, epoch_start, history=self._history, start_offset=self._start, end_offset=self._end
        )
        found = parse_received(records, offset, epoch)
        if not found:
            return []
        if max(len(record.payload) for record in found) > self._max_record_bytes:
            raise InvalidInput(f"a received WAL record is over the limit of {self._max_record_bytes} bytes")
        if not self._has_space(len(found[0].payload)):
            raise _full()
        self._promised = master_epoch
        if begins:
            self._history.append(epoch, epoch_start)
        view = memoryview(records)
        accepted = [one for one in found if one.end_offset - self._start <= self._max_bytes]
        for one in accepted:
            append = StreamAppend(one.stream_id, one.stream_epoch, one.base_offset, one.count, (one.payload,))
            raw = view[one.offset - offset : one.end_offset - offset]
            self._kept.append(_Kept(one.offset, one.end_offset, epoch, int(one.type), append, raw))
        self._advance(accepted[-1].end_offset - offset)
        return accepted

    async def truncate(self, offset: int, *, master_epoch: int) -> None:
        """See `ReplicatedWal.truncate`."""
        self._check_asker(master_epoch)
        if not self._start <= offset <= self._end:
            raise InvalidInput(f"the WAL, {self._start} to {self._end}, cannot be cut at {offset}")
        if offset < min(self._confirm, self._end):
            raise CorruptData(f"the WAL would be cut at {offset}, below its confirm offset {self._confirm}")
        index = bisect_left(self._kept, offset, key=_offset)
        if offset != self._end and self._kept[index].offset != offset:
            raise CorruptData(f"the WAL cannot be cut at {offset}: it is inside a record")
        self._promised = master_epoch
        del self._kept[index:]
        self._history.truncate_to(offset)
        self._end = self._durable = offset
        self._wake()

    async def restart_at(self, offset: int, *, master_epoch: int, kept_as: str = "") -> None:
        """See `ReplicatedWal.restart_at`; there are no files to keep."""
        self._check_asker(master_epoch)
        self._promised = master_epoch
        self._history = EpochHistory()
        self._confirm = offset
        self._start_over(offset)
        self._wake()

    async def read_raw(self, start_offset: int, max_bytes: int) -> RawRecords | None:
        """See `ReplicatedWal.read_raw`."""
        self._check_usable()
        if start_offset < self._start or start_offset > self._end:
            raise NotFound(f"WAL offset {start_offset} was trimmed or cut; the WAL is {self._start} to {self._end}")
        entry = self._history.entry_at(start_offset)
        stop = min(self._durable, start_offset + max(1, max_bytes), self._history.end_after(start_offset, self._end))
        begin = bisect_left(self._kept, start_offset, key=_offset)
        kept = self._kept[begin : bisect_left(self._kept, stop, key=_offset)]
        if not kept:
            return None
        if entry is None or kept[0].offset != start_offset:
            raise CorruptData(f"no record begins at WAL offset {start_offset}")
        buffers = [one.encoded() for one in kept]
        return RawRecords(start_offset, kept[-1].end_offset, entry.epoch, entry.start_offset, buffers)

    async def read_records(self, start_offset: int, max_bytes: int) -> list[WalRecord]:
        """See `ReplicatedWal.read_records`."""
        raw = await self.read_raw(start_offset, max_bytes)
        return [] if raw is None else parse_received(b"".join(raw.buffers), raw.offset, raw.epoch)

    def _start_over(self, offset: int) -> None:
        self._kept.clear()
        self._start = self._end = self._durable = offset

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
            if self._on_submitted is not None and self._epoch >= 0:
                new = self._kept[bisect_left(self._kept, self._durable, key=_offset) :]
                buffers: list[Buffer] = []
                for one in new:
                    raw = one.encoded()
                    buffers += [raw[:HEADER_BYTES], raw[HEADER_BYTES:]]
                self._on_submitted(Submitted(self._durable, self._end, buffers))
            self._durable = self._end
            self._on_durable(self._durable)


def _offset(kept: _Kept) -> int:
    return kept.offset


def _full() -> WalFull:
    return WalFull("the WAL is at its bound (wal.max_bytes)", hint="retry; uploads to the bucket make room")
