"""Measured load of brokers: what rides in heartbeats, and what a controller remembers of it.

A report is bounded: totals of the broker, and the `MAX_HEAVIEST` partitions that carry most by themselves; the others'
share is the difference, spread evenly over them (`partition_loads`). So 10,000 partitions cost no more than the
busiest of them. Reports go to every controller with the heartbeats, so that the next active one knows them already.
They are soft state: never replicated, gone after `STALE_S`.

Whole numbers only: bytes a second, thousandths of a request a second, thousandths of one processor core.
Entry: `LoadTable`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from controller.model import PartitionRecord

MAX_HEAVIEST = 256
"""Partitions named in one report: about 5 KiB."""
STALE_S = 10.0
"""A report that is older says nothing any more."""


class PartitionLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One partition's rates at its leader."""

    stream: int
    """The partition's first stream id (`PartitionRecord.first_stream`)."""
    bytes_in: int
    """Of record batches appended, a second."""
    bytes_out: int
    """Of record batches sent to consumers, a second."""
    requests: int
    """Produce and Fetch requests that carried records of it, in thousandths a second."""


class BrokerLoad(msgspec.Struct, frozen=True, array_like=True):
    """One broker's rates, `heaviest` contained in the totals."""

    bytes_in: int
    bytes_out: int
    requests: int
    cpu: int
    """Of the process, in thousandths of a core."""
    heaviest: tuple[PartitionLoad, ...] = ()


class HeartbeatReply(msgspec.Struct, frozen=True, array_like=True):
    """What the active controller tells with each heartbeat; others answer nil. For every broker's metrics."""

    wanted_brokers: int
    """See `controller.scale`."""
    brokers: int
    """Alive and not draining."""
    planned_moves: int
    """That the balancer would make, or has yet to make."""
    balancer_moves: int
    """That it has issued since this controller became active."""


class Rates(NamedTuple):
    """What a partition is taken to carry; units as in `PartitionLoad`."""

    bytes_in: float = 0.0
    bytes_out: float = 0.0
    requests: float = 0.0


class _Noted(NamedTuple):
    registration_epoch: int
    load: BrokerLoad
    at_s: float


class LoadTable:
    """The newest report of each broker. Times are seconds of a monotonic clock, passed in."""

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}

    def note(self, broker_id: int, registration_epoch: int, load: BrokerLoad, now_s: float) -> None:
        """Take a report over; what goes beyond the bound is dropped and counts as the others' share."""
        if len(load.heaviest) > MAX_HEAVIEST:
            load = msgspec.structs.replace(load, heaviest=load.heaviest[:MAX_HEAVIEST])
        self._noted[broker_id] = _Noted(registration_epoch, load, now_s)

    def keep(self, broker_ids: Iterable[int]) -> None:
        """Forget all others."""
        for gone in set(self._noted) - set(broker_ids):
            del self._noted[gone]

    def get(self, broker_id: int, now_s: float) -> BrokerLoad | None:
        """The newest report, if it is not stale."""
        noted = self._noted.get(broker_id)
        return noted.load if noted is not None and now_s - noted.at_s <= STALE_S else None


def partition_loads(load: BrokerLoad, owned: Iterable[PartitionRecord]) -> dict[tuple[bytes, int], Rates]:
    """What each of a broker's partitions carries, by this report. The sum is the broker's total, if it owns any."""
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
