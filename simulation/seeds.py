"""Run many seeds in parallel, each in a process forked from one that has imported and initialised everything.

The result of a seed must not depend on earlier seeds, and the memory of dead lives is never freed; separate processes
solve both. `shrink` removes from a failing seed the faults that it does not need to fail. A mutation is applied in the
process of the seed, and ends with it.

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

from tidelog.simulation.checkers import Finding
from tidelog.simulation.mutants.mutant import Mutation, apply
from tidelog.simulation.run import SimulationOutcome, simulate

WARM_UP_SEED = 13
"""A seed with several controllers and brokers as separate processes: it uses all protocols."""
LONGEST_S = 1_800.0
"""Of one seed, in real time."""
MAX_TRIES = 120
"""Maximum number of simulations of one `shrink`."""


class Seeds:
    """Runs seeds with the same number of steps and kinds of faults, `jobs` (≥ 1) at a time."""

    def __init__(self, *, steps: int, faults: Sequence[str], jobs: int) -> None:
        self._run = partial(_run, steps=steps)
        self._faults = tuple(faults)
        self._ahead = 2 * jobs
        simulate(WARM_UP_SEED, steps=1, faults=())  # build every codec once, before the forks
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
        transactions: bool | None = None,
        table: bool | None = None,
    ) -> Iterator[SimulationOutcome]:
        """Yield the outcomes in the order of `seeds`; trace and history only for failures, or if `full`.

        If the caller stops iterating, few extra seeds have been run. `faults` apply to these seeds only, and so
        do `transactions` (all of them have transactional clients) and `table` (a compacted topic), which by default the
        mutation decides.
        """
        chosen = self._faults if faults is None else tuple(faults)
        if transactions is None:
            transactions = mutation is not None and mutation.transactions
        if table is None:
            table = mutation is not None and mutation.table
        run = partial(
            self._run,
            faults=chosen,
            skip=frozenset(skip),
            full=full,
            mutation=mutation,
            transactions=transactions,
            table=table,
        )
        waiting: deque[tuple[int, AsyncResult[SimulationOutcome]]] = deque()
        for seed in seeds:
            waiting.append((seed, self._pool.apply_async(run, (seed,))))
            if len(waiting) >= self._ahead:
                yield _outcome(*waiting.popleft())
        while waiting:
            yield _outcome(*waiting.popleft())

    def shrink(
        self, failed: SimulationOutcome, skip: Collection[int] = (), *, mutation: Mutation | None = None
    ) -> tuple[SimulationOutcome, frozenset[int]]:
        """Find a run of the seed that violates one of its rules with fewer faults; return it and the omitted faults.

        Halves are tried first, then single faults, not all combinations. Of the runs with the fewest faults, the
        shortest history is returned.
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


def _outcome(seed: int, result: AsyncResult[SimulationOutcome]) -> SimulationOutcome:
    """Wait for a seed. One whose process dies has no outcome: the pool does not tell."""
    try:
        return result.get(LONGEST_S)
    except multiprocessing.TimeoutError:
        message = f"the process of the seed has died, or had no outcome within {LONGEST_S:g} s"
        return SimulationOutcome(seed, [Finding(rule="defect", message=message)])


def _run(
    seed: int,
    *,
    steps: int,
    faults: Sequence[str],
    skip: Collection[int],
    full: bool,
    mutation: Mutation | None,
    transactions: bool,
    table: bool,
) -> SimulationOutcome:
    gc.disable()  # the process ends with the seed
    counter = apply(mutation) if mutation is not None else None
    outcome = simulate(seed, steps=steps, faults=faults, skip=skip, transactions=transactions, table=table)
    if counter is not None:
        outcome.mutated = counter.count
    if outcome.ok and not full:
        outcome.trace = []
        outcome.history.ops = []
    return outcome
