"""The parts that object stores share, each alone: merging, slicing, retries, figures, the factory."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Unavailable
from tidelog.storage.bucket.common import (
    MAX_MERGED_BYTES,
    MERGE_GAP_BYTES,
    Retrier,
    Transient,
    body_size,
    join_body,
    merge_ranges,
    slice_body,
    split_merged,
)
from tidelog.storage.bucket.open import open_store
from tidelog.storage.bucket.stats import LATENCY_BOUNDS_S, OperationStats, StoreStats
from tidelog.storage.settings import S3Settings

RANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 200)).map(lambda r: (r[0], r[0] + r[1])), max_size=12)


@settings(max_examples=examples(200))
@given(RANGES, st.integers(0, 50), st.integers(1, 300))
def test_merged_ranges_serve_every_range_and_read_little_in_vain(
    ranges: list[tuple[int, int]], gap: int, limit: int
) -> None:
    data = random.Random(1).randbytes(1000)
    merged = merge_ranges(ranges, gap=gap, limit=limit)
    assert sorted(index for one in merged for index in one.members) == list(range(len(ranges)))
    longest = max((end - start for start, end in ranges), default=0)
    for one in merged:
        assert one.end - one.start <= max(limit, longest)
        wanted = sorted(ranges[index] for index in one.members)
        covered = one.start
        for start, end in wanted:
            assert start <= covered + gap
            covered = max(covered, end)
        assert covered == one.end
    reads = [(one, data[one.start : one.end]) for one in merged]
    assert split_merged(ranges, reads) == [data[start:end] for start, end in ranges]


def test_the_bounds_of_merging_are_exact() -> None:
    ranges = [(0, 10), (10 + MERGE_GAP_BYTES, 100 + MERGE_GAP_BYTES)]
    assert len(merge_ranges(ranges)) == 1
    assert len(merge_ranges([ranges[0], (11 + MERGE_GAP_BYTES, 100 + MERGE_GAP_BYTES)])) == 2
    half = MAX_MERGED_BYTES // 2
    assert len(merge_ranges([(0, half), (half, MAX_MERGED_BYTES)])) == 1
    assert len(merge_ranges([(0, half), (half, MAX_MERGED_BYTES + 1)])) == 2


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(0, 100), st.integers(0, 100))
def test_a_slice_of_a_body_is_that_of_its_joined_buffers(buffers: list[bytes], start: int, length: int) -> None:
    body = [kind(buffer) for buffer, kind in zip(buffers, [bytes, bytearray, memoryview] * 3, strict=False)]
    whole = b"".join(buffers)
    assert body_size(body) == len(whole)
    assert join_body(body) == whole
    assert slice_body(body, start, start + length) == whole[start : start + length]


class VirtualClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def time_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("seed", range(20))
async def test_retries_back_off_with_jitter_and_stay_inside_the_budget(seed: int) -> None:
    clock = VirtualClock()
    attempts: list[float] = []
    stats = OperationStats()

    async def attempt() -> None:
        attempts.append(clock.now_s)
        clock.now_s += 0.1
        raise Transient("busy")

    retrier = Retrier(clock, random.Random(seed))
    with pytest.raises(Unavailable, match=r"putting failed after \d+ attempts in .* s: busy \(do this\)"):
        await retrier.run("putting", "do this", 60.0, stats, attempt)
    assert clock.now_s - 100.0 <= 60.0 + 0.1
    assert stats.retries == len(attempts) - 1
    assert 10 < len(attempts) < 60
    delays = [later - earlier - 0.1 for earlier, later in itertools.pairwise(attempts)]
    assert all(0 < delay <= 5.0 + 1e-9 for delay in delays)
    assert len(set(delays)) == len(delays)


def test_figures_are_cumulative_and_complete() -> None:
    clock = VirtualClock()
    stats = StoreStats(clock)
    for seconds in (0.0005, 0.003, 100.0):
        with stats.measure("get") as figures:
            figures.bytes_in += 10
            clock.now_s += seconds
    with pytest.raises(Unavailable), stats.measure("get"):
        raise Unavailable("no")
    snapshot = stats.snapshot()["get"]
    assert (snapshot["count"], snapshot["errors"], snapshot["bytes_in"], snapshot["in_flight"]) == (4, 1, 30, 0)
    buckets = list(snapshot["latency_buckets"].values())
    assert len(buckets) == len(LATENCY_BOUNDS_S) + 1
    assert buckets == sorted(buckets)
    assert snapshot["latency_buckets"]["0.001"] == 2
    assert snapshot["latency_buckets"]["60.0"] == 3
    assert snapshot["latency_buckets"]["+Inf"] == 4
    assert snapshot["latency_sum_s"] == pytest.approx(100.0035)


async def test_without_endpoint_and_bucket_the_store_is_embedded(tmp_path: Path) -> None:
    store = open_store(S3Settings(), tmp_path, SystemClock(), random.Random(1))
    assert store.url == (tmp_path / "bucket").as_uri()
    assert (await store.probe()).conditional_create
    await store.close()
    remote = open_store(S3Settings(bucket="b", prefix="/p/"), tmp_path, SystemClock(), random.Random(1))
    assert remote.url == "s3://b/p/ at AWS S3 (us-east-1)"
    await remote.close()
