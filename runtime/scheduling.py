"""Shorter scheduler slices for the threads between a request and its acknowledgement.

An acknowledgement needs two wake-ups: of the WAL's writer thread, and of the event loop after the sync. Each thread
computes for about 0.1 ms and sleeps again, but on a busy machine it waits for a core until the running thread has used
up its slice of about 3 ms. Linux (EEVDF, 6.12 and newer) lets a thread request a shorter slice: its share of the core
stays the same, in smaller and earlier pieces, and on wake-up it may preempt a thread with a longer slice. This needs no
privilege and does not change the priority. Older kernels ignore the request.

Entry: `wake_promptly`, called by such a thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_NS = 200_000
"""Allowed: 0.1 to 100 ms. Long enough for the work of one request."""
_SYSCALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Numbers of sched_setattr(2), which older C libraries do not wrap."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period."""
_RESET_ON_FORK = 1
"""New threads and processes of this thread get an ordinary slice, for example upload threads."""


def wake_promptly() -> bool:
    """Request short slices for the calling thread. Returns False, and changes nothing, where this is not possible."""
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        wish = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0)
        return bool(ctypes.CDLL(None).syscall(number, 0, wish, 0) == 0)
    except OSError:
        return False
