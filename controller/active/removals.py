"""`Removals`: which of the due objects are deleted from the bucket next, so that none of them holds up the others.

A server may refuse to delete one object for good (a lock, a hold, a policy of some keys, a broken drive), and an answer
for a batch does not say for which one. After a failure half as many are tried, down to one; one that fails alone is
*put aside*, and tried again after growing pauses, alone, in turn with batches of the others. After a success twice as
many are tried. So the objects before it and behind it are deleted, in some rounds, and an outage of the bucket costs no
more requests than it would otherwise.

Soft state of the active controller: a new one finds out again. Sans-I/O: times are seconds of a monotonic clock, given
by the caller. Entry: `Removals`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from tidelog.controller.model.commands import MAX_OBJECTS_PER_COMMAND

FIRST_RETRY_S, RETRY_S = 1.0, 60.0
"""The first pause before an object that was put aside is tried again, which doubles, and the longest one. Operators
are told of those that have come to it."""
MAX_ASIDE = 10_000
"""Objects put aside at a time; beyond that the one that failed first is tried again with the others."""


class _Aside(NamedTuple):
    again_s: float
    """When it may be tried again."""
    pause_s: float


class Removals:
    """The sizes of batches, and the objects put aside; see the module docstring."""

    def __init__(self) -> None:
        self._most = MAX_OBJECTS_PER_COMMAND
        self._aside: dict[int, _Aside] = {}
        """The one that failed last is the last one."""
        self._alone = False
        """What was tried last is one that was put aside."""
        self._why = ""

    @property
    def problem(self) -> str:
        """Return what is not deleted, and why, for operators; empty if nothing has failed for long."""
        told = [each for each, aside in self._aside.items() if aside.pause_s >= RETRY_S]
        if not told:
            return ""
        more = f" and {len(told) - 1} more" if len(told) > 1 else ""
        return f"object {told[0]}{more}, which no metadata names: {self._why}"

    def activated(self) -> None:
        """Forget everything: the controller became active."""
        self._most, self._alone = MAX_OBJECTS_PER_COMMAND, False
        self._aside.clear()

    def waiting(self, now_s: float) -> Container[int]:
        """Return the objects that are not tried now."""
        return frozenset(each for each, aside in self._aside.items() if aside.again_s > now_s)

    def choose(self, due: Sequence[int]) -> tuple[int, ...]:
        """Return those of the due objects, none of them waiting, to delete now: one at least if there is one."""
        again = [each for each in due if each in self._aside]
        others = [each for each in due if each not in self._aside]
        self._alone = bool(again) and not (self._alone and others)
        return tuple(again[:1] if self._alone else others[: self._most])

    def succeeded(self, tried: Sequence[int]) -> None:
        """Record that objects were deleted."""
        for each in tried:
            self._aside.pop(each, None)
        if not self._alone:
            self._most = min(MAX_OBJECTS_PER_COMMAND, 2 * self._most)

    def failed(self, tried: Sequence[int], now_s: float, why: str) -> int | None:
        """Record that the deletion of objects failed; return one that has come to the longest pause now, if any."""
        if len(tried) > 1:
            self._most = max(1, len(tried) // 2)
            return None
        (one,), self._why = tried, why
        known = self._aside.pop(one, None)
        pause_s = min(RETRY_S, 2 * known.pause_s) if known is not None else FIRST_RETRY_S
        if len(self._aside) >= MAX_ASIDE:
            del self._aside[next(iter(self._aside))]
        self._aside[one] = _Aside(now_s + pause_s, pause_s)
        return one if known is not None and known.pause_s < pause_s == RETRY_S else None
