"""Where a streaming query of Spark is: its checkpoint's text, what it lost, and how much a micro-batch gets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_tidelog.options import Partition
from pyspark_tidelog.positions import Position, admit, between, compare
from tidelog.runtime.errors import InvalidInput

IDS = {"t": "a" * 32, "u": "b" * 32}
places = st.tuples(st.sampled_from(("t", "u", "version")), st.integers(0, 12))
offsets = st.dictionaries(places, st.integers(0, (1 << 63) - 1), max_size=8)


def at(rows: dict[Partition, int], **ids: str) -> Position:
    return Position.of(rows, {**IDS, **ids}, "g")


@given(offsets)
def test_a_position_is_the_same_after_its_checkpoint_and_has_one_text(rows: dict[Partition, int]) -> None:
    position = at(rows, version="c" * 32)
    text = json.dumps(position.to_json())
    assert Position.from_json(json.loads(text)) == position
    turned = at(dict(reversed(rows.items())), version="c" * 32)
    assert json.dumps(turned.to_json()) == text
    assert position.offsets == rows


@given(offsets)
def test_the_checkpoint_of_sparks_kafka_source_is_understood(rows: dict[Partition, int]) -> None:
    plain: dict[str, dict[str, int]] = {}
    for (topic, index), offset in rows.items():
        plain.setdefault(topic, {})[str(index)] = offset
    found = Position.from_json(plain)
    assert found.offsets == rows and found.group == ""
    assert all(found.is_same_topic(topic, "d" * 32) for topic in plain)


@pytest.mark.parametrize(
    "value",
    [
        {"version": 2, "group": "", "topics": {}},
        {"version": 1, "topics": {}},
        {"version": 1, "group": "g", "topics": {"t": {"0": 1}}},
        {"version": 1, "group": "g", "topics": {"t": {"id": "x", "offsets": {"0": "1"}}}},
        {"t": {"zero": 1}},
        {"t": {"0": -1}},
        {"t": {"0": True}},
        {"t": 5},
    ],
)
def test_another_checkpoint_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="the checkpoint's offsets are not this source's"):
        Position.from_json(value)


def test_new_partitions_begin_at_their_first_offset() -> None:
    ends = at({("t", 0): 9, ("t", 1): 4, ("u", 0): 2})
    assert compare(at({("t", 0): 5}), ends) == ({("t", 0): 5, ("t", 1): 0, ("u", 0): 0}, [])
    assert between(at({("t", 0): 9}), ends) == {("t", 1): (0, 4), ("u", 0): (0, 2)}


def test_what_cannot_be_read_any_more_is_told() -> None:
    before = at({("t", 0): 5, ("t", 1): 5, ("u", 0): 1})
    assert compare(before, at({("t", 0): 5, ("t", 1): 5})).losses == [
        "topic u does not exist any more, or is not subscribed to any more"
    ]
    again = compare(before, at({("t", 0): 9, ("t", 1): 2, ("u", 0): 1}, t="e" * 32))
    assert again == ({("t", 0): 0, ("t", 1): 0, ("u", 0): 1}, ["topic t was deleted and created again"])
    shorter = compare(before, at({("t", 0): 3, ("t", 1): 5, ("u", 0): 1}))
    assert shorter.losses == ["t-0 ends at offset 3, and was read up to 5"]
    assert shorter.starts["t", 0] == 3
    assert compare(before, at({("t", 0): 5, ("u", 0): 1})).losses == [
        "t-1 does not exist any more, or is not assigned any more"
    ]


@given(st.dictionaries(places, st.integers(0, 10_000), max_size=12), st.integers(1, 20_000), st.integers(0, 100))
def test_a_micro_batch_gets_its_limit_and_every_partition_with_a_lag_some(
    lags: dict[Partition, int], limit: int, turn: int
) -> None:
    found = admit(lags, limit, turn)
    assert sum(found.values()) == min(limit, sum(lags.values()))
    assert all(0 < share <= lags[place] for place, share in found.items())
    waiting = [place for place, lag in lags.items() if lag]
    if limit >= len(waiting):
        assert sorted(found) == sorted(waiting)


def test_partitions_take_turns_where_the_limit_is_smaller_than_their_number() -> None:
    lags = {("t", index): 100 for index in range(5)}
    seen: set[Partition] = set()
    for turn in range(0, 10, 2):
        seen |= set(admit(lags, 2, turn))
    assert seen == set(lags)
