"""`DiskWal`: the WAL of one replica set in files on a local disk, alone or as one of several replicas.

`tidelog.storage.wal.disk.log` writes, recovers and trims. This module adds what a replica does besides: it promises, it
receives what a master sends, it truncates what a master does not have, and it reads what it sends itself.

Whatever changes epochs, marks or the role runs in turn, one after the other. A change is in the epoch file before
anything follows from it (docs/design/0015-hot-tier.md, sections 2, 6 and 7).

Entry: `DiskWal`.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right

from tidelog.runtime.disk import Disk
from tidelog.runtime.errors import ConfigError, CorruptData, InvalidInput
from tidelog.runtime.types import Buffer
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import RawRecords, WalFull, WalRecord
from tidelog.storage.wal.disk.log import MAX_WAITING_BYTES, DiskLog, start_of, unbroken
from tidelog.storage.wal.disk.receiving import RawRuns, ReceivedPiece, divide
from tidelog.storage.wal.disk.scan import RECEIVE_GROUP_BYTES, ScanState, scan
from tidelog.storage.wal.disk.segments import WalSegment, segment_name
from tidelog.storage.wal.epochs import NOTHING_OWN, EpochHistory, ReplicaMarks
from tidelog.storage.wal.format import HEADER_BYTES, MAX_PAYLOAD_BYTES
from tidelog.storage.wal.received import check_place, first_payload_bytes, parse_received


def check_settings(settings: WalSettings) -> None:
    """Check that the sizes are consistent. Raises `ConfigError`."""
    if settings.segment_bytes < 4096:
        raise ConfigError(f"wal.segment_bytes is {settings.segment_bytes}: at least 4,096 bytes")
    if not 0 < settings.max_record_bytes <= MAX_PAYLOAD_BYTES:
        raise ConfigError(f"wal.max_record_bytes is {settings.max_record_bytes}: 1 to {MAX_PAYLOAD_BYTES:,}")
    largest = max(settings.max_record_bytes + HEADER_BYTES, settings.segment_bytes)
    if settings.max_bytes < 2 * largest:  # the current file cannot be trimmed, and may hold one such record
        raise ConfigError(
            f"wal.max_bytes is {settings.max_bytes}: two files of the largest record or segment must fit, {2 * largest}"
            " bytes"
        )
    if not 1 <= settings.flush_interval_ms <= 60_000:
        raise ConfigError(f"wal.flush_interval_ms is {settings.flush_interval_ms}: 1 to 60,000")


class DiskWal(DiskLog):
    """See `tidelog.storage.wal.base.ReplicatedWal`. The disk is the caller's: close it after the WAL."""

    def __init__(
        self, disk: Disk, settings: WalSettings, *, rng: random.Random, group_bytes: int = RECEIVE_GROUP_BYTES
    ) -> None:
        """`group_bytes`: how much of what is received is written and not synced; the same in all lives of a log."""
        check_settings(settings)
        super().__init__(disk, settings, rng=rng, group_bytes=group_bytes)

    @property
    def promised_epoch(self) -> int:
        """See `ReplicatedWal.promised_epoch`."""
        return max(self._marks.promised_epoch, self._history.last_epoch)

    async def promise(self, epoch: int) -> None:
        """See `ReplicatedWal.promise`."""
        assert self._recovered and 0 <= epoch < 1 << 31
        self._check_usable()
        await unbroken(self._promise(epoch))

    async def _promise(self, epoch: int) -> None:
        async with self._turn:
            self._check_promise(epoch)
            if epoch > self._marks.promised_epoch:
                await self._save_epochs(self._history, self._synced, self._marks._replace(promised_epoch=epoch))
            if 0 <= self._epoch < epoch:
                self._epoch = -1
            await self._all_synced()  # so that the end, which is told with the promise, is durable

    async def receivable(self, records: Buffer) -> None:
        """See `ReplicatedWal.receivable`."""
        await self.writable(first_payload_bytes(records))

    async def receive(
        self, offset: int, epoch: int, epoch_start: int, records: Buffer, *, master_epoch: int
    ) -> list[WalRecord]:
        """See `ReplicatedWal.receive`."""
        assert self._recovered and 0 <= master_epoch < 1 << 31
        if epoch > master_epoch:
            raise InvalidInput(f"a master of epoch {master_epoch} has sent records of epoch {epoch}")
        async with self._turn:
            self._check_asker(master_epoch)
            begins = check_place(
                offset, epoch, epoch_start, history=self._history, start_offset=self._start, end_offset=self._end
            )
            found = parse_received(records, offset, epoch)
            if not found:
                return []
            self._check_room(found)
            marks = self._marks._replace(promised_epoch=master_epoch, own_from=NOTHING_OWN, cut_at=-1)
            if begins or marks != self._marks or self._epochs_unsure:
                history = self._history.copy()
                if begins:
                    history.append(epoch, epoch_start)
                await unbroken(self._prepare_receiving(history, marks))
                self._check_usable()
            accepted = self._queue_received(memoryview(records), found)
            if not accepted:
                raise self._full()
            return accepted

    def _check_room(self, records: list[WalRecord]) -> None:
        largest = max(len(record.payload) for record in records)
        if largest > self._max_record_bytes:
            raise InvalidInput(
                f"a received WAL record of {largest} bytes is over the limit of {self._max_record_bytes}",
                hint="wal.max_record_bytes must be the same on all members of a replica set",
            )
        if self._end - self._durable > MAX_WAITING_BYTES:
            raise WalFull(f"{self._end - self._durable} bytes wait for the disk", hint="retry; the disk is slow")
        if not self._has_space(records[0].end_offset - records[0].offset):
            raise self._full()

    async def _prepare_receiving(self, history: EpochHistory, marks: ReplicaMarks) -> None:
        await self._finish_cut()
        await self._all_synced()  # the epoch's start proves the bytes before it durable; and invariant 6
        await self._save_epochs(history, self._synced, marks)

    def _queue_received(self, view: memoryview, records: list[WalRecord]) -> list[WalRecord]:
        """Queue as many records as there is room for, and return them."""
        begin = offset = self._end
        accepted = 0
        for record in records:
            size = record.end_offset - record.offset
            if record.end_offset > self._limit:
                self._queue_run(view[begin - offset : record.offset - offset], begin)
                begin = record.offset
                if not self._roll_received(size):
                    break
            self._end = record.end_offset
            accepted += 1
        self._queue_run(view[begin - offset : self._end - offset], begin)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        return records[:accepted]

    def _queue_run(self, run: memoryview, offset: int) -> None:
        """Queue whole records for the current file, in pieces of at most a group."""
        if run:
            assert self._file is not None
            self._received.extend(divide(run, offset, self._file, offset - self._file_start, self._group_bytes))

    def _roll_received(self, size: int) -> bool:
        """Switch to a spare file after what is queued; return False if there is none."""
        file = self._pool.take(size)
        if file is None:
            return False
        self._received.append(ReceivedPiece(self._end, file, publish=segment_name(self._end), previous=self._file))
        segment = WalSegment(self._end, file)
        self._segments.append(segment)
        self._use(segment)
        return True

    async def truncate(self, offset: int, *, master_epoch: int) -> None:
        """See `ReplicatedWal.truncate`."""
        assert self._recovered and 0 <= master_epoch < 1 << 31
        await unbroken(self._truncate(offset, master_epoch))

    async def _truncate(self, offset: int, master_epoch: int) -> None:
        async with self._turn, self._trim_lock:
            self._check_asker(master_epoch)
            await self._all_synced()
            await self._check_boundary(offset)
            await self._lane_done()
            self._check_confirmed(offset)
            history = self._history.copy()
            history.truncate_to(offset)
            marks = self._marks._replace(promised_epoch=master_epoch)
            if offset < self._end:
                marks = marks._replace(cut_at=offset)
            if history != self._history or marks != self._marks or self._epochs_unsure:
                await self._save_epochs(history, offset, marks)
                self._put_end(offset)
            await self._finish_cut()

    def _check_confirmed(self, offset: int) -> None:
        if offset < min(self._confirm, self._end):
            raise CorruptData(
                f"the WAL would be cut at {offset}, below {self._confirm}, up to which it is confirmed",
                hint="this replica and its master do not hold the same log: keep both directories, and examine them",
            )

    async def _check_boundary(self, offset: int) -> None:
        if not self._start <= offset <= self._end:
            raise InvalidInput(f"the WAL, {self._start} to {self._end}, cannot be cut at {offset}")
        if offset == self._end:
            return
        segment = self._segments[bisect_right(self._segments, offset, key=start_of) - 1]
        try:
            end = await scan(segment, segment.start, offset, ScanState(), lambda *_: None)
        except OSError as error:
            raise self._fail(error) from error
        if end.offset != offset:
            reason = end.reason or "it is inside a record"
            raise CorruptData(f"the WAL cannot be cut at {offset}: {reason}", hint="see `tidelog wal verify`")

    async def restart_at(self, offset: int, *, master_epoch: int, kept_as: str = "") -> None:
        """See `ReplicatedWal.restart_at`."""
        assert self._recovered and 0 <= master_epoch < 1 << 31 and offset >= 0
        await unbroken(self._restart(offset, master_epoch, kept_as))

    async def _restart(self, offset: int, master_epoch: int, kept_as: str) -> None:
        async with self._turn, self._trim_lock:
            self._check_asker(master_epoch)
            await self._all_synced()
            await self._lane_done()
            try:
                if offset < self._start:  # records in spares could come to lie in their old places
                    await self._pool.discard_spares()
            except OSError as error:
                raise self._fail(error) from error
            await self._start_over(offset, self._marks._replace(promised_epoch=master_epoch), kept_as)
            self._wake()

    async def read_raw(self, start_offset: int, max_bytes: int) -> RawRecords | None:
        """See `ReplicatedWal.read_raw`."""
        entry = self._history.entry_at(start_offset)
        stop = min(start_offset + max(1, max_bytes), self._history.end_after(start_offset, self._end))
        runs = RawRuns()
        await self._read(start_offset, stop, runs.on_header)
        if not runs.buffers:
            return None
        if entry is None or runs.epochs != {entry.epoch}:
            if entry != self._history.entry_at(start_offset):
                raise self._trimmed(start_offset)
            raise CorruptData(
                f"the WAL's records at {start_offset} are of epochs {runs.epochs}, its history says {entry}"
            )
        return RawRecords(start_offset, runs.end_offset, entry.epoch, entry.start_offset, runs.buffers)
