"""Reads the inputs of a compaction, and checks every byte read (rule 10).

An index or a block that fails its check is read a second time, since the transfer may have been at fault; then the
input is reported as corrupt. A small object is read whole with its index, by one GET.

Entry: `InputReader`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.types import Offload
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore, View
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import BlockSource, OutputPlan
from tidelog.storage.objects.format import Block, ObjectIndex
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import TruncatedObject, get_ranges, load_tail

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""Blocks are read in pieces of about this size."""
Decoded = list[Block] | CorruptData


class BadInput(CorruptData):
    """An input cannot be compacted: it is corrupt, cut short, or absent. Never: a read that the bucket refused."""

    def __init__(self, object_id: int, message: str) -> None:
        super().__init__(message)
        self.object_id = object_id


class InputReader:
    """The inputs of one task."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        cluster_id: str,
        on_read: Callable[[int], Awaitable[None]],
        missing: Callable[[int, ObjectNotFound], Awaitable[TidelogError]],
        offload: Offload,
    ) -> None:
        """`on_read` is awaited with the number of bytes read, and may delay; `missing` returns the error for an object
        that is not in the bucket; `offload` runs the checks in a worker thread."""
        self._store = store
        self._cluster_id = cluster_id
        self._on_read = on_read
        self._missing = missing
        self._offload = offload
        self._whole: dict[int, View] = {}

    def _key(self, object_id: int) -> str:
        return object_key(self._cluster_id, object_id)

    async def index(self, one: ObjectFacts) -> ObjectIndex:
        """Return the checked index of an input. Raises `BadInput`, the error of `missing`, `Unavailable`."""
        try:
            return await self._index(one)
        except CorruptData as error:
            logger.error("corrupt index in compaction, reading again", extra={"object": one.object_id, "error": error})
        try:
            return await self._index(one)
        except CorruptData as error:
            raise BadInput(one.object_id, error.message) from error

    async def _index(self, one: ObjectFacts) -> ObjectIndex:
        key, object_id = self._key(one.object_id), one.object_id
        store, receipt = self._store.with_receipt()
        try:
            tail = await load_tail(store, key, one.size, object_id=object_id, cluster_id=self._cluster_id)
        except ObjectNotFound as error:
            raise await self._missing(object_id, error) from error
        receipt.settle((entry.stream_id, entry.length) for entry in tail.index)
        await self._on_read(len(tail.data))
        if tail.start == 0:
            self._whole[object_id] = tail.data
        return tail.index

    async def blocks(self, output: OutputPlan) -> dict[BlockSource, Block]:
        """Return all blocks of an output, checked. Raises `BadInput`, the error of `missing`, `Unavailable`."""
        by_object: dict[int, list[BlockSource]] = {}
        for _, sources in output.parts:
            for source in sources:
                by_object.setdefault(source.object_id, []).append(source)
        found: dict[BlockSource, Block] = {}
        for object_id, mine in by_object.items():
            mine.sort(key=lambda source: source.entry.position)
            for batch in _batches(mine):
                found.update(zip(batch, await self._batch(object_id, batch), strict=True))
        return found

    async def _batch(self, object_id: int, batch: list[BlockSource]) -> list[Block]:
        whole = self._whole.get(object_id)
        if whole is not None:
            parts = [whole[source.entry.position : source.entry.end_position] for source in batch]
        else:
            parts = await self._get(object_id, batch)
        decoded: Decoded = await self._offload(partial(_decode, self._key(object_id), batch, parts))
        if isinstance(decoded, CorruptData):
            logger.error("corrupt block in compaction, reading again", extra={"object": object_id, "error": decoded})
            parts = await self._get(object_id, batch)
            decoded = await self._offload(partial(_decode, self._key(object_id), batch, parts))
        if isinstance(decoded, CorruptData):
            raise BadInput(object_id, decoded.message)
        return decoded

    async def _get(self, object_id: int, batch: list[BlockSource]) -> list[View]:
        ranges = [(source.entry.position, source.entry.end_position) for source in batch]
        store, receipt = self._store.with_receipt()
        try:
            parts = await get_ranges(store, self._key(object_id), ranges)
        except ObjectNotFound as error:
            raise await self._missing(object_id, error) from error
        except TruncatedObject as error:
            raise BadInput(object_id, error.message) from error
        receipt.settle((source.entry.stream_id, source.entry.length) for source in batch)
        await self._on_read(sum(map(len, parts)))
        return parts


def _batches(sources: list[BlockSource]) -> Iterator[list[BlockSource]]:
    batch: list[BlockSource] = []
    size = 0
    for source in sources:
        if batch and size + source.entry.length > READ_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(source)
        size += source.entry.length
    if batch:
        yield batch


def _decode(key: str, batch: list[BlockSource], parts: list[View]) -> Decoded:
    """Return the blocks, or the error of the first corrupt one."""
    try:
        return [Block.decode(data, source.entry, key=key) for source, data in zip(batch, parts, strict=True)]
    except CorruptData as error:
        return error
