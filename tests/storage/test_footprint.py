"""What the log cache says that it holds is what it holds, by tracemalloc."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.storage_world import World
from tidelog.storage.cache.footprint import COPY_BYTES, RECORD_BYTES, VIEW_RECORD_BYTES, footprint, own
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import CacheSettings

KIB, MIB = 1 << 10, 1 << 20


def alone(size: int) -> list[memoryview]:
    """A batch of `size` bytes that has a frame for itself, as librdkafka sends them."""
    return [memoryview(bytearray(60 + size))[60:]]


def shared(size: int, batches: int) -> list[memoryview]:
    """Batches of one frame, as Java's producer sends them."""
    frame = memoryview(bytearray(60 + size * batches))
    return [frame[60 + size * n : 60 + size * (n + 1)] for n in range(batches)]


def lonely(size: int, frame_bytes: int) -> list[memoryview]:
    """A batch in a frame whose rest was for others, was refused, or was a duplicate."""
    return [memoryview(bytearray(frame_bytes))[-size:]]


CASES: dict[str, tuple[int, Callable[[], list[memoryview]]]] = {
    "one record of a byte, batch of 69 bytes": (20_000, lambda: alone(69)),
    "100 B": (20_000, lambda: alone(100)),
    "1 KiB": (20_000, lambda: alone(KIB)),
    "16 KiB": (2_000, lambda: alone(16 * KIB)),
    "1 MiB": (50, lambda: alone(MIB)),
    "100 B, a hundred in a frame": (200, lambda: shared(100, 100)),
    "1 KiB, a thousand in a frame": (20, lambda: shared(KIB, 1000)),
    "16 KiB, sixty in a frame": (20, lambda: shared(16 * KIB, 60)),
    "400 KiB, two in a frame": (50, lambda: shared(400 * KIB, 2)),
    "600 KiB in a frame of 1 MiB": (50, lambda: lonely(600 * KIB, MIB)),
    "100 B in a frame of 1 MiB": (50, lambda: lonely(100, MIB)),
    "5 KiB in a frame of 1 MiB": (50, lambda: lonely(5 * KIB, MIB)),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_account_of_the_log_cache_is_what_is_allocated(case: str) -> None:
    rounds, frames = CASES[case]

    world = World(size_bytes=1 << 40)
    world.cache = CacheSettings(log_bytes=1 << 40)
    storage = await world.boot([7])
    offset = 0

    def append(payloads: Iterable[memoryview]) -> None:
        nonlocal offset
        for payload in payloads:
            storage.append(StreamAppend(7, 1, offset, 1, (payload,)))
            offset += 1

    async def forget_the_wal() -> None:
        await storage.confirm.wait(world.wal.end_offset)
        world.media.records.clear()
        gc.collect()

    append(frames())
    await forget_the_wal()
    tracemalloc.start()
    try:
        accounted, allocated = storage.stats()["log_cache_bytes"], tracemalloc.get_traced_memory()[0]
        for _ in range(rounds):
            append(frames())
        await forget_the_wal()
        allocated = tracemalloc.get_traced_memory()[0] - allocated
        accounted = storage.stats()["log_cache_bytes"] - accounted
    finally:
        tracemalloc.stop()
    await storage.close(upload=False)
    assert 0.8 <= accounted / allocated <= 1.3, f"accounted {accounted}, allocated {allocated}"


@given(before=st.integers(0, 9000), size=st.integers(0, 9000), after=st.integers(0, 9000), kind=st.sampled_from("bv"))
def test_a_buffer_is_kept_by_one_record_at_most_which_is_charged_for_all_of_it(
    before: int, size: int, after: int, kind: str
) -> None:
    frame = bytearray(before + size + after)
    view = memoryview(frame)[before : before + size]
    kept = own(view[:] if kind == "v" else bytes(view))
    assert kept == view
    if type(kept) is bytes:
        assert footprint(kept) == size + RECORD_BYTES
    else:
        assert isinstance(kept, memoryview) and kept.obj is frame
        assert size > COPY_BYTES
        assert size > before + after, "a second view as large has no room in the frame"
        assert footprint(kept) == len(frame) + VIEW_RECORD_BYTES


def test_a_view_of_a_buffer_of_unknown_size_is_copied() -> None:
    numbers = array("q", range(4096))
    kept = own(memoryview(numbers).cast("B"))
    assert kept == numbers.tobytes()
    assert type(kept) is bytes


@pytest.mark.parametrize(("size", "records"), [(100, 40_000), (1 * KIB, 8_000), (64 * KIB, 150)])
async def test_the_account_of_the_block_cache_is_what_is_allocated(size: int, records: int) -> None:
    world = World(size_bytes=1 << 40, split_bytes=1 << 40, block_bytes=256 * KIB)
    world.cache = CacheSettings(log_bytes=1 << 30, block_bytes=1 << 30)
    storage = await world.boot([7])
    for offset in range(records):
        storage.append(StreamAppend(7, 1, offset, 1, (bytes(size),)))
    await storage.confirm.wait(world.wal.end_offset)
    await storage.upload_now()
    storage.forget_uploaded()
    gc.collect()
    tracemalloc.start()
    try:
        before, at = tracemalloc.get_traced_memory()[0], 0
        while at < records:
            found = await storage.read(7, at, records, MIB)
            at = found[-1].base_offset + 1
        del found
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    accounted = storage.stats()["block_cache_bytes"]
    await storage.close(upload=False)
    assert 0.8 <= accounted / allocated <= 1.3, f"accounted {accounted}, allocated {allocated}"
