"""The launchers of `localstack/`: the servers listen on the loopback only, and end with whoever started them."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from urllib.parse import urlsplit

import pytest

from tests.support.s3_servers import ROOT, S3Server

pytestmark = pytest.mark.processes

SERVE = [sys.executable, str(ROOT / "localstack" / "serve.py"), "moto"]
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.02)


def listens(endpoint: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(endpoint).port or 0)) == 0


def ready(stdout: IO[str] | None) -> str:
    assert stdout is not None
    line = stdout.readline()
    assert line.startswith("ready endpoint=http://127.0.0.1:"), line
    return line.strip().removeprefix("ready endpoint=")


def listening_addresses(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            address, _, number = line.split()[1].partition(":")
            if int(number, 16) == port and line.split()[3] == "0A":
                found.add(address)
    return found


def test_a_server_listens_on_the_loopback_only(s3_server: S3Server) -> None:
    found = listening_addresses(urlsplit(s3_server.endpoint).port or 0)
    assert found
    assert found <= set(LOOPBACK)


@pytest.mark.servers("moto")
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_its_child(tmp_path: Path, signal_number: int) -> None:
    with subprocess.Popen([*SERVE, "--dir", str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        endpoint = ready(process.stdout)
        assert listens(endpoint)
        process.send_signal(signal_number)
        assert process.wait(20) == 0
    assert not listens(endpoint)


@pytest.mark.servers("moto")
def test_the_end_of_stdin_ends_the_server(tmp_path: Path) -> None:
    command = [*SERVE, "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        endpoint = ready(process.stdout)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
    assert not listens(endpoint)


@pytest.mark.servers("moto")
def test_a_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent_script = "import subprocess, sys; subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL)"
    command = [sys.executable, "-c", parent_script, *SERVE, "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        endpoint = ready(parent.stdout)
        parent.kill()
        wait_for(lambda: not listens(endpoint), "the orphan has ended")


@pytest.mark.servers("moto")
def test_the_child_does_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([*SERVE, "--dir", str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        endpoint = ready(process.stdout)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not listens(endpoint), "the child has ended")


def test_an_unknown_kind_is_refused() -> None:
    for script in ("serve.py", "install.py"):
        command = [sys.executable, str(ROOT / "localstack" / script), "ceph"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert "usage:" in result.stderr


def test_a_download_that_fails_is_tried_again_within_bounds_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = importlib.util.spec_from_file_location("install_of_localstack", ROOT / "localstack" / "install.py")
    assert loaded is not None and loaded.loader is not None
    install: Any = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(install)
    slept: list[float] = []
    monkeypatch.setattr(install, "time", SimpleNamespace(sleep=slept.append))
    count = tmp_path / "count"
    count.write_text("")
    fails_twice = f'printf x >> {count}; [ "$(cat {count})" = xxx ] || {{ echo the registry is away; exit 1; }}'
    install.download(["sh", "-c", fails_twice], cwd=tmp_path)
    assert slept == list(install.PAUSES_S)
    assert capsys.readouterr().err.count("failed: the registry is away") == 2
    with pytest.raises(install.Missing, match="the registry is away"):
        install.download(["sh", "-c", fails_twice], cwd=tmp_path)  # it goes on failing
    assert count.read_text() == "xxx" + "x" * (len(install.PAUSES_S) + 1)
