"""The balancer on three real brokers with uneven load: `advise` only tells, `on` moves, racks and drains are kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tests.e2e.backends import QUIET
from tests.support.cli import Cli
from tests.support.cluster_process import eventually, tidelog_json, up_cluster
from tests.support.load import Load
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import InvalidInput

TOPIC = "uneven"
PARTITIONS = 9
SMALL_LOAD = ["--set", "balancer.min_bytes_per_s=1", "--set", "balancer.interval_ms=1000"]


def all_on_one(bootstrap: str, broker: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    topic = NewTopic(TOPIC, num_partitions=PARTITIONS, replica_assignment=[[broker]] * PARTITIONS)
    admin.create_topics([topic])[TOPIC].result(60)


def owners(cluster: ClusterConnection) -> Counter[int]:
    return Counter(row["broker"] for row in cluster.get(f"/partitions?topic={TOPIC}")["partitions"])


def advice(bootstrap: str) -> dict[str, Any] | None:
    """The balancer's state, once it has a plan and knows of the load: a plan by numbers alone may come first."""
    status: dict[str, Any] = tidelog_json(bootstrap, "balancer", "status")
    loaded = any(row["bytes_in"] for row in status["brokers"] if row["id"] == 1)
    return status if status["planned"] and loaded else None


@pytest.mark.long
@pytest.mark.slow
def test_advising_tells_and_a_run_by_hand_moves(tmp_path: Path) -> None:
    with up_cluster(tmp_path, flags=SMALL_LOAD) as up:
        all_on_one(up.bootstrap)
        cluster = ClusterConnection(up.bootstrap)
        with Load(up.bootstrap, TOPIC, PARTITIONS) as load:
            load.more(50)
            status: dict[str, Any] = eventually(lambda: advice(up.bootstrap))
            assert (status["mode"], status["issued"]) == ("advise", 0)
            plan = tidelog_json(up.bootstrap, "balancer", "plan")
            assert plan["total"] >= 5 and all(
                move["from"] == 1 and "broker 1 has" in move["why"] for move in plan["moves"]
            )
            assert owners(cluster) == {1: PARTITIONS}
            done = tidelog_json(up.bootstrap, "balancer", "run")
            assert done["total"] >= 5
            load.more(50)
            assert set(owners(cluster)) == {1, 2, 3} and max(owners(cluster).values()) <= 5
        load.check(up.bootstrap)
        assert up.stop() == 0


def is_all_there(load: Load, bootstrap: str) -> bool:
    """Reads everything; the balancer may move a partition just then, as what is measured fades away."""
    try:
        load.check(bootstrap)
    except KafkaException:
        return False
    return True


@pytest.mark.long
@pytest.mark.slow
def test_switched_on_it_moves_by_itself_and_fills_a_new_broker(tmp_path: Path) -> None:
    with up_cluster(tmp_path, flags=SMALL_LOAD) as up:
        cli = Cli(up.bootstrap)
        assert cli("balancer", "mode").text == "advise\n"
        all_on_one(up.bootstrap)
        assert cli("balancer", "mode", "on").text == "on (configured: advise)\n"
        cluster = ClusterConnection(up.bootstrap)
        with Load(up.bootstrap, TOPIC, PARTITIONS) as load:
            load.more(50)
            eventually(lambda: set(owners(cluster)) == {1, 2, 3} and max(owners(cluster).values()) <= 5)
            assert tidelog_json(up.bootstrap, "balancer", "status")["issued"] >= PARTITIONS - 5
            cluster.post("/controllers/transfer")  # the next active controller balances on, and counts what it issues
            cluster.post("/brokers/drain?id=2")
            eventually(lambda: owners(cluster)[2] == 0)
            load.more(50)
            assert owners(cluster)[2] == 0
            assert cli("balancer", "mode").text.startswith("on ")  # for the next active controller, too
            cluster.post("/brokers/drain?id=2&cancel=true")
            eventually(lambda: owners(cluster)[2] >= 2)
            load.more(50)
        eventually(lambda: is_all_there(load, up.bootstrap))
        assert tidelog_json(up.bootstrap, "balancer", "status")["issued"] >= 2
        assert tidelog_json(up.bootstrap, "broker", "wanted")["brokers"] == 3
        assert cli("balancer", "mode", "configured").text == "advise\n"
        with pytest.raises(InvalidInput):
            cluster.post("/balancer/mode?set=sideways")
        assert up.stop() == 0
