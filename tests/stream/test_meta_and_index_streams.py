"""The meta stream and the two indexes on their streams."""

from __future__ import annotations

import asyncio
from struct import Struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.fake_storage import FakeManager, FakeStorage, FakeWorld
from tidelog.runtime.errors import CorruptData
from tidelog.storage.records import StreamEntry
from tidelog.storage.wal.base import WalFull
from tidelog.stream.index_stream import IndexStream
from tidelog.stream.meta_stream import MetaStream
from tidelog.stream.stream import Stream
from tidelog.stream.time_index import TimeIndex
from tidelog.stream.txn_index import AbortedTxn, TxnIndex


def stream(world: FakeWorld) -> Stream:
    return Stream.open(world.opened(1), FakeStorage(world), FakeManager(world))  # type: ignore[arg-type]


async def reloaded(world: FakeWorld) -> MetaStream:
    meta = MetaStream(stream(world))
    await meta.load(meta.stream.next_offset, lambda: None)
    return meta


steps = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from("abcdef"), st.none() | st.binary(max_size=5), min_size=1),
        st.just("compact"),
        st.just("reopen"),
    ),
    max_size=25,
)


def rewritten(meta: MetaStream) -> int:
    """Rewrite all of it; returns the offset to which it may be trimmed."""
    begun_at, keys = meta.stream.next_offset, meta.keys()
    while keys:
        meta.rewrite(keys)
    return begun_at


@settings(max_examples=examples(60))
@given(steps)
def test_the_meta_stream_is_a_dictionary_that_survives(script: list[object]) -> None:
    async def run() -> None:
        world = FakeWorld()
        meta = await reloaded(world)
        model: dict[str, bytes] = {}
        for step in script:
            if step == "compact":
                await meta.stream.trim(rewritten(meta))
                assert meta.garbage == 0
            elif step == "reopen":
                meta = await reloaded(world)
            else:
                assert isinstance(step, dict)
                meta.put(step)
                model = {key: value for key, value in {**model, **step}.items() if value is not None}
            assert dict(meta.items()) == model
        assert dict((await reloaded(world)).items()) == model

    asyncio.run(run())


async def test_a_rewrite_in_steps_keeps_what_is_put_between_them() -> None:
    world = FakeWorld()
    meta = await reloaded(world)
    names = [f"key {n}" for n in range(8)]
    for name in names:
        meta.put({name: bytes(1 << 19)})
    begun_at, keys, steps = meta.stream.next_offset, meta.keys(), 0
    while keys:
        meta.rewrite(keys)
        meta.put({names[0]: b"newer %d" % steps, names[7]: b"newer %d" % steps, names[3]: None})
        steps += 1
    await meta.stream.trim(begun_at)
    assert steps == 4, "two keys of half a megabyte to a step, but those that are gone or small by then"
    assert (await reloaded(world)).items() == meta.items()
    assert meta.get(names[0]) == b"newer 3"
    assert meta.get(names[3]) is None


async def test_the_meta_stream_wants_a_rewrite_when_most_of_it_is_garbage() -> None:
    world = FakeWorld()
    meta = await reloaded(world)
    for n in range(200):
        meta.put({"a": b"%d" % n, "b": None})
    assert meta.needs_compaction()
    await meta.stream.trim(rewritten(meta))
    assert not meta.needs_compaction()
    assert meta.stream.start_offset == 400
    assert (await reloaded(world)).items() == [("a", b"199")]


async def test_damaged_meta_entries_are_corrupt_data() -> None:
    for payload in (b"\x02\x90", b"\x01\xff", b"\x01"):
        world = FakeWorld()
        world.wal.append((1, StreamEntry(0, 1, payload)))
        with pytest.raises(CorruptData):
            await reloaded(world)


@settings(max_examples=examples(80))
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12), st.integers(0, 40), st.data())
def test_binary_search_over_appends_finds_the_first_entry(
    groups: list[list[int]], target: int, data: st.DataObject
) -> None:
    async def run() -> None:
        index = IndexStream(stream(FakeWorld()), Struct(">qq"))
        rows: list[tuple[int, ...]] = []
        value = 0
        for group in groups:
            chunk: list[tuple[int, ...]] = []
            for step in group:
                value += step
                chunk.append((value, len(rows) + len(chunk)))
            index.append(chunk)
            rows += chunk
        start = data.draw(st.integers(0, len(rows)))
        end = data.draw(st.integers(start, len(rows)))
        expected = next((n for n in range(start, end) if rows[n][0] >= target), end)
        assert await index.first_where(start, end, lambda row: row[0] >= target) == expected
        if start < end:
            read = await index.read(start, end)
            assert read == rows[start : start + len(read)]

    asyncio.run(run())


