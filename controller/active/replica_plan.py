"""`ReplicaPlan`: which brokers shall have a replica of which set. Commands out, derived from the image each time.

A replica set whose policy wants several replicas, and whose master has told its WAL, is given as many *usable* members
as the policy wants. A member is usable while its broker is known, keeps its WAL on a disk, is not drained by an
operator or retired, and has not been dead for `repair_after_s`. Learners are not counted.

- Too few usable members: another broker is assigned, which joins by itself. It is alive, not draining, has a WAL on a
  disk and a listener for other brokers; of these one in the rack with the fewest members of the set, then the one with
  the fewest replicas, then the one with the smallest id.
- As many usable members in the SyncStateSet as are wanted: unusable members outside it are removed at once, and members
  beyond the wanted number after `repair_after_s`, so that one that an operator adds has time to catch up. One that is
  in sync, and drained by an operator, is retired: the master lets go of it.
- A retired member is removed when it is outside the SyncStateSet.

Invariants: no member of the SyncStateSet is removed, nor the home broker, which is the preferred master; a member is
removed only when enough others are in sync. The only state are ages, so the next active controller goes on. A set whose
home broker is drained by an operator is left alone: its partitions move to other sets.

Members in sync beyond the wanted number stay: an operator has added them, or lowered the policy, and removes them. The
one exception is whom `tidelog.controller.active.replica_balance` replaces, which moves replicas to brokers with fewer.

Sans-I/O: times are seconds of a monotonic clock, given by the caller. Entry: `ReplicaPlan.due`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from tidelog.controller.active.ages import Ages
from tidelog.controller.active.replica_balance import ReplicaBalance
from tidelog.controller.active.replica_picture import (
    PlannedSet,
    keeps_replicas,
    planned_sets,
    replica_loads,
    takes_replicas,
)
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import BrokerRecord, DrainMode
from tidelog.controller.model.replica_set_commands import AssignReplica, RemoveReplica, RetireReplica
from tidelog.storage.replication.policy import MAX_REPLICAS

logger = logging.getLogger(__name__)

MAX_CHANGES = 64
"""Assignments, and removals, of one round: the next one goes on a second later."""


class ReplicaPlan:
    """The plan; see the module docstring."""

    def __init__(self, repair_after_s: float, *, balances: bool = True) -> None:
        """`repair_after_s`: how long a dead broker is waited for. `balances`: whether replicas are evened out."""
        self.balance = ReplicaBalance(begins=balances)
        self.repair_after_s = repair_after_s
        """May be changed at any time: the ages are known."""
        self._dead: Ages[tuple[int, int]] = Ages()
        """By broker and its registration."""
        self._surplus: Ages[tuple[int, int]] = Ages()
        """By replica set and broker."""

    def due(self, image: Image, now_s: float) -> Iterator[AssignReplica | RemoveReplica | RetireReplica]:
        """Iterate over what is to be changed."""
        dead = ((each.id, each.registration_epoch) for each in image.brokers.values() if not each.alive)
        ages = self._dead.look(image, dead, now_s)
        lost = {broker_id for (broker_id, _), age_s in ages.items() if age_s >= self.repair_after_s}
        sets = planned_sets(image, lost)
        removals: list[RemoveReplica | RetireReplica] = [
            *_retirements(image, sets),
            *_retired(image),
            *self._removals(image, sets, now_s),
        ]
        assignments = _assignments(image, sets)
        exchanges = [*self.balance.due(image, sets, now_s, is_busy=bool(removals or assignments))]
        for assignment in assignments:
            logger.info(
                "a broker shall have a replica",
                extra={"replica_set": assignment.replica_set_id, "broker": assignment.broker_id},
            )
            yield assignment
        for removal in removals[:MAX_CHANGES]:
            logger.info(
                "a replica is removed" if isinstance(removal, RemoveReplica) else "a replica is to leave",
                extra={"replica_set": removal.replica_set_id, "broker": removal.broker_id},
            )
            yield removal
        for each in exchanges:
            logger.info(
                "replicas are evened out",
                extra={"replica_set": each.replica_set_id, "broker": each.broker_id, "step": type(each).__name__},
            )
            yield each

    def _removals(self, image: Image, sets: list[PlannedSet], now_s: float) -> list[RemoveReplica]:
        """Return the members to remove: unusable ones first."""
        found: list[RemoveReplica] = []
        surplus: list[tuple[int, int]] = []
        for one in sets:
            in_sync = {*one.record.sync_state_set}
            count, wanted = len(one.usable & in_sync), one.wanted
            learners = {*one.record.learners, *one.row.learning} & {
                each for each in one.places if keeps_replicas(image, each)
            }
            able = sorted(one.places - in_sync - {one.record.id} - learners - {*one.row.leaving})
            unusable = [each for each in able if each not in one.usable]
            found += [RemoveReplica(one.record.id, each) for each in unusable if count >= _needed(image, one, each)]
            surplus += [(one.record.id, each) for each in able if each in one.usable and count >= wanted]
        ages = self._surplus.look(image, surplus, now_s)
        return found + [RemoveReplica(*each) for each, age_s in ages.items() if age_s >= self.repair_after_s]


def _retirements(image: Image, sets: list[PlannedSet]) -> list[RetireReplica]:
    """Return the members in sync that the master shall let go of, because an operator drains their brokers."""
    found: list[RetireReplica] = []
    for one in sets:
        in_sync = {*one.record.sync_state_set}
        for each in sorted(in_sync - one.usable - {*one.row.leaving, one.record.id, one.record.master}):
            broker = image.brokers.get(each)
            if broker is None or broker.draining != DrainMode.OPERATOR:
                continue
            if len(one.usable & in_sync) >= _needed(image, one, each):
                found.append(RetireReplica(one.record.id, each))
    return found


def _needed(image: Image, one: PlannedSet, broker_id: int) -> int:
    """Return how many usable members must be in sync before a broker may leave the set.

    As many as the policy wants; an operator may drain brokers until fewer are left than that, and then all these.
    """
    wanted, broker = one.wanted, image.brokers.get(broker_id)
    if broker is None or broker.draining != DrainMode.OPERATOR:
        return wanted
    return min(wanted, sum(keeps_replicas(image, each) for each in image.brokers))


def _retired(image: Image) -> list[RemoveReplica]:
    """Return the members to remove that the masters have let go of."""
    found: list[RemoveReplica] = []
    for set_id, row in sorted(image.replication.items()):
        record = image.replica_sets.get(set_id)
        if record is not None and row.election is None:
            found += [RemoveReplica(set_id, each) for each in row.leaving if each not in record.sync_state_set]
    return found


def _assignments(image: Image, sets: list[PlannedSet]) -> list[AssignReplica]:
    """Return new assignments: one for each set at a time, so that the brokers' numbers stay near each other."""
    candidates = [each for each in image.brokers.values() if takes_replicas(each)]
    loads = replica_loads(image)
    found: list[AssignReplica] = []
    short = sets
    while short and len(found) < MAX_CHANGES:
        next_short: list[PlannedSet] = []
        for one in short:
            if len(one.usable) >= one.wanted or len(one.places) >= MAX_REPLICAS:
                continue
            chosen = _best(image, one, candidates, loads)
            if chosen is None:
                continue
            one.places.add(chosen)
            one.usable.add(chosen)
            loads[chosen] += 1
            found.append(AssignReplica(one.record.id, chosen))
            next_short.append(one)
        short = next_short
    return found[:MAX_CHANGES]


def _best(image: Image, one: PlannedSet, candidates: list[BrokerRecord], loads: Counter[int]) -> int | None:
    racks = Counter(image.brokers[each].rack for each in one.usable)
    able = (each for each in candidates if each.id not in one.places)
    best = min(able, key=lambda each: (racks[each.rack], loads[each.id], each.id), default=None)
    return best.id if best is not None else None
