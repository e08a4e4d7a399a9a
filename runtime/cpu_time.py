"""`CpuMeter`, the door to the CPU time of this process, and what a byte costs of it.

Invariant: nothing but speed depends on it. A meter that always answers the same is a machine that is never busy, which
is what a simulation hands in.

*Waiting* is the time in which a thread could have run and another one had the core: Linux counts it for each thread
(`/proc/thread-self/schedstat`). It tells a machine (or a container's quota) that has nothing left from one that is
idle, whoever uses it. Where the file is missing, waiting is unknown and counts as none.

Entry: `SystemCpu`; `ByteCost`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple, Protocol

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


class CpuTimes(NamedTuple):
    """Seconds since some start; they only grow."""

    process_s: float
    """CPU time of all threads of the process."""
    loop_run_s: float
    """CPU time of the calling thread: the event loop's."""
    loop_wait_s: float
    """How long the calling thread waited for a core."""


class CpuMeter(Protocol):
    """What the rest of the house knows of CPU time."""

    def times(self) -> CpuTimes:
        """The figures now. Called on the event loop's thread; takes some 20 µs."""
        ...

    def thread_s(self) -> float:
        """CPU seconds of the calling thread, whichever it is. Takes less than a microsecond."""
        ...


class SystemCpu:
    """The operating system's figures."""

    def __init__(self) -> None:
        self._has_schedstat = _SCHEDSTAT.exists()

    def times(self) -> CpuTimes:
        """See `CpuMeter.times`."""
        waited_s = 0.0
        if self._has_schedstat:
            waited_s = int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
        return CpuTimes(time.process_time(), time.thread_time(), waited_s)

    thread_s = staticmethod(time.thread_time)
    """See `CpuMeter.thread_s`."""


class ByteCost:
    """CPU seconds that something takes for a byte, as measured lately."""

    def __init__(self, first: float) -> None:
        """`first` is the guess before anything was measured."""
        assert first > 0
        self._bounds = first / 10, first * 10
        self.seconds_a_byte = first

    def note(self, size: int, seconds: float) -> None:
        """`size` bytes took `seconds`: weighs as much as its part of `_MEMORY_BYTES`. Wild figures are bounded."""
        if size <= 0:
            return
        low, high = self._bounds
        found = min(max(seconds / size, low), high)
        weight = min(1.0, size / _MEMORY_BYTES)
        self.seconds_a_byte += (found - self.seconds_a_byte) * weight


_MEMORY_BYTES: Final = 64 << 20
"""What is remembered: about the last 64 MiB."""
