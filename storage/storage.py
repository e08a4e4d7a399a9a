"""`Storage`, the facade of this package: appends to the WAL, reads from memory or the bucket, uploads in the
background.

One `Storage` serves one replica set's master, for one term. The order of calls: `recover` (after the election, so that
the local metadata shows what earlier masters committed; not with a `HandedWal`), `start`, `open_stream` for every
stream of the replica set, `recovered_done`, then appends and reads, and `close`.

Invariants:
- a stream is appended only at its next offset, by its current epoch, and its records are contiguous from the committed
  end through the WAL; where they are not, the stream is quarantined (rule 5);
- an appended record stays in memory until an object that holds it is committed, so reads never access the WAL;
- memory is bounded: when the data that is not uploaded reaches `cache.log_bytes`, appends are refused until it shrinks.

Entry: `Storage`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Closed, CorruptData, Fenced, InvalidInput, Overloaded, StorageFailed, TidelogError
from tidelog.runtime.health import OperationHealth
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.types import Offload
from tidelog.storage.ack_gate import AckGate
from tidelog.storage.cache.footprint import footprint, own
from tidelog.storage.cache.log_cache import CacheEntry, Fate, LogCache, StreamLog, UnconfirmedRecord
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.commits import StreamRange
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.history import WalHistory
from tidelog.storage.inputs import (
    NO_LISTENERS,
    UNKNOWN_STREAMS,
    LocalStreams,
    ReplicaSetData,
    StorageEvents,
    bucket_reader,
)
from tidelog.storage.reads.damage import DamageLog
from tidelog.storage.reads.throttle import ColdThrottle
from tidelog.storage.records import CheckedBatch, StreamAppend
from tidelog.storage.records import OffsetTrimmed as OffsetTrimmed
from tidelog.storage.records import StreamEntry as StreamEntry
from tidelog.storage.records import StreamQuarantined as StreamQuarantined
from tidelog.storage.settings import StorageSettings, UploadSettings
from tidelog.storage.uploads.plan import UploadPlanner, UploadTask
from tidelog.storage.uploads.uploader import Uploader, UploadOwner
from tidelog.storage.wal.base import WalFull, WalRecord, WalRecordType
from tidelog.storage.wal_start import enter_epoch, meet

logger = logging.getLogger(__name__)

_RELEASE_CHUNK = 4096
"""Records released per event loop iteration after a commit (about 1 ms)."""
_RELEASE_CHECK_S = 0.5
GATHER_BYTES = 16 << 20
"""That one `Storage.gather` brings, at most: a part of the block cache, and a fraction of a second of a bucket."""
_HOLE_RETRIES = 6
"""A read that finds no object retries for about 3 s: the delta with a trim may not have arrived yet."""


class StreamWhereabouts(NamedTuple):
    """Where the records of one stream are now. Offsets are the stream's, those of the WAL its bytes."""

    start_offset: int
    committed_end: int
    """Everything before it is in the bucket."""
    cache_start: int
    """Everything from it on is in memory; the end if nothing is."""
    cached_records: int
    end_offset: int
    is_quarantined: bool
    wal_start: int
    """In whole files or objects."""
    wal_committed: int
    wal_confirmed: int
    wal_durable: int
    wal_end: int
    master_epoch: int


