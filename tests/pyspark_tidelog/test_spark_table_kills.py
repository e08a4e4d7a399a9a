"""A part of the long run of `tests.harness.spark_tables`; `make spark-tables` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.spark_tables import Wanted, run
from tests.support.table_load import as_latest, as_rows, record

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]


@pytest.mark.long
def test_of_the_records_of_a_load_each_is_in_a_table_or_its_quarantine() -> None:
    records = [record(partition, number) for partition in range(2) for number in range(400)]
    rows, bad = as_rows(records)
    assert sorted([*rows, *bad]) == [one.place for one in records] and 60 < len(bad) < 120
    latest, bad = as_latest(records)
    keys = [one.key for one in latest.values()]
    assert len(keys) == len(set(keys)) > 60 and None not in keys and not set(latest) & set(bad)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tables_equal_their_topic_after_jobs_were_killed_and_a_broker_died(tmp_path: Path) -> None:
    rounds = run(Wanted(2, seed=7, kills=("all", "files"), meanwhile=("broker", "move"), rate=50.0), tmp_path)
    assert rounds.problems == []
    assert len(rounds.lines) == 2
