"""Rolling and retention, as Kafka decides them."""

from __future__ import annotations

from tidelog.stream.log_config import LogConfig
from tidelog.stream.segments import Segment, retention_start, should_roll


def seg(base: int, size: int = 100, newest: int = 1000, first: int = 1000) -> Segment:
    return Segment(base, 500, 0, size, first, newest, 2000)


def test_a_segment_rolls_before_it_outgrows_its_size() -> None:
    config = LogConfig(segment_bytes=150)
    assert not should_roll(seg(0, 100), 50, 1000, 1000, config)
    assert should_roll(seg(0, 100), 51, 1000, 1000, config)
    assert not should_roll(seg(0, 0), 500, 1000, 1000, config), "an empty segment takes any batch"


def test_a_segment_rolls_by_record_time_or_by_the_clock_without_timestamps() -> None:
    config = LogConfig(segment_ms=100)
    assert not should_roll(seg(0), 1, 1100, 99999, config)
    assert should_roll(seg(0), 1, 1101, 0, config)
    bare = seg(0, first=-1, newest=-1)
    assert not should_roll(bare, 1, -1, 600, config)
    assert should_roll(bare, 1, -1, 601, config)


def test_retention_by_time_drops_whole_old_segments_in_order() -> None:
    segments = [seg(0, newest=100), seg(10, newest=900), seg(20, newest=200), seg(30, newest=1000)]
    config = LogConfig(retention_ms=500)
    assert retention_start(segments, 0, 40, 40, 1000, config) == 10
    assert retention_start(segments, 0, 40, 40, 1450, config) == 30
    assert retention_start(segments, 0, 40, 40, 1501, config) == 40, "the active one too, when all of it is old"
    assert retention_start(segments, 0, 40, 40, 10**9, LogConfig(retention_ms=-1)) == 0


def test_retention_by_size_keeps_at_least_that_many_bytes() -> None:
    segments = [seg(n * 10) for n in range(5)]
    config = LogConfig(retention_ms=-1, retention_bytes=250)
    assert retention_start(segments, 0, 50, 50, 2000, config) == 20, "300 bytes stay, 200 would be too few"
    assert retention_start(segments, 0, 50, 50, 2000, LogConfig(retention_ms=-1, retention_bytes=0)) == 40


def test_retention_never_passes_the_high_watermark_nor_touches_compacted_topics() -> None:
    segments = [seg(0), seg(10), seg(20)]
    config = LogConfig(retention_ms=1)
    assert retention_start(segments, 0, 15, 30, 10**9, config) == 10
    assert retention_start(segments, 0, 30, 30, 10**9, LogConfig(retention_ms=1, cleanup_policy="compact")) == 0
    assert retention_start(segments, 0, 30, 30, 10**9, LogConfig(retention_ms=1, cleanup_policy="compact,delete")) == 30


def test_records_without_timestamps_age_by_their_append() -> None:
    segments = [seg(0, first=-1, newest=-1), seg(10)]
    assert retention_start(segments, 0, 20, 20, 2400, LogConfig(retention_ms=500)) == 0
    assert retention_start(segments, 0, 20, 20, 2501, LogConfig(retention_ms=500)) == 20


def test_an_empty_log_stays_where_it_is() -> None:
    assert retention_start([seg(7, 0)], 7, 7, 7, 10**9, LogConfig(retention_ms=1)) == 7
