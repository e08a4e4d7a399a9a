"""Committed offsets and when they expire (KIP-211)."""

from __future__ import annotations

import pytest

from tidelog.broker.groups.offsets import Expiry, OffsetTable
from tidelog.broker.groups.records import OffsetKey, OffsetValue

DAY_MS = 86_400_000


def table(*rows: tuple[str, str, int, OffsetValue]) -> OffsetTable:
    offsets = OffsetTable()
    for group, topic, partition, value in rows:
        offsets.put(OffsetKey(group, topic, partition), value)
    return offsets


def test_a_commit_replaces_the_one_before_even_with_a_smaller_offset() -> None:
    offsets = table(("g", "t", 0, OffsetValue(9, 1, "a", 1)), ("g", "t", 0, OffsetValue(3, 1, "b", 2)))
    assert offsets.get("g", "t", 0) == OffsetValue(3, 1, "b", 2)
    assert offsets.count == 1


def test_what_is_removed_leaves_nothing_behind() -> None:
    offsets = table(("g", "t", 0, OffsetValue(9, 1, "a", 1)), ("g", "t", 1, OffsetValue(9, 1, "a", 1)))
    offsets.remove(OffsetKey("g", "t", 5))
    offsets.remove(OffsetKey("g", "t", 0))
    assert offsets.topics("g") == {"t": [1]}
    offsets.remove(OffsetKey("g", "t", 1))
    assert "g" not in offsets
    assert offsets.groups() == []
    assert offsets.count == 0


def test_offsets_of_deleted_topics_are_found_in_all_groups() -> None:
    one = OffsetValue(1, -1, "", 1)
    offsets = table(("g", "t", 0, one), ("h", "t", 3, one), ("h", "u", 0, one))
    assert offsets.of_topics({"t"}) == [OffsetKey("g", "t", 0), OffsetKey("h", "t", 3)]


@pytest.mark.parametrize(
    ("value", "expiry", "now_ms", "expired"),
    [
        (OffsetValue(1, -1, "", 0), Expiry(None), DAY_MS - 1, False),
        (OffsetValue(1, -1, "", 0), Expiry(None), DAY_MS, True),
        (OffsetValue(1, -1, "", 0), Expiry(1000), DAY_MS + 999, False),
        (OffsetValue(1, -1, "", 0), Expiry(1000), DAY_MS + 1000, True),
        (OffsetValue(1, -1, "", 5000), Expiry(1000), DAY_MS + 1000, False),  # committed after it became Empty
        (OffsetValue(1, -1, "", 0), Expiry(None, {"t"}), 9 * DAY_MS, False),
        (OffsetValue(1, -1, "", 0), Expiry(None, {"u"}), 9 * DAY_MS, True),
        (OffsetValue(1, -1, "", 0, expire_ms=10), Expiry(None), 9, False),
        (OffsetValue(1, -1, "", 0, expire_ms=10), Expiry(None), 10, True),
        (OffsetValue(1, -1, "", 0, expire_ms=10 * DAY_MS), Expiry(None), 2 * DAY_MS, False),
    ],
)
def test_when_an_offset_expires(value: OffsetValue, expiry: Expiry, now_ms: int, expired: bool) -> None:
    offsets = table(("g", "t", 0, value))
    assert bool(offsets.expired("g", expiry, DAY_MS, now_ms)) is expired
