"""Input of a balancer's plan: the brokers that take partitions, their partitions, and the load of these.

A `Picture` is made from an image and the newest load reports, and is immutable. It is of the moment of its first step:
what changes while it is made is not in it. A moving partition counts at its target. Partitions of dead and draining
brokers are left out: failovers and drains move them.

A partition needs a set with as many replicas as its topic was created with, or as the largest set of the picture.

Racks count only if every broker of the picture names one (Kafka: broker.rack); otherwise all brokers count as one rack.
Entry: `picture_of`.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Final, NamedTuple

from tidelog.controller.image.image import Image
from tidelog.controller.image.leading import takers
from tidelog.controller.model.load import LoadTable, Rates, partition_loads
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionKey, PartitionRecord
from tidelog.controller.model.topic_replicas import topic_replicas
from tidelog.runtime.steps import Steps

STEP_PARTITIONS: Final = 5_000
"""Partitions looked at in one step: each takes some microseconds."""


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


def picture_of(image: Image, loads: LoadTable, now_s: float, pinned: Collection[PartitionKey] = ()) -> Steps[Picture]:
    """Make the picture of the cluster as it is now. `pinned` partitions are not moved."""
    masters = takers(image)
    racked = all(master.rack for master in masters.values())
    places = [
        Target(each, master.rack if racked else "", image.replica_count(each)) for each, master in masters.items()
    ]
    largest = max((each.replicas for each in places), default=0)
    needed = {topic_id: min(topic_replicas(image.kv, topic_id), largest) for topic_id in image.topics}
    reports = {master.id: loads.get(master.id, now_s) for master in masters.values()}
    owned: dict[int, list[PartitionRecord]] = {each: [] for each in masters}
    for record in image.all_partitions():
        if record.replica_set in owned:
            owned[record.replica_set].append(record)
    yield
    pieces: list[Piece] = []
    led: dict[int, list[PartitionRecord]] = {}
    for place, master in masters.items():
        led.setdefault(master.id, []).extend(owned[place])
    rates_of: dict[int, dict[PartitionKey, Rates]] = {}
    for broker_id, report in reports.items():
        if report is not None:
            rates_of[broker_id] = partition_loads(report, led[broker_id])
            yield
    for place, master in masters.items():
        rates = rates_of.get(master.id, {})
        left = iter(owned[place])
        while some := list(islice(left, STEP_PARTITIONS)):
            for record in some:
                key = (record.topic_id, record.index)
                moves = record.target != NO_REPLICA_SET
                at = record.target if moves else place
                if at in owned:
                    movable = not moves and key not in pinned
                    pieces.append(Piece(key, at, rates.get(key, Rates()), movable, needed.get(key[0], 0)))
            yield
    unmeasured = [place for place, master in masters.items() if master.id not in rates_of]
    return Picture(places, pieces, unmeasured)
