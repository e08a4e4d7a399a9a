"""`tidelog object compact` in a cluster: every broker's objects are planned and compacted, whichever was asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli, until
from tests.support.cluster_process import up_cluster
from tests.support.object_jobs import objects

pytestmark = pytest.mark.processes

FLAGS = ("--set", "compaction.enabled=false", "--set", "upload.age_ms=50")
PARTITIONS = 2
"""As many as brokers: each has one."""


def test_every_broker_compacts_what_it_owns(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data", PARTITIONS, FLAGS) as cluster:
        cli = Cli(cluster.bootstrap)
        cli("topic", "create", "t", "-p", PARTITIONS)

        def has_grown(before: int) -> bool:
            return len(objects(cli)) >= before + PARTITIONS

        for number in range(3):
            before = len(objects(cli))
            for partition in range(PARTITIONS):
                cli("produce", "t", "--partition", partition, stdin=b"%d\n" % number)
            until(partial(has_grown, before))

        def plans() -> Any:
            return cli("object", "compact", "--eager", "--dry-run", "--format", "json").json()["brokers"]

        assert [one["broker"] for one in plans()] == [1, 2] and all(one["plan"] for one in plans())
        shown = cli("object", "compact", "--eager", "--dry-run").text
        assert "broker 1\n" in shown and "broker 2\n" in shown
        planned = sum(len(task["inputs"]) for one in plans() for task in one["plan"])
        done = cli("object", "compact", "--eager", "--now", "--format", "json").json()
        assert done["inputs"] >= planned >= 2 * 3 and done["outputs"] >= 2 and done["given_up"] == []
        assert not any(one["plan"] for one in plans())
        assert "nothing to compact" in cli("object", "compact", "--eager").text
        assert sorted(cli("consume", "t", "--exit").out.split()) == [b"0", b"0", b"1", b"1", b"2", b"2"]
        assert cluster.stop() == 0, cluster.tail()
