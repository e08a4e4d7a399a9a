"""What a balancer's plan is made of: brokers that take partitions, and the partitions on them with what they carry.

A `Picture` is taken from an image and the newest load reports, and nothing in it changes afterwards. A partition that
moves counts where it goes to. What is on brokers that are dead or drain is left out: failovers and drains deal with it.

Racks count only if every broker of the picture names one (Kafka: broker.rack); else all are taken to be in one.
Entry: `picture_of`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from controller.image import Image
from controller.load import LoadTable, Rates, partition_loads
from controller.model import NO_REPLICA_SET, BrokerRecord, PartitionRecord

Key = tuple[bytes, int]


class Place(NamedTuple):
    """A replica set whose master is alive and does not drain."""

    id: int
    rack: str


class Piece(NamedTuple):
    """A partition."""

    key: Key
    place: int
    load: Rates
    movable: bool


class Picture(NamedTuple):
    """See the module."""

    places: list[Place]
    pieces: list[Piece]
    unmeasured: list[int]
    """Places without a fresh report: then nothing is known of anybody's share."""


def takers(image: Image) -> dict[int, BrokerRecord]:
    """The brokers that may be given partitions, by replica set, in order."""
    found = {each: image.master_of(each) for each in sorted(image.replica_sets)}
    return {each: master for each, master in found.items() if master is not None and not master.draining}


def picture_of(image: Image, loads: LoadTable, now_s: float, pinned: Collection[Key] = ()) -> Picture:
    """The cluster now. `pinned` partitions are not to be moved."""
    masters = takers(image)
    racked = all(master.rack for master in masters.values())
    places = [Place(each, master.rack if racked else "") for each, master in masters.items()]
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
