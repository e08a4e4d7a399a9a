"""The bound on bytes per second for replicas that catch up."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.replication.pace import BURST_S, CatchUpPace

rates = st.integers(1, 1 << 30)
batches = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4 << 20)), min_size=1, max_size=60)


def test_without_a_bound_nobody_waits() -> None:
    pace = CatchUpPace()
    pace.took(1 << 40, 1.0)
    assert pace.wait_s(1.0) == 0


@given(rates, batches)
def test_in_any_time_no_more_is_taken_than_the_rate_a_burst_and_a_batch(
    rate: int, asked: list[tuple[float, int]]
) -> None:
    """A taker that takes as soon as it may, after pauses of its own."""
    pace, now = CatchUpPace(rate), 1000.0
    taken: list[tuple[float, int]] = []
    for pause, count in asked:
        now += pause
        now += pace.wait_s(now)
        while (wait := pace.wait_s(now)) > 0:  # a float's rounding is left
            now += max(wait, 1e-6)
        pace.took(count, now)
        taken.append((now, count))
    totals = [0, *accumulate(count for _, count in taken)]
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            sum_bytes = totals[last] - totals[first]  # the last batch is the one more
            bound = rate * (taken[last][0] - taken[first][0] + BURST_S)
            assert sum_bytes <= bound * (1 + 1e-9) + 1e-3 * rate + 1


@given(rates, batches)
def test_nobody_waits_longer_than_what_was_taken_takes(rate: int, asked: list[tuple[float, int]]) -> None:
    pace, now = CatchUpPace(rate), 1000.0
    for pause, count in asked:
        now += pause
        now += pace.wait_s(now)
        while (wait := pace.wait_s(now)) > 0:
            now += max(wait, 1e-6)
        pace.took(count, now)
        assert pace.wait_s(now) <= count / rate * (1 + 1e-9) + 1e-6


@given(rates, st.integers(0, 1 << 30))
def test_debt_is_forgotten_by_time_alone_and_a_clock_that_stands_gives_nothing(rate: int, count: int) -> None:
    pace = CatchUpPace(rate)
    pace.took(count, 5.0)
    wait = pace.wait_s(5.0)
    assert pace.wait_s(5.0) == wait == pace.wait_s(4.0)
    assert pace.wait_s(5.0 + wait + 1e-3) == 0
