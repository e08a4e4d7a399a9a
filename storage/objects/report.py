"""Reports of `tidelog object list|inspect|verify`: an object's layout, and the result of checking every byte.

Verification reads everything: footer, index, each block and each record header. A problem names the part, the byte
position, the stream, the expected and the actual value. A part that fails its check is read a second time before it is
reported, since the transfer may have been at fault. Verification continues after a bad block, so that all are reported.
Memory is bounded whatever the object's size.

Entry: `inspect_object`, `examine_object` (returns `Problem`s), `compare_with_metadata`, `list_objects`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from typing import Literal

import msgspec

from tidelog.runtime.errors import CorruptData
from tidelog.storage.bucket.store import ObjectInfo, ObjectStore
from tidelog.storage.commits import ObjectKind, StreamRange
from tidelog.storage.objects.format import (
    ALL_KINDS,
    DATA_KINDS,
    FOOTER,
    INDEX_OVERHEAD,
    MANIFEST_KIND,
    Block,
    DamagedObject,
    Footer,
    IndexEntry,
    ObjectIndex,
    corrupt,
)
from tidelog.storage.objects.key import object_prefix, parse_object_key
from tidelog.storage.objects.reader import get_info, get_range, load_index
from tidelog.storage.records import StreamEntry

_BATCH_BYTES = 8 << 20
KINDS = {
    **{int(kind): kind.name.lower().replace("_", "-") for kind in ObjectKind},
    MANIFEST_KIND: "manifest",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of an object."""

    part: Literal["object", "footer", "index", "block", "batch", "metadata"]
    """`object`: it is missing, or truncated. `metadata`: it is intact but differs from the metadata. `batch`: a block
    passes its checksum, and has something that its reader cannot decode."""
    message: str
    position: int = -1
    """Byte of the object where the damaged part begins; -1 if not applicable."""
    length: int = -1
    """Bytes of the damaged part; -1 if not applicable."""
    stream_id: int = -1
    """Block, batch: the stream of its data; metadata: the one that is lacking. Else -1: every stream in the object."""
    start_offset: int = -1
    end_offset: int = -1


LookInside = Callable[[Block], Iterable[tuple[StreamEntry, str]]]
"""Tells of a sound block which of its records are wrong, and what is."""


class StreamSummary(msgspec.Struct, frozen=True):
    """One stream's part of an object."""

    stream_id: int
    start_offset: int
    end_offset: int
    blocks: int
    records: int
    size_bytes: int
    """Bytes of its blocks, headers included."""


class ObjectReport(msgspec.Struct, frozen=True):
    """The contents of an object according to its footer and index."""

    key: str
    size_bytes: int
    modified_ms: int
    object_id: int
    """-1 for quarantined data."""
    kind: str
    created_ms: int
    cluster_fingerprint: str
    blocks: int
    records: int
    streams: tuple[StreamSummary, ...]


def _summaries(index: ObjectIndex) -> Iterator[StreamSummary]:
    entry: IndexEntry | None = None
    first = blocks = records = size = 0
    stream_id = end = 0
    for entry in index:
        if blocks and entry.stream_id != stream_id:
            yield StreamSummary(stream_id, first, end, blocks, records, size)
            blocks = records = size = 0
        if not blocks:
            first = entry.start_offset
        stream_id, end = entry.stream_id, entry.end_offset
        blocks, records, size = blocks + 1, records + entry.record_count, size + entry.length
    if blocks:
        yield StreamSummary(stream_id, first, end, blocks, records, size)


async def _load(store: ObjectStore, key: str, size: int, kinds: Collection[int] = DATA_KINDS) -> ObjectIndex:
    named = parse_object_key(key)
    cluster_id, object_id = named if named is not None else (None, None)
    return await load_index(store, key, size, object_id=object_id, cluster_id=cluster_id, kinds=kinds)


async def inspect_object(store: ObjectStore, key: str) -> ObjectReport:
    """Read footer and index of one object. Raises `ObjectNotFound`, `CorruptData`, `Unavailable`."""
    info = await get_info(store, key)
    return _report(info, await _load(store, key, info.size, ALL_KINDS))


def _report(info: ObjectInfo, index: ObjectIndex) -> ObjectReport:
    footer = index.footer
    return ObjectReport(
        key=index.key,
        size_bytes=info.size,
        modified_ms=info.modified_ms,
        object_id=footer.object_id,
        kind=KINDS[footer.kind],
        created_ms=footer.created_ms,
        cluster_fingerprint=footer.cluster.hex(),
        blocks=footer.block_count,
        records=footer.record_count,
        streams=tuple(_summaries(index)),
    )


def _batches(index: ObjectIndex) -> Iterator[list[IndexEntry]]:
    batch: list[IndexEntry] = []
    for entry in index:
        if batch and entry.end_position - batch[0].position > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _check_blocks(
    data: bytes | memoryview, batch: list[IndexEntry], key: str, look: LookInside | None = None
) -> list[tuple[IndexEntry, list[Problem]]]:
    """Return the blocks with problems of those that are contiguous in `data`."""
    first = batch[0].position
    found = (
        (entry, _check_block(data[entry.position - first : entry.end_position - first], entry, key, look))
        for entry in batch
    )
    return [(entry, problems) for entry, problems in found if problems]


