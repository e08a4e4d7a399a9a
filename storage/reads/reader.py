"""Cold reads of streams: from the bucket, by block.

A read looks up its objects in the local metadata, their blocks in the objects' indexes, and the blocks in the cache or
the bucket (`tidelog.storage.reads.fetcher`). For a sequential reader the next blocks are already in flight
(`tidelog.storage.reads.read_ahead`): several GETs, across the ends of objects, as many as it takes to hide the bucket's
latency.

Priority: reads in the newest object of a stream, then other reads, then read-ahead
(`tidelog.storage.reads.budget`). A missing object was replaced by compaction (rule 6): the read has the
metadata brought up to date, and looks it up again. Only what is missing by current metadata is damage; without a
controller that can say so the read fails and is repeated. While the broker is short of CPU time, reads of old data are
throttled (`tidelog.storage.reads.throttle`).

Many streams that are about to be read, because their partitions open, are gathered first: the blocks of one upload lie
side by side in its object, so a few GETs bring them all. What will be read when another broker dies is gathered before
that in the same way, as read-ahead (`BlockReader.holds` tells what is here).

Entry: `BlockReader.read`; `BlockReader.read_cached` when it must not wait; `BlockReader.gather`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final, NamedTuple

from tidelog.runtime.clock import Clock
from tidelog.runtime.cpu_time import SystemCpu
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.types import Offload
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore
from tidelog.storage.commits import ObjectSlice, StreamRange
from tidelog.storage.managers import ObjectManager
from tidelog.storage.objects.format import Block, IndexEntry, ObjectIndex, corrupt
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import MissingObject
from tidelog.storage.reads.budget import Level
from tidelog.storage.reads.cache import Flights
from tidelog.storage.reads.damage import DamageLog
from tidelog.storage.reads.fetcher import BlockFetcher, BlockFuture, BlockRef
from tidelog.storage.reads.read_ahead import ReadAhead, ReadSequence
from tidelog.storage.reads.throttle import ColdThrottle
from tidelog.storage.reads.turns import ColdTurns
from tidelog.storage.records import StreamEntry

logger = logging.getLogger(__name__)

_MAX_OBJECTS = 8
"""Objects that one read accesses at most; it then returns what it has."""
_ATTEMPTS = 4
"""Attempts of a read when an object is missing: compaction may have replaced it (rule 6). All but the first are made
with metadata that is proven current."""
_RETRY_S = 0.05
_GATHER_GAP_BYTES = 128 << 10
"""Bytes between two gathered blocks that share a GET. What is gathered is small and of many streams, so blocks that are
not wanted lie between. They take a millisecond; a GET of its own costs as much CPU time alone."""
_GATHERED_AT_ONCE = 64
"""Ranges that are looked up before the loop serves requests again: some milliseconds."""
_HELD_BYTES = 1 << 20
"""Blocks of about so many bytes are looked up at once where some may be here."""
NO_INDEXES: Final[Mapping[int, ObjectIndex]] = MappingProxyType({})


class _Found(NamedTuple):
    """The blocks of a range, as far as the cached indexes show."""

    refs: list[BlockRef]
    unknown: list[ObjectSlice]
    """The next object, whose index is not in the cache, and those after it."""
    is_tail: bool
    """Whether it begins in the newest object of the range."""
    following: ObjectSlice | None = None
    """The object after the one with the last block."""


class BlockReader:
    """Committed data of any stream. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        objects: ObjectManager,
        clock: Clock,
        cluster_id: str,
        cache_bytes: int,
        in_flight_bytes: int = 64 << 20,
        offload: Offload = asyncio.to_thread,
        throttle: ColdThrottle | None = None,
    ) -> None:
        """`cache_bytes` bounds the caches, `in_flight_bytes` the bytes in flight from the bucket.

        Without a `throttle` reads are never delayed in favour of other work.
        """
        self._objects = objects
        self._clock = clock
        self._throttle = throttle or ColdThrottle(1.0, clock, SystemCpu())
        self._fetcher = BlockFetcher(
            store=store,
            cluster_id=cluster_id,
            cache_bytes=cache_bytes,
            in_flight_bytes=in_flight_bytes,
            offload=offload,
            throttle=self._throttle,
        )
        self._ahead = ReadAhead(cache_bytes // 2, clock.monotonic)
        self._turns = ColdTurns()
        self._limiter = LogLimiter(logger, clock)
        self._tasks = TaskSet("storage.read")

    @property
    def held_bytes(self) -> int:
        """Return the bytes held by the caches and the GETs in flight."""
        fetcher = self._fetcher
        return fetcher.blocks.bytes + fetcher.indexes.bytes + fetcher.budget.used_bytes

    def stats(self) -> dict[str, int | float]:
        """Return counts and bytes for metrics."""
        fetcher = self._fetcher
        return {
            "block_cache_bytes": fetcher.blocks.bytes + fetcher.indexes.bytes,
            "block_cache_hits": fetcher.blocks.hits,
            "block_cache_misses": fetcher.blocks.misses,
            "block_gets": fetcher.get_count,
            "block_get_bytes": fetcher.get_bytes,
            "cold_in_flight_bytes": fetcher.budget.used_bytes,
            "cold_gets_waiting": fetcher.budget.waiting,
            "cold_waits": fetcher.budget.waits,
            "failed_checks": fetcher.damage.failed_checks,
            "refused_reads": fetcher.damage.refused,
            "damaged_places": len(fetcher.damage),
            "read_ahead_bytes": self._ahead.ahead_bytes,
            "read_ahead_shrinks": self._ahead.shrinks,
            "cold_turn_waits": self._turns.waits,
            "cold_throttle_bound": int(self._throttle.is_bound),
            "cold_throttle_waits": self._throttle.waits,
            "cold_throttle_wait_seconds": self._throttle.waited_s,
        }

    @property
    def damage(self) -> DamageLog:
        """Return the known damage in the bucket."""
        return self._fetcher.damage

    async def close(self) -> None:
        """Cancel everything in flight; waiting readers get `Closed`."""
        await self._fetcher.close()
        await self._tasks.close()

    # -- reading

    async def read(
        self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry]:
        """Return records from the one that contains `start_offset`: at least one, then up to `max_bytes`, all before
        `end_offset`. Empty when no object holds `start_offset`. A read ends where a branch's own offsets begin.

        `is_urgent`: a partition, or a coordinator, cannot be used before it is read. Such reads wait neither for a
        slice of the loop nor for CPU time that producers need, wherever their data are: the caller gives way by itself.

        Raises `CorruptData` (`MissingObject`, `TruncatedObject`), `Closed`, `Unavailable` (of the bucket, or because no
        controller can say whether the local metadata is current).
        """
        self._objects.check_current()
        asked = stream_id
        stream_id, end_offset = self._objects.resolve(asked, start_offset, end_offset)
        for attempt in range(_ATTEMPTS):
            try:
                records = await self._read(stream_id, start_offset, end_offset, max_bytes, is_urgent=is_urgent)
                return records if stream_id == asked else _cut_hole(records, end_offset)
            except ObjectNotFound as error:
                fields = {"stream": stream_id, "error": str(error)}
                self._limiter.line("gone", logging.WARNING, "object is gone, looking it up again", fields)
                missing = error
            except CorruptData:
                self.damage.refused += 1
                raise
            await self._clock.sleep(_RETRY_S * (1 << attempt))
            if attempt == 0:
                await self._objects.catch_up()
        raise self._missing(stream_id, start_offset, end_offset, missing) from missing

    def _missing(self, stream_id: int, start: int, end: int, error: ObjectNotFound) -> MissingObject:
        """Return the error for an object that the metadata names and that is not in the bucket."""
        message = (
            f"stream {stream_id} at offset {start}: the metadata names an object that is not in the bucket: {error}"
        )
        damage = MissingObject(message, hint="was something deleted from the bucket by hand?")
        self.damage.refused += 1
        for one in self._objects.find_objects(stream_id, start, end, 1):
            key = object_key(self._fetcher.cluster_id, one.object_id)
            self.damage.note_whole(one.object_id, key, damage)
        return damage

    async def _read(
        self, stream_id: int, start: int, end: int, max_bytes: int, *, is_urgent: bool
    ) -> list[StreamEntry]:
        reader = self._ahead.take(stream_id, start)
        throttle: ColdThrottle | None = None
        records: list[StreamEntry] = []
        size = 0
        try:
            level = Level.TAIL if is_urgent else Level.DEMAND
            found = await self._locate(stream_id, start, end, max_bytes, level)
            if not found.is_tail and not is_urgent:
                await self._throttle.take(max_bytes, is_replay=reader.is_sequential)
                throttle = self._throttle
            lost = any(reader.expects(ref.entry.start_offset) and not self._fetcher.is_here(ref) for ref in found.refs)
            flights = self._fetcher.fetch(found.refs, Level.TAIL if found.is_tail else level)
            waited = any(not isinstance(flight, Block) for flight in flights)
            self._ahead.adapt(reader, waited=waited, lost=lost)
            if found.refs:
                self._top_up(reader, stream_id, found.refs[-1].entry.end_offset, end)
            blocks = await _arrived(flights)
            if not is_urgent:
                await self._turns.take()
            with self._charged(is_urgent=is_urgent):
                size = _take_all(blocks, start, end, max_bytes, records)
        except BaseException:
            self._ahead.drop(reader)
            raise
        finally:
            if throttle is not None:
                throttle.settle(max_bytes, size)
        self._leave(reader, stream_id, found.refs, records)
        return records

    def read_cached(
        self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry] | None:
        """As `read`, without waiting; None unless all or much of it is cached, and a slice may be taken now.

        Raises `CorruptData`.
        """
        if self._fetcher.closed or not (is_urgent or self._turns.is_free):
            return None  # `read` waits for its slice
        asked = stream_id
        stream_id, end_offset = self._objects.resolve(asked, start_offset, end_offset)
        found = self._look_up(stream_id, start_offset, end_offset, max_bytes)
        blocks = self._fetcher.cached(found.refs)
        complete = len(blocks) == len(found.refs) and not found.unknown
        if not blocks:
            return None
        if not complete and sum(ref.entry.length for ref in found.refs[: len(blocks)]) * 2 < max_bytes:
            return None
        is_paced = not (found.is_tail or is_urgent)
        if is_paced and not self._throttle.try_take(max_bytes):
            return None
        if not is_urgent:
            self._turns.try_take()
        reader = self._ahead.take(stream_id, start_offset)
        self._ahead.adapt(reader, waited=False, lost=False)
        self._top_up(reader, stream_id, found.refs[len(blocks) - 1].entry.end_offset, end_offset)
        records: list[StreamEntry] = []
        with self._charged(is_urgent=is_urgent):
            size = _take_all(blocks, start_offset, end_offset, max_bytes, records)
        if is_paced:
            self._throttle.settle(max_bytes, size)
        self._leave(reader, stream_id, found.refs, records)
        return records if stream_id == asked else _cut_hole(records, end_offset)

    def _charged(self, *, is_urgent: bool) -> AbstractContextManager[None]:
        """Charge the `with` block to the cold lane, unless it is urgent."""
        return nullcontext() if is_urgent else self._throttle.measured()

    async def gather(self, ranges: Iterable[StreamRange], max_bytes: int, *, is_ahead: bool = False) -> int:
        """Fetch the blocks of committed ranges into the cache, neighbours by one GET, and return when they are there.

        The first ranges come first; those that make it more than `max_bytes` are left out. So is what cannot be read:
        it fails, or is tried again, when it is read for itself. With `is_ahead` nobody waits for them yet: they are
        requested as read-ahead, and not while producers need the CPU time; and one block is, however large it is, since
        no read for itself follows.

        Returns the bytes of the blocks that were not in the cache: at most `max_bytes`, but for such a block. With
        `is_ahead` those of the indexes that were not there either are among them, and one more than fits may be.
        """
        level = Level.AHEAD if is_ahead else Level.TAIL
        if is_ahead:
            await self._throttle.take(0, is_replay=True)
        refs: dict[tuple[int, int], BlockRef] = {}
        left = max_bytes
        for number, one in enumerate(ranges, start=1):
            if left <= 0:
                break
            if number % _GATHERED_AT_ONCE == 0:
                await asyncio.sleep(0)
            asked = self._fetcher.index_bytes
            try:
                self._objects.check_current()
                found = await self._blocks_of(one, left, level)
            except TidelogError as error:
                logger.debug("a range is not gathered", extra={"stream": one.stream_id, "error": str(error)})
                continue
            finally:
                left -= self._fetcher.index_bytes - asked if is_ahead else 0
            for ref in found:
                fits = ref.entry.length <= left or (is_ahead and not refs)
                if fits and ref.id not in refs and not self._fetcher.is_here(ref):
                    refs[ref.id] = ref
                    left -= ref.entry.length
        if not self._fetcher.closed:
            wanted = [refs[each] for each in sorted(refs)]
            for flight in self._fetcher.fetch(wanted, level, gap_bytes=_GATHER_GAP_BYTES):
                if not isinstance(flight, Block):
                    await asyncio.shield(flight)
        return max_bytes - left

    def holds(self, one: StreamRange) -> bool:
        """Return whether all of a committed range is in the cache, so that it can be read without the bucket."""
        start = one.start_offset
        while start < one.end_offset:
            stream_id, end = self._objects.resolve(one.stream_id, start, one.end_offset)
            try:
                found = self._look_up(stream_id, start, end, _HELD_BYTES)
            except CorruptData:
                return False
            if found.unknown or not found.refs or any(ref.id not in self._fetcher.blocks for ref in found.refs):
                return False
            start = min(found.refs[-1].entry.end_offset, end)
        return True

    async def _blocks_of(self, one: StreamRange, max_bytes: int, level: Level) -> list[BlockRef]:
        """Return the blocks of a range that are not here, in however many objects, as far as the metadata have them.

        The first of them, until they have `max_bytes`: those that are here do not count, and of read-ahead the indexes
        that are not here do.
        """
        refs: list[BlockRef] = []
        start = one.start_offset
        while start < one.end_offset and max_bytes > 0:
            stream_id, end = self._objects.resolve(one.stream_id, start, one.end_offset)
            asked = self._fetcher.index_bytes
            found = await self._locate(stream_id, start, end, max(max_bytes, _HELD_BYTES), level)
            if level is Level.AHEAD:
                max_bytes -= self._fetcher.index_bytes - asked
            if not found.refs:
                break
            missing = [ref for ref in found.refs if not self._fetcher.is_here(ref)]
            refs += missing
            start = min(found.refs[-1].entry.end_offset, end)
            max_bytes -= sum(ref.entry.length for ref in missing)
        return refs

    def _leave(self, reader: ReadSequence, stream_id: int, refs: list[BlockRef], records: list[StreamEntry]) -> None:
        """Record that the reader leaves with `records`; the blocks that it has finished may be evicted first."""
        if not records:
            self._ahead.drop(reader)
            return
        following = records[-1].base_offset + records[-1].count
        if reader.is_sequential:
            for ref in refs:
                if ref.entry.end_offset > following:
                    break
                self._fetcher.blocks.spend(ref.id)
        self._ahead.give(stream_id, following, reader)

    # -- read-ahead

    def _top_up(self, reader: ReadSequence, stream_id: int, offset: int, end: int) -> None:
        """Fetch the blocks after `offset` into the cache, as far as the reader's window reaches."""
        start = max(offset, reader.ahead_offset)
        wanted = 0 if reader.busy or start >= end else self._ahead.wanted(reader)
        if wanted == 0:
            return
        reader.ahead_offset = start
        try:
            found = self._look_up(stream_id, start, end, wanted)
        except CorruptData:
            return  # the read that comes there says so
        self._fetch_ahead(reader, found.refs)
        self._index_ahead(stream_id, found.following)
        if found.unknown and sum(ref.entry.length for ref in found.refs) < wanted:
            reader.busy = True
            self._tasks.spawn(self._read_ahead(reader, stream_id, end), "ahead")

    async def _read_ahead(self, reader: ReadSequence, stream_id: int, end: int) -> None:
        """As `_top_up`, with indexes from the bucket; a failure is left to the read that needs the blocks."""
        try:
            wanted = self._ahead.wanted(reader)
            if wanted:
                found = await self._locate(stream_id, reader.ahead_offset, end, wanted, Level.AHEAD)
                self._fetch_ahead(reader, found.refs)
        except TidelogError as error:
            logger.debug("read-ahead stopped", extra={"stream": stream_id, "error": error})
        finally:
            reader.busy = False

    def _index_ahead(self, stream_id: int, following: ObjectSlice | None) -> None:
        """Request the index of the next object, so that read-ahead continues across the end of an object."""
        if following is not None and following.object_id not in self._fetcher.indexes:
            self._fetcher.index_flight(following, stream_id, Level.AHEAD)

    def _fetch_ahead(self, reader: ReadSequence, refs: list[BlockRef]) -> None:
        self._fetcher.fetch([ref for ref in refs if not self._fetcher.is_here(ref)], Level.AHEAD)
        for ref in refs:
            if ref.entry.end_offset > reader.ahead_offset:
                self._ahead.note(reader, ref.entry.end_offset, ref.entry.length)

    # -- locating blocks

    async def _locate(self, stream_id: int, start: int, end: int, max_bytes: int, level: Level) -> _Found:
        """As `_look_up`, fetching the indexes it needs, several at a time."""
        known: dict[int, ObjectIndex] = {}
        while True:
            found = self._look_up(stream_id, start, end, max_bytes, known)
            if not found.unknown:
                return found
            if self._fetcher.closed:
                raise self._fetcher.closed_error()
            flights = [self._fetcher.index_flight(one, stream_id, level) for one in found.unknown]
            try:
                known[found.unknown[0].object_id] = await Flights.outcome(flights[0])
            except TidelogError:
                if not found.refs:
                    raise
                return _Found(found.refs, [], found.is_tail)  # the readable part; the next read raises the error

    def _look_up(
        self, stream_id: int, start: int, end: int, max_bytes: int, known: Mapping[int, ObjectIndex] = NO_INDEXES
    ) -> _Found:
        """Return the blocks that hold `[start, end)`, in order, as far as the metadata has them without a gap.

        `known` are indexes in addition to the cached ones (the cache may be too small for them). Stops with the block
        that reaches `max_bytes`, counting the first block from `start` (judged by offsets), and after a few objects.
        """
        refs: list[BlockRef] = []
        slices = self._objects.find_objects(stream_id, start, end, _MAX_OBJECTS)
        is_tail = bool(slices) and slices[0].end_offset >= end
        offset, size = start, 0
        for number, one in enumerate(slices):
            if not one.start_offset <= offset < one.end_offset:
                break
            index = known.get(one.object_id) or self._fetcher.indexes.get(one.object_id)
            if index is None:
                return _Found(refs, _plausible(slices[number:], max_bytes - size), is_tail)
            try:
                for ref in _refs(one, index, stream_id, offset, end):
                    size += ref.entry.length if refs else _bytes_after(ref.entry, start)
                    refs.append(ref)
                    offset = ref.entry.end_offset
                    if size >= max_bytes:
                        return _Found(refs, [], is_tail, slices[number + 1] if number + 1 < len(slices) else None)
            except CorruptData:
                if not refs:
                    raise
                break
        return _Found(refs, [], is_tail)


def _cut_hole(records: list[StreamEntry], end: int) -> list[StreamEntry]:
    """Let a hole end where the read ends: behind a branch's first offsets another stream goes on."""
    if records and records[-1].is_hole and records[-1].base_offset + records[-1].count > end:
        base = records[-1].base_offset
        records[-1] = StreamEntry(base, end - base, b"")
    return records


async def _arrived(flights: Iterable[Block | BlockFuture]) -> list[Block]:
    """Return the blocks before the first failed one; raise its error if it is the first of all.

    Data before damage is served; the next read then starts at the damage and raises.
    """
    blocks: list[Block] = []
    for flight in flights:
        try:
            blocks.append(flight if isinstance(flight, Block) else await Flights.outcome(flight))
        except TidelogError:
            if not blocks:
                raise
            break
    return blocks


def _plausible(slices: Sequence[ObjectSlice], max_bytes: int) -> list[ObjectSlice]:
    """Return the objects that a read of `max_bytes` may need: the first, and further ones while the total is small."""
    taken, size = [], 0
    for one in slices:
        taken.append(one)
        size += one.size
        if size >= max_bytes:
            break
    return taken


def _refs(one: ObjectSlice, index: ObjectIndex, stream_id: int, offset: int, end: int) -> Iterator[BlockRef]:
    """Yield the stream's blocks in one object from `offset` on. Raises `CorruptData` if it has none there."""
    end = min(end, one.end_offset)
    found = False
    for entry in index.entries_from(index.find(stream_id, offset)):
        if entry.stream_id != stream_id or entry.start_offset >= end:
            break
        if not found and entry.start_offset > offset:
            raise corrupt(
                index.key, index.footer.index_position, f"block of stream {stream_id}", offset, entry.start_offset
            )
        found = True
        yield BlockRef(one.object_id, index.key, entry, (one.object_id, entry.position))
    if not found:
        raise corrupt(index.key, index.footer.index_position, f"block of stream {stream_id}", offset, "none")


def _bytes_after(entry: IndexEntry, offset: int) -> int:
    """Estimate the bytes of a block at or after `offset`, which lies in it."""
    return entry.length * (entry.end_offset - offset) // (entry.end_offset - entry.start_offset)


def _take_all(blocks: Iterable[Block], start: int, end: int, max_bytes: int, records: list[StreamEntry]) -> int:
    """Add the blocks' records to `records`, up to `max_bytes` but at least one; return their bytes."""
    size = 0
    for block in blocks:
        first = 0 if records else block.find(start)
        taken, taken_bytes = block.take(first, end, max_bytes - size)
        if not taken and not records:
            taken = [block[first]]
            taken_bytes = len(taken[0].payload)
        records += taken
        size += taken_bytes
        if size >= max_bytes or first + len(taken) < len(block):
            break
    return size
