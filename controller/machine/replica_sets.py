"""Commands about the members of replica sets: SyncStateSet, policy, replicas, priorities.

The rules are in docs/design/0015-hot-tier.md, section 1.

Invariants: SyncStateSet and write quorum change together, by the master of the present epoch only, and their epoch
grows by one each time; the master stays in; a member of the SyncStateSet is a broker *and* the WAL with which it
joined. A replica that leaves the set has left the SyncStateSet before. Every broker with a replica is assigned one. The
home broker stays a member: it alone can be elected when the set has one member again.

Elections are in `tidelog.controller.machine.replica_elections`.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.replica_elections import (
    MAX_OFFSET,
    ReplicaSetRows,
    advance,
    check_wal_id,
    current_broker,
    rows_of,
)
from tidelog.controller.machine.tables import Tables
from tidelog.controller.machine.wal_notes import known_note, raise_note
from tidelog.controller.model.errors import ConfigsChanged, ConfigurationRefused, NotEligible
from tidelog.controller.model.levels import EMPTY_COPY_LEVEL
from tidelog.controller.model.records import BUCKET_WAL, NO_BROKER, BrokerRecord, ReplicaSetRecord
from tidelog.controller.model.replica_set_commands import (
    AddReplica,
    AlterSyncStateSet,
    AssignReplica,
    RemoveReplica,
    RetireReplica,
    SetPriority,
    SetReplicaSetPolicy,
    TellPriority,
)
from tidelog.controller.model.replication import InSyncRecord, ReplicaRecord, ReplicationRecord, has_several
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.policy import MAX_REPLICAS


def _record(tables: Tables, replica_set_id: int) -> ReplicaSetRecord:
    record = tables.replica_sets.get(replica_set_id)
    if record is None:
        raise NotFound(f"there is no replica set {replica_set_id}", hint="`tidelog replica-set list` shows them")
    return record


# --- the SyncStateSet ------------------------------------------------------------------------------------------------


def alter_sync_state_set(tables: Tables, command: AlterSyncStateSet) -> ReplicaSetRecord:
    """See `AlterSyncStateSet`.

    Raises `ConfigurationRefused` if the epochs are current; else `NotFound`, `NotEligible`, `Fenced`,
    `StaleBrokerEpoch`, `InvalidInput`.
    """
    found = rows_of(tables, command.replica_set_id)
    record, present = found.record, found.configuration
    current_broker(tables, command.broker_id, command.registration_epoch)
    if (record.master, record.master_epoch) != (command.broker_id, command.master_epoch):
        raise Fenced(
            f"broker {command.broker_id} is not the master of replica set {record.id} in epoch {command.master_epoch}:"
            f" broker {record.master} is, in epoch {record.master_epoch}"
        )
    wanted = _wanted(command)
    if wanted.same_terms(present) and command.sync_state_set_epoch == present.number - 1:
        return record
    if command.sync_state_set_epoch != present.number:
        raise Fenced(
            f"sync-state set epoch {command.sync_state_set_epoch} of replica set {record.id} is over: {present.number}"
        )
    _check_members(tables, found, wanted)
    _check_quorum(found.row, wanted)
    changed = msgspec.structs.replace(
        found.row, quorum=wanted.quorum, in_sync=tuple(_reported(found.row, command, each) for each in wanted.members)
    )
    changed = msgspec.structs.replace(changed, in_sync=tuple(sorted(changed.in_sync, key=lambda each: each.broker_id)))
    tables.replication.put(record.id, changed)
    if wanted.same_terms(present):
        return record
    altered = msgspec.structs.replace(
        record,
        sync_state_set=tuple(each.broker_id for each in changed.in_sync),
        sync_state_set_epoch=record.sync_state_set_epoch + 1,
    )
    tables.replica_sets.put(record.id, altered)
    return altered


def _wanted(command: AlterSyncStateSet) -> SetConfiguration:
    members = command.members
    if not 0 < len(members) <= MAX_REPLICAS or len({each.broker_id for each in members}) < len(members):
        raise InvalidInput(f"a sync-state set has 1 to {MAX_REPLICAS} members, each broker once")
    if not 1 <= command.quorum <= len(members):
        raise InvalidInput(f"a write quorum of {command.quorum} among {len(members)} members is not possible")
    if any(each.end_offset > MAX_OFFSET for each in members) or command.confirm_offset > MAX_OFFSET:
        raise InvalidInput("a WAL offset has 63 bits")
    replicas = frozenset(WalReplica(each.broker_id, each.wal_id) for each in members)
    return SetConfiguration(command.sync_state_set_epoch, replicas, command.quorum)


def _check_members(tables: Tables, found: ReplicaSetRows, wanted: SetConfiguration) -> None:
    record, row = found
    present = found.configuration.members
    if not any(each.broker_id == record.master for each in wanted.members & present):
        raise ConfigurationRefused(
            f"the master, broker {record.master}, stays in the sync-state set, with the WAL that it has"
        )
    for member in wanted.members - present:
        joined = row.replica(member.broker_id)
        if joined is None or joined.wal_id != member.wal_id:
            raise ConfigurationRefused(
                f"broker {member.broker_id} has not joined replica set {record.id} with {member.wal_id}"
            )
        if member.broker_id in row.leaving:
            raise ConfigurationRefused(f"broker {member.broker_id} leaves replica set {record.id}")
        if joined.is_learner:
            raise ConfigurationRefused(f"broker {member.broker_id} is a learner of replica set {record.id}")
        broker = tables.brokers.get(member.broker_id)
        if broker is None or not broker.alive:
            raise ConfigurationRefused(f"broker {member.broker_id} is not alive")


def _check_quorum(row: ReplicationRecord, wanted: SetConfiguration) -> None:
    policy, size = row.policy, len(wanted.members)
    if policy.all_ack_in_sync_state_set and wanted.quorum != size:
        raise ConfigurationRefused(f"with all_ack_in_sync_state_set the write quorum is {size}, not {wanted.quorum}")
    if wanted.quorum < min(policy.min_in_sync_replicas, size):
        raise ConfigurationRefused(
            f"a write quorum of {wanted.quorum} is below min_in_sync_replicas, {policy.min_in_sync_replicas}"
        )


def _reported(row: ReplicationRecord, command: AlterSyncStateSet, member: WalReplica) -> InSyncRecord:
    """Return what is known of a member after the master's report, which takes nothing back."""
    known = next((each for each in row.in_sync if each.replica == member), InSyncRecord(*member))
    end = next(each.end_offset for each in command.members if each.broker_id == member.broker_id)
    return InSyncRecord(
        member.broker_id,
        member.wal_id,
        max(known.end_offset, end),
        max(known.confirm_offset, min(end, command.confirm_offset)),
    )


