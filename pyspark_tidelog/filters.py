"""Filters that Spark pushes down: which partitions and offsets a read can leave out. No I/O.

Filters on `topic`, `partition` and `offset` are carried out completely. One on `timestamp` moves the start of each
partition up to the first offset with such a timestamp or a later one; Spark filters the rows after that, too. All other
filters are Spark's.

Entry: `prune`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

NO_END = (1 << 63) - 1


@dataclass(frozen=True)
class Pruning:
    """What filters leave of a read."""

    topics: frozenset[str] | None = None
    """None: all."""
    indexes: frozenset[int] | None = None
    """Of partitions; None: all."""
    start: int = 0
    end: int = NO_END
    """Offsets `[start, end)` of every partition."""
    since_ms: int | None = None
    """Only what has this timestamp or a later one is wanted."""

    def admits(self, topic: str, index: int) -> bool:
        """Whether anything of a partition may be wanted."""
        return (self.topics is None or topic in self.topics) and (self.indexes is None or index in self.indexes)


def prune(filters: Iterable[Filter]) -> tuple[Pruning, list[Filter]]:
    """Return what filters leave of a read, and those that Spark has to apply."""
    found, left = Pruning(), []
    for each in filters:
        narrower, is_done = _with(found, each)
        found = narrower
        if not is_done:
            left.append(each)
    return found, left


def _with(found: Pruning, one: Filter) -> tuple[Pruning, bool]:
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    name = attribute[0] if len(attribute) == 1 else ""
    if name in ("topic", "partition"):
        values = _values(one)
        if values is None:
            return found, False
        if name == "topic":
            return _replaced(found, topics=_both(found.topics, values)), True
        return _replaced(found, indexes=_both(found.indexes, values)), True
    if name == "offset":
        return _with_offset(found, one)
    if name == "timestamp" and isinstance(one, GreaterThan | GreaterThanOrEqual | EqualTo):
        at = _as_ms(one.value)
        if at is not None and at >= 0:  # brokers are not asked for one before 1970, which records may have
            return _replaced(found, since_ms=max(at, found.since_ms if found.since_ms is not None else at)), False
    return found, False


def _values(one: Filter) -> frozenset[Any] | None:
    if isinstance(one, EqualTo):
        return frozenset([one.value])
    return frozenset(one.value) if isinstance(one, In) else None


def _both(known: frozenset[Any] | None, values: frozenset[Any]) -> frozenset[Any]:
    return values if known is None else known & values


def _with_offset(found: Pruning, one: Filter) -> tuple[Pruning, bool]:
    value = getattr(one, "value", None)
    if type(value) is not int:
        return found, False
    if isinstance(one, EqualTo):
        return _replaced(found, start=max(found.start, value), end=min(found.end, value + 1)), True
    if isinstance(one, GreaterThan | GreaterThanOrEqual):
        return _replaced(found, start=max(found.start, value + isinstance(one, GreaterThan))), True
    if isinstance(one, LessThan | LessThanOrEqual):
        return _replaced(found, end=min(found.end, value + isinstance(one, LessThanOrEqual))), True
    return found, False


def _replaced(found: Pruning, **changes: Any) -> Pruning:
    return Pruning(**{**vars(found), **changes})


def _as_ms(value: object) -> int | None:
    """Return a timestamp of a filter in milliseconds, rounded down."""
    if not isinstance(value, datetime):
        return None
    aware = value if value.tzinfo is not None else value.astimezone(UTC)
    return int(aware.timestamp() * 1_000)
