"""A cluster whose output nobody reads: a terminal that was stopped, a pager, a pipe that its starter forgot."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.support.cli import Cli, environment, until
from tests.support.ports import free_port


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"\n" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"\n")
    os.set_blocking(pipe, True)


@pytest.mark.processes
@pytest.mark.slow
def test_a_cluster_whose_output_nobody_takes_serves_tells_of_it_and_ends(tmp_path: Path) -> None:
    read, write = os.pipe()
    fill(write)
    port = free_port()
    command = [sys.executable, "-m", "tidelog", "up", "--data-dir", str(tmp_path), "--kafka-port", str(port)]
    process = subprocess.Popen(
        [*command, "--set", "node.log_level=debug"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=write,
        env=environment(""),
    )
    os.close(write)
    try:
        cli = Cli(f"127.0.0.1:{port}")
        until(lambda: cli("topic", "create", "t", code=None).code == 0)
        producer = Producer({"bootstrap.servers": cli.bootstrap})
        producer.produce("t", b"value")
        assert producer.flush(60) == 0
        until(lambda: "standard error has taken no line for" in cli("status", code=None).text)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        until(lambda: cli("topic", "create", "u", code=None).code == 0)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(30)
        os.close(read)


@pytest.mark.processes
@pytest.mark.slow
def test_a_cluster_without_standard_error_serves_and_ends(tmp_path: Path) -> None:
    port = free_port()
    command = f"exec {sys.executable} -m tidelog up --data-dir {tmp_path} --kafka-port {port} 2>&-"
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment("")
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            assert process.stdout.readline() == f"ready bootstrap=127.0.0.1:{port}\n".encode()
            process.terminate()
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(30)
