"""A broker that comes back while another one salvages what it left: it lets that end, if it does in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from broker import salvage
from tests.e2e.backends import create_topic
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.load import Load

TOPIC, PARTITIONS, GONE = "t", 6, 3


class Held:
    """A cluster whose broker `GONE` has ended, and whose salvager has come as far as the placing and waits."""

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
        wait_until(lambda: cluster.image.replica_sets[GONE].salvager > 0, "somebody salvages")

    def _hold(self, client: Any) -> None:
        place = client.place_salvaged

        async def late(*args: Any) -> int:
            await self.go_on.wait()
            placed: int = await place(*args)
            await self.reply.wait()
            return placed

        client.place_salvaged = late

    def come_back(self) -> Future[None]:
        """Start the broker that has gone, and return when it is registered."""
        started = asyncio.run_coroutine_threadsafe(self.cluster.start_broker(GONE), self.cluster._loop)
        wait_until(lambda: self.cluster.image.brokers[GONE].alive, "it has registered")
        return started

    def salvages(self, outcome: str) -> int:
        return sum(node._salvager.counts[outcome] for node in self.cluster.nodes.values() if node._salvager)

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


@pytest.mark.parametrize("reply", ["prompt", "after the next master"])
def test_it_lets_the_salvage_end_and_comes_back_empty(held: Held, caplog: pytest.LogCaptureFixture, reply: str) -> None:
    if reply != "prompt":
        held.reply.clear()
    caplog.set_level(logging.INFO)
    with Load(held.cluster.bootstrap, TOPIC, PARTITIONS) as load:
        started = held.come_back()
        wait_until(lambda: any("waiting for that" in each.message for each in caplog.records), "it waits")
        assert not started.done() and held.cluster.image.replica_sets[GONE].salvager > 0
        held.cluster._loop.call_soon_threadsafe(held.go_on.set)
        started.result(30)
        wait_until(lambda: held.salvages("done") == 1, "the salvage is counted")
        assert held.salvages("superseded") == 0
        assert held.owned() == 0 and held.cluster.image.master_of(GONE) is not None
        load.more()
    load.check(held.cluster.bootstrap)


def test_it_takes_over_when_the_salvage_does_not_end(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salvage, "RETURN_WAIT_S", 0.3)
    before = held.owned()
    assert before > 0
    held.come_back().result(30)
    wait_until(lambda: held.salvages("superseded") == 1, "the salvager gives up")
    assert held.salvages("done") == 0 and held.owned() == before
    with Load(held.cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
    load.check(held.cluster.bootstrap)
