"""Fetches blocks and indexes from the bucket into the cache: each once, neighbours together, within the cold budget.

- A block that is cached or in flight is not requested again, however many readers want it; a cancelled reader does not
  affect the others.
- Neighbouring blocks of an object share a GET, up to a limit (`read_ahead.MAX_GET_BYTES`).
- A GET reserves its bytes in the budget before it starts (`tidelog.storage.reads.budget`). A waiting read-ahead GET is
  promoted when a reader waits for it.
- A block or index is checked before it is cached, large ones in a worker thread; one that fails is read a second time
  (a transfer error), then refused as `CorruptData`, never served, and recorded in `damage`.
- A small object is read whole with its tail, so that it costs one GET.

Memory: the block cache takes 15/16 of its bound, indexes the rest; the budget bounds the bytes in flight. Blocks are
views of the bytes of one GET, which are charged as long as one of its blocks is cached.

Entry: `BlockFetcher.fetch`, `BlockFetcher.index`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from tidelog.runtime.errors import Closed, CorruptData, TidelogError
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.types import Offload
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore, View
from tidelog.storage.commits import ObjectSlice
from tidelog.storage.objects.format import Block, IndexEntry, ObjectIndex
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import TAIL_BYTES, Tail, get_range, load_tail
from tidelog.storage.reads.budget import ColdBudget, Level, Ticket
from tidelog.storage.reads.cache import ByteLru, Extent, Flights
from tidelog.storage.reads.damage import Damage, DamageLog
from tidelog.storage.reads.read_ahead import MAX_GET_BYTES
from tidelog.storage.reads.throttle import ColdThrottle

logger = logging.getLogger(__name__)

_OFFLOAD_RECORDS = 1000
"""A GET whose check takes longer than that of this many records (about 0.25 ms) is checked in a worker thread."""
GAP_BYTES = 8 << 10
"""Bytes between two blocks of one GET that nobody has asked for: they cost less than a second GET."""
_BYTES_A_RECORD = 5000
"""Bytes whose checksum takes as long as finding one record."""

BlockFuture = asyncio.Future[Block | TidelogError]


class BlockRef(NamedTuple):
    """A block of an object in the bucket."""

    object_id: int
    key: str
    entry: IndexEntry
    id: tuple[int, int]
    """The key of the block in caches: object id and byte position."""


class BlockFetcher:
    """The cache, its fetches in flight, and the requests. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        cluster_id: str,
        cache_bytes: int,
        in_flight_bytes: int,
        offload: Offload,
        throttle: ColdThrottle,
    ) -> None:
        cold, tail = store.for_purpose(Purpose.COLD), store.for_purpose(Purpose.TAIL)
        self._stores = {Level.TAIL: tail, Level.DEMAND: cold, Level.AHEAD: cold}
        self.cluster_id = cluster_id
        self._offload = offload
        self._throttle = throttle
        self.blocks: ByteLru[tuple[int, int], Block] = ByteLru(cache_bytes - cache_bytes // 16)
        self.indexes: ByteLru[int, ObjectIndex] = ByteLru(cache_bytes // 16)
        self.budget = ColdBudget(in_flight_bytes)
        self.damage = DamageLog()
        self._block_flights: Flights[tuple[int, int], Block] = Flights()
        self._index_flights: Flights[int, ObjectIndex] = Flights()
        self._tickets: dict[tuple[int, int], Ticket] = {}
        self._tasks = TaskSet("storage.fetch")
        self._closed = False
        self.get_count = 0
        self.get_bytes = 0
        self.index_bytes = 0
        """Bytes that were requested of objects' ends, for their indexes."""

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    async def close(self) -> None:
        """Cancel the fetches in flight; waiting readers get `Closed`."""
        self._closed = True
        await self._tasks.close()
        self._block_flights.land_all(self.closed_error())
        self._index_flights.land_all(self.closed_error())

    def closed_error(self) -> Closed:
        """Return the error of readers after `close`."""
        return Closed("the block reader is closed")

    # -- indexes

    async def index(self, one: ObjectSlice, stream_id: int, level: Level) -> ObjectIndex:
        """Return the index of an object. Raises `CorruptData`, `ObjectNotFound`, `Unavailable`, `Closed`."""
        if self._closed:
            raise self.closed_error()
        index = self.indexes.get(one.object_id)
        return index if index is not None else await Flights.outcome(self.index_flight(one, stream_id, level))

    def index_flight(
        self, one: ObjectSlice, stream_id: int, level: Level
    ) -> asyncio.Future[ObjectIndex | TidelogError]:
        """Return the flight of an object's index; start one if there is none."""
        flight = self._index_flights.join(one.object_id)
        if flight is None:
            flight = self._index_flights.open(one.object_id)
            self.index_bytes += min(one.size, TAIL_BYTES)
            self._tasks.spawn(self._load_index(one, stream_id, level), "index")
        return flight

    async def _load_index(self, one: ObjectSlice, stream_id: int, level: Level) -> None:
        key, asked = object_key(self.cluster_id, one.object_id), min(one.size, TAIL_BYTES)
        outcome: ObjectIndex | TidelogError = self.closed_error()
        ticket = Ticket(stream_id, asked, level)
        try:
            await self.budget.take(ticket)
            try:
                store, receipt = self._stores[level].with_receipt()
                try:
                    tail = await self._load_tail(one, key, store)
                finally:
                    receipt.settle([(stream_id, 1)])  # charged to this stream, whatever else is in the object
            finally:
                self.budget.give(ticket)
            self.damage.heal(one.object_id, -1)
            self._count(len(tail.data))
            self.index_bytes += max(0, len(tail.data) - asked)
            outcome = tail.index
            self.indexes.put(one.object_id, tail.index, tail.index.memory_bytes)
            if tail.start == 0:
                self._keep_whole(one, tail.index, tail.data, stream_id)
        except CorruptData as error:
            self.damage.note_whole(one.object_id, key, error)
            outcome = error
        except Exception as error:  # noqa: BLE001  # whatever it is: an assertion is raised again
            outcome = expected("storage.fetch", error)
        finally:
            self._index_flights.land(one.object_id, outcome)

    async def _load_tail(self, one: ObjectSlice, key: str, store: ObjectStore) -> Tail:
        """Return footer and index; read them a second time if they fail their check."""
        try:
            return await load_tail(store, key, one.size, object_id=one.object_id, cluster_id=self.cluster_id)
        except CorruptData as error:
            self.damage.failed_checks += 1
            logger.error("corrupt index, reading again", extra={"key": key, "error": error})
        return await load_tail(store, key, one.size, object_id=one.object_id, cluster_id=self.cluster_id)

    def _keep_whole(self, one: ObjectSlice, index: ObjectIndex, data: View, stream_id: int) -> None:
        """The object came whole: cache the stream's blocks. One that fails its check is left to its own read."""
        for entry in index.entries_from(index.find(stream_id, -1)):
            if entry.stream_id != stream_id:
                break
            try:
                # A copy: a view would keep the blocks of all the other streams too.
                block = Block.decode(bytes(data[entry.position : entry.end_position]), entry, key=index.key)
            except CorruptData as error:
                self.damage.failed_checks += 1
                logger.error("corrupt block", extra={"key": index.key, "error": error})
                continue
            self.damage.heal(one.object_id, entry.position)
            self.blocks.put((one.object_id, entry.position), block, block.memory_bytes)

    # -- blocks

    def cached(self, refs: Sequence[BlockRef]) -> list[Block]:
        """Return the cached blocks up to the first that is not cached."""
        found = []
        for ref in refs:
            block = self.blocks.get(ref.id)
            if block is None:
                break
            found.append(block)
        return found

    def is_here(self, ref: BlockRef) -> bool:
        """Return whether a block is cached or in flight."""
        return ref.id in self.blocks or ref.id in self._block_flights

    def fetch(self, refs: Sequence[BlockRef], level: Level, *, gap_bytes: int = GAP_BYTES) -> list[Block | BlockFuture]:
        """Return the blocks or their flights; neighbours that are neither share a GET. Raises `Closed`.

        Neighbours are at most `gap_bytes` apart: what lies between is read, and not kept if it is most of the GET.
        """
        if self._closed:
            raise self.closed_error()
        flights: list[Block | BlockFuture] = []
        run: list[BlockRef] = []
        for ref in refs:
            flight: Block | BlockFuture | None = self.blocks.get(ref.id)
            if flight is None:
                flight = self._join(ref, level)
            if flight is None:
                flight = self._block_flights.open(ref.id)
                if run and not _neighbours(run, ref, gap_bytes):
                    self._launch(run, level)
                    run = []
                run.append(ref)
            flights.append(flight)
        if run:
            self._launch(run, level)
        return flights

    def _join(self, ref: BlockRef, level: Level) -> BlockFuture | None:
        flight = self._block_flights.join(ref.id)
        if flight is not None and level is not Level.AHEAD and ref.id in self._tickets:
            self.budget.promote(self._tickets[ref.id], level)
        return flight

    def _launch(self, run: list[BlockRef], level: Level) -> None:
        first, last = run[0].entry, run[-1].entry
        ticket = Ticket(first.stream_id, last.end_position - first.position, level)
        self._tickets.update((ref.id, ticket) for ref in run)
        self._tasks.spawn(self._get(run, ticket), "get")

    async def _get(self, run: list[BlockRef], ticket: Ticket) -> None:
        """Send one GET for neighbouring blocks; every flight is landed in any case."""
        failure: TidelogError = self.closed_error()
        try:
            await self.budget.take(ticket)
            try:
                await self._get_now(run, self._stores[ticket.level])
            finally:
                self.budget.give(ticket)
        except Exception as error:  # noqa: BLE001  # whatever it is: an assertion is raised again
            failure = expected("storage.fetch", error)
            if isinstance(error, ObjectNotFound):
                self.indexes.discard(run[0].object_id)
        finally:
            for ref in run:
                self._tickets.pop(ref.id, None)
                self._block_flights.land(ref.id, failure)

    async def _get_now(self, run: list[BlockRef], store: ObjectStore) -> None:
        store, receipt = store.with_receipt()
        try:
            await self._get_blocks(run, store)
        finally:
            receipt.settle((ref.entry.stream_id, ref.entry.length) for ref in run)

    async def _get_blocks(self, run: list[BlockRef], store: ObjectStore) -> None:
        data = await self._get_bytes(store, run[0].key, run[0].entry.position, run[-1].entry.end_position)
        if len(data) // _BYTES_A_RECORD + sum(ref.entry.record_count for ref in run) > _OFFLOAD_RECORDS:
            decoded, seconds = await self._offload(lambda: self._decode(run, data))
        else:
            decoded, seconds = self._decode(run, data)
        self._throttle.spend(seconds)
        extent = None if _is_sparse(run, data) else Extent(len(data))
        for ref, outcome in zip(run, decoded, strict=True):
            if isinstance(outcome, Block):
                self.damage.heal(*ref.id)
                self.blocks.put(ref.id, outcome, outcome.overhead_bytes if extent else outcome.memory_bytes, extent)
                self._block_flights.land(ref.id, outcome)
                continue
            block = await self._again(ref, outcome, store)
            if isinstance(block, Block):
                self.damage.heal(*ref.id)
                self.blocks.put(ref.id, block, block.memory_bytes)
            elif isinstance(block, CorruptData):
                entry = ref.entry
                where = (entry.position, entry.stream_id, entry.start_offset, entry.end_offset)
                self.damage.note(Damage(ref.object_id, ref.key, *where, block.message))
            self._block_flights.land(ref.id, block)

    async def _again(self, ref: BlockRef, error: TidelogError, store: ObjectStore) -> Block | TidelogError:
        """Read a corrupt block a second time before refusing it."""
        self.damage.failed_checks += 1
        logger.error("corrupt block, reading again", extra={"key": ref.key, "error": error})
        try:
            data = await self._get_bytes(store, ref.key, ref.entry.position, ref.entry.end_position)
            return Block.decode(data, ref.entry, key=ref.key)
        except TidelogError as again:
            return again

    async def _get_bytes(self, store: ObjectStore, key: str, start: int, end: int) -> View:
        data = await get_range(store, key, start, end)
        self._count(len(data))
        return data

    def _decode(self, run: Sequence[BlockRef], data: View) -> tuple[list[Block | CorruptData], float]:
        """As the function `_decode`, on any thread; also returns the CPU time it took."""
        started = self._throttle.thread_s()
        return _decode(run, data), self._throttle.thread_s() - started

    def _count(self, size: int) -> None:
        self.get_count += 1
        self.get_bytes += size
        self._throttle.fetched(size)


def _neighbours(run: list[BlockRef], ref: BlockRef, gap_bytes: int) -> bool:
    """Return whether `ref` follows the run in the same object, next to it, and the run's GET is not full yet."""
    first, last = run[0], run[-1]
    return (
        last.object_id == ref.object_id
        and 0 <= ref.entry.position - last.entry.end_position <= gap_bytes
        and last.entry.end_position - first.entry.position < MAX_GET_BYTES
    )


def _is_sparse(run: Sequence[BlockRef], data: View) -> bool:
    """Return whether most of a GET's bytes are between the blocks that are wanted."""
    return 2 * sum(ref.entry.length for ref in run) < len(data)


def _decode(run: Sequence[BlockRef], data: View) -> list[Block | CorruptData]:
    """Split a GET's bytes into checked blocks: views of them, or copies if they are sparse in it."""
    view, first = memoryview(data), run[0].entry.position
    copies = _is_sparse(run, data)
    found: list[Block | CorruptData] = []
    for ref in run:
        entry = ref.entry
        part = view[entry.position - first : entry.end_position - first]
        try:
            found.append(Block.decode(bytes(part) if copies else part, entry, key=ref.key))
        except CorruptData as error:
            found.append(error)
    return found
