"""`DiskLog`: files on a local disk as one log: appending, recovery, epochs, trimming. `DiskWal` is built on it.

All of it runs on the event loop's thread; the `Disk` interface does the blocking calls. An append packs a header, adds
it and the caller's buffers to a list, and returns. Once per iteration of the loop the list is passed to the disk as one
write; the disk merges everything that arrives while its last fdatasync ran (group commit) and completes the writes in
order. A fast, idle disk writes at the end of that iteration, on the loop's thread (`tidelog.runtime.disk`).

Invariants:
1. start ≤ synced ≤ durable ≤ submitted ≤ end, all WAL offsets. With `flush = "sync"` durable is synced. With `async`
   durable is what the operating system has accepted: a power loss (not a crash of the process) may lose the last
   `flush_interval_ms` of it.
2. A file gets its segment name only after everything before its start is synced (the disk's ordered lane), so a later
   file proves the earlier ones complete.
3. A header never carries more than min(confirmed, synced) as confirm offset, so recovery can rely on it as proof.
4. Appends go only into bytes allocated before: a full disk affects the spare pool only, and becomes back-pressure.
5. After the first failed write or sync nothing is acknowledged any more.
6. Of received bytes at most a group is written and not synced, or one larger record alone, so that at recovery a whole
   record proves what lies more than a group before it. Before the first one everything older is synced.
7. What a promise, a truncation or a new epoch says is in the epoch file before anything follows from it.

Entry: `DiskLog`, which `tidelog.storage.wal.disk.wal` completes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tidelog.runtime.disk import Disk, DiskFile
from tidelog.runtime.errors import CorruptData, Fenced, InvalidInput, NotFound
from tidelog.runtime.task_errors import expected
from tidelog.runtime.types import Buffer
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import Submitted, WalFailed, WalFull, WalRecord, WalRecordType
from tidelog.storage.wal.disk.receiving import ReceivedPiece
from tidelog.storage.wal.disk.recovery import cut_files, recover
from tidelog.storage.wal.disk.scan import RECEIVE_GROUP_BYTES, OnHeader, ScanState, scan
from tidelog.storage.wal.disk.segments import AT_BOUND, SegmentPool, WalSegment, is_passing, segment_name
from tidelog.storage.wal.disk.watch import FileWatch
from tidelog.storage.wal.epochs import (
    EPOCH_FILE,
    NO_MARKS,
    NOTHING_OWN,
    EpochHistory,
    ReplicaMarks,
    encode_epoch_file,
)
from tidelog.storage.wal.format import EPOCH_START, HEADER_BYTES, WalHeader, encode_header, record_of
from tidelog.storage.wal.state import ReplicaState

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 128 << 20
"""Bound on the bytes waiting for the disk (rule 12): a larger one only delays every acknowledgement."""
_DATA = int(WalRecordType.DATA)
_EPOCH_START = int(WalRecordType.EPOCH_START)


class DiskLog(ReplicaState):
    """See `tidelog.storage.wal.base.Wal`. The disk is the caller's: close it after the WAL."""

    def __init__(
        self,
        disk: Disk,
        settings: WalSettings,
        *,
        rng: random.Random,
        group_bytes: int = RECEIVE_GROUP_BYTES,
    ) -> None:
        """`group_bytes`: the bound of invariant 6; the same in all lives of a log."""
        super().__init__()
        self._disk = disk
        self._settings = settings
        self._sync_writes = settings.flush == "sync"
        self._max_record_bytes = settings.max_record_bytes
        self._pool = SegmentPool(
            disk,
            segment_bytes=settings.segment_bytes,
            max_bytes=settings.max_bytes,
            rng=rng,
            on_change=self._wake,
            on_failed=self._fail,
        )
        self._watch = FileWatch(lambda: [segment.file for segment in self._segments], self._pool.drop_missing)
        self._trim_lock = asyncio.Lock()
        self._segments: list[WalSegment] = []
        self._file: DiskFile | None = None
        self._file_start = 0
        self._limit = 0  # WAL offset after the current file's last byte
        self._submitted = self._synced = 0
        self._header_confirm = 0
        self._pending: list[Buffer] = []
        self._flush_scheduled = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._epochs_lock = asyncio.Lock()
        self._note: asyncio.Task[None] | None = None
        self._noted_start = 0
        """Start of the newest file that the epoch file proves to have records."""
        self._recovered = self._switching = False
        self._marks = NO_MARKS
        self._turn = asyncio.Lock()
        """Held by whatever changes the epochs, the marks, or the role."""
        self._group_bytes = group_bytes
        self._received: deque[ReceivedPiece] = deque()
        self._sync_wanted = -1
        """Received bytes wait for a sync up to here that was submitted already (`flush = "async"`)."""
        self._epochs_unsure = False
        """Whether the epoch file may be newer than what is known: replacing it has failed."""
        self._appends = self._writes = 0

    # State

    def stats(self) -> dict[str, int]:
        """Return metrics; bytes and counts."""
        return {
            "appends": self._appends,
            "writes": self._writes,
            "segments": len(self._segments),
            "spares": self._pool.spares,
            "disk_bytes": self._pool.live_bytes + self._pool.spare_bytes,
            "unsynced_bytes": self._end - self._synced,
            "record_bytes": self._end - self._start,
        }

    @property
    def missing_files(self) -> tuple[str, ...]:
        """See `Wal.missing_files`, and `tidelog.storage.wal.disk.watch`."""
        return self._watch.missing

    def note_confirmed(self, confirm_offset: int) -> None:
        """See `Wal.note_confirmed`."""
        if confirm_offset > self._confirm:
            self._confirm = confirm_offset
            self._header_confirm = min(confirm_offset, self._synced)

    # Recovery and start

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """See `Wal.recover` and `tidelog.storage.wal.disk.recovery`."""
        assert not self._recovered, "recover is called only once"
        try:
            found = await recover(self._disk, on_record, group_bytes=self._group_bytes)
            self._segments = found.segments
            self._pool.live_bytes = sum(segment.file.size for segment in found.segments)
            for name in found.spare_names:
                await self._pool.adopt(name)
        except OSError as error:
            raise WalFailed(
                f"the WAL cannot be recovered: {error}", hint="check the disk and its permissions"
            ) from error
        self._history, self._marks = found.history, found.marks
        self._start = found.start_offset
        self._end = self._submitted = self._durable = self._synced = found.end_offset
        self._confirm = self._header_confirm = found.confirm_offset
        if found.segments:
            self._use(found.segments[-1])
        self._recovered = True
        self._pool.start()
        self._watch.start()
        return found.confirm_offset

    @property
    def synced_offset(self) -> int:
        """See `Wal.synced_offset`."""
        return self._synced

    async def reset(self, offset: int, kept_as: str = "") -> None:
        """Restart the log, empty, at WAL offset `offset`, between `recover` and `begin_epoch`.

        For a log whose records are all in the bucket and that ends before the committed WAL offset: the disk was
        replaced, or a power loss followed `flush = "async"` (docs/protocols.md, Epoch history); and for another log
        than the one that is expected, whose files are kept under the suffix `kept_as`. Raises `WalFailed`.
        """
        assert self._recovered and self._epoch < 0 and offset >= 0
        self._check_usable()
        await self._start_over(offset, self._marks, kept_as)

    async def _start_over(self, offset: int, marks: ReplicaMarks, kept_as: str = "") -> None:
        if self._note is not None:
            await asyncio.wait([self._note])
        self._check_failure()
        before = self._history
        if marks.is_replica:
            promised = max(marks.promised_epoch, before.last_epoch)
            after = marks._replace(promised_epoch=promised, cut_at=-1)
        else:
            after = marks
        if kept_as and self._segments:
            kept = self._epoch_file(before, self._synced, marks)
            await self._with_room(self._disk.replace(EPOCH_FILE + kept_as, kept))
        # The epoch file first: its proof must not contradict the files left by a crash in this method.
        await self._save_epochs(EpochHistory(), 0, after)
        try:
            while self._segments:  # the newest first: the rest is a valid log at any moment
                segment = self._segments[-1]
                if kept_as:
                    await segment.file.rename(segment.file.name + kept_as)
                await segment.file.close()
                if not kept_as:
                    await self._disk.remove(segment.file.name)
                self._segments.pop()
                self._pool.live_bytes -= segment.file.size
            if marks.is_replica:  # its end is told, and counted, before it has a file
                await self._store_epochs(EpochHistory(), offset, after)
        except OSError as error:
            raise self._fail(error) from error
        self._file = None
        self._start = self._limit = self._confirm = offset
        self._put_end(offset)

    def _put_end(self, offset: int) -> None:
        """Let the log end at `offset`, durably, while nothing is being written."""
        assert not self._pending and not self._received
        self._end = self._submitted = self._durable = self._synced = offset
        self._header_confirm = min(self._confirm, offset)
        self._noted_start = 0
        self._sync_wanted = -1

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`. Appends meanwhile raise `WalFull`.

        Raises `Fenced` for an epoch that is not newer, `WalFull` if the disk has no room (call again), `WalFailed`.
        """
        assert self._recovered and not self._switching
        self._check_new(epoch)
        await unbroken(self._begin_in_turn(epoch))

    async def _begin_in_turn(self, epoch: int) -> None:
        async with self._turn:
            self._check_new(epoch)
            await self._finish_cut()
            await self._begin_epoch(epoch)

    async def _begin_epoch(self, epoch: int) -> None:
        self._switching = True
        try:
            await self._all_synced()  # the epoch's start offset proves the bytes before it durable
            while not self._has_space(HEADER_BYTES):
                if self._pool.blocked == AT_BOUND:
                    await self._make_small_file()
                elif self._pool.blocked:
                    raise self._full()
                else:
                    await self._changed()
                    self._check_usable()
            if self._end + HEADER_BYTES > self._limit:
                self._roll(HEADER_BYTES)
            history = self._history.copy()
            history.append(epoch, self._end)
            marks = self._marks._replace(own_from=min(self._marks.own_from, self._end))
            await self._save_epochs(history, self._synced, marks)
            self._epoch = epoch
            self._enqueue(_EPOCH_START, EPOCH_START, 0)
        finally:
            self._switching = False
            self._wake()
        await self._all_synced()

    async def _make_small_file(self) -> None:
        try:
            await self._pool.prepare_beyond_bound(HEADER_BYTES)
        except OSError as error:
            if is_passing(error):
                raise self._full() from error
            raise self._fail(error) from error

    # Appending

    def append(self, record: StreamAppend) -> int:
        """See `Wal.append`."""
        length = 0
        for buffer in record.payload:
            length += len(buffer)
        if (
            self._failure is not None
            or self._epoch < 0
            or self._switching
            or self._closed
            or length > self._max_record_bytes
            or self._end - self._durable > MAX_WAITING_BYTES
        ):
            self._refuse(length)
        self._appends += 1
        return self._enqueue(_DATA, record, length)

    async def writable(self, payload_bytes: int = 0) -> None:
        """Wait until an append of `payload_bytes` would not raise `WalFull`. Raises `WalFailed`, `Closed`."""
        while True:
            self._check_usable()
            if (
                not self._switching
                and self._end - self._durable <= MAX_WAITING_BYTES
                and self._has_space(HEADER_BYTES + payload_bytes)
            ):
                return
            await self._changed()

    def _refuse(self, length: int) -> None:
        """Raise the error that prevents an append."""
        self._check_usable()
        if self._epoch < 0 and self._marks.is_replica and not self._switching:
            raise Fenced("this replica of the WAL is not the master's")
        assert self._epoch >= 0 or self._switching, "begin_epoch must precede append"
        if length > self._max_record_bytes:
            raise InvalidInput(
                f"a WAL record of {length} bytes is over the limit of {self._max_record_bytes}",
                hint="send smaller batches or raise wal.max_record_bytes",
            )
        if self._switching:
            raise WalFull("the WAL enters a new master epoch", hint="retry")
        raise WalFull(f"{self._end - self._durable} bytes wait for the disk", hint="retry; the disk is slow")

    def _enqueue(self, type: int, record: StreamAppend, length: int) -> int:
        offset = self._end
        end = offset + HEADER_BYTES + length
        if end > self._limit:
            self._roll(HEADER_BYTES + length)
        header = encode_header(type, length, offset, self._header_confirm, self._epoch, record)
        pending = self._pending
        pending.append(header)
        pending.extend(record.payload)
        self._end = end
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        return end

    def _has_space(self, size: int) -> bool:
        return self._end + size <= self._limit or self._pool.holds(size)

    def _full(self) -> WalFull:
        reason = self._pool.blocked or "the next WAL file is being prepared"
        hint = "retry; uploads to the bucket make room"
        if self._pool.blocked not in ("", AT_BOUND):
            hint += "; or free disk space"
        return WalFull(reason, hint=hint)

    def _roll(self, size: int) -> None:
        """Switch to a spare file. Raises `WalFull` before anything is changed."""
        file = self._pool.take(size)
        if file is None:
            raise self._full()
        self._submit()
        if self._file is not None and not self._sync_writes:
            self._file.sync(partial(self._on_synced, self._end))
        file.publish(segment_name(self._end), self._on_published)
        segment = WalSegment(self._end, file)
        self._segments.append(segment)
        self._use(segment)

    def _use(self, segment: WalSegment) -> None:
        self._file = segment.file
        self._file_start = segment.start
        self._limit = segment.limit

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._submit(may_block=True)  # called by the event loop, so a synchronous callback reenters no caller
        if self._received:
            self._submit_received(may_block=True)

    def _submit(self, *, may_block: bool = False) -> None:
        """Pass pending records to the disk as one write; `may_block` only for calls directly from the event loop."""
        if not self._pending or self._failure is not None:
            return
        assert self._file is not None
        buffers, self._pending = self._pending, []
        if self._on_submitted is not None:
            self._on_submitted(Submitted(self._submitted, self._end, buffers))
        at = self._submitted - self._file_start
        self._submitted = self._end
        self._writes += 1
        done = partial(self._on_written, self._end)
        self._file.write(at, buffers, sync=self._sync_writes, done=done, may_block=may_block)
        if not self._sync_writes and self._sync_timer is None:
            delay_s = self._settings.flush_interval_ms / 1000
            self._sync_timer = asyncio.get_running_loop().call_later(delay_s, self._sync_now)

    def _sync_now(self) -> None:
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        file = self._received[0].lane_file if self._received else self._file
        if file is not None and self._failure is None:
            file.sync(partial(self._on_synced, self._submitted))

    # Disk callbacks

    def _on_written(self, end: int, error: OSError | None) -> None:
        if self._failure is not None:
            return
        if error is not None:
            self._fail(error)
            return
        assert end >= self._durable
        self._durable = end
        if self._sync_writes:
            self._synced = end
            self._header_confirm = min(self._confirm, end)
            self._note_file()
        if self._received:
            self._submit_received()
        if self._waiters:
            self._wake()
        self._on_durable(end)

    def _on_synced(self, end: int, error: OSError | None) -> None:
        if self._failure is not None:
            return
        if error is not None:
            self._fail(error)
            return
        self._synced = max(self._synced, end)
        self._header_confirm = min(self._confirm, self._synced)
        self._note_file()
        if self._received:
            self._submit_received()
        if self._waiters:
            self._wake()

    def _on_published(self, error: OSError | None) -> None:
        if error is not None:
            self._fail(error)

    def _fail(self, error: OSError) -> WalFailed:
        message = f"the WAL's disk failed: {error}"
        hint = "check the disk (dmesg) and restart the broker: acknowledged records are recovered"
        return self._end_with(WalFailed(message, hint=hint), error)

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._received.clear()

    async def _all_synced(self) -> None:
        """Sync everything appended so far. Raises `WalFailed`."""
        target = self._end
        self._submit()
        self._submit_received()
        while self._synced < target:
            self._check_failure()
            if not self._sync_writes and not self._received:
                self._sync_submitted()
            await self._changed()

    def _newest_is_unnoted(self) -> bool:
        writes = self._epoch >= 0 or self._marks.own_from == NOTHING_OWN
        return self._synced > self._file_start > self._noted_start and writes and self._failure is None

    def _note_file(self) -> None:
        """Have the epoch file prove that the newest file has records, once for each: its loss is noticed then."""
        if self._note is None and self._newest_is_unnoted():
            self._note = asyncio.get_running_loop().create_task(self._note_synced(), name="wal.note")

    async def _note_synced(self) -> None:
        try:
            while self._newest_is_unnoted():  # again for a file that began during the note before
                await self._note_once()
        finally:
            self._note = None

    async def _note_once(self) -> None:
        start = self._noted_start
        try:
            async with self._epochs_lock:
                if self._synced > self._file_start:  # else the log has rolled meanwhile
                    start = self._file_start
                data = self._epoch_file(self._history, self._synced, self._marks)
                await self._disk.replace(EPOCH_FILE, data)
        except OSError as error:
            if not is_passing(error):
                self._fail(error)
                return
            logger.warning("the WAL's epoch file could not be written", extra={"error": str(error)})
        except Exception as error:  # noqa: BLE001
            expected("storage.wal", error)  # noted
        self._noted_start = start  # after an error, again with the next file

    def _epoch_file(self, history: EpochHistory, durable_offset: int, marks: ReplicaMarks) -> bytes:
        """Return the epoch file; of a replica it has the confirm offset, as far as it is durable here."""
        confirm_offset = min(self._confirm, durable_offset) if marks.is_replica else 0
        return encode_epoch_file(history, durable_offset, marks._replace(confirm_offset=confirm_offset))

    async def _store_epochs(self, history: EpochHistory, durable_offset: int, marks: ReplicaMarks) -> None:
        async with self._epochs_lock:
            self._epochs_unsure = True
            await self._disk.replace(EPOCH_FILE, self._epoch_file(history, durable_offset, marks))
            self._epochs_unsure = False
            self._history, self._marks = history, marks

    async def _save_epochs(self, history: EpochHistory, durable_offset: int, marks: ReplicaMarks) -> None:
        """Replace the epoch file. Raises `WalFull` while there is no room for it, `WalFailed`."""
        await self._with_room(self._store_epochs(history, durable_offset, marks))

    async def _with_room(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what writes an epoch file. Raises `WalFull` while there is no room for it, `WalFailed`."""
        try:
            await work
        except OSError as error:
            if is_passing(error):
                message = f"the epoch file cannot be written: {error.strerror}"
                raise WalFull(message, hint="free disk space, then retry") from error
            raise self._fail(error) from error

    # Of a replica

    def _submit_received(self, *, may_block: bool = False) -> None:
        """Pass received pieces to the disk, as many as invariant 6 allows."""
        queue = self._received
        while queue and self._failure is None:
            piece = queue[0]
            if piece.end - self._synced > self._group_bytes and self._synced < self._submitted and not piece.publish:
                break
            queue.popleft()
            if piece.publish:
                if piece.previous is not None and not self._sync_writes:
                    piece.previous.sync(partial(self._on_synced, self._submitted))
                piece.file.publish(piece.publish, self._on_published)
                continue
            self._submitted = piece.end
            self._writes += 1
            done = partial(self._on_written, piece.end)
            piece.file.write(
                piece.at, [piece.view], sync=self._sync_writes, done=done, may_block=may_block and not queue
            )
            if not self._sync_writes and self._sync_timer is None:
                delay_s = self._settings.flush_interval_ms / 1000
                self._sync_timer = asyncio.get_running_loop().call_later(delay_s, self._sync_now)
        if queue and not self._sync_writes:
            self._sync_submitted()

    def _sync_submitted(self) -> None:
        """Have what was submitted synced now, once."""
        if self._sync_wanted < self._submitted and self._synced < self._submitted:
            self._sync_wanted = self._submitted
            self._sync_now()

    async def _finish_cut(self) -> None:
        """Remove what follows a truncation. Raises `WalFull` if its mark cannot be cleared yet; call again."""
        if self._marks.cut_at < 0:
            return
        try:
            await cut_files(self._segments, self._marks.cut_at, self._pool.discard)
        except OSError as error:
            raise self._fail(error) from error
        if self._segments:
            self._use(self._segments[-1])
        await self._save_epochs(self._history, self._synced, self._marks._replace(cut_at=-1))
        self._wake()

    async def _lane_done(self) -> None:
        """Wait until the disk has done everything that was submitted, also renames and repeated syncs."""
        if self._file is None:
            return
        done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        self._file.sync(lambda error: None if done.done() else done.set_result(error))
        error = await done
        if error is not None:
            raise self._fail(error)

    # Trimming, and reading back

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`. Whole files before `offset` are freed or kept for reuse. Raises `WalFailed`."""
        self._check_usable()
        assert offset <= self._durable, f"trim to {offset}, past the durable end {self._durable}"
        if offset <= self._start:
            return
        self._start = offset
        await unbroken(self._release_files())

    async def _release_files(self) -> None:
        async with self._trim_lock:
            while len(self._segments) > 1 and self._segments[1].start <= self._start:
                if self._closed:
                    return
                self._check_usable()
                try:
                    await self._pool.release(self._segments[0].file)
                except OSError as error:
                    raise self._fail(error) from error
                self._segments.pop(0)
                self._history.forget_before(self._segments[0].start)  # not before: recovery checks file and records

    async def read_records(self, start_offset: int, max_bytes: int) -> list[WalRecord]:
        """See `ReplicatedWal.read_records`; they are of one file."""
        records: list[WalRecord] = []

        def on_header(header: WalHeader, window: memoryview, position: int) -> None:
            records.append(record_of(header, window, position))

        await self._read(start_offset, start_offset + max(1, max_bytes), on_header)
        return records

    async def _read(self, start_offset: int, stop: int, on_header: OnHeader) -> None:
        """Check the durable records of one file that begin before `stop`. Raises as `read_records`."""
        self._check_usable()
        index = bisect_right(self._segments, start_offset, key=start_of) - 1
        if start_offset < self._start or (index < 0 and start_offset < self._end):
            raise self._trimmed(start_offset)
        if index + 1 < len(self._segments):
            stop = min(stop, self._segments[index + 1].start)
        stop = min(stop, self._durable)
        if start_offset >= stop:
            return
        segment = self._segments[index]
        try:
            end = await scan(segment, start_offset, stop, ScanState(), on_header)
        except OSError as error:
            if start_offset < self._start or segment not in self._segments:
                raise self._trimmed(start_offset) from error
            raise self._fail(error) from error
        if end.reason:
            if start_offset < self._start or segment not in self._segments or stop > self._durable:
                raise self._trimmed(start_offset)
            raise CorruptData(f"WAL offset {end.offset}: {end.reason}", hint="examine it with `tidelog wal verify`")

    def _trimmed(self, offset: int) -> NotFound:
        return NotFound(f"WAL offset {offset} was trimmed or cut; the WAL is {self._start} to {self._end}")

    async def close(self) -> None:
        """See `Wal.close`. After a failure it only releases the files. Raises `WalFailed` if closing fails."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        async with self._turn:  # what is under way ends first
            pass
        if self._note is not None:
            await asyncio.wait([self._note])
        try:
            if self._recovered and self._failure is None:
                await self._all_synced()
                if self._segments:
                    await self._store_epochs(self._history, self._synced, self._marks)
        except OSError as error:
            if not is_passing(error):
                raise self._fail(error) from error
            # Only the note of a clean close is missing; every record is durable.
            logger.warning("the WAL's epoch file could not be written at close", extra={"error": str(error)})
        except Exception as error:
            if expected("storage.wal", error) is error:
                raise
        finally:
            if self._sync_timer is not None:
                self._sync_timer.cancel()
            self._wake()
            await self._watch.close()
            async with self._trim_lock:  # wait for a file that is being released
                await self._pool.close()
                for segment in self._segments:
                    await segment.file.close()


def start_of(segment: WalSegment) -> int:
    """Return the segment's start, as a key to search by."""
    return segment.start


async def unbroken(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to completion even if the caller is cancelled, since a partial execution would be harmful."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # mark as retrieved: the caller was cancelled
        raise
