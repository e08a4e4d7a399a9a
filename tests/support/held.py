"""`Held`: a coroutine method of the product that stops when it is called, until the test lets it go.

It waits on the loop that calls it; the test may run in another thread.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest


class Held:
    """Every call of `owner.method` from now on waits before its work, or `after` it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *, after: bool = False) -> None:
        self.reached = threading.Event()
        """Somebody waits, or has waited."""
        self.go_on = threading.Event()
        real = getattr(owner, method)

        async def held(*args: Any, **kwargs: Any) -> Any:
            if not after:
                await self._wait()
            found = await real(*args, **kwargs)
            if after:
                await self._wait()
            return found

        monkeypatch.setattr(owner, method, held)

    async def _wait(self) -> None:
        self.reached.set()
        while not self.go_on.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
