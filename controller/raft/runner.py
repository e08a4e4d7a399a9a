"""The surroundings of a member in a process: a thread for its turns, the system's clock, files and sockets.

Entry: `system_surroundings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from tidelog.controller.raft.files import SYSTEM_FILES
from tidelog.controller.raft.sockets import SystemSockets
from tidelog.controller.raft.surroundings import Surroundings, Turns
from tidelog.runtime.scheduling import wake_promptly


class _WriterThread:
    """A `BackgroundWork` on a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="tidelog-snapshot", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()


class _ThreadRunner:
    """A `Runner` with a thread, which sleeps in the member's poller and is woken by an eventfd."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="tidelog-raft", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *args)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def join(self) -> None:
        await asyncio.to_thread(self._thread.join)
        os.close(self._wake_fd)

    def _run(self) -> None:
        wake_promptly()  # a commit waits for three members to wake up, one after the other
        turns = self._turns
        try:
            if not turns.begin():
                return
            turns.watch(self._wake_fd, self._woken)
            while (pause := turns.take()) is not None:
                if not pause.listens:
                    turns.stopping.wait(pause.seconds)
                elif pause.seconds:
                    turns.listen(pause.seconds)
        finally:
            turns.end()

    def _woken(self, fd: int, event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)


def system_surroundings() -> Surroundings:
    """A process's own clock, files, sockets and threads."""
    return Surroundings(
        monotonic=time.monotonic,
        random=random.random,
        files=SYSTEM_FILES,
        sockets=SystemSockets(),
        work=_WriterThread,
        runner=_ThreadRunner,
    )
