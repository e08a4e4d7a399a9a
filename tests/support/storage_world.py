"""A `Storage` with everything around it in memory: a WAL that survives crashes, a bucket and a controller that fail on
request, and a clock on which waiting takes no time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.fake_objects import FakeObjects
from tests.support.fake_wal import FakeWal, WalMedia
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectInfo, View
from tidelog.storage.commits import ObjectSlice
from tidelog.storage.inputs import LocalStreams, ReplicaSetData, StorageEvents, no_facts
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.report import verify_bytes
from tidelog.storage.records import StreamAppend, StreamEntry
from tidelog.storage.settings import CacheSettings, StorageSettings, UploadSettings
from tidelog.storage.storage import Storage

CLUSTER = "cluster-a"
REPLICA_SET = 1


class FastClock:
    """Sleeping moves the clock and lets others run, no more."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def time_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


class FaultyStore(MemoryObjectStore):
    """A bucket that can refuse puts, be held up, and counts its GETs."""

    def __init__(self, clock: FastClock) -> None:
        super().__init__(clock)
        self.fail_puts = 0
        self.gate: asyncio.Event | None = None
        """Set: puts wait for it."""
        self.get_gate: asyncio.Event | None = None
        self.gets: list[tuple[str, int, int]] = []
        self.fail_gets = 0
        self.flip_next_get: int | None = None
        """Flip a bit of this byte of the next answer."""

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.fail_puts:
            self.fail_puts -= 1
            raise Unavailable("503 on purpose")
        info = await super().put(key, body, if_absent=if_absent)
        await asyncio.sleep(0)
        return info

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        self.gets += [(key, start, end) for start, end in ranges]
        await asyncio.sleep(0)
        if self.get_gate is not None:
            await self.get_gate.wait()
        if self.fail_gets:
            self.fail_gets -= 1
            raise Unavailable("503 on purpose")
        answers = await super().get_ranges(key, ranges)
        if self.flip_next_get is not None:
            bad = bytearray(answers[0])
            bad[self.flip_next_get % len(bad)] ^= 4
            self.flip_next_get = None
            answers[0] = bytes(bad)
        return answers


async def inline(work: Callable[[], Any]) -> Any:
    """Run CPU work here: the tests want one order of events."""
    await asyncio.sleep(0)
    return work()


class World:
    """What outlives a process, and the process."""

    def __init__(self, **upload: int) -> None:
        self.clock = FastClock()
        self.media = WalMedia()
        self.store = FaultyStore(self.clock)
        self.objects = FakeObjects(clock=self.clock)
        self.objects.master_epoch = 0
        settings = {"size_bytes": 1000, "age_ms": 3_600_000, "split_bytes": 400, "block_bytes": 200, **upload}
        self.upload = UploadSettings(**settings)
        self.cache = CacheSettings(log_bytes=1 << 20, block_bytes=1 << 20)
        self.acked: dict[int, list[StreamEntry]] = {}
        """What a client was told is durable, by stream."""
        self.stream_epoch = 0
        self.fenced: list[Exception] = []
        self.wal_failed: list[Exception] = []
        self.quarantined: list[tuple[int, str]] = []
        self.owns_stream: Callable[[int], bool] | None = None
        self.stream_facts: Callable[[int], tuple[int, int] | None] | None = None
        self.wal: FakeWal
        self.storage: Storage

    async def boot(self, streams: Sequence[int] = (), *, done: bool = True, **wal: Any) -> Storage:
        """Start a process on what is there: election, recovery, open."""
        self.wal = FakeWal(self.media, **wal)
        self.storage = Storage(
            ReplicaSetData(CLUSTER, REPLICA_SET, self.wal, self.store, self.objects),
            StorageSettings(self.upload, self.cache),
            self.clock,
            random.Random(1),
            streams=LocalStreams(self.owns_stream, self.stream_facts or no_facts),
            events=StorageEvents(
                fenced=self.fenced.append,
                wal_failed=self.wal_failed.append,
                quarantined=lambda stream, reason: self.quarantined.append((stream, reason)),
            ),
            offload=inline,
        )
        self.objects.master_epoch += 1
        self.stream_epoch += 1
        await self.storage.recover()
        await self.storage.start(self.objects.master_epoch)
        for stream in streams:
            self.open(stream)
        if done:
            self.storage.recovered_done()
        return self.storage

    def open(self, stream: int, *, owner_since: int = 0, start: int = 0) -> int:
        end = self.objects.ends.get(stream, 0)
        return self.storage.open_stream(stream, self.stream_epoch, start, end, owner_since)

    def append(self, stream: int, payload: bytes, count: int = 1) -> int:
        """Append and, when it is confirmed, note it as acknowledged. Returns the WAL end."""
        base = self.next_offset(stream)
        wal_end = self.storage.append(StreamAppend(stream, self.stream_epoch, base, count, [payload]))
        record = StreamEntry(base, count, payload)
        self.storage.confirm.add_listener(wal_end, lambda: self.acked.setdefault(stream, []).append(record))
        return wal_end

    def next_offset(self, stream: int) -> int:
        return self.storage.offsets(stream)[1]

    async def crash(self) -> None:
        """Everything that runs stops where it is."""
        self.wal.kill()
        me = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not me]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def read_all(self, stream: int, max_bytes: int = 500) -> list[StreamEntry]:
        """A consumer from the stream's start to its end."""
        out: list[StreamEntry] = []
        end = self.next_offset(stream)
        offset = self.storage.offsets(stream)[0]
        while offset < end:
            records = await self.storage.read(stream, offset, end, max_bytes)
            assert records, f"stream {stream} stops at {offset}, before {end}"
            assert records[0].base_offset <= offset
            out += [record._replace(payload=bytes(record.payload)) for record in records]
            offset = out[-1].base_offset + out[-1].count
        return out

    def bucket_ranges(self, stream: int) -> list[ObjectSlice]:
        return self.objects.slices.get(stream, [])

    async def check(self) -> None:
        """Committed WAL ranges and stream ranges are contiguous, and every object in the metadata is right."""
        position = 0
        for commit in self.objects.commits:
            assert commit.wal_start == position
            position = commit.wal_end
        for slices in self.objects.slices.values():
            end = 0
            for one in slices:
                assert one.start_offset == end
                end = one.end_offset
                key = object_key(CLUSTER, one.object_id)
                body = await self.store.get(key)
                assert len(body) == one.size
                assert verify_bytes(body, key) == []
        assert not self.media.trims or self.media.trims[-1] <= position, "rule 3"


async def until(condition: Callable[[], bool], ticks: int = 20_000) -> None:
    """Let others run until it is so."""
    for _ in range(ticks):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became so")
