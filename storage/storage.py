"""`Storage`, the facade of this room: appends to the WAL, reads from memory or the bucket, uploads behind both.

One `Storage` serves one replica set's master. The order of its life: `recover` (after the election, so that the local
metadata shows what earlier masters committed), `start`, `open_stream` for every stream of the replica set,
`recovered_done`, then appends and reads, and `close`.

Invariants:
- a stream is appended only at its next offset, by its current epoch, and its records are contiguous from the committed
  end through the WAL; where they are not, the stream is quarantined (rule 5);
- what was appended stays in memory until an object that holds it is committed, so reads never look into the WAL;
- memory is bounded: when what is not uploaded reaches `cache.log_bytes`, appends are refused until there is room.

Entry: `Storage`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from runtime.clock import Clock
from runtime.errors import Closed, CorruptData, Fenced, InvalidInput, Overloaded, StorageFailed, TidelogError
from runtime.tasks import Backoff, TaskSet
from storage.block_reader import BlockReader
from storage.cold_pace import ColdPace
from storage.confirm import ConfirmOffset
from storage.damage import DamageLog
from storage.footprint import footprint, own
from storage.log_cache import Entry, Fate, LogCache, StreamLog
from storage.managers import ObjectManager
from storage.object_store import Buffer, ObjectStore
from storage.purpose import Purpose, for_purpose
from storage.records import CheckedBatch
from storage.records import OffsetTrimmed as OffsetTrimmed
from storage.records import StreamQuarantined as StreamQuarantined
from storage.records import StreamRecord as StreamRecord
from storage.recovered import Recovered
from storage.settings import CacheSettings, UploadSettings
from storage.upload_plan import UploadPlanner, UploadTask
from storage.uploader import Offload, Uploader
from storage.wal import Wal, WalFull, WalRecord, WalRecordType

log = logging.getLogger(__name__)

_RELEASE_CHUNK = 4096
"""Records released at a time after a commit (about 1 ms), so that the loop is not held up."""
_RELEASE_CHECK_S = 0.5
_HOLE_RETRIES = 6
"""A read that finds no object tries again for about 3 s: a trim may just be on its way here."""


class Storage:
    """The bytes of one replica set. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        wal: Wal,
        store: ObjectStore,
        objects: ObjectManager,
        clock: Clock,
        cluster_id: str,
        replica_set_id: int,
        upload: UploadSettings,
        cache: CacheSettings,
        rng: random.Random,
        single_member: bool = True,
        owns_stream: Callable[[int], bool] | None = None,
        stream_facts: Callable[[int], tuple[int, int] | None] | None = None,
        on_fenced: Callable[[Exception], None] | None = None,
        on_quarantined: Callable[[int, str], None] | None = None,
        on_wal_failed: Callable[[Exception], None] | None = None,
        offload: Offload = asyncio.to_thread,
        pace: ColdPace | None = None,
    ) -> None:
        """Tie the parts together; nothing runs before `start`.

        `single_member`: the WAL's durable offset is the confirm offset. `owns_stream` says from local metadata whether
        a stream exists and is placed on this replica set; `stream_facts` gives the committed end and the owner-since
        epoch of a stream that is open by this replica set, or None. `on_fenced` hears once why uploads and appends
        have stopped for good; `on_wal_failed` once that the disk failed: nothing more is acknowledged, what is
        confirmed is still uploaded; `on_quarantined` hears of a stream id and the reason. `offload` runs CPU-heavy
        work aside. `pace` holds reads of history back while the broker is busy; without it they never are.
        """
        self._wal = wal
        self._objects = objects
        self._clock = clock
        self._rng = rng
        self._replica_set_id = replica_set_id
        self._single_member = single_member
        self._owns_stream = owns_stream
        self._stream_facts = stream_facts
        self._notify_fenced = on_fenced
        self._notify_quarantined = on_quarantined
        self._notify_wal_failed = on_wal_failed
        self.confirm = ConfirmOffset()
        """WAL offset up to which the quorum rule is met."""
        self._logs: dict[int, StreamLog] = {}
        self._cache = LogCache(cache.log_bytes, self._on_empty)
        self._recovered = Recovered(self._cache)
        self._planner = UploadPlanner(upload, 0)
        self._uploader = Uploader(
            planner=self._planner,
            confirm=self.confirm,
            store=for_purpose(store, Purpose.UPLOAD),
            objects=objects,
            clock=clock,
            rng=rng,
            settings=upload,
            cluster_id=cluster_id,
            replica_set_id=replica_set_id,
            on_committed=self._on_committed,
            on_quarantine=self._quarantine,
            on_fenced=self._fence,
            owns_stream=owns_stream or (lambda _stream_id: True),
            offload=offload,
        )
        self._reader = BlockReader(
            store=store,
            objects=objects,
            clock=clock,
            cluster_id=cluster_id,
            cache_bytes=cache.block_bytes,
            in_flight_bytes=cache.cold_in_flight_bytes,
            offload=offload,
            pace=pace,
        )
        self._failure: Exception | None = None
        self._started = False
        self._closed = False
        self._refused_bytes = 0
        self._refused_cost = 0
        self._writers = 0
        self._room: list[asyncio.Future[None]] = []
        self._waits_for_streams = False
        self._tasks = TaskSet("storage", self._on_defect)

    # -- from the start to the first append

    async def recover(self) -> None:
        """Read the WAL; what is not in the bucket yet is kept for the streams that will be opened.

        Raises `CorruptData` when the WAL and the metadata do not meet, `WalFailed`.
        """
        committed = self._objects.committed_wal_offset(self._replica_set_id)

        def on_record(record: WalRecord) -> None:
            if record.type is WalRecordType.DATA and record.end_offset > committed:
                self._recovered.add(record)

        self.confirm.advance(await self._wal.recover(on_record))

    async def start(self, master_epoch: int) -> None:
        """Enter the master epoch and begin to upload. Raises `CorruptData`, `Fenced`, `WalFailed`."""
        committed = self._objects.committed_wal_offset(self._replica_set_id)
        await self._meet(committed)
        self._recovered.discard_before(committed)
        self._planner.restart(committed)
        self._wal.set_on_failed(self._on_wal_failed)
        if self._single_member:
            self._wal.set_on_durable(self._on_durable)
        backoff = Backoff(0.05, 5.0, self._rng)
        while True:
            try:
                await self._wal.begin_epoch(master_epoch)
                break
            except WalFull as error:
                log.warning("the WAL has no room for the new epoch, will try again", extra={"error": error})
                await self._clock.sleep(backoff.next_delay_s())
        if self._single_member:
            self._on_durable(self._wal.durable_offset)
        self._started = True
        self._uploader.start(master_epoch)
        if not self._recovered:
            self.recovered_done()

    async def _meet(self, committed: int) -> None:
        """Make sure that the WAL covers everything from the committed offset on."""
        if self._wal.start_offset > committed:
            raise CorruptData(
                f"the WAL of replica set {self._replica_set_id} starts at {self._wal.start_offset}, "
                f"but only {committed} is committed: what lies between is in neither",
                hint="is this the data directory of another cluster, or was the controller's state restored from old?",
            )
        if self._wal.end_offset < committed:
            fields = {"replica_set": self._replica_set_id, "wal_end": self._wal.end_offset, "committed": committed}
            log.warning("the WAL ends before what the bucket holds, starting over behind it", extra=fields)
            self._recovered.discard_before(committed)
            await self._wal.reset(committed)

    def open_stream(
        self, stream_id: int, epoch: int, start_offset: int, end_offset: int, owner_since_epoch: int
    ) -> int:
        """Take up a stream that the controller opened for us; all values are as in `OpenedStream`.

        Returns the next offset: the committed end plus what memory and the WAL hold beyond it. Raises
        `StreamQuarantined` when there is a gap, and from then on, in later processes too; the stream can be read up to
        its committed end.
        """
        assert self._started, "start comes before open_stream"
        if self._failure is not None:
            raise self._failure
        end_offset = self._committed_by_now(stream_id, end_offset, owner_since_epoch)
        stream_log = self._logs.get(stream_id)
        if stream_log is not None and stream_log.fate is Fate.QUARANTINE:
            if not stream_log.is_noted or self._objects.quarantined(stream_id):
                raise self._quarantined(stream_log)  # a second try must not turn it into a silent loss
            log.warning("a quarantine was lifted: the stream goes on at what is committed", extra={"stream": stream_id})
            stream_log = None  # records that are still to be set aside keep the old one
        if stream_log is None or not _still_ours(stream_log, end_offset, owner_since_epoch):
            if stream_log is not None and stream_log.committed_end < stream_log.end_offset:
                log.warning("records of an earlier ownership do not count", extra={"stream": stream_id})
                stream_log.fate = Fate.DROP
            stream_log = StreamLog(stream_id, end_offset)
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

    def _committed_by_now(self, stream_id: int, end_offset: int, owner_since_epoch: int) -> int:
        """Where the stream is committed up to: our own uploads go on while the answer that says it is on its way."""
        facts = self._stream_facts(stream_id) if self._stream_facts is not None else None
        return max(end_offset, facts[0]) if facts is not None and facts[1] == owner_since_epoch else end_offset

    def _take_recovered(self, stream_log: StreamLog) -> str:
        """Give a stream what the WAL holds of it; why it must be quarantined, or an empty string."""
        problem = self._recovered.fill(stream_log) if self._planner.held else ""
        noted = self._objects.quarantined(stream_log.stream_id)
        stream_log.is_noted = bool(noted)
        return noted or problem

    def recovered_done(self) -> None:
        """Every stream of the replica set has been opened: recovered records of unknown streams are dropped.

        Uploads begin. Streams that are ours and were not opened (their partition failed to) are taken up from
        `stream_facts`; without that, uploads wait until they are opened or deleted, so that nothing is lost. Called
        after a restart; calling it again changes nothing.
        """
        assert self._started
        if not self._planner.held:
            return
        if not self._release() and not self._waits_for_streams:
            self._waits_for_streams = True
            fields = {"replica_set": self._replica_set_id, "streams": self._missing()}
            log.warning("uploads wait for streams that are not open yet", extra=fields)
            self._tasks.spawn(self._release_later(), "release")

    def _missing(self) -> list[int]:
        """Streams of ours with recovered records that are not opened."""
        if self._owns_stream is None:
            return []
        return [stream_id for stream_id in self._recovered.unclaimed() if self._owns_stream(stream_id)]

    def _release(self) -> bool:
        """Let uploads begin if every stream of ours is known."""
        for stream_id in self._recovered.unclaimed():
            facts = self._stream_facts(stream_id) if self._stream_facts is not None else None
            if facts is not None:
                self._adopt(stream_id, *facts)
        if self._missing():
            return False
        self._planner.release(self._recovered.settle())
        self._uploader.kick()
        return True

    async def _release_later(self) -> None:
        while not self._release():
            await self._clock.sleep(_RELEASE_CHECK_S)

    def _adopt(self, stream_id: int, end_offset: int, owner_since_epoch: int) -> None:
        """Take up an unopened stream of ours so that its records are uploaded."""
        stream_log = StreamLog(stream_id, end_offset)
        stream_log.epoch = self._recovered.newest_epoch(stream_id)
        stream_log.owner_since_epoch = owner_since_epoch
        self._logs[stream_id] = stream_log
        problem = self._take_recovered(stream_log)
        if problem:
            self._quarantine(stream_log, problem)
        self._on_empty(stream_log)

    def tail(self, stream_id: int, max_bytes: int) -> list[StreamRecord]:
        """The newest records of a stream that are in memory and fit into `max_bytes`, in order; perhaps unconfirmed."""
        stream_log = self._logs.get(stream_id)
        return stream_log.tail(max_bytes) if stream_log is not None and stream_log.is_open else []

    def warm(self, stream_id: int, records: Sequence[StreamRecord]) -> bool:
        """Put committed records of a stream that was just opened into memory, so that they need not be read.

        False, and nothing is done, unless they are contiguous, end exactly where the stream does, begin no earlier than
        it does, and find room. What they hold is the caller's word: only their offsets are checked.
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
        owned = [StreamRecord(base, count, own(payload)) for base, count, payload in records]
        cost = sum(footprint(record.payload) for record in owned)
        if at != stream_log.end_offset or not self._cache.has_room(cost):
            return False
        stream_log.warm(owned)
        self._cache.add(cost)
        self._cache.release(Entry(0, stream_log, record) for record in owned)
        return True

    def is_quarantined(self, stream_id: int) -> bool:
        """Whether the stream takes nothing more here because of rule 5."""
        stream_log = self._logs.get(stream_id)
        return stream_log is not None and stream_log.fate is Fate.QUARANTINE

    def close_stream(self, stream_id: int) -> None:
        """No more appends and reads here. What is not uploaded yet still will be. An unknown stream is success."""
        stream_log = self._logs.get(stream_id)
        if stream_log is not None:
            stream_log.is_open = stream_log.accepts = False
            self._on_empty(stream_log)

    def drop_stream(self, stream_id: int) -> None:
        """The stream was deleted: what is not uploaded need not be."""
        stream_log = self._logs.get(stream_id)
        if stream_log is not None:
            stream_log.fate = Fate.DROP
            self.close_stream(stream_id)

    def set_trimmed(self, stream_id: int, start_offset: int) -> None:
        """Reads before `start_offset` raise `OffsetTrimmed` from now on. Never goes back."""
        stream_log = self._logs.get(stream_id)
        if stream_log is not None and start_offset > stream_log.start_offset:
            stream_log.start_offset = start_offset

    # -- appends

    def append(
        self,
        stream_id: int,
        stream_epoch: int,
        base_offset: int,
        count: int,
        payload: Sequence[Buffer],
        batch_crc: int | None = None,
    ) -> int:
        """Append one record covering `[base_offset, base_offset + count)`; returns the WAL offset after it.

        It is confirmed once `confirm.value` reaches that. The buffers may be kept and must not change any more.
        `batch_crc` says that the payload is one record batch (v2), in one buffer, that has just passed its check
        against this CRC32C: the checksums of WAL and object may follow from it. Raises, with nothing appended:
        `Overloaded`, `WalFull` (wait with `writable`), `WalFailed`, `Fenced`, `Closed`, `StreamQuarantined`,
        `InvalidInput` for a payload over the WAL's limit.
        """
        stream_log = self._logs.get(stream_id)
        if stream_log is None or stream_log.epoch != stream_epoch or not stream_log.accepts:
            raise self._refusal(stream_id, stream_epoch)
        assert base_offset == stream_log.end_offset, f"stream {stream_id}: {base_offset} != {stream_log.end_offset}"
        body = own(payload[0] if len(payload) == 1 else b"".join(payload))
        size, cost = len(body), footprint(body)
        if not self._cache.has_room(cost):
            self._refused_bytes = max(self._refused_bytes, size)
            self._refused_cost = max(self._refused_cost, cost)
            raise Overloaded("what is not uploaded fills the log cache (cache.log_bytes)", hint="retry")
        try:
            wal_end = self._wal.append(stream_id, stream_epoch, base_offset, count, (body,), batch_crc)
        except WalFull:
            self._refused_bytes = max(self._refused_bytes, size)
            self._refused_cost = max(self._refused_cost, cost)
            raise
        record = (StreamRecord if batch_crc is None else CheckedBatch)(base_offset, count, body)
        stream_log.push(record)
        self._cache.add(cost)
        self._planner.add(Entry(wal_end, stream_log, record))
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
        """Return when the append that was refused last would find room; uploads hurry meanwhile.

        Raises `WalFailed`, or what `append` would raise once storage is fenced or closed.
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
            self._hurry()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Closed("storage is closed")
        self._hurry()
        await self._wal.writable(size)

    def _hurry(self) -> None:
        self._planner.urgent = True
        self._uploader.kick()

    def _wake_writers(self) -> None:
        waiting, self._room = self._room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # -- reads

    def read_hot(self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamRecord] | None:
        """As `read`, from memory alone (log cache and block cache); None when that is not enough.

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
            return self._reader.read_cached(stream_id, start_offset, cold_end, max_bytes)
        return records

    async def read(self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamRecord]:
        """Whole appends, contiguous, from the one that contains `start_offset`: at least one, then up to `max_bytes`.

        None begins at or after `end_offset`, which must not exceed the next offset; the caller keeps it at or below
        what is confirmed (rule 2). Empty only if `start_offset >= end_offset`. Raises `OffsetTrimmed`, `CorruptData`,
        `StreamQuarantined`, `Unavailable`, `Closed`.
        """
        backoff = Backoff(0.05, 2.0, self._rng)
        for _ in range(_HOLE_RETRIES):
            records = self.read_hot(stream_id, start_offset, end_offset, max_bytes)
            if records is not None:
                return records
            stream_log = self._logs[stream_id]
            self._check_readable(stream_log, start_offset, end_offset)
            cold_end = stream_log.committed_end if stream_log.fate is Fate.QUARANTINE else stream_log.cache_start
            records = await self._reader.read(stream_id, start_offset, min(end_offset, cold_end), max_bytes)
            if records:
                return records
            await self._clock.sleep(backoff.next_delay_s())
        self.damage.refused += 1
        raise CorruptData(
            f"stream {stream_id}: no object in the metadata holds offset {start_offset}",
            hint="the offset lies below the committed end and is not trimmed: report this",
        )

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

        Waits as long as the bucket does not answer, and until `recovered_done`; bound it with a time-out (cancelling
        is safe). Raises why uploads have stopped, if they have: `Fenced`, `CommitGap`.
        """
        await self._uploader.upload_to(self.confirm.value)

    async def send_now(self) -> None:
        """As `upload_now`, but return when the commit is on its way to the controller, ahead of what is asked next.

        It may still be refused or have to be asked again: `upload_now` tells.
        """
        await self._uploader.send_to(self.confirm.value)

    async def reserve_upload(self) -> None:
        """Have what the next small upload needs of the controller at hand. Raises `Unavailable`."""
        await self._uploader.reserve()

    @property
    def committed_offset(self) -> int:
        """WAL offset up to which everything is in the bucket and committed (int64 bytes)."""
        return self._uploader.committed.value

    async def _on_committed(self, task: UploadTask) -> None:
        entries = task.entries
        for first in range(0, len(entries), _RELEASE_CHUNK):
            self._cache.release(entries[first : first + _RELEASE_CHUNK])
            await asyncio.sleep(0)
        try:
            await self._wal.trim(task.wal_end)
        except StorageFailed as error:
            log.error("the WAL cannot be trimmed", extra={"replica_set": self._replica_set_id, "error": error})
        self._wake_writers()

    def _on_empty(self, stream_log: StreamLog) -> None:
        """A closed stream is forgotten when its last record leaves memory. A quarantined one never is."""
        done = len(stream_log) == 0 and not stream_log.is_open and stream_log.fate is not Fate.QUARANTINE
        if done and self._logs.get(stream_log.stream_id) is stream_log:
            del self._logs[stream_log.stream_id]

    def _on_durable(self, offset: int) -> None:
        self._wal.note_confirmed(offset)
        self.confirm.advance(offset)

    def _on_wal_failed(self, error: Exception) -> None:
        """Nothing more is acknowledged; what is confirmed is still uploaded."""
        log.error("the WAL failed", extra={"replica_set": self._replica_set_id, "error": error})
        self.confirm.fail(error)
        self._wake_writers()
        if self._notify_wal_failed is not None:
            self._notify_wal_failed(error)

    def _on_defect(self, error: BaseException) -> None:
        self._fence(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _fence(self, error: Exception) -> None:
        """Uploads stopped for good: refuse everything that would need them."""
        if self._closed or self._failure is not None:
            return
        self._failure = error
        self.confirm.fail(error)
        for stream_log in self._logs.values():
            stream_log.accepts = False
        self._wake_writers()
        if self._notify_fenced is not None:
            self._notify_fenced(error)

    def _quarantine(self, stream_log: StreamLog, reason: str) -> None:
        stream_log.fate = Fate.QUARANTINE
        stream_log.reason = reason
        stream_log.accepts = False
        fields = {"replica_set": self._replica_set_id, "stream": stream_log.stream_id, "reason": reason}
        log.error("stream quarantined", extra=fields)
        if self._notify_quarantined is not None:
            self._notify_quarantined(stream_log.stream_id, reason)

    def _quarantined(self, stream_log: StreamLog) -> StreamQuarantined:
        return StreamQuarantined(
            f"stream {stream_log.stream_id} is quarantined: {stream_log.reason}",
            hint="what it holds beyond the bucket is kept there under quarantine/; see docs/operations.md",
        )

    # -- the end

    async def close(self, *, upload: bool) -> None:
        """Stop. With `upload`, first upload all that is confirmed (bounded by the caller's time-out).

        Whatever is not committed stays in the WAL, which is made durable and closed. May be called again, also after it
        was cancelled. Raises `WalFailed`.
        """
        if upload and self._started and self._failure is None and not self._closed:
            await self._upload_rest()
        self._closed = True
        self._wake_writers()
        await self._tasks.close()
        await self._uploader.close()
        await self._reader.close()
        await self._wal.close()

    async def _upload_rest(self) -> None:
        if self._planner.held:
            log.warning(
                "not uploading: recovered streams are not all open", extra={"replica_set": self._replica_set_id}
            )
            return
        try:
            if self._single_member:
                await self.confirm.wait(self._wal.end_offset)
            await self.upload_now()
        except TidelogError as error:
            log.error("not everything was uploaded", extra={"replica_set": self._replica_set_id, "error": error})

    @property
    def damage(self) -> DamageLog:
        """What is known to be damaged in the bucket."""
        return self._reader.damage

    @property
    def held_bytes(self) -> int:
        """What the caches and the cold reads under way hold; asked every second."""
        return self._cache.bytes + self._reader.held_bytes

    def stats(self) -> dict[str, int | float]:
        """Figures for metrics and status: bytes and counts."""
        uploads = self._uploader.stats
        return {
            "streams": len(self._logs),
            "log_cache_bytes": self._cache.bytes,
            "log_cache_bound_bytes": self._cache.bound_bytes,
            "log_cache_pending_bytes": self._cache.pending_bytes,
            "confirm_offset": self.confirm.value,
            "committed_offset": self.committed_offset,
            "uploads_in_flight": self._uploader.in_flight,
            "upload_commits": uploads.commits,
            "upload_objects": uploads.objects,
            "upload_bytes": uploads.bytes,
            "upload_retries": uploads.retries,
            "upload_rebuilt": uploads.rebuilt,
            "quarantined_records": uploads.quarantined_records,
            "quarantined_streams": sum(one.fate is Fate.QUARANTINE for one in self._logs.values()),
            **self._reader.stats(),
        }


def _still_ours(stream_log: StreamLog, committed_end: int, owner_since_epoch: int) -> bool:
    """Whether what memory holds of a stream still counts: nobody else has owned it since.

    We may know of a later committed end than the controller's answer: a commit of ours overtook it.
    """
    return (
        stream_log.fate is not Fate.DROP
        and stream_log.epoch >= owner_since_epoch
        and committed_end <= stream_log.end_offset
    )
