"""`CpuMeter`, the interface to the CPU time of this process, and the CPU cost of a byte.

Invariant: the figures affect only speed. A meter with constant values represents a machine that is never busy;
simulations use one.

*Waiting* is the time in which a thread was runnable while another one had the core. Linux counts it for each thread
(`/proc/thread-self/schedstat`). It distinguishes a machine (or a container's quota) without idle capacity from an idle
one, whichever process uses it. Without the file, waiting is unknown and counts as none.

Entry: `SystemCpu`; `ByteCost`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple, Protocol

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


class CpuTimes(NamedTuple):
    """Seconds since an arbitrary start; they only grow."""

    process_s: float
    """CPU time of all threads of the process."""
    loop_run_s: float
    """CPU time of the calling thread, which is the event loop's."""
    loop_wait_s: float
    """Time for which the calling thread waited for a core."""


class CpuMeter(Protocol):
    """Source of CPU times."""

    def times(self) -> CpuTimes:
        """Return the current figures. Called on the event loop's thread; takes about 20 µs."""
        ...

    def thread_s(self) -> float:
        """Return the CPU seconds of the calling thread. Takes less than a microsecond."""
        ...


class SystemCpu:
    """CPU times of the operating system."""

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
    """Recent CPU cost of an operation, in seconds per byte."""

    def __init__(self, first: float) -> None:
        """`first` is the estimate before the first measurement."""
        assert first > 0
        self._bounds = first / 10, first * 10
        self.seconds_a_byte = first

    def note(self, size: int, seconds: float) -> None:
        """Add a measurement with the weight `size` / `_MEMORY_BYTES`. Outliers are bounded."""
        if size <= 0:
            return
        low, high = self._bounds
        found = min(max(seconds / size, low), high)
        weight = min(1.0, size / _MEMORY_BYTES)
        self.seconds_a_byte += (found - self.seconds_a_byte) * weight


_MEMORY_BYTES: Final = 64 << 20
"""The average covers about the last 64 MiB."""
