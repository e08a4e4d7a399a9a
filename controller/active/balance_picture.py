"""Input of a balancer's plan: the brokers that take partitions, their partitions, and the load of these.

A `Picture` is made from an image and the newest load reports, and is immutable. A moving partition counts at its
target. Partitions of dead and draining brokers are left out: failovers and drains move them.

A partition needs a set with as many replicas as its topic was created with, or as the largest set of the picture.

Racks count only if every broker of the picture names one (Kafka: broker.rack); otherwise all brokers count as one rack.
Entry: `picture_of`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tidelog.controller.image.image import Image
from tidelog.controller.image.leading import takers
from tidelog.controller.model.load import LoadTable, Rates, partition_loads
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionKey, PartitionRecord
from tidelog.controller.model.topic_replicas import topic_replicas


class Target(NamedTuple):
    """A replica set whose master is alive and not draining."""

    id: int
    rack: str
    replicas: int = 1
    """That it has, or gets."""


class Piece(NamedTuple):
    """A partition."""

    key: PartitionKey
    place: int
    load: Rates
    movable: bool
    replicas: int = 0
    """That a set must have to take it."""


class Picture(NamedTuple):
    """Immutable input of `make_plan`; see the module docstring."""

    places: list[Target]
    pieces: list[Piece]
    unmeasured: list[int]
    """Replica sets without a fresh report; if there are any, no partition's load is known."""


def picture_of(image: Image, loads: LoadTable, now_s: float, pinned: Collection[PartitionKey] = ()) -> Picture:
    """Return the current picture of the cluster. `pinned` partitions are not moved."""
    masters = takers(image)
    racked = all(master.rack for master in masters.values())
    places = [
        Target(each, master.rack if racked else "", image.replica_count(each)) for each, master in masters.items()
    ]
    largest = max((each.replicas for each in places), default=0)
    needed = {topic_id: min(topic_replicas(image.kv, topic_id), largest) for topic_id in image.topics}
    owned: dict[int, list[PartitionRecord]] = {each: [] for each in masters}
    for record in image.all_partitions():
        if record.replica_set in owned:
            owned[record.replica_set].append(record)
    pieces: list[Piece] = []
    unmeasured: list[int] = []
    led: dict[int, list[PartitionRecord]] = {}
    for place, master in masters.items():
        led.setdefault(master.id, []).extend(owned[place])
    reports = {each: loads.get(each, now_s) for each in led}
    rates_of = {each: partition_loads(report, led[each]) for each, report in reports.items() if report is not None}
    for place, master in masters.items():
        if master.id not in rates_of:
            unmeasured.append(place)
        rates = rates_of.get(master.id, {})
        for record in owned[place]:
            key = (record.topic_id, record.index)
            moves = record.target != NO_REPLICA_SET
            at = record.target if moves else place
            if at in owned:
                movable = not moves and key not in pinned
                pieces.append(Piece(key, at, rates.get(key, Rates()), movable, needed.get(key[0], 0)))
    return Picture(places, pieces, unmeasured)
