"""`tidelog chaos` as CI runs it: each usual fault once, a bucket that fails, its own death; and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cli import Cli, environment
from tests.support.s3_servers import S3Server
from tidelog.chaos.bank import ENTRY_PARTITIONS, ORDER_PARTITIONS
from tidelog.chaos.compacted import TABLE_PARTITIONS
from tidelog.chaos.faults import USUAL
from tidelog.chaos.run import ChaosOptions, run
from tidelog.simulation.actors.compacted import TABLE
from tidelog.simulation.checkers.history import load


def chaos(*flags: str, timeout_s: float = 500.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidelog", "chaos", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment("127.0.0.1:1"), check=False
    )


def processes_under(directory: Path) -> list[str]:
    """Command lines of what still runs with a file there."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                line = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


@pytest.mark.slow
def test_every_promise_holds_through_kill_stop_cut_and_slow(tmp_path: Path) -> None:
    history = tmp_path / "run.jsonl"
    done = chaos("--rounds", "4", "--seconds", "30", "--seed", "3", "--rate", "400", "--history", str(history))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise was kept" in done.stdout
    ops = load(history).ops
    faults = [op.name for op in ops if op.kind == "fault"]
    assert 1 <= len(faults) <= 4 and set(faults) <= set(USUAL), faults
    assert any(op.kind == "end_txn" and op.ok and op.commits for op in ops), "transactions are committed meanwhile"
    audits = Counter(op.topic == TABLE for op in ops if op.kind == "audit" and op.committed_only)
    assert audits == {False: ORDER_PARTITIONS + ENTRY_PARTITIONS, True: TABLE_PARTITIONS}
    assert sum(op.offset for op in ops if op.kind == "cleaned") > 0, "rounds of log compaction run meanwhile"
    assert "nothing is wrong" in Cli()("check", history).text


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.servers
def test_a_bucket_that_fails_and_is_slow_loses_nothing(moto_server: S3Server) -> None:
    flags = ["--s3-endpoint", moto_server.endpoint, "--access-key", moto_server.access_key_id]
    flags += ["--secret-key", moto_server.secret_access_key, "--faults", "bucket-503,bucket-slow"]
    done = chaos(*flags, "--rounds", "2", "--seconds", "30", "--rate", "200", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"clean": true' in done.stdout


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.servers("previous_release")
def test_nodes_of_two_releases_keep_every_promise(previous_release: str) -> None:
    flags = ["--rounds", "3", "--seconds", "60", "--rate", "200", "--faults", "kill", "--format", "json"]
    done = chaos(*flags, "--old-python", previous_release)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["clean"]
    assert found["starts"]["old"] >= 3 and found["starts"]["new"] >= 1
    assert sum(found["starts"].values()) >= 4 + 3, "three nodes, one of them in both, and three kills"


@pytest.mark.slow
def test_a_log_that_is_only_in_memory_is_found_to_lose_records() -> None:
    """The harness and its checkers can fail: here a kill truly loses what was acknowledged.

    On a busy machine a kill may come when all that was acknowledged is in the bucket: then another one is tried.
    """
    for seed in range(3):
        lines: list[str] = []
        options = ChaosOptions(
            seconds=30,
            rounds=1,
            faults=("kill",),
            wal="memory",
            moves=False,
            rate=400,
            seed=seed,
            transactions=False,
            compaction=False,
        )
        found = run(options, lines.append)
        assert lines[0].startswith("round 1: kill")  # a slow round shows more
        if not found.clean:
            break
    assert sum(row.lost for row in found.rows) > 0
    assert {one.rule for one in found.findings} >= {"lost-write", "inconsistent-offsets"}


@pytest.mark.long
def test_nothing_is_left_running_when_it_is_ended_in_the_middle(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-m", "tidelog", "chaos", "--faults", "kill"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment("127.0.0.1:1"), "TMPDIR": str(tmp_path)},
        )
        with process:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("round 1: kill"), process.stderr.read()
            assert processes_under(tmp_path)
            os.kill(process.pid, number)
            process.wait(30)
        deadline = time.monotonic() + 30
        while processes_under(tmp_path):
            assert time.monotonic() < deadline, processes_under(tmp_path)
            time.sleep(0.1)


@pytest.mark.gate_cases("flags3---s3-endpoint")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--faults", "earthquake"], "there is no fault earthquake"),
        (["--old-python", "/no/such/python"], "there is no interpreter /no/such/python"),
        (["--faults", "bucket-503"], "needs an S3 server"),
        (["--access-key", "me"], "--s3-endpoint"),
    ],
)
def test_options_that_do_not_fit_are_refused(flags: list[str], says: str) -> None:
    assert says in Cli()("chaos", *flags, code=2).err
