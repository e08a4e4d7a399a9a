"""What is told of when a WAL's positions passed an offset is never wrong, and takes bounded memory."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.history import (
    BOUND_BYTES,
    COARSE_S,
    PLACES_PER_TICK,
    STARTS,
    TICK_S,
    Place,
    PositionHistory,
    StreamPlaces,
    WalHistory,
)

TIERS = ((0.001, 8), (0.1, 8), (5.0, 8))
LEAD_MS = 1_700_000_000_000


class HandClock:
    """A clock that is set by hand; the wall clock leads the monotonic one by `lead_ms`."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.lead_ms = LEAD_MS

    def monotonic(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return int(self.now_s * 1000) + self.lead_ms

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


steps = st.lists(
    st.tuples(st.integers(1, 100), st.sampled_from([0.0, 0.0002, 0.003, 0.05, 1.0, 7.0, 120.0])),
    min_size=1,
    max_size=80,
)


@settings(max_examples=examples(200))
@given(steps)
def test_an_offset_was_passed_between_the_two_moments_that_are_told(advances: list[tuple[int, float]]) -> None:
    clock = HandClock()
    history = PositionHistory(clock, 5, TIERS)
    known: list[tuple[int, float]] = []
    for size, pause_s in advances:
        clock.now_s += pause_s
        history.note(history.end + size, clock.now_s)
        known.append((history.end, clock.now_s))
    for offset in range(6, history.end + 1, 3):
        passed_s = known[bisect_left(known, offset, key=lambda each: each[0])][1]
        told = history.passing(offset)
        if told is None:
            assert offset <= history.floor
            continue
        assert offset > history.floor
        assert told.after_s <= passed_s <= told.by_s
        assert abs(told.by_ms - (told.by_s * 1000 + LEAD_MS)) <= 2
        assert told.by_s - told.after_s <= 5.0, "as wide as the coarsest spans, at most"
    assert history.passing(history.end + 1) is None
    assert history.passing(5) is None, "passed before the history began"


def test_a_recent_advance_is_told_to_the_millisecond_and_an_old_one_coarsely() -> None:
    clock = HandClock()
    history = PositionHistory(clock)
    for _ in range(20_000):
        clock.now_s += 0.1
        history.note(history.end + 10, clock.now_s)
    newest = history.passing(history.end)
    oldest = history.passing(10)
    assert newest is not None and newest.after_s == newest.by_s == clock.now_s
    assert oldest is not None and 0 < oldest.by_s - oldest.after_s <= 60
    assert oldest.after_s <= 1.1 <= oldest.by_s
    assert history.size_bytes() < BOUND_BYTES / 3


def test_what_was_passed_too_long_ago_is_not_known() -> None:
    clock = HandClock()
    history = PositionHistory(clock, 0, TIERS)
    for _ in range(500):
        clock.now_s += 1
        history.note(history.end + 1, clock.now_s)
    assert history.passing(1) is None
    assert 0 < history.floor < history.end
    assert history.passing(history.floor) is None
    assert history.passing(history.floor + 1) is not None


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from([0.0, 0.5, 4.0])), max_size=120))
def test_an_append_lies_between_the_samples_around_it(appends: list[tuple[int, int, float]]) -> None:
    places, next_offsets = StreamPlaces((10, 20)), [0] * 4
    added: dict[int, list[Place]] = {each: [] for each in range(4)}
    now_s, wal_end = 0.0, 0
    for stream_id, count, pause_s in appends:
        now_s, wal_end = now_s + pause_s, wal_end + 100
        place = Place(next_offsets[stream_id], wal_end, now_s, int(now_s * 1000))
        next_offsets[stream_id] += count
        added[stream_id].append(place)
        places.add(stream_id, place)
    for stream_id, all_of_it in added.items():
        for place in all_of_it:
            found = places.find(stream_id, place.base_offset)
            assert found.exact == (found.low == place)
            if found.low is not None:
                assert found.low <= place and found.low in all_of_it
            if found.high is not None:
                assert place < found.high and found.high in all_of_it


def test_samples_of_streams_that_come_and_go_take_bounded_memory() -> None:
    places = StreamPlaces((300, 600))
    for number in range(6_000):
        places.add(number, Place(0, number, number * COARSE_S, 0))
    assert places.size_bytes() <= 40 * (300 + 600 + 2 * 1024)
    assert places.find(5_999, 0).exact
    assert places.find(0, 0) == (None, None, False)


def test_appends_are_sampled_at_a_bounded_rate() -> None:
    clock = HandClock()
    history = WalHistory(clock)
    history.begin(durable=None, confirmed=0, uploaded=0)
    sampled = 0
    for number in range(1, 10_000):
        clock.now_s += TICK_S / 100
        if history.left:
            history.appended(number, 0, number)
            sampled += 1
        history.note_durable(number)
    assert sampled <= (clock.now_s - 1) / TICK_S * PLACES_PER_TICK + PLACES_PER_TICK
    assert history.place(1, 0).exact


def test_a_wal_that_alone_is_the_quorum_has_one_position() -> None:
    clock = HandClock()
    history, confirm = WalHistory(clock), ConfirmOffset(40)
    history.begin(durable=None, confirmed=40, uploaded=40)
    confirm.observe(history.note_durable)
    seen: list[bool] = []
    confirm.add_listener(50, lambda: seen.append(history.confirmed.passing(50) is not None))
    clock.now_s = 3.0
    confirm.advance(50)
    assert seen == [True], "who waits for an offset finds it in the history"
    assert history.durable is history.confirmed
    assert history.confirmed.passing(41) == (3.0, 3.0, 3_000 + LEAD_MS, 3_000 + LEAD_MS)
    assert history.uploaded.passing(41) is None


def test_durable_and_confirmed_are_told_apart_where_there_is_a_quorum() -> None:
    clock = HandClock()
    history = WalHistory(clock)
    history.begin(durable=10, confirmed=5, uploaded=0)
    clock.now_s = 2.0
    history.note_durable(20)
    clock.now_s = 2.5
    history.note_confirmed(20)
    clock.now_s = 9.0
    history.note_uploaded(20)
    assert [each and each.by_s for each in (history.durable.passing(20), history.confirmed.passing(20))] == [2.0, 2.5]
    uploaded = history.uploaded.passing(20)
    assert uploaded is not None and uploaded.by_s == 9.0
    assert history.durable.passing(9) is None, "durable before the term"


def test_the_move_of_the_log_start_that_deleted_an_offset_is_found() -> None:
    clock = HandClock()
    history = WalHistory(clock)
    for number, offset in enumerate((10, 30, 60)):
        clock.now_s = 100.0 + number
        history.start_moved(7, offset)
    found = history.deletion_of(7, 30)
    assert found is not None and (found.offset, found.at_ms) == (60, 102_000 + LEAD_MS)
    assert history.deletion_of(7, 60) is None and history.deletion_of(8, 1) is None
    for _ in range(STARTS):
        history.start_moved(8, 1)
    assert history.deletion_of(7, 30) is None, "forgotten"


def test_an_offset_that_is_not_larger_changes_nothing() -> None:
    clock = HandClock()
    history = PositionHistory(clock)
    history.note(10, 1.0)
    history.note(10, 2.0)
    history.note(3, 3.0)
    assert history.passing(10) == (1.0, 1.0, 1_000 + LEAD_MS, 1_000 + LEAD_MS)
