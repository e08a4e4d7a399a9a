"""Two rows of the table of `tests.harness.quorum_table`, with real processes, and what an operator is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.quorum_table import KILLED, MASTER, Case, QuorumTable
from tests.support.clients import wait_until
from tests.support.hot_cluster import HotCluster, hot_cluster
from tidelog.chaos.serve_cluster import tidelog_json

pytestmark = pytest.mark.slow


def describe(hot: HotCluster, broker: int) -> dict[str, object]:
    """`tidelog replica-set describe` of the set, asked of one broker."""
    found: dict[str, object] = tidelog_json(hot.address(broker), "replica-set", "describe", str(MASTER))
    return found


@pytest.mark.long
def test_a_follower_that_dies_stops_acks_all_or_degrades_the_set_and_describe_tells(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot", brokers=2) as hot:
        follower = max(hot.kafka_ports)
        table = QuorumTable(hot, 4.0)
        refused = table.row(Case(2, 2, False, 1, KILLED))
        assert refused.answers.most_common(1)[0][0] == "NOT_ENOUGH_REPLICAS" and refused.resumed.startswith("return")
        assert refused.described == "1 in sync of 2, quorum 2, refuses" and not refused.problems
        degraded = table.row(Case(2, 2, True, 1, KILLED))
        assert degraded.answers.most_common(1)[0][0] == "acked" and not degraded.problems
        assert degraded.described == "1 in sync of 1, quorum 1, degraded"

        for broker in (MASTER, follower):  # whoever is asked first, the master tells
            told = describe(hot, broker)
            live, rows = told["live"], told["replicas"]
            assert isinstance(live, dict) and isinstance(rows, list)
            assert (live["need"], live["in_sync"], live["degraded"]) == (2, [MASTER, follower], False)
            assert live["confirm_offset"] > 0 and told["live_problem"] is None
            assert all(row["caught_up_ms"] < 60_000 for row in rows)
        hot.elect(MASTER, follower)
        ended = describe(hot, MASTER)["last_election"]
        assert isinstance(ended, dict)
        assert (ended["reason"], ended["master"], ended["last_master"]) == ("an operator", follower, MASTER)
        hot.kill(MASTER)
        wait_until(lambda: table_lag(hot, follower) is not None, "the lag of one that is dead")


def table_lag(hot: HotCluster, broker: int) -> int | None:
    """For how long the other member has not had everything, once it is known to be gone."""
    rows = describe(hot, broker)["replicas"]
    assert isinstance(rows, list)
    lag = next((row for row in rows if row["broker"] == MASTER), None)
    return lag["caught_up_ms"] if lag is not None and lag["connected"] is False else None
