"""Compaction with everything around it: the real state machine and image, a bucket that fails on request, real readers.

world = CompactionWorld()
stream, *_ = world.topic("t")
await world.upload({stream: [b"payload", …]})
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tests.support.storage_world import FastClock, FaultyStore, inline
from tidelog.broker.objects.compaction_view import ImageView
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import from_wire
from tidelog.controller.model.records import ObjectState
from tidelog.runtime.errors import Unavailable
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.cleaning.deleter import ObjectCleaner
from tidelog.storage.commits import CommitObjects, CompactObjects, ObjectKind, ObjectSlice
from tidelog.storage.compaction.compactor import CommittingTerm, CompactedData, Compactor
from tidelog.storage.objects.key import object_key, object_prefix, parse_object_key
from tidelog.storage.objects.report import verify_bytes
from tidelog.storage.objects.writer import build_object
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import CompactionSettings, UploadSettings

CLUSTER = "cluster-of-the-compaction"
DELAY_MS = 60_000
TTL_MS = 600_000
SMALL: dict[str, Any] = {
    "min_objects": 3,
    "max_objects": 16,
    "age_ms": 3_600_000,
    "target_bytes": 16 << 10,
    "stream_bytes": 4 << 10,
    "throttle_bytes_per_s": 1 << 40,
}


class Metadata:
    """The controller, applied at once; and a copy of the image that may lag behind."""

    def __init__(self, clock: FastClock) -> None:
        self.clock = clock
        self.state = ControllerState()
        self.image = Image()
        self.index = 0
        self.on_call: Callable[[str], None] = lambda what: None
        self.fail_before = 0
        self.fail_after = 0
        self.cut_off = False
        """Whether no controller can prove that the metadata is current."""
        self.apply(c.BecomeActive(0, 1, CLUSTER, DELAY_MS))

    def apply(self, command: c.AnyCommand, kind: Any = Any) -> Any:
        self.index += 1
        envelope = c.Envelope(c.FORMAT_VERSION, 1, self.clock.time_ms(), "", 0, 0, command)
        applied = self.state.apply(envelope, self.index)
        self.image.apply(Delta(self.index, applied.mutations))
        result = c.decode_result(applied.result)
        if result.error is not None:
            raise from_wire(result.error)
        return msgspec.msgpack.decode(result.value, type=kind)

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        await asyncio.sleep(0)
        self.on_call("prepare")
        first: int = self.apply(c.PrepareObjects(count, ttl_ms), int)
        await asyncio.sleep(0)
        return first

    async def compact_objects(self, compaction: CompactObjects) -> None:
        await asyncio.sleep(0)
        self.on_call("compact")
        if self.fail_before:
            self.fail_before -= 1
            raise Unavailable("on purpose, before it happened")
        self.apply(c.Compact(compaction))
        if self.fail_after:
            self.fail_after -= 1
            raise Unavailable("on purpose, after it happened")
        await asyncio.sleep(0)

    def check_current(self) -> None:
        """The metadata is current here."""

    async def catch_up(self) -> None:
        if self.cut_off:
            raise Unavailable("no controller answers")

    def is_held(self, object_id: int) -> bool:
        return self.image.is_held(object_id)

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        return self.image.resolve(stream_id, start_offset, end_offset)

    def find_objects(self, stream_id: int, start: int, end: int, limit: int) -> Sequence[ObjectSlice]:
        return self.image.find_objects(stream_id, start, end, limit)

    async def commit_objects(self, commit: CommitObjects) -> None:
        self.apply(c.Commit(commit))

    def committed_wal_offset(self, replica_set_id: int) -> int:
        return self.image.replica_sets[replica_set_id].committed_wal_offset

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        raise AssertionError("nothing is quarantined here")

    def quarantined(self, stream_id: int) -> str:
        return ""


class OldImage:
    """The metadata as a reader far behind has it."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.image = Image()
        self.cut_off = False
        """Whether no controller answers."""
        self.grace_is_over = False
        self.load()

    def load(self) -> None:
        mutations = self.image.difference(self.metadata.image)
        self.image.apply(Delta(self.metadata.image.version, mutations))

    def check_current(self) -> None:
        if self.grace_is_over:
            raise Unavailable("no controller was heard of for the grace")

    async def catch_up(self) -> None:
        if self.cut_off:
            raise Unavailable("no controller answers")
        self.load()

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        return self.image.resolve(stream_id, start_offset, end_offset)

    def find_objects(self, stream_id: int, start: int, end: int, limit: int) -> Sequence[ObjectSlice]:
        return self.image.find_objects(stream_id, start, end, limit)

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        raise AssertionError("a reader prepares nothing")

    async def commit_objects(self, commit: CommitObjects) -> None:
        raise AssertionError("a reader commits nothing")

    def committed_wal_offset(self, replica_set_id: int) -> int:
        raise AssertionError("a reader has no WAL")

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        raise AssertionError("a reader quarantines nothing")

    def quarantined(self, stream_id: int) -> str:
        return ""


