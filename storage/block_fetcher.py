"""Brings blocks and indexes from the bucket into the cache: each once, neighbours together, inside the cold budget.

- A block that is in the cache or on its way is not asked for again, however many readers want it; a reader that goes
  away disturbs no other.
- Neighbouring blocks of an object come with one GET, until it reaches a cap (`read_ahead.MAX_GET_BYTES`).
- A GET takes its bytes from the budget before it starts (`storage.cold_budget`). A GET that was read ahead and waits
  is moved up when a reader comes to wait for it.
- A block or index is checked before it is cached, large ones in a thread; one that fails is asked for a second time
  (a bad transfer) and then refused as `CorruptData`, never served, and noted in `damage`.
- A small object comes whole with its tail, so that it costs one GET.

Memory: the block cache takes 15/16 of its bound, indexes the rest; the budget bounds what is on its way. Blocks are
views of the bytes that one GET brought: those are accounted for as long as one block of them is kept.

Entry: `BlockFetcher.fetch`, `BlockFetcher.index`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from runtime.errors import Closed, CorruptData, TidelogError
from runtime.tasks import TaskSet
from storage.block_cache import ByteLru, Extent, Flights
from storage.cold_budget import ColdBudget, Level, Ticket
from storage.cold_pace import ColdPace
from storage.damage import Damage, DamageLog
from storage.managers import ObjectSlice
from storage.object_format import Block, IndexEntry, ObjectIndex
from storage.object_key import object_key
from storage.object_reader import TAIL_BYTES, Tail, get_range, load_tail
from storage.object_store import ObjectNotFound, ObjectStore, View
from storage.purpose import Purpose, for_purpose, with_receipt
from storage.read_ahead import MAX_GET_BYTES

log = logging.getLogger(__name__)

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
_OFFLOAD_RECORDS = 1000
"""A GET whose check would hold the loop for longer than this many records do (about 0.25 ms) is checked in a thread."""
_BYTES_A_RECORD = 5000
"""Bytes whose checksum takes as long as finding one record."""

BlockFuture = asyncio.Future[Block | TidelogError]


class BlockRef(NamedTuple):
    """A block of an object in the bucket."""

    object_id: int
    key: str
    entry: IndexEntry
    id: tuple[int, int]
    """What names the block in caches: object id and byte position."""


class BlockFetcher:
    """The cache, what is on its way to it, and the requests. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        cluster_id: str,
        cache_bytes: int,
        in_flight_bytes: int,
        offload: Offload,
        pace: ColdPace,
    ) -> None:
        cold, tail = for_purpose(store, Purpose.COLD), for_purpose(store, Purpose.TAIL)
        self._stores = {Level.TAIL: tail, Level.DEMAND: cold, Level.AHEAD: cold}
        self.cluster_id = cluster_id
        self._offload = offload
        self._pace = pace
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

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def close(self) -> None:
        """Stop what is in flight; readers that wait get `Closed`."""
        self._closed = True
        await self._tasks.close()
        self._block_flights.land_all(self.closed_error())
        self._index_flights.land_all(self.closed_error())

    def closed_error(self) -> Closed:
        """What readers get after `close`."""
        return Closed("the block reader is closed")

    # -- indexes

    async def index(self, one: ObjectSlice, stream_id: int, level: Level) -> ObjectIndex:
        """The index of an object. Raises `CorruptData`, `ObjectNotFound`, `Unavailable`, `Closed`."""
        if self._closed:
            raise self.closed_error()
        index = self.indexes.get(one.object_id)
        return index if index is not None else await Flights.outcome(self.index_flight(one, stream_id, level))

    def index_flight(
        self, one: ObjectSlice, stream_id: int, level: Level
    ) -> asyncio.Future[ObjectIndex | TidelogError]:
        """The index of an object, on its way; it is asked for if it is not yet."""
        flight = self._index_flights.join(one.object_id)
        if flight is None:
            flight = self._index_flights.open(one.object_id)
            self._tasks.spawn(self._load_index(one, stream_id, level), "index")
        return flight

    async def _load_index(self, one: ObjectSlice, stream_id: int, level: Level) -> None:
        key = object_key(self.cluster_id, one.object_id)
        outcome: ObjectIndex | TidelogError = self.closed_error()
        ticket = Ticket(stream_id, min(one.size, TAIL_BYTES), level)
        try:
            await self.budget.take(ticket)
            try:
                store, receipt = with_receipt(self._stores[level])
                try:
                    tail = await self._load_tail(one, key, store)
                finally:
                    receipt.settle([(stream_id, 1)])  # it reads for this stream, whatever else is in the object
            finally:
                self.budget.give(ticket)
            self.damage.heal(one.object_id, -1)
            self._count(len(tail.data))
            outcome = tail.index
            self.indexes.put(one.object_id, tail.index, tail.index.memory_bytes)
            if tail.start == 0:
                self._keep_whole(one, tail.index, tail.data, stream_id)
        except CorruptData as error:
            self.damage.note_whole(one.object_id, key, error)
            outcome = error
        except TidelogError as error:
            outcome = error
        finally:
            self._index_flights.land(one.object_id, outcome)

    async def _load_tail(self, one: ObjectSlice, key: str, store: ObjectStore) -> Tail:
        """Footer and index; asked for once more if they fail their check."""
        try:
            return await load_tail(store, key, one.size, object_id=one.object_id, cluster_id=self.cluster_id)
        except CorruptData as error:
            self.damage.failed_checks += 1
            log.error("corrupt index, asking again", extra={"key": key, "error": error})
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
                log.error("corrupt block", extra={"key": index.key, "error": error})
                continue
            self.damage.heal(one.object_id, entry.position)
            self.blocks.put((one.object_id, entry.position), block, block.memory_bytes)

    # -- blocks

    def cached(self, refs: Sequence[BlockRef]) -> list[Block]:
        """The blocks as far as they are in the cache without a gap."""
        found = []
        for ref in refs:
            block = self.blocks.get(ref.id)
            if block is None:
                break
            found.append(block)
        return found

    def is_here(self, ref: BlockRef) -> bool:
        """Whether a block is in the cache or on its way."""
        return ref.id in self.blocks or ref.id in self._block_flights

    def fetch(self, refs: Sequence[BlockRef], level: Level) -> list[Block | BlockFuture]:
        """The blocks, from the cache or on their way; neighbours that are neither share a GET. Raises `Closed`."""
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
                if run and not _neighbours(run, ref):
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
        """One GET for neighbouring blocks; every flight lands, whatever happens."""
        failure: TidelogError = self.closed_error()
        try:
            await self.budget.take(ticket)
            try:
                await self._get_now(run, self._stores[ticket.level])
            finally:
                self.budget.give(ticket)
        except TidelogError as error:
            failure = error
            if isinstance(error, ObjectNotFound):
                self.indexes.discard(run[0].object_id)
        finally:
            for ref in run:
                self._tickets.pop(ref.id, None)
                self._block_flights.land(ref.id, failure)

    async def _get_now(self, run: list[BlockRef], store: ObjectStore) -> None:
        store, receipt = with_receipt(store)
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
        self._pace.spend(seconds)
        extent = Extent(len(data))
        for ref, outcome in zip(run, decoded, strict=True):
            if isinstance(outcome, Block):
                self.damage.heal(*ref.id)
                self.blocks.put(ref.id, outcome, outcome.overhead_bytes, extent)
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
        """A block was wrong: ask once more before refusing it."""
        self.damage.failed_checks += 1
        log.error("corrupt block, asking again", extra={"key": ref.key, "error": error})
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
        """As `_decode`, on any thread; and the CPU time that it took."""
        started = self._pace.thread_s()
        return _decode(run, data), self._pace.thread_s() - started

    def _count(self, size: int) -> None:
        self.get_count += 1
        self.get_bytes += size
        self._pace.fetched(size)


def _neighbours(run: list[BlockRef], ref: BlockRef) -> bool:
    """Whether `ref` follows the run in the same object, and the run's GET is not full yet."""
    first, last = run[0], run[-1]
    return (
        last.object_id == ref.object_id
        and last.entry.end_position == ref.entry.position
        and last.entry.end_position - first.entry.position < MAX_GET_BYTES
    )


def _decode(run: Sequence[BlockRef], data: View) -> list[Block | CorruptData]:
    """Cut a GET's bytes into checked blocks, which are views of them."""
    view, first = memoryview(data), run[0].entry.position
    found: list[Block | CorruptData] = []
    for ref in run:
        entry = ref.entry
        try:
            found.append(Block.decode(view[entry.position - first : entry.end_position - first], entry, key=ref.key))
        except CorruptData as error:
            found.append(error)
    return found
