"""The thread with the event loop on which all brokers in this process run.

There is one, from the first broker's start to the last one's end: types that several threads use for the first time at
the same moment may crash msgspec, and brokers of one cluster take turns anyway.

Entry: `enter_loop`, `leave_loop`.
"""

from __future__ import annotations

import asyncio
import threading

import uvloop

STOP_S = 30.0


class LoopThread:
    """A running event loop in a thread of its own."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidelog-brokers", daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._wait())

    async def _wait(self) -> None:
        self._stopping = asyncio.Event()
        self._started.set()
        await self._stopping.wait()

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the event loop of the brokers has not ended within {STOP_S:g} s")


_lock = threading.Lock()
_users = 0
_shared: LoopThread | None = None


def enter_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs until as many `leave_loop`."""
    global _shared, _users
    with _lock:
        if _shared is None:
            _shared = LoopThread()
        _users += 1
        return _shared.loop


def leave_loop() -> None:
    """Undo one `enter_loop`; the last one ends the thread."""
    global _shared, _users
    with _lock:
        _users -= 1
        if _users == 0 and _shared is not None:
            ended, _shared = _shared, None
            ended.close()
