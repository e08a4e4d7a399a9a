"""`tidelog cluster restart --rolling` on real clusters: all brokers under load, and what an operator can do to it.

How long partitions stall is measured by tests/harness/rolling_restart.py; here it is printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.harness.rolling_restart import restart, spread
from tests.support.cli import Cli, environment
from tests.support.default_group import DefaultGroup
from tests.support.hot_cluster import hot_cluster
from tests.support.partition_load import PartitionLoad
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.chaos.serve_cluster import eventually
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import TidelogError

PARTITIONS = 12
TOPIC = "rolling"
MAX_STALL_S = 30.0
"""Far more than it takes: this machine may do anything else meanwhile."""
Document = dict[str, Any]

pytestmark = pytest.mark.slow


def look(bootstrap: str) -> Document:
    found: Document = ClusterConnection(bootstrap).get("/restart")
    return found


def registrations(bootstrap: str) -> dict[int, int]:
    return {row["id"]: row["registration_epoch"] for row in look(bootstrap)["brokers"]}


@contextlib.contextmanager
def under_load(bootstrap: str) -> Iterator[PartitionLoad]:
    """A producer and a group with default settings; in the end nothing is lost, doubled or reordered, and no error."""
    create_topic(bootstrap, TOPIC, PARTITIONS)
    load = PartitionLoad(bootstrap, TOPIC, PARTITIONS, pause_s=0.02, defaults=True)
    with DefaultGroup(bootstrap, TOPIC, PARTITIONS) as group:
        with load:
            load.wait_grown(20)
            yield load
            load.wait_grown(20)
        group.wait_read(load.ends())
    assert group.problems == []
    assert load.verify(bootstrap) == []


@pytest.fixture
def three(tmp_path: Path) -> Iterator[TidelogProcess]:
    with running(tmp_path / "data", ["--brokers", "3"]) as process:
        spread(process.bootstrap)
        yield process


def begin(bootstrap: str, *flags: str) -> subprocess.Popen[str]:
    """Start the command; it goes on by itself."""
    return subprocess.Popen(
        [sys.executable, "-m", "tidelog", "cluster", "restart", "--rolling", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(bootstrap),
    )


def wait_said(command: subprocess.Popen[str], part: str) -> None:
    """Until the command has said this."""
    assert command.stderr is not None
    for line in command.stderr:
        if part in line:
            return
    raise AssertionError(f"it ended with {command.wait(10)}, and did not say {part!r}")


def pid_of(process: TidelogProcess, broker: int) -> int:
    """The process of a broker."""
    config = f"node-{broker}.toml"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in map(int, children):
        with contextlib.suppress(OSError):
            links = Path(f"/proc/{child}/fd").iterdir()
            if any(config in os.readlink(link) for link in links):
                return child
    raise AssertionError(f"no process of broker {broker} among {children}")


def all_back(bootstrap: str) -> bool:
    try:
        rows = look(bootstrap)["brokers"]
    except TidelogError:
        return False
    return all(row["alive"] and not row["hindrances"] for row in rows)


def test_all_brokers_are_restarted_under_load_and_no_application_is_told_of_an_error(three: TidelogProcess) -> None:
    bootstrap = three.bootstrap
    before = registrations(bootstrap)
    with under_load(bootstrap) as load:
        active = next(row["id"] for row in look(bootstrap)["controllers"] if row["state"] == "active")
        load.begin_round()
        brokers = [one["broker"] for one in restart(bootstrap)]
        stalls = load.two_longest_gaps_s()
    assert sorted(brokers) == [1, 2, 3]
    assert brokers[-1] == active
    print(f"the two longest gaps of a partition: at most {max(stalls.values()):.2f} s; load {os.getloadavg()[0]:.1f}")
    assert max(stalls.values()) < MAX_STALL_S
    now = look(bootstrap)
    assert all(row["registration_epoch"] > before[row["id"]] for row in now["brokers"])
    assert all(row["master"] == row["id"] for row in now["replica_sets"])
    assert sum("as an operator asked" in line for line in three.output) == 3


@pytest.mark.long
def test_two_commands_at_once_and_one_that_is_killed_and_run_again_take_no_two_brokers_away(
    three: TidelogProcess,
) -> None:
    bootstrap = three.bootstrap
    with under_load(bootstrap):
        first = begin(bootstrap, "--timeout", "60")
        second = begin(bootstrap, "--timeout", "60")
        codes = []
        for each in (first, second):
            _, said = each.communicate(timeout=240)
            codes.append(each.returncode)
            print(said)
        assert 0 in codes and set(codes) <= {0, 5}, codes
        third = begin(bootstrap, "--brokers", "3")  # not the one that is asked
        wait_said(third, "hands over")
        third.kill()
        third.communicate()
        assert [one["broker"] for one in restart(bootstrap, "--brokers", "1,2")] in ([1, 2], [2, 1])


@pytest.mark.long
def test_brokers_that_die_during_a_step_are_waited_for(three: TidelogProcess) -> None:
    bootstrap = three.bootstrap
    with under_load(bootstrap):
        command = begin(bootstrap, "--brokers", "2")
        wait_said(command, "hands over")
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself already
            os.kill(pid_of(three, 2), signal.SIGKILL)
        _, said = command.communicate(timeout=240)
        assert command.returncode == 0, said

        command = begin(bootstrap, "--brokers", "1")
        wait_said(command, "hands over")
        os.kill(pid_of(three, 3), signal.SIGKILL)
        _, said = command.communicate(timeout=240)
        assert command.returncode == 0, said
        eventually(lambda: all_back(bootstrap))


@pytest.mark.long
def test_without_the_secret_nothing_is_restarted(three: TidelogProcess, tmp_path: Path) -> None:
    before = registrations(three.bootstrap)
    wrong = tmp_path / "wrong.secret"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    cli = Cli(three.bootstrap)
    refused = cli("cluster", "restart", "--rolling", "--secret-file", wrong, code=2)
    assert "token" in refused.err
    assert "give --rolling" in cli("cluster", "restart", code=2).err
    assert "there is no broker 9" in cli("cluster", "restart", "--rolling", "--brokers", "1,9", code=3).err
    assert "takes ids" in cli("cluster", "restart", "--rolling", "--brokers", "1,x", code=2).err
    planned = cli("cluster", "restart", "--rolling", "--dry-run", "--format", "json").json()
    assert [row["hindrances"] for row in planned] == [[], [], []]
    assert "ready" in cli("cluster", "restart", "--rolling", "--dry-run").text
    assert registrations(three.bootstrap) == before


@pytest.mark.long
def test_partitions_of_sets_of_one_member_move_away_and_back(tmp_path: Path) -> None:
    flags = ["--brokers", "3", "--set", "replication.total_replicas=1"]
    with running(tmp_path / "data", flags) as process, under_load(process.bootstrap):
        before = owners(process.bootstrap)
        restart(process.bootstrap)
        assert owners(process.bootstrap) == before


def owners(bootstrap: str) -> dict[int, int]:
    rows = ClusterConnection(bootstrap).get(f"/partitions?topic={TOPIC}")["partitions"]
    return {row["partition"]: row["broker"] for row in rows}


@pytest.mark.long
def test_a_broker_that_nobody_starts_again_ends_the_command_and_the_others_stay(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        cli = Cli(hot.bootstrap)
        late = cli("cluster", "restart", "--rolling", "--timeout", 5, code=5)
        assert "broker 101 has ended, and is to be started again, for 5 s now; no other one is restarted" in late.err
        assert "exit code 11" in late.err
        process = hot.nodes[101].process
        assert process is not None and process.wait(10) == 11
        assert hot.nodes[102].is_running() and hot.nodes[103].is_running()
        refused = cli("cluster", "restart", "--rolling", "--brokers", "102", "--timeout", 2, code=5)
        assert "broker 101 is dead" in refused.err
        hot.begin(101)
        hot.ready(101)
        hot.wait_full()
        stopped = begin(hot.bootstrap, "--brokers", "102")
        wait_said(stopped, "has ended")
        eventually(_ended(hot.nodes[102].process))
        hot.begin(102)
        _, said = stopped.communicate(timeout=120)
        assert stopped.returncode == 0, said


def _ended(process: subprocess.Popen[str] | None) -> Callable[[], bool]:
    return lambda: process is not None and process.poll() is not None


@pytest.mark.long
def test_a_cluster_of_one_broker_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        cli = Cli(process.bootstrap)
        refused = cli("cluster", "restart", "--rolling", "--timeout", 1, code=5)
        assert "no other broker is alive" in refused.err
