"""Looks for mutations: seeds one after the other until one of the findings that a mutation must lead to comes out.

A seed counts as a find only if the line that is switched off would have protected in it, and if the same seed without
the mutation is clean: then the finding is the mutation's. A seed that is not clean without it is a bug of the product.

Entry: `search`.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulation.faults import FAULTS
from simulation.mutant import Mutation
from simulation.run import Outcome
from simulation.seeds import Seeds


@dataclass(slots=True)
class Found:
    """What came of the search for one mutation."""

    mutation: Mutation
    seeds: int = 0
    """How many were run, the finding one included."""
    seed: int = 0
    """The one that found it."""
    rules: tuple[str, ...] = ()
    """What it broke, the expected findings first; empty: it was not found."""
    reached: int = 0
    """In how many of the seeds the line would have protected."""
    problem: str = ""
    """Why the search ended without a find."""


def search(running: Seeds, mutation: Mutation, first: int, within: int) -> Found:
    """Run seeds from `first` on, at most `within`."""
    found = Found(mutation)
    faults = mutation.faults or tuple(FAULTS)
    for outcome in running.run(range(first, first + within), mutation=mutation, faults=faults):
        found.seeds += 1
        found.reached += outcome.mutated > 0
        expected = _expected(mutation, outcome)
        if expected and outcome.mutated:
            return _confirmed(running, found, outcome, expected, faults)
    found.problem = f"not found in {within} seeds, in {found.reached} of which the line would have protected"
    return found


def _expected(mutation: Mutation, outcome: Outcome) -> list[str]:
    broken = {finding.rule for finding in outcome.findings}
    return [rule for rule in mutation.found_by if rule in broken]


def _confirmed(running: Seeds, found: Found, outcome: Outcome, expected: list[str], faults: tuple[str, ...]) -> Found:
    clean = next(running.run([outcome.seed], faults=faults))
    if not clean.ok:
        rules = ", ".join(sorted({finding.rule for finding in clean.findings}))
        found.problem = f"seed {outcome.seed} fails without it, too ({rules}): a bug, or a blind mutation"
        return found
    found.seed = outcome.seed
    found.rules = tuple(expected)
    return found
