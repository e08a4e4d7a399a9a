"""The stacks of this process: what each task of the event loop waits for, and where each thread is.

Stacks name files, lines and functions; they show no value of a variable, so they hold no data and no secret.

Entry: `stacks`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from pathlib import PurePath
from types import FrameType
from typing import Any, Final

MAX_TASKS: Final = 2_000
MAX_FRAMES: Final = 30
"""Of one stack: the innermost ones."""


def stacks() -> dict[str, Any]:
    """Return the tasks of the running loop with the stacks on which they are suspended, and all threads with theirs.

    Tasks are sorted by name; of more than `MAX_TASKS` the rest is counted as `left_out`.
    """
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        "tasks": [_task(task) for task in tasks[:MAX_TASKS]],
        "left_out": max(0, len(tasks) - MAX_TASKS),
        "threads": [
            {"name": names.get(ident, str(ident)), "stack": _frames(frame)}
            for ident, frame in sys._current_frames().items()
        ],
    }


def _task(task: asyncio.Task[Any]) -> dict[str, Any]:
    return {"name": task.get_name(), "does": _qualified_name(task.get_coro()), "stack": _awaits(task)}


def _qualified_name(work: object) -> str:
    return str(getattr(work, "__qualname__", type(work).__name__))


def _awaits(task: asyncio.Task[Any]) -> list[str]:
    """Follow what the task's coroutine awaits, down to what is no coroutine; the outermost first."""
    found = []
    work: Any = task.get_coro()
    while work is not None:
        frame = next((each for name in _FRAMES if (each := getattr(work, name, None)) is not None), None)
        if frame is not None:
            found.append(_place(frame.f_code.co_filename, frame.f_lineno, _qualified_name(work)))
        awaited = next((each for name in _AWAITED if (each := getattr(work, name, None)) is not None), None)
        if awaited is None and frame is None:
            found.append(f"waits for {type(work).__name__}")
        work = awaited
    return found[-MAX_FRAMES:]


_FRAMES: Final = ("cr_frame", "gi_frame", "ag_frame")
_AWAITED: Final = ("cr_await", "gi_yieldfrom", "ag_await")


def _frames(frame: FrameType) -> list[str]:
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES, lookup_lines=False)
    return [_place(each.filename, each.lineno, each.name) for each in reversed(summary)]


def _place(file: str, line: int | None, function: str) -> str:
    """Name a place by the last three parts of its file's path: where the machine keeps it does not matter."""
    return f"{'/'.join(PurePath(file).parts[-3:])}:{line} {function}"
