"""A broker that comes back while another one takes over what it left: it lets that end, if it does in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.load import Load
from tidelog.broker.partitions import takeover as takeover

TOPIC, PARTITIONS, GONE = "t", 6, 3


class Held:
    """A cluster whose broker `GONE` has ended, and whose successor has come as far as the placing and waits."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.go_on = asyncio.Event()
        self.reply = asyncio.Event()
        """Until then nobody hears that the placing is committed, but by the image."""
        self.reply.set()
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        for broker in (1, 2):
            self._hold(cluster.nodes[broker].controller)
        cluster.run(cluster.stop_broker(GONE))
        wait_until(lambda: cluster.image.replica_sets[GONE].successor > 0, "somebody takes over")

    def _hold(self, client: Any) -> None:
        place = client.place_taken_over

        async def late(*args: Any) -> int:
            await self.go_on.wait()
            placed: int = await place(*args)
            await self.reply.wait()
            return placed

        client.place_taken_over = late

    def come_back(self) -> Future[None]:
        """Start the broker that has gone, and return when it is registered."""
        started = self.cluster.begin(self.cluster.start_broker(GONE))
        wait_until(lambda: self.cluster.image.brokers[GONE].alive, "it has registered")
        return started

    def takeovers(self, outcome: str) -> int:
        return sum(node.parts.partitions.takeovers.counts[outcome] for node in self.cluster.nodes.values())

    def owned(self) -> int:
        """Partitions of the broker that was gone."""
        return sum(each.replica_set == GONE for each in self.cluster.image.all_partitions())


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    with Cluster(tmp_path, wal="s3", session_timeout_ms=1000) as cluster:
        held = Held(cluster)
        try:
            yield held
        finally:
            held.go_on.set()
            held.reply.set()


@pytest.mark.gate_cases("after the next master")
@pytest.mark.parametrize("reply", ["prompt", "after the next master"])
def test_it_lets_the_takeover_end_and_comes_back_empty(
    held: Held, caplog: pytest.LogCaptureFixture, reply: str
) -> None:
    if reply != "prompt":
        held.reply.clear()
    caplog.set_level(logging.INFO)
    with Load(held.cluster.bootstrap, TOPIC, PARTITIONS) as load:
        started = held.come_back()
        wait_until(lambda: any("waiting for the takeover" in each.message for each in caplog.records), "it waits")
        assert not started.done() and held.cluster.image.replica_sets[GONE].successor > 0
        held.cluster.call(held.go_on.set)
        started.result(30)
        wait_until(lambda: held.takeovers("done") == 1, "the takeover is counted")
        assert held.takeovers("superseded") == 0
        assert held.owned() == 0 and held.cluster.image.master_of(GONE) is not None
        load.more()
    load.check(held.cluster.bootstrap)


@pytest.mark.long
def test_it_takes_over_when_the_takeover_does_not_end(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "RETURN_WAIT_S", 0.3)
    before = held.owned()
    assert before > 0
    held.come_back().result(30)
    wait_until(lambda: held.takeovers("superseded") == 1, "the successor gives up")
    assert held.takeovers("done") == 0 and held.owned() == before
    with Load(held.cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
    load.check(held.cluster.bootstrap)
