"""Reads the inputs of a compaction, checking every byte it takes (rule 10).

An index or a block that fails its check is asked for once more, since the transfer may have been at fault; then the
input is named as bad. A small object comes whole with its index, so that it costs one GET.

Entry: `InputReader`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from runtime.errors import CorruptData, InvalidInput, TidelogError
from storage.compaction_plan import BlockSource, ObjectFacts, OutputPlan
from storage.object_format import Block, ObjectIndex
from storage.object_key import object_key
from storage.object_reader import load_tail
from storage.object_store import ObjectNotFound, ObjectStore, View
from storage.purpose import with_receipt

log = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""Blocks are read in pieces of about this size."""
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
Decoded = list[Block] | CorruptData


class BadInput(CorruptData):
    """An input cannot be compacted: it is corrupt, or missing."""

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
        missing: Callable[[int, ObjectNotFound], TidelogError],
        offload: Offload,
    ) -> None:
        """`on_read` hears how many bytes came, and may take its time; `missing` makes the error for an object that is
        not in the bucket; `offload` runs the checks aside."""
        self._store = store
        self._cluster_id = cluster_id
        self._on_read = on_read
        self._missing = missing
        self._offload = offload
        self._whole: dict[int, View] = {}

    def _key(self, object_id: int) -> str:
        return object_key(self._cluster_id, object_id)

    async def index(self, one: ObjectFacts) -> ObjectIndex:
        """The checked index of an input. Raises `BadInput`, what `missing` makes, `Unavailable`."""
        try:
            return await self._index(one)
        except CorruptData as error:
            log.error("corrupt index in compaction, asking again", extra={"object": one.object_id, "error": error})
        try:
            return await self._index(one)
        except CorruptData as error:
            raise BadInput(one.object_id, error.message) from error

    async def _index(self, one: ObjectFacts) -> ObjectIndex:
        key, object_id = self._key(one.object_id), one.object_id
        store, receipt = with_receipt(self._store)
        try:
            tail = await load_tail(store, key, one.size, object_id=object_id, cluster_id=self._cluster_id)
        except ObjectNotFound as error:
            raise self._missing(object_id, error) from error
        receipt.settle((entry.stream_id, entry.length) for entry in tail.index)
        await self._on_read(len(tail.data))
        if tail.start == 0:
            self._whole[object_id] = tail.data
        return tail.index

    async def blocks(self, output: OutputPlan) -> dict[BlockSource, Block]:
        """All blocks of an output, checked. Raises `BadInput`, what `missing` makes, `Unavailable`."""
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
            log.error("corrupt block in compaction, asking again", extra={"object": object_id, "error": decoded})
            parts = await self._get(object_id, batch)
            decoded = await self._offload(partial(_decode, self._key(object_id), batch, parts))
        if isinstance(decoded, CorruptData):
            raise BadInput(object_id, decoded.message)
        return decoded

    async def _get(self, object_id: int, batch: list[BlockSource]) -> list[View]:
        ranges = [(source.entry.position, source.entry.end_position) for source in batch]
        store, receipt = with_receipt(self._store)
        try:
            parts = await store.get_ranges(self._key(object_id), ranges)
        except ObjectNotFound as error:
            raise self._missing(object_id, error) from error
        except InvalidInput as error:
            raise BadInput(object_id, f"the object was cut short: {error.message}") from error
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
    """The blocks, or what is wrong with the first bad one."""
    try:
        return [Block.decode(data, source.entry, key=key) for source, data in zip(batch, parts, strict=True)]
    except CorruptData as error:
        return error
