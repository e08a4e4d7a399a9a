"""Search for mutations: run seeds until one produces a finding that the mutation is expected to cause.

A seed counts only if the switched-off protection would have taken effect in it, and if the same seed without the
mutation has no findings: then the mutation causes the finding. A seed with findings without the mutation is a bug of
the product.

Entry: `search`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.simulation.actors.faults import FAULTS
from tidelog.simulation.mutants.mutant import Mutation
from tidelog.simulation.run import SimulationOutcome
from tidelog.simulation.seeds import Seeds


@dataclass(slots=True)
class Found:
    """The result of the search for one mutation."""

    mutation: Mutation
    seeds: int = 0
    """Number of seeds run, including the finding one."""
    seed: int = 0
    """The seed that found it."""
    rules: tuple[str, ...] = ()
    """The violated rules, expected findings first; empty: not found."""
    reached: int = 0
    """Number of seeds in which the protection would have taken effect."""
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


def _expected(mutation: Mutation, outcome: SimulationOutcome) -> list[str]:
    broken = {finding.rule for finding in outcome.findings}
    return [rule for rule in mutation.found_by if rule in broken]


def _confirmed(
    running: Seeds, found: Found, outcome: SimulationOutcome, expected: list[str], faults: tuple[str, ...]
) -> Found:
    needs = found.mutation
    clean = next(running.run([outcome.seed], faults=faults, transactions=needs.transactions, table=needs.table))
    if not clean.ok:
        rules = ", ".join(sorted({finding.rule for finding in clean.findings}))
        found.problem = f"seed {outcome.seed} fails without it, too ({rules}): a bug, or a blind mutation"
        return found
    found.seed = outcome.seed
    found.rules = tuple(expected)
    return found