# --- policy and replicas ---------------------------------------------------------------------------------------------


def set_policy(tables: Tables, command: SetReplicaSetPolicy) -> None:
    """See `SetReplicaSetPolicy`. Raises `NotFound`, `ConfigsChanged`, `InvalidInput`."""
    record = _record(tables, command.replica_set_id)
    command.policy.checked()
    row = tables.replication.get(record.id) or ReplicationRecord(record.id)
    if command.base not in (None, row.policy):
        raise ConfigsChanged(f"the policy of replica set {record.id} was changed by somebody else meanwhile")
    tables.replication.put(record.id, _without_exchange(msgspec.structs.replace(row, policy=command.policy)))


def add_replica(tables: Tables, command: AddReplica) -> None:
    """See `AddReplica`. Raises `NotFound`, `NotEligible`, `StaleBrokerEpoch`, `InvalidInput`."""
    record = _record(tables, command.replica_set_id)
    broker = current_broker(tables, command.broker_id, command.registration_epoch)
    check_wal_id(command.wal_id)
    _check_priority(command.priority)
    row = tables.replication.get(record.id) or ReplicationRecord(record.id)
    _check_may_join(tables, record, row, broker, command)
    joined = ReplicaRecord(command.broker_id, command.wal_id, command.is_learner, command.priority)
    others = tuple(each for each in row.replicas if each.broker_id != broker.id)
    replicas = tuple(sorted((*others, joined), key=lambda each: each.broker_id))
    learning = _with(row.learning, broker.id) if command.is_learner else row.learning
    assigned = _assigned(record, row, broker.id)
    changed = msgspec.structs.replace(row, replicas=replicas, assigned=assigned, learning=learning)
    if record.members == (broker.id,) and not record.learners:
        known = next((each for each in row.in_sync if each.wal_id == joined.wal_id), None)
        only = known or InSyncRecord(broker.id, joined.wal_id)
        changed = msgspec.structs.replace(changed, quorum=1, in_sync=(only,))
    grown = _with_replicas(record, replicas)
    if tables.level >= EMPTY_COPY_LEVEL and has_several(grown) and not has_several(record):
        changed = _with_noted_end(tables, record, changed)
    tables.replication.put(record.id, changed)
    tables.replica_sets.put(record.id, grown)
    if changed.election is not None:
        advance(tables, ReplicaSetRows(grown, changed))


