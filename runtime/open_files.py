"""The process's limit of open files, raised as far as the system lets it.

Every connection is an open file, and so are WAL segments and requests to the bucket. A listener that takes the last one
would stop the storage with it; so listeners are bounded below the limit (`connections_that_fit`).
"""

from __future__ import annotations

import resource

RESERVED = 512
"""Open files for everything that is not a client: WAL segments, bucket connections, other listeners."""


def raise_open_files() -> int:
    """Raise the soft limit to the hard one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def connections_that_fit(open_files: int, wanted: int) -> int:
    """`wanted`, or as many connections as leave room for the rest of the process (at least 16)."""
    return min(wanted, max(16, open_files - RESERVED))
