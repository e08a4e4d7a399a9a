"""Processes of both roles: which they are, and that one crash takes both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tidelog.simulation.world.cluster import SimCluster
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.simulation.world.settings import Shape


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def cluster_of(loop: VirtualLoop, controllers: int, brokers: int, *, embedded: bool = True) -> SimCluster:
    shape = Shape.draw(random.Random(1), brokers=brokers, controllers=controllers, wal="disk", embedded=embedded)

    def fail(message: str, error: Exception) -> None:
        raise AssertionError(message) from error

    return SimCluster(loop, shape, random.Random(2), lambda who, what: None, fail)


@pytest.mark.parametrize(
    ("controllers", "brokers", "embedded", "members"),
    [
        (3, 2, False, "c1 c2 c3"),
        (3, 2, True, "b1 b2 c1"),
        (3, 3, True, "b1 b2 b3"),
        (1, 3, True, "b1"),
    ],
)
def test_as_many_processes_have_both_roles_as_there_are_of_both(
    loop: VirtualLoop, controllers: int, brokers: int, embedded: bool, members: str
) -> None:
    cluster = cluster_of(loop, controllers, brokers, embedded=embedded)
    assert [node.host for node in cluster.controllers] == members.split()
    assert [node.host for node in cluster.brokers if node.belongs] == [f"b{number + 1}" for number in range(brokers)]
    assert cluster.shape.is_local(1) == (embedded and controllers == 1)


@pytest.mark.parametrize("controllers", [1, 3])
def test_a_crash_takes_both_and_both_come_back(loop: VirtualLoop, controllers: int) -> None:
    cluster = cluster_of(loop, controllers, 3)

    async def ready() -> None:
        async with asyncio.timeout(20):
            while not all(node.ready for node in cluster.nodes.values() if node.belongs):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def work() -> None:
        cluster.start()
        await ready()
        node = cluster.nodes[1]
        assert None not in (node.controller, node.broker)
        node.crash(power=True)
        assert node.controller is None and node.broker is None
        await asyncio.sleep(1)
        node.recover()
        await ready()
        assert cluster.active is not None
        assert {one.id for one in cluster.active.image.brokers.values() if one.alive} == {1, 2, 3}

    loop.run_until_complete(work())
