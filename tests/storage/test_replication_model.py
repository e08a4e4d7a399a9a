"""The replication protocol among brokers that crash, lose disks and disagree (`tests.support.replica_world`).

More seeds: `python -m tests.support.replica_world --seeds 5000`.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.support.replica_mutations import MUTATIONS
from tests.support.replica_world import POLICIES, World, finding_of_mutation

SEEDS = 30


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_confirmed_is_lost_and_the_set_goes_on(name: str) -> None:
    confirmations = elections = 0
    for seed in range(SEEDS):
        world = World(seed, POLICIES[name])
        world.run(4_000)
        assert world.heal(), f"seed {seed}: nothing is confirmed although everybody lives: {world.state}"
        confirmations += world.confirmations
        elections += world.elections
    assert confirmations > 10 * SEEDS
    assert elections > 3 * SEEDS


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_finds_a_protection_that_is_missing(name: str) -> None:
    """In a process of its own, because a mutation stays."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(finding_of_mutation, name).result()
