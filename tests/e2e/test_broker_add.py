"""`tidelog broker add` tells why a broker cannot start, and leaves the cluster as it was."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.cli import Cli, until
from tests.support.cluster_process import up_cluster


@pytest.mark.long
def test_a_broker_whose_port_is_taken_is_refused_with_its_own_error(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data", brokers=2) as up:
        cli = Cli(up.bootstrap)
        with socket.create_server(("127.0.0.1", up.port + 2)):
            refused = cli("broker", "add", code=8)
        assert "broker 3 cannot start" in refused.err and f":{up.port + 2}" in refused.err and "hint:" in refused.err
        assert not [line for line in up.output if "restarting" in line], up.tail()
        assert "added broker 4" in cli("broker", "add").text
        assert [row[0] for row in cli("broker", "list").rows()] == ["1", "2", "4"]
        assert up.stop() == 0, up.tail()


@pytest.mark.long
def test_with_a_third_broker_wals_get_three_replicas_at_a_rolling_restart(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data", brokers=2) as up:
        cli = Cli(up.bootstrap)
        added = cli("broker", "add")
        assert "WALs of brokers 1, 2 are on one disk each until they are started again" in added.err
        cli("cluster", "restart", "--rolling")

        def members() -> list[list[int]]:
            return [row["members"] for row in cli("replica-set", "list", "--format", "json").json()]

        until(lambda: [sorted(each) for each in members()] == [[1, 2, 3]] * 3)
        assert cli("broker", "add").err == ""
        assert up.stop() == 0, up.tail()
