"""A loop, logs and checks for targets that run whole servers in memory, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Coroutine
from typing import Any

from tests.support.loops import VirtualLoop


class DefectLogged(AssertionError):
    """The code under test logged an error: by its own account something that must not happen."""


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
        self.found.append(text)


class Stage:
    """Runs coroutines to their end on a virtual loop, and fails when an error was logged or an exception lost."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self._collector = _Collector()
        self.loop.set_exception_handler(self._lost)
        root = logging.getLogger()
        root.handlers = [self._collector]
        root.setLevel(logging.ERROR)

    def _lost(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if error is not None else str(context)
        self._collector.found.append(f"{context.get('message')}\n{text}")

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end; raises `DefectLogged` for what was logged or lost meanwhile."""
        result = self.loop.run_until_complete(work)
        if self._collector.found:
            found, self._collector.found = self._collector.found, []
            raise DefectLogged("\n".join(found))
        return result

    def close(self) -> None:
        self.loop.close()