def _with_noted_end(tables: Tables, record: ReplicaSetRecord, row: ReplicationRecord) -> ReplicationRecord:
    """Let the end that the master of a set of one has noted count for its WAL: promises are compared with it now."""
    note = known_note(tables, record.id)
    if note is None or note.master_epoch != record.master_epoch:
        return row  # the WAL that was elected since was judged by it, and may have begun anew
    known = (msgspec.structs.replace(each, end_offset=max(each.end_offset, note.end_offset)) for each in row.in_sync)
    return msgspec.structs.replace(row, in_sync=tuple(known))


def _check_may_join(
    tables: Tables, record: ReplicaSetRecord, row: ReplicationRecord, broker: BrokerRecord, command: AddReplica
) -> None:
    if not broker.alive:
        raise NotEligible(f"broker {broker.id} is not alive")
    _check_keeps_replicas(record, broker)
    if tables.level >= EMPTY_COPY_LEVEL and broker.id != record.id and broker.id not in row.assigned:
        raise NotEligible(
            f"broker {broker.id} is to have no replica of replica set {record.id}: it was removed, or never assigned",
            hint=f"`tidelog replica-set add-member {record.id} --broker {broker.id}` assigns one",
        )
    twin = next((each for each in row.replicas if each.wal_id == command.wal_id and each.broker_id != broker.id), None)
    if twin is not None:
        raise InvalidInput(
            f"broker {broker.id} has the WAL of broker {twin.broker_id}: its directory is a copy, or was moved",
            hint="put a directory that was moved back in its place; delete only a copy, and let the broker begin with"
            " an empty WAL",
        )
    if broker.id in row.assigned and row.replica(broker.id) is None:
        is_to_learn = broker.id in row.learning
        if is_to_learn != command.is_learner:
            what = "a learner" if is_to_learn else "a member"
            raise NotEligible(f"broker {broker.id} is to be {what} of replica set {record.id}", hint="it tries again")
    elif broker.id in row.learning and not command.is_learner:
        raise NotEligible(f"broker {broker.id} is a learner of replica set {record.id}", hint="promote it first")
    member = next((each for each in row.in_sync if each.broker_id == broker.id), None)
    if command.is_learner and broker.id in record.sync_state_set:
        raise NotEligible(f"broker {broker.id} is in the sync-state set of replica set {record.id}: it is no learner")
    if command.is_learner and broker.id in record.members and tables.level >= EMPTY_COPY_LEVEL:
        raise NotEligible(f"broker {broker.id} is a member of replica set {record.id} by now", hint="it tries again")
    if has_several(record):
        if broker.id == record.master and (member is None or member.wal_id != command.wal_id):
            raise NotEligible(f"broker {broker.id} is the master of replica set {record.id} with another WAL")
    elif broker.id in record.members:
        if broker.id != record.master:
            raise NotEligible(f"broker {broker.id} is not the master of replica set {record.id}", hint="elect it first")
    elif not row.in_sync:
        raise NotEligible(
            f"the master of replica set {record.id} has not told its WAL", hint="it joins its own set first"
        )


def assign_replica(tables: Tables, command: AssignReplica) -> None:
    """See `AssignReplica`. Raises `NotFound`, `NotEligible`, `InvalidInput`."""
    record = _record(tables, command.replica_set_id)
    broker = tables.brokers.get(command.broker_id)
    if broker is None:
        raise NotFound(f"there is no broker {command.broker_id}", hint="`tidelog broker list` shows them")
    row = tables.replication.get(record.id) or ReplicationRecord(record.id)
    if command.is_learner and broker.id not in row.learning:
        if broker.id in row.assigned or broker.id in record.members:
            raise NotEligible(
                f"broker {broker.id} is a member of replica set {record.id}, and becomes no learner",
                hint=f"`tidelog replica-set remove-member {record.id} --broker {broker.id}`, then add it as a learner",
            )
        row = msgspec.structs.replace(row, learning=_with(row.learning, broker.id))
    elif not command.is_learner and broker.id in row.learning:
        record, row = _promoted(tables, record, row, broker.id)
    elif broker.id in row.assigned and broker.id not in row.leaving:
        if broker.id == row.newcomer and command.instead_of != row.replaced:
            tables.replication.put(record.id, _without_exchange(row))
        return
    _check_keeps_replicas(record, broker)
    assigned, leaving = _assigned(record, row, broker.id), _without(row.leaving, broker.id)
    row = msgspec.structs.replace(row, assigned=assigned, leaving=leaving)
    if command.instead_of != NO_BROKER:
        row = _with_exchange(record, row, command)
    tables.replication.put(record.id, row)


