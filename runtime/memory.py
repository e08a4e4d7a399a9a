"""How this process runs: the allocator keeps what was freed, the collector looks seldom, threads take short turns.

A broker receives every batch into memory of its own, keeps it in a cache of fixed size and frees the oldest for it. So
what is freed is wanted again at once. The C library's defaults give large blocks back to the kernel, and each new batch
then costs a page fault for every 4 KiB: on a virtual machine 0.5 CPU seconds a GB, more than all else that is done for
a large batch together. Told to keep them, the process stays as large as it once was, which the caches bound.

Python's collector walks over all containers that were made since it last looked; the caches hold millions and no cycle.
With its defaults (700 new objects) it takes 3 µs of a small Produce request. The last threshold is as good as never:
a full collection stops the process for a tenth of a microsecond an object.

A thread that wants the interpreter waits for `_SWITCH_S` if another one computes: the WAL's writer and the event loop
must not wait 5 ms, the default, for a thread that builds an object to upload.

What dies in a cycle that lived through two looks is so never found. Much that is made for a connection or an error is
such a cycle, and strangers decide how often: they would fill the memory with what no account knows of. So everything is
collected when the process grows and the accounts do not say why, and once an hour (`CollectionWatch`). What that frees
is used again before the process grows more, so that growth alone makes it rare.

Entry: `tune`, once, when all is imported and before the work begins; `give_back` when it has begun, and
`collect_when_due` from then on; `resident_bytes` says how much there is.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from runtime.clock import Clock

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT_BYTES = 32 << 20
"""glibc's bound on M_MMAP_THRESHOLD. What is larger comes from the kernel and goes back to it."""
_KEPT_BYTES = (1 << 31) - 1
"""Free bytes at the end of the heap that are not given back: mallopt takes an int."""
_STATM = Path("/proc/self/statm")
_COLLECTOR_THRESHOLDS = (2_000, 5, 5_000)
"""Net new containers until the youngest is collected (0.2 ms), its collections for one of the middle (1 ms) …

Larger steps are no less work, only longer stops.
"""

_SWITCH_S = 0.001
_LOOK_S = 1.0
UNEXPLAINED_BYTES = 64 << 20
"""Growth beyond that of the accounts, from which on everything is collected."""
LONGEST_S = 3600.0
"""Everything is collected so often at least."""


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, where the C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def tune() -> None:
    """Set up the allocator, where the C library is glibc, the collector and the switching of threads."""
    keep_freed_memory()
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # what was imported lives for ever: keep it out of every collection
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


def give_back() -> None:
    """Give what is free to the kernel, once: what a start needed for a moment, metadata decoded twice above all."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process now; where there is no /proc, the most that it ever was."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


class CollectionWatch:
    """Tells when everything should be collected: see the module.

    Growth is counted from the size at the last collection: the allocator gives nothing back, so that is the largest.
    """

    def __init__(self, resident: int, accounted: int, now_s: float) -> None:
        self._resident, self._accounted, self._at_s = resident, accounted, now_s

    def is_due(self, resident: int, accounted: int, now_s: float) -> bool:
        """Whether it is time, by the bytes of the process, those that it holds on purpose, and the time. Once told, it
        counts as done."""
        explained = max(0, accounted - self._accounted)
        if resident - self._resident - explained < UNEXPLAINED_BYTES and now_s - self._at_s < LONGEST_S:
            return False
        self._resident, self._accounted, self._at_s = resident, accounted, now_s
        return True


async def collect_when_due(clock: Clock, accounted: Callable[[], int]) -> None:
    """Collect everything whenever that is due, until cancelled. `accounted`: bytes that are held on purpose."""
    watch = CollectionWatch(resident_bytes(), accounted(), clock.monotonic())
    while True:
        await clock.sleep(_LOOK_S)
        started, resident = clock.monotonic(), resident_bytes()
        if watch.is_due(resident, accounted(), started):
            found = gc.collect()
            took_ms = round((clock.monotonic() - started) * 1000, 1)
            log.info("collected all", extra={"resident_bytes": resident, "unreachable": found, "took_ms": took_ms})
