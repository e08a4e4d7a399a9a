"""A disk that hangs: the syncs of its files begin, and do not end.

Entry: `hung_syncs`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LIMIT_S = 120.0


@contextmanager
def hung_syncs(monkeypatch: pytest.MonkeyPatch, directory: str) -> Iterator[threading.Event]:
    """Hold each fdatasync in directories of this name; at the end, or when the event is set, they go on."""
    go_on = threading.Event()
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        if directory in os.readlink(f"/proc/self/fd/{fd}"):
            go_on.wait(LIMIT_S)
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fdatasync)
        try:
            yield go_on
        finally:
            go_on.set()
