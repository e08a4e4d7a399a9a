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

Entry: `tune`, once, when all is imported and before the work begins; `give_back` when it has begun; `resident_bytes`
says how much there is.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

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
