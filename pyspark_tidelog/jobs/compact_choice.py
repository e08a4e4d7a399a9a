"""Which of the tasks that brokers plan a run of `tidelog spark compact` carries out. No I/O.

A run ends, also while producers go on: a task counts only if at least two of its objects were there when the run began,
or were written by it (one, of a task with one). Nothing is tried for ever: the same objects are tried `TRIES` times,
and a damaged object is left out of the next plan, so that its neighbours are planned without it.

Entry: `CompactionChoice`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

TRIES = 2
"""How often the same objects are tried."""


class CompactionChoice:
    """What one run has tried."""

    def __init__(self, fence: int) -> None:
        """`fence`: an id that was given out when the run began. Older objects have smaller ones."""
        self._fence = fence
        self._tried: Counter[tuple[int, ...]] = Counter()
        self._written: set[int] = set()
        self.excluded: set[int] = set()
        """Objects that are not to be planned any more."""

    def wants(self, inputs: tuple[int, ...]) -> bool:
        """Return whether a task with these objects is to be carried out."""
        known = sum(each < self._fence or each in self._written for each in inputs)
        return self._tried[inputs] < TRIES and known >= min(2, len(inputs))

    def begins(self, inputs: tuple[int, ...]) -> None:
        """Note that a task is tried."""
        self._tried[inputs] += 1

    def committed(self, outputs: Iterable[int]) -> None:
        """Note the objects that a task has become."""
        self._written.update(outputs)

    def gave_up(self, inputs: tuple[int, ...], damaged: int | None = None) -> None:
        """Note that a task was not committed; `damaged`: because of this object."""
        if damaged is not None:
            self.excluded.add(damaged)
        elif self._tried[inputs] >= TRIES:
            self.excluded.update(inputs)
