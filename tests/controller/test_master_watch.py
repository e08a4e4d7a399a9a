"""Elections that the active controller begins: dead masters, silent ones, drains, and preferred masters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.controller.controller_helpers import TOPIC
from tests.controller.replica_cluster import ReplicaCluster
from tests.controller.replica_trio import Trio
from tidelog.controller.active.drain_plan import is_drained, plan_drain_of
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.masters import (
    ANNOUNCED_S,
    HAND_OVER_AGAIN_S,
    HAND_OVERS_AT_ONCE,
    PATIENCE_S,
    PREFERRED_AFTER_S,
    PREFERRED_GAP_S,
    PREFERRED_REASON,
)
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.image.leading import partitions_led, takers
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.settings import ControllerSettings


class Watched(Trio):
    def __init__(self) -> None:
        super().__init__()
        self.duties = Duties(lambda: self.image, BrokerSessions(10.0), dict, ControllerSettings())

    def due(self, now: float) -> list[c.AnyCommand]:
        found = list(self.duties.masters(now, 0))
        for each in found:
            self.run(each)
        return found


def test_the_active_controller_begins_an_election_when_a_master_is_dead_and_once() -> None:
    one = Watched()
    assert one.due(0.0) == []
    epoch = one.record.master_epoch
    one.die(0)
    assert one.due(1.0) == [r.BeginElection(0, epoch, "broker 0 is dead")]
    assert one.due(2.0) == []
    one.promise(1)
    one.promise(2)
    assert one.due(3.0) == []
    one.die(1)
    assert len(one.due(4.0)) == 1, "the new master died"


def test_an_election_whose_command_failed_is_begun_at_the_next_scan_by_whichever_controller_is_active() -> None:
    one = Watched()
    one.die(0)
    (lost,) = one.duties.masters(1.0, 0)
    assert list(one.duties.masters(2.0, 0)) == [lost]
    another = Duties(lambda: one.image, BrokerSessions(10.0), dict, ControllerSettings())
    assert list(another.masters(0.0, 0)) == [lost]


def test_an_election_that_waits_for_a_silent_broker_begins_anew() -> None:
    one = Watched()
    one.begin()
    one.promise(1)
    one.promise(2)
    assert one.due(0.0) == one.due(PATIENCE_S - 0.1) == []
    (again,) = one.due(PATIENCE_S)
    assert isinstance(again, r.BeginElection) and not again.is_patient
    assert one.due(3 * PATIENCE_S) == [], "it is patient no more"
    one.promise(1)
    one.promise(2)
    assert one.record.master == 1


def test_an_election_whose_designated_broker_has_died_begins_anew_all_the_same() -> None:
    one = Watched()
    one.begin(designated=1)
    assert one.due(0.0) == []
    one.die(1, 0)
    (again,) = one.due(PATIENCE_S)
    assert isinstance(again, r.BeginElection) and again.designated == -1


# --- drains ---


def made(brokers: int = 3, partitions: int = 9) -> ReplicaCluster:
    """Each broker has its set, and they have members on each other."""
    cluster = ReplicaCluster([""] * brokers)
    cluster.settle()
    cluster.topic(partitions)
    return cluster


def begun(found: Sequence[c.AnyCommand]) -> list[r.BeginElection]:
    return [each for each in found if isinstance(each, r.BeginElection)]


def moved(found: Sequence[c.AnyCommand]) -> list[c.PartitionMove]:
    return [move for each in found if isinstance(each, c.MovePartitions) for move in each.moves]


def test_a_broker_that_stops_hands_its_sets_over_and_no_partition_moves() -> None:
    cluster = made()
    before = {each.index: each.replica_set for each in cluster.image.all_partitions()}
    cluster.drain(0, DrainMode.SHUTDOWN)
    assert partitions_led(cluster.image, 0) == 3 and not is_drained(cluster.image, 0)
    found = cluster.settle()
    (election,) = begun(found)
    assert election.designated in (1, 2) and "drains" in election.reason
    assert moved(found) == []
    assert {each.index: each.replica_set for each in cluster.image.all_partitions()} == before
    assert cluster.record(0).master == election.designated
    assert partitions_led(cluster.image, 0) == 0 and is_drained(cluster.image, 0)


def test_a_broker_whose_set_is_electing_has_not_drained() -> None:
    """Its promise may be needed."""
    cluster = made()
    cluster.hung = {1, 2}
    cluster.drain(0, DrainMode.SHUTDOWN)
    assert len(begun(cluster.tick())) == 1
    assert cluster.record(0).master == -1 and partitions_led(cluster.image, 0) == 3
    assert not is_drained(cluster.image, 0)


def test_with_nobody_else_to_lead_the_partitions_of_a_broker_that_stops_move() -> None:
    cluster = made(brokers=4)
    others = {*cluster.assigned(0)} - {0}
    cluster.hung = {*range(4)} - others - {0}  # it takes partitions, and does not join the set
    for each in others:
        cluster.drain(each, DrainMode.OPERATOR)
    cluster.settle()
    cluster.drain(0, DrainMode.SHUTDOWN)
    found = cluster.settle()
    assert {move.replica_set for move in moved(found)} == {*range(4)} - others - {0}
    assert all(is_drained(cluster.image, each) for each in (0, *others))


def test_an_operator_empties_the_home_set_and_gets_the_others_led_elsewhere() -> None:
    cluster = made()
    cluster.set_alive(1, False)
    cluster.settle(5)
    to = cluster.record(1).master
    cluster.set_alive(1, True)
    cluster.settle(5)
    assert cluster.record(1).master == to != 1, "not yet"
    moves = plan_drain_of(cluster.image, to)
    assert {cluster.image.partitions(TOPIC)[each.index].replica_set for each in moves} == {to}
    cluster.drain(to, DrainMode.OPERATOR)
    assert to not in takers(cluster.image) and 1 not in takers(cluster.image)
    found = cluster.settle()
    assert [each.replica_set_id for each in begun(found)] == [1], "the home set stays: it is emptied"
    assert cluster.record(1).master == 1 and cluster.record(to).master == to
    assert len(moved(found)) == 3 and is_drained(cluster.image, to)


def test_the_home_set_of_a_drained_broker_is_emptied_whoever_leads_it_and_takes_nothing() -> None:
    cluster = made()
    cluster.set_alive(0, False)
    cluster.settle(5)
    assert cluster.record(0).master in (1, 2)
    cluster.drain(0, DrainMode.OPERATOR)
    assert 0 not in takers(cluster.image)
    (refused,) = cluster.run(c.MovePartitions((c.PartitionMove(TOPIC, cluster.image.owned(1)[0].index, 0),)))
    assert refused[0] == "InvalidReplicaAssignment" and "is being drained" in refused[1]
    cluster.settle()
    assert not cluster.image.owned(0) and is_drained(cluster.image, 0)


def test_few_sets_of_a_broker_are_handed_over_at_a_time() -> None:
    cluster = ReplicaCluster([""] * 8)
    cluster.settle()
    for each in range(8):
        if 0 in cluster.assigned(each) and cluster.record(each).master != 0:
            cluster.run(r.BeginElection(each, cluster.record(each).master_epoch, "test", 0))
    cluster.settle(2)
    led = [each for each in range(8) if cluster.record(each).master == 0]
    assert len(led) >= 3
    cluster.hung = {*range(8)}
    cluster.drain(0, DrainMode.SHUTDOWN)
    assert len(begun(cluster.tick())) == min(len(led), HAND_OVERS_AT_ONCE)
    cluster.hung = set()
    cluster.settle(10)
    assert not [each for each in range(8) if cluster.record(each).master == 0]


def test_a_hand_over_that_elects_the_old_master_again_is_repeated_after_a_while() -> None:
    cluster = made()
    cluster.drain(0, DrainMode.SHUTDOWN)
    cluster.hung = {0, 1, 2}
    designated = []
    for _ in range(2):
        (election,) = begun(cluster.tick(HAND_OVER_AGAIN_S))
        designated.append(election.designated)
        for each in (0, 1, 2):
            cluster.promise(0, each, end=10 if each == election.designated else 20)
        assert cluster.record(0).master == 0, "both others are ahead of the designated one"
        assert begun(cluster.tick(HAND_OVER_AGAIN_S - 0.5)) == []
    assert sorted(designated) == [1, 2]
    (election,) = begun(cluster.tick(HAND_OVER_AGAIN_S))
    for each in (0, 1, 2):
        cluster.promise(0, each, end={0: 40, election.designated: 30}.get(each, 25))
    assert cluster.record(0).master == election.designated, "the old master's newest bytes were not confirmed"


@pytest.mark.parametrize("best", [1, 2])
def test_a_hand_over_designates_the_largest_priority_first_and_then_others(best: int) -> None:
    cluster = made()
    cluster.run(r.SetPriority(0, best, 1))
    cluster.hung = {0, 1, 2}
    cluster.drain(0, DrainMode.SHUTDOWN)
    designated = []
    for _ in range(3):
        (election,) = begun(cluster.tick(HAND_OVER_AGAIN_S))
        designated.append(election.designated)
        for each in (0, 1, 2):
            cluster.promise(0, each, end={0: 30, election.designated: 10}.get(each, 20))
        assert cluster.record(0).master == 0
    assert designated[0] == best and {*designated} == {1, 2}


def test_of_the_members_that_do_not_drain_the_largest_priority_is_designated() -> None:
    cluster = made(brokers=3)
    cluster.run(r.SetPriority(1, 2, 1))
    cluster.set_alive(1, False)
    cluster.settle(5)
    assert cluster.record(1).master == 2, "broker 0 has the smaller id"
    cluster.set_alive(1, True)
    cluster.settle(40)
    assert cluster.record(1).master == 1, "the preferred master leads again, although its priority is smaller"


def test_a_draining_member_is_not_elected_when_another_may_be() -> None:
    cluster = made()
    cluster.drain(1, DrainMode.SHUTDOWN)
    cluster.settle(5)
    cluster.set_alive(0, False)
    (election,) = begun(cluster.tick())[:1]
    assert (election.replica_set_id, election.designated) == (0, 2)
    cluster.settle(5)
    assert cluster.record(0).master == 2


def test_a_master_that_is_to_leave_its_set_hands_it_over() -> None:
    cluster = made()
    cluster.run(r.RetireReplica(0, 1))
    cluster.hung = {1, 2}
    cluster.set_alive(0, False)
    (election,) = [each for each in begun(cluster.tick()) if each.replica_set_id == 0]
    assert election.designated == 2
    cluster.promise(0, 1, end=50)
    cluster.promise(0, 2, end=20)
    assert cluster.record(0).master == 1, "it alone may have what was confirmed"
    (election,) = [each for each in begun(cluster.tick()) if each.replica_set_id == 0]
    assert election.designated == 2 and "is to leave" in election.reason
    cluster.promise(0, 1, end=50)
    cluster.promise(0, 2, end=50)
    assert cluster.record(0).master == 2


# --- preferred masters ---


def displaced(brokers: int = 3) -> ReplicaCluster:
    """Broker 0 died, and is back: another one leads its set."""
    cluster = made(brokers)
    cluster.set_alive(0, False)
    cluster.settle(3)
    cluster.set_alive(0, True)
    return cluster


def test_the_preferred_master_leads_again_when_it_has_been_in_sync_for_a_while() -> None:
    cluster = displaced()
    cluster.tick()
    cluster.tick()
    assert 0 in cluster.record(0).sync_state_set
    assert begun(cluster.settle(int(PREFERRED_AFTER_S) - 1)) == []
    (election,) = begun(cluster.settle(5))
    assert (election.replica_set_id, election.designated, election.reason) == (0, 0, PREFERRED_REASON)
    assert cluster.record(0).master == 0
    assert begun(cluster.settle(200)) == []


def test_the_master_is_told_for_some_seconds_that_the_preferred_one_will_be_elected() -> None:
    cluster = displaced()
    cluster.tick()
    master = cluster.record(0).master
    told = []
    while cluster.record(0).master != 0:
        cluster.tick()
        told.append(cluster.duties.hand_overs(master))
        assert cluster.duties.hand_overs(0) == (), "it leads nothing that others will lead"
        assert len(told) < 100
    first = told.index((0,))
    assert told == [()] * first + [(0,)] * (len(told) - first - 1) + [()], "not after the election"
    assert ANNOUNCED_S - 2 <= len(told) - 1 - first <= ANNOUNCED_S + 2, "a tick is a second"


def test_an_announcement_ends_with_its_reason() -> None:
    cluster = displaced()
    cluster.tick()
    master = cluster.record(0).master
    while not cluster.duties.hand_overs(master):
        cluster.tick()
    cluster.drain(0, DrainMode.SHUTDOWN)
    cluster.tick()
    assert cluster.duties.hand_overs(master) == ()
    cluster.drain(0, DrainMode.NONE)
    while not cluster.duties.hand_overs(master):
        cluster.tick()
    cluster.run(r.BeginElection(0, cluster.record(0).master_epoch, "test", -1))
    assert cluster.duties.hand_overs(master) == (), "it has no master, before any scan"


def test_a_preferred_master_that_dies_or_drains_meanwhile_waits_anew() -> None:
    cluster = displaced()
    cluster.settle(int(PREFERRED_AFTER_S) - 1)
    cluster.drain(0, DrainMode.SHUTDOWN)
    cluster.settle(2)
    cluster.drain(0, DrainMode.NONE)
    assert begun(cluster.settle(int(PREFERRED_AFTER_S) - 1)) == []
    cluster.set_alive(0, False)
    cluster.settle(5)
    cluster.set_alive(0, True)
    assert begun(cluster.settle(int(PREFERRED_AFTER_S) - 1)) == []
    assert len(begun(cluster.settle(5))) == 1


def test_preferred_masters_are_elected_one_at_a_time() -> None:
    cluster = made(brokers=6)
    for each in range(6):
        other = next(one for one in cluster.assigned(each) if one != each)
        cluster.run(r.BeginElection(each, cluster.record(each).master_epoch, "test", other))
        cluster.brokers_act()
    assert all(cluster.record(each).master != each for each in range(6))
    times = []
    for _ in range(120):
        found = begun(cluster.tick())
        assert len(found) <= 1
        times += [cluster.now_s] * len(found)
    assert len(times) == 6 and all(cluster.record(each).master == each for each in range(6))
    assert all(later - sooner >= PREFERRED_GAP_S for sooner, later in itertools.pairwise(times))


def test_preferred_masters_can_be_switched_off() -> None:
    cluster = displaced()
    cluster.duties = Duties(
        lambda: cluster.image, BrokerSessions(10.0), dict, ControllerSettings(preferred_master_enable=False)
    )
    assert begun(cluster.settle(200)) == []
    assert cluster.duties.hand_overs(cluster.record(0).master) == ()


@pytest.mark.parametrize("mode", [DrainMode.SHUTDOWN, DrainMode.OPERATOR])
def test_a_draining_preferred_master_is_left_where_it_is(mode: DrainMode) -> None:
    cluster = displaced()
    cluster.settle(3)
    cluster.drain(0, mode)
    assert not [each for each in begun(cluster.settle(200)) if each.designated == 0]
