"""`AckGate`: holds the confirm offset while the controllers take the WAL for wholly committed. Sans-IO.

A broker whose WAL is wholly committed may lose it without a loss, and the controllers let it start over then. So before
it confirms, and thereby acknowledges, the next record, they must know that this is over. The gate is closed when they
were told that everything is committed, and opened when they were told that there may be more.

Entry: `AckGate`.
"""

from __future__ import annotations

from collections.abc import Callable


class AckGate:
    """Whether durable records may be confirmed. Open until it is closed for the first time."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_wanted = False
        """Whether something waits behind the closed gate."""
        self.on_wanted: Callable[[], None] = _ignore
        """Called once for each time that the gate was closed, when something first waits behind it."""
        self.on_opened: Callable[[], None] = _ignore
        """Called when the gate opens again."""
        self._bound = 0

    def close(self, wal_end: int) -> None:
        """Hold everything after `wal_end`, a WAL offset (int64 bytes) before which every record is committed."""
        self.is_open = False
        self._bound = wal_end

    def open(self) -> None:
        """Let everything through again."""
        if not self.is_open:
            self.is_open, self.is_wanted = True, False
            self.on_opened()

    def admit(self, durable_offset: int) -> int:
        """Return up to which WAL offset confirmation may go when the WAL is durable up to `durable_offset`."""
        if self.is_open or durable_offset <= self._bound:
            return durable_offset
        if not self.is_wanted:
            self.is_wanted = True
            self.on_wanted()
        return self._bound


def _ignore() -> None:
    """Default callback: do nothing."""
