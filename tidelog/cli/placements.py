"""Where partitions are, of any number of topics: `GET /partitions` in requests of a bounded length.

Entry: `placements`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tidelog.runtime.errors import NotFound

NAMES_CHARS = 4_000
"""Of the names in one request; a server refuses a request line of more than 8,190 bytes."""

Row = dict[str, Any]
Get = Callable[[str], Any]
"""Sends a GET to the admin HTTP of a broker; raises `NotFound` for 404."""


def placements(get: Get, topics: Iterable[str], *, but_deleted: bool = False) -> list[Row]:
    """Return the rows of all partitions of these topics. Raises `NotFound` if one does not exist.

    `but_deleted`: the topics have existed, and those that do not any more have no rows.
    """
    rows: list[Row] = []
    for names in _batches(sorted(set(topics))):
        rows += _existing(get, names) if but_deleted else _ask(get, names)
    return rows


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for name in names:
        taken = len(f"topic={name}&")
        if batch and chars + taken > NAMES_CHARS:
            yield batch
            batch, chars = [], 0
        batch.append(name)
        chars += taken
    if batch:
        yield batch


def _ask(get: Get, names: list[str]) -> list[Row]:
    found: list[Row] = get("/partitions?" + "&".join(f"topic={name}" for name in names))["partitions"]
    return found


def _existing(get: Get, names: list[str]) -> list[Row]:
    """Ask for them by halves, as long as one of them does not exist."""
    try:
        return _ask(get, names)
    except NotFound:
        if len(names) == 1:
            return []
    half = len(names) // 2
    return _existing(get, names[:half]) + _existing(get, names[half:])