class Storage:
    """The bytes of one replica set. All methods are called on the event loop's thread."""

    def __init__(
        self,
        data: ReplicaSetData,
        settings: StorageSettings,
        clock: Clock,
        rng: random.Random,
        *,
        streams: LocalStreams = UNKNOWN_STREAMS,
        events: StorageEvents = NO_LISTENERS,
        offload: Offload = asyncio.to_thread,
        throttle: ColdThrottle | None = None,
    ) -> None:
        """Connect the components; nothing runs before `start`.

        `offload` runs CPU-heavy work in a worker thread. `throttle` delays reads of old data while the broker is busy,
        if the storage makes its own reader; without it they are never delayed.
        """
        self._wal = data.wal
        self._objects = data.objects
        self._clock = clock
        self._rng = rng
        self.replica_set_id = data.replica_set_id
        self.master_epoch = -1
        """That of the WAL; -1 before `start`."""
        self._handed = handed = data.handed
        self._confirms = data.single_member and handed is None
        self._streams = streams
        self._events = events
        self.confirm = handed.confirm if handed is not None else ConfirmOffset()
        """WAL offset up to which the quorum rule is met. The broker uses `PartitionLog.when_acked`."""
        self.durable = handed.durable if handed is not None and handed.durable is not None else self.confirm
        """WAL offset up to which this broker's WAL alone is durable: the same with one replica. Nothing is visible or
        uploaded because of it; see `PartitionLog.when_durable`."""
        self.check_writable = data.check_writable
        """Raises if fewer replicas than this are in sync (`HandedWal.check`)."""
        self.gate = handed.gate if handed is not None else AckGate()
        """Holds confirmation back while the controllers take the WAL for wholly committed."""
        if handed is None:
            self.gate.on_opened = lambda: self._on_durable(self._wal.durable_offset)
        self.data_end = 0
        """WAL offset (int64 bytes) after the last record of a stream; what follows are marks of epochs."""
        self._recovered_end = 0
        self._proven = 0
        """Confirm offset that the recovered WAL proves; `start` takes it over, unless another WAL is begun before."""
        self._logs: dict[int, StreamLog] = {}
        self._cache = handed.cache if handed is not None else LogCache(settings.cache.log_bytes)
        self._cache.on_empty = self._on_empty
        self._recovered = handed.records if handed is not None else RecoveredRecords(self._cache)
        self.history = WalHistory(clock)
        """When what of the WAL became durable, confirmed and uploaded in this term."""
        self._planner = UploadPlanner(settings.upload, 0)
        self._uploader = self._make_uploader(data, settings.upload, offload)
        self._reader = data.reader or bucket_reader(
            data.cluster_id, data.store, data.objects, settings.cache, clock, throttle=throttle, offload=offload
        )
        self._owns_reader = data.reader is None
        self._failure: Exception | None = None
        self._started = False
        self._closed = False
        self._refused_bytes = 0
        self._refused_cost = 0
        self._writers = 0
        self._room: dict[asyncio.Future[None], None] = {}
        self._waits_for_streams = False
        self._tasks = TaskSet("storage", self._on_defect)

    def _make_uploader(self, data: ReplicaSetData, settings: UploadSettings, offload: Offload) -> Uploader:
        return Uploader(
            self._planner,
            self.confirm,
            data,
            settings,
            self._clock,
            self._rng,
            owner=UploadOwner(
                committed=self._on_committed,
                quarantine=self._quarantine,
                fenced=self._fence,
                owns_stream=self._streams.owns or (lambda _stream_id: True),
                wrote=self.history.note_objects,
                ended=self._events.uploaded,
            ),
            offload=offload,
        )

    # -- recovery and start

    async def recover(self) -> None:
        """Read the WAL; keep the records that are not in the bucket for the streams that will be opened.

        Raises `CorruptData` when the WAL does not adjoin the committed WAL offset, `WalFailed`.
        """
        assert self._handed is None, "the WAL was handed over, and is in use"
        committed = self._objects.committed_wal_offset(self.replica_set_id)

        def on_record(record: WalRecord) -> None:
            if record.type is WalRecordType.DATA:
                self.data_end = record.end_offset
                if record.end_offset > committed:
                    self._recovered.add(record)

        self._proven = await self._wal.recover(on_record)
        self._recovered_end = self.data_end

    async def start_over(self, kept_as: str) -> None:
        """Begin another WAL at the committed WAL offset, between `recover` and `start`; raises `WalFailed`.

        The records that were found are not used, and their files are kept under the suffix `kept_as`.
        """
        assert not self._started
        self._recovered.discard_before(max(self._wal.end_offset, self.data_end))
        self.data_end = committed = self._objects.committed_wal_offset(self.replica_set_id)
        self._proven = committed  # what the other WAL had confirmed says nothing of the same offsets in this one
        await self._wal.reset(committed, kept_as)

    async def start(self, master_epoch: int) -> None:
        """Enter the master epoch and start uploading. Raises `CorruptData`, `Fenced`, `WalFailed`."""
        committed = self._objects.committed_wal_offset(self.replica_set_id)
        await meet(self._wal, self.replica_set_id, committed, is_handed=self._handed is not None)
        self.confirm.advance(self._proven)
        self._recovered.discard_before(committed)  # a replica has set apart what it keeps of that
        self._planner.restart(committed)
        if self._handed is not None:
            assert self._wal.master_epoch == master_epoch, (self._wal.master_epoch, master_epoch)
            self.data_end = self._recovered_end = max(committed, self._recovered.newest_end)
        else:
            self._wal.set_on_failed(self.wal_failed)
            if self._confirms:
                self._wal.set_on_durable(self._on_durable)
            await enter_epoch(self._wal, master_epoch, self._clock, self._rng)
        if self._confirms:
            self._on_durable(self._wal.durable_offset)
        self._started = True
        self.master_epoch = master_epoch
        self._uploader.start(master_epoch)
        self._begin_history()
        if not self._recovered:
            self.recovered_done()

    def _begin_history(self) -> None:
        history, is_quorum = self.history, self.durable is self.confirm
        durable = None if is_quorum else self.durable.value
        history.begin(durable=durable, confirmed=self.confirm.value, uploaded=self.committed_offset)
        self.durable.observe(history.note_durable)
        if not is_quorum:
            self.confirm.observe(history.note_confirmed)
        self._uploader.committed.observe(history.note_uploaded)

    def open_stream(
        self, stream_id: int, epoch: int, start_offset: int, end_offset: int, owner_since_epoch: int
    ) -> int:
        """Start serving a stream that the controller opened for this master; all values are as in `OpenedStream`.

        Returns the next offset: the committed end plus the records in memory and the WAL beyond it. Raises
        `StreamQuarantined` when there is a gap, and from then on, in later processes too; the stream can be read up to
        its committed end.
        """
        assert self._started, "start must precede open_stream"
        if self._failure is not None:
            raise self._failure
        end_offset = self._committed_by_now(stream_id, end_offset, owner_since_epoch)
        stream_log = self._logs.get(stream_id)
        if stream_log is not None and stream_log.fate is Fate.QUARANTINE:
            if not stream_log.is_noted or self._objects.quarantined(stream_id):
                raise self._quarantined(stream_log)  # a second call must not turn it into a silent loss
            logger.warning(
                "quarantine released: the stream continues at its committed end", extra={"stream": stream_id}
            )
            stream_log = None  # records that are still to be set aside keep the old one
        if stream_log is None or not _still_ours(stream_log, end_offset, owner_since_epoch):
            if stream_log is not None and stream_log.committed_end < stream_log.end_offset:
                logger.warning("ignoring records of an earlier ownership", extra={"stream": stream_id})
                stream_log.fate = Fate.DROP
            stream_log = self._begin_log(stream_id, end_offset, owner_since_epoch)
        stream_log.epoch = epoch
        stream_log.owner_since_epoch = owner_since_epoch
        stream_log.start_offset = max(start_offset, stream_log.start_offset)
        stream_log.is_open = True
        self._logs[stream_id] = stream_log
        problem = self._take_recovered(stream_log)
        if problem:
            self._quarantine(stream_log, problem)
            raise self._quarantined(stream_log)
        stream_log.accepts = True
        return stream_log.end_offset

    def _begin_log(self, stream_id: int, end_offset: int, owner_since_epoch: int) -> StreamLog:
        """Return a log that ends at the committed end, with what the replica has kept of its newest records."""
        return self._recovered.take_kept(stream_id, end_offset, owner_since_epoch) or StreamLog(stream_id, end_offset)

    def _committed_by_now(self, stream_id: int, end_offset: int, owner_since_epoch: int) -> int:
        """Return the committed end of a stream: our uploads may commit before the answer to the opening arrives."""
        facts = self._streams.facts(stream_id)
        return max(end_offset, facts[0]) if facts is not None and facts[1] == owner_since_epoch else end_offset

    def _take_recovered(self, stream_log: StreamLog) -> str:
        """Move the recovered records of a stream to its log; return why it must be quarantined, or an empty string."""
        problem = self._recovered.fill(stream_log, self.confirm.value) if self._planner.held else ""
        noted = self._objects.quarantined(stream_log.stream_id)
        stream_log.is_noted = bool(noted)
        return noted or problem

    def recovered_done(self) -> None:
        """All streams of the replica set have been opened: drop recovered records of unknown streams, start uploads.

        Owned streams that were not opened (the opening of their partition failed) are adopted with
        `LocalStreams.facts`; without facts, uploads wait until they are opened or deleted, so that nothing is lost.
        Called after a restart; idempotent.
        """
        assert self._started
        if not self._planner.held:
            return
        if not self._release() and not self._waits_for_streams:
            self._waits_for_streams = True
            fields = {"replica_set": self.replica_set_id, "streams": self._missing()}
            logger.warning("uploads wait for streams that are not open yet", extra=fields)
            self._tasks.keep(self._release_later, "release")

    def _missing(self) -> list[int]:
        """Return the owned streams with recovered records that are not open."""
        owns = self._streams.owns
        return [] if owns is None else [stream_id for stream_id in self._recovered.unclaimed() if owns(stream_id)]

    def _release(self) -> bool:
        """Start uploads if every owned stream is known."""
        for stream_id in self._recovered.unclaimed():
            facts = self._streams.facts(stream_id)
            if facts is not None:
                self._adopt(stream_id, *facts)
        if self._missing():
            return False
        entries = self._recovered.settle()
        if not entries and self.data_end == self._recovered_end:
            self.data_end = min(self.data_end, self.committed_offset)  # what is left belongs to no stream of ours
        self._planner.release(entries)
        self._uploader.wake()
        return True

    async def _release_later(self) -> None:
        while not self._release():
            await self._clock.sleep(_RELEASE_CHECK_S)

    def _adopt(self, stream_id: int, end_offset: int, owner_since_epoch: int) -> None:
        """Adopt an owned stream that is not open, so that its records are uploaded."""
        stream_log = self._begin_log(stream_id, end_offset, owner_since_epoch)
        stream_log.epoch = self._recovered.newest_epoch(stream_id)
        stream_log.owner_since_epoch = owner_since_epoch
        self._logs[stream_id] = stream_log
        problem = self._take_recovered(stream_log)
        if problem:
            self._quarantine(stream_log, problem)
        self._on_empty(stream_log)

    def forget_before(self, stream_id: int, offset: int) -> None:
        """Read a stream's committed records before `offset` from the bucket from now on, where they were compacted."""
        stream_log = self._logs.get(stream_id)
        if stream_log is not None:
            stream_log.forget_before(offset)

    def tail(self, stream_id: int, max_bytes: int) -> list[StreamEntry]:
        """Return the newest records of a stream in memory that fit into `max_bytes`, in order; maybe unconfirmed."""
        stream_log = self._logs.get(stream_id)
        return stream_log.tail(max_bytes) if stream_log is not None and stream_log.is_open else []

    def unconfirmed(self, stream_id: int) -> list[UnconfirmedRecord]:
        """Return the records at the end of an open stream that the WAL held at the start and that are not confirmed."""
        return self._logs[stream_id].unconfirmed_after(self.confirm.value)

    def warm(self, stream_id: int, records: Sequence[StreamEntry]) -> bool:
        """Put committed records of a stream that was just opened into memory, which saves reading them.

        Returns False, without an effect, unless they are contiguous, end exactly at the stream's end, do not begin
        before its start, and fit into memory. Only their offsets are checked, not their contents.
        """
        stream_log = self._logs.get(stream_id)
        if not records or stream_log is None or not stream_log.accepts or len(stream_log):
            return False
        at = records[0].base_offset
        if at < stream_log.start_offset or stream_log.committed_end != stream_log.end_offset:
            return False
        for record in records:
            if record.base_offset != at or record.count < 1:
                return False
            at += record.count
        owned = [StreamEntry(base, count, own(payload)) for base, count, payload in records]
        cost = sum(footprint(record.payload) for record in owned)
        if at != stream_log.end_offset or not self._cache.has_room(cost):
            return False
        stream_log.warm(owned)
        self._cache.add(cost)
        self._cache.release(CacheEntry(0, stream_log, record) for record in owned)
        return True

    def offsets(self, stream_id: int) -> tuple[int, int]:
        """Return the start and end offset of an open stream. Raises `KeyError`."""
        stream_log = self._logs[stream_id]
        return stream_log.start_offset, stream_log.end_offset

    def whereabouts(self, stream_id: int) -> StreamWhereabouts | None:
        """Return where the records of a stream are, for operators; None for a stream that is not here."""
        found = self._logs.get(stream_id)
        if found is None:
            return None
        wal = self._wal
        return StreamWhereabouts(
            start_offset=found.start_offset,
            committed_end=found.committed_end,
            cache_start=found.cache_start,
            cached_records=len(found),
            end_offset=found.end_offset,
            is_quarantined=found.fate is Fate.QUARANTINE,
            wal_start=wal.start_offset,
            wal_committed=self.committed_offset,
            wal_confirmed=self.confirm_offset,
            wal_durable=wal.durable_offset,
            wal_end=wal.end_offset,
            master_epoch=self.master_epoch,
        )

    def is_quarantined(self, stream_id: int) -> bool:
        """Return whether the stream takes no more appends because of rule 5."""
        stream_log = self._logs.get(stream_id)
        return stream_log is not None and stream_log.fate is Fate.QUARANTINE

    def close_stream(self, stream_id: int) -> None:
        """Stop appends and reads of a stream. Its pending records are still uploaded. Unknown streams are ignored."""
        stream_log = self._logs.get(stream_id)
        if stream_log is not None:
            stream_log.is_open = stream_log.accepts = False
            self._on_empty(stream_log)

    def drop_stream(self, stream_id: int) -> None:
        """Stop uploading the records of a deleted stream."""
        stream_log = self._logs.get(stream_id)
        if stream_log is not None:
            stream_log.fate = Fate.DROP
            self.close_stream(stream_id)

    def set_trimmed(self, stream_id: int, start_offset: int) -> None:
        """Make reads before `start_offset` raise `OffsetTrimmed`. Never decreases."""
        stream_log = self._logs.get(stream_id)
        if stream_log is not None and start_offset > stream_log.start_offset:
            stream_log.start_offset = start_offset

    # -- appends

    def append(self, record: StreamAppend) -> int:
        """Append one record at the end of its stream; return the WAL offset after it.

        It is confirmed once `confirm.value` reaches that offset. The record and its buffers are kept: they must not be
        changed or used again. Raises, with nothing appended:
        `Overloaded`, `WalFull` (wait with `writable`), `WalFailed`, `Fenced`, `Closed`, `StreamQuarantined`,
        `InvalidInput` for a payload over the WAL's limit.
        """
        stream_id, base_offset, payload = record.stream_id, record.base_offset, record.payload
        stream_log = self._logs.get(stream_id)
        if stream_log is None or stream_log.epoch != record.stream_epoch or not stream_log.accepts:
            raise self._refusal(stream_id, record.stream_epoch)
        assert base_offset == stream_log.end_offset, f"stream {stream_id}: {base_offset} != {stream_log.end_offset}"
        body = own(payload[0] if len(payload) == 1 else b"".join(payload))
        size, cost = len(body), footprint(body)
        if not self._cache.has_room(cost):
            self._refused_bytes = max(self._refused_bytes, size)
            self._refused_cost = max(self._refused_cost, cost)
            raise Overloaded("data that is not uploaded fills the log cache (cache.log_bytes)", hint="retry")
        record.payload = (body,)
        try:
            wal_end = self._wal.append(record)
        except WalFull:
            self._refused_bytes = max(self._refused_bytes, size)
            self._refused_cost = max(self._refused_cost, cost)
            raise
        entry = (StreamEntry if record.batch_crc is None else CheckedBatch)(base_offset, record.count, body)
        stream_log.push(entry)
        self.data_end = wal_end
        self._cache.add(cost)
        self._planner.add(CacheEntry(wal_end, stream_log, entry))
        history = self.history
        if history.left and stream_log.sampled_in != history.tick:
            stream_log.sampled_in = history.tick
            history.appended(stream_id, base_offset, wal_end)
        return wal_end

    def _refusal(self, stream_id: int, stream_epoch: int) -> Exception:
        if self._failure is not None:
            return self._failure
        stream_log = self._logs.get(stream_id)
        if stream_log is None or not stream_log.is_open:
            return Closed(f"stream {stream_id} is not open here")
        if stream_log.fate is Fate.QUARANTINE:
            return self._quarantined(stream_log)
        return Fenced(f"stream {stream_id} has epoch {stream_log.epoch}, not {stream_epoch}")

    async def writable(self) -> None:
        """Return when the append that was refused last would succeed; meanwhile uploads are woken.

        Raises `WalFailed`, or the error of `append` once storage is fenced or closed.
        """
        size, cost = self._refused_bytes, self._refused_cost
        if cost == 0 and self._failure is None and not self._closed and self._cache.has_room(0):
            return
        self._writers += 1
        try:
            await self._wait_for_room(size, cost)
        finally:
            self._writers -= 1
            self._planner.urgent = self._writers > 0
        self._refused_bytes = self._refused_cost = 0

    async def _wait_for_room(self, size: int, cost: int) -> None:
        while not self._closed and self._failure is None and not self._cache.has_room(cost):
            self._wake()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room[future] = None
            try:
                await future
            finally:
                self._room.pop(future, None)  # of a request whose time was over: nothing may be committed for hours
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Closed("storage is closed")
        self._wake()
        await self._wal.writable(size)

    def _wake(self) -> None:
        self._planner.urgent = True
        self._uploader.wake()

    def _wake_writers(self) -> None:
        waiting, self._room = self._room, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # -- reads

    def read_hot(
        self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry] | None:
        """As `read`, from memory alone (log cache and block cache); None when that does not suffice.

        Raises `Closed`, `CorruptData`.
        """
        if start_offset >= end_offset:
            return []
        stream_log = self._logs.get(stream_id)
        if stream_log is None or not stream_log.is_open:
            raise Closed(f"stream {stream_id} is not open here")
        if start_offset < stream_log.start_offset or stream_log.fate is Fate.QUARANTINE:
            return None
        records = stream_log.read(start_offset, end_offset, max_bytes)
        if records is None and start_offset < stream_log.cache_start:
            cold_end = min(end_offset, stream_log.cache_start)
            return self._reader.read_cached(stream_id, start_offset, cold_end, max_bytes, is_urgent=is_urgent)
        return records

    async def read(
        self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry]:
        """Return whole appends, contiguous, from the one that contains `start_offset`: one, then up to `max_bytes`.

        None begins at or after `end_offset`, which must not exceed the next offset; the caller keeps it at or below
        the confirmed end (rule 2). Empty only if `start_offset >= end_offset`. `is_urgent`: see `BlockReader.read`.

        Raises `OffsetTrimmed`, `CorruptData`, `StreamQuarantined`, `Unavailable`, `Closed`.
        """
        backoff = Backoff(0.05, 2.0, self._rng)
        for _ in range(_HOLE_RETRIES):
            records = self.read_hot(stream_id, start_offset, end_offset, max_bytes, is_urgent=is_urgent)
            if records is not None:
                return records
            stream_log = self._logs[stream_id]
            self._check_readable(stream_log, start_offset, end_offset)
            cold_end = stream_log.committed_end if stream_log.fate is Fate.QUARANTINE else stream_log.cache_start
            cold_end = min(end_offset, cold_end)
            records = await self._reader.read(stream_id, start_offset, cold_end, max_bytes, is_urgent=is_urgent)
            if records:
                return records
            await self._clock.sleep(backoff.next_delay_s())
        self.damage.refused += 1
        raise CorruptData(
            f"stream {stream_id}: no object in the metadata holds offset {start_offset}",
            hint="the offset lies below the committed end and is not trimmed: report this",
        )

    async def gather(self, ranges: Iterable[StreamRange]) -> None:
        """Bring committed ranges of many streams into memory by few requests, before each is read for itself.

        As far as `GATHER_BYTES` go, the first ranges first. Never raises a `TidelogError`: the reads do.
        """
        missing = list(self._not_cached(ranges))
        if missing:
            await self._reader.gather(missing, GATHER_BYTES)

    def holds(self, ranges: Iterable[StreamRange]) -> bool:
        """Return whether all of these committed ranges are in memory."""
        return all(self._reader.holds(each) for each in self._not_cached(ranges))

    def _not_cached(self, ranges: Iterable[StreamRange]) -> Iterator[StreamRange]:
        """What of these ranges, which end at their streams' committed ends, is not in the log cache."""
        for one in ranges:
            # Of a stream that is not open it is not known yet whether it may be used.
            found = self._logs.get(one.stream_id) or self._recovered.kept(one.stream_id, one.end_offset, -1)
            missing = one if found is None else found.not_cached(one)
            if missing is not None:
                yield missing

    def _check_readable(self, stream_log: StreamLog, start_offset: int, end_offset: int) -> None:
        stream_id = stream_log.stream_id
        if start_offset < stream_log.start_offset:
            raise OffsetTrimmed(f"stream {stream_id} starts at {stream_log.start_offset}, not {start_offset}")
        if stream_log.fate is Fate.QUARANTINE and start_offset >= stream_log.committed_end:
            raise self._quarantined(stream_log)
        if end_offset > stream_log.end_offset:
            raise InvalidInput(f"stream {stream_id} ends at {stream_log.end_offset}, before {end_offset}")

    # -- uploads

    async def upload_now(self) -> None:
        """Upload everything that is confirmed now; return when it is committed.

        Waits while the bucket does not answer, and until `recovered_done`; bound it with a time-out (cancelling
        is safe). Raises the error that stopped uploads, if any: `Fenced`, `CommitGap`, `Closed`.
        """
        await self._uploader.upload_to(self.confirm.value)

    async def send_now(self) -> None:
        """As `upload_now`, but return when the commit has been sent to the controller, ahead of later requests.

        It may still be refused or have to be retried: `upload_now` waits for the outcome.
        """
        await self._uploader.send_to(self.confirm.value)

    async def reserve_upload(self) -> None:
        """Prepare the object ids that the next small upload needs. Raises `Unavailable`."""
        await self._uploader.reserve()

    @property
    def confirm_offset(self) -> int:
        """Return the WAL offset up to which the quorum rule is met (int64 bytes)."""
        return self.confirm.value

    @property
    def not_uploaded_bytes(self) -> int:
        """Return the bytes of the WAL that are confirmed and not covered by a committed object."""
        return max(0, self.confirm.value - self.committed_offset)

    @property
    def is_all_committed(self) -> bool:
        """Return whether every record of a stream in the WAL is covered by a committed object."""
        return self._started and self.data_end <= self.committed_offset

    def uncommitted_ends(self, limit: int) -> list[tuple[int, int]]:
        """Return `(stream, next offset)` of at most `limit` streams with records that are not committed."""
        waiting = (one for one in self._logs.values() if one.committed_end < one.end_offset and one.fate is Fate.UPLOAD)
        return [(one.stream_id, one.end_offset) for one in itertools.islice(waiting, limit)]

    @property
    def committed_offset(self) -> int:
        """Return the WAL offset up to which everything is in the bucket and committed (int64 bytes)."""
        return self._uploader.committed.value

    async def _on_committed(self, task: UploadTask) -> None:
        entries = task.entries
        for first in range(0, len(entries), _RELEASE_CHUNK):
            self._cache.release(entries[first : first + _RELEASE_CHUNK])
            await asyncio.sleep(0)
        try:
            await self._wal.trim(task.wal_end)
        except StorageFailed as error:
            logger.error("the WAL cannot be trimmed", extra={"replica_set": self.replica_set_id, "error": error})
        except Exception as failure:
            if isinstance(failure, TidelogError):
                raise
            expected("storage.wal", failure)  # noted; the next trim takes these records, too
        self._wake_writers()

    def _on_empty(self, stream_log: StreamLog) -> None:
        """Remove a closed stream when its last record leaves memory. A quarantined one is never removed."""
        done = len(stream_log) == 0 and not stream_log.is_open and stream_log.fate is not Fate.QUARANTINE
        if done and self._logs.get(stream_log.stream_id) is stream_log:
            del self._logs[stream_log.stream_id]

    def _on_durable(self, offset: int) -> None:
        offset = self.gate.admit(offset)
        self._wal.note_confirmed(offset)
        self.confirm.advance(offset)

    def wal_failed(self, error: Exception) -> None:
        """Stop acknowledging; confirmed records are still uploaded. For the owner of a `HandedWal`."""
        logger.error("the WAL failed", extra={"replica_set": self.replica_set_id, "error": error})
        self.confirm.fail(error)
        self.durable.fail(error)
        self._wake_writers()
        self._events.wal_failed(error)

    def _on_defect(self, error: BaseException) -> None:
        self._fence(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def depose(self, error: Fenced) -> None:
        """The term has ended: refuse everything from now on, also when the WAL begins a later term of this broker."""
        self._refuse_all(error)

    def _fence(self, error: Exception) -> None:
        """Uploads have stopped permanently: refuse everything that depends on them."""
        if not self._closed and self._refuse_all(error):
            self._events.fenced(error)

    def _refuse_all(self, error: Exception) -> bool:
        """Refuse everything from now on; return whether this is the first error."""
        if self._failure is not None:
            return False
        self._failure = error
        self.confirm.fail(error)
        self.durable.fail(error)
        for stream_log in self._logs.values():
            stream_log.accepts = False
        self._wake_writers()
        return True

    def _quarantine(self, stream_log: StreamLog, reason: str) -> None:
        stream_log.fate = Fate.QUARANTINE
        stream_log.reason = reason
        stream_log.accepts = False
        fields = {"replica_set": self.replica_set_id, "stream": stream_log.stream_id, "reason": reason}
        logger.error("stream quarantined", extra=fields)
        self._events.quarantined(stream_log.stream_id, reason)

    def _quarantined(self, stream_log: StreamLog) -> StreamQuarantined:
        return StreamQuarantined(
            f"stream {stream_log.stream_id} is quarantined: {stream_log.reason}",
            hint="its records that were not committed are in the bucket under quarantine/; see docs/operations.md",
        )

    # -- closing

    async def close(self, *, upload: bool) -> None:
        """Stop. With `upload`, first upload everything confirmed (bounded by the caller's time-out).

        Everything not committed stays in the WAL, which is made durable and closed unless it was handed over. May be
        called again, also after it was cancelled. Raises `WalFailed`.
        """
        if upload and self._started and self._failure is None and not self._closed:
            await self._upload_rest()
        self._closed = True
        if self._handed is not None:
            self._refuse_all(Closed("storage is closed"))  # the WAL stays open
        self._wake_writers()
        await self._tasks.close()
        await self._uploader.close()
        if self._owns_reader:
            await self._reader.close()
        if self._handed is None:
            await self._wal.close()

    async def _upload_rest(self) -> None:
        if self._planner.held:
            logger.warning(
                "not uploading: recovered streams are not all open", extra={"replica_set": self.replica_set_id}
            )
            return
        try:
            if self._confirms:
                await self.confirm.wait(self._wal.end_offset)
            await self.upload_now()
        except TidelogError as error:
            logger.error("not everything was uploaded", extra={"replica_set": self.replica_set_id, "error": error})

    @property
    def upload_health(self) -> OperationHealth:
        """Return how uploads go."""
        return self._uploader.health

    @property
    def damage(self) -> DamageLog:
        """Return the known damage in the bucket."""
        return self._reader.damage

    def forget_uploaded(self) -> None:
        """Drop from memory what is in the bucket. Reads fetch it from there."""
        self._cache.evict(self._cache.bytes)

    @property
    def log_cache_bytes(self) -> int:
        """Return the bytes that the log cache holds; called every second."""
        return self._cache.bytes

    def stats(self) -> dict[str, int | float]:
        """Return bytes and counts for metrics and status."""
        uploads = self._uploader.stats
        return {
            "streams": len(self._logs),
            "log_cache_bytes": self._cache.bytes,
            "log_cache_bound_bytes": self._cache.bound_bytes,
            "log_cache_pending_bytes": self._cache.pending_bytes,
            "confirm_offset": self.confirm.value,
            "committed_offset": self.committed_offset,
            "uploads_in_flight": self._uploader.in_flight,
            "upload_pending_age_seconds": self._uploader.pending_age_s,
            "upload_commits": uploads.commits,
            "upload_objects": uploads.objects,
            "upload_bytes": uploads.bytes,
            "upload_retries": uploads.retries,
            "upload_rebuilt": self._uploader.rebuilt,
            "quarantined_records": uploads.quarantined_records,
            "quarantined_streams": sum(one.fate is Fate.QUARANTINE for one in self._logs.values()),
            **self._reader.stats(),
        }


def _still_ours(stream_log: StreamLog, committed_end: int, owner_since_epoch: int) -> bool:
    """Return whether the records in memory of a stream are still valid: no other owner has had it since.

    The local committed end may be past the controller's answer: one of our commits overtook it.
    """
    return (
        stream_log.fate is not Fate.DROP
        and stream_log.epoch >= owner_since_epoch
        and committed_end <= stream_log.end_offset
    )