@settings(max_examples=examples(80))
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(50, 400), st.booleans()), max_size=40),
    st.integers(0, 60),
)
def test_the_time_index_never_skips_a_record(batches: list[tuple[int, int, bool]], target: int) -> None:
    async def run() -> None:
        index = TimeIndex(stream(FakeWorld()))
        largest, stamps = -1, []
        for offset, (timestamp, size, flush) in enumerate(batches):
            index.note(largest, offset, size, 200)
            largest = max(largest, timestamp)
            stamps.append(timestamp)
            if flush:
                index.flush()
        floor = await index.floor(0, index.end, target)
        assert all(timestamp < target for timestamp in stamps[: floor or 0])

    asyncio.run(run())


async def test_the_time_index_keeps_what_a_full_wal_refuses() -> None:
    world = FakeWorld()
    storage = FakeStorage(world)
    index = TimeIndex(Stream.open(world.opened(1), storage, FakeManager(world)))  # type: ignore[arg-type]
    index.note(-1, 0, 500, 100)
    index.note(5, 1, 500, 100)
    storage.refusals.append(WalFull("full"))
    with pytest.raises(WalFull):
        index.flush()
    assert (index.end, index.stream.next_offset) == (1, 0)
    index.flush()
    assert (index.end, index.stream.next_offset) == (1, 1)
    assert await index.floor(0, 1, 6) == 1


def aborted_transactions(gaps: list[tuple[int, int]]) -> list[AbortedTxn]:
    """Overlapping transactions with growing markers and true last stable offsets."""
    markers, at = [], 0
    for length, step in gaps:
        at += step + 1
        markers.append((max(0, at - length), at))
    return [
        AbortedTxn(n, first, last, min([f for f, m in markers[n + 1 :] if f <= last] or [last + 1]))
        for n, (first, last) in enumerate(markers)
    ]


@pytest.mark.parametrize("kept", [3, 1024])
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 10)), max_size=30),
    st.integers(0, 200),
    st.integers(0, 60),
    st.integers(0, 30),
)
def test_the_txn_index_finds_all_that_overlaps(
    kept: int, gaps: list[tuple[int, int]], start: int, length: int, reopen_at: int
) -> None:
    async def run() -> None:
        world = FakeWorld()
        index = TxnIndex(stream(world))
        entries = aborted_transactions(gaps)
        for n, entry in enumerate(entries):
            if n == reopen_at:
                index = TxnIndex(stream(world))
            index.add(entry)
            index.flush()
        end = start + length
        expected = [e for e in entries if e.last_offset >= start and e.first_offset < end]
        hot = index.lookup_hot(start, end)
        assert hot is None or hot == expected
        assert await index.lookup(start, end) == expected
        assert await index.last_offset() == (entries[-1].last_offset if entries else -1)
        at = await index.trim_point(start)
        assert at == sum(entry.last_offset < start for entry in entries)
        await index.stream.trim(at)
        assert await index.lookup(start, end) == expected

    import tidelog.stream.txn_index as module

    original, module.KEPT_ENTRIES = module.KEPT_ENTRIES, kept
    try:
        asyncio.run(run())
    finally:
        module.KEPT_ENTRIES = original


async def test_an_aborted_transaction_that_waits_for_room_is_found_all_the_same() -> None:
    world = FakeWorld()
    storage = FakeStorage(world)
    index = TxnIndex(Stream.open(world.opened(1), storage, FakeManager(world)))  # type: ignore[arg-type]
    entry = AbortedTxn(1, 5, 9, 10)
    index.add(entry)
    storage.refusals.append(WalFull("full"))
    with pytest.raises(WalFull):
        index.flush()
    assert index.waiting == 1
    assert index.lookup_hot(0, 20) == [entry]
    index.flush()
    assert index.waiting == 0
    assert await index.lookup(0, 20) == [entry]
