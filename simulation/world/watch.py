"""Checks every change of the metadata during a simulation for monotonic values and contiguous ranges.

The controllers apply the same commands in the same order; the first application of each command is checked. So
violations that a later command would hide are found, too:

- `only-grows`: epoch, start and committed end of a stream, master epoch and committed WAL offset of a replica set never
  decrease, and the leader epoch of a partition grows whenever it gets another owner (rules 3 and 4);
- `contiguous-ranges`: a commit starts, for every stream, exactly at the committed end (rule 5);
- `trimmed-early`: a WAL is trimmed no further than committed objects cover it (rule 3);
- `needless-fence`: a broker ends because its commits are refused only when another is master (rules 4 and 16);
- `one-owner`: a stream is opened by the replica set that its partition is placed on, and by no other, and trimmed only
  while the master that opened it is the current one (rule 4);
- `deleted-under-reader`: no broker that may read from the bucket has metadata that names an object when the object is
  deleted (rule 6; `tidelog.simulation.world.cluster`);
- `unbounded-command`: one command removes a bounded number of a deleted topic's partitions (rule 12);
- `two-masters`, `promise-broken`, `confirmed-alone`: see `tidelog.simulation.world.replica_watch`;
- `producer-forgotten`: see `tidelog.simulation.world.producer_watch`.

What `one-owner` says of trims, and `unbounded-command`, hold for commands that were written at feature level 1.

Entry: `Watch.take`, a listener of a controller's `DeltaFeed`; `Watch.trims`, called before each trim of a WAL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidelog.controller.image.image import Delta
from tidelog.controller.model.records import (
    STREAMS_PER_PARTITION,
    ObjectState,
    PartitionRecord,
    ReplicaSetRecord,
    StreamState,
)
from tidelog.controller.model.records import StreamRecord as Row
from tidelog.controller.model.replication import ReplicationRecord
from tidelog.controller.model.wal_notes import DATA_STREAM
from tidelog.runtime.types import Buffer
from tidelog.simulation.checkers import Finding
from tidelog.simulation.world.confirmed import Confirmed
from tidelog.simulation.world.producer_watch import ProducerBatch, ProducerWatch, producer_batch
from tidelog.simulation.world.replica_watch import ReplicaWatch

MAX_FINDINGS = 20
PARTITIONS_PER_DELETION = 1
"""Of the controllers in a simulation: even small topics need several commands."""

ON_THEIR_WAY = 64
"""Commands that may have been written at level 0 and come after the one that raises it; each has a version."""


class Watch:
    """The last state of the metadata, and the findings in its changes."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.confirmed = Confirmed(self.found)
        """Data confirmed by brokers, reported by `tidelog.simulation.world.watched_wal`."""
        self.replicas = ReplicaWatch(self.found)
        """What the replicas of WALs with several members hold."""
        self.producers = ProducerWatch(self.found)
        """The producers of confirmed batches."""
        self._version = 0
        self._streams: dict[int, Row] = {}
        self._sets: dict[int, ReplicaSetRecord] = {}
        self._partitions: dict[tuple[bytes, int], PartitionRecord] = {}
        self._placed: dict[int, PartitionRecord] = {}
        """Partitions by stream id."""
        self._was_at_level_0 = False
        self._level_1_from: int | None = None
        """Version from which all commands were written at feature level 1; None: some are written at 0."""
        self._opened_under: dict[int, int] = {}
        """The master epoch of the owner when a stream was opened last."""

    def take(self, delta: Delta) -> None:
        """Check a delta applied by a controller. A delta that another controller applied before is skipped."""
        if delta.version <= self._version:
            return
        self._version = delta.version
        ends = delta.ends or {}
        self._look_at_commit(delta, ends)
        for stream_id, row in ends.items():
            self._stream(stream_id, row)
        later: list[tuple[int, Row]] = []
        replicated: list[ReplicationRecord] = []
        removed = sum(1 for table, _, record in delta.mutations if table == "partitions" and record is None)
        for table, _, record in delta.mutations:
            if table == "cluster":
                self._note_level(record.level)
        if removed > PARTITIONS_PER_DELETION and self._is_level_1():
            self.found("unbounded-command", f"one command removed {removed} partitions")
        for table, key, record in delta.mutations:
            if table == "replica_sets":
                self._replica_set(key, record)
            elif table == "partitions":
                self._partition(key, record)
            elif table == "replication" and record is not None:
                replicated.append(record)
            elif table == "streams" and record is not None:
                later.append((key, record))
        for stream_id, row in later:  # the placement is known here
            self._stream(stream_id, row)
        for one in replicated:
            if one.id in self._sets:
                self.replicas.take(one, self._sets[one.id].master_epoch)

    def trims(self, set_id: int, wal_offset: int) -> None:
        """Check a trim of a replica set's WAL before it happens."""
        row = self._sets.get(set_id)
        if row is not None and wal_offset > row.committed_wal_offset:
            said = f"the WAL of replica set {set_id} is trimmed to {wal_offset}, committed up to"
            self.found("trimmed-early", f"{said} {row.committed_wal_offset}")

    def is_master(self, broker_id: int, set_id: int, master_epoch: int) -> bool:
        """Whether a broker is the master of a replica set in this master epoch."""
        row = self._sets.get(set_id)
        return row is not None and (row.master, row.master_epoch) == (broker_id, master_epoch)

    def replica_set(self, set_id: int) -> ReplicaSetRecord | None:
        """Return the newest metadata of a replica set."""
        return self._sets.get(set_id)

    def producer_of(self, stream_id: int, payload: Sequence[Buffer]) -> ProducerBatch | None:
        """Return what an append says of an idempotent producer; None if it is none of a partition's data stream."""
        placed = self._placed.get(stream_id)
        if placed is None or stream_id != placed.first_stream + DATA_STREAM:
            return None
        return producer_batch(payload[0] if len(payload) == 1 else b"".join(payload))

    def confirms(self, stream_id: int, epoch: int, end: int, producer: ProducerBatch | None) -> None:
        """Record that an append of that epoch is confirmed, which ends at stream offset `end`."""
        self.confirmed.stream_holds(stream_id, epoch, end)
        if producer is not None:
            self.producers.confirms(stream_id, epoch, producer)

    def found(self, rule: str, message: str) -> None:
        """Report a finding."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(rule=rule, message=f"at version {self._version}: {message}"))

    def _note_level(self, level: int) -> None:
        if level == 0:
            self._was_at_level_0 = True
        elif self._level_1_from is None:
            self._level_1_from = self._version + (ON_THEIR_WAY if self._was_at_level_0 else 0)

    def _is_level_1(self) -> bool:
        return self._level_1_from is not None and self._version >= self._level_1_from

    def _grows(self, what: str, was: int, now: int) -> None:
        if now < was:
            self.found("only-grows", f"{what} was {was} and is {now}")

    def _look_at_commit(self, delta: Delta, ends: dict[int, Row]) -> None:
        at = {stream_id: self._streams[stream_id].end_offset for stream_id in ends if stream_id in self._streams}
        if not at:
            return
        objects: list[Any] = [record for table, _, record in delta.mutations if table == "objects"]
        pieces = [
            (one.stream_id, one.start_offset, one.end_offset, record.id)
            for record in objects
            if record is not None and record.state == ObjectState.COMMITTED
            for one in record.ranges
        ]
        for stream_id, start, end, object_id in sorted(pieces):
            if stream_id in at:
                if start != at[stream_id]:
                    said = (
                        f"object {object_id} has {start}..{end} of stream {stream_id}, committed up to {at[stream_id]}"
                    )
                    self.found("contiguous-ranges", said)
                at[stream_id] = end

    def _stream(self, stream_id: int, now: Row) -> None:
        old = self._streams.get(stream_id)
        self._streams[stream_id] = now
        if old is not None:
            self._grows(f"the epoch of stream {stream_id}", old.epoch, now.epoch)
            self._grows(f"the start of stream {stream_id}", old.start_offset, now.start_offset)
            self._grows(f"the end of stream {stream_id}", old.end_offset, now.end_offset)
        opens = now.state == StreamState.OPENED and (old is None or (old.epoch, old.state) != (now.epoch, now.state))
        replica_set = self._sets.get(now.replica_set)
        master_epoch = replica_set.master_epoch if replica_set is not None else -1
        trimmed = old is not None and now.start_offset > old.start_offset and now.replica_set == old.replica_set
        if (
            trimmed and self._is_level_1() and master_epoch != self._opened_under[stream_id]
        ):  # else a hand-over, which trims the meta stream
            said = f"stream {stream_id} was trimmed for a master of epoch {self._opened_under[stream_id]}"
            self.found("one-owner", f"{said}; replica set {now.replica_set} has one of epoch {master_epoch}")
        if opens:
            self._opened_under[stream_id] = master_epoch
        placed = self._placed.get(stream_id)
        if opens and placed is not None and placed.replica_set != now.replica_set:
            self.found(
                "one-owner",
                f"stream {stream_id} was opened by replica set {now.replica_set}, not {placed.replica_set}",
            )

    def _replica_set(self, set_id: int, now: ReplicaSetRecord | None) -> None:
        old = self._sets.pop(set_id, None)
        if now is None:
            self.confirmed.forget_wal(set_id)
            self.replicas.forget(set_id)
            return
        self._sets[set_id] = now
        if old is not None:
            self._grows(f"the master epoch of replica set {set_id}", old.master_epoch, now.master_epoch)
            what = f"what is committed of the WAL of replica set {set_id}"
            self._grows(what, old.committed_wal_offset, now.committed_wal_offset)

    def _partition(self, key: tuple[bytes, int], now: PartitionRecord | None) -> None:
        old = self._partitions.pop(key, None)
        if now is None:
            if old is not None:
                self.producers.forget(old.first_stream + DATA_STREAM)
            return
        self._partitions[key] = now
        for step in range(STREAMS_PER_PARTITION):
            self._placed[now.first_stream + step] = now
        if old is None or old.replica_set == now.replica_set:
            return
        before, after = self._sets.get(old.replica_set), self._sets.get(now.replica_set)
        if before is None or after is None:
            return
        was, epoch = old.epoch_base + before.master_epoch, now.epoch_base + after.master_epoch
        if epoch <= was:
            self.found(
                "only-grows",
                f"partition {key[1]} went from replica set {old.replica_set} with leader epoch {was} to"
                f" {now.replica_set} with {epoch}",
            )
