"""`tidelog doctor` and `tidelog debug bundle` over real processes: one broker, and a cluster with a dead one."""

from __future__ import annotations

import base64
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.cli import Cli, Result
from tests.support.cluster_process import ServeCluster, eventually, tidelog_json
from tests.support.s3_servers import S3Server, new_bucket
from tests.support.tidelog_process import running
from tidelog.controller.rpc.secret import admin_token, read_token

MACHINE = ("config.temporary-directory", "config.plain-http", "disk.", "limits.", "data.")
"""Findings that depend on the machine that runs the tests."""


def findings(result: Result) -> list[dict[str, Any]]:
    return [each for each in result.json()["findings"] if not each["check"].startswith(MACHINE)]


def bad(result: Result) -> set[tuple[str, str, str]]:
    return {(each["check"], each["where"], each["seen"]) for each in findings(result) if each["level"] != "ok"}


def unpacked(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        opened = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive.getmembers()}
        return {name: content.read() for name, content in opened.items() if content is not None}


def test_one_broker_is_examined_by_its_directory_and_by_itself(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, ["--set", "upload.age_ms=5000"]) as process:
        cli = Cli(f"127.0.0.1:{process.port}", cwd=tmp_path)
        result = cli("doctor", "--data-dir", data, "--format", "json", code=None)
        assert bad(result) == set()
        seen = {(each["check"], each["where"]): each["seen"] for each in result.json()["findings"]}
        assert f"in use by process {process.broker_pid()}" in seen["data.identity", "this configuration"]
        assert "upload.age_ms = 5000 (flag)" in seen["config.settings", "broker 1"]
        for where in ("this configuration", "broker 1"):
            assert "conditional put" in seen["bucket.rights", where]
        assert ("health.status", "cluster") in seen and ("members.level", "cluster") in seen
        assert [each for each in (data / "bucket").rglob("doctor-*") if each.is_file()] == []
        file = tmp_path / "b.tar.gz"
        cli("debug", "bundle", "--data-dir", data, "-o", file)
    content = unpacked(file)
    assert json.loads(content["manifest.json"])["missing"] == {}
    told = json.loads(content["nodes/broker-1/node.json"])
    origins = {each["key"]: each["source"] for each in told["settings"]}
    assert (origins["upload.age_ms"], origins["wal.flush"]) == ("flag", "default")
    assert b"/wal/" in content["files.txt"]
    stacks = json.loads(content["nodes/broker-1/stacks.json"])
    assert any("KafkaServer" in str(each) or "controller" in each["name"] for each in stacks["tasks"])
    assert {each["name"] for each in stacks["threads"]} > {"MainThread"}


class FullOfSecrets(ServeCluster):
    """A controller, and two brokers with TLS between them, whose bucket needs keys."""

    def __init__(self, directory: Path, server: S3Server) -> None:
        super().__init__(directory, controllers=1, brokers=2)
        self._authority = Authority(directory / "tls")
        self._bucket = new_bucket()
        self._server = server
        self.key_file = directory / "s3-key"
        self.key_file.write_text(server.secret_access_key + "\n")
        self.key_file.chmod(0o600)

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        files = self._authority.issue(f"node-{node_id}")
        return {
            **super().settings(node_id),
            "s3": {
                "endpoint": self._server.endpoint,
                "bucket": self._bucket,
                "access_key_id": self._server.access_key_id,
                "secret_access_key_file": str(self.key_file),
            },
            "replication": {
                "tls_cert_file": str(files.cert_file),
                "tls_key_file": str(files.key_file),
                "tls_ca_file": str(files.ca_file),
            },
        }

    def secrets(self) -> list[str]:
        """Everything that must not be in a bundle."""
        secret = (self.directory / "secret").read_bytes().strip()
        pems = [file.read_text() for file in (self.directory / "tls").glob("*.key")]
        lines = [line for pem in pems for line in pem.splitlines() if not line.startswith("-----")]
        return [secret.decode(), admin_token(secret), read_token(secret), self._server.secret_access_key, *lines]


@pytest.mark.long
def test_a_cluster_with_a_dead_broker_is_examined_as_far_as_it_lives_and_its_bundle_has_no_secret(
    tmp_path: Path, moto_server: S3Server
) -> None:
    cluster = FullOfSecrets(tmp_path, moto_server)
    secret = tmp_path / "secret"
    try:
        cluster.start()
        first = f"127.0.0.1:{cluster.kafka_ports[101]}"
        cli = Cli(first, cwd=tmp_path)
        eventually(lambda: not tidelog_json(first, "status")["problems"])  # the controller waits for the bucket
        well = cli("doctor", "--format", "json", "--secret-file", secret, code=None)
        assert bad(well) == set()
        wheres = {each["where"] for each in findings(well)}
        assert {"broker 101", "broker 102", "controller 1", "cluster"} <= wheres
        without = cli("doctor", "--format", "json", code=None)
        assert {check for check, _, _ in bad(without)} <= {"cluster.no-token"}

        cluster.nodes[102].kill()
        eventually(lambda: any("102" in each for each in tidelog_json(first, "status")["problems"]))
        found = cli("doctor", "--format", "json", "--secret-file", secret, code=10)
        assert {each["check"] for each in findings(found) if each["level"] == "problem"} == {"health.problem"}
        assert ("bucket.rights", "broker 101") in {(each["check"], each["where"]) for each in findings(found)}
        (tmp_path / "node-101" / "broker.log").write_text(
            "\n".join(cluster.nodes[101].output) + f"\n{cluster.secrets()}"
        )
        file = tmp_path / "b.tar.gz"
        config = tmp_path / "node-101.toml"
        cli("debug", "bundle", "-o", file, "--config", config, "--secret-file", secret, "--bootstrap", first)
    finally:
        cluster.close()
    content = unpacked(file)
    missing = json.loads(content["manifest.json"])["missing"]
    assert missing == {"nodes/102": "broker 102 is dead"}
    assert {"nodes/broker-101/stacks.json", "nodes/controller-1/stacks.json", "logs/01-broker.log"} <= set(content)
    everything = b"\n".join([*content.values(), *(name.encode() for name in content)])
    hidden = cluster.secrets()
    assert len(hidden) > 8
    for one in hidden:
        raw = one.encode()
        for form in (raw, base64.b64encode(raw).rstrip(b"="), raw.hex().encode()):
            assert form not in everything, one


@pytest.mark.long
def test_a_broker_that_hangs_is_told_as_silent_while_the_cluster_takes_it_for_alive(tmp_path: Path) -> None:
    cluster = ServeCluster(tmp_path, controllers=1, brokers=2)
    try:
        cluster.start()
        secret = tmp_path / "secret"
        os.kill(cluster.nodes[102].pid, signal.SIGSTOP)
        cli = Cli(f"127.0.0.1:{cluster.kafka_ports[101]}", cwd=tmp_path)
        found = cli("doctor", "--format", "json", "--secret-file", secret, code=10)
        checks = {each["check"] for each in findings(found) if each["level"] == "problem"}
        assert checks & {"node.silent", "health.problem"}
        assert ("bucket.rights", "broker 101") in {(each["check"], each["where"]) for each in findings(found)}
    finally:
        cluster.close()