def _check_block(
    data: bytes | memoryview, entry: IndexEntry, key: str, look: LookInside | None = None
) -> list[Problem]:
    whole = Problem(
        part="block",
        message="",
        position=entry.position,
        length=entry.length,
        stream_id=entry.stream_id,
        start_offset=entry.start_offset,
        end_offset=entry.end_offset,
    )
    try:
        block = Block.decode(data, entry, key=key)
    except CorruptData as error:
        return [msgspec.structs.replace(whole, message=error.message)]
    return [
        msgspec.structs.replace(
            whole,
            part="batch",
            message=f"object {key}, byte {entry.position}: {what}",
            start_offset=each.base_offset,
            end_offset=each.base_offset + each.count,
        )
        for each, what in (look(block) if look is not None else ())
    ]


def _index_problem(error: CorruptData, size: int) -> Problem:
    """Return the problem of the end of an object of `size` bytes."""
    if not isinstance(error, DamagedObject) or size < FOOTER.size + INDEX_OVERHEAD:
        return Problem(part="object", message=error.message)
    footer_at = size - FOOTER.size
    if error.position == footer_at:
        return Problem(part="footer", message=error.message, position=footer_at, length=FOOTER.size)
    return Problem(part="index", message=error.message, position=error.position, length=footer_at - error.position)


async def verify_object(store: ObjectStore, key: str) -> list[Problem]:
    """Return all problems of the object; empty when every byte is intact.

    Raises `ObjectNotFound`, `Unavailable`.
    """
    return (await examine_object(store, key))[0]


async def examine_object(
    store: ObjectStore, key: str, look: LookInside | None = None
) -> tuple[list[Problem], ObjectReport | None]:
    """As `verify_object`; return the contents, too, if they can be read: None after a problem of footer or index.

    `look`: is given each sound block, too; what it finds are problems of part `batch`.

    Raises `ObjectNotFound`, `Unavailable`.
    """
    info = await get_info(store, key)
    try:
        try:
            index = await _load(store, key, info.size)
        except CorruptData:
            index = await _load(store, key, info.size)
    except CorruptData as error:
        return [_index_problem(error, info.size)], None
    problems: list[Problem] = []
    for batch in _batches(index):
        try:
            data = await get_range(store, key, batch[0].position, batch[-1].end_position)
            for entry, _ in _check_blocks(data, batch, key, look):
                again = await get_range(store, key, entry.position, entry.end_position)
                problems += _check_block(again, entry, key, look)
        except CorruptData as error:
            return [*problems, Problem(part="object", message=error.message)], _report(info, index)
    return problems, _report(info, index)


def compare_with_metadata(
    report: ObjectReport, size: int, kind: str | None, ranges: Iterable[StreamRange]
) -> list[Problem]:
    """Return how a sound object differs from its metadata: its bytes, its kind (as in `KINDS`), its ranges of streams.

    The object may have more streams and offsets than `ranges`.
    """
    problems = []
    if report.size_bytes != size:
        problems.append(f"object {report.key} has {report.size_bytes} bytes; its metadata says {size}")
    if report.kind != kind:
        problems.append(f"object {report.key} is a {report.kind} object; its metadata says {kind}")
    found = [Problem(part="metadata", message=message) for message in problems]
    held = {one.stream_id: one for one in report.streams}
    for one in ranges:
        stream = held.get(one.stream_id)
        if stream is None or one.start_offset < stream.start_offset or stream.end_offset < one.end_offset:
            has = f"{stream.start_offset} to {stream.end_offset}" if stream is not None else "none"
            message = (
                f"object {report.key} lacks offsets of stream {one.stream_id}: its metadata says "
                f"{one.start_offset} to {one.end_offset}, its index {has}"
            )
            found.append(
                Problem(
                    part="metadata",
                    message=message,
                    stream_id=one.stream_id,
                    start_offset=one.start_offset,
                    end_offset=one.end_offset,
                )
            )
    return found


def verify_bytes(data: bytes, key: str) -> list[Problem]:
    """As `verify_object`, for an object in memory; the key is only named in problems."""
    try:
        if len(data) < FOOTER.size + INDEX_OVERHEAD:
            raise corrupt(key, 0, "object size", f"at least {FOOTER.size + INDEX_OVERHEAD} bytes", len(data))
        footer = Footer.decode(data[-FOOTER.size :], object_size=len(data), key=key)
        index = ObjectIndex.decode(data[footer.index_position : -FOOTER.size], footer, key=key)
    except CorruptData as error:
        return [_index_problem(error, len(data))]
    view = memoryview(data)
    problems: list[Problem] = []
    for batch in _batches(index):
        found = _check_blocks(view[batch[0].position : batch[-1].end_position], batch, key)
        problems += [problem for _, mine in found for problem in mine]
    return problems


async def list_objects(store: ObjectStore, cluster_id: str) -> AsyncIterator[tuple[int, ObjectInfo]]:
    """Yield `(object id, info)` of every object of a cluster in the bucket, in key order. Raises `Unavailable`."""
    async for info in store.list(object_prefix(cluster_id)):
        named = parse_object_key(info.key)
        if named is not None and named[0] == cluster_id:
            yield named[1], info
