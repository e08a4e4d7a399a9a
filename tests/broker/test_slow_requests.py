"""The slowest requests of an hour are kept, in bounded memory, and the others cost a comparison."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.broker.telemetry.slow_requests import (
    MAX_NAME,
    MINUTE_S,
    MINUTES,
    PER_MINUTE,
    STAGES,
    Moments,
    Sender,
    SlowRequest,
    SlowRequests,
    Stages,
    Timing,
    describe,
)
from tidelog.controller.model.records import MAX_TOPIC_CHARS


def request(duration_s: float, api_key: int = 0, ended_ms: int = 0) -> SlowRequest:
    stages = Stages(handler=duration_s)
    return SlowRequest(duration_s, api_key, ended_ms, stages, 0.0, "app", "127.0.0.1", "t", 0, 1, 100, 50, 0)


def serve(recorder: SlowRequests, one: SlowRequest, now_s: float) -> None:
    """As a connection does."""
    if one.duration_s > recorder.floors[one.api_key] or now_s >= recorder.minute_end_s:
        recorder.offer(one, now_s)


durations = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 10), st.sampled_from([0.0, 1.0, 25.0])), max_size=150)


@settings(max_examples=examples(200))
@given(durations, st.integers(1, 6))
def test_the_slowest_of_each_minute_and_api_are_kept(served: list[tuple[int, float, float]], kept: int) -> None:
    recorder, now_s, minute_end_s = SlowRequests(kept), 50.0, -1.0
    minutes: list[dict[int, list[float]]] = []
    for number, (api_key, duration_s, pause_s) in enumerate(served):
        now_s += pause_s
        serve(recorder, request(duration_s, api_key, number), now_s)
        if now_s >= minute_end_s:
            minutes.append({})
            minute_end_s = now_s + MINUTE_S
        minutes[-1].setdefault(api_key, []).append(duration_s)
    for api_key in range(4):
        expected = sorted((one for minute in minutes for one in sorted(minute.get(api_key, []))[-kept:]), reverse=True)
        assert [one.duration_s for one in recorder.slowest(now_s, 1_000, api_key)] == expected
        assert [one.duration_s for one in recorder.slowest(now_s, 2, api_key)] == expected[:2]
    assert recorder.slowest(now_s, 2, topic="t") == recorder.slowest(now_s, 2)
    assert recorder.slowest(now_s, 2, topic="other") == []
    everything = recorder.slowest(now_s, 1_000)
    assert len(everything) == len(recorder)
    assert everything == sorted(everything, reverse=True)


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 100)), min_size=200, max_size=300))
def test_a_minute_with_many_apis_keeps_its_slowest_and_no_more_than_its_bound(served: list[tuple[int, float]]) -> None:
    recorder = SlowRequests(8)
    for api_key, duration_s in served:
        serve(recorder, request(duration_s, api_key), 10.0)
        assert len(recorder) <= PER_MINUTE
    kept = recorder.slowest(10.0, 1_000)
    assert len(kept) == len(recorder)
    assert kept[0].duration_s == max(duration_s for _, duration_s in served)


def test_after_an_hour_requests_are_forgotten_and_memory_is_bounded_before() -> None:
    recorder, now_s = SlowRequests(8), 0.0
    for minute in range(70):
        for number in range(300):
            serve(recorder, request(float(number), number % 40, minute), now_s + number / 10)
        now_s += MINUTE_S
        assert len(recorder) <= MINUTES * PER_MINUTE
    oldest = min(one.ended_ms for one in recorder.slowest(now_s, 1_000))
    assert 70 - MINUTES <= oldest <= 71 - MINUTES
    assert recorder.slowest(now_s + 30 * MINUTE_S, 1_000) != []
    assert recorder.slowest(now_s + 2 * MINUTES * MINUTE_S, 1_000) == [], "without a request in between"


def test_quick_requests_need_not_be_offered() -> None:
    recorder = SlowRequests(3)
    for duration_s in (5.0, 1.0, 4.0, 3.0):
        serve(recorder, request(duration_s), 1.0)
    assert recorder.floors[0] == 3.0
    recorded = recorder.recorded
    serve(recorder, request(2.9), 2.0)
    assert recorder.recorded == recorded
    serve(recorder, request(0.1), 1.0 + MINUTE_S)
    assert recorder.recorded == recorded + 1, "the first of a new minute"


def test_each_stage_has_a_name() -> None:
    assert Stages._fields == STAGES


def test_names_of_megabytes_are_not_kept() -> None:
    timing = Timing(Stages(), 0.0, 0.0, "t" * 1_000_000, 0, 1, 3)
    sender = Sender(0, "c" * 1_000_000, "127.0.0.1", 100, 50, is_answered=True)
    found = describe(Moments(0.0, 0.0, 0.0, 0.0, 1.0), timing, sender, 0)
    assert (len(found.topic), len(found.client_id)) == (MAX_TOPIC_CHARS, MAX_NAME)
