"""`Clock`, the door to time.

Invariant: no module outside this one asks the operating system for the time, but for the real sides of other doors
(`runtime.disk`, the Raft under `Consensus`), which are not there where time is simulated. Wall-clock time (milliseconds
since the Unix epoch, UTC) is for what users see: timestamps, retention, TTLs. Monotonic time (seconds) is for time-outs
and ages; it never jumps. The event loop's own timers (`asyncio.sleep`, `loop.call_later`) are virtual in the simulator,
so code may use them freely.

Entry: `SystemClock` in production, a simulated one under `simulation`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the rest of the house knows of time."""

    def time_ms(self) -> int:
        """Wall-clock time in milliseconds since the Unix epoch (int64). May jump when an operator sets the clock."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary start. Never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for `seconds` (≥ 0)."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def time_ms(self) -> int:
        """See `Clock.time_ms`."""
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)
    """See `Clock.monotonic`. Not wrapped: a request asks three times."""

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)
