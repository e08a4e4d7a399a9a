"""Kafka's record batches inside of the blocks of an object, checked as whoever reads them would find them.

A block's checksum tells that its bytes are those that were uploaded. This looks whether they are what a consumer can
read: every batch's format and CRC-32C; its records decompressed (within the brokers' bound) and decoded, as many as the
header tells, with ascending offsets; and the batches of an append one after the other within its offsets.

Entry: `look_inside`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark_tidelog.decode import check_batch
from pyspark_tidelog.plan import DATA, STREAM_PARTS
from tidelog.batch.batch import iter_batches
from tidelog.batch.errors import CorruptRecord, RecordTooLarge, UnsupportedCompression
from tidelog.storage.objects.format import Block
from tidelog.storage.records import StreamEntry


def look_inside(block: Block) -> Iterator[tuple[StreamEntry, str]]:
    """Yield the appends of a block whose batches are wrong, and what is; nothing for a stream without batches."""
    if block.stream_id % len(STREAM_PARTS) != DATA:
        return
    for entry in block:
        if entry.is_hole:
            continue
        try:
            _check(entry)
        except (CorruptRecord, RecordTooLarge, UnsupportedCompression) as error:
            yield entry, error.message


def _check(entry: StreamEntry) -> None:
    """Raise what `check_batch` raises, and `CorruptRecord` for offsets that are not the entry's."""
    at, end = entry.base_offset, entry.base_offset + entry.count
    for header, batch in iter_batches(entry.payload):
        if not at <= header.base_offset <= header.last_offset < end:
            raise CorruptRecord(
                f"batch {header.base_offset} has offsets up to {header.last_offset}; {at} to {end - 1} are its place"
            )
        check_batch(header, batch)
        at = header.last_offset + 1
