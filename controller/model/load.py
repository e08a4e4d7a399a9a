"""Measured load of brokers: the reports in heartbeats, and the controller's table of them.

A report is bounded: the totals of the broker, and the `MAX_HEAVIEST` partitions with the highest rates. The remaining
load is attributed evenly to the other partitions (`partition_loads`), so the cost does not grow with the number of
partitions. Reports go to every controller with the heartbeats, so that a new active controller has them. They are soft
state: never replicated, discarded after `STALE_S`.

All values are integers: bytes per second, thousandths of a request per second, thousandths of a processor core.
Entry: `LoadTable`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tidelog.controller.model.records import PartitionRecord

MAX_HEAVIEST = 256
"""Partitions in one report: about 5 KiB."""
STALE_S = 10.0
"""Age at which a report is ignored."""


class PartitionLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One partition's rates at its leader."""

    stream: int
    """The partition's first stream id (`PartitionRecord.first_stream`)."""
    bytes_in: int
    """Record batches appended, in bytes per second."""
    bytes_out: int
    """Record batches sent to consumers, in bytes per second."""
    requests: int
    """Produce and Fetch requests with records of the partition, in thousandths per second."""


class BrokerLoad(msgspec.Struct, frozen=True, array_like=True):
    """One broker's rates. The totals include `heaviest`."""

    bytes_in: int
    bytes_out: int
    requests: int
    cpu: int
    """Processor time of the process, in thousandths of a core."""
    heaviest: tuple[PartitionLoad, ...] = ()


class HeartbeatReply(msgspec.Struct, frozen=True, array_like=True):
    """The active controller's reply to a heartbeat, for every broker's metrics; other controllers reply nil."""

    wanted_brokers: int
    """See `tidelog.controller.active.scale`."""
    brokers: int
    """Brokers that are alive and not draining."""
    planned_moves: int
    """Moves that the balancer would make, or has yet to make."""
    balancer_moves: int
    """Moves that it has issued since this controller became active."""
    read_grace_ms: int = 0
    """For how long after this heartbeat was sent the broker may read from the bucket without another answer; 0: an
    older controller, which does not wait for readers."""
    version: int = 0
    """The metadata version of the active controller; 0: an older one, which does not tell it."""
    hand_overs: tuple[int, ...] = ()
    """Replica sets that this broker leads, and whose preferred masters will be elected in a few seconds."""


class Rates(NamedTuple):
    """Estimated load of a partition; units as in `PartitionLoad`."""

    bytes_in: float = 0.0
    bytes_out: float = 0.0
    requests: float = 0.0


class _Noted(NamedTuple):
    registration_epoch: int
    load: BrokerLoad
    at_s: float


class LoadTable:
    """The newest report of each broker. Times are seconds of a monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}

    def note(self, broker_id: int, registration_epoch: int, load: BrokerLoad, now_s: float) -> None:
        """Store a report. Partitions beyond the bound are dropped and count as part of the remaining load."""
        if len(load.heaviest) > MAX_HEAVIEST:
            load = msgspec.structs.replace(load, heaviest=load.heaviest[:MAX_HEAVIEST])
        self._noted[broker_id] = _Noted(registration_epoch, load, now_s)

    def keep(self, broker_ids: Iterable[int]) -> None:
        """Discard the reports of all other brokers."""
        for gone in set(self._noted) - set(broker_ids):
            del self._noted[gone]

    def get(self, broker_id: int, now_s: float) -> BrokerLoad | None:
        """Return the newest report if it is not stale."""
        noted = self._noted.get(broker_id)
        return noted.load if noted is not None and now_s - noted.at_s <= STALE_S else None


def partition_loads(load: BrokerLoad, owned: Iterable[PartitionRecord]) -> dict[tuple[bytes, int], Rates]:
    """Return the load of each of a broker's partitions. The sum is the broker's total, if it owns any partition."""
    named = {one.stream: one for one in load.heaviest}
    found: dict[tuple[bytes, int], Rates] = {}
    others: list[tuple[bytes, int]] = []
    left = Rates(load.bytes_in, load.bytes_out, load.requests)
    for record in owned:
        one = named.get(record.first_stream)
        key = (record.topic_id, record.index)
        if one is None:
            others.append(key)
            continue
        found[key] = Rates(one.bytes_in, one.bytes_out, one.requests)
        left = Rates(left.bytes_in - one.bytes_in, left.bytes_out - one.bytes_out, left.requests - one.requests)
    if others:
        share = Rates(*(max(0.0, total) / len(others) for total in left))
        found.update(dict.fromkeys(others, share))
    return found
