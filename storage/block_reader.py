"""Reads streams from the bucket, by block.

A read finds its objects in the local metadata, their blocks in the objects' indexes, and the blocks in the cache or the
bucket. Neighbouring blocks are fetched by one GET; a block is fetched once however many readers want it; a reader that
reads on where it stopped finds the next blocks on their way (`storage.read_ahead`). A block or index is checked before
it is cached; a block that fails is asked for a second time (a bad transfer) and then refused as `CorruptData`, never
served.

A small object comes whole with its tail, so that it costs one GET.

Memory: the block cache takes 15/16 of its bound, indexes the rest; GETs in flight are bounded in number and each in
size (a block larger than that comes alone).

Entry: `BlockReader.read`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from runtime.clock import Clock
from runtime.errors import Closed, CorruptData, TidelogError
from runtime.tasks import TaskSet
from storage.block_cache import ByteLru, Flights
from storage.managers import ObjectManager, ObjectSlice
from storage.object_format import Block, IndexEntry, ObjectIndex, corrupt
from storage.object_key import object_key
from storage.object_reader import get_range, load_tail
from storage.object_store import ObjectNotFound, ObjectStore
from storage.read_ahead import ReadAhead
from storage.records import StreamRecord

log = logging.getLogger(__name__)

MAX_GET_BYTES = 4 << 20
"""Neighbouring blocks are merged into one GET up to this size: larger ones gain nothing and delay the first byte."""
MAX_GETS = 32
"""GETs of cold reads in flight; the rest waits, so that uploads find free connections."""
_MAX_OBJECTS = 8
"""Objects one read touches at most; it then returns what it has."""
_ATTEMPTS = 4
"""How often a read is tried when an object is gone: compaction may have replaced it (rule 6)."""
_RETRY_S = 0.05


class BlockRef(NamedTuple):
    """A block of an object in the bucket."""

    object_id: int
    key: str
    entry: IndexEntry

    @property
    def id(self) -> tuple[int, int]:
        """What names the block in caches: object id and byte position."""
        return self.object_id, self.entry.position


class BlockReader:
    """Committed data of any stream. All methods are called on the event loop's thread."""

    def __init__(
        self, *, store: ObjectStore, objects: ObjectManager, clock: Clock, cluster_id: str, cache_bytes: int
    ) -> None:
        self._store = store
        self._objects = objects
        self._clock = clock
        self._cluster_id = cluster_id
        self._blocks: ByteLru[tuple[int, int], Block] = ByteLru(cache_bytes - cache_bytes // 16)
        self._indexes: ByteLru[int, ObjectIndex] = ByteLru(cache_bytes // 16)
        self._block_flights: Flights[tuple[int, int], Block] = Flights()
        self._index_flights: Flights[int, ObjectIndex] = Flights()
        self._gets = asyncio.Semaphore(MAX_GETS)
        self._ahead = ReadAhead(cache_bytes // 4)
        self._tasks = TaskSet("storage.read")
        self._closed = False
        self.get_count = 0
        self.get_bytes = 0

    def stats(self) -> dict[str, int]:
        """Counts and bytes for metrics."""
        return {
            "block_cache_bytes": self._blocks.bytes + self._indexes.bytes,
            "block_cache_hits": self._blocks.hits,
            "block_cache_misses": self._blocks.misses,
            "block_gets": self.get_count,
            "block_get_bytes": self.get_bytes,
        }

    async def close(self) -> None:
        """Stop what is in flight; readers that wait get `Closed`."""
        self._closed = True
        await self._tasks.close()
        self._block_flights.land_all(self._closed_error())
        self._index_flights.land_all(self._closed_error())

    def _closed_error(self) -> Closed:
        return Closed("the block reader is closed")

    async def read(self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamRecord]:
        """Records from the one that contains `start_offset`: at least one, then up to `max_bytes`, all before
        `end_offset`. Empty when no object holds `start_offset`.

        Raises `CorruptData`, `Unavailable`, `Closed`.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return await self._read(stream_id, start_offset, end_offset, max_bytes)
            except ObjectNotFound as error:
                log.warning("object is gone, looking again", extra={"stream": stream_id, "error": error})
                missing = error
            await self._clock.sleep(_RETRY_S * (1 << attempt))
        raise CorruptData(
            f"stream {stream_id} at offset {start_offset}: the metadata names an object that is not in the bucket: "
            f"{missing}",
            hint="was something deleted from the bucket by hand?",
        ) from missing

    async def _read(self, stream_id: int, start: int, end: int, max_bytes: int) -> list[StreamRecord]:
        sequence = self._ahead.take(stream_id, start)
        flights = self._fetch(await self._locate(stream_id, start, end, max_bytes))
        records: list[StreamRecord] = []
        left = max_bytes
        for flight in flights:
            block = flight if isinstance(flight, Block) else await Flights.outcome(flight)
            left = _take(block, start, end, left, records)
            if left <= 0:
                break
        if records and not self._closed:
            following = records[-1].base_offset + records[-1].count
            window_bytes = sequence.read_on(max_bytes - left)
            if window_bytes > 0 and following < end:
                self._tasks.spawn(self._read_ahead(stream_id, following, end, window_bytes), "ahead")
            self._ahead.give(stream_id, following, sequence)
        return records

    async def _read_ahead(self, stream_id: int, start: int, end: int, size: int) -> None:
        """Bring the next `size` bytes of blocks into the cache; a failure is left to the read that needs them."""
        try:
            refs = await self._locate(stream_id, start, end, size)
        except TidelogError as error:
            log.debug("read-ahead stopped", extra={"stream": stream_id, "error": error})
            return
        refs = [ref for ref in refs if ref.id not in self._blocks and ref.id not in self._block_flights]
        refs = refs[: self._ahead.admit([ref.entry.length for ref in refs])]
        try:
            for flight in self._fetch(refs):
                if not isinstance(flight, Block):
                    await asyncio.shield(flight)
        finally:
            self._ahead.done(sum(ref.entry.length for ref in refs))

    # -- where the blocks are

    async def _locate(self, stream_id: int, start: int, end: int, max_bytes: int) -> list[BlockRef]:
        """The blocks that hold `[start, end)`, in order, as far as the metadata knows them without a hole.

        Stops with the block that brings them to `max_bytes`, of the first counting what lies after `start` (judged by
        offsets), and after a few objects.
        """
        refs: list[BlockRef] = []
        offset, touched, size = start, 0, 0
        while offset < end and touched < _MAX_OBJECTS:
            slices = self._objects.find_objects(stream_id, offset, end, _MAX_OBJECTS - touched)
            before = offset
            for one in slices:
                if not one.start_offset <= offset < one.end_offset:
                    break
                touched += 1
                index = await self._index(one, stream_id)
                for ref in self._refs(one, index, stream_id, offset, end):
                    size += ref.entry.length if refs else _bytes_after(ref.entry, start)
                    refs.append(ref)
                    offset = ref.entry.end_offset
                    if size >= max_bytes:
                        return refs
            if offset == before:
                break
        return refs

    def _refs(self, one: ObjectSlice, index: ObjectIndex, stream_id: int, offset: int, end: int) -> list[BlockRef]:
        end = min(end, one.end_offset)
        refs: list[BlockRef] = []
        for number in range(index.find(stream_id, offset), len(index)):
            entry = index[number]
            if entry.stream_id != stream_id or entry.start_offset >= end:
                break
            refs.append(BlockRef(one.object_id, index.key, entry))
        if not refs or refs[0].entry.start_offset > offset:
            found = refs[0].entry.start_offset if refs else "none"
            raise corrupt(index.key, index.footer.index_position, f"block of stream {stream_id}", offset, found)
        return refs

    async def _index(self, one: ObjectSlice, stream_id: int) -> ObjectIndex:
        if self._closed:
            raise self._closed_error()
        index = self._indexes.get(one.object_id)
        if index is not None:
            return index
        flight = self._index_flights.join(one.object_id)
        if flight is None:
            flight = self._index_flights.open(one.object_id)
            self._tasks.spawn(self._load_index(one, stream_id), "index")
        return await Flights.outcome(flight)

    async def _load_index(self, one: ObjectSlice, stream_id: int) -> None:
        key = object_key(self._cluster_id, one.object_id)
        outcome: ObjectIndex | TidelogError = self._closed_error()
        try:
            async with self._gets:
                tail = await load_tail(self._store, key, one.size, object_id=one.object_id, cluster_id=self._cluster_id)
            self._count(len(tail.data))
            outcome = tail.index
            self._indexes.put(one.object_id, tail.index, tail.index.memory_bytes)
            if tail.start == 0:
                self._keep_whole(one, tail.index, tail.data, stream_id)
        except TidelogError as error:
            outcome = error
        finally:
            self._index_flights.land(one.object_id, outcome)

    def _keep_whole(self, one: ObjectSlice, index: ObjectIndex, data: bytes, stream_id: int) -> None:
        """The object came whole: cache the stream's blocks. One that fails its check is left to its own read."""
        for number in range(index.find(stream_id, -1), len(index)):
            entry = index[number]
            if entry.stream_id != stream_id:
                break
            try:
                block = Block.decode(data[entry.position : entry.end_position], entry, key=index.key)
            except CorruptData as error:
                log.error("corrupt block", extra={"key": index.key, "error": error})
                continue
            self._blocks.put((one.object_id, entry.position), block, block.memory_bytes)

    # -- the blocks themselves

    def _fetch(self, refs: Sequence[BlockRef]) -> list[Block | asyncio.Future[Block | TidelogError]]:
        """The blocks, from the cache or on their way; neighbours that are neither share a GET."""
        if self._closed:
            raise self._closed_error()
        flights: list[Block | asyncio.Future[Block | TidelogError]] = []
        run: list[BlockRef] = []
        for ref in refs:
            flight: Block | asyncio.Future[Block | TidelogError] | None = self._blocks.get(ref.id)
            if flight is None:
                flight = self._block_flights.join(ref.id)
            if flight is None:
                flight = self._block_flights.open(ref.id)
                if run and not _neighbours(run, ref):
                    self._tasks.spawn(self._get(run), "get")
                    run = []
                run.append(ref)
            flights.append(flight)
        if run:
            self._tasks.spawn(self._get(run), "get")
        return flights

    async def _get(self, run: list[BlockRef]) -> None:
        """One GET for neighbouring blocks; every flight lands, whatever happens."""
        key, first = run[0].key, run[0].entry.position
        failure: TidelogError = self._closed_error()
        try:
            async with self._gets:
                data = await self._get_bytes(key, first, run[-1].entry.end_position)
            for ref in run:
                entry = ref.entry
                block = await self._decode(data[entry.position - first : entry.end_position - first], ref)
                if isinstance(block, Block):
                    self._blocks.put(ref.id, block, block.memory_bytes)
                self._block_flights.land(ref.id, block)
        except TidelogError as error:
            failure = error
            if isinstance(error, ObjectNotFound):
                self._indexes.discard(run[0].object_id)
        finally:
            for ref in run:
                self._block_flights.land(ref.id, failure)

    async def _decode(self, data: bytes, ref: BlockRef) -> Block | TidelogError:
        """Check a block; if it is wrong, ask once more before refusing it."""
        try:
            return Block.decode(data, ref.entry, key=ref.key)
        except CorruptData as error:
            log.error("corrupt block, asking again", extra={"key": ref.key, "error": error})
        try:
            again = await self._get_bytes(ref.key, ref.entry.position, ref.entry.end_position)
            return Block.decode(again, ref.entry, key=ref.key)
        except TidelogError as error:
            return error

    async def _get_bytes(self, key: str, start: int, end: int) -> bytes:
        data = await get_range(self._store, key, start, end)
        self._count(len(data))
        return data

    def _count(self, size: int) -> None:
        self.get_count += 1
        self.get_bytes += size


def _bytes_after(entry: IndexEntry, offset: int) -> int:
    """About how many bytes of a block lie at or after `offset`, which is in it."""
    return entry.length * (entry.end_offset - offset) // (entry.end_offset - entry.start_offset)


def _neighbours(run: list[BlockRef], ref: BlockRef) -> bool:
    """Whether `ref` follows the run in the same object and fits into its GET."""
    first, last = run[0], run[-1]
    return (
        last.object_id == ref.object_id
        and last.entry.end_position == ref.entry.position
        and ref.entry.end_position - first.entry.position <= MAX_GET_BYTES
    )


def _take(block: Block, start: int, end: int, left: int, records: list[StreamRecord]) -> int:
    """Add the block's records to `records` while they fit; returns the bytes left, 0 when nothing more is wanted."""
    first = 0 if records else block.find(start)
    for number in range(first, len(block)):
        record = block[number]
        size = len(record.payload)
        if record.base_offset >= end or (records and size > left):
            return 0
        records.append(record)
        left -= size
    return max(left, 0)
