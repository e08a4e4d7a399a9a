"""What was set aside of a quarantined stream is read back in its order, and damage in it is an error."""

from __future__ import annotations

import pytest

from tidelog.batch.batch import Compression, Record, build_batch
from tidelog.broker.objects.quarantine import as_document, set_aside_records
from tidelog.runtime.errors import CorruptData
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import ObjectKind
from tidelog.storage.objects.format import QUARANTINE_OBJECT_ID
from tidelog.storage.objects.key import quarantine_key, quarantine_prefix
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry

CLUSTER, STREAM = "cluster", 5


async def set_aside(
    store: MemoryObjectStore, wal_start: int, part: int, offset: int, *values: bytes, replica_set: int = 3
) -> str:
    """One object with a batch at `offset`, whose header still has the offset 0."""
    batch = build_batch([Record(0, 1000, None, value) for value in values], compression=Compression.GZIP)
    built = build_object(
        object_id=QUARANTINE_OBJECT_ID,
        kind=ObjectKind.STREAM,
        cluster_id=CLUSTER,
        created_ms=5,
        parts=[(STREAM, [StreamEntry(offset, len(values), batch)])],
        block_bytes=100,
    )
    key = quarantine_key(CLUSTER, STREAM, replica_set, wal_start, part)
    await store.put(key, [b"".join(built.body)])
    return key


async def found(store: MemoryObjectStore) -> list[Record]:
    return [record async for record in set_aside_records(store, CLUSTER, STREAM)]


async def test_records_come_in_the_order_of_the_log_with_its_offsets() -> None:
    store = MemoryObjectStore()
    await set_aside(store, 512, 0, 30, b"last")
    await set_aside(store, 64, 10, 20, b"c")
    await set_aside(store, 64, 2, 10, b"a", b"b")
    assert [(one.offset, one.value) for one in await found(store)] == [
        *((10, b"a"), (11, b"b"), (20, b"c"), (30, b"last"))
    ]


async def test_what_two_replica_sets_had_at_one_wal_offset_is_kept_beside_keys_of_before() -> None:
    store = MemoryObjectStore()
    await set_aside(store, 64, 0, 11, b"second", replica_set=3)
    await set_aside(store, 64, 0, 12, b"third", replica_set=10)
    written = await set_aside(store, 32, 0, 10, b"first")
    await store.put(f"{quarantine_prefix(CLUSTER, STREAM)}{32:016x}-0", [await store.get(written)])
    await store.delete([written])
    assert [one.value for one in await found(store)] == [b"first", b"second", b"third"]


async def test_damage_is_told_and_not_passed_over() -> None:
    store = MemoryObjectStore()
    key = await set_aside(store, 64, 0, 10, b"value")
    body = bytearray(await store.get(key))
    body[70] ^= 1
    await store.put(key, [body])
    with pytest.raises(CorruptData, match=key):
        await found(store)


def test_a_record_is_as_produce_takes_it() -> None:
    document = as_document("t", 3, Record(7, 1000, b"\xff", b"value", [("h", None)]))
    assert document == {
        "topic": "t",
        "partition": 3,
        "offset": 7,
        "timestamp": 1000,
        "key_base64": "/w==",
        "value": "value",
        "headers": [{"key": "h", "value": None}],
    }
