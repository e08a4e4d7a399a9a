"""Unexpected exceptions of this process: counted, kept for operators, and turned into errors that callers retry.

An exception that is no `TidelogError` was expected by nobody: a library's defect, a system call's rare error, our own
mistake. The policy (docs/rules.md, rule 11):

- Where a request to the outside world (bucket, network) raises one, the boundary turns it into `Unavailable`
  (`as_unavailable`), which all callers retry.
- A loop that raises one is started again after a pause (`tidelog.runtime.tasks.TaskSet.keep`).
- One of a request ends that request or its connection only (`count`: such lines of the log have a limit).
- One that ends a task for good ends the process if going on would break a rule (the task set's `on_failure`).
- A failed assertion is never retried at a boundary: it says that going on would break a rule.

All are logged with their traceback, counted, and shown in `tidelog status` for `SHOWN_S`.

Like the loggers of `logging` the record is one for the whole process: any part may meet such an exception, and
operators look for them in one place. Entry: `ERRORS`, `expected`, `first_of`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from tidelog.runtime.errors import TidelogError, Unavailable

logger = logging.getLogger(__name__)

SHOWN_S = 600.0
"""How long an exception stays among the problems of `tidelog status`."""
MAX_PLACES = 200
"""Places that are kept apart; they are named in the source, so there are fewer."""

Heard = Callable[[str, BaseException, bool], None]


class _Tally(NamedTuple):
    times: int
    at: float
    """Time of the last one, in seconds of the loop's clock."""
    text: str
    ended: bool
    """Nothing goes on there; otherwise it is tried again."""


class TaskErrors:
    """The unexpected exceptions of one process, by place."""

    def __init__(self) -> None:
        self._seen: dict[str, _Tally] = {}
        self._listeners: dict[Heard, None] = {}

    def note(self, place: str, error: BaseException, *, ended: bool) -> None:
        """Log and count an exception. `place`: a task set or an interface; `ended`: it is not tried again."""
        event = "unexpected error: a background task has ended" if ended else "unexpected error, trying again"
        logger.error(event, exc_info=error, extra={"place": place})
        self.count(place, error, ended=ended)

    def count(self, place: str, error: BaseException, *, ended: bool) -> None:
        """Count an exception that is in the log already, as one that peers can cause, whose lines have a limit."""
        known = self._seen.get(place)
        if known is None and len(self._seen) >= MAX_PLACES:
            place = "other"
            known = self._seen.get(place)
        count = 1 if known is None else known.times + 1
        self._seen[place] = _Tally(count, _now_s(), f"{type(error).__name__}: {error}", ended)
        for heard in self._listeners:
            heard(place, error, ended)

    def listen(self, heard: Heard) -> Callable[[], None]:
        """Call `heard(place, error, ended)` for each exception from now on. Returns a remover."""
        self._listeners[heard] = None
        return lambda: self._listeners.pop(heard, None)

    def counts(self) -> dict[str, int]:
        """Return the exceptions since the start of the process, by place."""
        return {place: seen.times for place, seen in self._seen.items()}

    def problems(self) -> list[str]:
        """Return the places of recent exceptions, one sentence each."""
        now = _now_s()
        return [
            f"unexpected error of {place}, {seen.times} so far, {'ended' if seen.ended else 'tried again'}: {seen.text}"
            for place, seen in self._seen.items()
            if now - seen.at < SHOWN_S
        ]


def _now_s() -> float:
    return asyncio.get_running_loop().time()


ERRORS = TaskErrors()
"""Those of this process."""


def as_unavailable(place: str, error: Exception) -> Unavailable:
    """Return the retriable error to raise for an unexpected exception at a boundary; note the exception."""
    ERRORS.note(place, error, ended=False)
    return Unavailable(
        f"unexpected error of {place}: {type(error).__name__}: {error}", hint="the log has its traceback"
    )


def first_of(error: Exception) -> Exception:
    """Return an exception, or of an `ExceptionGroup` the one that counts: a failed assertion, else the first one."""
    if not isinstance(error, ExceptionGroup):
        return error
    broken = error.subgroup(AssertionError)
    return first_of((broken or error).exceptions[0])


def expected(place: str, error: Exception) -> TidelogError:
    """Return an exception as one that callers know: itself, or `as_unavailable`. Raises a failed assertion again.

    Of a group of tasks it is the first one that counts (`first_of`).
    """
    error = first_of(error)
    if isinstance(error, TidelogError):
        return error
    if isinstance(error, AssertionError):
        raise error
    return as_unavailable(place, error)
