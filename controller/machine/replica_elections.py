"""Elections of replica sets with several members (docs/design/0015-hot-tier.md, sections 3 and 4).

`BeginElection` ends the master's epoch; replicas promise the next one durably (`PromiseEpoch`), and the command that
brings the last promise that is needed elects. So the decision is made here, once, and rule 8 is asserted where it takes
effect: every confirmed byte is on the replica that is elected.

Invariants: an epoch has one election at most, and a master is elected in it once; a promise counts only while its
broker's registration is current; what is known of a member's WAL (`InSyncRecord`) is believed over what it says of
itself, so a disk that was lost, swapped or rolled back is a missing promise (rule 13).

`ElectUnclean` is the one exception from rule 8: an operator's, and recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tidelog.controller.machine.tables import Tables
from tidelog.controller.machine.wal_notes import keep_loss, loss_ranges, owned_partitions
from tidelog.controller.model.errors import NotEligible, StaleBrokerEpoch
from tidelog.controller.model.levels import EMPTY_COPY_LEVEL, SET_BACK_LEVEL
from tidelog.controller.model.records import NO_BROKER, BrokerRecord, ReplicaSetRecord
from tidelog.controller.model.replica_set_commands import (
    MAX_REASON_CHARS,
    MAX_WAL_ID_CHARS,
    BeginElection,
    ElectUnclean,
    PromiseEpoch,
)
from tidelog.controller.model.replication import (
    ElectionRecord,
    InSyncRecord,
    PastElectionRecord,
    PromiseRecord,
    ReplicationRecord,
    best_of,
    has_several,
    known_confirmed,
    voting,
    was_set_back,
)
from tidelog.controller.model.wal_notes import WalLoss, WalLost
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.election import Promise, elected, settled

MAX_OFFSET = (1 << 63) - 1
_LOST_HINT = (
    "its disk was rolled back, or lost what it had made durable: put back the one that was in use last, if any. A"
    " master of the set fills it anew; while there is none, empty no WAL: it may be the best copy"
)
_LOST_HINT_BEFORE = "its disk was rolled back, or lost what it had made durable: let it join with an empty WAL"
"""Below `EMPTY_COPY_LEVEL`: members of all versions store the same result."""


class ReplicaSetRows(NamedTuple):
    """Both rows of a replica set of several members."""

    record: ReplicaSetRecord
    row: ReplicationRecord

    @property
    def configuration(self) -> SetConfiguration:
        """Return the configuration in force."""
        return self.row.configuration(self.record.sync_state_set_epoch)


def rows_of(tables: Tables, replica_set_id: int) -> ReplicaSetRows:
    """Return the rows of a replica set of several members. Raises `NotFound`, `NotEligible`."""
    record, row = tables.replica_sets.get(replica_set_id), tables.replication.get(replica_set_id)
    if record is None:
        raise NotFound(f"there is no replica set {replica_set_id}", hint="`tidelog replica-set list` shows them")
    if row is None or not has_several(record):
        raise NotEligible(
            f"replica set {replica_set_id} has one member: its broker is elected when it starts",
            hint="another master can be elected when the set has several members",
        )
    return ReplicaSetRows(record, row)


def current_broker(tables: Tables, broker_id: int, registration_epoch: int) -> BrokerRecord:
    """Return the broker's record. Raises `StaleBrokerEpoch` unless the registration is its current one."""
    broker = tables.brokers.get(broker_id)
    if broker is None or broker.registration_epoch != registration_epoch:
        raise StaleBrokerEpoch(f"registration {registration_epoch} of broker {broker_id} is not current")
    return broker


def check_wal_id(wal_id: str) -> None:
    """Check the bounds of a WAL's id. Raises `InvalidInput`."""
    if not 0 < len(wal_id) <= MAX_WAL_ID_CHARS:
        raise InvalidInput(f"the id of a WAL has 1 to {MAX_WAL_ID_CHARS} characters, not {len(wal_id)}")


