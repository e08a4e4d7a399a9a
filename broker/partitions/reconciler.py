"""Compares wanted with open partitions: what to open, close and move, and when. No I/O.

Theory of operation. The image places partitions on replica sets; those of the sets that this broker is master of, and
serves (`tidelog.broker.partitions.storages`), are *wanted* here, each under a leader epoch. `refresh` applies the
changes of the image, `plan` returns the work that removes the differences. `tidelog.broker.partitions.manager` executes
it, a task per piece of work, and reports the outcomes. A partition is in one of these states:

    state     event                                             next
    ───────   ───────────────────────────────────────────────   ────────────────────────────────────────────────────────
    ABSENT    wanted, and its retry time has come: `plan`        OPENING
    OPENING   `opened`, then `ended`                             OPEN
              `failed`, then `ended`                             ABSENT, until its retry time (back-off, 0.1 to 5 s)
    OPEN      not wanted, or under a larger epoch: `plan`        CLOSING; dropped if it is not in the image any more
              it has a target and may leave: `plan`              MOVING; it serves until `withdrawn`
    CLOSING   `ended`                                            ABSENT
    MOVING    `ended`                                            OPEN, or ABSENT if it was withdrawn: the image
                                                                 decides whether it is opened again

Invariants:
1. A partition is handled by one task at a time (`_busy`), and is opened only while it is not open (rule 4).
2. The last placement in the image wins: an epoch is wanted as long as the image names it, and is compared again after
   each task.
3. Every partition that differs from the wanted state is in `_pending`, so the cost of a change depends on its size, not
   on the number of partitions.

Times are monotonic seconds. Entry: `PartitionReconciler`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tidelog.broker.partitions.move_table import Move, MoveTable
from tidelog.broker.partitions.storages import Mastership
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionKey, PartitionRecord, StreamState, TopicRecord
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import TidelogError
from tidelog.stream.opened import OpenedStream

STREAMS_A_PARTITION = 4
PARTITIONS_A_CALL = 1024
"""4,096 streams, the controller's limit for one command."""
RETRY_BASE_S, RETRY_CAP_S = 0.1, 5.0
_PLACES_ALL = frozenset({"replica_sets", "configs"})
"""Tables whose changes may concern every partition."""


class Work(Enum):
    """What a task does with a partition."""

    OPENING = "opening"
    CLOSING = "closing"
    MOVING = "moving"


@dataclass(slots=True)
class WantedPartition:
    """A partition that this broker must lead."""

    topic: TopicRecord
    partition: PartitionRecord
    leader_epoch: int
    master_epoch: int
    since: float
    """When this leader epoch was first seen here."""

    @property
    def term(self) -> Mastership:
        """Return the master's term under which it is opened."""
        return Mastership(self.partition.replica_set, self.master_epoch)


@dataclass(slots=True)
class OpenFailure:
    """Why a partition does not open, and when to retry."""

    error: TidelogError
    backoff: Backoff
    retry_at: float


@dataclass(slots=True)
class Refreshed:
    """Results of `refresh` other than work for `plan`."""

    topics: list[bytes] = field(default_factory=list)
    """Ids of topics whose configuration may have changed."""
    deleted: list[PartitionKey] = field(default_factory=list)
    """Partitions of deleted topics, whose names may be reused by now."""
    kept: list[tuple[PartitionKey, TopicRecord]] = field(default_factory=list)
    """Partitions that stay open; their configuration may have changed."""


@dataclass(slots=True)
class PartitionPlan:
    """Work to start now, and when to plan again if nothing happens before. The caller owns the keys until
    `ended` names them."""

    moves: list[tuple[Move, WantedPartition]] = field(default_factory=list)
    closes: list[tuple[PartitionKey, bool]] = field(default_factory=list)
    """With whether the partition is deleted. These logs are withdrawn."""
    handed_over: list[tuple[PartitionKey, WantedPartition, dict[int, OpenedStream]]] = field(default_factory=list)
    """Partitions to open with the streams that a hand-over has opened."""
    opens: list[dict[PartitionKey, WantedPartition]] = field(default_factory=list)
    """Partitions to open, `PARTITIONS_A_CALL` at most in each."""
    wait_s: float | None = None
    """Seconds to the next retry."""

    def not_after(self, wait_s: float) -> None:
        """Plan again in `wait_s` seconds at the latest."""
        self.wait_s = wait_s if self.wait_s is None else min(self.wait_s, wait_s)


