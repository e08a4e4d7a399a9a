"""An announced election: the master that is to be replaced writes checkpoints, so the next one has little to scan."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import ElectionType
from confluent_kafka.admin import AdminClient

from tests.e2e.backends import create_topic
from tests.support.hot_cluster import HotCluster, hot_cluster
from tests.support.partition_load import PartitionLoad
from tidelog.chaos.serve_cluster import eventually, tidelog_json

PARTITIONS = 24
TOPIC = "handed"
WRITTEN = "checkpoints are written before another broker leads the replica set"
SCANNED = re.compile(r"opened after an unclean stop .*batches_scanned=(\d+)")
End = Callable[[HotCluster], None]
"""Ends what broker 102 leads of the set of broker 101."""
WORTH = 8
"""Batches of a producer behind a checkpoint that are worth another one."""

pytestmark = pytest.mark.slow


def write_more(hot: HotCluster) -> None:
    """Another producer's batches, to all partitions: these are open then, and what was said of that has been read."""
    with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
        load.wait_grown(25)
    assert load.errors == []


@pytest.fixture
def hot(tmp_path: Path) -> Iterator[HotCluster]:
    """Three brokers; 25 batches or more in each partition, which are none of a checkpoint's business yet."""
    with hot_cluster(tmp_path / "hot") as found:
        create_topic(found.bootstrap, TOPIC, PARTITIONS)
        write_more(found)
        yield found


def said(hot: HotCluster, broker: int) -> str:
    return "\n".join(hot.nodes[broker].output)


def scanned(hot: HotCluster, broker: int) -> int:
    return sum(map(int, SCANNED.findall(said(hot, broker))))


def prefer(hot: HotCluster) -> None:
    """As a client does."""
    admin = AdminClient({"bootstrap.servers": hot.address(103), "allow.auto.create.topics": False})
    admin.elect_leaders(ElectionType.PREFERRED, None).result(30)  # of all that are not led by their preferred one


def drain(hot: HotCluster) -> None:
    """As an operator does."""
    tidelog_json(hot.address(103), "broker", "drain", "102")


@pytest.mark.parametrize("ends", [prefer, drain])
def test_whichever_broker_is_asked_the_master_prepares_its_end(hot: HotCluster, ends: End) -> None:
    assert WRITTEN not in said(hot, 101)
    found = tidelog_json(hot.address(103), "replica-set", "elect", "101", "--broker", "102")
    assert found["master"] == 102
    write_more(hot)
    assert f"{WRITTEN} replica_set=101" in said(hot, 101)
    assert WRITTEN not in said(hot, 103)
    assert scanned(hot, 102) < WORTH * PARTITIONS // 3

    ends(hot)
    eventually(lambda: hot.sets()[101]["master"] == 101)
    write_more(hot)
    assert f"{WRITTEN} replica_set=101" in said(hot, 102)
    assert scanned(hot, 101) < 2 * WORTH * PARTITIONS // 3  # of two producers


@pytest.mark.long
def test_the_controllers_announce_that_the_preferred_master_comes_back(hot: HotCluster) -> None:
    hot.kill(101)
    hot.wait_masters([101])
    second = hot.sets([101])[101]["master"]
    hot.begin(101)
    hot.ready(101)
    hot.wait_full()
    with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS, pause_s=0.1) as load:
        deadline = time.monotonic() + 90
        while hot.sets()[101]["master"] != 101:
            assert time.monotonic() < deadline, "the preferred master does not come back"
            load.wait_grown(2)
        load.wait_grown(20)
    assert load.errors == []
    assert f"{WRITTEN} replica_set=101" in said(hot, second)
    # what came between the last checkpoints and the election: a record in 0.1 s, for some seconds
    assert 0 < scanned(hot, 101) <= 60 * PARTITIONS // 3
