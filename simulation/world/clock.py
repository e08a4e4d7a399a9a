"""The `Clock` interface of a simulated node: virtual time, with a wall clock that is skewed and may jump.

Monotonic time is the loop's, the same for all nodes. Wall-clock time is `EPOCH_MS` plus the loop's time plus the node's
skew. Entry: `SimClock`.
"""

from __future__ import annotations

import asyncio

from tidelog.runtime.cpu_time import CpuTimes
from tidelog.simulation.world.loop import START_S
from tidelog.simulation.world.odd import OddErrors

KEPT = "TaskSet._keep"
"""Name of the coroutine of a task that is started again."""
EPOCH_MS = 1_750_000_000_000
"""Wall-clock time at the beginning of every simulation, milliseconds since the Unix epoch."""


class SimClock:
    """A `tidelog.runtime.clock.Clock`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, usual_ms: int = 0, *, odd: OddErrors | None = None, host: str = ""
    ) -> None:
        self._loop = loop
        self._odd = odd or OddErrors()
        self._host = host
        self._usual_ms = usual_ms
        self.skew_ms = usual_ms
        """Skew of the wall clock: ahead, or behind if negative."""
        self.has_jumped = False

    def jump(self, by_ms: int) -> None:
        """Jump by an offset added to the usual small skew; 0: end the jump."""
        self.skew_ms = self._usual_ms + by_ms
        self.has_jumped = self.has_jumped or by_ms != 0

    def time_ms(self) -> int:
        """See `Clock.time_ms`."""
        return EPOCH_MS + int((self._loop.time() - START_S) * 1000) + self.skew_ms

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`. What stands for an odd exception anywhere in a kept loop is raised here, after it."""
        await asyncio.sleep(seconds)
        if self._odd.probability and _is_kept_loop():
            self._odd.strike("loop", self._host)


def _is_kept_loop() -> bool:
    """Whether the running task is one that its owner starts again (`tidelog.runtime.tasks.TaskSet.keep`)."""
    task = asyncio.current_task()
    return task is not None and getattr(task.get_coro(), "__qualname__", "") == KEPT


class IdleCpu:
    """A `tidelog.runtime.cpu_time.CpuMeter` of a machine that is never busy."""

    def times(self) -> CpuTimes:
        """See `CpuMeter.times`."""
        return CpuTimes(0.0, 0.0, 0.0)

    def thread_s(self) -> float:
        """See `CpuMeter.thread_s`."""
        return 0.0
