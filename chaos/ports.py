"""Ports for servers that tests start, stop and restart.

Two tests in any processes of any runs must not get the same port, because a stopped server does not occupy its port. So
a process reserves blocks of ports, each with a lock on a separate file, and allocates each port once; the kernel
releases the locks when the process ends. Ephemeral ports (`tidelog.runtime.ports`) and ports with a listener are not
allocated.
"""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tidelog.runtime.ports import check_free, lasting_ports

BLOCK = 32
ALL_ADDRESSES = "0.0.0.0"

_held: list[int] = []
"""Descriptors of the locks, until this process ends."""
_rest: list[int] = []
"""The remaining ports of the last block, the next port last."""
_lock = threading.Lock()


def _blocks() -> list[range]:
    lasting = set(lasting_ports())
    starts = range(min(lasting) // BLOCK * BLOCK, 65_536 - BLOCK, BLOCK)
    return [range(start, start + BLOCK) for start in starts if lasting.issuperset(range(start, start + BLOCK))]


def _try_lock(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held.append(descriptor)
    return True


def _is_free(port: int) -> bool:
    try:
        check_free(ALL_ADDRESSES, port)
    except OSError:
        return False
    return True


def _locked_blocks() -> Iterator[range]:
    """Lock and yield blocks for this process."""
    directory = Path(tempfile.gettempdir()) / f"tidelog-test-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    blocks = _blocks()
    random.SystemRandom().shuffle(blocks)
    for block in blocks:
        if _try_lock(directory / str(block.start)):
            yield block


def port_block() -> range:
    """Return consecutive free ports, for a cluster that numbers them itself."""
    for block in _locked_blocks():
        if all(_is_free(port) for port in block):
            return block
    raise AssertionError("no block of ports is free")


def free_port() -> int:
    """Return a port reserved for this process, for a server that may be restarted on it."""
    with _lock:
        while not (_rest and _is_free(_rest[-1])):
            if _rest:
                _rest.pop()
            else:
                _rest.extend(reversed(port_block()))
        return _rest.pop()
