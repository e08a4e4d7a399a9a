"""Any order of requests, deaths, promises and lost disks: one master for each epoch, and every confirmed entry on it.

The brokers here are lists of entries; the real protocol runs in `tests.support.replica_world`. What decides is the
controllers' state machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.replica_controllers import Controllers
from tests.support.replica_world import POLICIES
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.wal_notes import WalLost
from tidelog.runtime.errors import TidelogError
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica

BROKERS = range(3)
ENTRY_BYTES = 10
Entry = tuple[int, int]
"""Master epoch, and a number that no other entry has."""


@dataclass
class Wal:
    """A WAL on a disk; everything is durable at once."""

    wal_id: str
    entries: list[Entry] = field(default_factory=list)
    promised: int = -1
    confirmed: int = 0
    """Entries that it knows to be confirmed."""

    @property
    def end(self) -> int:
        return len(self.entries) * ENTRY_BYTES


@dataclass
class Reign:
    """A master's process, which may not know that it was replaced."""

    replica: WalReplica
    registration: int
    epoch: int
    start: int
    """Entries before the first of its epoch."""
    known: SetConfiguration
    asked: SetConfiguration | None = None
    acknowledged: dict[WalReplica, int] = field(default_factory=dict)
    """Entries that each replica has."""
    confirmed: int = 0

    def confirmable(self) -> int:
        return min(each.held_by_quorum(self.acknowledged) for each in (self.known, self.asked or self.known))


