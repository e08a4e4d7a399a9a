"""Signals that stop a process, taken by a thread of their own, so that the process ends within a bound.

A handler on the event loop runs only while the loop does, and waits for what it stops: neither is certain when a disk
hangs or a directory is gone. So the signals are blocked in every thread but one, which waits for them, has the loop
stop the process, and kills the process when that takes too long. Only a thread that waits in the kernel for a disk can
outlast that, as long as the disk does.

What runs in every Python of an environment (a tracer's or debugger's hook) may have started threads before, which block
nothing: the kernel may give them a signal, too. Python calls its handler in the main thread, which passes it on.

Entry: `StopSignals`, `end_within`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class OnSignal(NamedTuple):
    """What a signal leads to."""

    call: Callable[[], None]
    """Called on the event loop."""
    limit_s: float | None = None
    """The process is killed that long after the signal if it has not ended; None: never."""


def kill_after(limit_s: float, why: str) -> None:
    """Wait `limit_s` seconds and kill this process, with a line on standard error. Runs on a thread."""
    time.sleep(limit_s)
    line = f"tidelog: killed: it has not stopped within {limit_s:g} s of {why}; acknowledged records are in the WAL\n"
    with contextlib.suppress(OSError):  # the reader of the pipe may be gone
        os.write(2, line.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def end_within(limit_s: float, why: str) -> None:
    """Have this process killed if it has not ended within `limit_s` seconds from now."""
    threading.Thread(target=kill_after, args=(limit_s, why), daemon=True, name="limit").start()


class StopSignals:
    """The signals of a process. Make it in the main thread, and before others: they inherit what is blocked."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._waiting: threading.Thread | None = None
        self._early: list[int] = []
        """What came to another thread before `serve`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _frame: object) -> None:
        if self._waiting is None or self._waiting.ident is None:
            self._early.append(number)
        else:
            signal.pthread_kill(self._waiting.ident, number)

    def serve(self, loop: asyncio.AbstractEventLoop, on: Mapping[signal.Signals, OnSignal]) -> None:
        """Take the signals from now on, those included that came since the making."""
        assert set(on) == set(self._numbers), on

        def wait() -> None:
            while True:
                number = signal.Signals(signal.sigwait(self._numbers))
                call, limit_s = on[number]
                if limit_s is not None:
                    end_within(limit_s, number.name)
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends already
                    loop.call_soon_threadsafe(call)

        self._waiting = threading.Thread(target=wait, daemon=True, name="signals")
        self._waiting.start()
        for number in self._early:
            self._pass_on(number, None)
