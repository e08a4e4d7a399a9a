"""What every object store promises (`tidelog.storage.bucket.store`), held against each backend and each S3 server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.s3_servers import KINDS
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Closed, InvalidInput
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.store import ObjectExists, ObjectNotFound, ObjectStore

MIB = 1 << 20

Body = Callable[[ObjectStore], Awaitable[None]]
Run = Callable[[Body], None]


CLIENTS = ("aiobotocore", "obstore")


@pytest.fixture(
    params=[
        "memory",
        "local",
        *(pytest.param(f"{kind}-{client}", marks=pytest.mark.servers(kind)) for kind in KINDS for client in CLIENTS),
    ],
)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    """A new, empty store."""
    open_store: Callable[[], ObjectStore]
    if request.param == "memory":
        open_store = MemoryObjectStore
    elif request.param == "local":
        open_store = lambda: LocalObjectStore(tmp_path / "bucket")  # noqa: E731
    else:
        kind, client = request.param.split("-")
        server = request.getfixturevalue(f"{kind}_server")
        settings = server.settings(prefix="cluster-1/", multipart_bytes=5 * MIB, client=client)
        open_store = lambda: S3ObjectStore(settings, SystemClock(), random.Random(7))  # noqa: E731

    store = open_store()
    try:
        if isinstance(store, S3ObjectStore):
            await store.start()
        yield store
    finally:
        await store.close()


async def keys(store: ObjectStore, prefix: str = "", *, start_after: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix, start_after=start_after)]


async def test_a_put_object_is_read_back_whole_and_described(store: ObjectStore) -> None:
    written = await store.put("a/b.obj", [b"one", bytearray(b"two"), memoryview(b"xthreex")[1:6]])
    assert await store.get("a/b.obj") == b"onetwothree"
    info = await store.head("a/b.obj")
    assert (info.key, info.size, info.etag) == ("a/b.obj", 11, written.etag)
    assert info.etag
    assert abs(info.modified_ms - SystemClock().time_ms()) < 60_000


async def test_an_empty_object_exists(store: ObjectStore) -> None:
    await store.put("empty", [])
    assert await store.get("empty") == b""
    assert (await store.head("empty")).size == 0
    with pytest.raises(InvalidInput):
        await store.get_ranges("empty", [(0, 1)])


async def test_a_put_replaces_the_object(store: ObjectStore) -> None:
    first = await store.put("k", [b"first"])
    second = await store.put("k", [b"second!"])
    assert first.etag != second.etag
    assert await store.get("k") == b"second!"
    assert (await store.head("k")).size == 7


async def test_a_conditional_create_fails_where_the_key_is_taken_and_changes_nothing(
    store: ObjectStore,
) -> None:
    await store.put("k", [b"mine"], if_absent=True)
    with pytest.raises(ObjectExists):
        await store.put("k", [b"yours"], if_absent=True)
    assert await store.get("k") == b"mine"
    await store.delete(["k"])
    await store.put("k", [b"yours"], if_absent=True)
    assert await store.get("k") == b"yours"


async def test_of_many_concurrent_conditional_creates_exactly_one_wins(store: ObjectStore) -> None:
    for round_ in range(3):
        key = f"fence/{round_}"
        bodies = [b"writer %d " % writer * 500 for writer in range(16)]
        outcomes = await asyncio.gather(
            *(store.put(key, [one], if_absent=True) for one in bodies), return_exceptions=True
        )
        won = [bodies[i] for i, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
        assert len(won) == 1, outcomes
        assert all(isinstance(o, ObjectExists) for o in outcomes if isinstance(o, BaseException)), outcomes
        assert await store.get(key) == won[0]


async def test_a_large_body_is_stored_whole(store: ObjectStore) -> None:
    data = random.Random(3).randbytes(12 * MIB + 4321)  # three parts where parts have 5 MiB
    view = memoryview(data)
    await store.put("big", [view[:MIB], view[MIB : 7 * MIB + 1], view[7 * MIB + 1 :]])
    assert (await store.head("big")).size == len(data)
    assert await store.get("big") == data
    edge = 5 * MIB
    assert await store.get_ranges("big", [(edge - 3, edge + 3)]) == [data[edge - 3 : edge + 3]]


async def test_a_large_conditional_create_is_conditional_too(store: ObjectStore) -> None:
    data = random.Random(4).randbytes(6 * MIB)
    await store.put("big", [data], if_absent=True)
    with pytest.raises(ObjectExists):
        await store.put("big", [bytes(6 * MIB)], if_absent=True)
    assert await store.get("big") == data


async def test_ranges_come_back_in_the_order_asked_whatever_they_share(store: ObjectStore) -> None:
    data = random.Random(5).randbytes(700_000)
    await store.put("k", [data])
    ranges = [(600_000, 700_000), (0, 10), (10, 20), (5, 15), (0, 10), (300_000, 300_001), (699_999, 700_000)]
    assert await store.get_ranges("k", ranges) == [data[start:end] for start, end in ranges]
    assert await store.get_ranges("k", []) == []


@pytest.mark.parametrize("bad", [(5, 5), (6, 5), (-1, 5), (0, 101), (100, 101), (5000, 5001)])
async def test_a_range_that_is_empty_reversed_or_past_the_end_is_refused(
    store: ObjectStore, bad: tuple[int, int]
) -> None:
    await store.put("k", [bytes(100)])
    with pytest.raises(InvalidInput):
        await store.get_ranges("k", [(0, 10), bad])


async def test_an_absent_object_is_not_found(store: ObjectStore) -> None:
    await store.put("there/x", [b"x"])
    for key in ("absent", "there", "there/x/y"):
        with pytest.raises(ObjectNotFound, match=key):
            await store.get(key)
        with pytest.raises(ObjectNotFound, match=key):
            await store.head(key)
        with pytest.raises(ObjectNotFound, match=key):
            await store.get_ranges(key, [(0, 1)])


ODD_KEYS = ["a", "a b/ü", "a!", "a+b", "b&<c>", "b%20c", "c=1/x", "c=10/x", "dir/1", "dir.x", "é", "~", "日本/語", "😀"]


async def test_listing_is_in_the_order_of_utf8_bytes_and_takes_odd_characters(store: ObjectStore) -> None:
    for key in random.Random(6).sample(ODD_KEYS, len(ODD_KEYS)):
        await store.put(key, [key.encode()])
    expected = sorted(ODD_KEYS, key=str.encode)
    assert await keys(store) == expected
    assert await keys(store, "c=1") == ["c=1/x", "c=10/x"]
    assert await keys(store, "dir") == ["dir.x", "dir/1"]
    assert await keys(store, "dir/") == ["dir/1"]
    assert await keys(store, "nothing") == []
    for start in (*ODD_KEYS, "dir/", "b"):
        assert await keys(store, start_after=start) == [key for key in expected if key > start], start
    assert await keys(store, "dir", start_after="dir.x") == ["dir/1"]
    assert await keys(store, "b", start_after="a") == [key for key in expected if key.startswith("b")]
    assert await keys(store, "a", start_after="z") == []
    for key in ODD_KEYS:
        assert await store.get(key) == key.encode()
    assert {info.key: info.size async for info in store.list("")} == {key: len(key.encode()) for key in ODD_KEYS}


async def test_a_listing_and_a_delete_of_more_than_one_page_are_complete(store: ObjectStore) -> None:
    names = [f"page/{number:05d}" for number in range(1105)]
    for first in range(0, len(names), 64):
        await asyncio.gather(*(store.put(name, [b"x"]) for name in names[first : first + 64]))
    assert await keys(store, "page/") == names
    assert await keys(store, "page/", start_after=names[1050]) == names[1051:]
    await store.delete([*names, "never/there"])
    assert await keys(store) == []


async def test_what_was_acknowledged_is_visible_at_once(store: ObjectStore) -> None:
    for number in range(20):
        await store.put(f"x/{number:02d}", [b"%d" % number])
        assert await keys(store, "x/") == [f"x/{i:02d}" for i in range(number + 1)]
    await store.delete(["x/07"])
    assert "x/07" not in await keys(store, "x/")
    with pytest.raises(ObjectNotFound):
        await store.head("x/07")


async def test_deleting_what_is_not_there_is_success(store: ObjectStore) -> None:
    await store.delete([])
    await store.delete(["no", "no", "neither/this"])
    await store.put("a/b/c", [b"x"])
    await store.delete(["a/b/c", "a/b/c", "a/b", "a"])
    await store.put("a", [b"now an object"])
    assert await keys(store) == ["a"]


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a\0b",
    "a\nb",
    "a\uffff",
    "x" * 256,
    "d/" * 512 + "x",
    "\ud800",
]


@pytest.mark.parametrize("key", BAD_KEYS)
async def test_a_key_that_some_backend_could_not_hold_is_refused_by_all(store: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidInput):
        await store.put(key, [b"x"])
    with pytest.raises(InvalidInput):
        await store.get(key)
    with pytest.raises(InvalidInput):
        await store.delete([key])
    assert await keys(store) == []


async def test_the_longest_key_is_held(store: ObjectStore) -> None:
    key = "/".join(["x" * 255, "y" * 255, "ü" * 127, "z" * 200])
    await store.put(key, [b"x"], if_absent=True)
    assert await keys(store) == [key]
    assert await store.get(key) == b"x"


async def test_the_probe_finds_nothing_lacking_and_leaves_nothing_behind(store: ObjectStore) -> None:
    capabilities = await store.probe()
    assert capabilities.problems == ()
    assert capabilities.conditional_create
    assert await keys(store) == []


async def test_every_operation_is_counted(store: ObjectStore) -> None:
    await store.put("k", [bytes(1000)])
    await store.get("k")
    await store.get_ranges("k", [(0, 100), (900, 1000)])
    with pytest.raises(ObjectNotFound):
        await store.head("absent")
    with pytest.raises(InvalidInput):
        await store.get_ranges("k", [(900, 2000)])
    await keys(store)
    await store.delete(["k"])
    counted = store.stats.snapshot()
    for operation in ("put", "get", "head", "list", "delete"):
        assert counted[operation]["count"] == 1, operation
        assert counted[operation]["errors"] == 0, operation
        assert counted[operation]["latency_buckets"]["+Inf"] == 1
        assert counted[operation]["latency_sum_s"] >= 0
    assert counted["put"]["bytes_out"] == 1000
    assert counted["get"]["bytes_in"] == 1000
    assert counted["get_ranges"]["bytes_in"] >= 200
    assert counted["get_ranges"]["errors"] == 1
    assert all(figures["in_flight"] == 0 for figures in counted.values())


async def test_a_closed_store_refuses_calls(store: ObjectStore) -> None:
    await store.put("k", [b"x"])
    await store.close()
    with pytest.raises(Closed):
        await store.get("k")
    with pytest.raises(Closed):
        await store.put("k", [b"x"])
    await store.close()


async def test_the_url_names_the_place_and_no_secret(store: ObjectStore) -> None:
    assert store.url.split(":", 1)[0] in ("memory", "file", "s3")
    assert "secret" not in store.url