class PartitionReconciler:
    """The reconciler. `has_hint(key, leader epoch)`: whether the source of a move sent the partition's data."""

    def __init__(
        self, node_id: int, moves: MoveTable, rng: random.Random, has_hint: Callable[[PartitionKey, int], bool]
    ) -> None:
        self._node_id = node_id
        self._moves = moves
        self._rng = rng
        self._has_hint = has_hint
        self.wanted: dict[PartitionKey, WantedPartition] = {}
        self._open: dict[PartitionKey, int] = {}
        """The leader epochs of open partitions."""
        self._leaving: set[PartitionKey] = set()
        """Closed by a move in progress."""
        self._busy: dict[PartitionKey, Work] = {}
        self._failures: dict[PartitionKey, OpenFailure] = {}
        self._pending: dict[PartitionKey, None] = {}
        self._sizes: dict[bytes, int] = {}
        self._changed_topics: set[bytes] = set()
        self._changed_partitions: set[PartitionKey] = set()
        self._all_changed = True

    # -- queries

    def failure(self, key: PartitionKey) -> TidelogError | None:
        """Return why a wanted partition failed to open the last time, or None."""
        found = self._failures.get(key)
        return found.error if found is not None else None

    def problems(self) -> list[str]:
        """Return the partitions that could not be opened, with the reason, for operators."""
        return [
            f"{wanted.topic.name}-{key[1]} does not open: {failure.error}"
            for key, failure in self._failures.items()
            if (wanted := self.wanted.get(key)) is not None
        ]

    @property
    def failing(self) -> int:
        """Return the number of partitions that failed to open the last time."""
        return len(self._failures)

    def unsettled(self) -> list[PartitionKey]:
        """Return the partitions neither opened nor failed once. An open partition that is leaving counts as opened.

        Otherwise a start would deadlock: leaving waits for an upload, and uploads wait until all is settled.
        """
        return [
            key
            for key in {*self._busy, *self._pending}
            if key not in self._open and key not in self._leaving and key not in self._failures
        ]

    # -- changes of the image

    def image_changed(self, delta: Delta) -> None:
        """Record which partitions a delta concerns."""
        for table, key, _ in delta.mutations:
            if table == "topics":
                self._changed_topics.add(key)
            elif table == "partitions":
                self._changed_partitions.add(key)
            elif table in _PLACES_ALL:
                self._all_changed = True

    def all_changed(self) -> None:
        """Compare everything at the next `refresh`."""
        self._all_changed = True

    def refresh(self, image: Image, now: float, terms: Mapping[int, int]) -> Refreshed:
        """Apply the changes of the image since the last call.

        `terms`: master epochs in which storages serve here, by replica set; after a change of it call `all_changed`.
        """
        topics, self._changed_topics = self._changed_topics, set()
        partitions, self._changed_partitions = self._changed_partitions, set()
        if self._all_changed:
            self._all_changed = False
            topics = {*image.topics, *self._sizes}
        found = Refreshed(sorted(topics))
        if not topics and not partitions:
            return found
        mine = {
            record.id: record.master_epoch
            for record in image.replica_sets.values()
            if record.master == self._node_id and terms.get(record.id) == record.master_epoch
        }
        for topic_id in found.topics:
            self._refresh_topic(image, topic_id, mine, now, found)
        for topic_id, index in sorted(partitions):
            topic, partition = image.topics.get(topic_id), image.partition(topic_id, index)
            if topic_id not in topics and topic is not None and partition is not None:  # else the topic has changed
                self._refresh_partition(image, topic, partition, mine, now, found)
        return found

    def _refresh_topic(self, image: Image, topic_id: bytes, mine: dict[int, int], now: float, found: Refreshed) -> None:
        """Update the wanted partitions of a topic and record differences. `mine`: master epochs by replica set."""
        topic = image.topics.get(topic_id)
        partitions = image.partitions(topic_id)
        for index in range(len(partitions), self._sizes.pop(topic_id, 0)):
            self._want((topic_id, index), None, found)
            if topic is None:
                found.deleted.append((topic_id, index))
        if topic is None:
            return
        self._sizes[topic_id] = len(partitions)
        for partition in partitions:
            self._refresh_partition(image, topic, partition, mine, now, found)

    def _refresh_partition(
        self,
        image: Image,
        topic: TopicRecord,
        partition: PartitionRecord,
        mine: dict[int, int],
        now: float,
        found: Refreshed,
    ) -> None:
        key, wanted = (topic.id, partition.index), None
        master_epoch = mine.get(partition.replica_set)
        if master_epoch is not None:
            _, epoch = image.leader(partition)
            old = self.wanted.get(key)
            since = old.since if old is not None and old.leader_epoch == epoch else now
            wanted = WantedPartition(topic, partition, epoch, master_epoch, since)
        self._want(key, wanted, found)

    def _want(self, key: PartitionKey, wanted: WantedPartition | None, found: Refreshed) -> None:
        epoch = self._open.get(key)
        if wanted is None:
            if self.wanted.pop(key, None) is not None or epoch is not None:
                self._pending[key] = None
            return
        self.wanted[key] = wanted
        if epoch is None or wanted.leader_epoch > epoch:
            self._pending[key] = None
        else:
            found.kept.append((key, wanted.topic))

    # -- planning

    def plan(self, image: Image, now: float, now_ms: int) -> PartitionPlan:
        """Return the work for all differences that may be started."""
        plan = PartitionPlan()
        self._plan_moves(image, now, now_ms, plan)
        due: list[PartitionKey] = []
        for key in list(self._pending):
            if key in self._busy:
                continue
            epoch, wanted = self._open.get(key), self.wanted.get(key)
            if epoch is not None and (wanted is None or wanted.leader_epoch > epoch):
                self._busy[key] = Work.CLOSING
                del self._open[key]
                plan.closes.append((key, key[0] not in image.topics))
            elif epoch is not None or wanted is None:
                del self._pending[key]
                self._failures.pop(key, None)
            else:
                failure = self._failures.get(key)
                if failure is None or failure.retry_at <= now:
                    due.append(key)
                else:
                    plan.not_after(failure.retry_at - now)
        self._plan_opens(image, due, plan)
        return plan

    def _plan_moves(self, image: Image, now: float, now_ms: int, plan: PartitionPlan) -> None:
        """Plan the moves of open partitions with a target."""
        leaving: set[PartitionKey] = set()
        for key in sorted(image.index.moving):
            wanted, epoch = self.wanted.get(key), self._open.get(key)
            if wanted is None or wanted.partition.target == NO_REPLICA_SET:
                continue
            leaving.add(key)
            move = self._moves.follow(wanted.topic.name, wanted.partition)
            if epoch is None or key in self._busy or wanted.leader_epoch > epoch:
                continue
            wait_s = self._moves.wait_s(move, now, target_lives=image.master_of(move.target) is not None)
            if wait_s == 0:
                self._busy[key] = Work.MOVING
                plan.moves.append((self._moves.begin(key), wanted))
            elif wait_s is not None:
                plan.not_after(wait_s)
        self._moves.keep(leaving, now_ms)

    def _plan_opens(self, image: Image, due: list[PartitionKey], plan: PartitionPlan) -> None:
        asked: list[PartitionKey] = []
        for key in due:
            assert key not in self._open and key not in self._busy, "it has one owner here (rule 4)"
            self._busy[key] = Work.OPENING
            wanted = self.wanted[key]
            opened = handed_over(image, wanted) if self._has_hint(key, wanted.leader_epoch) else None
            if opened is None:
                asked.append(key)
            else:
                plan.handed_over.append((key, wanted, opened))
        for start in range(0, len(asked), PARTITIONS_A_CALL):
            plan.opens.append({key: self.wanted[key] for key in asked[start : start + PARTITIONS_A_CALL]})

    # -- outcomes

    def opened(self, key: PartitionKey, leader_epoch: int) -> None:
        """Record that the log is open, and serves from here on."""
        assert self._busy.get(key) is Work.OPENING and key not in self._open
        self._open[key] = leader_epoch
        self._failures.pop(key, None)

    def failed(self, key: PartitionKey, error: TidelogError, now: float) -> None:
        """Record that the log did not open; it is retried later."""
        assert self._busy.get(key) is Work.OPENING
        failure = self._failures.get(key)
        backoff = failure.backoff if failure is not None else Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)
        self._failures[key] = OpenFailure(error, backoff, now + backoff.next_delay_s())

    def withdrawn(self, key: PartitionKey) -> None:
        """Record that a log that moves away no longer serves."""
        assert self._busy.get(key) is Work.MOVING
        del self._open[key]
        self._leaving.add(key)

    def ended(self, keys: Iterable[PartitionKey]) -> None:
        """Record that the task of these partitions has ended; remaining differences are planned again."""
        for key in keys:
            if self._busy.pop(key, None) is Work.MOVING:
                self._leaving.discard(key)
                self._pending[key] = None  # the image decides whether to open it here again


def handed_over(image: Image, wanted: WantedPartition) -> dict[int, OpenedStream] | None:
    """Return the streams of a partition that a hand-over opened for this broker, which had replied that it is ready.

    Only for the first opening, which has the hint: then the image equals the controller's answer.
    """
    opened: dict[int, OpenedStream] = {}
    ours = (StreamState.OPENED, wanted.partition.replica_set, wanted.leader_epoch)
    for stream_id in stream_ids(wanted):
        one = image.streams.get(stream_id)
        if one is None or (one.state, one.replica_set, one.epoch) != ours:
            return None
        opened[stream_id] = one.as_opened()
    return opened


def stream_ids(wanted: WantedPartition) -> range:
    """Return the streams of a partition."""
    return range(wanted.partition.first_stream, wanted.partition.first_stream + STREAMS_A_PARTITION)


def streams_to_open(batch: Iterable[WantedPartition]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the streams to open with their epochs, by replica set and master epoch."""
    asked: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for wanted in batch:
        streams = asked.setdefault(wanted.term, [])
        streams.extend((stream_id, wanted.leader_epoch) for stream_id in stream_ids(wanted))
    return asked
