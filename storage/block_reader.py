"""Reads streams from the bucket, by block: the cold lane.

A read finds its objects in the local metadata, their blocks in the objects' indexes, and the blocks in the cache or the
bucket (`storage.block_fetcher`). A reader that reads on where it stopped finds the next blocks on their way
(`storage.read_ahead`): several GETs, over the ends of objects, as many as it takes to cover the bucket's latency.

Urgency: what a reader in the newest object of its stream waits for goes before what others wait for, and that before
what is read ahead (`storage.cold_budget`). An object that is gone was replaced by compaction (rule 6): the read looks
into the metadata again. While the broker is pressed, reads of history wait for their share (`storage.cold_pace`).

Entry: `BlockReader.read`; `BlockReader.read_cached` when it must not wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from runtime.clock import Clock
from runtime.cpu_time import SystemCpu
from runtime.errors import CorruptData, TidelogError
from runtime.tasks import TaskSet
from storage.block_cache import Flights
from storage.block_fetcher import BlockFetcher, BlockFuture, BlockRef, Offload
from storage.cold_budget import Level
from storage.cold_pace import ColdPace
from storage.cold_turns import ColdTurns
from storage.damage import DamageLog
from storage.managers import ObjectManager, ObjectSlice
from storage.object_format import Block, IndexEntry, ObjectIndex, corrupt
from storage.object_key import object_key
from storage.object_store import ObjectNotFound, ObjectStore
from storage.read_ahead import ReadAhead, Reader
from storage.records import StreamRecord

log = logging.getLogger(__name__)

_MAX_OBJECTS = 8
"""Objects one read touches at most; it then returns what it has."""
_ATTEMPTS = 4
"""How often a read is tried when an object is gone: compaction may have replaced it (rule 6)."""
_RETRY_S = 0.05
NO_INDEXES: Final[Mapping[int, ObjectIndex]] = MappingProxyType({})


class _Found(NamedTuple):
    """Where the blocks of a range are, as far as the cached indexes tell."""

    refs: list[BlockRef]
    unknown: list[ObjectSlice]
    """The next object, whose index is not in the cache, and those after it."""
    is_tail: bool
    """It begins in the newest object of the range."""
    following: ObjectSlice | None = None
    """The object after the one that the last block is in."""


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
        pace: ColdPace | None = None,
    ) -> None:
        """`cache_bytes` bounds what is kept, `in_flight_bytes` what is on its way from the bucket.

        Without a `pace` reads are as fast as they can be, whatever else the broker has to do.
        """
        self._objects = objects
        self._clock = clock
        self._pace = pace or ColdPace(1.0, clock, SystemCpu())
        self._fetcher = BlockFetcher(
            store=store,
            cluster_id=cluster_id,
            cache_bytes=cache_bytes,
            in_flight_bytes=in_flight_bytes,
            offload=offload,
            pace=self._pace,
        )
        self._ahead = ReadAhead(cache_bytes // 2, clock.monotonic)
        self._turns = ColdTurns()
        self._tasks = TaskSet("storage.read")

    @property
    def held_bytes(self) -> int:
        """What the caches and the GETs under way hold."""
        fetcher = self._fetcher
        return fetcher.blocks.bytes + fetcher.indexes.bytes + fetcher.budget.used_bytes

    def stats(self) -> dict[str, int | float]:
        """Counts and bytes for metrics."""
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
            "cold_pace_bound": int(self._pace.is_bound),
            "cold_pace_waits": self._pace.waits,
            "cold_pace_wait_seconds": self._pace.waited_s,
        }

    @property
    def damage(self) -> DamageLog:
        """What is known to be damaged in the bucket."""
        return self._fetcher.damage

    async def close(self) -> None:
        """Stop what is in flight; readers that wait get `Closed`."""
        await self._fetcher.close()
        await self._tasks.close()

    # -- reading

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
            except CorruptData:
                self.damage.refused += 1
                raise
            await self._clock.sleep(_RETRY_S * (1 << attempt))
        raise self._missing(stream_id, start_offset, end_offset, missing) from missing

    def _missing(self, stream_id: int, start: int, end: int, error: ObjectNotFound) -> CorruptData:
        """The metadata names an object that is not in the bucket."""
        message = (
            f"stream {stream_id} at offset {start}: the metadata names an object that is not in the bucket: {error}"
        )
        damage = CorruptData(message, hint="was something deleted from the bucket by hand?")
        self.damage.refused += 1
        for one in self._objects.find_objects(stream_id, start, end, 1):
            key = object_key(self._fetcher.cluster_id, one.object_id)
            self.damage.note_whole(one.object_id, key, damage)
        return damage

    async def _read(self, stream_id: int, start: int, end: int, max_bytes: int) -> list[StreamRecord]:
        reader = self._ahead.take(stream_id, start)
        pace: ColdPace | None = None
        records: list[StreamRecord] = []
        size = 0
        try:
            found = await self._locate(stream_id, start, end, max_bytes, Level.DEMAND)
            if not found.is_tail:
                await self._pace.take(max_bytes, is_replay=reader.is_sequential)
                pace = self._pace
            lost = any(reader.expects(ref.entry.start_offset) and not self._fetcher.is_here(ref) for ref in found.refs)
            flights = self._fetcher.fetch(found.refs, Level.TAIL if found.is_tail else Level.DEMAND)
            waited = any(not isinstance(flight, Block) for flight in flights)
            self._ahead.adapt(reader, waited=waited, lost=lost)
            if found.refs:
                self._top_up(reader, stream_id, found.refs[-1].entry.end_offset, end)
            blocks = await _arrived(flights)
            await self._turns.take()
            with self._pace.measured():
                size = _take_all(blocks, start, end, max_bytes, records)
        except BaseException:
            self._ahead.drop(reader)
            raise
        finally:
            if pace is not None:
                pace.settle(max_bytes, size)
        self._leave(reader, stream_id, found.refs, records)
        return records

    def read_cached(
        self, stream_id: int, start_offset: int, end_offset: int, max_bytes: int
    ) -> list[StreamRecord] | None:
        """As `read`, at once; None unless all of it, or a good part, is in the cache, and it is our turn.

        Raises `CorruptData`.
        """
        if self._fetcher.closed or not self._turns.is_free:
            return None  # `read` waits for its turn
        found = self._look_up(stream_id, start_offset, end_offset, max_bytes)
        blocks = self._fetcher.cached(found.refs)
        complete = bool(blocks) and len(blocks) == len(found.refs) and not found.unknown
        if not complete and sum(ref.entry.length for ref in found.refs[: len(blocks)]) * 2 < max_bytes:
            return None
        if not found.is_tail and not self._pace.try_take(max_bytes):
            return None
        self._turns.try_take()
        reader = self._ahead.take(stream_id, start_offset)
        self._ahead.adapt(reader, waited=False, lost=False)
        self._top_up(reader, stream_id, found.refs[len(blocks) - 1].entry.end_offset, end_offset)
        records: list[StreamRecord] = []
        with self._pace.measured():
            size = _take_all(blocks, start_offset, end_offset, max_bytes, records)
        if not found.is_tail:
            self._pace.settle(max_bytes, size)
        self._leave(reader, stream_id, found.refs, records)
        return records

    def _leave(self, reader: Reader, stream_id: int, refs: list[BlockRef], records: list[StreamRecord]) -> None:
        """The reader goes away with `records`; the blocks it is through with may go first."""
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

    # -- reading ahead

    def _top_up(self, reader: Reader, stream_id: int, offset: int, end: int) -> None:
        """Bring what follows `offset` into the cache, as far as the reader's window goes."""
        start = max(offset, reader.ahead_offset)
        wanted = 0 if reader.busy or start >= end else self._ahead.wanted(reader)
        if wanted == 0:
            return
        reader.ahead_offset = start
        found = self._look_up(stream_id, start, end, wanted)
        self._fetch_ahead(reader, found.refs)
        self._index_ahead(stream_id, found.following)
        if found.unknown and sum(ref.entry.length for ref in found.refs) < wanted:
            reader.busy = True
            self._tasks.spawn(self._read_ahead(reader, stream_id, end), "ahead")

    async def _read_ahead(self, reader: Reader, stream_id: int, end: int) -> None:
        """As `_top_up`, with indexes from the bucket; a failure is left to the read that needs them."""
        try:
            wanted = self._ahead.wanted(reader)
            if wanted:
                found = await self._locate(stream_id, reader.ahead_offset, end, wanted, Level.AHEAD)
                self._fetch_ahead(reader, found.refs)
        except TidelogError as error:
            log.debug("read-ahead stopped", extra={"stream": stream_id, "error": error})
        finally:
            reader.busy = False

    def _index_ahead(self, stream_id: int, following: ObjectSlice | None) -> None:
        """Ask for the index of the object that comes next: read-ahead does not stop at the end of one."""
        if following is not None and following.object_id not in self._fetcher.indexes:
            self._fetcher.index_flight(following, stream_id, Level.AHEAD)

    def _fetch_ahead(self, reader: Reader, refs: list[BlockRef]) -> None:
        self._fetcher.fetch([ref for ref in refs if not self._fetcher.is_here(ref)], Level.AHEAD)
        for ref in refs:
            if ref.entry.end_offset > reader.ahead_offset:
                self._ahead.note(reader, ref.entry.end_offset, ref.entry.length)

    # -- where the blocks are

    async def _locate(self, stream_id: int, start: int, end: int, max_bytes: int, level: Level) -> _Found:
        """As `_look_up`, with the indexes that it takes, several at a time."""
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
                return _Found(found.refs, [], found.is_tail)  # as far as can be read; the next read meets it first

    def _look_up(
        self, stream_id: int, start: int, end: int, max_bytes: int, known: Mapping[int, ObjectIndex] = NO_INDEXES
    ) -> _Found:
        """The blocks that hold `[start, end)`, in order, as far as the metadata knows them without a hole.

        `known` are indexes beside those in the cache, which may be too small for them. Stops with the block that brings
        them to `max_bytes`, of the first counting what lies after `start` (judged by offsets), and after a few objects.
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


async def _arrived(flights: Iterable[Block | BlockFuture]) -> list[Block]:
    """The blocks up to the first that cannot be had; raises its error if that is the first of all.

    What lies before damage is served; who reads on from there meets it as the first.
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
    """Objects that a read of `max_bytes` may touch: the first, and those after it while they are small together."""
    taken, size = [], 0
    for one in slices:
        taken.append(one)
        size += one.size
        if size >= max_bytes:
            break
    return taken


def _refs(one: ObjectSlice, index: ObjectIndex, stream_id: int, offset: int, end: int) -> Iterator[BlockRef]:
    """The stream's blocks in one object from `offset` on. Raises `CorruptData` if it has none there."""
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
    """About how many bytes of a block lie at or after `offset`, which is in it."""
    return entry.length * (entry.end_offset - offset) // (entry.end_offset - entry.start_offset)


def _take_all(blocks: Iterable[Block], start: int, end: int, max_bytes: int, records: list[StreamRecord]) -> int:
    """Add the blocks' records to `records`, up to `max_bytes`, but one at least; returns their bytes."""
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