def begin_election(tables: Tables, command: BeginElection) -> ReplicaSetRecord:
    """See `BeginElection`. Raises `NotFound`, `NotEligible`, `Fenced`."""
    found = rows_of(tables, command.replica_set_id)
    record, row = found
    if row.election is not None and command.master_epoch == record.master_epoch - 1:
        return record
    if command.master_epoch != record.master_epoch:
        raise Fenced(f"master epoch {command.master_epoch} of replica set {record.id} is over: {record.master_epoch}")
    if command.designated != NO_BROKER:
        broker = tables.brokers.get(command.designated)
        if broker is None or not broker.alive or command.designated not in record.sync_state_set:
            raise NotEligible(
                f"broker {command.designated} is not alive, or not in the sync-state set"
                f" {list(record.sync_state_set)} of replica set {record.id}",
                hint=f"`tidelog replica-set describe {record.id}` shows its members",
            )
    return begin(tables, found, command.reason, designated=command.designated, is_patient=command.is_patient)


def begin(
    tables: Tables, found: ReplicaSetRows, reason: str, *, designated: int = NO_BROKER, is_patient: bool = True
) -> ReplicaSetRecord:
    """End the epoch, and begin an election under the next one."""
    record, row = found
    last = record.master
    if last == NO_BROKER and row.election is not None:
        last = row.election.last_master
    before = row.election or ElectionRecord("", 0)
    election = ElectionRecord(
        reason[:MAX_REASON_CHARS],
        tables.now_ms,
        designated,
        last,
        is_patient,
        set_back=before.set_back,
        refused=before.refused,
    )
    begun = msgspec.structs.replace(record, master=NO_BROKER, master_epoch=record.master_epoch + 1)
    tables.replica_sets.put(record.id, begun)
    tables.replication.put(record.id, msgspec.structs.replace(row, election=election))
    return begun


def promise_epoch(tables: Tables, command: PromiseEpoch) -> ReplicaSetRecord:
    """See `PromiseEpoch`. Raises `NotFound`, `StaleBrokerEpoch`, `Fenced`, `NotEligible`, `WalLost`, `InvalidInput`."""
    found = rows_of(tables, command.replica_set_id)
    record, row = found
    current_broker(tables, command.broker_id, command.registration_epoch)
    check_wal_id(command.wal_id)
    if command.master_epoch != record.master_epoch:
        raise Fenced(
            f"a promise for master epoch {command.master_epoch} of replica set {record.id} is not for the present"
            f" one, {record.master_epoch}"
        )
    if not 0 <= command.confirm_offset <= command.end_offset <= MAX_OFFSET:
        raise InvalidInput(f"a WAL that ends at {command.end_offset} is not confirmed up to {command.confirm_offset}")
    if not -1 <= command.last_epoch < command.master_epoch:
        raise InvalidInput(f"a WAL of epoch {command.last_epoch} is not older than epoch {command.master_epoch}")
    if row.election is None:
        return record
    promise = PromiseRecord(
        command.broker_id,
        command.registration_epoch,
        command.wal_id,
        command.last_epoch,
        command.end_offset,
        command.confirm_offset,
    )
    _check_promise(found, promise, tables.level)
    others = [each for each in row.election.promises if each.broker_id != promise.broker_id]
    promises = tuple(sorted([*others, promise], key=lambda each: each.broker_id))
    refused = tuple(each for each in row.election.refused if each != promise.broker_id)
    told = msgspec.structs.replace(
        row,
        in_sync=tuple(_with_promise(each, promise) for each in row.in_sync),
        election=msgspec.structs.replace(row.election, promises=promises, refused=refused),
    )
    return advance(tables, ReplicaSetRows(record, told))


def _check_promise(found: ReplicaSetRows, promise: PromiseRecord, level: int) -> None:
    """Check that the WAL is the one that is known, and has what it is known to have.

    One that has not is refused although all that was known of it may be in the bucket: it may have had more than was
    told, and confirmed that.
    """
    record, row = found
    known = next((each for each in row.in_sync if each.replica == promise.replica), None)
    joined = row.replica(promise.broker_id)
    if known is None and (joined is None or joined.wal_id != promise.wal_id or joined.is_learner):
        raise NotEligible(
            f"WAL {promise.wal_id} of broker {promise.broker_id} is not one of replica set {record.id}",
            hint="a broker with another disk joins the set anew, as a follower",
        )
    end = known.known_end if known is not None else -1
    if promise.end_offset < end:
        raise WalLost(
            f"the WAL of replica set {record.id} on broker {promise.broker_id} ends at {promise.end_offset}; it had"
            f" offsets up to {end}",
            hint=_LOST_HINT if level >= EMPTY_COPY_LEVEL else _LOST_HINT_BEFORE,
        )


