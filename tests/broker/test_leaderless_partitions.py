"""Partitions of the cluster without a living broker, as every broker counts them for its metrics."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from tests.controller.replica_trio import Trio
from tidelog.broker.partitions.takeover import TakeoverRunner
from tidelog.broker.telemetry.figures import leaderless_families
from tidelog.runtime.clock import SystemClock
from tidelog.storage.settings import CacheSettings, StorageSettings, UploadSettings


def test_partitions_of_a_replica_set_that_elects_are_counted() -> None:
    """`GET /metrics` failed for as long as a set of several members had no master."""
    trio = Trio()
    trio.topic(partitions=3)
    runner = TakeoverRunner(
        node_id=1,
        controller=cast("Any", SimpleNamespace(image=trio.image)),
        open_wal=cast("Any", None),
        store=cast("Any", None),
        clock=SystemClock(),
        rng=random.Random(1),
        settings=StorageSettings(UploadSettings(), CacheSettings()),
        on_deposed=cast("Any", None),
    )
    assert not any(runner.waiting().values())
    trio.die(0)
    counted = trio.image.index.partition_counts[0]
    assert counted > 0 and runner.waiting() == {"due": 0, "recovering": 0, "electing": counted, "waiting": 0}
    (family,) = leaderless_families(runner.waiting())
    assert {each.labels["state"]: each.value for each in family.samples}["electing"] == counted
