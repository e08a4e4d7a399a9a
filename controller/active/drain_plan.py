"""Targets for the partitions of draining brokers: the plan that the active controller commits and a dry run shows.

A drain empties replica sets: the home set of a broker that an operator drains, and each set whose master drains while
no other member may lead it, which is every set of one member. If one may, it becomes the master
(`tidelog.controller.active.masters`), and the partitions stay.

A target is a replica set whose master is alive and not draining: in the rack with the fewest of the topic per broker,
the set with the fewest partitions, moves in progress included. It has, or gets, as many replicas as the topic was
created with; if no set does, it is one of the largest. Only `DRAIN_AT_ONCE` partitions of a set move at a time,
so that a drain can be stopped and the plan can follow changes. Those that move slowly do not count: what its broker
cannot open, because it is damaged or quarantined, may do so for ever, and the others would never leave. A partition
that moves to a broker that has died or drains gets another target. A partition that moves from a set that stays to one
that is emptied is left where it is.

The plan is recomputed from the image each time, so a lost command or a new controller loses nothing.
Entry: `plan_drains`, `plan_drain_of`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Mapping

from tidelog.controller.image.image import Image
from tidelog.controller.image.leading import led_sets, other_leaders, takers
from tidelog.controller.model.commands import PartitionMove
from tidelog.controller.model.records import NO_REPLICA_SET, DrainMode, PartitionKey, PartitionRecord
from tidelog.controller.model.replication import has_several
from tidelog.controller.model.topic_replicas import topic_replicas

DRAIN_AT_ONCE = 64
"""Concurrent moves of one draining broker; the source limits the ones in work by its own `log.moves_at_once`."""


def is_drained(image: Image, broker_id: int) -> bool:
    """Whether the broker leads no partitions, and no move goes to a set that it leads.

    Drained by an operator: also its home set owns nothing, whoever leads it.
    """
    broker = image.brokers.get(broker_id)
    left = {each.id for each in led_sets(image, broker_id)}
    if broker is None or broker.draining != DrainMode.SHUTDOWN:
        left.add(broker_id)
    counts = image.index.partition_counts
    return not any(counts.get(each, 0) for each in left) and not any(one.target in left for one in image.moving())


def _emptied(image: Image, draining: Mapping[int, int]) -> set[int]:
    """Return the replica sets that drains empty. `draining`: the drain mode of each draining broker."""
    found: set[int] = set()
    for record in image.replica_sets.values():
        if draining.get(record.id) == DrainMode.OPERATOR:
            found.add(record.id)
        elif not has_several(record):
            if not draining.keys().isdisjoint(record.members):
                found.add(record.id)
        elif record.master in draining and all(each in draining for each in other_leaders(image, record)):
            found.add(record.id)
    return found


_Heaps = dict[str, list[tuple[int, int]]]
"""By rack: the number of partitions of each set, and its id."""


class _Places:
    """The sets that take partitions: in the rack with the fewest of the topic per broker, the one with the fewest.

    Racks count only if all of them name one.
    """

    def __init__(self, image: Image, draining: Mapping[int, int], emptied: set[int]) -> None:
        self._image = image
        masters = {
            each: master for each, master in takers(image).items() if master.id not in draining and each not in emptied
        }
        racked = all(master.rack for master in masters.values())
        self._racks = {each: master.rack if racked else "" for each, master in masters.items()}
        self.ids = set(masters)
        counts = {each: image.index.partition_counts.get(each, 0) for each in self.ids}
        for record in image.moving():
            for place, step in ((record.target, 1), (record.replica_set, -1)):
                if place in counts:
                    counts[place] += step
        self._counts = counts
        self._replicas = {each: image.replica_count(each) for each in self.ids}
        self._largest = max(self._replicas.values(), default=0)
        self._heaps: dict[int, _Heaps] = {}
        """By the replicas that a set must have: heaps of those that do, by rack. Counts in them may be outdated."""
        self._topics: dict[bytes, Counter[str]] = {}

    def _of_topic(self, topic_id: bytes) -> Counter[str]:
        """Return the number of the topic's partitions in each rack, moves in progress included."""
        found = self._topics.get(topic_id)
        if found is None:
            found = self._topics[topic_id] = Counter()
            for record in self._image.partitions(topic_id) if len(set(self._racks.values())) > 1 else ():
                at = record.target if record.target != NO_REPLICA_SET else record.replica_set
                if at in self._racks:
                    found[self._racks[at]] += 1
        return found

    def take(self, topic_id: bytes) -> int:
        """Return the target of the next partition of this topic."""
        mine, heaps = self._of_topic(topic_id), self._heaps_for(topic_id)
        rack = min(heaps, key=lambda each: (1_000 * mine[each] // len(heaps[each]), self._first(heaps[each])))
        count, place = heaps[rack][0]
        self._counts[place] = count + 1
        mine[rack] += 1
        return place

    def _heaps_for(self, topic_id: bytes) -> _Heaps:
        needed = min(topic_replicas(self._image.kv, topic_id), self._largest)
        found = self._heaps.get(needed)
        if found is None:
            found = self._heaps[needed] = {}
            for place in sorted(self.ids, key=lambda each: (self._racks[each], each)):
                if self._replicas[place] >= needed:
                    found.setdefault(self._racks[place], []).append((self._counts[place], place))
            for heap in found.values():
                heapq.heapify(heap)
        return found

    def _first(self, heap: list[tuple[int, int]]) -> tuple[int, int]:
        """Return the set with the fewest partitions. Counts only grow, so an outdated one is too small."""
        while heap[0][0] != self._counts[heap[0][1]]:
            place = heap[0][1]
            heapq.heapreplace(heap, (self._counts[place], place))
        return heap[0]


def plan_drains(image: Image, limit: int = DRAIN_AT_ONCE, slow: Container[PartitionKey] = ()) -> list[PartitionMove]:
    """Return the placements to commit now, about `limit` at most for each draining broker.

    `slow`: moves that have been under way for long, and do not count.
    """
    draining = {record.id: record.draining for record in image.brokers.values() if record.draining}
    return _plan(image, draining, limit, slow) if draining else []


def plan_drain_of(image: Image, broker_id: int) -> list[PartitionMove]:
    """Return all placements that draining this broker now, by an operator, would cause."""
    draining = {record.id: record.draining for record in image.brokers.values() if record.draining}
    before = _emptied(image, draining) - {broker_id}
    draining[broker_id] = DrainMode.OPERATOR
    mine = _emptied(image, draining) - before
    wanted = _plan(image, draining, 2 * max(image.index.partition_counts.get(each, 0) for each in (broker_id, *mine)))
    return [each for each in wanted if _owner(image, each) in mine]


def _owner(image: Image, move: PartitionMove) -> int:
    record = image.partition(move.topic_id, move.index)
    assert record is not None, move
    return record.replica_set


def _plan(
    image: Image, draining: Mapping[int, int], limit: int, slow: Container[PartitionKey] = ()
) -> list[PartitionMove]:
    emptied = _emptied(image, draining)
    places = _Places(image, draining, emptied)
    moves: list[PartitionMove] = []
    moving, under_way = dict.fromkeys(emptied, 0), dict.fromkeys(emptied, 0)
    for record in image.moving():
        if record.replica_set in emptied:
            moving[record.replica_set] += 1
            under_way[record.replica_set] += (record.topic_id, record.index) not in slow
            if record.target not in places.ids and places.ids:
                moves.append(PartitionMove(record.topic_id, record.index, places.take(record.topic_id)))
        elif record.target in emptied:
            moves.append(PartitionMove(record.topic_id, record.index, NO_REPLICA_SET))
    counts = image.index.partition_counts
    wanted = {
        each: limit - under_way[each]
        for each in emptied
        if counts.get(each, 0) > moving[each] and under_way[each] <= limit // 2
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