def note_older_copy(tables: Tables, command: PromiseEpoch) -> None:
    """Note that a promise was refused because its disk is an older copy: see `ElectionRecord.set_back`, `refused`."""
    row = tables.replication.get(command.replica_set_id)
    if row is None or tables.level < EMPTY_COPY_LEVEL:
        return
    assert row.election is not None, "promises are refused in an election"
    refused = tuple(sorted({*row.election.refused, command.broker_id}))
    election = msgspec.structs.replace(row.election, set_back=True, refused=refused)
    tables.replication.put(row.id, msgspec.structs.replace(row, election=election))


def _set_back(row: ReplicationRecord) -> ReplicationRecord:
    assert row.election is not None, "promises count in an election"
    return msgspec.structs.replace(row, election=msgspec.structs.replace(row.election, set_back=True))


def _with_promise(member: InSyncRecord, promise: PromiseRecord) -> InSyncRecord:
    if member.replica != promise.replica:
        return member
    return msgspec.structs.replace(
        member,
        end_offset=max(member.end_offset, promise.end_offset),
        confirm_offset=max(member.confirm_offset, promise.confirm_offset),
    )


def advance(tables: Tables, found: ReplicaSetRows) -> ReplicaSetRecord:
    """Store the row of an election under way, and elect if nothing is awaited any more."""
    record, row = found
    if tables.level >= EMPTY_COPY_LEVEL and _are_set_back(tables, found):
        row = _set_back(row)
        found = ReplicaSetRows(record, row)
    assert row.election is not None
    tables.replication.put(row.id, row)
    counted = counted_promises(tables, row)
    winner = _winner(tables, found, counted, patient=row.election.is_patient)
    if winner is None:
        return record
    alive = [each for each in record.sync_state_set if _is_alive(tables, each)]
    all_ack = row.policy.all_ack_in_sync_state_set
    after = settled(found.configuration, master=winner.replica, alive=alive, all_ack=all_ack)
    _assert_rule_8(found, voting(tables.level, record, row, counted), winner, after)
    return _install(tables, found, winner, after)


def _are_set_back(tables: Tables, found: ReplicaSetRows) -> bool:
    """Whether as many members as elect have promised, and the best of them with an older copy of its disk.

    The last master has all that is in the bucket: its disk is one if it ends before that, whoever else has promised.
    """
    configuration, election = found.configuration, found.row.election
    assert election is not None
    counted = [each for each in counted_promises(tables, found.row) if each.replica in configuration.members]
    masters = (each for each in counted if each.broker_id == election.last_master)
    if any(was_set_back(tables.level, found.record, found.row, each) for each in masters):
        return True
    if len(counted) < configuration.promises_needed:
        return False
    return was_set_back(tables.level, found.record, found.row, best_of(counted))


def counted_promises(tables: Tables, row: ReplicationRecord) -> list[PromiseRecord]:
    """Return the promises whose brokers' registrations are current."""
    assert row.election is not None
    brokers = ((each, tables.brokers.get(each.broker_id)) for each in row.election.promises)
    return [each for each, one in brokers if one is not None and one.registration_epoch == each.registration_epoch]


def _winner(
    tables: Tables, found: ReplicaSetRows, counted: list[PromiseRecord], *, patient: bool
) -> PromiseRecord | None:
    """Return the promise to elect; None while more are awaited, or when confirmed bytes would be lost."""
    record, row = found
    election = row.election
    assert election is not None
    votes = voting(tables.level, record, row, counted)
    by_replica = {each.replica: each for each in votes}
    promises = [
        Promise(each.replica, each.last_epoch, each.end_offset, row.priority_of(each.broker_id)) for each in votes
    ]
    copies = election.set_back and any(was_set_back(tables.level, record, row, each) for each in votes)
    designated = NO_BROKER if copies else election.designated  # copies only fence, beside the last master
    awaited = {election.last_master, designated} - {NO_BROKER} if patient else set()
    awaited -= {each.broker_id for each in counted if each.replica not in by_replica}
    waits_for = sorted(each for each in awaited if _may_promise(tables, row, each))
    needed = known_confirmed(row.in_sync, counted)
    for wanted in dict.fromkeys((designated, NO_BROKER)):
        best = elected(promises, found.configuration, designated=wanted, waits_for=waits_for)
        if best is None or needed > max(best.end_offset, record.committed_wal_offset):
            continue  # a designated one that lacks confirmed bytes leaves the others
        winner = by_replica[best.replica]
        if was_set_back(tables.level, record, row, winner):
            continue
        if best.replica.broker_id != designated and patient and _others_may_help(tables, found, counted):
            return None
        return winner
    return None


