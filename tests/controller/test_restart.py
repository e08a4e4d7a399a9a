"""The command that begins a broker's restart: when the cluster can do without it, and one broker at a time."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.controller.replica_cluster import TWO_OF_THREE, ReplicaCluster
from tests.support.examples import examples
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import RestartRefused, StaleBrokerEpoch
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.restart import needed_in_sync, restart_hindrances
from tidelog.runtime.errors import NotFound


def made(brokers: int = 3, policy: PolicyRecord = TWO_OF_THREE) -> ReplicaCluster:
    """All sets with all members in sync, and partitions."""
    cluster = ReplicaCluster([""] * brokers, policy)
    cluster.settle()
    cluster.topic(6)
    assert all(len(each.sync_state_set) == policy.total_replicas for each in cluster.image.replica_sets.values())
    return cluster


def epoch(cluster: ReplicaCluster, broker: int) -> int:
    return cluster.image.brokers[broker].registration_epoch


def restart(cluster: ReplicaCluster, broker: int) -> None:
    cluster.run(c.BeginRestart(broker, epoch(cluster, broker)))


def hindrances(cluster: ReplicaCluster, broker: int) -> list[str]:
    image = cluster.image
    return restart_hindrances(broker, image.brokers.values(), image.replica_sets.values(), image.replication.get)


def refused(cluster: ReplicaCluster, broker: int) -> str:
    before = cluster.image.brokers
    with pytest.raises(RestartRefused) as error:
        restart(cluster, broker)
    assert cluster.image.brokers == before
    return error.value.message


def test_a_broker_of_a_whole_cluster_drains_until_another_process_registers() -> None:
    cluster = made()
    assert hindrances(cluster, 0) == []
    restart(cluster, 0)
    assert cluster.image.brokers[0].draining == DrainMode.SHUTDOWN
    restart(cluster, 0)  # the same request again
    cluster.start(0)
    assert cluster.image.brokers[0].draining == DrainMode.NONE


def test_no_second_broker_is_restarted_before_the_first_one_is_back_and_in_sync_and_leads_are_settled() -> None:
    cluster = made()
    restart(cluster, 0)
    assert "broker 0 is stopping" in refused(cluster, 1)
    cluster.tick()
    cluster.set_alive(0, False)
    cluster.tick()
    assert "broker 0 is dead" in refused(cluster, 1)
    cluster.start(0)
    assert "broker 0 is not in sync" in refused(cluster, 1)
    for _ in range(5):
        cluster.tick()
    restart(cluster, 1)


def test_an_earlier_process_is_not_restarted_in_place_of_the_present_one() -> None:
    cluster = made()
    first = epoch(cluster, 0)
    cluster.start(0)
    with pytest.raises(StaleBrokerEpoch):
        cluster.run(c.BeginRestart(0, first))
    with pytest.raises(NotFound):
        cluster.run(c.BeginRestart(9, 1))


def test_the_last_broker_that_can_serve_is_not_restarted() -> None:
    cluster = made(1, PolicyRecord())
    assert "no other broker is alive" in refused(cluster, 0)


def test_a_broker_that_an_operator_drains_is_left_alone() -> None:
    cluster = made(4)
    cluster.drain(3, DrainMode.OPERATOR)
    assert "drained by an operator" in refused(cluster, 3)


def test_a_set_without_a_master_or_with_an_election_under_way_waits() -> None:
    cluster = made()
    record = cluster.record(1)
    cluster.run(r.BeginElection(1, record.master_epoch, "why"))
    assert "replica set 1 elects a master" in refused(cluster, 0)


def test_a_set_that_would_take_no_writes_without_the_broker_keeps_it() -> None:
    cluster = made(3, PolicyRecord(2, 2, 1))
    assert "needs 2 members in sync for a write, and would have 1" in refused(cluster, 0)


@pytest.mark.parametrize(
    ("policy", "left", "needed"),
    [
        (PolicyRecord(3, 2, 1), 2, 2),
        (PolicyRecord(3, 3, 1), 2, 3),
        (PolicyRecord(3, 3, 1, enable_auto_in_sync_replicas=True), 2, 2),
        (PolicyRecord(3, 3, 3, enable_auto_in_sync_replicas=True), 2, 3),
        (PolicyRecord(3, 2, 1, all_ack_in_sync_state_set=True), 2, 1),
        (PolicyRecord(3, 2, 2, all_ack_in_sync_state_set=True), 1, 2),
    ],
)
def test_how_many_members_a_write_needs_follows_the_policy(policy: PolicyRecord, left: int, needed: int) -> None:
    assert needed_in_sync(policy, left) == needed


def test_a_member_that_is_to_leave_its_set_is_not_waited_for() -> None:
    cluster = made(4)
    record = next(each for each in cluster.image.replica_sets.values() if 0 not in each.members)
    gone = next(each for each in record.members if each not in (record.master, record.id))
    cluster.run(r.RetireReplica(record.id, gone))
    told = msgspec.structs.replace(record, sync_state_set=tuple(each for each in record.members if each != gone))
    image = cluster.image
    sets = [told if each.id == record.id else each for each in image.replica_sets.values()]
    assert restart_hindrances(0, image.brokers.values(), sets, image.replication.get) == []


class Restarts(RuleBasedStateMachine):
    """Anybody asks for restarts at any time; processes end and begin as they were asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = made()

    @rule(broker=st.integers(0, 2))
    def ask(self, broker: int) -> None:
        try:
            restart(self.cluster, broker)
        except RestartRefused:
            assert hindrances(self.cluster, broker)

    @rule(broker=st.integers(0, 2))
    def end(self, broker: int) -> None:
        if self.cluster.image.brokers[broker].draining:
            self.cluster.set_alive(broker, False)

    @rule(broker=st.integers(0, 2))
    def begin(self, broker: int) -> None:
        if not self.cluster.image.brokers[broker].alive:
            self.cluster.start(broker)

    @rule()
    def a_second_passes(self) -> None:
        self.cluster.tick()

    @invariant()
    def one_broker_at_most_is_away(self) -> None:
        away = [each.id for each in self.cluster.image.brokers.values() if each.draining or not each.alive]
        assert len(away) <= 1, away

    @invariant()
    def every_set_keeps_its_quorum(self) -> None:
        for record in self.cluster.image.replica_sets.values():
            living = [each for each in record.sync_state_set if self.cluster.image.brokers[each].alive]
            assert len(living) >= 2, record


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
