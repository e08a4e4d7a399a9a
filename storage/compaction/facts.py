"""What the planner knows of an object.

Entry: `ObjectFacts`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.storage.commits import StreamRange


class ObjectFacts(NamedTuple):
    """A committed object, as described by the metadata."""

    object_id: int
    kind: int
    """An `ObjectKind`."""
    size: int
    """Bytes."""
    since_ms: int
    """When it was committed."""
    ranges: tuple[StreamRange, ...]
    live: int
    """Number of ranges that hold an offset that is not trimmed or deleted."""