def _others_may_help(tables: Tables, found: ReplicaSetRows, counted: list[PromiseRecord]) -> bool:
    """Whether more promises may come, and have the designated broker elected."""
    record, row = found
    election = row.election
    assert election is not None
    told = {each.broker_id for each in counted}
    silent = [each for each in record.sync_state_set if each not in told and _may_promise(tables, row, each)]
    return bool(silent) and election.designated != NO_BROKER and _may_promise(tables, row, election.designated)


def _is_alive(tables: Tables, broker_id: int) -> bool:
    broker = tables.brokers.get(broker_id)
    return broker is not None and broker.alive


def _may_promise(tables: Tables, row: ReplicationRecord, broker_id: int) -> bool:
    """Return whether a member is alive with the WAL that counts."""
    joined = row.replica(broker_id)
    if joined is None or not _is_alive(tables, broker_id):
        return False
    return any((each.broker_id, each.wal_id) == (broker_id, joined.wal_id) for each in row.in_sync)


def _assert_rule_8(
    found: ReplicaSetRows, counted: list[PromiseRecord], winner: PromiseRecord, after: SetConfiguration
) -> None:
    """Any quorum that confirmed a byte has a member among the promises that the winner has all of.

    Only an election that designates the winner may leave others out.
    """
    before, election = found.configuration, found.row.election
    position = winner.last_epoch, winner.end_offset
    members = [each for each in counted if each.replica in before.members]
    behind = [each for each in members if (each.last_epoch, each.end_offset) <= position]
    assert found.record.master == NO_BROKER and winner in behind, winner
    assert len(behind) >= len(before.members) - before.quorum + 1, (members, before)
    assert election is not None and (behind == members or winner.broker_id == election.designated), (members, winner)
    assert after.members <= before.members and winner.replica in after.members, (before, after)
    # With fewer members the quorum of before must have been all of them: each has every confirmed byte.
    assert after.members == before.members or before.quorum == len(before.members), (before, after)


def _install(
    tables: Tables,
    found: ReplicaSetRows,
    winner: PromiseRecord,
    after: SetConfiguration,
    *,
    accepted_loss: bool = False,
) -> ReplicaSetRecord:
    """Make the winner the master. Its WAL keeps what it has; the others may be truncated to it from now on."""
    record, row = found
    assert after.number == record.sync_state_set_epoch + 1, (after, record)
    known = {each.replica: each for each in row.in_sync}
    reach = {winner.replica, *_older_copies(tables, found)}
    in_sync = tuple(
        InSyncRecord(
            each.broker_id,
            each.wal_id,
            winner.end_offset if each in reach else -1,
            known[each].confirm_offset if each in known else winner.confirm_offset,
        )
        for each in sorted(after.members)
    )
    replicas = tuple(
        msgspec.structs.replace(each, wal_id=winner.wal_id) if each.broker_id == winner.broker_id else each
        for each in row.replicas
    )
    master = msgspec.structs.replace(
        record,
        master=winner.broker_id,
        sync_state_set=tuple(each.broker_id for each in in_sync),
        sync_state_set_epoch=after.number,
    )
    settled_row = msgspec.structs.replace(
        row,
        quorum=after.quorum,
        in_sync=in_sync,
        replicas=replicas,
        election=None,
        last_election=_ended(tables, found, winner, accepted_loss=accepted_loss),
    )
    tables.replica_sets.put(record.id, master)
    tables.replication.put(record.id, settled_row)
    return master


def _older_copies(tables: Tables, found: ReplicaSetRows) -> list[WalReplica]:
    """Return the replicas with older copies that have promised, or wanted to: see `_install`.

    They count again when they have what the winner has. Until then one of them, in another election, would stand in for
    the right disk that it was taken from.
    """
    record, row = found
    if row.election is None or not row.election.set_back:
        return []
    promises = counted_promises(tables, row)
    refused = [each.replica for each in row.in_sync if each.broker_id in row.election.refused]
    return refused + [each.replica for each in promises if was_set_back(tables.level, record, row, each)]


