"""The process's limit of open files, raised as far as the system allows.

Connections, WAL segments and requests to the bucket are open files. A listener that used the last one would stop the
storage, so listeners are bounded below the limit (`connections_that_fit`).
"""

from __future__ import annotations

import resource

RESERVED = 512
"""Open files reserved for other uses: WAL segments, bucket connections, other listeners."""


def raise_open_files() -> int:
    """Raise the soft limit to the hard one. Returns the current limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def connections_that_fit(open_files: int, wanted: int) -> int:
    """Return `wanted`, or fewer (at least 16) so that `RESERVED` files remain for the rest of the process."""
    return min(wanted, max(16, open_files - RESERVED))
