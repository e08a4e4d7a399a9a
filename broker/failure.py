"""The error that ends a broker: a failed WAL, a deposed master, a defect.

Entry: `BrokerFailure`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class BrokerFailure:
    """Stores the first such error, and calls the listeners that must stop at once."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to the error."""
        self._listeners: list[Callable[[], None]] = []

    @property
    def happened(self) -> bool:
        """Return whether there is an error."""
        return self.future.done()

    def listen(self, heard: Callable[[], None]) -> None:
        """Call `heard` when the broker fails; not if it has failed already."""
        self._listeners.append(heard)

    def fail(self, error: BaseException) -> None:
        """End the broker with an error. All but the first error are ignored."""
        if self.future.done():
            return
        self.future.set_exception(error)
        for heard in self._listeners:
            heard()

    def close(self) -> None:
        """Mark the error as retrieved: the owner has handled it, or did not wait for it."""
        if self.future.done() and not self.future.cancelled():
            self.future.exception()