def _ended(tables: Tables, found: ReplicaSetRows, winner: PromiseRecord, *, accepted_loss: bool) -> PastElectionRecord:
    election = found.row.election
    assert election is not None
    return PastElectionRecord(
        found.record.master_epoch,
        winner.broker_id,
        election.reason,
        election.began_ms,
        tables.now_ms,
        election.last_master,
        election.designated,
        accepted_loss,
    )


def elect_unclean(tables: Tables, command: ElectUnclean) -> ReplicaSetRecord:
    """See `ElectUnclean`. Raises `NotFound`, `NotEligible`, `Fenced`."""
    found = rows_of(tables, command.replica_set_id)
    record, row = found
    if command.master_epoch != record.master_epoch:
        raise Fenced(f"master epoch {command.master_epoch} of replica set {record.id} is over: {record.master_epoch}")
    if row.election is None:
        raise NotEligible(
            f"no election of replica set {record.id} is under way",
            hint=f"`tidelog replica-set elect {record.id}` begins one",
        )
    counted = counted_promises(tables, row)
    if _winner(tables, found, counted, patient=False) is not None:
        raise NotEligible(f"the election of replica set {record.id} waits for a living broker, and loses nothing")
    winner = next((each for each in counted if each.broker_id == command.broker_id), None)
    if winner is None or not _is_alive(tables, command.broker_id):
        raise NotEligible(
            f"broker {command.broker_id} is not alive, or has not promised epoch {record.master_epoch}",
            hint=f"`tidelog replica-set describe {record.id}` shows who has",
        )
    _record_loss(tables, found, counted)
    alone = SetConfiguration(record.sync_state_set_epoch + 1, frozenset({winner.replica}), 1).check()
    return _install(tables, found, winner, alone, accepted_loss=True)


def _record_loss(tables: Tables, found: ReplicaSetRows, counted: list[PromiseRecord]) -> None:
    record, row = found
    partitions = owned_partitions(tables, record.id)
    known = [each.known_end for each in row.in_sync] + [each.end_offset for each in counted]
    if tables.level >= SET_BACK_LEVEL:
        known.append(record.committed_wal_offset)  # disks that were rolled back may all end before it
    keep_loss(
        tables,
        WalLoss(
            record.id,
            record.master_epoch,
            tables.now_ms,
            "an operator elected a replica that may lack confirmed records",
            record.committed_wal_offset,
            max(known, default=-1),
            True,
            loss_ranges(tables, partitions, {}),
        ),
    )


def broker_died(tables: Tables, broker_id: int) -> None:
    """Go on with elections that awaited a broker that is dead now."""
    for row in _ordered(tables):
        election = row.election
        if election is None:
            continue
        if election.designated != NO_BROKER or broker_id == election.last_master:
            advance(tables, rows_of(tables, row.id))


def broker_replaced(tables: Tables, broker_id: int) -> None:
    """End the terms of a broker's earlier process as master, and forget its promises.

    No process goes on in an epoch that an earlier one began. The master of a set of one is elected by `Elect`, and then
    tells its WAL anew before others join: until then the set stays one of one.
    """
    for row in _ordered(tables):
        record = tables.replica_sets.get(row.id)
        assert record is not None, row.id  # removed together
        if not has_several(record):
            if record.members == (broker_id,):
                tables.replication.put(row.id, _without_wals(row))
        elif record.master == broker_id:
            begin(tables, ReplicaSetRows(record, row), f"broker {broker_id} was started again")
        elif row.election is not None and any(each.broker_id == broker_id for each in row.election.promises):
            others = tuple(each for each in row.election.promises if each.broker_id != broker_id)
            election = msgspec.structs.replace(row.election, promises=others)
            tables.replication.put(row.id, msgspec.structs.replace(row, election=election))


def _without_wals(row: ReplicationRecord) -> ReplicationRecord:
    """Return what stays of a row when no WAL counts any more: what an operator decides, and history."""
    return ReplicationRecord(
        row.id,
        row.policy,
        assigned=row.assigned,
        last_election=row.last_election,
        learning=row.learning,
        priorities=row.priorities,
    )


def _ordered(tables: Tables) -> list[ReplicationRecord]:
    return sorted(tables.replication.values(), key=lambda each: each.id)
