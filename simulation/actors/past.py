"""Clusters with a past when a simulation begins: offsets near 2^31, 2^32, 2^40 and 2^53 (docs/rules.md, rule 9).

A simulated client cannot write four billion records. The controllers' state after such a past is generated here by the
real state machine from a sequence of commands: brokers register and are elected, topics are created and opened, one
object commits everything written to each stream and covers the same range of the WALs, and everything is trimmed. The
members of the quorum start with that snapshot. The brokers start with empty directories, as if their disks had been
replaced after the last upload; a WAL continues after the committed WAL offset.

The streams begin a little before or after the powers of two, so that many simulations cross one.

Entry: `draw_past`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tidelog.controller.image.image import Delta
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import from_wire
from tidelog.controller.model.levels import NEWEST
from tidelog.controller.model.records import NO_REPLICA_SET, STREAMS_PER_PARTITION
from tidelog.simulation.actors.workload import Topic
from tidelog.simulation.world.clock import EPOCH_MS
from tidelog.simulation.world.cluster import SimCluster
from tidelog.simulation.world.consensus import remember, remember_log
from tidelog.simulation.world.settings import KAFKA_PORT
from tidelog.storage.commits import CommitObjects, NewObject, ObjectKind, pack_ranges

OLD = 1 / 8
"""The share of seeds with a past."""
POWERS = (31, 32, 32, 40, 53)
NEAR = 300
"""Maximum distance of a stream's start from a power of two: about what a simulation writes to a partition."""
NEAR_BYTES = 200_000
"""The same for WALs."""
TERM = 1
TTL_MS = 60_000


class _Past:
    """The state machine, and the commands that it has applied."""

    def __init__(self, level: int) -> None:
        self.state = ControllerState()
        self.index = 0
        self._level = level

    def apply(self, command: c.AnyCommand) -> Any:
        """Apply a command, which must succeed, and return its value."""
        self.index += 1
        envelope = c.Envelope(self._level + 1, TERM, EPOCH_MS, "", 0, 0, c.at_level(command, self._level))
        result = c.decode_result(self.state.apply(envelope, self.index).result)
        if result.error is not None:
            raise from_wire(result.error)
        return result.value


def _near(rng: random.Random, distance: int) -> int:
    return int((1 << rng.choice(POWERS)) + rng.randint(-distance, distance))


def draw_past(cluster: SimCluster, topics: Sequence[Topic], rng: random.Random) -> None:
    """Give one cluster in eight a past, with these topics. Call it before the cluster starts.

    Another one that begins below the newest feature level has been founded, and nothing else.
    """
    shape = cluster.shape
    is_old = rng.random() < OLD
    founding = c.BecomeActive(min(shape.members), TERM, f"{rng.getrandbits(64):022x}", shape.upload.delete_delay_ms)
    if not is_old and shape.level < NEWEST:
        written = c.encode_envelope(c.Envelope(0, TERM, EPOCH_MS, "", 0, 0, founding), shape.level)
        for node in cluster.controllers:
            remember_log(node.raft_platters, TERM, [written])
    if not is_old:
        return
    past = _Past(shape.level)
    past.apply(founding)
    brokers = [node for node in cluster.brokers if node.belongs]
    for node in brokers:
        past.apply(c.RegisterBroker(node.id, f"check-{node.id}", "past", node.host, KAFKA_PORT, "", "", shape.wal))
        past.apply(c.Elect(node.id, node.id))
    for topic in topics:
        topic_id = rng.getrandbits(128).to_bytes(16, "big")
        past.apply(c.CreateTopic(topic_id, topic.name, topic.partitions, topic.configs, False, False, None))
    for node in brokers:
        _write(past, node.id, rng)
        past.apply(c.SetBrokerAlive(node.id, 1, False))
    tables = past.state.tables
    rows = [RowChange(table.name, key, row) for table in tables.public() for key, row in table.rows.items()]
    cluster.watch.take(Delta(past.state.version, rows, {}))
    snapshot = past.state.dump()
    for node in cluster.controllers:
        remember(node.raft_platters, past.index, TERM, snapshot)


def _write(past: _Past, set_id: int, rng: random.Random) -> None:
    """Commit everything written to a replica set in the past: one object, completely trimmed."""
    tables = past.state.tables
    epoch = tables.replica_sets.rows[set_id].master_epoch
    partitions = [row for row in tables.partitions.rows.values() if row.replica_set == set_id]
    ends: list[tuple[int, int, int]] = []
    for partition in partitions:
        assert partition.target == NO_REPLICA_SET
        streams = range(partition.first_stream, partition.first_stream + STREAMS_PER_PARTITION)
        past.apply(c.OpenStreams(set_id, epoch, tuple((each, epoch) for each in streams)))
        ends += [(each, 0, _near(rng, NEAR)) for each in streams]
    past.apply(c.PrepareObjects(1, TTL_MS))
    object_id = max(tables.objects.rows)
    new = NewObject(object_id, int(ObjectKind.STREAM_SET), 1, pack_ranges(sorted(ends)))
    past.apply(c.Commit(CommitObjects(set_id, epoch, 0, _near(rng, NEAR_BYTES), (new,) if ends else ())))
    for stream_id, _, end in ends:
        past.apply(c.TrimStream(stream_id, epoch, end))
