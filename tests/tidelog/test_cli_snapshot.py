"""`tidelog snapshot` against a real broker: what it says, what it holds through a deletion, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli, until
from tests.support.object_jobs import BY_HAND, fill, objects
from tests.support.tidelog_process import running

pytestmark = pytest.mark.processes


def snapshots(cli: Cli) -> dict[str, Any]:
    return {row["name"]: row for row in cli("snapshot", "list", "--format", "json").json()}


def committed(cli: Cli) -> set[int]:
    return {one["id"] for one in objects(cli) if one["state"] == "committed"}


def test_a_snapshot_holds_what_its_topics_had_and_tells_what_that_costs(tmp_path: Path) -> None:
    with running(tmp_path / "data", BY_HAND) as process:
        cli = Cli(process.bootstrap)
        assert "there are no snapshots" in cli("snapshot", "list").err
        cli("topic", "create", "one", "two", "-p", 2)
        fill(cli, "one", 2)
        fill(cli, "two", 2)
        cli("produce", "one", "--partition", 1, stdin=b"in the WAL only\n")
        took = cli("snapshot", "create", "before", "--topics", "one", "--format", "json").json()
        assert (took["topics"], took["partitions"]) == (["one"], 2) and took["milliseconds"] > 0
        described = cli("snapshot", "describe", "before", "--format", "json").json()
        ends = {(each["topic"], each["partition"]): each["end_offset"] for each in described["partitions_held"]}
        for each in cli("topic", "describe", "one", "--format", "json").json()[0]["partitions"]:
            assert ends["one", each["partition"]] == each["high_watermark"], "what was in the WAL is uploaded"
        assert described["only_bytes"] == 0, "the topic has all of it"
        assert "before" in cli("snapshot", "list").text and "FROM" in cli("snapshot", "describe", "before").text

        held = committed(cli)
        cli("topic", "delete", "one", "two", "--yes")
        until(lambda: snapshots(cli)["before"]["only_bytes"] == snapshots(cli)["before"]["object_bytes"])
        row = snapshots(cli)["before"]
        stored = cli("cost", "--format", "json").json()["stored"]
        assert stored["held"] == {"objects": row["only_objects"], "bytes": row["only_bytes"]}
        assert "only for snapshots and branches" in cli("cost").text
        assert 0 < row["only_objects"] == row["objects"] <= len(held) and row["cost_per_month"] > 0
        assert committed(cli) <= held and len(committed(cli)) == row["objects"]

        assert cli("snapshot", "create", "other", code=3).err.startswith("error: there are no topics")
        cli("topic", "create", "three")
        assert "already exists" in cli("snapshot", "create", "before", code=4).err
        assert "named by 1 to 249" in cli("snapshot", "create", "a b", code=2).err
        assert "'ghost' does not exist" in cli("snapshot", "create", "x", "--topics", "three,ghost", code=3).err
        assert "did you mean 'before'" in cli("snapshot", "delete", "befor", "--yes", code=3).err
        freed = json.loads(cli("snapshot", "delete", "before", "--yes", "--format", "json").text)
        assert freed["only_bytes"] == row["only_bytes"]
        until(lambda: not committed(cli))
        assert snapshots(cli) == {}
