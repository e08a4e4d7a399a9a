"""Ports for servers that tests start, end and start again.

Two tests must not get the same port, in whichever processes of whichever runs they are, for a server that is down has
nothing that shows whose its port is. So a process takes blocks of ports, each with a lock on a file of its own, and
gives each port out once; the kernel gives the locks back however the process ends. None is an ephemeral port
(`runtime.ports`), and none is given out that somebody else listens on.
"""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from runtime.ports import check_free, lasting_ports

BLOCK = 32
ALL_ADDRESSES = "0.0.0.0"

_held: list[int] = []
"""Descriptors of the locks, until this process ends."""
_rest: list[int] = []
"""What is left of the last block, the next port last."""
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
    """Blocks that this process has from now on."""
    directory = Path(tempfile.gettempdir()) / f"tidelog-test-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    blocks = _blocks()
    random.SystemRandom().shuffle(blocks)
    for block in blocks:
        if _try_lock(directory / str(block.start)):
            yield block


def port_block() -> range:
    """Consecutive ports that are free, for a cluster that numbers them itself."""
    for block in _locked_blocks():
        if all(_is_free(port) for port in block):
            return block
    raise AssertionError("no block of ports is free")


def free_port() -> int:
    """A port that nobody else gets or listens on, for a server that may come back under it."""
    with _lock:
        while not (_rest and _is_free(_rest[-1])):
            if _rest:
                _rest.pop()
            else:
                _rest.extend(reversed(port_block()))
        return _rest.pop()
