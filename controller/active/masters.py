"""`MasterWatch`: the active controller's part in elections of replica sets with several members.

It begins an election when

- a master is dead, or there is none; a member that does not drain is designated if another one drains,
- a master's broker drains, or is to leave the set, and another member may lead: a few sets of it at a time. The home
  set of a broker that an operator drains stays with it: its partitions move to other sets
  (`tidelog.controller.active.drain_plan`),
- the home broker of a set, its preferred master, has been in sync for a while, and another one leads. One such election
  at a time, because each of them interrupts its partitions. It is announced (`MasterWatch.hand_overs`): what the master
  writes before it need not be scanned by the next one (`tidelog.broker.partitions.hand_overs`).

What is decided follows from the promises alone (`tidelog.controller.machine.replica_elections`); the broker that is to
lead is only designated, so an election may end with another one. It is then repeated later. The work is derived from
the image each time, so what was missed, by a failed command or a change of the active controller, is found by the next
scan.

An election waits for the promise of a living master. One that lives and does not promise, because its disk hangs, would
stop its replica set: after `PATIENCE_S` the election begins anew, and waits for nobody who is not needed.

Sans-IO: times are seconds of a monotonic clock, given by the caller. Entry: `MasterWatch`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from tidelog.controller.active.ages import Ages
from tidelog.controller.image.image import Image
from tidelog.controller.image.leading import first_choices, may_lead, other_leaders
from tidelog.controller.model.records import NO_BROKER, BrokerRecord, DrainMode, ReplicaSetRecord
from tidelog.controller.model.replica_set_commands import BeginElection
from tidelog.controller.model.replication import ElectionRecord, has_several

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long an election waits for a living master, or for the designated broker: several times a slow disk's sync."""
HAND_OVERS_AT_ONCE = 4
"""Elections under way of the sets that one draining broker led."""
HAND_OVER_AGAIN_S = 2.0
"""After a hand-over that ended with the draining broker as master again."""
PREFERRED_AFTER_S = 30.0
"""How long the preferred master has been able to lead before it is elected: it is not about to go again."""
PREFERRED_GAP_S = 5.0
"""Between the beginnings of two such elections, of any sets."""
ANNOUNCED_S = 5.0
"""How long before such an election its master is told of it: several heartbeats, and the writing of its checkpoints."""
PREFERRED_REASON = "the preferred master is back"


