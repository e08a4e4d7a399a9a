"""The timer table against the obvious model."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.coordinators.timers import TimerTable

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 4), st.integers(0, 50)),
        st.tuples(st.just("cancel"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.integers(0, 20)),
    ),
    max_size=40,
)


def pop_all(table: TimerTable[Any], now: int) -> list[Any]:
    due = []
    while (key := table.pop(now)) is not None:
        due.append(key)
    return due


@given(STEPS)
def test_each_deadline_is_reported_once_when_it_has_come_and_never_late(steps: list[tuple[str, int, int]]) -> None:
    table: TimerTable[int] = TimerTable()
    model: dict[int, int] = {}
    now = 0
    for step, key, value in steps:
        if step == "set":
            table.set(key, now + value)
            model[key] = now + value
        elif step == "cancel":
            table.cancel(key)
            model.pop(key, None)
        else:
            now += value
            due = pop_all(table, now)
            assert [model[key] for key in due] == sorted(model[key] for key in due)
            assert sorted(due) == sorted(key for key, deadline in model.items() if deadline <= now)
            for key in due:
                del model[key]
        assert len(table) == len(model)
        assert {key: table.get(key) for key in model} == model
        next_ms = table.next_ms()
        if model:
            assert next_ms is not None
            assert next_ms <= min(model.values())
        else:
            assert next_ms is None


def test_heartbeats_do_not_grow_the_table() -> None:
    table: TimerTable[str] = TimerTable()
    for now in range(0, 10_000, 10):
        table.set("a", now + 1000)
        pop_all(table, now)
    assert table.queued <= 2


def test_the_earliest_comes_first() -> None:
    table: TimerTable[str] = TimerTable()
    table.set("late", 9)
    table.set("early", 3)
    table.set("moved", 1)
    table.set("moved", 7)
    assert pop_all(table, 10) == ["early", "moved", "late"]
