"""A part of the long run of `tests.harness.spark_sink`; `make spark-sink` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.spark_sink import Wanted, run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_query_that_is_killed_writes_each_record_once(tmp_path: Path) -> None:
    rounds = run(Wanted(3, seed=7, kills=("all", "again", "prepared"), meanwhile=("nothing", "broker")), tmp_path)
    assert rounds.problems == []
    assert len(rounds.lines) == 3
