"""`ReplicaBalance`: replicas move to brokers that have fewer, which is how one that comes later gets any.

A replica moves from one broker to another by an *exchange*, which the row of the set tells (`newcomer`, `replaced`):

    step      when                                                            command
    ───────   ─────────────────────────────────────────────────────────────   ─────────────────────────────────────────
    begin     the cluster has been calm for `PAUSE_S`, and a move helps       AssignReplica, with `instead_of`
    end       the newcomer is in sync, and without the replaced one as many   RetireReplica, or RemoveReplica of one
              as the policy wants are in sync and alive                       that is not in sync
    end       the same, but the replaced one has become the master            the same of the newcomer
    give up   one of the two counts no more, or the policy wants both         AssignReplica: both are ordinary members

Calm is: no exchange, election, drain or repair under way anywhere, each set has a living master, and all members that
count live and are in sync. So there is one exchange at a time, and a pause between two: a broker that comes needs about
as many as a set has replicas, and each of them sends a WAL. Another active controller waits for the pause, too.

A move helps if it spreads the set over racks: the rack that is left has two or more members of it more than the one
that is entered. Or, if it keeps the spread, if it evens the brokers out: the one that is left has two or more replicas
more. Every move lowers the sum of the squares of the members by rack, over all sets, or keeps that and lowers the sum
of the squares of the replicas by broker. So moves end when nothing else changes.

Invariants: neither the home broker nor the master is replaced; nobody leaves unless as many others as the policy wants
are in sync and alive; members beyond the policy that an operator has added are not touched, nor is a set with such. All
state but the age of the calm is in the image.

Sans-I/O: times are seconds of a monotonic clock, given by the caller. Entry: `ReplicaBalance.due`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tidelog.controller.active.ages import Ages
from tidelog.controller.active.replica_picture import PlannedSet, replica_loads, takes_replicas
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import NO_BROKER
from tidelog.controller.model.replica_set_commands import AssignReplica, RemoveReplica, RetireReplica
from tidelog.controller.model.replication import has_several
from tidelog.storage.replication.policy import MAX_REPLICAS

PAUSE_S = 5.0
"""How long the cluster has been calm before a replica moves: brokers that come together have their own replicas then,
and a disk rests after it has received a WAL."""


class ReplicaMove(NamedTuple):
    """A replica that would better be on another broker; the largest one is the best."""

    spread: int
    """By how much it spreads the set over racks; 0: it keeps the spread."""
    evens: int
    """How many replicas more the broker has that it leaves."""
    replica_set: int
    source: int
    target: int


class ReplicaBalance:
    """The exchanges; see the module docstring."""

    def __init__(self, *, begins: bool = True) -> None:
        """`begins`: whether exchanges are begun; those that are under way end in any case."""
        self.begins = begins
        """May be changed at any time."""
        self._calm: Ages[bool] = Ages()

    def due(
        self, image: Image, sets: list[PlannedSet], now_s: float, *, is_busy: bool
    ) -> Iterator[AssignReplica | RemoveReplica | RetireReplica]:
        """Iterate over what is to be changed. `is_busy`: replicas are being repaired."""
        for one in sets:
            if one.row.newcomer != NO_BROKER:
                yield from _next_step(image, one)
        is_calm = not is_busy and _is_calm(image, sets)
        ages = self._calm.look(image, [True] if is_calm else [], now_s)
        if not self.begins or ages.get(True, 0.0) < PAUSE_S:
            return
        move = best_move(image, sets)
        if move is not None:
            yield AssignReplica(move.replica_set, move.target, instead_of=move.source)


def _next_step(image: Image, one: PlannedSet) -> Iterator[AssignReplica | RemoveReplica | RetireReplica]:
    newcomer, replaced, in_sync = one.row.newcomer, one.row.replaced, {*one.record.sync_state_set}
    if newcomer not in one.usable:
        return  # it is removed as others are that count no more
    if replaced not in one.usable or len(one.usable) <= one.wanted:
        yield AssignReplica(one.record.id, newcomer)
        return
    goes = newcomer if one.record.master == replaced else replaced
    stay = [each for each in one.usable & in_sync - {goes} if image.brokers[each].alive]
    if newcomer not in in_sync or len(stay) < one.wanted:
        return
    yield RetireReplica(one.record.id, goes) if goes in in_sync else RemoveReplica(one.record.id, goes)


def _is_calm(image: Image, sets: list[PlannedSet]) -> bool:
    if any(each.alive and each.draining for each in image.brokers.values()):
        return False
    if any(row.election is not None or row.leaving or row.newcomer != NO_BROKER for row in image.replication.values()):
        return False
    if any(has_several(each) and image.master_of(each.id) is None for each in image.replica_sets.values()):
        return False
    return all(_is_whole(image, one) for one in sets)


def _is_whole(image: Image, one: PlannedSet) -> bool:
    """Whether all members count, live and are in sync. A home broker that is lost, and was replaced, is left out."""
    learners = {*one.record.learners, *one.row.learning}
    if one.places - one.usable - learners - {one.record.id}:
        return False
    return one.usable <= {*one.record.sync_state_set} and all(image.brokers[each].alive for each in one.usable)


def best_move(image: Image, sets: list[PlannedSet]) -> ReplicaMove | None:
    """Return the move that helps most: racks first, then numbers. None if none helps."""
    loads = replica_loads(image)
    by_rack: dict[str, list[int]] = {}
    for broker in sorted(filter(takes_replicas, image.brokers.values()), key=lambda each: (loads[each.id], each.id)):
        by_rack.setdefault(broker.rack, []).append(broker.id)
    moves = (move for one in sets for move in _moves_of(image, one, loads, by_rack))
    return max(moves, key=lambda each: (each.spread, each.evens, -each.replica_set, -each.source), default=None)


def _moves_of(
    image: Image, one: PlannedSet, loads: Counter[int], by_rack: dict[str, list[int]]
) -> Iterator[ReplicaMove]:
    """Iterate over the moves of a set that help, with the broker of each rack that has the fewest replicas."""
    if len(one.usable) != one.wanted or len(one.places) >= MAX_REPLICAS:
        return
    racks = Counter(image.brokers[each].rack for each in one.usable)
    for rack, brokers in by_rack.items():
        target = next((each for each in brokers if each not in one.places), None)
        if target is None:
            continue
        for source in sorted(one.usable - {one.record.id, one.record.master}):
            old = image.brokers[source].rack
            spread = 0 if old == rack else racks[old] - racks[rack] - 1
            evens = loads[source] - loads[target]
            if spread > 0 or (spread == 0 and evens >= 2):
                yield ReplicaMove(spread, evens, one.record.id, source, target)
