"""Who gets a replica of which set: racks, spread, repair after its time, and nothing that is in use is removed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.controller.replica_cluster import REPAIR_S, TWO_OF_THREE, ReplicaCluster
from tests.support.examples import examples
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.errors import TidelogError

UNBALANCED = ControllerSettings(replica_balance_enable=False)


def changes(found: list[c.AnyCommand]) -> list[c.AnyCommand]:
    return [each for each in found if isinstance(each, r.AssignReplica | r.RemoveReplica | r.RetireReplica)]


@pytest.mark.parametrize("brokers", range(3, 10))
def test_replicas_are_spread_evenly_and_then_nothing_changes(brokers: int) -> None:
    cluster = ReplicaCluster([""] * brokers)
    cluster.settle()
    assert all(len(cluster.assigned(each)) == 3 for each in range(brokers))
    assert {*cluster.loads().values()} <= {2, 3, 4}
    assert all(each in cluster.assigned(each) for each in range(brokers))
    assert changes(cluster.settle(1_000)) == []


def test_each_replica_of_a_set_is_in_another_rack_while_there_are_racks() -> None:
    cluster = ReplicaCluster(["a", "a", "a", "b", "b", "b", "c", "c", "c"])
    cluster.settle()
    racks = [{cluster.image.brokers[each].rack for each in cluster.assigned(one)} for one in range(9)]
    assert racks == [{"a", "b", "c"}] * 9
    assert {*cluster.loads().values()} == {3}


def test_two_racks_share_three_replicas() -> None:
    cluster = ReplicaCluster(["a", "a", "b", "b"])
    cluster.settle()
    for each in range(4):
        assert {cluster.image.brokers[one].rack for one in cluster.assigned(each)} == {"a", "b"}


def test_a_set_whose_policy_wants_one_replica_or_whose_master_told_no_wal_is_left_alone() -> None:
    cluster = ReplicaCluster(["", "", "", ""], PolicyRecord())
    cluster.start(4)
    cluster.run(r.SetReplicaSetPolicy(4, TWO_OF_THREE))
    cluster.run(r.AssignReplica(0, 1))
    assert changes(cluster.settle()) == [], "its master has joined in nobody's name; an operator's replica stays"


@pytest.mark.parametrize(
    "change",
    [
        lambda cluster: cluster.start(2, wal_kind="s3"),
        lambda cluster: cluster.set_alive(2, False),
        lambda cluster: cluster.drain(2, DrainMode.SHUTDOWN),
        lambda cluster: cluster.drain(2, DrainMode.OPERATOR),
    ],
)
def test_who_is_no_candidate(change: Any) -> None:
    cluster = ReplicaCluster(["", "", ""])
    change(cluster)
    cluster.settle()
    assert cluster.assigned(0) == cluster.assigned(1) == [0, 1]


def test_a_dead_brokers_replicas_are_replaced_after_the_repair_time_and_removed_when_others_are_in_sync() -> None:
    cluster = ReplicaCluster([""] * 5)
    cluster.settle()
    held = [each for each in range(5) if 4 in cluster.assigned(each)]
    cluster.set_alive(4, False)
    assert changes(cluster.settle(int(REPAIR_S))) == []
    cluster.hung = {0, 1, 2, 3}  # nobody joins yet
    assigned = changes(cluster.tick())
    assert {each.replica_set_id for each in assigned if isinstance(each, r.AssignReplica)} == {*held}
    assert len(assigned) == len(held) and changes(cluster.settle()) == [], "the old ones stay until others are in sync"
    cluster.hung = set()
    removed = changes(cluster.settle())
    assert sorted(removed, key=str) == [r.RemoveReplica(each, 4) for each in held if each != 4]
    assert 4 in cluster.assigned(4), "the home broker stays"
    assert len(cluster.record(4).sync_state_set) == 3


def test_the_repair_time_is_a_setting_and_begins_anew_with_another_active_controller() -> None:
    cluster = ReplicaCluster([""] * 4, settings=ControllerSettings(replica_repair_after_ms=5_000))
    cluster.settle()
    cluster.set_alive(3, False)
    assert changes(cluster.settle(4)) == []
    cluster.term = 2
    cluster.run(c.BecomeActive(1, 2, "cluster", 1_000))
    assert changes(cluster.settle(5)) == []
    assert changes(cluster.settle(2)) != []


def test_a_broker_that_is_back_before_the_repair_time_keeps_its_replicas() -> None:
    cluster = ReplicaCluster([""] * 5)
    cluster.settle()
    before = {each: cluster.assigned(each) for each in range(5)}
    for _ in range(5):
        cluster.set_alive(4, False)
        cluster.settle(int(REPAIR_S) - 1)
        cluster.set_alive(4, True)
        cluster.settle(3)
    assert {each: cluster.assigned(each) for each in range(5)} == before
    assert changes(cluster.done[-1:]) == []


def test_without_a_candidate_nothing_is_changed() -> None:
    cluster = ReplicaCluster([""] * 3)
    cluster.settle()
    cluster.set_alive(2, False)
    assert changes(cluster.settle(2 * int(REPAIR_S))) == []
    assert cluster.assigned(0) == [0, 1, 2]


def test_the_replicas_of_a_broker_that_an_operator_drains_are_replaced_and_its_own_set_is_left() -> None:
    cluster = ReplicaCluster([""] * 5, settings=UNBALANCED)
    cluster.settle()
    own = cluster.assigned(4)
    cluster.drain(4, DrainMode.OPERATOR)
    cluster.settle()
    assert all(len({*cluster.record(each).sync_state_set} - {4}) == 3 for each in range(4))
    assert not any(4 in cluster.assigned(each) for each in range(4)), "the masters have let go of it"
    assert cluster.assigned(4) == own
    cluster.run(c.RemoveBroker(4))
    assert 4 not in cluster.image.replication and 4 not in cluster.image.replica_sets
    assert changes(cluster.settle()) == []


def test_an_operator_may_drain_brokers_until_fewer_are_left_than_the_policy_wants() -> None:
    cluster = ReplicaCluster([""] * 3)
    cluster.settle()
    cluster.drain(2, DrainMode.OPERATOR)
    cluster.settle()
    assert cluster.assigned(0) == cluster.assigned(1) == [0, 1]
    cluster.run(c.RemoveBroker(2))
    assert changes(cluster.settle()) == []
    cluster.drain(1, DrainMode.OPERATOR)
    cluster.settle()
    assert cluster.record(0).sync_state_set == (0, 1), "the write quorum needs it"


def test_a_drained_broker_stays_a_member_until_others_are_in_sync() -> None:
    cluster = ReplicaCluster([""] * 4)
    cluster.settle()
    held = [each for each in range(3) if 3 in cluster.assigned(each)]
    cluster.hung = {*range(4)} - {3, *held}
    cluster.drain(3, DrainMode.OPERATOR)
    cluster.settle()
    assert all(3 in cluster.record(each).sync_state_set or len(cluster.assigned(each)) > 3 for each in held)
    cluster.hung = set()
    cluster.settle()
    assert not any(3 in cluster.assigned(each) for each in range(3))


def test_a_retired_member_is_replaced_and_removed_when_the_master_has_let_go() -> None:
    cluster = ReplicaCluster([""] * 4, settings=UNBALANCED)
    cluster.settle()
    gone = max(each for each in cluster.assigned(0) if each != 0)
    other = next(each for each in range(4) if each not in cluster.assigned(0))
    cluster.run(r.RetireReplica(0, gone))
    cluster.hung = {0}
    assert changes(cluster.settle()) == [r.AssignReplica(0, other)], "its master has not let go"
    cluster.hung = set()
    assert changes(cluster.settle()) == [r.RemoveReplica(0, gone)]
    assert {*cluster.record(0).sync_state_set} == {*range(4)} - {gone}
    assert cluster.image.replication[0].leaving == ()


def test_a_policy_that_wants_fewer_removes_only_who_is_not_in_sync_and_not_at_once() -> None:
    cluster = ReplicaCluster([""] * 4)
    cluster.settle()
    cluster.run(r.SetReplicaSetPolicy(0, PolicyRecord(2, 2, 1)))
    assert changes(cluster.settle(1_000)) == [], "all three are in sync"
    third = max(each for each in cluster.assigned(0) if each != 0)
    cluster.hung = {third}
    assert changes(cluster.settle(int(REPAIR_S))) == []
    assert r.RemoveReplica(0, third) in cluster.settle(5)
    assert cluster.assigned(0) == list(cluster.record(0).sync_state_set)


def test_a_learner_is_neither_counted_nor_removed() -> None:
    cluster = ReplicaCluster([""] * 4)
    cluster.settle()
    other = next(each for each in range(4) if each not in cluster.assigned(0))
    cluster.run(r.AssignReplica(0, other, is_learner=True))
    cluster.run(r.AddReplica(0, other, 1, "wal-of-a-learner", True))
    assert changes(cluster.settle(2_000)) == []
    assert cluster.assigned(0) == [0, 1, 2, 3]


class Planning(RuleBasedStateMachine):
    """Brokers come, die, hang and drain in any order. A removal from a SyncStateSet would be refused, and fail here."""

    brokers = st.integers(0, 5)

    @initialize(racks=st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=3, max_size=6))
    def begin(self, racks: list[str]) -> None:
        self.cluster = ReplicaCluster(racks)

    def broker(self, broker_id: int) -> int:
        return broker_id % len(self.cluster.image.brokers)

    @rule(broker=brokers, alive=st.booleans())
    def live(self, broker: int, alive: bool) -> None:
        self.cluster.set_alive(self.broker(broker), alive)

    @rule(broker=brokers)
    def restart(self, broker: int) -> None:
        self.cluster.start(self.broker(broker), self.cluster.image.brokers[self.broker(broker)].rack)

    @rule(broker=brokers)
    def hang(self, broker: int) -> None:
        self.cluster.hung ^= {self.broker(broker)}

    @rule(broker=brokers, mode=st.sampled_from(DrainMode))
    def drain(self, broker: int, mode: DrainMode) -> None:
        try:
            self.cluster.drain(self.broker(broker), mode)
        except TidelogError:
            return

    @rule(replica_set=brokers, total=st.integers(1, 4))
    def set_policy(self, replica_set: int, total: int) -> None:
        self.cluster.run(r.SetReplicaSetPolicy(self.broker(replica_set), PolicyRecord(total, min(total, 2), 1)))

    @rule(replica_set=brokers, broker=brokers)
    def retire(self, replica_set: int, broker: int) -> None:
        try:
            self.cluster.run(r.RetireReplica(self.broker(replica_set), self.broker(broker)))
        except TidelogError:
            return

    @rule(seconds=st.sampled_from([1.0, 3.0, REPAIR_S / 2, 2 * REPAIR_S]))
    def tick(self, seconds: float) -> None:
        self.cluster.tick(seconds)

    @rule()
    def settle(self) -> None:
        """Left alone, with all brokers alive, every set has what it shall have, and then nothing changes."""
        cluster = self.cluster
        cluster.hung = set()
        for each in sorted(cluster.image.brokers):
            cluster.set_alive(each, True)
        for _ in range(50):
            cluster.tick(REPAIR_S / 10)
        for set_id, row in cluster.image.replication.items():
            home = cluster.image.brokers[set_id]
            total = row.policy.total_replicas
            if home.draining == DrainMode.OPERATOR or total <= 1 or cluster.image.election(set_id) is not None:
                continue
            drained = {each.id for each in cluster.image.brokers.values() if each.draining}
            free = {*cluster.image.brokers} - {*row.assigned} - drained
            kept = {*row.assigned} - {*row.leaving}
            usable = [each for each in kept if cluster.image.brokers[each].draining != DrainMode.OPERATOR]
            assert len(usable) >= total or not free or not row.in_sync, row
        assert not [each for _ in range(30) for each in changes(cluster.tick(REPAIR_S / 10))]

    @invariant()
    def the_sync_state_set_is_assigned(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for set_id, row in self.cluster.image.replication.items():
            assert {*self.cluster.record(set_id).sync_state_set} <= {*row.assigned} or not row.in_sync
            assert {*row.leaving} <= {*row.assigned}


TestPlanning = Planning.TestCase
TestPlanning.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
