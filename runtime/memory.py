"""Process-wide tuning: the allocator keeps freed memory, the garbage collector runs rarely, threads switch often.

A broker receives every batch into separately allocated memory, keeps it in a cache of fixed size and frees the oldest
batches for it, so freed memory is needed again at once. By default the C library returns large blocks to the kernel,
and each new batch then costs a page fault for every 4 KiB: on a virtual machine 0.5 CPU seconds per GB, more than all
other work for a large batch. Without that the process keeps its largest size, which the caches bound.

Python's collector visits all containers created since its last run; the caches hold millions of them, without cycles.
With its defaults (700 new objects) it takes 3 µs of a small Produce request. The last threshold practically disables
full collections, which stop the process for a tenth of a microsecond per object.

A thread that wants the GIL waits `_SWITCH_S` for a computing thread: the WAL's writer and the event loop must not wait
5 ms, the default, for a thread that builds an object to upload.

A cycle that survived two collections and then becomes unreachable is thus never found. Many objects of connections and
errors are in such cycles, and clients determine their number, so they would fill the memory without being accounted
for. Therefore a full collection runs when the process grows more than the accounted bytes explain, and once an hour
(`CollectionWatch`). The memory that it frees is reused before the process grows further, so collections due to growth
are rare.

Entry: `tune`, once, after all imports and before the work begins; `give_back` when it has begun, and `collect_when_due`
from then on; `resident_bytes` returns the size. Where a process is another's: `keep_freed_memory`, `set_imports_aside`.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tidelog.runtime.clock import Clock

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT_BYTES = 32 << 20
"""glibc's bound on M_MMAP_THRESHOLD. Larger blocks come from the kernel and are returned to it."""
_KEPT_BYTES = (1 << 31) - 1
"""Free bytes kept at the end of the heap; mallopt takes an int."""
_STATM = Path("/proc/self/statm")
_COLLECTOR_THRESHOLDS = (2_000, 5, 5_000)
"""New containers (net) per collection of the youngest generation (0.2 ms), and such collections per middle one (1 ms) …

Larger thresholds save no work and only lengthen the pauses.
"""

_SWITCH_S = 0.001
_LOOK_S = 1.0
UNEXPLAINED_BYTES = 64 << 20
"""Growth beyond that of the accounted bytes that triggers a full collection."""
LONGEST_S = 3600.0
"""Longest interval between full collections."""


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory, if the C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@cache
def set_imports_aside(of: str) -> None:
    """Exclude what exists now from every collection, once for each `of`, what a part of a program has imported.

    For processes that others own, such as Spark's Python workers, which begin a full collection after each task.
    """
    gc.freeze()


def tune() -> None:
    """Set up the allocator (if the C library is glibc), the collector and the thread switch interval."""
    keep_freed_memory()
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # imported objects are permanent: exclude them from every collection
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


def give_back() -> None:
    """Return free memory to the kernel, once: temporary memory of the start, mainly metadata that was decoded twice."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process; without /proc, its maximum so far."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


class CollectionWatch:
    """Decides when a full collection is due; see the module docstring.

    Growth is counted from the size at the last collection. That is the maximum, because the allocator returns nothing.
    """

    def __init__(self, resident: int, accounted: int, now_s: float) -> None:
        self._resident, self._accounted, self._at_s = resident, accounted, now_s

    def is_due(self, resident: int, accounted: int, now_s: float) -> bool:
        """Whether a collection is due, by resident bytes, accounted bytes and time. If so, it counts as done."""
        explained = max(0, accounted - self._accounted)
        if resident - self._resident - explained < UNEXPLAINED_BYTES and now_s - self._at_s < LONGEST_S:
            return False
        self._resident, self._accounted, self._at_s = resident, accounted, now_s
        return True


async def collect_when_due(clock: Clock, accounted: Callable[[], int]) -> None:
    """Run a full collection whenever it is due, until cancelled. `accounted` returns the bytes held on purpose."""
    watch = CollectionWatch(resident_bytes(), accounted(), clock.monotonic())
    while True:
        await clock.sleep(_LOOK_S)
        started, resident = clock.monotonic(), resident_bytes()
        if watch.is_due(resident, accounted(), started):
            found = gc.collect()
            took_ms = round((clock.monotonic() - started) * 1000, 1)
            logger.info(
                "full garbage collection", extra={"resident_bytes": resident, "unreachable": found, "took_ms": took_ms}
            )
