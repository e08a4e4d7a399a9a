"""Child processes that run Tidelog: the command that starts one, and how it notices that its parent has died.

A parent keeps the write end of a pipe, and its children inherit the read end. The kernel closes the write end when the
parent ends, however it ends: there is no signal that could be blocked, ignored or sent too early.

Entry: `TIDELOG`; `ParentPipe` for a parent, `watch_parent` for a child.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from tidelog.runtime.stop_signals import kill_after

TIDELOG = (sys.executable, "-P", "-m", "tidelog")
"""The command of a child. Without `-P`, `-m` would import from the current directory first."""
MAX_READ = 64
"""Bytes for one read of the pipe; nothing is ever written to it."""


class ParentPipe:
    """The parent's side of the pipe: children inherit `read_end`, nobody inherits the write end."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """Close both ends; children that still run notice it as the parent's death."""
        os.close(self.read_end)
        os.close(self._write_end)


def watch_parent(read_end: int, died: Callable[[], None], stop_limit_s: float) -> None:
    """Call `died` in a thread when the parent has died. A process that runs `stop_limit_s` later is killed."""

    def wait() -> None:
        while os.read(read_end, MAX_READ):
            pass
        died()
        kill_after(stop_limit_s, "its parent's death")

    threading.Thread(target=wait, daemon=True, name="parent").start()
