"""Three broker processes with TLS between them: they replicate, fail over, and take nobody who has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.support.certificates import Authority
from tests.support.hot_cluster import BROKERS, HotCluster, assert_equal_logs
from tests.support.partition_load import PartitionLoad
from tidelog.chaos.serve_cluster import eventually
from tidelog.cli.client import ClusterConnection

PARTITIONS = 6
TOPIC = "kept"

pytestmark = pytest.mark.slow


class TlsCluster(HotCluster):
    """Each broker has a certificate of its own, unless it is among `plain`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {"replication": {"total_replicas": 3}})
        self.authority = Authority(directory / "tls")
        self.certificates = {each: self.authority.issue(f"broker-{each}") for each in BROKERS}
        self.plain: set[int] = set()

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        found = super().settings(node_id)
        if node_id in self.certificates and node_id not in self.plain:
            files = self.certificates[node_id]
            found["replication"] |= {
                "tls_cert_file": str(files.cert_file),
                "tls_key_file": str(files.key_file),
                "tls_ca_file": str(files.ca_file),
            }
        return found

    def problems(self, broker: int) -> list[str]:
        """What a broker's status says is wrong."""
        found: list[str] = ClusterConnection(self.address(broker)).get("/status")["problems"]
        return found


@pytest.fixture
def hot(tmp_path: Path) -> Iterator[TlsCluster]:
    directory = tmp_path / "hot"
    directory.mkdir()
    cluster = TlsCluster(directory)
    try:
        cluster.start()
        cluster.wait_full()
        yield cluster
    finally:
        cluster.close()


@pytest.mark.long
def test_brokers_replicate_and_fail_over_with_tls_and_one_without_is_left_out_until_it_has_it(hot: TlsCluster) -> None:
    create_topic(hot.bootstrap, TOPIC, PARTITIONS)
    with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
        load.wait_grown()
        hot.kill(101)
        hot.wait_masters([101])
        load.wait_grown()

        hot.plain.add(101)
        hot.begin(101)
        hot.ready(101)
        eventually(
            lambda: any(
                "does not follow its master" in each and "replication.tls_" in each for each in hot.problems(101)
            )
        )
        others = [each for broker in (102, 103) for each in hot.problems(broker)]
        assert any("does not begin with TLS" in each for each in others), others
        assert any(
            "without valid TLS was refused" in each for broker in (102, 103) for each in hot.nodes[broker].output
        )
        load.wait_grown()

        hot.kill(101)
        hot.plain.clear()
        hot.begin(101)
        hot.ready(101)
        hot.wait_full()
        hot.kill(102)
        hot.wait_masters([102])
        load.wait_grown()
        hot.authority.issue("broker-102")  # while it is down
        hot.begin(102)
        hot.ready(102)
        hot.wait_full()
    assert load.verify(hot.bootstrap) == []
    hot.kill(*BROKERS)
    assert_equal_logs(hot, BROKERS)

    hot.certificates[103].ca_file.unlink()
    hot.begin(103)
    eventually(lambda: not hot.nodes[103].is_running())
    said = hot.said(103)
    assert "replication.tls_ca_file: cannot read" in said and str(hot.certificates[103].ca_file) in said, said
