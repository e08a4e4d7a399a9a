"""franz-go with transactions against three brokers: atomic, fenced, with offsets, through kills of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import DEADLINE_S
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.committed import committed_values, values_of_committed
from tests.support.external import Program

pytestmark = [pytest.mark.slow, pytest.mark.long]
PARTITIONS = 3


@pytest.fixture(scope="module")
def franz_go(go_programs: Callable[[str], Program]) -> Program:
    return go_programs("transactions")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    with up_cluster(tmp_path_factory.mktemp("go") / "data") as started:
        yield started


def test_what_is_committed_is_read_and_a_fenced_producer_is_refused(up: UpCluster, franz_go: Program) -> None:
    create_topic(up.bootstrap, "accounts", PARTITIONS)
    before, after = (line.split() for line in franz_go.run("write", up.bootstrap, "teller", "accounts", PARTITIONS, 9))
    assert before[-1] == after[-1]
    assert int(after[2]) == int(before[2]) + 9, "transactions of version 2 have an epoch each (KIP-890)"
    assert committed_values(up.bootstrap, "accounts", PARTITIONS) == [values_of_committed(9)] * PARTITIONS

    create_topic(up.bootstrap, "fenced", 1)
    refused = franz_go.run("fence", up.bootstrap, "taken", "fenced")
    assert refused in (["refused PRODUCER_FENCED"], ["refused INVALID_PRODUCER_EPOCH"])
    assert committed_values(up.bootstrap, "fenced", 1) == [["second"]]


def test_records_are_copied_once_although_copiers_abort_and_are_killed(
    up: UpCluster, franz_go: Program, tmp_path: Path
) -> None:
    create_topic(up.bootstrap, "orders", PARTITIONS)
    create_topic(up.bootstrap, "copied", PARTITIONS)
    producer = Producer({"bootstrap.servers": up.bootstrap, **QUIET})
    wanted = [[f"{partition}-{number}" for number in range(600)] for partition in range(PARTITIONS)]
    for partition, values in enumerate(wanted):
        for value in values:
            producer.produce("orders", value.encode(), partition=partition)
    assert producer.flush(DEADLINE_S) == 0
    asked = ("copy", up.bootstrap, "copier", "orders", "copied", "copiers")
    for victim in range(2):
        with franz_go.running(tmp_path / f"{victim}", *asked, 1_000_000) as process:
            process.wait_for("copied 2")
            process.kill()
    done = sum(map(len, committed_values(up.bootstrap, "copied", PARTITIONS)))
    assert 0 < done < PARTITIONS * 600
    franz_go.run(*asked, PARTITIONS * 600 - done)
    assert committed_values(up.bootstrap, "copied", PARTITIONS) == wanted
