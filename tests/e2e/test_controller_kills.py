"""A part of the long run that kills active controllers; `make controller-kills` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.controller_kills import run

ROUNDS = 4


@pytest.mark.long
@pytest.mark.slow
def test_killed_active_controllers_cause_no_produce_error_and_lose_no_command(tmp_path: Path) -> None:
    report = run(ROUNDS, tmp_path, partitions=12, seed=7)
    assert not report.problems, report.text()
    assert len(report.figures.elected) == report.topics == ROUNDS
    assert report.commands > 2 * ROUNDS
    assert report.acknowledged > 100


@pytest.mark.long
@pytest.mark.slow
def test_killed_active_controllers_that_are_brokers_too_lose_and_double_nothing(tmp_path: Path) -> None:
    report = run(2, tmp_path, is_embedded=True, partitions=12, seed=8)
    assert not report.problems, report.text()
