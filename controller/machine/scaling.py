"""Commands that take brokers out of use: drain, restart and remove.

A drain is a mark on the broker's record: no new partition is placed on the broker, and the active controller moves the
ones that it owns (`tidelog.controller.active.drain_plan`), or lets other members lead them
(`tidelog.controller.active.masters`). A broker is removed only when its home set owns nothing, and it has no replica of
another set, so its removal loses nothing. Of a removed broker only numbers are kept
(`tidelog.controller.machine.nodes.Kept`), so that epochs do not decrease when its id is used again.

A restart is a drain that begins only while the cluster can do without the broker
(`tidelog.controller.model.restart`). Decided here, so that no two brokers are restarted at the same time.

All commands may be repeated: a drain in the same mode changes nothing, and a second removal finds no broker.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.moves import live_replica_set
from tidelog.controller.machine.nodes import Kept, keep
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import BeginRestart, DrainBroker, RemoveBroker
from tidelog.controller.model.errors import NoPlaceToDrain, RestartRefused, StaleBrokerEpoch
from tidelog.controller.model.levels import level_key
from tidelog.controller.model.records import NO_BROKER, BrokerRecord, DrainMode
from tidelog.controller.model.removal import removal_refusal
from tidelog.controller.model.restart import restart_hindrances
from tidelog.controller.model.wal_notes import note_key
from tidelog.runtime.errors import InvalidInput, NotFound

MAX_TOLD = 5
"""Reasons that a refusal names."""


def _broker(tables: Tables, broker_id: int) -> BrokerRecord:
    record = tables.brokers.get(broker_id)
    if record is None:
        raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")
    return record


def drain_broker(tables: Tables, command: DrainBroker) -> None:
    """See `DrainBroker`. Raises `NotFound`, `NoPlaceToDrain`, `StaleBrokerEpoch`, `InvalidInput`."""
    record = _broker(tables, command.broker_id)
    if command.mode not in tuple(DrainMode):
        raise InvalidInput(f"there is no drain mode {command.mode}")
    if command.mode == record.draining:
        return
    if command.mode == DrainMode.SHUTDOWN:
        _check_registration(record, command.registration_epoch)
        if record.draining == DrainMode.OPERATOR:
            return
    others = any(one.alive and not one.draining and one.id != record.id for one in tables.brokers.values())
    if command.mode != DrainMode.NONE and not others and _serves(tables, record.id):
        raise NoPlaceToDrain(
            f"no other broker is alive, and not draining, to take the partitions of broker {record.id}",
            hint="start or add another broker, or end the drain of one",
        )
    tables.brokers.put(record.id, msgspec.structs.replace(record, draining=command.mode))


def begin_restart(tables: Tables, command: BeginRestart) -> None:
    """See `BeginRestart`. Raises `NotFound`, `StaleBrokerEpoch`, `RestartRefused`."""
    record = _broker(tables, command.broker_id)
    _check_registration(record, command.registration_epoch)
    if record.draining == DrainMode.SHUTDOWN:
        return
    if record.draining:
        raise RestartRefused(
            f"broker {record.id} is drained by an operator",
            hint=f"stop and start its process when it is empty, or `tidelog broker drain {record.id} --cancel`",
        )
    found = restart_hindrances(
        record.id,
        sorted(tables.brokers.values(), key=lambda each: each.id),
        sorted(tables.replica_sets.values(), key=lambda each: each.id),
        tables.replication.get,
    )
    if found:
        raise RestartRefused(
            f"broker {record.id} cannot be restarted now: {'; '.join(found[:MAX_TOLD])}",
            hint="`tidelog status` and `tidelog replica-set list` show the cluster; try again when that is over",
        )
    tables.brokers.put(record.id, msgspec.structs.replace(record, draining=DrainMode.SHUTDOWN))


def _check_registration(record: BrokerRecord, registration_epoch: int) -> None:
    if registration_epoch != record.registration_epoch:
        raise StaleBrokerEpoch(f"registration {registration_epoch} of broker {record.id} is not current")


def _serves(tables: Tables, broker_id: int) -> bool:
    """Whether the broker's home set, or one that it leads, owns partitions."""
    counts = tables.index.partition_counts
    return any(broker_id in (one.id, one.master) and counts.get(one.id, 0) for one in tables.replica_sets.values())


def remove_broker(tables: Tables, command: RemoveBroker) -> None:
    """See `RemoveBroker`. Raises `NotFound`, `BrokerNotDrained`."""
    record = _broker(tables, command.broker_id)
    owned = tables.index.partition_counts.get(record.id, 0)
    incoming = sum(1 for key in tables.index.moving if _target(tables, key) == record.id)
    is_led = live_replica_set(tables, record.id) is not None
    refusal = removal_refusal(record, owned, incoming, is_led=is_led, replication=tables.replication.values())
    if refusal is not None:
        raise refusal
    replica_set = tables.replica_sets.get(record.id)
    assert replica_set is not None, record.id  # created by the registration
    _leave_other_sets(tables, record.id)
    kept = Kept(
        record.registration_epoch,
        replica_set.master_epoch,
        replica_set.sync_state_set_epoch,
        replica_set.committed_wal_offset,
    )
    keep(tables, record.id, kept)
    tables.replica_sets.delete(record.id)
    tables.replication.delete(record.id)
    tables.brokers.delete(record.id)
    tables.configs.delete(("broker", str(record.id)))
    tables.kv.delete(note_key(record.id))
    if tables.level >= 1:
        tables.kv.delete(level_key(record.id))


def _leave_other_sets(tables: Tables, broker_id: int) -> None:
    """Take back assignments of replicas that have not joined.

    The broker's own set owns nothing: it is deleted, and its other members delete their copies.
    """
    assigned = [row for row in tables.replication.values() if row.id != broker_id and broker_id in row.assigned]
    for row in assigned:
        places = (row.assigned, row.leaving, row.learning)
        stay, leaving, learning = (tuple(each for each in ids if each != broker_id) for ids in places)
        priorities = tuple(each for each in row.priorities if each[0] != broker_id)
        left = msgspec.structs.replace(row, assigned=stay, leaving=leaving, learning=learning, priorities=priorities)
        if broker_id in (row.newcomer, row.replaced):
            left = msgspec.structs.replace(left, newcomer=NO_BROKER, replaced=NO_BROKER)
        tables.replication.put(row.id, left)


def _target(tables: Tables, key: tuple[bytes, int]) -> int:
    partition = tables.partitions.get(key)
    assert partition is not None, key
    return partition.target
