"""The compose files of `localstack`: consistent in themselves, and their nodes' command lines and environment make a
cluster (`tests/support/compose.py`). Those of `deploy` are in `test_deployment.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.cluster_process import eventually
from tests.support.compose import Document, bootstrap, compose, configuration, healthy, node
from tests.support.s3_servers import ROOT, S3Server, new_bucket
from tidelog.chaos.ports import free_port
from tidelog.cli.subcommands.serve import STOP_GRACE_S

pytestmark = pytest.mark.processes

FOLDER = ROOT / "localstack"
KINDS = ("minio", "localstack")
NODES = ("tidelog-1", "tidelog-2", "tidelog-3")

each_file = pytest.mark.parametrize("kind", KINDS)


def document_of(kind: str) -> Document:
    return compose(FOLDER / f"compose.{kind}.yml")


@each_file
def test_every_node_has_the_same_quorum_and_a_place_of_its_own(kind: str) -> None:
    services = document_of(kind)["services"]
    configs = {name: configuration(services[name]) for name in NODES}
    members = [f"{number}@{name}:9193" for number, name in enumerate(NODES, 1)]
    for number, (name, config) in enumerate(configs.items(), 1):
        assert config.node.id == number and config.node.roles == ["controller", "broker"]
        assert config.controller.members == members
        assert config.kafka.peer_advertised_host == name
        assert (config.wal.kind, config.s3.bucket) == ("s3", "tidelog")
        assert f"data-{number}:{config.node.data_dir}" in services[name]["volumes"]
    assert len({config.kafka.port for config in configs.values()}) == 3


@each_file
def test_clients_on_the_host_reach_what_they_are_told(kind: str) -> None:
    services = document_of(kind)["services"]
    published = []
    for name in NODES:
        config, service = configuration(services[name]), services[name]
        assert (config.kafka.host, config.admin.host) == ("0.0.0.0", "0.0.0.0")
        assert (config.kafka.advertised_host, config.admin.advertised_host) == ("localhost", "localhost")
        assert config.kafka.advertised_port in (0, config.kafka.port)
        ports = {config.kafka.port, config.admin.port}
        assert sorted(service["ports"]) == sorted(f"127.0.0.1:{port}:{port}" for port in ports)
        assert f"http://localhost:{config.admin.port}/readyz" in service["healthcheck"]["test"][-1]
        published += [text.rpartition(":")[2] for text in service["ports"]]
    published += [text.split(":")[1] for text in services[kind]["ports"]]
    assert len(set(published)) == len(published)
    bootstrap = services["cli"]["environment"]["TIDELOG_BOOTSTRAP"].split(",")
    assert bootstrap == [f"localhost:{configuration(services[name]).kafka.port}" for name in NODES]


@each_file
def test_nodes_wait_for_the_server_and_the_secret_and_have_time_to_drain(kind: str) -> None:
    document = document_of(kind)
    services = document["services"]
    server, node = services[kind], services["tidelog-1"]
    config = configuration(node)
    endpoint = urlsplit(config.s3.endpoint)
    assert endpoint.hostname == kind and server["ports"] == [f"127.0.0.1:{endpoint.port}:{endpoint.port}"]
    if kind == "minio":
        assert server["environment"]["MINIO_ROOT_USER"] == node["environment"]["AWS_ACCESS_KEY_ID"]
        assert server["environment"]["MINIO_ROOT_PASSWORD"] == node["environment"]["AWS_SECRET_ACCESS_KEY"]
    for name in NODES:
        assert services[name]["depends_on"] == {
            kind: {"condition": "service_healthy"},
            "secret": {"condition": "service_completed_successfully"},
        }
        grace_s = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace_s >= STOP_GRACE_S + (config.node.drain_timeout_ms + config.node.shutdown_timeout_ms) / 1000
    assert "healthcheck" in server
    mounted = {each.split(":")[0] for service in services.values() for each in service.get("volumes", ())}
    assert mounted == set(document["volumes"])
    assert Path(config.controller.secret_file).parent == Path("/secret")


@each_file
def test_the_image_is_built_from_this_checkout(kind: str) -> None:
    built = [service for service in document_of(kind)["services"].values() if "build" in service]
    assert len(built) == 5
    for service in built:
        context = (FOLDER / service["build"]["context"]).resolve()
        assert context == ROOT and (context / service["build"]["dockerfile"]).is_file()
    copied = re.findall(r"-c /src/(\S+)", (FOLDER / "Dockerfile").read_text())
    assert copied == ["constraints.txt"] and (ROOT / "constraints.txt").is_file()


@pytest.mark.slow
def test_the_nodes_as_written_make_a_healthy_cluster(tmp_path: Path, minio_server: S3Server) -> None:
    services = document_of("minio")["services"]
    secret = str(tmp_path / "cluster.secret")
    entry, option = services["secret"]["entrypoint"]
    (program,) = services["secret"]["command"]
    assert (entry, option) == ("python", "-c")
    for _ in range(2):  # containers of a second `up` keep what there is
        subprocess.run([sys.executable, "-c", program.replace("/secret/cluster.secret", secret)], check=True)
    common = {
        "/secret/cluster.secret": secret,
        "0.0.0.0": "127.0.0.1",
        "localhost": "127.0.0.1",
        configuration(services["tidelog-1"]).s3.endpoint: minio_server.endpoint,
        **{f"{name}:9193": f"127.0.0.1:{free_port()}" for name in NODES},
    }
    bucket = new_bucket()
    with ExitStack() as stack:
        processes = []
        for name in NODES:
            config = configuration(services[name])
            services[name]["environment"]["TIDELOG_S3__BUCKET"] = bucket
            own = {
                config.node.data_dir: str(tmp_path / name),
                f"host={name}": "host=127.0.0.1",
                f"kafka.port={config.kafka.port}": "kafka.port=0",
                f"admin.port={config.admin.port}": "admin.port=0",
            }
            processes.append(stack.enter_context(node(services[name], {**own, **common}, tmp_path / f"{name}.out")))
        addresses = [eventually(partial(bootstrap, tmp_path / f"{name}.out")) for name in NODES]
        status = eventually(lambda: healthy(",".join(addresses)))
        assert [row["roles"] for row in status["nodes"]] == [["controller", "broker"]] * 3
        assert [row["address"] for row in status["nodes"]] == addresses
        for name, row in zip(NODES, status["nodes"], strict=True):
            entry, *arguments = services[name]["healthcheck"]["test"][1:]
            assert entry == "python"
            wanted = f"http://localhost:{configuration(services[name]).admin.port}"
            check = [each.replace(wanted, row["admin_url"]) for each in arguments]
            subprocess.run([sys.executable, *check], check=True, timeout=30)
        for process in processes:
            process.terminate()
        assert [process.wait(90) for process in processes] == [0, 0, 0]
