"""`S3Wal`: the WAL of one replica set as objects in a bucket, without a disk.

An append packs a header, adds it and the caller's buffers to the waiting batch, and returns. A batch is sent as one
object: at once while nothing is in flight, else after the batch interval or when it is full (`BatchTimer`). Many
objects are in flight; durable advances over them in order (`SendWindow`). A put is retried until it succeeds or until
another writer's object is found in its place: then this process has been fenced, and the WAL fails permanently.

The definition of the log, and why a fenced writer cannot acknowledge, is in `tidelog.storage.wal.s3.chain`;
docs/formats/wal.md has the bytes. Recovery takes everything up to the first hole: all acknowledged records, and perhaps
more.

Invariants:
1. start ≤ durable ≤ end, all WAL offsets.
2. A record's header never carries more than min(confirmed, durable) as confirm offset.
3. The waiting bytes and the objects in flight are bounded; so are the bytes between start and end (`wal.max_bytes`).
4. After the first failure nothing is acknowledged any more.

Entry: `S3Wal`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import ConfigError, Fenced, InvalidInput, TidelogError
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import WalFailed, WalFull, WalRecord, WalRecordType
from tidelog.storage.wal.epochs import EpochHistory
from tidelog.storage.wal.format import EPOCH_START, HEADER_BYTES, MAX_PAYLOAD_BYTES, encode_header, record_of
from tidelog.storage.wal.s3.chain import MAX_IN_FLIGHT, SPAN, Batch, BatchTimer, Chain, SendWindow
from tidelog.storage.wal.s3.format import (
    WRITER_ID_BYTES,
    ObjectType,
    Origin,
    WalObject,
    encode_data,
    encode_fence,
    wal_prefix,
)
from tidelog.storage.wal.s3.recovery import BucketLog, Created
from tidelog.storage.wal.state import WalState

logger = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 128 << 20
"""Bound on the bytes waiting for the bucket (rule 12): a larger one only delays every acknowledgement."""
_CLOSE_WAIT_S = 10.0
"""How long `close` waits for the bucket. Objects that have not landed by then were never acknowledged."""
_DATA = int(WalRecordType.DATA)
_EPOCH_START = int(WalRecordType.EPOCH_START)


def check_settings(settings: WalSettings) -> None:
    """Check that the values are consistent. Raises `ConfigError`."""
    if not 0 < settings.s3_batch_min_ms <= settings.s3_batch_max_ms:
        raise ConfigError(
            f"wal.s3_batch_min_ms is {settings.s3_batch_min_ms} and wal.s3_batch_max_ms {settings.s3_batch_max_ms}",
            hint="the smallest batch interval is at most the largest",
        )
    if not 1 <= settings.s3_in_flight <= MAX_IN_FLIGHT:
        raise ConfigError(f"wal.s3_in_flight is {settings.s3_in_flight}: 1 to {MAX_IN_FLIGHT}")
    if not 0 < settings.max_record_bytes <= MAX_PAYLOAD_BYTES:
        raise ConfigError(f"wal.max_record_bytes is {settings.max_record_bytes}: 1 to {MAX_PAYLOAD_BYTES:,}")
    if settings.max_bytes < settings.max_record_bytes + 2 * HEADER_BYTES:
        raise ConfigError(f"wal.max_bytes is {settings.max_bytes}: the largest record must fit")


class S3Wal(WalState):
    """See `tidelog.storage.wal.base.Wal`. The store is the caller's: close it after the WAL.

    `rng` must be seeded from the system's entropy outside of simulations: the writer id is drawn from it.
    """

    def __init__(
        self,
        store: ObjectStore,
        settings: WalSettings,
        *,
        cluster_id: str,
        replica_set_id: int,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__()
        check_settings(settings)
        self._settings = settings
        self._max_record_bytes = settings.max_record_bytes
        self._max_bytes = settings.max_bytes
        self._replica_set_id = replica_set_id
        self._clock = clock
        self._bucket = BucketLog(store, wal_prefix(cluster_id, replica_set_id), replica_set_id, clock, rng)
        self._origin = Origin(replica_set_id, -1, rng.getrandbits(8 * WRITER_ID_BYTES).to_bytes(WRITER_ID_BYTES, "big"))
        self._window = SendWindow(settings.s3_batch_bytes, settings.s3_in_flight)
        self._batch_timer = BatchTimer(settings.s3_batch_min_ms / 1000, settings.s3_batch_max_ms / 1000)
        self._tasks = TaskSet("storage.wal", self._on_defect)
        self._chain: Chain | None = None
        self._on_record: Callable[[WalRecord], None] = lambda _record: None
        self._reset_offset = -1
        self._header_confirm = 0
        self._flush_scheduled = False
        self._timer: asyncio.Task[None] | None = None
        self._switching = self._released = self._sweeping = False
        self._appends = self._puts = self._put_bytes = 0

    # State

    def stats(self) -> dict[str, int]:
        """Return metrics; bytes, counts and microseconds."""
        return {
            "appends": self._appends,
            "puts": self._puts,
            "put_bytes": self._put_bytes,
            "objects": self._window.live_objects,
            "in_flight": self._window.in_flight,
            "unsynced_bytes": self._end - self._durable,
            "record_bytes": self._end - self._start,
            "put_latency_us": round(self._batch_timer.latency_s * 1e6),
            "batch_interval_us": round(self._batch_timer.interval_s * 1e6),
        }

    def note_confirmed(self, confirm_offset: int) -> None:
        """See `Wal.note_confirmed`."""
        if confirm_offset > self._confirm:
            self._confirm = confirm_offset
            self._header_confirm = min(confirm_offset, self._durable)

    # Recovery and start

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """See `Wal.recover`. Waits while the bucket does not answer.

        An older writer may still be running: records that it appends until `begin_epoch` has fenced it are passed to
        `on_record` from there, in order.
        """
        assert self._chain is None, "recover is called only once"
        chain = await self._bucket.resolve()
        self._on_record = on_record
        self._chain = chain
        self._start = self._end = self._durable = chain.start_offset
        self._deliver(chain)
        return self._confirm

    def _deliver(self, chain: Chain) -> None:
        """Pass on the records of the chain beyond the end known so far."""
        if chain.objects and not chain.start_offset <= self._end <= chain.end_offset:
            raise WalFailed(
                f"the WAL was trimmed to {chain.start_offset} by another process while it was read",
                hint="start the broker again",
            )
        for one in chain.objects:
            if one.kind is ObjectType.DATA and one.wal_end > self._end:
                self._deliver_object(one)
        self._end = self._durable = max(self._end, chain.end_offset)

    def _deliver_object(self, one: WalObject) -> None:
        for header, position in one.headers():
            if header.wal_offset < self._end:
                continue
            if header.master_epoch > self._history.last_epoch:
                self._history.append(header.master_epoch, header.wal_offset)
            if header.confirm_offset > self._confirm:
                self._confirm = self._header_confirm = header.confirm_offset
            self._on_record(record_of(header, one.body, position))

    async def reset(self, offset: int, kept_as: str = "") -> None:
        """See `Wal.reset`. Takes effect with `begin_epoch`, atomically: the fence has the new start of the log."""
        assert self._chain is not None and self._epoch < 0 and offset >= 0
        self._check_usable()
        self._reset_offset = offset
        self._start = self._end = self._durable = offset
        self._confirm = self._header_confirm = offset
        self._history = EpochHistory()

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`: fences every older writer. Appends meanwhile raise `WalFull`.

        Raises `Fenced` for an epoch that is not newer than all in the bucket, `WalFailed`, `CorruptData`. Waits while
        the bucket does not answer.
        """
        assert self._chain is not None and not self._switching
        self._check_usable()
        last_epoch = max(self._chain.epoch, self._epoch)
        if epoch <= last_epoch:
            raise Fenced(f"master epoch {epoch} is not newer than {last_epoch}, which the WAL has seen")
        self._switching = True
        try:
            if self._epoch < 0:
                await self._take_over(self._chain, epoch)
            else:
                await self._go_on(epoch)
            self._history.append(epoch, self._end)
            self._epoch = epoch
        finally:
            self._switching = False
            self._wake()
        self._enqueue(_EPOCH_START, EPOCH_START, 0)
        await self._all_durable()

    async def _take_over(self, chain: Chain, epoch: int) -> None:
        self._origin = Origin(self._replica_set_id, epoch, self._origin.writer_id)
        reset_offset = self._reset_offset if chain.objects else self._end
        chain = await self._bucket.plant(self._origin, chain, reset_offset, self._deliver)
        if reset_offset < 0:
            self._deliver(chain)
        assert chain.end_offset == self._end
        self._chain = chain
        live = [(one.seq, one.wal_end) for one in chain.objects if one.kind is ObjectType.DATA]
        self._window.open(chain.hole, chain.first_seq, self._end, live)
        leftovers = self._bucket.leftovers(chain)
        self._bucket.forget()
        chain.objects.clear()
        self._on_record = lambda _record: None
        fields = {"replica_set": self._replica_set_id, "master_epoch": epoch, "wal_offset": self._end}
        logger.info("fenced older writers of the WAL in the bucket", extra={**fields, "seq": chain.hole})
        if leftovers:
            self._tasks.spawn(self._remove(leftovers), "clear")

    async def _go_on(self, epoch: int) -> None:
        """Begin a new epoch of the process that already is the writer: a fence at its own next place."""
        await self._all_durable()
        window, origin = self._window, Origin(self._replica_set_id, epoch, self._origin.writer_id)
        seq = window.next_seq
        fields = {"first_seq": window.first_seq, "durable_offset": self._end, "next_seq": seq + SPAN}
        if await self._bucket.create(seq, encode_fence(origin, seq=seq, **fields)) is Created.THEIRS:
            raise self._fail(self._shut_out(seq, await self._bucket.who(seq)))
        self._origin = origin
        window.next_seq = seq + SPAN

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
            or not self._has_space(length)
        ):
            self._refuse(length)
        self._appends += 1
        return self._enqueue(_DATA, record, length)

    def _has_space(self, length: int) -> bool:
        end = self._end
        return (
            end - self._durable <= _MAX_WAITING_BYTES and end - self._start + HEADER_BYTES + length <= self._max_bytes
        )

    async def writable(self, payload_bytes: int = 0) -> None:
        """Wait until an append of `payload_bytes` would not raise `WalFull`. Raises `WalFailed`, `Closed`."""
        while True:
            self._check_usable()
            if self._epoch >= 0 and not self._switching and self._has_space(payload_bytes):
                return
            await self._changed()

    def _refuse(self, length: int) -> None:
        """Raise the error that prevents an append."""
        self._check_usable()
        if length > self._max_record_bytes:
            raise InvalidInput(
                f"a WAL record of {length} bytes is over the limit of {self._max_record_bytes}",
                hint="send smaller batches or raise wal.max_record_bytes",
            )
        assert self._epoch >= 0 or self._switching, "begin_epoch must precede append"
        if self._switching:
            raise WalFull("the WAL enters a new master epoch", hint="retry")
        if self._end - self._durable > _MAX_WAITING_BYTES:
            raise WalFull(f"{self._end - self._durable} bytes wait for the bucket", hint="retry; the bucket is slow")
        raise WalFull("the WAL is at its bound (wal.max_bytes)", hint="retry; uploads to the bucket make room")

    def _enqueue(self, type: int, record: StreamAppend, length: int) -> int:
        offset = self._end
        header = encode_header(type, length, offset, self._header_confirm, self._epoch, record)
        self._window.add(offset, HEADER_BYTES + length, (header, *record.payload))
        self._end = offset + HEADER_BYTES + length
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        return self._end

    # Sending

    def _flush(self) -> None:
        """Send the batches that are due; set the timer for the next one."""
        self._flush_scheduled = False
        if self._failure is not None or self._released:
            return
        window = self._window
        while window.waiting and window.has_room:
            now = self._clock.monotonic()
            delay_s = self._batch_timer.delay_s(now, window)
            if delay_s > 0 and not self._closed and not self._switching:
                if self._timer is None:
                    self._timer = self._tasks.spawn(self._flush_later(delay_s), "timer")
                return
            batch = window.next_batch()
            assert batch is not None
            self._batch_timer.sent(now)
            self._tasks.spawn(self._put(batch), f"put-{batch.seq}")

    async def _flush_later(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self._timer = None
        self._flush()

    async def _put(self, batch: Batch) -> None:
        """Put one batch into the bucket, or detect that this writer has been fenced."""
        data = encode_data(
            self._origin,
            seq=batch.seq,
            first_seq=batch.first_seq,
            wal_start=batch.wal_start,
            wal_end=batch.wal_end,
            durable_offset=self._durable,
            records=batch.records,
            body=batch.buffers,
        )
        batch.buffers = []
        self._puts += 1
        self._put_bytes += len(data)
        started = self._clock.monotonic()
        try:
            created = await self._bucket.create(batch.seq, data)
            if created is Created.THEIRS:
                raise self._shut_out(batch.seq, await self._bucket.who(batch.seq))
        except TidelogError as error:
            self._fail(error)
            return
        self._batch_timer.observe(self._clock.monotonic() - started)
        self._landed(batch)

    def _landed(self, batch: Batch) -> None:
        if self._failure is not None:
            return
        if self._window.landed(batch):
            moved = self._window.durable_offset > self._durable
            self._durable = self._window.durable_offset
            self._header_confirm = min(self._confirm, self._durable)
            if self._waiters:
                self._wake()
            if moved:
                self._on_durable(self._durable)
            self._sweep()
        self._flush()

    def _shut_out(self, seq: int, found: WalObject | None) -> Fenced:
        who = f"a {found.kind.name} object of master epoch {found.master_epoch}" if found else "an object"
        return Fenced(
            f"{self._bucket.key(seq)} is {who} by another writer: master epoch {self._epoch} has ended",
            hint="another broker is master of this replica set now",
        )

    # Failures and waiting

    def _on_defect(self, error: BaseException) -> None:
        self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _fail(self, error: Exception) -> WalFailed:
        message = f"the WAL in the bucket failed: {error}"
        return self._end_with(WalFailed(message, hint="restart the broker: acknowledged records are recovered"), error)

    def _drop_pending(self) -> None:
        self._window.clear()

    async def _all_durable(self) -> None:
        """Wait until everything appended so far is in the bucket. Raises `WalFailed`."""
        target = self._end
        self._flush()
        while self._durable < target:
            self._check_failure()
            await self._changed()

    # Trimming and closing

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`. Whole objects before `offset` are deleted, in the background. Raises `WalFailed`.

        That they are not needed is first recorded in an object: the next one, or an empty one if nothing is in
        flight.
        """
        self._check_usable()
        assert offset <= self._durable, f"trim to {offset}, past the durable end {self._durable}"
        if offset <= self._start:
            return
        self._start = offset
        self._window.trim(offset)
        self._history.forget_before(offset)
        self._wake()
        self._sweep()

    def _sweep(self) -> None:
        """Delete the objects that may be deleted."""
        if self._window.wants_carrier and self._epoch >= 0 and not self._closed:
            self._window.add_carrier()
            self._flush()
        if self._window.has_deletable and not self._sweeping and not self._closed:
            self._sweeping = True
            self._tasks.spawn(self._delete(), "sweep")

    async def _delete(self) -> None:
        try:
            while places := self._window.deletable():
                await self._remove(places)
        finally:
            self._sweeping = False

    async def _remove(self, places: list[int]) -> None:
        """Delete objects that the log does not need. If that fails, they cost a little storage until the next start
        deletes them; nothing depends on it."""
        try:
            await self._bucket.delete(places)
        except TidelogError as error:
            logger.warning("WAL objects cannot be deleted", extra={"replica_set": self._replica_set_id, "error": error})

    async def close(self) -> None:
        """See `Wal.close`. Waits a bounded time for the bucket: records that have not landed were never acknowledged.

        Raises `WalFailed` if closing fails.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._epoch >= 0 and self._failure is None:
                async with asyncio.timeout(_CLOSE_WAIT_S):
                    await self._all_durable()
        except TimeoutError:
            fields = {"replica_set": self._replica_set_id, "bytes": self._end - self._durable}
            logger.warning("the end of the WAL did not reach the bucket; it was not acknowledged", extra=fields)
        finally:
            self._released = True
            self._wake()
            await self._tasks.close()