def _with_exchange(record: ReplicaSetRecord, row: ReplicationRecord, command: AssignReplica) -> ReplicationRecord:
    stays = {record.id, record.master, command.broker_id, *row.leaving, *row.learning}
    if command.is_learner or command.instead_of not in row.assigned or command.instead_of in stays:
        raise NotEligible(f"broker {command.instead_of} is not to be replaced in replica set {record.id}")
    if row.newcomer != NO_BROKER:
        raise NotEligible(f"broker {row.newcomer} replaces broker {row.replaced} in replica set {record.id}")
    return msgspec.structs.replace(row, newcomer=command.broker_id, replaced=command.instead_of)


def _without_exchange(row: ReplicationRecord, *leaving: int) -> ReplicationRecord:
    """Forget who replaces whom: without brokers in any case, else if one of the two leaves."""
    if leaving and not {row.newcomer, row.replaced} & {*leaving}:
        return row
    return msgspec.structs.replace(row, newcomer=NO_BROKER, replaced=NO_BROKER)


def _promoted(
    tables: Tables, record: ReplicaSetRecord, row: ReplicationRecord, broker_id: int
) -> tuple[ReplicaSetRecord, ReplicationRecord]:
    """Make a learner a member outside the SyncStateSet, with the WAL that it has; or one that has not joined yet."""
    replicas = tuple(
        msgspec.structs.replace(each, is_learner=False) if each.broker_id == broker_id else each
        for each in row.replicas
    )
    row = msgspec.structs.replace(row, replicas=replicas, learning=_without(row.learning, broker_id))
    if row.replica(broker_id) is not None:
        record = _with_replicas(record, replicas)
        tables.replica_sets.put(record.id, record)
    return record, row


def retire_replica(tables: Tables, command: RetireReplica) -> None:
    """See `RetireReplica`. Raises `NotFound`, `NotEligible`."""
    record, row = _record(tables, command.replica_set_id), tables.replication.get(command.replica_set_id)
    broker_id = command.broker_id
    if row is None or broker_id not in row.assigned:
        raise NotFound(
            f"broker {broker_id} has no replica of replica set {record.id}",
            hint=f"`tidelog replica-set describe {record.id}` shows its members",
        )
    if broker_id == record.master or record.sync_state_set == (broker_id,):
        raise NotEligible(
            f"broker {broker_id} is the master of replica set {record.id}",
            hint=f"`tidelog replica-set elect {record.id} --broker B` elects another member",
        )
    _check_not_home(record, broker_id)
    leaving = tuple(sorted({*row.leaving, broker_id}))
    if leaving != row.leaving:
        tables.replication.put(record.id, _without_exchange(msgspec.structs.replace(row, leaving=leaving), broker_id))


def _check_not_home(record: ReplicaSetRecord, broker_id: int) -> None:
    if broker_id == record.id:
        raise NotEligible(
            f"broker {broker_id} is the home of replica set {record.id}, and stays a member",
            hint=f"`tidelog broker drain {broker_id}` takes it out of use: its partitions move to other sets",
        )


def _with(brokers: tuple[int, ...], broker_id: int) -> tuple[int, ...]:
    return tuple(sorted({*brokers, broker_id}))


def _without(brokers: tuple[int, ...], broker_id: int) -> tuple[int, ...]:
    return tuple(each for each in brokers if each != broker_id)


def _check_keeps_replicas(record: ReplicaSetRecord, broker: BrokerRecord) -> None:
    if broker.wal_kind == BUCKET_WAL:
        raise NotEligible(
            f"the WAL of broker {broker.id} is in the bucket, which keeps its copies", hint="wal.kind = disk replicates"
        )
    if record.successor != NO_BROKER:
        raise NotEligible(f"replica set {record.id} is being taken over by broker {record.successor}")


