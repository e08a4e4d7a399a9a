"""Clusters that begin old: what the controllers remember is whole, the same for all of them, and large."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model.records import ObjectState
from tidelog.controller.raft.snapshot import Snapshot, read_snapshot
from tidelog.simulation.actors.past import NEAR, NEAR_BYTES, OLD, POWERS, draw_past
from tidelog.simulation.actors.workload import Topic
from tidelog.simulation.world.cluster import SimCluster, SimNode
from tidelog.simulation.world.consensus import DIRECTORY
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.simulation.world.raft_files import SimRaftFiles
from tidelog.simulation.world.settings import Shape

TOPICS = (Topic("t1", 3, False), Topic("t2", 2, True, {"retention.bytes": "10000"}))
LARGE = tuple(1 << power for power in POWERS)


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    loop = VirtualLoop()
    shape = Shape.draw(random.Random(1), brokers=2, controllers=3)
    yield SimCluster(loop, shape, random.Random(2), lambda who, what: None, lambda message, error: None)
    loop.close()


def with_a_past() -> random.Random:
    """A generator that draws one."""
    return next(random.Random(seed) for seed in range(1000) if random.Random(seed).random() < OLD)


def snapshot_of(node: SimNode) -> Snapshot | None:
    return read_snapshot(DIRECTORY / "snapshot", SimRaftFiles(node.raft_platters, random.Random(0)))


def test_most_clusters_have_none(cluster: SimCluster) -> None:
    rng = next(random.Random(seed) for seed in range(1000) if random.Random(seed).random() >= OLD)
    draw_past(cluster, TOPICS, rng)
    assert [snapshot_of(node) for node in cluster.controllers] == [None, None, None]


def test_a_past_ends_with_trimmed_streams_and_wals_near_powers_of_two(cluster: SimCluster) -> None:
    draw_past(cluster, TOPICS, with_a_past())
    snapshots = [snapshot_of(node) for node in cluster.controllers]
    (snapshot,) = set(snapshots)
    assert snapshot is not None
    state = ControllerState()
    state.load(snapshot.state)
    assert state.applied_index == snapshot.last[1]
    tables = state.tables
    assert [(row.name, row.partitions, row.configs) for row in tables.topics.rows.values()] == [
        (topic.name, topic.partitions, topic.configs) for topic in TOPICS
    ]
    assert len(tables.streams.rows) == 4 * 5
    for stream in tables.streams.rows.values():
        assert stream.start_offset == stream.end_offset
        assert min(abs(stream.end_offset - power) for power in LARGE) <= NEAR
    for replica_set in tables.replica_sets.rows.values():
        assert min(abs(replica_set.committed_wal_offset - power) for power in LARGE) <= NEAR_BYTES
    assert {row.state for row in tables.objects.rows.values()} <= {ObjectState.DESTROYED}
    assert not any(broker.alive for broker in tables.brokers.rows.values())
    assert cluster.watch.findings == []
