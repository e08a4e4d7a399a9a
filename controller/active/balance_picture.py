"""Input of a balancer's plan: the brokers that take partitions, their partitions, and the load of these.

A `Picture` is made from an image and the newest load reports, and is immutable. A moving partition counts at its
target. Partitions of dead and draining brokers are left out: failovers and drains move them.

Racks count only if every broker of the picture names one (Kafka: broker.rack); otherwise all brokers count as one rack.
Entry: `picture_of`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tidelog.controller.image.image import Image
from tidelog.controller.model.load import LoadTable, Rates, partition_loads
from tidelog.controller.model.records import NO_REPLICA_SET, BrokerRecord, PartitionKey, PartitionRecord


class Target(NamedTuple):
    """A replica set whose master is alive and not draining."""

    id: int
    rack: str


class Piece(NamedTuple):
    """A partition."""

    key: PartitionKey
    place: int
    load: Rates
    movable: bool


class Picture(NamedTuple):
    """Immutable input of `make_plan`; see the module docstring."""

    places: list[Target]
    pieces: list[Piece]
    unmeasured: list[int]
    """Replica sets without a fresh report; if there are any, no partition's load is known."""


def takers(image: Image) -> dict[int, BrokerRecord]:
    """Return the brokers that may be given partitions, by replica set, in order."""
    found = {each: image.master_of(each) for each in sorted(image.replica_sets)}
    return {each: master for each, master in found.items() if master is not None and not master.draining}


def picture_of(image: Image, loads: LoadTable, now_s: float, pinned: Collection[PartitionKey] = ()) -> Picture:
    """Return the current picture of the cluster. `pinned` partitions are not moved."""
    masters = takers(image)
    racked = all(master.rack for master in masters.values())
    places = [Target(each, master.rack if racked else "") for each, master in masters.items()]
    owned: dict[int, list[PartitionRecord]] = {each: [] for each in masters}
    for record in image.all_partitions():
        if record.replica_set in owned:
            owned[record.replica_set].append(record)
    pieces: list[Piece] = []
    unmeasured: list[int] = []
    for place, master in masters.items():
        report = loads.get(master.id, now_s)
        if report is None:
            unmeasured.append(place)
            rates = {}
        else:
            rates = partition_loads(report, owned[place])
        for record in owned[place]:
            key = (record.topic_id, record.index)
            moves = record.target != NO_REPLICA_SET
            at = record.target if moves else place
            if at in owned:
                pieces.append(Piece(key, at, rates.get(key, Rates()), not moves and key not in pinned))
    return Picture(places, pieces, unmeasured)
