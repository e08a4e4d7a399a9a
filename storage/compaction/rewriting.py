"""From the plan of an output to the object: what every compactor does, a broker's and an executor of Spark.

Invariant: the same plan, blocks, start offsets and `created_ms` give the same bytes, so that a repeated or concurrent
attempt can be compared with what it finds in the bucket.

Entry: `build_output`, `records_from`, `merge_holes`, `blamed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tidelog.runtime.errors import CorruptData
from tidelog.storage.compaction.plan import BlockSource, OutputPlan
from tidelog.storage.objects.format import MAX_COUNT, Block, ObjectIndex
from tidelog.storage.objects.writer import BuiltObject, build_object
from tidelog.storage.records import StreamEntry


@dataclass(frozen=True, slots=True)
class OutputIdentity:
    """What an output is called, and how it is laid out."""

    object_id: int
    cluster_id: str
    created_ms: int
    block_bytes: int


def build_output(
    output: OutputPlan, blocks: Mapping[BlockSource, Block], starts: Mapping[int, int], identity: OutputIdentity
) -> BuiltObject:
    """Build an output of its blocks, without the records below the start offset of their stream. Takes CPU."""
    return build_object(
        object_id=identity.object_id,
        kind=output.kind,
        cluster_id=identity.cluster_id,
        created_ms=identity.created_ms,
        parts=[
            (stream_id, [*merge_holes(records_from((blocks[source] for source in sources), starts[stream_id]))])
            for stream_id, sources in output.parts
        ],
        block_bytes=identity.block_bytes,
    )


def records_from(blocks: Iterable[Block], start_offset: int) -> Iterator[StreamEntry]:
    """Yield the records that hold an offset at or above `start_offset`."""
    for block in blocks:
        for record in block:
            if record.base_offset + record.count > start_offset:
                yield record


def merge_holes(records: Iterable[StreamEntry]) -> Iterator[StreamEntry]:
    """Yield contiguous records with neighbouring holes joined, as far as a record's count goes."""
    hole: StreamEntry | None = None
    for record in records:
        if record.payload:
            if hole is not None:
                yield hole
                hole = None
            yield record
        elif hole is not None and hole.count + record.count <= MAX_COUNT:
            hole = StreamEntry(hole.base_offset, hole.count + record.count, b"")
        else:
            if hole is not None:
                yield hole
            hole = record
    if hole is not None:
        yield hole


def blamed(indexes: Mapping[int, ObjectIndex], error: CorruptData) -> int:
    """Return the input that a layout error is about: the one whose key it names."""
    return next(object_id for object_id, index in indexes.items() if index.key in error.message)