class CompactionWorld:
    """One replica set with open streams whose data is in the bucket."""

    def __init__(self, store: ObjectStore | None = None, **settings: Any) -> None:
        self.clock = FastClock()
        self.faulty = FaultyStore(self.clock)
        self.store: ObjectStore = store if store is not None else self.faulty
        self.metadata = Metadata(self.clock)
        self.settings = CompactionSettings(**{**SMALL, **settings})
        self.rng = random.Random(7)
        self.epoch = 0
        self.acked: dict[int, list[StreamEntry]] = {}
        self.excluded: dict[int, str] = {}
        self.busy = False
        self.become_master()

    @property
    def image(self) -> Image:
        return self.metadata.image

    def become_master(self) -> None:
        self.metadata.apply(c.RegisterBroker(0, "check", f"run {self.epoch}", "host", 9092, "", ""), int)
        self.epoch = int(self.metadata.apply(c.Elect(0, 0))[4])

    def topic(self, name: str, partitions: int = 1) -> list[int]:
        """Create a topic and open its streams; the data stream of each partition."""
        topic_id = name.encode().ljust(16, b".")
        self.metadata.apply(c.CreateTopic(topic_id, name, partitions, {}, False, False, None))
        firsts = [each.first_stream for each in self.image.partitions(topic_id)]
        pairs = tuple((first + part, self.epoch) for first in firsts for part in range(4))
        self.metadata.apply(c.OpenStreams(0, self.epoch, pairs))
        return [first + 1 for first in firsts]

    def delete_topic(self, name: str) -> None:
        self.metadata.apply(c.DeleteTopic(name.encode().ljust(16, b".")))

    def trim(self, stream: int, offset: int) -> None:
        self.metadata.apply(c.TrimStream(stream, self.image.streams[stream].epoch, offset))

    async def upload(self, payloads: Mapping[int, Sequence[bytes]], alone: Sequence[int] = ()) -> list[int]:
        """One upload: a stream-set object, and an object for each stream in `alone`; their ids."""
        parts = []
        for stream, bodies in sorted(payloads.items()):
            log = self.acked.setdefault(stream, [])
            offset = log[-1].base_offset + log[-1].count if log else 0
            records = []
            for body in bodies:
                records.append(StreamEntry(offset, 1 + len(body) % 3, body))
                offset += records[-1].count
            log += records
            parts.append((stream, records))
        groups = [(ObjectKind.STREAM, [part]) for part in parts if part[0] in alone]
        shared = [part for part in parts if part[0] not in alone]
        if shared:
            groups.append((ObjectKind.STREAM_SET, shared))
        first = self.metadata.apply(c.PrepareObjects(len(groups), TTL_MS), int)
        objects = []
        for number, (kind, group) in enumerate(groups):
            built = build_object(
                object_id=first + number,
                kind=kind,
                cluster_id=CLUSTER,
                created_ms=self.clock.time_ms(),
                parts=group,
                block_bytes=512,
            )
            await self.store.put(object_key(CLUSTER, built.object_id), built.body)
            objects.append(built.as_new_object())
        wal = self.image.replica_sets[0].committed_wal_offset
        self.metadata.apply(c.Commit(CommitObjects(0, self.epoch, wal, wal + 1, tuple(objects))))
        return [one.object_id for one in objects]

    async def fill(self, streams: Sequence[int], uploads: int, size: int = 200) -> None:
        """Many small uploads of random payloads."""
        for _ in range(uploads):
            payloads = {
                stream: [self.rng.randbytes(self.rng.randrange(1, size)) for _ in range(self.rng.randrange(1, 4))]
                for stream in streams
            }
            await self.upload(payloads)

    def compactor(self, *, loops: bool = False, **more: Any) -> Compactor:
        """A compactor of the master, which acts when it is asked to. `loops`: by itself, when it is started."""
        arguments = {"offload": inline, **more}
        term = CommittingTerm(0, self.epoch)
        compactor = Compactor(
            CompactedData(
                CLUSTER,
                lambda: term,
                self.store,
                self.metadata,
                ImageView(lambda: self.image, lambda: (0,)),
            ),
            self.settings if loops else msgspec.structs.replace(self.settings, enabled=False),
            UploadSettings(block_bytes=1024, prepare_ttl_ms=TTL_MS),
            self.clock,
            random.Random(3),
            busy=lambda: self.busy,
            on_excluded=self.excluded.__setitem__,
            **arguments,
        )
        if not loops:
            compactor.start()
        return compactor

    async def settle(self, *, eager: bool = False) -> Compactor:
        """Compact until nothing is left to do."""
        compactor = self.compactor()
        for _ in range(100):
            if await compactor.run(eager=eager) == 0:
                return compactor
        raise AssertionError("it never came to an end")

    def reader(self, metadata: Any = None) -> BlockReader:
        return BlockReader(
            store=self.store,
            objects=metadata or self.metadata,
            clock=self.clock,
            cluster_id=CLUSTER,
            cache_bytes=1 << 20,
            offload=inline,
        )

    async def read(self, stream: int, reader: BlockReader, max_bytes: int = 700) -> list[StreamEntry]:
        """Everything of a stream from its start to its committed end, by small reads."""
        record = self.image.streams[stream]
        offset, out = record.start_offset, []
        while offset < record.end_offset:
            records = await reader.read(stream, offset, record.end_offset, max_bytes)
            assert records, f"stream {stream} stops at {offset}"
            assert records[0].base_offset <= offset
            out += [one._replace(payload=bytes(one.payload)) for one in records]
            offset = out[-1].base_offset + out[-1].count
        return out

    async def check(self) -> None:
        """Every stream reads as it was written, from its start; every named object is sound."""
        for stream, wanted in self.acked.items():
            record = self.image.streams.get(stream)
            if record is None:
                continue
            reader = self.reader()
            kept = [one for one in wanted if one.base_offset + one.count > record.start_offset]
            assert await self.read(stream, reader) == kept
            await reader.close()
        for each in self.image.objects.values():
            if each.state == ObjectState.COMMITTED:
                key = object_key(CLUSTER, each.id)
                body = await self.store.get(key)
                assert len(body) == each.size
                assert verify_bytes(body, key) == []

    def expire(self, object_id: int) -> None:
        """As the active controller does when the time of a prepared id is over."""
        self.metadata.apply(c.ExpireObjects((object_id,)))

    async def lifecycle(self) -> None:
        """As the active controller does: expire, delete what is due, forget it."""
        index, now_ms = self.image.index, self.clock.time_ms()
        self.metadata.apply(c.ExpireObjects(tuple(sorted(index.prepared))))
        due = [one for one in sorted(index.destroyed) if self.image.objects[one].expires_ms <= now_ms]
        if due:
            await ObjectCleaner(self.store, CLUSTER).delete(due)
            self.metadata.apply(c.ForgetObjects(tuple(due)))

    async def pass_time(self) -> None:
        """So much that whatever is given up or destroyed is gone."""
        for _ in range(3):
            self.clock.now_s += (TTL_MS + DELAY_MS) / 1000 + 1
            await self.lifecycle()

    async def in_bucket(self) -> set[int]:
        found = [parse_object_key(info.key) async for info in self.store.list(object_prefix(CLUSTER))]
        return {one[1] for one in found if one is not None}

    def committed(self) -> set[int]:
        return {one.id for one in self.image.objects.values() if one.state == ObjectState.COMMITTED}
