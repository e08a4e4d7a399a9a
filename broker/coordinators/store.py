"""What a coordinator keeps of one partition in memory, as the loader and the writer see it.

Entry: `StateStore`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tidelog.broker.coordinators.timers import Now

KeyValue = tuple[bytes, bytes | None]
"""A record of an internal topic; None is a tombstone."""


class StateStore(Protocol):
    """The content of one partition. It begins empty, is filled by `replay`, and changed when records are confirmed."""

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply the next record of the log while it is loaded. Raises `CorruptRecord`."""
        ...

    def finish_loading(self, now: Now) -> None:
        """The log was read to its end: everything that `replay` was told is durable."""
        ...

    def live_records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield everything durable once: replaying it gives this store. What is durable does not change meanwhile."""
        ...

    def counts(self) -> dict[str, int]:
        """Return figures for the log message that the partition is loaded."""
        ...
