"""Correct histories are clean, whatever they are; broken ones are not."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.simulation.reference_log import MUTATIONS, Mutation, generate
from tests.support.examples import examples
from tidelog.simulation.checkers import RULES, check

FOUND_BY = {
    "forget": {"lost-write", "poll-skip", "int-poll-skip"},
    "repeat": {"duplicate"},
    "exchange": {"int-nonmonotonic-poll"},
    "replace": {"phantom-read", "inconsistent-offsets"},
    "deny": {"G1a"},
    "misplace": {"duplicate", "inconsistent-offsets"},
    "lower": {"high-watermark-back"},
    "revive": {"log-start-back"},
    "forget_commit": {"committed-offset-back"},
    "age": {"epoch-back"},
    "pass_over": {"offset-for-time"},
}


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 400))
def test_correct_histories_are_clean(seed: int, steps: int) -> None:
    findings = check(generate(Random(seed), steps))
    assert not findings, "\n".join(one.text() for one in findings)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda each: each.__name__)
@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32), st.integers(100, 400))
def test_mutated_histories_are_not(mutate: Mutation, seed: int, steps: int) -> None:
    histories = (generate(Random(seed + turn), steps) for turn in range(20))  # not every one has what it mutates
    history = next((each for each in histories if mutate(each, Random(seed))), None)
    if history is None:
        reject()
    rules = {one.rule for one in check(history)}
    assert rules & FOUND_BY[mutate.__name__], rules


def test_every_mutation_says_what_finds_it() -> None:
    assert FOUND_BY.keys() == {each.__name__ for each in MUTATIONS}
    assert set().union(*FOUND_BY.values()) <= set(RULES)
