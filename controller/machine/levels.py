"""The command that raises the feature level, and what is known of the levels that brokers support.

Invariants: the level never decreases; it is raised only when every registered broker and every published controller has
said that it supports the new one; the decision depends on nothing that a member of an older version forgets.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import RegisterBroker, SetLevel, levels_of, require_member
from tidelog.controller.model.levels import (
    BEFORE_LEVELS,
    LevelRange,
    UnsupportedLevel,
    level_key,
    range_in,
    require_all,
    require_known,
    told_range,
)
from tidelog.controller.model.records import ClusterRecord
from tidelog.runtime.errors import InvalidInput


def set_level(tables: Tables, command: SetLevel) -> int:
    """See `SetLevel`. Raises `UnsupportedLevel`; `NewerLevel` if the level is in force and this process must end."""
    row = tables.cluster.get("")
    assert row is not None  # created by the first command
    if command.level == row.level:
        return row.level
    if command.level < row.level:
        raise UnsupportedLevel(f"the cluster is at feature level {row.level}, which is not lowered to {command.level}")
    if command.elapsed_ms < 0:
        raise InvalidInput(f"a term cannot have begun {command.elapsed_ms} ms ago")
    require_all(command.level, _ranges(tables, row, command))
    require_known(command.level, "the cluster, raised by a command of the replicated log,")
    raised = msgspec.structs.replace(row, level=command.level)
    if row.level == 0:
        # What members of before would have dropped begins here, from what all of them kept.
        raised = msgspec.structs.replace(raised, active_since_ms=max(0, tables.time_ms - command.elapsed_ms))
    tables.cluster.put("", raised)
    return raised.level


def _ranges(tables: Tables, row: ClusterRecord, command: SetLevel) -> dict[str, LevelRange]:
    told = {node_id: LevelRange(oldest, newest) for node_id, oldest, newest in command.controllers}
    ranges = {f"controller {node_id}": told.get(node_id, BEFORE_LEVELS) for node_id, _ in row.controllers}
    for broker in sorted(tables.brokers.values(), key=lambda each: each.id):
        value = tables.kv.get(level_key(broker.id))
        ranges[f"broker {broker.id}"] = range_in(value, broker.registration_epoch)
    return ranges


def note_broker_levels(tables: Tables, command: RegisterBroker, registration_epoch: int) -> None:
    """Keep what a registered broker supports, if it told."""
    if command.newest_level >= 0:
        tables.kv.put(level_key(command.broker_id), told_range(registration_epoch, levels_of(command)))


def check_broker_level(tables: Tables, command: RegisterBroker) -> None:
    """Refuse a broker that says that it does not support the cluster's level. Raises `UnsupportedLevel`.

    One that says nothing is refused before its command is proposed; in the log it is of a build between levels 0 and 1.
    """
    row = tables.cluster.get("")
    if row is not None and command.newest_level >= 0:
        require_member(command, row.level)
