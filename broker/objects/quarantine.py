"""Reads the records set aside of a quarantined stream: a release drops them from the log, and no other copy exists.

Entry: `set_aside_records`, `as_document`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tidelog.batch.batch import iter_records, parse_header
from tidelog.batch.codec import Record
from tidelog.runtime.text import text_or_base64
from tidelog.storage.bucket.store import ObjectInfo, ObjectStore
from tidelog.storage.objects.format import Block
from tidelog.storage.objects.key import quarantine_prefix
from tidelog.storage.objects.reader import get_range, load_index


async def set_aside_records(store: ObjectStore, cluster_id: str, stream_id: int) -> AsyncIterator[Record]:
    """The records of a data stream's objects under `quarantine/`, in the order in which they were appended
    to the WAL of a replica set.

    Raises `CorruptData` at the first unreadable record, and `Unavailable`.
    """
    found = [each async for each in store.list(quarantine_prefix(cluster_id, stream_id))]
    for info in sorted(found, key=_place):
        index = await load_index(store, info.key, info.size, cluster_id=cluster_id)
        for entry in index:
            data = await get_range(store, info.key, entry.position, entry.end_position)
            for append in Block.decode(data, entry, key=info.key):
                header = parse_header(append.payload)
                if not header.is_control:
                    for record in iter_records(append.payload, header=header):
                        yield record._replace(offset=record.offset - header.base_offset + append.base_offset)


def _place(info: ObjectInfo) -> tuple[str, list[int]]:
    """Sort key: replica sets, and the objects of one WAL range, are numbered without leading zeros."""
    wal_start, *numbers = info.key.rpartition("/")[2].split("-")
    return wal_start, [int(each) for each in numbers]


def as_document(topic: str, partition: int, record: Record) -> dict[str, Any]:
    """Return a record in the format of `tidelog produce --format json`."""
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        **text_or_base64("key", record.key),
        **text_or_base64("value", record.value),
        "headers": [{"key": name, **text_or_base64("value", value)} for name, value in record.headers],
    }
