"""`Clock`, the interface to time.

Invariant: no other module reads the operating system's clocks, except the real implementations of the other interfaces
(`tidelog.runtime.disk`, the Raft under `Consensus`), which are absent where time is simulated. Wall-clock time
(milliseconds since the Unix epoch, UTC) is for times that users see: timestamps, retention, TTLs. Monotonic time
(seconds) is for time-outs and ages; it never jumps. The event loop's own timers (`asyncio.sleep`, `loop.call_later`)
are virtual in the simulator and may be used freely.

Entry: `SystemClock` in production, a simulated clock in `simulation`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time."""

    def time_ms(self) -> int:
        """Return wall-clock time in milliseconds since the Unix epoch (int64). May jump when the clock is set."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start. Never decreases."""
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
    """See `Clock.monotonic`. Not wrapped, because each request calls it three times."""

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)
