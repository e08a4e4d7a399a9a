"""A zombie: a former master of a replica set, or participant of a compaction, that resumes much later.

It keeps its old state, waits until its image shows that the state is permanently outdated (epochs only grow, a replaced
object never returns), and then continues: it opens, trims and commits with the old epochs, and replaces an object that
was already replaced. The controller must refuse all of it (rules 4 and 7). If it does not, the checkers find the
consequences.

Entry: `Zombie.run`.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tidelog.controller.model.records import STREAMS_PER_PARTITION, ObjectRecord, ObjectState, PartitionRecord
from tidelog.runtime.errors import TidelogError
from tidelog.simulation.actors.workload import Workload
from tidelog.storage.commits import CommitObjects, CompactObjects, NewObject, ObjectKind, pack_ranges

COMMAND_S = 6.0
TTL_MS = 15_000
SIZE_BYTES = 1_000
OFFSETS = 5
"""The range that it commits or trims of a stream."""


class _Mastership(NamedTuple):
    """The zombie's former role."""

    partition: PartitionRecord
    master_epoch: int
    leader_epoch: int


class Zombie:
    """One zombie process."""

    def __init__(self, workload: Workload) -> None:
        self._w = workload
        self._rng = workload.random()
        self._client = workload.cluster.controller_client("zombie", workload.random(), COMMAND_S)
        self._was: _Mastership | None = None
        self._object: ObjectRecord | None = None

    async def run(self) -> None:
        """Run until the end."""
        await self._client.start()
        while not self._w.closing:
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
            try:
                await self._act_as_master()
                await self._compact()
            except TidelogError as error:
                self._w.cluster.note("zombie", f"was refused: {type(error).__name__}")
        await self._client.close()

    async def _act_as_master(self) -> None:
        image, was = self._client.image, self._was
        if was is None:
            places = sorted((record.topic_id, record.index) for record in image.all_partitions())
            partition = image.partition(*self._rng.choice(places)) if places else None
            if partition is not None and partition.replica_set in image.replica_sets:
                master_epoch = image.replica_sets[partition.replica_set].master_epoch
                self._was = _Mastership(partition, master_epoch, partition.epoch_base + master_epoch)
            return
        first, set_id = was.partition.first_stream, was.partition.replica_set
        stream, replica_set = image.streams.get(first + 1), image.replica_sets.get(set_id)
        if stream is None or replica_set is None:
            self._was = None
            return
        deposed = replica_set.master_epoch > was.master_epoch
        if deposed and stream.epoch == was.leader_epoch:  # the next master has not opened the stream yet
            self._was = None
            if image.level > 0:  # below, a trim names no master epoch, and is not refused
                await self._client.trim_stream(set_id, was.master_epoch, stream.id, stream.epoch, stream.end_offset)
            return
        if stream.epoch <= was.leader_epoch:
            return
        self._was = None
        if self._rng.random() < 0.5:
            await self._client.trim_stream(set_id, was.master_epoch, stream.id, was.leader_epoch, stream.end_offset)
        elif replica_set.master_epoch > was.master_epoch and self._rng.random() < 0.5:
            new = await self._prepare([(stream.id, stream.end_offset, stream.end_offset + OFFSETS)])
            wal_start = self._client.committed_wal_offset(set_id)
            wal_end = wal_start + SIZE_BYTES
            await self._client.commit_objects(CommitObjects(set_id, was.master_epoch, wal_start, wal_end, (new,)))
        else:
            streams = [(first + step, was.leader_epoch) for step in range(STREAMS_PER_PARTITION)]
            await self._client.open_streams(set_id, was.master_epoch, streams)

    async def _prepare(self, ranges: list[tuple[int, int, int]]) -> NewObject:
        object_id = await self._client.prepare_objects(1, TTL_MS)
        return NewObject(object_id, int(ObjectKind.STREAM_SET), SIZE_BYTES, pack_ranges(ranges))

    async def _compact(self) -> None:
        image, old = self._client.image, self._object
        if old is None:
            committed = [one for one in image.objects.values() if one.state == ObjectState.COMMITTED]
            self._object = self._rng.choice(committed) if committed else None
            return
        now = image.objects.get(old.id)
        if now is not None and now.state == ObjectState.COMMITTED:
            return
        self._object = None
        alive = [one for one in image.replica_sets.values() if image.master_of(one.id) is not None]
        if alive:
            master = self._rng.choice(alive)
            new = await self._prepare([(one.stream_id, one.start_offset, one.end_offset) for one in old.ranges])
            await self._client.compact_objects(CompactObjects(master.id, master.master_epoch, (old.id,), (new,)))
