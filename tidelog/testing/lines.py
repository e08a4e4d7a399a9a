"""The lines that brokers in processes of their own have written: the newest ones, and how many there have been.

Entry: `BrokerLines`.
"""

from __future__ import annotations

from collections import deque

KEPT = 5_000
"""The newest lines that are kept."""


class BrokerLines:
    """Filled by a thread for each process."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT)
        self.count = 0
        """Of all lines, those included that are not kept any more."""

    def add(self, line: str) -> None:
        """Keep a line."""
        self._lines.append(line)
        self.count += 1

    def since(self, count: int) -> list[str]:
        """Return the lines that are kept and came after the first `count`."""
        new = self.count - count
        return list(self._lines)[-new:] if new > 0 else []
