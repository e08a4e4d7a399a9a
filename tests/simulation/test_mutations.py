"""The mutations of `tidelog.simulation.mutants.mutations`: they fit the code, they are loud when they do not, and they
are found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tidelog.simulation.actors.faults import FAULTS
from tidelog.simulation.mutants.mutant import Edit, Mutation, MutationVoid, apply, check
from tidelog.simulation.mutants.mutations import MUTATIONS

pytestmark = pytest.mark.processes

QUICK = (
    ("ack-before-confirm", "duplicates-accepted", "coordinator-loads-nothing", "deltas-skipped"),
    ("open-transactions-shown",),
)
"""Found in any of the first few seeds, with half of the usual periods of faults."""


def guarded(stale: bool) -> str:
    if stale:
        return "refused"
    return "done"


class Guard:
    def __init__(self) -> None:
        self.stale = True

    def run(self) -> str:
        if self.stale:
            return "refused"
        return "done"


HERE = __name__
FUNCTION = Mutation("m", "4", "w", (Edit(f"{HERE}:guarded", "if stale:", "if stale and mutated():"),), ("defect",))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fits_the_code(name: str) -> None:
    mutation = MUTATIONS[name]
    check(mutation)
    assert mutation.name == name
    assert mutation.found_by
    assert not set(mutation.faults) - set(FAULTS)


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 20
    assert sum(one.transactions for one in MUTATIONS.values()) >= 10
    assert {str(rule) for rule in range(1, 11)} <= {one.rule for one in MUTATIONS.values()}


def test_a_mutation_takes_hold_of_a_function_that_others_hold_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "__code__", guarded.__code__)  # gives it back
    monkeypatch.setitem(guarded.__globals__, "mutated", None)
    held = guarded
    counter = apply(FUNCTION)
    assert (held(False), counter.count) == ("done", 0)
    assert (held(True), counter.count) == ("done", 1)


def test_a_mutation_takes_hold_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard.run, "__code__", Guard.run.__code__)
    monkeypatch.setitem(guarded.__globals__, "mutated", None)
    counter = apply(
        replace(FUNCTION, edits=(Edit(f"{HERE}:Guard.run", "if self.stale:", "if self.stale and mutated():"),))
    )
    assert (Guard().run(), counter.count) == ("done", 1)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (Edit(f"{HERE}:gone", "if stale:", "mutated()"), "there is no"),
        (Edit("tests.simulation.gone:guarded", "if stale:", "mutated()"), "there is no"),
        (Edit(f"{HERE}:QUICK", "if stale:", "mutated()"), "is no function"),
        (Edit(f"{HERE}:guarded", "if old:", "if old and mutated():"), "0 times"),
        (Edit(f"{HERE}:guarded", "return", "mutated(); return"), "2 times"),
        (Edit(f"{HERE}:guarded", "if stale:", "if stale and mutated()"), "does not parse"),
        (Edit(f"{HERE}:guarded", "if stale:", "if False:"), "it would be unknown"),
    ],
)
def test_a_mutation_that_does_not_fit_is_refused(edit: Edit, why: str) -> None:
    with pytest.raises(MutationVoid, match=why):
        check(replace(FUNCTION, edits=(edit,)))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidelog", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("names", QUICK)
def test_quick_mutations_are_found(names: tuple[str, ...]) -> None:
    done = run("--mutations", ",".join(names), "--within", "60", "--steps", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} mutations" in done.stdout
    assert "all were found" in done.stdout


def test_a_mutation_that_is_not_found_fails_the_search() -> None:
    done = run("--mutations", "ack-before-fsync", "--within", "1", "--steps", "0")
    assert done.returncode == 1
    assert "not found in 1 seeds" in done.stdout
    assert "not found: ack-before-fsync" in done.stdout


def test_an_unknown_mutation_is_named() -> None:
    done = run("--mutations", "flood")
    assert done.returncode == 2
    assert "flood" in done.stderr


@pytest.mark.parametrize("names", ["all", "ack-before-fsync,deltas-skipped"])
def test_one_run_takes_one_mutation(names: str) -> None:
    done = run("--mutate", names)
    assert done.returncode == 2
    assert "--mutate takes one name" in done.stderr
    assert "--mutations takes several" in done.stderr
