"""An in-memory stand-in for `tidelog.storage.storage.Storage` and the controller's streams, for faults that need
control.

`FakeWorld` is what survives a crash: the WAL's records, in order, and the start of each stream. A `FakeStorage` is one
process on it. Confirming is automatic or by hand; appends can be refused, reads can be made cold or fail.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.storage.cache.log_cache import UnconfirmedRecord
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.history import WalHistory
from tidelog.storage.records import OffsetTrimmed, StreamAppend, StreamEntry
from tidelog.stream.log_config import LogConfig
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_log import LedPartition, PartitionLog


class FakeClock:
    """Time that moves when it is told to."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def time_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000

    async def sleep(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)


@dataclass
class FakeWorld:
    """The durable part: `(stream id, record)` in WAL order, and the trimmed starts."""

    wal: list[tuple[int, StreamEntry]] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    confirmed: int = 0
    epoch: int = 0
    released: dict[int, int] = field(default_factory=dict)
    """Where streams ended when a quarantine was lifted."""
    uploaded: int | None = None
    """How many records the bucket holds; None: all that are confirmed."""
    feature_level: int = 1

    def crash(self, keep: int | None = None) -> None:
        """Cut the WAL to `keep` records, at least the confirmed ones (default: exactly those)."""
        del self.wal[max(self.confirmed, keep or 0) :]
        self.confirmed = len(self.wal)

    def opened(self, stream_id: int) -> OpenedStream:
        start = self.starts.get(stream_id, 0)
        return OpenedStream(stream_id, self.epoch, start, start, 0, self.released.get(stream_id, -1))

    def release(self, stream_id: int, end: int) -> None:
        """An operator lets a stream go on at `end`, without what was beyond it."""
        self.wal = [(one, record) for one, record in self.wal if one != stream_id or record.base_offset < end]
        self.confirmed = len(self.wal)
        self.released[stream_id] = end


