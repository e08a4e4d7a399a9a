"""The history of a broker: rings of samples in bounded memory."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.broker.telemetry.history import (
    FIGURES_INTERVAL_S,
    MAX_NAME_BYTES,
    OFFSETS_INTERVAL_S,
    HistoryRecorder,
    SampleRing,
    committed_series,
    end_series,
)


def everything(_name: str) -> bool:
    return True


def test_the_newest_value_is_last_and_missed_intervals_have_none() -> None:
    ring = SampleRing(10.0, 4, 8)
    ring.add(100.0, [("a", 1.0)])
    ring.add(130.5, [("a", 2.5), ("b", 7.0)])
    found = ring.report(134.0, 1_000_000, everything)
    assert found["series"] == {"a": [1, None, None, 2.5], "b": [None, None, None, 7]}
    assert found["end_ms"] == 1_000_000 - 4_000
    ring.add(139.9, [("a", 9.0)])
    assert ring.report(139.9, 0, everything)["series"]["a"][-1] == 2.5, "one sample for each interval"


def test_a_series_that_is_given_no_more_is_forgotten_after_the_last_of_its_values() -> None:
    ring = SampleRing(1.0, 3, 1)
    ring.add(0.0, [("old", 1.0)])
    ring.add(1.0, [("new", 2.0)])
    assert (ring.left_out, set(ring.report(1.0, 0, everything)["series"])) == (1, {"old"})
    ring.add(3.0, [("new", 2.0)])
    assert (ring.left_out, set(ring.report(3.0, 0, everything)["series"])) == (0, {"new"})


def test_names_of_any_length_do_not_break_the_bound() -> None:
    ring = SampleRing(1.0, 10, 100)
    ring.add(0.0, [("g" * MAX_NAME_BYTES, 1.0), ("short", 1.0)])
    assert (ring.left_out, set(ring.report(0.0, 0, everything)["series"])) == (1, {"short"})


@given(
    steps=st.lists(
        st.tuples(
            st.floats(0.0, 100.0),
            st.dictionaries(st.sampled_from([f"s{n}" for n in range(12)]), st.floats(-1e9, 1e9), max_size=12),
        ),
        max_size=40,
    )
)
@hypothesis_settings(max_examples=examples(100), deadline=None)
def test_a_ring_holds_what_was_given_and_never_more_than_its_bound(steps: list[tuple[float, dict[str, float]]]) -> None:
    interval, samples, places = 7.0, 9, 8
    ring = SampleRing(interval, samples, places)
    now = 0.0
    taken: dict[int, dict[str, float]] = {}
    for passed, sample in steps:
        now += passed
        due = ring.is_due(now)
        ring.add(now, sample.items())
        number = int(now // interval)
        assert due == (number not in taken)
        taken.setdefault(number, sample)
        assert ring.held_bytes <= ring.bound_bytes
        report = ring.report(now, 10_000_000, everything)
        assert len(report["series"]) <= places
        newest = max(taken)
        for name, values in report["series"].items():
            assert len(values) == samples
            assert any(value is not None for value in values)
            for back, value in enumerate(reversed(values)):
                if value is not None:
                    assert math.isclose(value, taken[newest - back][name], rel_tol=1e-6, abs_tol=1e-6)


def test_a_full_history_is_within_its_stated_bytes() -> None:
    time = [0.0]
    names = [committed_series("t" * 100, number, "g" * 100) for number in range(2_500)]
    history = HistoryRecorder(
        lambda: time[0],
        lambda: 0,
        figures=lambda: [(f"figure-{number}", 1.0) for number in range(100)],
        offsets=lambda: [(name, 1.0) for name in names],
    )
    for _ in range(400):
        history.tick()
        time[0] += FIGURES_INTERVAL_S
    assert history.held_bytes <= history.bound_bytes < 4_000_000


def test_offsets_are_given_for_the_topics_and_the_group_that_are_asked_for() -> None:
    time = [0.0]
    sample = [
        (end_series("orders", 0), 10.0),
        (end_series("other", 0), 3.0),
        (committed_series("orders", 0, "team/readers"), 4.0),
        (committed_series("orders", 0, "readers"), 5.0),
    ]
    history = HistoryRecorder(lambda: time[0], lambda: 5_000, figures=list, offsets=lambda: sample)
    history.tick()
    time[0] = OFFSETS_INTERVAL_S
    history.tick()
    found = history.offsets({"orders"}, "team/readers")
    assert set(found["series"]) == {"end/orders/0", "committed/orders/0/team/readers"}
    assert found["series"]["end/orders/0"][-2:] == [10, 10]


def test_counters_are_named_as_such() -> None:
    sample = [("produced_bytes", 1.0), ("connections", 2.0)]
    history = HistoryRecorder(lambda: 0.0, lambda: 0, figures=lambda: sample, offsets=list)
    history.tick()
    assert history.figures()["counters"] == ["produced_bytes"]
