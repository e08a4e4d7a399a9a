"""`tidelog console` and `tidelog cluster admin-token`, as processes over a broker in this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Cli, environment
from tests.support.http_calls import HttpCalls
from tidelog.broker.admin.limits import MAX_CONNECTIONS
from tidelog.console.guard import HEADER
from tidelog.controller.rpc.secret import admin_token, read_secret, write_secret
from tidelog.testing import LocalBroker

pytestmark = pytest.mark.processes

WAIT_S = 60.0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalBroker, Path]]:
    secret = tmp_path_factory.mktemp("secret") / "cluster.secret"
    write_secret(secret)
    with LocalBroker(settings={"controller.secret_file": str(secret)}) as broker:
        yield broker, secret


def test_the_printed_address_signs_in_once(guarded: tuple[LocalBroker, Path]) -> None:
    broker, _ = guarded
    command = [sys.executable, "-m", "tidelog", "console", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(broker.bootstrap))
    try:
        assert process.stdout is not None
        told = process.stdout.readline().split()
        assert told[0] == "console"
        address, _, key = told[1].partition("#key=")
        calls = HttpCalls(address)
        assert calls.call("GET", "/", None, {}).headers["Location"] == "/console/"
        assert "app.js" in calls.call("GET", "/console/", None, {}).text
        own = {HEADER: "1"}
        assert calls.call("GET", "/console/api/read/any/status", None, own).status == 401
        signed_in = calls.call("POST", "/console/api/session", {"key": key}, own)
        assert signed_in.status == 200
        cookie = signed_in.headers["Set-Cookie"].partition(";")[0]
        status = calls.call("GET", "/console/api/read/any/status", None, {**own, "Cookie": cookie})
        assert json.loads(status.text)["nodes"][0]["state"] == "ready"
        assert calls.call("POST", "/console/api/session", {"key": key}, own).status == 401
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_connections_are_bounded_as_at_the_admin_port(guarded: tuple[LocalBroker, Path]) -> None:
    broker, _ = guarded
    command = [sys.executable, "-m", "tidelog", "console", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(broker.bootstrap))
    with contextlib.ExitStack() as silent:
        silent.callback(process.communicate)
        silent.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline().split(":")[2].partition("/")[0])
        for _ in range(MAX_CONNECTIONS):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as one_more:
            assert one_more.recv(1) == b""


def test_the_token_is_printed_where_the_secret_is(guarded: tuple[LocalBroker, Path]) -> None:
    broker, secret = guarded
    token = admin_token(read_secret(secret))
    assert Cli(broker.bootstrap)("cluster", "admin-token").text.strip() == token


def test_a_cluster_without_a_secret_is_shown_on_loopback_only() -> None:
    with LocalBroker() as broker:
        cli = Cli(broker.bootstrap)
        assert "no secret" in cli("console", "--host", "0.0.0.0", code=2).err
        assert "http://HOST:PORT" in cli("console", "--schema-registry", "ftp://somewhere", code=2).err
        assert "no secret" in cli("cluster", "admin-token", code=3).err