class MasterWatch:
    """When each election, and each preferred master, was seen first, and what is to be begun."""

    def __init__(self, *, preferred: bool = True) -> None:
        """`preferred`: whether preferred masters are elected."""
        self._elections: Ages[tuple[int, int]] = Ages()
        """By replica set and the epoch of the election."""
        self._preferred: Ages[tuple[int, int]] = Ages()
        """Preferred masters that may lead, by replica set and its master epoch."""
        self.elects_preferred = preferred
        """May be changed at any time."""
        self._preferred_at_s = float("-inf")
        """When the newest election of a preferred master began."""
        self._announced: frozenset[tuple[int, int]] = frozenset()
        """Replica sets, with their master epochs, whose preferred masters will be elected soon."""
        self._handed_over: dict[int, float] = {}
        """By replica set: when the newest hand-over began."""

    def due(self, image: Image, now_s: float) -> Iterator[BeginElection]:
        """Iterate over the elections to begin."""
        records = [each for _, each in sorted(image.replica_sets.items()) if has_several(each)]
        found = [
            *self._without_master(image, records),
            *self._impatient(image, records, now_s),
            *self._hand_overs(image, records, now_s),
            *self._to_preferred(image, records, now_s),
        ]
        for command in found:
            logger.info("election begun", extra={"replica_set": command.replica_set_id, "because": command.reason})
            yield command

    def hand_overs(self, image: Image, broker_id: int) -> tuple[int, ...]:
        """Return the replica sets that the broker leads, and whose preferred masters will be elected soon, by id."""
        led = ((each, image.replica_sets.get(each), epoch) for each, epoch in sorted(self._announced))
        return tuple(
            each for each, now, epoch in led if now is not None and (now.master, now.master_epoch) == (broker_id, epoch)
        )

    def _without_master(self, image: Image, records: list[ReplicaSetRecord]) -> Iterator[BeginElection]:
        for record in records:
            if image.election(record.id) is None and image.master_of(record.id) is None:
                what = f"broker {record.master} is dead" if record.master != NO_BROKER else "there is no master"
                yield BeginElection(record.id, record.master_epoch, what, _rather(image, record))

    def _impatient(self, image: Image, records: list[ReplicaSetRecord], now_s: float) -> Iterator[BeginElection]:
        """Begin anew what waits for somebody for too long."""
        under_way: dict[tuple[int, int], ElectionRecord] = {}
        for record in records:
            election = image.election(record.id)
            if election is not None:
                under_way[record.id, record.master_epoch] = election
        for (set_id, epoch), age_s in self._elections.look(image, under_way, now_s).items():
            election = under_way[set_id, epoch]
            if election.is_patient and age_s >= PATIENCE_S:
                reason = f"{election.reason}; not all promised in time"
                # a designated broker that has died would have the command refused
                designated = election.designated if _may_be_designated(image, set_id, election) else NO_BROKER
                yield BeginElection(set_id, epoch, reason, designated, is_patient=False)

    def _hand_overs(self, image: Image, records: list[ReplicaSetRecord], now_s: float) -> Iterator[BeginElection]:
        """Let others lead what draining brokers lead."""
        elections = (image.election(each.id) for each in records)
        under_way = Counter(each.last_master for each in elections if each is not None)
        due: dict[int, float] = {}
        for record in records:
            master = image.master_of(record.id)
            if master is None or not _is_to_go(image, record, master):
                continue
            if master.draining == DrainMode.OPERATOR and record.id == master.id:
                continue
            last_s = self._handed_over.get(record.id, float("-inf"))
            due[record.id] = last_s
            others = other_leaders(image, record)
            if not others or now_s - last_s < HAND_OVER_AGAIN_S or under_way[master.id] >= HAND_OVERS_AT_ONCE:
                continue
            under_way[master.id] += 1
            due[record.id] = now_s
            choices = first_choices(image, record)
            if last_s > float("-inf") and record.id not in others:
                choices = others  # the first attempt failed: another one at each
            to = choices[record.master_epoch % len(choices)]
            why = f"broker {master.id} {'drains' if master.draining else 'is to leave the set'}"
            yield BeginElection(record.id, record.master_epoch, why, to)
        self._handed_over = due

    def _to_preferred(self, image: Image, records: list[ReplicaSetRecord], now_s: float) -> Iterator[BeginElection]:
        """Let the preferred master lead that has been back for a while."""
        back = [
            (each.id, each.master_epoch)
            for each in records
            if each.master != each.id
            and (master := image.master_of(each.id)) is not None
            and not _is_to_go(image, each, master)
            and may_lead(image, each, each.id)
        ]
        ages = self._preferred.look(image, back, now_s)
        is_calm = now_s - self._preferred_at_s >= PREFERRED_GAP_S and not any(
            image.election(each.id) is not None for each in records
        )
        ready = [key for key, age_s in ages.items() if age_s >= PREFERRED_AFTER_S]
        soon = (key for key, age_s in ages.items() if age_s >= PREFERRED_AFTER_S - ANNOUNCED_S)
        self._announced = frozenset(soon if self.elects_preferred else ())
        if self.elects_preferred and is_calm and ready:
            self._preferred_at_s = now_s
            set_id, epoch = ready[0]
            yield BeginElection(set_id, epoch, PREFERRED_REASON, set_id)


def _rather(image: Image, record: ReplicaSetRecord) -> int:
    """Return the member to designate so that no draining one is elected; -1 if none drains, or all do."""
    living = (image.brokers.get(each) for each in record.sync_state_set)
    choices = first_choices(image, record)
    if not choices or not any(each is not None and each.alive and _is_to_go(image, record, each) for each in living):
        return NO_BROKER
    return choices[0]


def _is_to_go(image: Image, record: ReplicaSetRecord, broker: BrokerRecord) -> bool:
    row = image.replication.get(record.id)
    return bool(broker.draining) or (row is not None and broker.id in row.leaving)


def _may_be_designated(image: Image, set_id: int, election: ElectionRecord) -> bool:
    broker = image.brokers.get(election.designated)
    return broker is not None and broker.alive and election.designated in image.replica_sets[set_id].sync_state_set
