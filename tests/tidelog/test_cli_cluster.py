"""`tidelog cluster` against `tidelog up`, over the directory of a version before feature levels and a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cli import Cli, until
from tests.support.tidelog_process import running
from tidelog.cli.client import http_text
from tidelog.controller.model.levels import NEWEST

pytestmark = pytest.mark.processes

LEVEL_0 = Path(__file__).parents[1] / "controller" / "level0"
OBJECTS_OF_LEVEL_0 = "bucket.iSSAulu8ShtIfOVGgQLKbA"
"""Names the objects of that cluster, whose bucket is not here, as given up."""


def state_of(cli: Cli, broker: int) -> str:
    nodes = cli("status", "--format", "json", code=None).json()["nodes"]
    return str(next(row["state"] for row in nodes if row["id"] == broker))


def test_an_upgraded_cluster_works_at_its_old_level_until_it_is_raised(tmp_path: Path) -> None:
    """Broker 0, of the older version, is registered there and is not started again."""
    data_dir = tmp_path / "data"
    (data_dir / "controller").mkdir(parents=True)
    for name in ("journal", "snapshot"):
        shutil.copyfile(LEVEL_0 / name, data_dir / "controller" / name)
    accepted = data_dir / "accept-loss"
    accepted.write_text(OBJECTS_OF_LEVEL_0)
    with running(data_dir, ["--set", "controller.session_timeout_ms=2000"]) as process:
        cli = Cli(process.bootstrap)
        until(lambda: state_of(cli, 0) == "dead")
        cli("topic", "create", "new", "-p", 1)
        cli("produce", "new", stdin=b"at level 0\n")
        assert cli("cluster", "--help").text
        found = cli("cluster", "status", "--format", "json").json()
        assert (found["level"], found["target"], found["newest"]) == (0, 0, NEWEST)
        ranges = {(each["kind"], each["id"]): (each["oldest"], each["newest"]) for each in found["members"]}
        [mine] = [each for kind, each in ranges if kind == "broker" and each != 0]
        newest = (0, NEWEST)
        assert ranges == {("controller", mine): newest, ("broker", 0): (0, 0), ("broker", mine): newest}

        assert "broker 0 (levels 0)" in cli("cluster", "upgrade", "--level", 1, "--dry-run").text
        assert "broker 0 (levels 0)" in cli("cluster", "upgrade", "--level", 1, "--yes", code=2).err
        undone = cli("cluster", "upgrade", "--yes", code=2)
        assert "nothing to do" in undone.text and f"not every member supports {NEWEST}" in undone.err
        assert "nothing to do" in cli("cluster", "upgrade", "--dry-run").text
        cli("broker", "remove", 0, "--accept-loss")

        assert cli("cluster", "upgrade", "--dry-run").text.endswith(
            f"would raise the feature level from 0 to {NEWEST}\n"
        )
        assert "add --yes" in cli("cluster", "upgrade", code=2).err
        assert cli("cluster", "upgrade", "--yes").text == f"raised the feature level to {NEWEST}\n"
        assert "nothing to do" in cli("cluster", "upgrade", "--yes").text
        assert "not lowered to 0" in cli("cluster", "upgrade", "--level", 0, "--yes", code=2).err
        cli("produce", "new", stdin=b"at the newest level\n")
        # Of topic `old`, whose object is in the bucket of the older version, it says that it cannot be read.
        status = cli("status", "--format", "json", code=None).json()
        assert status["level"] == NEWEST
        assert not [each for each in status["problems"] if "level" in each], status["problems"]
    accepted.write_text(OBJECTS_OF_LEVEL_0)  # of its own, it may have uploaded nothing yet
    with running(data_dir) as process:
        cli = Cli(process.bootstrap)
        assert f"level    {NEWEST}" in cli("cluster").text
        read = cli("consume", "new", "--partition", 0, "--from-beginning", "--exit").text
        assert read == "at level 0\nat the newest level\n"


def test_a_wal_that_is_to_be_replicated_since_the_level_was_raised_is_a_problem_until_a_restart(tmp_path: Path) -> None:
    """`tidelog up` with three brokers asks for three replicas, and ran below the level at which there are any."""
    data_dir = tmp_path / "data"
    (data_dir / "controller").mkdir(parents=True)
    for name in ("journal", "snapshot"):
        shutil.copyfile(LEVEL_0 / name, data_dir / "controller" / name)
    (data_dir / "accept-loss").write_text(OBJECTS_OF_LEVEL_0)
    settings = ["controller.session_timeout_ms=2000", "replication.total_replicas=3"]
    with running(data_dir, [word for each in settings for word in ("--set", each)]) as process:
        cli = Cli(process.bootstrap)
        until(lambda: state_of(cli, 0) == "dead")
        cli("broker", "remove", 0, "--accept-loss")

        def told() -> bool:
            problems = cli("status", "--format", "json", code=None).json()["problems"]
            return any("is to have 3 replicas: that begins when broker" in each for each in problems)

        assert not told()
        cli("cluster", "upgrade", "--yes")
        until(told)
        [url] = [node["admin_url"] for node in cli("status", "--format", "json", code=None).json()["nodes"]]
        lines = http_text(url, "/metrics", limit_bytes=1 << 24).splitlines()
        figures = {name.partition("{")[0]: value for name, _, value in (line.rpartition(" ") for line in lines)}
        of_set = [figures[f"tidelog_replica_set_{name}"] for name in ("replicas", "in_sync")]
        assert of_set == ["3.0", "1.0"]  # an alert compares them


def test_a_new_cluster_is_at_the_newest_level(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        cli = Cli(process.bootstrap)
        found = cli("cluster", "status", "--format", "json").json()
        assert (found["level"], found["newest"]) == (NEWEST, NEWEST)
        assert all((each["oldest"], each["newest"]) == (0, NEWEST) for each in found["members"])
        refused = cli("cluster", "upgrade", "--level", NEWEST + 1, "--yes", code=2)
        assert f"feature level {NEWEST + 1} is not supported by controller" in refused.err
