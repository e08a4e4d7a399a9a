"""Manifests: which objects hold ranges of offsets, as an object in the bucket that a reader's tasks look them up in.

A manifest has the layout of every object (`tidelog.storage.objects.format`), with kind 3. In place of streams it has
the ranges of a question, by their numbers from 0 on, and in place of offsets the numbers of their slices: record
`[base, base + count)` of "stream" r is a *page* with so many slices of range r.

    page = version 1 (1 byte) | msgpack array of [object id, kind, bytes of the object, start offset, end offset]

Invariants: what the format checks of every object (whole, of this id, of this cluster; rule 10); a page has as many
slices as its record says; the slices of a range are in the order of their offsets, and may overlap where compaction
replaced objects between two pages. Data readers refuse a manifest by its kind, and this reader refuses data.

Docs: docs/formats/objects.md. Entry: `ManifestPages`, `read_slices`, `iterate_manifest`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import msgspec

from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.storage.bucket.store import ObjectStore, View
from tidelog.storage.commits import ObjectSlice
from tidelog.storage.objects.format import MANIFEST_KIND, Block, IndexEntry, ObjectIndex, corrupt
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import get_range, load_index
from tidelog.storage.objects.writer import BuiltObject, build_object
from tidelog.storage.records import StreamEntry

PAGE_VERSION = 1
PAGE_SLICES = 512
"""Slices of one page: found and encoded within a millisecond."""
BLOCK_BYTES = 64 << 10
"""Size of a block: what a task reads for its slices, at least."""
RUN_BYTES = 1 << 20
"""Blocks that are read by one request when all of a manifest is read."""

_encode = msgspec.msgpack.Encoder().encode
_slices: msgspec.msgpack.Decoder[list[ObjectSlice]] = msgspec.msgpack.Decoder(list[ObjectSlice])


class ManifestId(NamedTuple):
    """A manifest in the bucket."""

    object_id: int
    size: int
    """Bytes."""


class ManifestPages:
    """The pages of a manifest that is being made: about 25 bytes for each slice."""

    def __init__(self) -> None:
        self._pages: dict[int, list[StreamEntry]] = {}
        self.slices = 0
        """In all ranges."""

    def add(self, range_number: int, slices: Sequence[ObjectSlice]) -> None:
        """Add a page to a range. Ranges come in order. At most `PAGE_SLICES` slices, at least one."""
        assert 0 < len(slices) <= PAGE_SLICES, len(slices)
        pages = self._pages.setdefault(range_number, [])
        first = pages[-1].base_offset + pages[-1].count if pages else 0
        pages.append(StreamEntry(first, len(slices), bytes([PAGE_VERSION]) + _encode(slices)))
        self.slices += len(slices)

    def drop(self, range_number: int) -> None:
        """Forget the pages of a range."""
        self.slices -= sum(page.count for page in self._pages.pop(range_number, ()))

    def build(self, object_id: int, cluster_id: str, created_ms: int) -> BuiltObject:
        """Return the object. There is at least one page. Takes some milliseconds for 100,000 slices."""
        return build_object(
            object_id=object_id,
            kind=MANIFEST_KIND,
            cluster_id=cluster_id,
            created_ms=created_ms,
            parts=list(self._pages.items()),
            block_bytes=BLOCK_BYTES,
        )


async def _index(store: ObjectStore, cluster_id: str, manifest: ManifestId) -> ObjectIndex:
    return await load_index(
        store,
        object_key(cluster_id, manifest.object_id),
        manifest.size,
        object_id=manifest.object_id,
        cluster_id=cluster_id,
        kinds=(MANIFEST_KIND,),
    )


async def read_slices(
    store: ObjectStore, cluster_id: str, manifest: ManifestId, range_number: int, first: int, count: int
) -> list[ObjectSlice]:
    """Return `count` slices of a range from number `first` on, by two requests or, of a long index, three.

    Raises `ObjectNotFound` when the manifest's lease has ended, `CorruptData` (also where it has fewer), `Unavailable`.
    """
    index = await _index(store, cluster_id, manifest)
    wanted: list[IndexEntry] = []
    for entry in index.entries_from(index.find(range_number, first)):
        if entry.stream_id != range_number or entry.start_offset >= first + count:
            break
        wanted.append(entry)
    if not wanted or wanted[0].start_offset > first or wanted[-1].end_offset < first + count:
        raise corrupt(index.key, 0, f"slices of range {range_number}", f"{first} to {first + count}", "fewer")
    found = [each for _, slices in await _pages(store, index, wanted) for each in slices]
    return found[first - wanted[0].start_offset :][:count]


async def iterate_manifest(
    store: ObjectStore, cluster_id: str, manifest: ManifestId
) -> AsyncIterator[tuple[int, list[ObjectSlice]]]:
    """Yield all pages in order, as number of the range and slices. Holds about `RUN_BYTES`. Raises as `read_slices`."""
    index = await _index(store, cluster_id, manifest)
    for run in _runs(index):
        for page in await _pages(store, index, run):
            yield page


def _runs(index: ObjectIndex) -> Iterator[list[IndexEntry]]:
    run: list[IndexEntry] = []
    for entry in index:
        if run and entry.end_position - run[0].position > RUN_BYTES:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


async def _pages(
    store: ObjectStore, index: ObjectIndex, run: Sequence[IndexEntry]
) -> list[tuple[int, list[ObjectSlice]]]:
    """Read neighbouring blocks by one request."""
    position = run[0].position
    view = memoryview(await get_range(store, index.key, position, run[-1].end_position))
    found: list[tuple[int, list[ObjectSlice]]] = []
    for entry in run:
        data = view[entry.position - position : entry.end_position - position]
        found += (
            (entry.stream_id, _decode(index.key, entry.position, page.count, page.payload))
            for page in Block.decode(data, entry, key=index.key)
        )
    return found


def _decode(key: str, position: int, count: int, payload: View) -> list[ObjectSlice]:
    version = payload[0] if len(payload) else None
    if version != PAGE_VERSION:
        error = corrupt(key, position, "page version", PAGE_VERSION, version)
        error.hint = "written by a newer version of Tidelog? upgrade this one"
        raise error
    try:
        slices = _slices.decode(payload[1:])
    except DECODE_ERRORS as error:
        raise corrupt(key, position, "page", "slices", error) from error
    if len(slices) != count:
        raise corrupt(key, position, "slices of a page", count, len(slices))
    return slices
