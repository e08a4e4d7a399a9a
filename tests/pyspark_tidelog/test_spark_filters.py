"""Which filters of Spark leave out partitions and offsets."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from pyspark_tidelog.filters import Pruning, prune


def test_topics_partitions_and_offsets_are_carried_out() -> None:
    given = [
        In(("topic",), ("t", "u")),
        EqualTo(("topic",), "t"),
        In(("partition",), (1, 2, 3)),
        GreaterThanOrEqual(("offset",), 5),
        GreaterThan(("offset",), 6),
        LessThanOrEqual(("offset",), 20),
        LessThan(("offset",), 20),
    ]
    found, left = prune(given)
    assert left == []
    assert (found.start, found.end) == (7, 20)
    assert found.admits("t", 2) and not found.admits("u", 2) and not found.admits("t", 4)
    assert prune([EqualTo(("offset",), 9)]) == (Pruning(start=9, end=10), [])


def test_a_timestamp_moves_the_start_and_is_left_to_spark_as_well() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678_900, tzinfo=UTC)
    given = [GreaterThan(("timestamp",), at), LessThan(("timestamp",), at)]
    found, left = prune(given)
    assert left == given
    assert found.since_ms == 1_767_323_045_678, "rounded down"


@pytest.mark.parametrize("kind", [EqualTo, GreaterThan, GreaterThanOrEqual])
def test_a_timestamp_before_1970_leaves_out_nothing(kind: type[EqualTo]) -> None:
    """Records may have such timestamps, -1 above all, and an offset cannot be asked for by one."""
    given = [kind(("timestamp",), datetime(1969, 12, 31, 23, 59, 59, 995_000, tzinfo=UTC))]
    assert prune(given) == (Pruning(), given)


def test_all_else_is_left_to_spark() -> None:
    given = [
        StringStartsWith(("topic",), "t"),
        EqualTo(("value",), b"x"),
        EqualTo(("headers", "key"), "x"),
        GreaterThan(("partition",), 3),
        GreaterThan(("offset",), None),
    ]
    assert prune(given) == (Pruning(), given)
