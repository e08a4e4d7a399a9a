"""Builds an object from the records of its streams, without copying large payloads.

The result is a list of buffers to be written in sequence. Payloads from 4 KiB on are used without a copy (the
buffers must not change until the object is written); blocks of smaller records are joined, because a buffer costs the
writer more than the copy.

Entry: `build_object`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from crc32c import crc32c

from tidelog.batch.checksum import batch_crc_onward
from tidelog.runtime.errors import InvalidInput
from tidelog.runtime.types import Buffer
from tidelog.storage.commits import NewObject, ObjectKind, StreamRange, pack_ranges
from tidelog.storage.objects.format import (
    BLOCK_CRC_AT,
    BLOCK_HEADER,
    BLOCK_MAGIC,
    CRC,
    HOLES_VERSION,
    MAX_BODY_BYTES,
    MAX_COUNT,
    RECORD_HEADER,
    VERSION,
    Footer,
    IndexEntry,
    cluster_fingerprint,
    encode_index,
)
from tidelog.storage.records import CheckedBatch, StreamEntry

_SCATTER_BYTES = 4096

StreamPart = tuple[int, Sequence[StreamEntry]]
"""A stream id and its records, contiguous and at least one."""


@dataclass(frozen=True, slots=True)
class BuiltObject:
    """An object ready to be put."""

    object_id: int
    kind: int
    body: list[Buffer]
    size: int
    """Size in bytes, the sum of `body`."""
    ranges: tuple[StreamRange, ...]

    def as_new_object(self) -> NewObject:
        """Return its description for a commit."""
        return NewObject(self.object_id, int(self.kind), self.size, pack_ranges(self.ranges))


def _blocks_of(records: Sequence[StreamEntry], block_bytes: int) -> Iterator[Sequence[StreamEntry]]:
    """Split records into runs whose bodies stay within `block_bytes`; a run holds at least one."""
    first, size = 0, 0
    for number, record in enumerate(records):
        length = RECORD_HEADER.size + len(record.payload)
        if size and size + length > block_bytes:
            yield records[first:number]
            first, size = number, 0
        size += length
    yield records[first:]


def encode_block(stream_id: int, records: Sequence[StreamEntry], position: int) -> tuple[list[Buffer], IndexEntry]:
    """Return a block of `records` at byte `position` of its object. Raises `InvalidInput` unless contiguous."""
    start = offset = records[0].base_offset
    pieces: list[Buffer] = [b""]
    length = 0
    for base, count, payload in records:
        if base != offset or not 1 <= count <= MAX_COUNT:
            raise InvalidInput(f"stream {stream_id}: record {base}+{count} does not follow offset {offset}")
        offset += count
        length += RECORD_HEADER.size + len(payload)
        pieces.append(RECORD_HEADER.pack(base, count, len(payload)))
        pieces.append(payload)
    if length > MAX_BODY_BYTES:
        raise InvalidInput(f"stream {stream_id}: a block of {length} bytes at offset {start} is larger than 4 GiB")
    version = VERSION if all(record.payload for record in records) else HOLES_VERSION
    header = BLOCK_HEADER.pack(BLOCK_MAGIC, version, 0, 0, stream_id, start, offset, len(records), length, 0)
    crc = crc32c(header[:BLOCK_CRC_AT])
    if length < _SCATTER_BYTES * len(records):
        pieces = [b"", b"".join(pieces)]
        crc = crc32c(pieces[1], crc)
    else:
        crc = _crc_onward(crc, pieces, records)
    pieces[0] = header[:BLOCK_CRC_AT] + CRC.pack(crc)
    entry = IndexEntry(stream_id, start, offset, position, BLOCK_HEADER.size + length, len(records), crc)
    return pieces, entry


def _crc_onward(crc: int, pieces: Sequence[Buffer], records: Sequence[StreamEntry]) -> int:
    """Return the CRC32C after a block's body; batches checked on arrival are not read again."""
    for number, record in enumerate(records):
        crc = crc32c(pieces[2 * number + 1], crc)
        crc = batch_crc_onward(crc, record.payload) if type(record) is CheckedBatch else crc32c(record.payload, crc)
    return crc


def build_object(
    *,
    object_id: int,
    kind: int,
    cluster_id: str,
    created_ms: int,
    parts: Sequence[StreamPart],
    block_bytes: int,
) -> BuiltObject:
    """Lay out `parts` (sorted by stream id, each id once; exactly one for kind STREAM) as an object of an `ObjectKind`.

    Takes CPU for the checksums (about 0.1 ms per MiB, less for large batches checked in this process): run a large one
    in a worker thread. Raises `InvalidInput` when the parts are not in order or a stream's records are not
    contiguous.
    """
    ids = [stream_id for stream_id, _ in parts]
    if not ids or any(later <= earlier for earlier, later in pairwise(ids)):
        raise InvalidInput(f"object {object_id}: streams must be in order and at least one: {ids}")
    if kind == ObjectKind.STREAM and len(ids) != 1:
        raise InvalidInput(f"object {object_id}: a stream object holds one stream, not {len(ids)}")
    body: list[Buffer] = []
    entries: list[IndexEntry] = []
    ranges: list[StreamRange] = []
    position = 0
    for stream_id, records in parts:
        first = len(entries)
        for run in _blocks_of(records, block_bytes):
            pieces, entry = encode_block(stream_id, run, position)
            if len(entries) > first and entries[-1].end_offset != entry.start_offset:
                raise InvalidInput(f"stream {stream_id}: a gap before offset {entry.start_offset}")
            body += pieces
            entries.append(entry)
            position = entry.end_position
        ranges.append(StreamRange(stream_id, entries[first].start_offset, entries[-1].end_offset))
    index = encode_index(entries)
    footer = Footer(
        index_position=position,
        index_length=len(index),
        block_count=len(entries),
        record_count=sum(entry.record_count for entry in entries),
        object_id=object_id,
        created_ms=created_ms,
        cluster=cluster_fingerprint(cluster_id),
        kind=int(kind),
    ).encode()
    body += (index, footer)
    return BuiltObject(object_id, kind, body, position + len(index) + len(footer), tuple(ranges))
