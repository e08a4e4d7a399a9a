"""The process and the machine that it runs on: versions, processors, memory, open files.

Entry: `machine_facts`.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Final

import msgspec

from tidelog.runtime.memory import resident_bytes
from tidelog.runtime.version import VERSION

_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of cgroup version 2 and 1: what a container may use."""
_NO_LIMIT_BYTES: Final = 1 << 60
"""Version 1 tells about this much for "no limit"."""
_OPEN_FILES: Final = Path("/proc/self/fd")


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one process knows of itself and of its machine. 0: not known."""

    release: str
    """The version of Tidelog."""
    python: str
    system: str
    """Kernel and machine type."""
    host_name: str
    pid: int
    uid: int
    processors: int
    """Those that this process may use."""
    memory_bytes: int
    memory_limit_bytes: int
    """What the process's container may use; 0: no limit of its own."""
    resident_bytes: int
    open_files: int
    open_files_limit: int
    """The soft limit, which a broker raises to the hard one when it starts."""
    open_files_hard_limit: int

    @property
    def usable_memory_bytes(self) -> int:
        """The smaller of the machine's memory and the container's limit; 0: not known."""
        known = [each for each in (self.memory_bytes, self.memory_limit_bytes) if each]
        return min(known, default=0)


def machine_facts() -> MachineFacts:
    """Read the facts of this process. Never fails; what the system does not tell is 0."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        release=VERSION,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        host_name=platform.node(),
        pid=os.getpid(),
        uid=os.getuid(),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_bytes=_memory_bytes(),
        memory_limit_bytes=_limit_in_first(_CGROUP_LIMITS),
        resident_bytes=resident_bytes(),
        open_files=_count_open_files(),
        open_files_limit=_finite(soft),
        open_files_hard_limit=_finite(hard),
    )


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _limit_in_first(files: tuple[Path, ...]) -> int:
    """Return the limit in the first of the files that there is; 0 for none."""
    for file in files:
        try:
            text = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        limit = int(text) if text.isdecimal() else 0
        return limit if limit < _NO_LIMIT_BYTES else 0
    return 0


def _count_open_files() -> int:
    try:
        return len(os.listdir(_OPEN_FILES))
    except OSError:
        return 0
