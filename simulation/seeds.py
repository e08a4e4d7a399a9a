"""Many seeds on all cores: each in a process of its own, forked from one that has imported and warmed up everything.

What a seed does must not depend on what ran before it, and what a dead life leaves behind is never given back; a
process that ends answers both. `shrink` leaves out of a failing seed every fault that it does not need to fail. A
mutation is applied in the process of the seed, and is gone with it.

Entry: `Seeds`.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.pool import AsyncResult
from types import TracebackType
from typing import Self

from simulation.mutant import Mutation, apply
from simulation.run import Outcome, simulate

WARM_UP_SEED = 11
"""Several controllers and brokers, in processes of their own: they speak all protocols."""
MAX_TRIES = 120
"""Bound on the simulations of one `shrink`."""


class Seeds:
    """Runs seeds of one kind: so many steps, such faults, `jobs` (≥ 1) at a time."""

    def __init__(self, *, steps: int, faults: Sequence[str], jobs: int) -> None:
        self._run = partial(_run, steps=steps)
        self._faults = tuple(faults)
        self._ahead = 2 * jobs
        simulate(WARM_UP_SEED, steps=1, faults=())  # every codec is built once, before the forks
        gc.collect()
        gc.freeze()
        self._pool = multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.terminate()
        self._pool.join()

    def run(
        self,
        seeds: Iterable[int],
        *,
        skip: Collection[int] = (),
        full: bool = False,
        mutation: Mutation | None = None,
        faults: Sequence[str] | None = None,
    ) -> Iterator[Outcome]:
        """The outcomes in the order of `seeds`; trace and history come with failures only, or if `full`.

        Whoever stops to iterate early has asked for few seeds too many. `faults` are for these seeds alone.
        """
        chosen = self._faults if faults is None else tuple(faults)
        run = partial(self._run, faults=chosen, skip=frozenset(skip), full=full, mutation=mutation)
        waiting: deque[AsyncResult[Outcome]] = deque()
        for seed in seeds:
            waiting.append(self._pool.apply_async(run, (seed,)))
            if len(waiting) >= self._ahead:
                yield waiting.popleft().get()
        while waiting:
            yield waiting.popleft().get()

    def shrink(
        self, failed: Outcome, skip: Collection[int] = (), *, mutation: Mutation | None = None
    ) -> tuple[Outcome, frozenset[int]]:
        """A run of the same seed that breaks one of the same rules with fewer faults, and what it leaves out.

        Halves are tried first, then single faults; not all combinations are. The shortest history of those with as
        few faults wins.
        """
        rules = {finding.rule for finding in failed.findings}
        best, left_out = failed, frozenset(skip)
        size = max(1, len(best.faults_done) // 2)
        tries = 0
        while tries < MAX_TRIES:
            there = best.faults_done
            chunks = [frozenset(there[at : at + size]) for at in range(0, len(there), size)]
            smaller = None
            for chunk in reversed(chunks):
                tries += 1
                outcome = next(self.run([failed.seed], skip=left_out | chunk, full=True, mutation=mutation))
                if rules & {finding.rule for finding in outcome.findings}:
                    smaller = outcome, left_out | chunk
                    break
            if smaller is not None:
                best, left_out = smaller
                size = max(1, min(size, len(best.faults_done) // 2))
            elif size == 1:
                break
            else:
                size //= 2
        return best, left_out


def _run(
    seed: int, *, steps: int, faults: Sequence[str], skip: Collection[int], full: bool, mutation: Mutation | None
) -> Outcome:
    gc.disable()  # the process ends with the seed
    counter = apply(mutation) if mutation is not None else None
    outcome = simulate(seed, steps=steps, faults=faults, skip=skip)
    if counter is not None:
        outcome.mutated = counter.count
    if outcome.ok and not full:
        outcome.trace = []
        outcome.history.ops = []
    return outcome
