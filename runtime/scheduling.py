"""Which threads the kernel wakes promptly: those between a request and its acknowledgement.

An acknowledgement is two wake-ups: of the WAL's writer thread, and of the event loop when the sync is over. Each
computes for some 0.1 ms and sleeps again, but on a busy machine waits for a core until the thread that has it used up
its slice, some 3 ms. Linux (EEVDF, 6.12 and newer) lets a thread ask for a shorter slice: it gets no more of the core
than before, in smaller pieces and sooner, and may take the place of a thread with a longer slice when it wakes up. No
privilege is needed, priority stays as it is. Older kernels ignore the wish.

Entry: `wake_promptly`, called by such a thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_NS = 200_000
"""0.1 to 100 ms are allowed. Long enough for what one request needs."""
_SYSCALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Numbers of sched_setattr(2), which older C libraries do not wrap."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period."""
_RESET_ON_FORK = 1
"""Threads and processes that this one starts get an ordinary slice: those that upload, say."""


def wake_promptly() -> bool:
    """Ask for short slices for the calling thread; False where that is not possible, and nothing has changed then."""
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wish = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, wish, 0) == 0)
