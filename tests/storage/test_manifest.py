"""Manifests: what goes in comes out whole and in parts, and neither other objects nor damage are taken for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.test_object_format import build, records
from tests.support.examples import examples
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectNotFound
from tidelog.storage.commits import ObjectSlice
from tidelog.storage.objects.format import MANIFEST_KIND
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.manifest import (
    PAGE_SLICES,
    ManifestId,
    ManifestPages,
    iterate_manifest,
    read_slices,
)
from tidelog.storage.objects.reader import load_index
from tidelog.storage.objects.report import inspect_object
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry

CLUSTER = "cluster-of-manifests"
ID = 77
INT64 = st.integers(0, (1 << 63) - 1)


def slices(count: int, first: int = 0) -> list[ObjectSlice]:
    return [ObjectSlice(at, 1 + at % 2, 100 + at, 10 * at, 10 * at + 10) for at in range(first, first + count)]


def filled(ranges: dict[int, list[ObjectSlice]], page: int = PAGE_SLICES) -> ManifestPages:
    pages = ManifestPages()
    for number, mine in sorted(ranges.items()):
        for first in range(0, len(mine), page):
            pages.add(number, mine[first : first + page])
    return pages


async def stored(pages: ManifestPages) -> tuple[MemoryObjectStore, ManifestId]:
    built = pages.build(ID, CLUSTER, 5)
    store = MemoryObjectStore()
    await store.put(object_key(CLUSTER, ID), built.body)
    return store, ManifestId(ID, built.size)


async def everything(store: MemoryObjectStore, manifest: ManifestId) -> dict[int, list[ObjectSlice]]:
    found: dict[int, list[ObjectSlice]] = {}
    async for number, page in iterate_manifest(store, CLUSTER, manifest):
        found.setdefault(number, []).extend(page)
    return found


@st.composite
def any_ranges(draw: st.DrawFn) -> dict[int, list[ObjectSlice]]:
    one = st.builds(ObjectSlice, INT64, st.sampled_from([1, 2]), INT64, INT64, INT64)
    numbers = draw(st.sets(st.integers(0, 1_000), min_size=1, max_size=4))
    return {number: draw(st.lists(one, min_size=1, max_size=20)) for number in numbers}


@given(ranges=any_ranges(), page=st.integers(1, 7), data=st.data())
@settings(max_examples=examples(100), deadline=None)
async def test_what_goes_in_comes_out_whole_and_in_any_part(
    ranges: dict[int, list[ObjectSlice]], page: int, data: st.DataObject
) -> None:
    pages = filled(ranges, page)
    assert pages.slices == sum(map(len, ranges.values()))
    store, manifest = await stored(pages)
    assert await everything(store, manifest) == ranges
    number = data.draw(st.sampled_from(sorted(ranges)))
    first = data.draw(st.integers(0, len(ranges[number]) - 1))
    count = data.draw(st.integers(1, len(ranges[number]) - first))
    found = await read_slices(store, CLUSTER, manifest, number, first, count)
    assert found == ranges[number][first : first + count]


async def test_a_part_of_a_large_manifest_costs_two_small_requests() -> None:
    wanted = {0: slices(50_000), 3: slices(50_000, 7)}
    store, manifest = await stored(filled(wanted))
    assert manifest.size < 3_000_000, "some 25 bytes a slice"
    assert await read_slices(store, CLUSTER, manifest, 3, 31_000, 700) == wanted[3][31_000:31_700]
    reads = store.stats.snapshot()["get_ranges"]
    assert reads["count"] == 2 and reads["bytes_in"] < 250_000, reads
    assert await everything(store, manifest) == wanted


async def test_more_slices_than_a_range_has_are_an_error_and_never_fewer() -> None:
    store, manifest = await stored(filled({1: slices(10)}, 3))
    for number, first, count in ((1, 0, 11), (1, 10, 1), (0, 0, 1), (2, 0, 1)):
        with pytest.raises(CorruptData, match=f"slices of range {number}"):
            await read_slices(store, CLUSTER, manifest, number, first, count)


async def test_every_flipped_bit_is_found() -> None:
    built = filled({0: slices(4), 2: slices(3)}, 2).build(ID, CLUSTER, 5)
    body = b"".join(built.body)
    for at in range(len(body)):
        flipped = bytearray(body)
        flipped[at] ^= 1 << at % 8
        store = MemoryObjectStore()
        await store.put(object_key(CLUSTER, ID), [bytes(flipped)])
        with pytest.raises(CorruptData):
            await everything(store, ManifestId(ID, len(body)))


async def test_a_manifest_is_no_data_and_data_is_no_manifest() -> None:
    store, manifest = await stored(filled({0: slices(4)}))
    key = object_key(CLUSTER, ID)
    with pytest.raises(CorruptData, match="kind"):
        await load_index(store, key, manifest.size, object_id=ID, cluster_id=CLUSTER)
    assert (await inspect_object(store, key)).kind == "manifest"
    data = build([(1, records(0, 5))])
    await store.put(object_key("cluster-a", data.object_id), data.body)
    with pytest.raises(CorruptData, match="kind"):
        await read_slices(store, "cluster-a", ManifestId(data.object_id, data.size), 1, 0, 1)


async def test_a_manifest_of_another_id_or_cluster_or_none_is_told_apart() -> None:
    store, manifest = await stored(filled({0: slices(4)}))
    body = await store.get(object_key(CLUSTER, ID))
    await store.put(object_key(CLUSTER, ID + 1), [body])
    await store.put(object_key("another", ID), [body])
    with pytest.raises(CorruptData, match="object id"):
        await read_slices(store, CLUSTER, ManifestId(ID + 1, manifest.size), 0, 0, 1)
    with pytest.raises(CorruptData, match="cluster"):
        await read_slices(store, "another", manifest, 0, 0, 1)
    with pytest.raises(ObjectNotFound):
        await read_slices(store, CLUSTER, ManifestId(ID + 2, manifest.size), 0, 0, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x02" + msgspec.msgpack.encode(slices(2)),
        b"\x01",
        b"\x01" + msgspec.msgpack.encode(slices(3)),
        b"\x01" + msgspec.msgpack.encode([["x", 1, 2, 3, 4]] * 2),
        b"\x01" + msgspec.msgpack.encode("no slices"),
    ],
)
async def test_a_page_that_is_whole_and_still_wrong_is_refused(payload: bytes) -> None:
    built = build_object(
        object_id=ID,
        kind=MANIFEST_KIND,
        cluster_id=CLUSTER,
        created_ms=5,
        parts=[(0, [StreamEntry(0, 2, payload)])],
        block_bytes=100,
    )
    store = MemoryObjectStore()
    await store.put(object_key(CLUSTER, ID), built.body)
    with pytest.raises(TidelogError, match=r"page|slices"):
        await everything(store, ManifestId(ID, built.size))


def test_a_dropped_range_is_not_in_it() -> None:
    pages = filled({0: slices(5), 1: slices(5)}, 2)
    pages.drop(1)
    pages.drop(4)
    assert pages.slices == 5
