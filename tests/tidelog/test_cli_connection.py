"""Who answers a command: the nearest broker, or only the one that was meant."""

from __future__ import annotations

import pytest

from tests.support.ports import free_port
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import Unavailable
from tidelog.testing import LocalBroker

pytestmark = pytest.mark.processes


def test_no_broker_answers_in_the_place_of_the_one_that_was_meant() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with LocalBroker() as broker:
        cluster = ClusterConnection(broker.bootstrap)
        cluster.admin_url = gone  # it was at this address before
        assert cluster.get("/status")["node_id"] == 1
        one = cluster.at(gone, 1)
        for _ in range(2):
            with pytest.raises(Unavailable, match=gone):
                one.get("/status")
        assert cluster.at(cluster.admin_url, 1).get("/status")["node_id"] == 1
