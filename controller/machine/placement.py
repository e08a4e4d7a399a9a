"""Placement of new partitions: the rack with the fewest of the topic per broker, and its least loaded broker.

Replication belongs to the replica set. A topic that asks for a number of replicas is placed on the smallest sets that
have, or get, as many. A partition that has lost its set is placed on any set with as many, and if there is none, on the
largest.

A broker's load is its number of partitions plus its measured load, expressed as a number of mean partitions. The active
controller adds the measured load to the command (`loads`), so that all members decide alike. A command without `loads`
(of an older controller, or of a takeover) is placed by the numbers of partitions alone. Racks count only if every
broker that takes partitions names one.

Entry: `place`, `place_again`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from tidelog.controller.machine.moves import NeededReplicas, set_replicas, takes_partitions
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.errors import InvalidReplicaAssignment, InvalidReplicationFactor
from tidelog.controller.model.records import PartitionRecord

Loads = tuple[tuple[int, int], ...] | None
"""`(replica set, thousandths of a mean partition)`."""
ONE = 1_000
"""One partition in the unit of `Loads`: thousandths of a mean partition."""


def place(
    tables: Tables,
    count: int,
    assignment: Sequence[int] | None,
    loads: Loads = None,
    *,
    siblings: Sequence[int] = (),
    replicas: int = 0,
) -> list[int]:
    """Return replica sets for `count` new partitions: as assigned, else by load, of those alive and not draining.

    `siblings` are the replica sets of the topic's other partitions. The new ones get no fewer `replicas` than asked
    for, and no fewer than all siblings have.
    Raises `InvalidReplicaAssignment`, `InvalidReplicationFactor`.
    """
    if assignment is not None:
        unknown = [each for each in assignment if each not in tables.replica_sets]
        if len(assignment) != count or unknown:
            raise InvalidReplicaAssignment(
                f"an assignment names {count} existing replica sets; got {len(assignment)}, unknown: {unknown[:10]}"
            )
        return list(assignment)
    racks = _open_racks(tables)
    if not racks:
        raise InvalidReplicationFactor("no broker is alive, and not draining, to place a partition on")
    least = max(replicas, min((set_replicas(tables, each) for each in siblings), default=0))
    racks = _large_enough(tables, racks, least)
    if loads is None or "" in racks.values():
        racks = dict.fromkeys(racks, "")
    return _spread(tables, count, racks, dict(loads or ()), siblings)


def place_again(tables: Tables, partitions: Sequence[PartitionRecord]) -> list[int]:
    """Return a replica set for each of these partitions, whose own has no broker any more, by numbers alone.

    Raises `InvalidReplicationFactor` if no broker takes partitions.
    """
    open_sets = sorted(_open_racks(tables)) if partitions else []
    if partitions and not open_sets:
        raise InvalidReplicationFactor("no broker is alive, and not draining, to place a partition on")
    needed = NeededReplicas(tables)
    sizes = {each: set_replicas(tables, each) for each in open_sets}
    counts = {each: tables.index.partition_counts.get(each, 0) for each in open_sets}
    heaps: dict[int, list[tuple[int, int]]] = {}  # by needed replicas; counts in them may be outdated, and only grow
    placement: list[int] = []
    for partition in partitions:
        least = needed.of(partition.topic_id)
        if least not in heaps:
            heaps[least] = sorted((counts[each], each) for each in open_sets if sizes[each] >= least)
        heap = heaps[least]
        while heap[0][0] != counts[heap[0][1]]:
            heapq.heapreplace(heap, (counts[heap[0][1]], heap[0][1]))
        chosen = heap[0][1]
        counts[chosen] += 1
        placement.append(chosen)
    return placement


def _open_racks(tables: Tables) -> dict[int, str]:
    """Return the rack of each replica set that takes partitions."""
    found: dict[int, str] = {}
    for record in tables.replica_sets.values():
        master = tables.brokers.get(record.master)
        if master is not None and takes_partitions(tables, record):
            found[record.id] = master.rack
    return found


def _large_enough(tables: Tables, racks: dict[int, str], replicas: int) -> dict[int, str]:
    """Return the smallest sets with at least so many replicas. Raises `InvalidReplicationFactor`."""
    if replicas == 0:
        return racks
    sizes = {each: set_replicas(tables, each) for each in racks}
    enough = min((size for size in sizes.values() if size >= replicas), default=0)
    if enough == 0:
        raise InvalidReplicationFactor(
            f"replication factor {replicas}: the largest replica set that takes partitions has {max(sizes.values())}",
            hint="a larger replication.total_replicas, and as many brokers, make larger sets;"
            " `tidelog replica-set list` shows them",
        )
    return {each: rack for each, rack in racks.items() if sizes[each] == enough}


def _spread(
    tables: Tables, count: int, racks: dict[int, str], loads: dict[int, int], siblings: Iterable[int]
) -> list[int]:
    heaps: dict[str, list[tuple[int, int]]] = {rack: [] for rack in sorted(set(racks.values()))}
    for place_id, rack in racks.items():
        number = tables.index.partition_counts.get(place_id, 0)
        heaps[rack].append((number * ONE + loads.get(place_id, 0), place_id))
    mine = dict.fromkeys(heaps, 0)
    for sibling in siblings:
        if sibling in racks:
            mine[racks[sibling]] += 1
    for heap in heaps.values():
        heapq.heapify(heap)
    step = 2 * ONE if loads else ONE  # a new partition counts as one and is assumed to carry the mean load
    placement: list[int] = []
    for _ in range(count):
        rack = min(heaps, key=lambda each: (mine[each] * ONE // len(heaps[each]), heaps[each][0]))
        load, chosen = heaps[rack][0]
        heapq.heapreplace(heaps[rack], (load + step, chosen))
        mine[rack] += 1
        placement.append(chosen)
    return placement
