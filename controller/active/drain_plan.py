"""Targets for the partitions of draining brokers: the plan that the active controller commits and a dry run shows.

A target is a live broker that is not draining: in the rack with the fewest of the topic per broker, the broker with the
fewest partitions, moves in progress included. Only `DRAIN_AT_ONCE` partitions of a broker move at a time, so that a
drain can be stopped and the plan can follow changes. A partition that moves to a broker that has died or drains gets
another target. A partition that moves from a broker that stays to a draining one is left where it is.

The plan is recomputed from the image each time, so a lost command or a new controller loses nothing.
Entry: `plan_drains`, `plan_drain_of`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from tidelog.controller.image.image import Image
from tidelog.controller.model.commands import PartitionMove
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionRecord

DRAIN_AT_ONCE = 64
"""Concurrent moves of one draining broker; the source limits the ones in work by its own `log.moves_at_once`."""


def is_drained(image: Image, broker_id: int) -> bool:
    """Whether the broker owns nothing and is the target of no move."""
    return not image.index.partition_counts.get(broker_id, 0) and not any(
        record.target == broker_id for record in image.moving()
    )


class _Places:
    """The brokers that take partitions: in the rack with the fewest of the topic per broker, the one with the fewest.

    Racks count only if all of them name one.
    """

    def __init__(self, image: Image, draining: set[int]) -> None:
        self._image = image
        masters = {
            record.id: master
            for record in image.replica_sets.values()
            if record.master not in draining and (master := image.master_of(record.id)) is not None
        }
        racked = all(master.rack for master in masters.values())
        self._racks = {each: master.rack if racked else "" for each, master in masters.items()}
        self.ids = set(masters)
        counts = {each: image.index.partition_counts.get(each, 0) for each in self.ids}
        for record in image.moving():
            for place, step in ((record.target, 1), (record.replica_set, -1)):
                if place in counts:
                    counts[place] += step
        self._heaps: dict[str, list[tuple[int, int]]] = {rack: [] for rack in sorted(set(self._racks.values()))}
        for each, count in counts.items():
            self._heaps[self._racks[each]].append((count, each))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._topics: dict[bytes, Counter[str]] = {}

    def _of_topic(self, topic_id: bytes) -> Counter[str]:
        """Return the number of the topic's partitions in each rack, moves in progress included."""
        found = self._topics.get(topic_id)
        if found is None:
            found = self._topics[topic_id] = Counter()
            for record in self._image.partitions(topic_id) if len(self._heaps) > 1 else ():
                at = record.target if record.target != NO_REPLICA_SET else record.replica_set
                if at in self._racks:
                    found[self._racks[at]] += 1
        return found

    def take(self, topic_id: bytes) -> int:
        """Return the target of the next partition of this topic."""
        mine = self._of_topic(topic_id)
        rack = min(self._heaps, key=lambda each: (1_000 * mine[each] // len(self._heaps[each]), self._heaps[each][0]))
        count, place = self._heaps[rack][0]
        heapq.heapreplace(self._heaps[rack], (count + 1, place))
        mine[rack] += 1
        return place


def plan_drains(image: Image, limit: int = DRAIN_AT_ONCE) -> list[PartitionMove]:
    """Return the placements to commit now, about `limit` at most for each draining broker."""
    draining = {record.id for record in image.brokers.values() if record.draining}
    return _plan(image, draining, limit) if draining else []


def plan_drain_of(image: Image, broker_id: int) -> list[PartitionMove]:
    """Return all placements that draining this broker now would cause."""
    draining = {record.id for record in image.brokers.values() if record.draining} | {broker_id}
    wanted = _plan(image, draining, 2 * image.index.partition_counts.get(broker_id, 0))
    return [each for each in wanted if _owner(image, each) == broker_id]


def _owner(image: Image, move: PartitionMove) -> int:
    record = image.partition(move.topic_id, move.index)
    assert record is not None, move
    return record.replica_set


def _plan(image: Image, draining: set[int], limit: int) -> list[PartitionMove]:
    places = _Places(image, draining)
    moves: list[PartitionMove] = []
    under_way = dict.fromkeys(draining, 0)
    for record in image.moving():
        if record.replica_set in draining:
            under_way[record.replica_set] += 1
            if record.target not in places.ids and places.ids:
                moves.append(PartitionMove(record.topic_id, record.index, places.take(record.topic_id)))
        elif record.target in draining:
            moves.append(PartitionMove(record.topic_id, record.index, NO_REPLICA_SET))
    counts = image.index.partition_counts
    wanted = {
        each: limit - under_way[each]
        for each in draining
        if counts.get(each, 0) > under_way[each] and under_way[each] <= limit // 2
    }
    if wanted and places.ids:
        chosen = _next_of(image.all_partitions(), wanted)
        moves += [PartitionMove(record.topic_id, record.index, places.take(record.topic_id)) for record in chosen]
    return moves


def _next_of(records: Iterable[PartitionRecord], wanted: dict[int, int]) -> list[PartitionRecord]:
    """Return the wanted number of partitions of each owner, of those that do not move."""
    found: list[PartitionRecord] = []
    for record in records:
        if record.target == NO_REPLICA_SET and wanted.get(record.replica_set, 0) > 0:
            wanted[record.replica_set] -= 1
            found.append(record)
    return found
