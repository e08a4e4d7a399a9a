"""The benchmarks of whole clusters (`bench._clusters`, `bench._cluster_load`) measure what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import kafka_cluster, peers, replicated_produce
from bench._cluster_load import Failover, LatencyLoad, Throughput, failover, latencies, throughput
from bench._clusters import KafkaCluster, TidelogCluster, leaders, parsed, running
from bench._common import ANSWERED, ROWS_VARIABLE, Row, answered_share, read_rows
from bench._peers import new_cluster_id
from bench.limit_relay import relayed


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that rows go to."""
    monkeypatch.setenv(ROWS_VARIABLE, str(tmp_path / "rows"))
    return tmp_path / "rows"


def by_measure(rows: Path) -> dict[str, Row]:
    return {one.measure: one for one in read_rows(rows)}


def test_settings_have_the_type_that_toml_gives_them() -> None:
    assert [parsed(text) for text in ("true", "7", "0.5", "disk")] == [True, 7, 0.5, "disk"]


def test_a_kafka_node_is_a_controller_or_a_broker_of_three_replicas(tmp_path: Path) -> None:
    cluster = KafkaCluster(tmp_path, tmp_path / "jars", "log.flush.interval.messages=1")
    controller, broker = (cluster.properties(node, 9000 + node, tmp_path) for node in (1, 3))
    assert "process.roles=controller\n" in controller
    assert "min.insync" not in controller
    for line in ("process.roles=broker", "node.id=3", "min.insync.replicas=2", "log.flush.interval.messages=1"):
        assert line in broker.splitlines()
    assert len(cluster.bootstrap.split(",")) == 3


def test_the_id_of_a_kafka_cluster_is_no_option_of_its_command_line() -> None:
    found = [new_cluster_id() for _ in range(500)]
    assert not any(each.startswith("-") for each in found)
    assert {len(each) for each in found} == {22}


def test_the_ratios_of_replication_are_to_one_replica_and_to_disk_and_round_trip(tmp_path: Path, rows: Path) -> None:
    limits = replicated_produce.Limits(tmp_path, file_bytes=1 << 20)
    limits.close()
    for found, ms in ((limits.synced, 1.0), (limits.answered, 0.5), (limits.shared, 1.5), (limits.relayed, 2.0)):
        found.add(Throughput(1000.0, 0.0), [ms / 1e3])
    one, three = replicated_produce.Found(), replicated_produce.Found()
    one.add(Throughput(500.0, 2.0), [2e-3])
    three.add(Throughput(250.0, 5.0), [3e-3])
    replicated_produce.report({1: one, 3: three}, limits)
    said = by_measure(rows)
    rate = said["librdkafka to 6 partitions, 3 replicas, quorum 2"]
    assert (rate.ratio, rate.holds) == ("0.50", False)
    assert said["acknowledged, p50, 3 replicas, quorum 2"].ratio == "2.00"
    assert said["acknowledged, p50, 3 replicas, quorum 2"].holds
    assert said["acknowledged, p50, 3 replicas, beside a disk for all"].ratio == "1.50"
    assert said["acknowledged, p50, 3 replicas, beside a bare relay"].ratio == "1.50"
    assert said["CPU of all brokers a GB, most replicas to one"].figure == "2.50"


def test_a_relay_answers_when_its_followers_have_written(tmp_path: Path) -> None:
    took = relayed(tmp_path, 3, 4096, 200.0, 0.1)
    assert len(took) == 20
    written = {(tmp_path / f"{number}" / "raw").read_bytes()[: 21 * 4096] for number in range(3)}
    (all_the_same,) = written
    first = all_the_same[:4096]
    assert any(first)
    assert all_the_same == first * 20 + bytes(4096)


def test_the_rows_beside_kafka_compare_medians(rows: Path) -> None:
    first = kafka_cluster.gone({"defaults": Failover(1.0, 1.5)})
    ours = {kafka_cluster.P50: 2.0, **first}
    theirs = {kafka_cluster.P50: 1.0, **kafka_cluster.gone({"defaults": Failover(9.0, 9.5)})}
    kafka_cluster.report({"tidelog": [ours, {**ours, kafka_cluster.P50: 4.0}, ours], "kafka-synced": [theirs]})
    said = by_measure(rows)
    assert (said[f"{kafka_cluster.P50}, beside kafka-synced"].ratio) == "2.00"
    assert said[f"{kafka_cluster.P50}, beside kafka-synced"].holds is False
    assert said[f"{kafka_cluster.FIRST}, beside kafka-synced"].holds is True
    assert json.loads(rows.read_text().splitlines()[0])["figure"] == "2"


def test_latencies_of_a_server_that_answers_too_slowly_grow_with_the_time() -> None:
    """One that answers half as many requests as are sent owes a second of them after one, and two after two."""
    for seconds in (1.0, 2.0):
        sent = [number / 1_000 for number in range(int(1_000 * seconds))]
        assert answered_share([1e-3] * len(sent), seconds) > 0.99
        assert answered_share([max(1e-3, 2 * at - at) for at in sent], seconds) == pytest.approx(0.5, abs=0.02)
        stalls_once = [0.3 if 0.4 < at < 0.5 else 1e-3 for at in sent]
        assert answered_share(stalls_once, seconds) > 0.99


@pytest.mark.parametrize(("share", "holds"), [(1.0, True), (0.5, None)])
def test_nobody_is_ahead_of_a_queue(rows: Path, share: float, holds: bool | None) -> None:
    """The latencies of a server that does not keep up say how long was measured: no goal is reached beside them."""
    ours = {kafka_cluster.P50: 2.0, kafka_cluster.P99: 9.0, ANSWERED: 1.0}
    theirs = {kafka_cluster.P50: 3000.0, kafka_cluster.P99: 6000.0, ANSWERED: share}
    kafka_cluster.report({"tidelog": [ours], "kafka-synced": [theirs]})
    peers.report({"tidelog": [ours], "kafka": [theirs]})
    said = by_measure(rows)
    for beside in ("kafka-synced", "kafka"):
        for measure in (kafka_cluster.P50, kafka_cluster.P99):
            row = said[f"{measure}, beside {beside}"]
            assert row.holds is holds
            assert ("does not keep up" in row.limit) == (holds is None)


@pytest.mark.processes
@pytest.mark.long
def test_a_cluster_is_measured_and_a_killed_leader_is_followed(tmp_path: Path) -> None:
    made = TidelogCluster(tmp_path / "cluster", 3, ["wal.flush=sync"], bucket_in_memory=True)
    with running(made) as cluster:
        assert len(cluster.broker_pids()) == 3
        assert throughput(cluster, 0.3).mb_per_s > 0
        took = latencies(cluster, LatencyLoad(4096, 0.2, 0.5))
        assert len(took) == int(0.5 * 0.2e6 / 4096)
        assert all(each > 0 for each in took)
        seen = failover(cluster)
        assert 0 < seen["defaults"].first_s <= seen["defaults"].last_s
        assert {leader for leader, _ in leaders(cluster.bootstrap, "defaults").values()} < set(cluster.broker_pids())
