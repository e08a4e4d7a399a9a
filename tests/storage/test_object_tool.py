"""What the object commands show, and what the cleaner deletes."""

from __future__ import annotations

from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.cleaning.deleter import ObjectCleaner
from tidelog.storage.commits import ObjectKind
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.report import inspect_object, list_objects, verify_object
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry

CLUSTER = "cluster-a"


async def put_one(store: MemoryObjectStore, object_id: int, size: int = 100) -> str:
    parts = [(stream, [StreamEntry(n, 1, bytes(size)) for n in range(10)]) for stream in (1, 2)]
    built = build_object(
        object_id=object_id,
        kind=ObjectKind.STREAM_SET,
        cluster_id=CLUSTER,
        created_ms=77,
        parts=parts,
        block_bytes=3 * (size + 16),
    )
    key = object_key(CLUSTER, object_id)
    await store.put(key, built.body)
    return key


async def test_inspect_shows_each_stream_and_list_each_object() -> None:
    store = MemoryObjectStore()
    key = await put_one(store, 5)
    await put_one(store, 6)
    await store.put(f"{CLUSTER}/objects/zz/strange", [b"x"])
    report = await inspect_object(store, key)
    assert (report.object_id, report.kind, report.created_ms, report.records) == (5, "stream-set", 77, 20)
    assert [(one.stream_id, one.start_offset, one.end_offset, one.blocks, one.records) for one in report.streams] == [
        (1, 0, 10, 4, 10),
        (2, 0, 10, 4, 10),
    ]
    assert report.blocks == 8
    assert sum(one.size_bytes for one in report.streams) < report.size_bytes
    assert [object_id async for object_id, _ in list_objects(store, CLUSTER)] == [5, 6]


async def test_verify_names_every_bad_block_and_an_object_under_a_wrong_key() -> None:
    store = MemoryObjectStore()
    key = await put_one(store, 5, size=3 << 20)
    assert await verify_object(store, key) == []
    body = bytearray(await store.get(key))
    body[100] ^= 1
    body[20 << 20] ^= 1
    await store.put(key, [body])
    problems = await verify_object(store, key)
    assert len(problems) == 2
    assert "at byte 0:" in problems[0].message
    moved = object_key(CLUSTER, 9)
    await store.put(moved, [body])
    (problem,) = await verify_object(store, moved)
    assert "object id: expected 9, found 5" in problem.message
    await store.put(key, [body[:1000]])
    assert len(await verify_object(store, key)) == 1


async def test_deleting_goes_in_batches_and_absent_objects_are_success() -> None:
    store = MemoryObjectStore()
    kept = await put_one(store, 5)
    gone = await put_one(store, 6)
    cleaner = ObjectCleaner(store, CLUSTER)
    await cleaner.delete([6, *range(100, 1500)])
    assert [info.key async for info in store.list("")] == [kept]
    assert gone != kept
    assert cleaner.deleted == 1401