@dataclass
class HeldRead:
    """The next cold read of a stream: it waits before it looks."""

    stream_id: int
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class FakeStorage:
    """One process's storage over a world. A WAL offset is the number of records before it."""

    def __init__(self, world: FakeWorld, *, auto_confirm: bool = True) -> None:
        self.world = world
        self.auto_confirm = auto_confirm
        self.confirm = self.durable = ConfirmOffset(world.confirmed)
        self.history = WalHistory(FakeClock())
        self.hot = True
        self.replica_set_id = 0
        self.master_epoch = 1
        self.refusals: list[TidelogError] = []
        """What the next appends raise, one each."""
        self.missing: TidelogError | None = None
        """What `check_writable` raises, if replicas are missing."""
        self.reads = 0
        """Cold reads so far."""
        self.held: HeldRead | None = None
        self.gates: dict[int, asyncio.Event] = {}
        """By stream: what its next cold read waits for; taken out when that read begins."""
        self.records: dict[int, list[StreamEntry]] = {}
        self._tails: dict[int, list[UnconfirmedRecord]] = {}
        for wal_end, (stream_id, record) in enumerate(world.wal, start=1):
            self.records.setdefault(stream_id, []).append(record)
            if wal_end > world.confirmed:
                end = record.base_offset + record.count
                self._tails.setdefault(stream_id, []).append(UnconfirmedRecord(record.base_offset, end, wal_end))
        self.opened: set[int] = set()
        self.dropped: set[int] = set()
        self.forgotten: dict[int, int] = {}
        """By stream: the offset before which compacted records are read from the bucket."""

    def open_stream(self, stream_id: int, epoch: int, start_offset: int, end_offset: int, owner_since: int) -> int:
        assert stream_id not in self.opened
        self.opened.add(stream_id)
        records = self.records.setdefault(stream_id, [])
        return records[-1].base_offset + records[-1].count if records else start_offset

    def unconfirmed(self, stream_id: int) -> list[UnconfirmedRecord]:
        return [each for each in self._tails.get(stream_id, []) if each.wal_end > self.confirm.value]

    def close_stream(self, stream_id: int) -> None:
        self.opened.discard(stream_id)

    def forget_before(self, stream_id: int, offset: int) -> None:
        self.forgotten[stream_id] = offset

    def drop_stream(self, stream_id: int) -> None:
        self.dropped.add(stream_id)

    def append(self, record: StreamAppend) -> int:
        stream_id, base_offset, payload = record.stream_id, record.base_offset, record.payload
        assert stream_id in self.opened
        if self.refusals:
            raise self.refusals.pop(0)
        records = self.records[stream_id]
        if records:
            assert base_offset == records[-1].base_offset + records[-1].count
        whole = payload[0] if len(payload) == 1 else b"".join(payload)
        entry = StreamEntry(base_offset, record.count, memoryview(whole).toreadonly())
        records.append(entry)
        self.world.wal.append((stream_id, entry))
        if self.auto_confirm:
            self.confirm_all()
        return len(self.world.wal)

    def confirm_all(self) -> None:
        self.confirm_to(len(self.world.wal))

    def confirm_to(self, wal_end: int) -> None:
        self.world.confirmed = max(self.world.confirmed, wal_end)
        self.confirm.advance(wal_end)

    @property
    def committed_offset(self) -> int:
        uploaded = self.world.uploaded
        return self.world.confirmed if uploaded is None else uploaded

    def check_writable(self, min_in_sync: int) -> None:
        """Raise what is set, whatever the topic asks for."""
        if self.missing is not None:
            raise self.missing

    async def writable(self) -> None:
        return None

    def _find(self, stream_id: int, start: int, end: int, max_bytes: int) -> list[StreamEntry]:
        if start < self.world.starts.get(stream_id, 0):
            raise OffsetTrimmed(f"stream {stream_id}: {start} is trimmed")
        found: list[StreamEntry] = []
        size = 0
        for record in self.records[stream_id]:
            if record.base_offset + record.count <= start:
                continue
            size += len(record.payload)
            if record.base_offset >= end or (found and size > max_bytes):
                break
            found.append(record)
        return found

    def read_hot(self, stream_id: int, start: int, end: int, max_bytes: int) -> list[StreamEntry] | None:
        return self._find(stream_id, start, end, max_bytes) if self.hot else None

    async def read(
        self, stream_id: int, start: int, end: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry]:
        await asyncio.sleep(0)
        if self.held is not None and self.held.stream_id == stream_id:
            held, self.held = self.held, None
            held.reached.set()
            await held.released.wait()
        self.reads += 1
        gate = self.gates.pop(stream_id, None)
        if gate is not None:
            await gate.wait()
        return self._find(stream_id, start, end, max_bytes)

    def tail(self, stream_id: int, max_bytes: int) -> list[StreamEntry]:
        found: list[StreamEntry] = []
        for record in reversed(self.records[stream_id]):
            max_bytes -= len(record.payload)
            if max_bytes < 0:
                break
            found.append(record)
        return found[::-1]

    def set_trimmed(self, stream_id: int, start_offset: int) -> None:
        assert self.world.starts[stream_id] >= start_offset


class FakeManager:
    """The controller's stream calls, over a world."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.away = False

    @property
    def feature_level(self) -> int:
        return self.world.feature_level

    async def trim_stream(
        self, replica_set_id: int, master_epoch: int, stream_id: int, epoch: int, start_offset: int
    ) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("the controller does not answer")
        self.world.starts[stream_id] = max(self.world.starts.get(stream_id, 0), start_offset)


META, DATA, TIME, TXN = 0, 1, 2, 3


class Process:
    """One process with one partition log on a world."""

    def __init__(self, world: FakeWorld, clock: FakeClock, *, auto_confirm: bool = True) -> None:
        self.world = world
        self.clock = clock
        world.epoch += 1
        self.storage = FakeStorage(world, auto_confirm=auto_confirm)
        self.manager = FakeManager(world)

    async def open(self, config: LogConfig | None = None, first_stream: int = 0, partition: int = 0) -> PartitionLog:
        ids = range(first_stream, first_stream + 4)
        meta, data, time, txn = (self.world.opened(stream_id) for stream_id in ids)
        return await PartitionLog.open(
            led=LedPartition("t", bytes(16), partition, self.world.epoch),
            streams=(meta, data, time, txn),
            storage=self.storage,  # type: ignore[arg-type]
            manager=self.manager,  # type: ignore[arg-type]
            config=config or LogConfig(),
            clock=self.clock,
        )
