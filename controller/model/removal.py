"""Why a broker cannot be removed now: a pure function of the metadata, for the controllers and for who asks them.

Entry: `removal_refusal`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.controller.model.errors import BrokerNotDrained
from tidelog.controller.model.records import BrokerRecord, DrainMode
from tidelog.controller.model.replication import ReplicationRecord


def removal_refusal(
    record: BrokerRecord, owned: int, incoming: int, *, is_led: bool, replication: Iterable[ReplicationRecord]
) -> BrokerNotDrained | None:
    """Return the error with which the removal of a broker is refused; None: it can be removed.

    `owned`, `incoming`: the partitions that its home set has, and those that are moving to it. `is_led`: whether that
    set has a living master, which may be another broker. `replication`: of all replica sets.
    """
    drain, can_drain = f"`tidelog broker drain {record.id}`", record.alive or is_led
    if owned:
        return BrokerNotDrained(
            f"broker {record.id} owns {owned} partitions"
            + ("" if can_drain else ", and it is dead: its WAL holds their records that are not uploaded"),
            hint=f"{drain} moves them" + ("" if can_drain else "; start the broker for that"),
        )
    if incoming:
        return BrokerNotDrained(f"{incoming} partitions are moving to broker {record.id}", hint="drain it first")
    if record.alive and record.draining != DrainMode.OPERATOR:
        return BrokerNotDrained(
            f"broker {record.id} is alive, and partitions may be placed on it at any time", hint=f"{drain} first"
        )
    others = (row for row in replication if row.id != record.id and record.id in row.assigned)
    joined = sorted(row.id for row in others if row.replica(record.id) is not None)
    if joined:
        return BrokerNotDrained(
            f"broker {record.id} has replicas of replica sets {joined}",
            hint=f"{drain} has them replaced; it leaves these sets when others are in sync",
        )
    return None
