"""Where the partitions of draining brokers go: the plan that the active controller commits, and that a dry run shows.

Each goes to a living broker that is not draining itself: of the rack with fewest of the topic for its brokers the one
with the fewest, those under way counted. Only
`DRAIN_AT_ONCE` of a broker's partitions are under way at a time: a drain can be stopped, and the plan follows what
happens meanwhile. A partition on its way to a broker that died or drains now gets another target; one that was
going to a draining broker from one that stays is left where it is.

The plan is made anew from the image each time, so a lost command or a new controller loses nothing.
Entry: `plan_drains`, `plan_drain_of`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from controller.commands import PartitionMove
from controller.image import Image
from controller.model import NO_REPLICA_SET, PartitionRecord

DRAIN_AT_ONCE = 64
"""Partitions of one draining broker that are on their way at a time; how many of them are in work is the source's
`log.moves_at_once`."""


def is_drained(image: Image, broker_id: int) -> bool:
    """Whether the broker owns nothing, and nothing is on its way to it."""
    return not image.index.partition_counts.get(broker_id, 0) and not any(
        record.target == broker_id for record in image.moving()
    )


class _Places:
    """The brokers that take partitions: of the rack with fewest of the topic for its brokers, the one with the fewest.

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
        """How many of the topic's partitions are, or will be, in each rack."""
        found = self._topics.get(topic_id)
        if found is None:
            found = self._topics[topic_id] = Counter()
            for record in self._image.partitions(topic_id) if len(self._heaps) > 1 else ():
                at = record.target if record.target != NO_REPLICA_SET else record.replica_set
                if at in self._racks:
                    found[self._racks[at]] += 1
        return found

    def take(self, topic_id: bytes) -> int:
        """The next place for a partition of this topic."""
        mine = self._of_topic(topic_id)
        rack = min(self._heaps, key=lambda each: (1_000 * mine[each] // len(self._heaps[each]), self._heaps[each][0]))
        count, place = self._heaps[rack][0]
        heapq.heapreplace(self._heaps[rack], (count + 1, place))
        mine[rack] += 1
        return place


def plan_drains(image: Image, limit: int = DRAIN_AT_ONCE) -> list[PartitionMove]:
    """The placements to commit now, at most about `limit` for each draining broker."""
    draining = {record.id for record in image.brokers.values() if record.draining}
    return _plan(image, draining, limit) if draining else []


def plan_drain_of(image: Image, broker_id: int) -> list[PartitionMove]:
    """All placements that draining this broker now would lead to."""
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
    """As many partitions of each owner as are wanted, of those that do not move."""
    found: list[PartitionRecord] = []
    for record in records:
        if record.target == NO_REPLICA_SET and wanted.get(record.replica_set, 0) > 0:
            wanted[record.replica_set] -= 1
            found.append(record)
    return found