def _assigned(record: ReplicaSetRecord, row: ReplicationRecord, broker_id: int) -> tuple[int, ...]:
    """Return the brokers with a replica when one more has one. Raises `InvalidInput` for too many.

    The master of a set of one counts before it has told its WAL.
    """
    others = {*row.assigned, *record.members, *record.learners} - {broker_id}
    if len(others) >= MAX_REPLICAS:
        raise InvalidInput(f"replica set {record.id} has {len(others)} replicas, and may have {MAX_REPLICAS}")
    return tuple(sorted({*row.assigned, broker_id}))


def _with_replicas(record: ReplicaSetRecord, replicas: tuple[ReplicaRecord, ...]) -> ReplicaSetRecord:
    return msgspec.structs.replace(
        record,
        members=tuple(each.broker_id for each in replicas if not each.is_learner),
        learners=tuple(each.broker_id for each in replicas if each.is_learner),
    )


def remove_replica(tables: Tables, command: RemoveReplica) -> None:
    """See `RemoveReplica`. Raises `NotFound`, `NotEligible`."""
    record, row = _record(tables, command.replica_set_id), tables.replication.get(command.replica_set_id)
    if row is None or command.broker_id not in row.assigned:
        return
    if command.broker_id in record.sync_state_set:
        raise NotEligible(
            f"broker {command.broker_id} is in the sync-state set of replica set {record.id}",
            hint="its master asks for one without it when it is to leave, or no longer follows, and the policy allows a"
            " smaller one",
        )
    _check_not_home(record, command.broker_id)
    row = msgspec.structs.replace(
        row,
        assigned=_without(row.assigned, command.broker_id),
        leaving=_without(row.leaving, command.broker_id),
        learning=_without(row.learning, command.broker_id),
        priorities=tuple(each for each in row.priorities if each[0] != command.broker_id),
    )
    row = _without_exchange(row, command.broker_id)
    if row.replica(command.broker_id) is None:
        tables.replication.put(record.id, row)
        return
    if row.election is not None:
        raise NotEligible(f"an election of replica set {record.id} is under way", hint="try again when it is over")
    replicas = tuple(each for each in row.replicas if each.broker_id != command.broker_id)
    shrunk = _with_replicas(record, replicas)
    tables.replication.put(record.id, msgspec.structs.replace(row, replicas=replicas))
    tables.replica_sets.put(record.id, shrunk)
    if tables.level >= EMPTY_COPY_LEVEL and not has_several(shrunk):
        raise_note(tables, record.id, max(each.known_end for each in row.in_sync))


# --- election priorities ---------------------------------------------------------------------------------------------


def tell_priority(tables: Tables, command: TellPriority) -> None:
    """See `TellPriority`. Raises `NotFound`, `NotEligible`, `StaleBrokerEpoch`, `InvalidInput`."""
    record, row = _record(tables, command.replica_set_id), tables.replication.get(command.replica_set_id)
    current_broker(tables, command.broker_id, command.registration_epoch)
    _check_priority(command.priority)
    joined = row.replica(command.broker_id) if row is not None else None
    if row is None or joined is None:
        raise NotEligible(f"broker {command.broker_id} has not joined replica set {record.id}", hint="it joins first")
    told = msgspec.structs.replace(joined, priority=command.priority)
    if told != joined:
        replicas = tuple(told if each.broker_id == command.broker_id else each for each in row.replicas)
        tables.replication.put(record.id, msgspec.structs.replace(row, replicas=replicas))


def set_priority(tables: Tables, command: SetPriority) -> None:
    """See `SetPriority`. Raises `NotFound`, `InvalidInput`."""
    record, row = _record(tables, command.replica_set_id), tables.replication.get(command.replica_set_id)
    if row is None or command.broker_id not in row.assigned:
        raise NotFound(
            f"broker {command.broker_id} has no replica of replica set {record.id}",
            hint=f"`tidelog replica-set describe {record.id}` shows its members",
        )
    others = {each: priority for each, priority in row.priorities if each != command.broker_id}
    if command.priority is not None:
        _check_priority(command.priority)
        others[command.broker_id] = command.priority
    changed = msgspec.structs.replace(row, priorities=tuple(sorted(others.items())))
    if changed != row:
        tables.replication.put(record.id, changed)


def _check_priority(priority: int) -> None:
    if not -(1 << 31) <= priority < 1 << 31:
        raise InvalidInput(f"a priority has 32 bits, unlike {priority}")
