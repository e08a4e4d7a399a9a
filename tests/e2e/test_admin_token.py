"""A cluster with a secret changes nothing for who does not know it; the command line reads the secret from its file."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.support.cluster_process import up_cluster
from tidelog.cli.client import AdminTokenNeeded, ClusterConnection, http_json
from tidelog.controller.rpc.secret import write_secret


def test_only_who_has_the_secret_changes_a_cluster(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data", brokers=2) as up:
        cluster = ClusterConnection(up.bootstrap)
        for path in ("/brokers/remove?id=2", "/losses/accept?id=2&force=true", "/brokers/drain?id=2", "/upload"):
            request = urllib.request.Request(cluster.admin_url + path, method="POST")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            assert refused.value.code == 401
            refused.value.close()
        with pytest.raises(AdminTokenNeeded, match="needs the token"):
            http_json(cluster.admin_url, "/brokers/drain?id=2", method="POST")
        assert {row["state"] for row in cluster.get("/brokers")["brokers"]} == {"alive"}

        other = tmp_path / "other.secret"
        write_secret(other)
        cli, secret = Cli(up.bootstrap), tmp_path / "data" / "cluster.secret"
        assert "token" in cli("broker", "drain", "2", "--secret-file", other, code=2).err
        cli("broker", "drain", "2", "--secret-file", secret)
        cli("broker", "drain", "2", "--cancel")  # with the file that the broker on this machine names
        cli("object", "verify")  # an answer of several lines
