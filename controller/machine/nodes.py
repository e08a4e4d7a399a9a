"""Commands about the cluster, brokers, replica sets, configs, keys and producer ids.

Invariant: epochs (registration, master, SyncStateSet) never decrease; each new one is the previous one plus one. This
is the sans-I/O part of registration, and of election (docs/protocols.md) for replica sets of one member; those of
several elect by promises (`tidelog.controller.machine.replica_elections`). A master is elected only from the
SyncStateSet.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tidelog.controller.machine.levels import check_broker_level, note_broker_levels
from tidelog.controller.machine.replica_elections import broker_died, broker_replaced
from tidelog.controller.machine.tables import Tables
from tidelog.controller.machine.wal_notes import check_wal_change
from tidelog.controller.model.addresses import MAX_PORT, is_address
from tidelog.controller.model.commands import (
    MAX_CONFIG_ENTRIES,
    MAX_CONFIG_VALUE_CHARS,
    MAX_KEY_CHARS,
    MAX_TEXT_CHARS,
    MAX_VALUE_BYTES,
    PRODUCER_ID_BLOCK,
    AllocateProducerIds,
    AlterConfigs,
    ApplyBrokerId,
    BecomeActive,
    DeleteKv,
    Elect,
    PutKv,
    RegisterBroker,
    SetBrokerAlive,
    SetControllers,
)
from tidelog.controller.model.configs import ANY, digest
from tidelog.controller.model.errors import (
    BrokerIdInUse,
    ConfigsChanged,
    DirectoryInUse,
    NotController,
    NotEligible,
    StaleBrokerEpoch,
)
from tidelog.controller.model.levels import NAMED_CONFIGS_LEVEL
from tidelog.controller.model.records import NO_BROKER, BrokerRecord, ClusterRecord, DrainMode, ReplicaSetRecord
from tidelog.controller.model.replication import has_several
from tidelog.runtime.errors import InvalidInput, NotFound

MAX_BROKER_ID = 0x7FFF_FFFF
CONFIG_KINDS = frozenset({"broker", "cluster"})
NAMED_KINDS = frozenset({"client-metrics", "group"})
"""Kinds of configs from feature level `NAMED_CONFIGS_LEVEL` on."""
IDS = "broker"
"""The counter of broker ids. It is above every id that was registered or allocated."""
_APPLIED = "broker-id/"
"""Prefix of the keys, by check code, of ids that are allocated and not yet registered."""


def become_active(tables: Tables, command: BecomeActive) -> None:
    """Start a controller's term. Raises `NotController` for a term that is not newer.

    A term has one leader. A second command of the same term means that the first one took effect and its result was
    lost; the controller is already active.
    """
    row = tables.cluster.get("")
    if row is not None and (command.node_id, command.term) == (row.active_node, row.active_term):
        return
    if row is not None and command.term <= row.active_term:
        raise NotController(f"term {command.term} is over; term {row.active_term} is active")
    cluster_id = row.id if row is not None else command.cluster_id
    controllers = row.controllers if row is not None else ()
    # The first command of a cluster founds it at the level that it was written at.
    level = max(row.level if row is not None else 0, tables.level)
    since_ms = tables.time_ms if level >= 1 else 0
    tables.cluster.put(
        "",
        ClusterRecord(cluster_id, command.node_id, command.term, command.delete_delay_ms, controllers, since_ms, level),
    )


def set_controllers(tables: Tables, command: SetControllers) -> None:
    """Publish the quorum for brokers. Raft keeps its own copy."""
    row = tables.cluster.get("")
    assert row is not None  # created by the first command
    tables.cluster.put("", msgspec.structs.replace(row, controllers=command.controllers))


def register_broker(tables: Tables, command: RegisterBroker) -> int:
    """Register the process of a broker; see `RegisterBroker`.

    Raises `BrokerIdInUse`, `DirectoryInUse`, `UnsupportedLevel`, `WalNotCommitted`, `InvalidInput`.
    """
    names = (command.check_code, command.incarnation, command.rack, command.wal_kind)
    addresses = (command.host, command.admin_url, command.peer_address)
    for text in (*names, *addresses, command.directory):
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidInput(f"a field of broker {command.broker_id} has more than {MAX_TEXT_CHARS} characters")
    if not 0 <= command.port <= MAX_PORT:
        raise InvalidInput(f"broker {command.broker_id} listens at port {command.port}, which is not in 0..{MAX_PORT}")
    if command.peer_address and not is_address(command.peer_address):
        raise InvalidInput(
            f"broker {command.broker_id} has the peer address {command.peer_address!r}, which is not HOST:PORT",
            hint="check kafka.peer_advertised_host and kafka.peer_port of that broker",
        )
    if not 0 <= command.broker_id <= MAX_BROKER_ID:
        raise InvalidInput(f"broker id {command.broker_id} is not in 0..2147483647")
    old = tables.brokers.get(command.broker_id)
    if old is not None and old.check_code != command.check_code and old.alive:
        raise BrokerIdInUse(
            f"broker id {command.broker_id} belongs to a live broker at {old.host}:{old.port}",
            hint="give this broker another node id, or stop the other one",
        )
    if old is not None and old.alive and "" not in (old.directory, command.directory):
        _check_directory(old, command)
    if tables.level >= 1:
        check_broker_level(tables, command)
        check_wal_change(tables, command)
    tables.counters.put(IDS, max(tables.counters.get(IDS) or 1, command.broker_id + 1))
    tables.kv.delete(_APPLIED + command.check_code)
    kept = recall(tables, command.broker_id)
    epoch = kept.registration_epoch + 1 if old is None else old.registration_epoch
    if old is not None and (old.incarnation, old.check_code) != (command.incarnation, command.check_code):
        epoch += 1
    record = BrokerRecord(
        id=command.broker_id,
        check_code=command.check_code,
        host=command.host,
        port=command.port,
        rack=command.rack,
        admin_url=command.admin_url,
        incarnation=command.incarnation,
        registration_epoch=epoch,
        alive=True,
        draining=_still_draining(old, epoch),
        wal_kind=command.wal_kind,
        peer_address=command.peer_address,
        directory=command.directory,
    )
    tables.brokers.put(record.id, record)
    if tables.replica_sets.get(record.id) is None:
        members = (record.id,)
        fresh = ReplicaSetRecord(
            record.id,
            members,
            (),
            NO_BROKER,
            kept.master_epoch,
            members,
            kept.sync_state_set_epoch,
            kept.committed_wal_offset,
        )
        tables.replica_sets.put(record.id, fresh)
    if tables.level >= 1:
        note_broker_levels(tables, command, epoch)
    if old is not None and epoch != old.registration_epoch:
        broker_replaced(tables, record.id)
    return epoch


def _check_directory(old: BrokerRecord, command: RegisterBroker) -> None:
    """Refuse a copy of a data directory while a live broker uses the original; they would fence each other forever."""
    if old.directory != command.directory:
        raise DirectoryInUse(
            f"broker {old.id} runs at {old.host}:{old.port} over another copy of this data directory",
            hint="to use this copy, stop that broker first; otherwise delete the copy",
        )


def apply_broker_id(tables: Tables, command: ApplyBrokerId) -> int:
    """See `ApplyBrokerId`. Raises `InvalidInput`."""
    if not 0 < len(command.check_code) <= MAX_TEXT_CHARS:
        raise InvalidInput(f"a check code has 1 to {MAX_TEXT_CHARS} characters")
    for broker in tables.brokers.values():
        if broker.check_code == command.check_code:
            return broker.id
    key = _APPLIED + command.check_code
    given = tables.kv.get(key)
    if given is not None:
        return int(given)
    cluster = tables.cluster.get("")
    taken = [each for each, _ in cluster.controllers] if cluster is not None else []
    taken += [broker.id for broker in tables.brokers.values()]
    found = max([tables.counters.get(IDS) or 1, *(each + 1 for each in taken)])
    if found > MAX_BROKER_ID:
        raise InvalidInput("no broker id is left", hint="set node.id to one that is not in use")
    tables.counters.put(IDS, found + 1)
    tables.kv.put(key, b"%d" % found)
    return found


def _still_draining(old: BrokerRecord | None, epoch: int) -> int:
    """Return the drain mode after a registration: a drain until the process stops ends when a new process registers."""
    if old is None or (old.draining == DrainMode.SHUTDOWN and epoch != old.registration_epoch):
        return DrainMode.NONE
    return old.draining


class Kept(NamedTuple):
    """Numbers kept of a removed broker, which must not decrease if a broker with its id registers again."""

    registration_epoch: int = 0
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    committed_wal_offset: int = 0


def recall(tables: Tables, broker_id: int) -> Kept:
    """Return the numbers kept of a broker id that was in use, or zeros for an id that never was."""
    found = (tables.counters.get(f"removed/{broker_id}/{name}") for name in Kept._fields)
    return Kept(*(value or 0 for value in found))


def keep(tables: Tables, broker_id: int, kept: Kept) -> None:
    """Store the numbers that `recall` returns."""
    for name, value in kept._asdict().items():
        tables.counters.put(f"removed/{broker_id}/{name}", value)


def set_broker_alive(tables: Tables, command: SetBrokerAlive) -> None:
    """Record that a session began or ended. A late event of an earlier registration changes nothing."""
    record = tables.brokers.get(command.broker_id)
    if record is not None and record.registration_epoch == command.registration_epoch:
        tables.brokers.put(record.id, msgspec.structs.replace(record, alive=command.alive))
        if not command.alive:
            broker_died(tables, record.id)


def elect(tables: Tables, command: Elect) -> ReplicaSetRecord:
    """Give the replica set a master with the next epoch. Raises `NotFound`, `NotEligible`."""
    record = tables.replica_sets.get(command.replica_set_id)
    if record is None:
        raise NotFound(f"there is no replica set {command.replica_set_id}")
    broker = tables.brokers.get(command.broker_id)
    if broker is None or not broker.alive:
        raise NotEligible(f"broker {command.broker_id} is not alive")
    if command.broker_id not in record.sync_state_set:
        raise NotEligible(
            f"broker {command.broker_id} is not in the sync-state set {list(record.sync_state_set)} "
            f"of replica set {record.id}"
        )
    if has_several(record):
        raise NotEligible(
            f"replica set {record.id} has several members: their promises elect",
            hint=f"`tidelog replica-set elect {record.id}` begins an election",
        )
    elected = msgspec.structs.replace(
        record,
        master=command.broker_id,
        master_epoch=record.master_epoch + 1,
        sync_state_set_epoch=record.sync_state_set_epoch + 1,
        successor=NO_BROKER,  # the master is back: end the takeover
        takeover_since_ms=0,
    )
    tables.replica_sets.put(record.id, elected)
    return elected


def check_configs(configs: dict[str, str]) -> None:
    """Check the bounds of a set of overrides. Raises `InvalidInput`."""
    if len(configs) > MAX_CONFIG_ENTRIES:
        raise InvalidInput(f"{len(configs)} overrides exceed the limit of {MAX_CONFIG_ENTRIES}")
    for key, value in configs.items():
        if not 0 < len(key) <= MAX_KEY_CHARS or len(value) > MAX_CONFIG_VALUE_CHARS:
            raise InvalidInput(f"override {key[:MAX_KEY_CHARS]!r} is empty or too long")


def check_base(what: str, configs: dict[str, str], base: bytes) -> None:
    """Check that configs are those that a change was computed from. Raises `ConfigsChanged`."""
    if base != ANY and base != digest(configs):
        raise ConfigsChanged(
            f"the configs of {what} were changed by somebody else meanwhile", hint="look at them, and try again"
        )


def merged_configs(old: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    """Return `old` with the changes applied (None removes), sorted by key: equal content has equal bytes."""
    merged: dict[str, str | None] = {**old, **changes}
    kept = {key: value for key, value in sorted(merged.items()) if value is not None}
    check_configs(kept)
    return kept


def alter_configs(tables: Tables, command: AlterConfigs) -> None:
    """Change dynamic overrides. Raises `ConfigsChanged`, `InvalidInput`."""
    kinds = CONFIG_KINDS | NAMED_KINDS if tables.level >= NAMED_CONFIGS_LEVEL else CONFIG_KINDS
    if command.kind not in kinds or len(command.name) > MAX_KEY_CHARS:
        raise InvalidInput(
            f"there are no configs of kind {command.kind[:MAX_KEY_CHARS]!r}, or the name is longer than {MAX_KEY_CHARS}"
        )
    key = (command.kind, command.name)
    current = tables.configs.get(key) or {}
    check_base(f"{command.kind} {command.name}".rstrip(), current, command.base)
    merged = merged_configs(current, command.changes)
    if merged:
        tables.configs.put(key, merged)
    else:
        tables.configs.delete(key)


def put_kv(tables: Tables, command: PutKv) -> None:
    """Write one key. Raises `InvalidInput`."""
    if not 0 < len(command.key) <= MAX_KEY_CHARS or len(command.value) > MAX_VALUE_BYTES:
        raise InvalidInput(f"key {command.key[:MAX_KEY_CHARS]!r} or its value is empty or too long")
    tables.kv.put(command.key, command.value)


def delete_kv(tables: Tables, command: DeleteKv) -> None:
    """Remove one key."""
    tables.kv.delete(command.key)


def allocate_producer_ids(tables: Tables, command: AllocateProducerIds) -> tuple[int, int]:
    """Allocate a block of producer ids that is never allocated again. Raises `StaleBrokerEpoch`."""
    broker = tables.brokers.get(command.broker_id)
    if broker is None or broker.registration_epoch != command.registration_epoch:
        raise StaleBrokerEpoch(
            f"registration {command.registration_epoch} of broker {command.broker_id} is not current"
        )
    return tables.take_ids("producer", PRODUCER_ID_BLOCK, 0), PRODUCER_ID_BLOCK