class ReplicaSetMachine(RuleBasedStateMachine):
    """One replica set, its brokers, and requests on their way."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy: str) -> None:
        self.policy = POLICIES[policy]
        self.wals = {each: Wal(f"wal-{each}") for each in BROKERS}
        self.controllers = Controllers({each: wal.wal_id for each, wal in self.wals.items()}, self.policy)
        self.alive: set[int] = set()
        self.joined = {WalReplica(each, wal.wal_id) for each, wal in self.wals.items()}
        self.reigns: dict[int, Reign] = {}
        self.elected: set[int] = set()
        self.confirmed: list[Entry] = []
        self.requests: list[tuple[Reign, r.AlterSyncStateSet]] = []
        self.promises: list[r.PromiseEpoch] = []
        """On their way."""
        self.numbers = 0
        self.epochs = (0, 0)
        for each in BROKERS:
            self.start(each, disk_is_lost=False)

    # --- the controllers -----------------------------------------------------------------------------------------

    @rule(is_patient=st.booleans(), designated=st.sampled_from([-1, -1, *BROKERS]))
    def elect(self, is_patient: bool, designated: int) -> None:
        command = r.BeginElection(0, self.controllers.state().epoch, "", designated, is_patient)
        self.try_to(command)

    @rule()
    def find_dead(self) -> None:
        for each in BROKERS:
            if each not in self.alive:
                self.controllers.set_dead(each)
        self.note_election()

    @rule(broker=st.sampled_from(BROKERS))
    def remove(self, broker: int) -> None:
        """Two stay: a set of one has another path."""
        if len(self.controllers.machine.tables.replica_sets.rows[0].members) > 2 and self.try_to(
            r.RemoveReplica(0, broker)
        ):
            assert broker not in {each.broker_id for each in self.controllers.state().configuration.members}

    @rule(broker=st.sampled_from(BROKERS))
    def assign(self, broker: int) -> None:
        assert self.try_to(r.AssignReplica(0, broker))

    @rule(broker=st.sampled_from(BROKERS))
    def retire(self, broker: int) -> None:
        accepted = self.try_to(r.RetireReplica(0, broker))
        assert not (accepted and self.is_master(broker))

    @rule(broker=st.sampled_from(BROKERS), priority=st.sampled_from([None, -1, 0, 7]))
    def set_priority(self, broker: int, priority: int | None) -> None:
        self.try_to(r.SetPriority(0, broker, priority))
        registration = self.controllers.registrations[broker]
        self.try_to(r.TellPriority(0, broker, registration, priority or 0))

    @rule()
    def restart_controllers(self) -> None:
        before = self.controllers.machine
        again = ControllerState()
        again.load(before.dump())
        assert again.dump() == before.dump()
        self.controllers.machine = again

    def try_to(self, command: r.ReplicaSetCommand) -> bool:
        """Whether a command was accepted."""
        try:
            self.controllers.run(command)
        except WalLost:
            raise AssertionError(f"{command}: a WAL that lost nothing") from None
        except TidelogError:
            return False
        self.note_election()
        return True

    def note_election(self) -> None:
        state = self.controllers.state()
        if state.master is None or state.epoch in self.elected:
            return
        self.elected.add(state.epoch)
        wal = self.wals[state.master.broker_id]
        assert wal.wal_id == state.master.wal_id, "a disk that is gone"
        assert wal.entries[: len(self.confirmed)] == self.confirmed, "rule 8"
        if state.master.broker_id in self.alive:
            self.numbers += 1
            reign = Reign(
                state.master,
                self.controllers.registrations[state.master.broker_id],
                state.epoch,
                len(wal.entries),
                state.configuration,
            )
            wal.entries.append((state.epoch, self.numbers))
            reign.acknowledged[reign.replica] = len(wal.entries)
            self.reigns[state.epoch] = reign

    # --- brokers -------------------------------------------------------------------------------------------------

    @rule(broker=st.sampled_from(BROKERS))
    def kill(self, broker: int) -> None:
        self.alive.discard(broker)
        self.reigns = {epoch: one for epoch, one in self.reigns.items() if one.replica.broker_id != broker}

    @rule(broker=st.sampled_from(BROKERS), disk_is_lost=st.sampled_from([False, False, True]))
    def start(self, broker: int, disk_is_lost: bool) -> None:
        self.kill(broker)
        if disk_is_lost and self.may_lose(broker):
            self.numbers += 1
            self.wals[broker] = Wal(f"wal-{broker}-{self.numbers}")
        epoch = self.controllers.state().epoch
        ends = self.controllers.state().master is not None and self.is_master(broker)
        self.controllers.register(broker)
        assert not ends or self.controllers.state().epoch == epoch + 1, "its term as master is over"
        self.alive.add(broker)
        self.join(broker)

    def is_master(self, broker: int) -> bool:
        master = self.controllers.state().master
        return master is not None and master.broker_id == broker

    def may_lose(self, broker: int) -> bool:
        """One lost disk is a fault that a quorum of two survives, if nothing is undecided."""
        present = self.controllers.state().configuration
        kept = [self.wals[each.broker_id] for each in present.members if each.broker_id != broker]
        holders = sum(each.entries[: len(self.confirmed)] == self.confirmed for each in kept)
        return holders >= present.quorum and not self.requests and not any(one.asked for one in self.reigns.values())

    @rule(broker=st.sampled_from(BROKERS))
    def join(self, broker: int) -> None:
        wal = self.wals[broker]
        if broker in self.alive and self.try_to(
            r.AddReplica(0, broker, self.controllers.registrations[broker], wal.wal_id)
        ):
            self.joined.add(WalReplica(broker, wal.wal_id))

    @rule(broker=st.sampled_from(BROKERS))
    def assign_learner(self, broker: int) -> None:
        """Assign a learner; where there is a member already, that is refused."""
        rows = self.controllers.machine.tables.replication.rows
        was_assigned = broker in rows[0].assigned and broker not in rows[0].learning
        accepted = self.try_to(r.AssignReplica(0, broker, is_learner=True))
        assert not (accepted and was_assigned)

    @rule(broker=st.sampled_from(BROKERS))
    def join_as_learner(self, broker: int) -> None:
        wal = self.wals[broker]
        row = self.controllers.machine.tables.replication.rows[0]
        if broker in self.alive and broker in row.learning:
            join = r.AddReplica(0, broker, self.controllers.registrations[broker], wal.wal_id, is_learner=True)
            if self.try_to(join):
                self.joined.add(WalReplica(broker, wal.wal_id))

    @rule(broker=st.sampled_from(BROKERS))
    def promise(self, broker: int) -> None:
        state, wal = self.controllers.state(), self.wals[broker]
        if broker not in self.alive or not state.electing or wal.promised > state.epoch:
            return
        wal.promised = state.epoch
        self.reigns = {epoch: one for epoch, one in self.reigns.items() if one.replica.broker_id != broker}
        last = wal.entries[-1][0] if wal.entries else -1
        confirm = wal.confirmed * ENTRY_BYTES
        registration = self.controllers.registrations[broker]
        self.promises.append(r.PromiseEpoch(0, state.epoch, broker, registration, wal.wal_id, last, wal.end, confirm))

    @precondition(lambda self: self.promises)
    @rule(data=st.data(), twice=st.sampled_from([False, False, True]))
    def deliver_promise(self, data: st.DataObject, twice: bool) -> None:
        at = data.draw(st.integers(0, len(self.promises) - 1))
        promise, before = self.promises[at], self.controllers.state()
        accepted = self.try_to(promise)
        assert not accepted or promise.master_epoch == before.epoch
        if not twice:
            del self.promises[at]

    @rule()
    def everybody_promises(self) -> None:
        """What mostly happens."""
        for each in BROKERS:
            self.promise(each)
        while self.promises and self.try_to(self.promises.pop()):
            pass

    # --- masters -------------------------------------------------------------------------------------------------

    def reign(self, data: st.DataObject) -> Reign:
        return self.reigns[data.draw(st.sampled_from(sorted(self.reigns)))]

    @precondition(lambda self: self.reigns)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        one = self.reign(data)
        self.numbers += 1
        entries = self.wals[one.replica.broker_id].entries
        entries.append((one.epoch, self.numbers))
        one.acknowledged[one.replica] = len(entries)

    @precondition(lambda self: self.reigns)
    @rule(data=st.data(), broker=st.sampled_from(BROKERS))
    def replicate(self, data: st.DataObject, broker: int) -> None:
        """A follower's WAL becomes a prefix of the master's, unless it has promised another one."""
        one, mine = self.reign(data), self.wals[broker]
        wal = self.wals[one.replica.broker_id]
        if broker not in self.alive or wal is mine or mine.promised > one.epoch:
            return
        mine.promised = one.epoch
        common = next(
            (at for at, pair in enumerate(zip(mine.entries, wal.entries, strict=False)) if pair[0] != pair[1]),
            min(len(mine.entries), len(wal.entries)),
        )
        assert common >= mine.confirmed, "a confirmed entry would be cut"
        mine.entries = wal.entries[: max(common, data.draw(st.integers(0, len(wal.entries))))]
        mine.confirmed = max(mine.confirmed, min(one.confirmed, len(mine.entries)))
        one.acknowledged[WalReplica(broker, mine.wal_id)] = len(mine.entries)

    @precondition(lambda self: self.reigns)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        one = self.reign(data)
        count = one.confirmable()
        if count <= one.start:
            return  # the start of the epoch comes first
        wal = self.wals[one.replica.broker_id]
        common = min(count, len(self.confirmed))
        assert wal.entries[:common] == self.confirmed[:common], "two entries were confirmed in one place"
        self.confirmed += wal.entries[len(self.confirmed) : count]
        one.confirmed = max(one.confirmed, count)
        wal.confirmed = max(wal.confirmed, count)

    @precondition(lambda self: self.reigns)
    @rule(data=st.data(), others=st.sets(st.sampled_from(BROKERS)))
    def ask(self, data: st.DataObject, others: set[int]) -> None:
        """A master asks for a configuration whose quorum holds what is confirmed, or asks again."""
        one = self.reign(data)
        if one.asked is None:
            able = [each for each in one.acknowledged if each.broker_id in others and each != one.replica]
            chosen = {each.broker_id: each for each in able}
            members = frozenset({one.replica, *chosen.values()})
            least = min(self.policy.min_in_sync_replicas, len(members))
            low = len(members) if self.policy.all_ack_in_sync_state_set else least
            wanted = SetConfiguration(one.known.number, members, data.draw(st.integers(low, len(members))))
            if wanted.same_terms(one.known) or wanted.held_by_quorum(one.acknowledged) < max(one.confirmed, one.start):
                return
            one.asked = wanted
        members_told = tuple(
            r.ReportedMember(*each, one.acknowledged.get(each, -1) * ENTRY_BYTES) for each in sorted(one.asked.members)
        )
        self.requests.append(
            (
                one,
                r.AlterSyncStateSet(
                    0,
                    one.replica.broker_id,
                    one.registration,
                    one.epoch,
                    one.asked.number,
                    members_told,
                    one.asked.quorum,
                    one.confirmed * ENTRY_BYTES,
                ),
            )
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), twice=st.booleans())
    def deliver(self, data: st.DataObject, twice: bool) -> None:
        at = data.draw(st.integers(0, len(self.requests) - 1))
        one, command = self.requests[at]
        before = self.controllers.state()
        accepted = self.try_to(command)
        after = self.controllers.state()
        if accepted:
            assert (after.epoch, after.master) == (one.epoch, one.replica)
            assert after.configuration.number - before.configuration.number in (0, 1)
            assert (
                one.asked is None
                or one.known.number == after.configuration.number
                or one.asked.same_terms(after.configuration)
            )
        else:
            assert after == before
        if not twice:
            del self.requests[at]

    @precondition(lambda self: self.reigns)
    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        one, state = self.reign(data), self.controllers.state()
        if state.epoch > one.epoch:
            del self.reigns[one.epoch]
        elif state.configuration.number > one.known.number:
            one.known, one.asked = state.configuration, None

    # --- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def the_rows_agree(self) -> None:
        if not hasattr(self, "controllers"):
            return
        tables = self.controllers.machine.tables
        record, row = tables.replica_sets.rows[0], tables.replication.rows[0]
        state = self.controllers.state()
        assert self.epochs <= (record.master_epoch, record.sync_state_set_epoch)
        assert self.epochs[1] <= record.sync_state_set_epoch
        self.epochs = record.master_epoch, record.sync_state_set_epoch
        assert record.sync_state_set == tuple(each.broker_id for each in row.in_sync)
        assert record.members == tuple(each.broker_id for each in row.replicas if not each.is_learner)
        assert record.learners == tuple(each.broker_id for each in row.replicas if each.is_learner)
        assert {*record.learners} <= {*row.learning} <= {*row.assigned}
        assert not {*row.learning} & {*record.members}
        assert {each for each, _ in row.priorities} <= {*row.assigned}
        assert {*record.sync_state_set} <= {*record.members} <= {*row.assigned}
        assert list(row.assigned) == sorted({*row.assigned})
        assert {*row.leaving} <= {*row.assigned} and list(row.leaving) == sorted({*row.leaving})
        assert state.configuration.members <= self.joined
        assert (record.master == -1) == (row.election is not None)


TestReplicaSets = ReplicaSetMachine.TestCase
TestReplicaSets.settings = settings(
    max_examples=150, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
