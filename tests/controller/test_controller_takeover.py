"""Failover without a hot tier in the controller's state: who may take over, when, and what is placed.

`test_takeover_machine.py` shows that nothing is lost.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.lifecycle import FAILING_S, Lifecycle, Refuses
from tidelog.controller.active.readers import Readers
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.active.sessions import UNHEARD_S, BrokerSessions
from tidelog.controller.image.image import Image
from tidelog.controller.image.lost import TakeoverState, lost_replica_sets, next_successor
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import NotEligible, NotHandedOver
from tidelog.controller.model.records import NO_BROKER, PartitionRecord, StreamState
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.errors import Fenced, InvalidInput

Key = tuple[bytes, int]
PARTITIONS = 4


def register(driver: Driver, broker: int, incarnation: str = "a", wal_kind: str = "s3") -> int:
    names = (f"code{broker}", incarnation, "host")
    driver.run(c.RegisterBroker(broker, *names, 9092, "", "", wal_kind, f"host:{7000 + broker}"), int)
    return int(driver.run(c.Elect(broker, broker))[4])


def session(driver: Driver, broker: int, *, alive: bool) -> None:
    driver.run(c.SetBrokerAlive(broker, driver.image.brokers[broker].registration_epoch, alive))


def partition(driver: Driver, index: int) -> PartitionRecord:
    found = driver.image.partition(TOPIC, index)
    assert found is not None
    return found


def open_all(driver: Driver, broker: int) -> None:
    pairs: list[tuple[int, int]] = []
    for one in driver.image.partitions(TOPIC):
        leader, epoch = driver.image.leader(one)
        if leader == broker:
            pairs += [(one.first_stream + step, epoch) for step in range(4)]
    if pairs:
        driver.run(c.OpenStreams(broker, driver.image.replica_sets[broker].master_epoch, tuple(pairs)))


def keys_of(driver: Driver, replica_set: int) -> tuple[Key, ...]:
    return tuple((TOPIC, one.index) for one in driver.image.partitions(TOPIC) if one.replica_set == replica_set)


def takeover(driver: Driver, broker: int, of: int = 0) -> int:
    epoch = driver.image.replica_sets[of].master_epoch
    return int(driver.run(c.ElectSuccessor(of, broker, epoch))[4])


def place(driver: Driver, epoch: int, wal_offset: int = 0, of: int = 0) -> int:
    return int(driver.run(c.PlaceTakenOver(of, epoch, wal_offset, keys_of(driver, of))))


@pytest.fixture
def driver() -> Driver:
    """Brokers 0, 1 and 2 with their WALs in the bucket; four partitions, all open on broker 0."""
    driver = Driver()
    for broker in range(3):
        register(driver, broker)
    driver.run(c.CreateTopic(TOPIC, "t", PARTITIONS, {}, False, False, (0,) * PARTITIONS))
    open_all(driver, 0)
    return driver


def test_a_taken_over_replica_set_has_no_master_and_a_new_epoch(driver: Driver) -> None:
    before = driver.image.replica_sets[0].master_epoch
    session(driver, 0, alive=False)
    assert takeover(driver, 1) == before + 1
    found = driver.image.replica_sets[0]
    assert (found.master, found.successor) == (NO_BROKER, 1)
    assert driver.image.leader(partition(driver, 0))[0] == NO_BROKER


def test_only_a_dead_master_with_its_wal_in_the_bucket_is_taken_over_and_only_by_a_living_broker(
    driver: Driver,
) -> None:
    with pytest.raises(NotEligible, match="is alive"):
        takeover(driver, 1)
    session(driver, 0, alive=False)
    with pytest.raises(NotEligible):
        takeover(driver, 0)
    session(driver, 1, alive=False)
    with pytest.raises(NotEligible):
        takeover(driver, 1)
    epoch = register(driver, 0, "b", wal_kind="disk")
    session(driver, 0, alive=False)
    with pytest.raises(NotEligible, match="not in the bucket"):
        takeover(driver, 2)
    with pytest.raises(Fenced):
        driver.run(c.ElectSuccessor(0, 2, epoch - 1))


def test_partitions_are_placed_evenly_on_living_brokers_with_larger_epochs_and_closed_streams(driver: Driver) -> None:
    epochs = {index: driver.image.leader(partition(driver, index))[1] for index in range(PARTITIONS)}
    session(driver, 0, alive=False)
    assert place(driver, takeover(driver, 1)) == 0
    owners = [partition(driver, index).replica_set for index in range(PARTITIONS)]
    assert sorted(owners) == [1, 1, 2, 2]
    for index in range(PARTITIONS):
        one = partition(driver, index)
        assert driver.image.leader(one)[1] > epochs[index]
        assert driver.image.streams[one.first_stream].state == StreamState.CLOSED
    assert driver.image.replica_sets[0].successor == NO_BROKER
    open_all(driver, 1)
    open_all(driver, 2)


def test_a_partition_on_its_way_elsewhere_arrives_there(driver: Driver) -> None:
    driver.run(c.MovePartitions(tuple(c.PartitionMove(TOPIC, index, 2) for index in range(PARTITIONS))))
    session(driver, 0, alive=False)
    place(driver, takeover(driver, 1))
    assert {partition(driver, index).replica_set for index in range(PARTITIONS)} == {2}
    assert not driver.image.moving()


def abandon(driver: Driver, epoch: int, *, of: int = 0, force: bool = False) -> list[int]:
    return list(driver.run(c.Abandon(of, epoch, keys_of(driver, of), force)))


def test_what_a_broker_with_its_wal_on_disk_leaves_is_placed_only_if_it_is_dead_and_somebody_says_so() -> None:
    driver = Driver()
    for broker in range(3):
        epoch = register(driver, broker, wal_kind="disk")
    driver.run(c.CreateTopic(TOPIC, "t", PARTITIONS, {}, False, False, (0,) * PARTITIONS))
    open_all(driver, 0)
    epochs = {index: driver.image.leader(partition(driver, index))[1] for index in range(PARTITIONS)}
    epoch = driver.image.replica_sets[0].master_epoch
    first = partition(driver, 0).first_stream
    driver.commit(epoch, (0, 10), new_object(driver.prepare(), (first + 1, 0, 5)))
    with pytest.raises(NotEligible, match="is alive"):
        abandon(driver, epoch)
    session(driver, 0, alive=False)
    with pytest.raises(Fenced):
        abandon(driver, epoch - 1)
    assert abandon(driver, epoch) == [0, epoch + 1]
    assert sorted(partition(driver, index).replica_set for index in range(PARTITIONS)) == [1, 1, 2, 2]
    assert all(driver.image.leader(partition(driver, index))[1] > epochs[index] for index in range(PARTITIONS))
    assert driver.image.streams[first + 1].end_offset == 5, "what is in the bucket stays"
    assert not lost_replica_sets(driver.image)
    with pytest.raises(Fenced):  # it wakes up: nothing that it says counts
        driver.commit(epoch, (10, 20), new_object(driver.prepare(), (first + 1, 5, 9)))
    open_all(driver, 1)
    open_all(driver, 2)
    register(driver, 0, "b", wal_kind="disk")
    assert driver.image.replica_sets[0].master_epoch == epoch + 2


def test_a_wal_in_the_bucket_is_given_up_only_by_force(driver: Driver) -> None:
    session(driver, 0, alive=False)
    epoch = takeover(driver, 1)
    with pytest.raises(NotEligible, match="in the bucket"):
        abandon(driver, epoch)
    assert abandon(driver, epoch, force=True) == [0, epoch + 1]
    with pytest.raises(Fenced):  # whoever was at it is too late
        place(driver, epoch)


def test_giving_up_goes_in_pieces_and_ends_when_the_broker_comes_back() -> None:
    driver = Driver()
    for broker in range(2):
        register(driver, broker, wal_kind="disk")
    driver.run(c.CreateTopic(TOPIC, "t", PARTITIONS, {}, False, False, (0,) * PARTITIONS))
    open_all(driver, 0)
    epoch = driver.image.replica_sets[0].master_epoch
    session(driver, 0, alive=False)
    left, epoch = driver.run(c.Abandon(0, epoch, keys_of(driver, 0)[:1]))
    assert left == PARTITIONS - 1
    (lost,) = lost_replica_sets(driver.image)
    assert (lost.state, lost.broker, lost.partitions) == (TakeoverState.WAITING, 0, left)
    register(driver, 0, "b", wal_kind="disk")
    with pytest.raises(Fenced):
        abandon(driver, epoch)
    assert driver.image.leader(partition(driver, 1))[0] == 0


def test_a_released_stream_is_opened_anew_by_its_owner(driver: Driver) -> None:
    one = partition(driver, 0)
    epoch = driver.image.replica_sets[0].master_epoch
    driver.run(c.QuarantineStream(0, epoch, one.first_stream + 1, "a gap"))
    before = driver.image.leader(one)
    driver.run(c.ReleaseStream(one.first_stream + 1))
    assert driver.image.streams[one.first_stream + 1].quarantined == ""
    assert driver.image.leader(partition(driver, 0)) == (before[0], before[1] + 1)
    assert driver.image.streams[one.first_stream + 1].as_opened().released_at == 0
    driver.run(c.ReleaseStream(one.first_stream + 1))  # the same again changes nothing
    assert driver.image.leader(partition(driver, 0)) == (before[0], before[1] + 1)
    open_all(driver, 0)


def test_nothing_is_placed_before_the_whole_wal_is_committed(driver: Driver) -> None:
    session(driver, 0, alive=False)
    epoch = takeover(driver, 1)
    with pytest.raises(NotHandedOver, match="ends at 10"):
        place(driver, epoch, wal_offset=10)
    first = partition(driver, 0).first_stream
    driver.commit(epoch, (0, 10), new_object(driver.prepare(), (first + 1, 0, 5)))
    assert place(driver, epoch, wal_offset=10) == 0


def test_a_placement_in_pieces_ends_with_the_last_one_and_may_be_said_twice(driver: Driver) -> None:
    session(driver, 0, alive=False)
    epoch = takeover(driver, 1)
    keys = keys_of(driver, 0)
    assert driver.run(c.PlaceTakenOver(0, epoch, 0, keys[:3])) == 1
    assert driver.run(c.PlaceTakenOver(0, epoch, 0, keys[:3])) == 1
    assert driver.run(c.PlaceTakenOver(0, epoch, 0, keys[3:])) == 0
    with pytest.raises(Fenced, match="is over"):
        driver.run(c.PlaceTakenOver(0, epoch, 0, keys))


def test_a_broker_that_comes_back_ends_the_takeover(driver: Driver) -> None:
    session(driver, 0, alive=False)
    epoch = takeover(driver, 1)
    assert register(driver, 0, "b") == epoch + 1
    assert driver.image.replica_sets[0].successor == NO_BROKER
    with pytest.raises(Fenced):
        place(driver, epoch)
    with pytest.raises(Fenced):
        driver.commit(epoch, (0, 10))
    open_all(driver, 0)
    assert driver.image.leader(partition(driver, 0))[0] == 0


def test_a_successor_may_be_replaced_and_is_stale_then(driver: Driver) -> None:
    session(driver, 0, alive=False)
    first = takeover(driver, 1)
    second = takeover(driver, 2)
    assert second == first + 1
    with pytest.raises(Fenced):
        driver.commit(first, (0, 10))
    assert place(driver, second) == 0


def test_the_lost_are_told_with_what_they_wait_for(driver: Driver) -> None:
    assert not lost_replica_sets(driver.image)
    session(driver, 0, alive=False)
    (lost,) = lost_replica_sets(driver.image)
    assert (lost.state, lost.partitions) == (TakeoverState.DUE, PARTITIONS)
    assert next_successor(driver.image, lost) == 1
    takeover(driver, 1)
    (lost,) = lost_replica_sets(driver.image)
    assert lost.state is TakeoverState.RECOVERING
    assert lost.sentence() == "broker 0 is dead: its 4 partitions are recovered from the bucket by broker 1"
    session(driver, 1, alive=False)
    (lost,) = lost_replica_sets(driver.image)
    assert lost.state is TakeoverState.DUE
    assert next_successor(driver.image, lost) == 2
    register(driver, 0, "b", wal_kind="disk")
    session(driver, 0, alive=False)
    (lost,) = lost_replica_sets(driver.image)
    assert lost.state is TakeoverState.WAITING
    assert lost.sentence() == "broker 0 is dead: its 4 partitions wait for it to come back (wal.kind is disk, not s3)"


class TestClock:
    """A clock that a test moves."""

    __test__ = False

    def __init__(self) -> None:
        self.now_s = 100.0

    def time_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("not used")


def active(
    driver: Driver, clock: TestClock, sessions: BrokerSessions, refuses: Refuses | None = None
) -> tuple[Lifecycle, list[c.AnyCommand]]:
    proposed: list[c.AnyCommand] = []

    async def propose(command: c.AnyCommand) -> None:
        proposed.append(command)
        driver.run(command)

    def image() -> Image:
        return driver.image

    sessions.activated(clock.now_s)
    role = ActiveRole(image, propose, lambda: True, clock.time_ms)
    lifecycle = Lifecycle(
        role,
        sessions=sessions,
        readers=Readers(60.0),
        clock=clock,
        delete=None,
        duties=Duties(role.image, sessions, dict, ControllerSettings()),
        refuses=refuses,
    )
    return lifecycle, proposed


def beat(
    driver: Driver, clock: TestClock, sessions: BrokerSessions, *brokers: int, born_s: float | None = None
) -> None:
    """`born_s`: when their processes registered for the first time; None: now."""
    age_s = 0.0 if born_s is None else clock.now_s - born_s
    for broker in brokers:
        sessions.heartbeat(broker, driver.image.brokers[broker].registration_epoch, broker, clock.now_s, age_s)


async def test_a_broker_whose_connection_closes_is_taken_over_in_the_same_round(driver: Driver) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)
    lifecycle, proposed = active(driver, clock, sessions)
    beat(driver, clock, sessions, 0, 1, 2)
    await lifecycle.round()
    assert not proposed
    sessions.connection_closed(0)
    await lifecycle.round()
    assert [type(each) for each in proposed] == [c.SetBrokerAlive, c.ElectSuccessor]
    await lifecycle.round()
    assert len(proposed) == 2
    sessions.connection_closed(1)  # the successor
    await lifecycle.round()
    assert driver.image.replica_sets[0].successor == 2


async def test_a_refused_command_does_not_hold_up_those_about_other_brokers(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)
    lifecycle, _ = active(driver, clock, sessions)
    beat(driver, clock, sessions, 0, 1, 2)
    run = driver.run

    def refuse(command: c.AnyCommand, *more: Any) -> Any:
        if isinstance(command, c.SetBrokerAlive) and command.broker_id == 0:
            raise InvalidInput("a broker that cannot die")
        return run(command, *more)

    monkeypatch.setattr(driver, "run", refuse)
    for broker in (0, 1):
        sessions.connection_closed(broker)
    await lifecycle.round()
    assert driver.image.brokers[0].alive and not driver.image.brokers[1].alive
    clock.now_s += FAILING_S
    await lifecycle.round()
    assert ["a broker that cannot die" in each for each in lifecycle.problems()] == [True]


async def pass_time(
    driver: Driver,
    clock: TestClock,
    sessions: BrokerSessions,
    lifecycle: Lifecycle,
    seconds: float,
    *alive: int,
    born_s: float | None = None,
) -> None:
    """Rounds and heartbeats of `alive` go on meanwhile."""
    until = clock.now_s + seconds
    while clock.now_s < until:
        clock.now_s = min(until, clock.now_s + 1)
        beat(driver, clock, sessions, *alive, born_s=born_s)
        await lifecycle.ask_after_unheard()
        await lifecycle.round()


def takeovers(proposed: list[c.AnyCommand]) -> list[int]:
    return [each.replica_set_id for each in proposed if isinstance(each, c.ElectSuccessor)]


async def test_who_was_dead_before_this_controller_became_active_gets_a_session_time_out(driver: Driver) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)
    beat(driver, clock, sessions, 0, 1, 2)  # a follower hears them, too
    clock.now_s += 5
    beat(driver, clock, sessions, 1, 2)
    sessions.connection_closed(0)
    session(driver, 0, alive=False)
    lifecycle, proposed = active(driver, clock, sessions)
    await pass_time(driver, clock, sessions, lifecycle, 9.5, 1, 2)
    assert not proposed
    await pass_time(driver, clock, sessions, lifecycle, 0.5, 1, 2)
    assert takeovers(proposed) == [0]


async def test_a_broker_that_died_with_the_active_controller_is_dead_as_soon_as_another_is_active(
    driver: Driver,
) -> None:
    clock, sessions, asked = TestClock(), BrokerSessions(10.0), list[str]()

    async def refuses(address: str) -> bool:
        asked.append(address)
        return True

    beat(driver, clock, sessions, 0, 1, 2)  # a follower hears them, too
    clock.now_s += 1
    sessions.connection_closed(0)
    lifecycle, proposed = active(driver, clock, sessions, refuses)
    await lifecycle.round()
    assert not proposed  # its connection to this controller may have been the only one that broke
    await lifecycle.ask_after_unheard()
    await lifecycle.round()
    assert [type(each) for each in proposed] == [c.SetBrokerAlive, c.ElectSuccessor]
    assert asked == [driver.image.brokers[0].peer_address]


async def test_a_broker_that_looks_dead_to_a_new_controller_and_listens_has_a_grace(driver: Driver) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)

    async def listens(_address: str) -> bool:
        return False

    beat(driver, clock, sessions, 0, 1, 2)
    sessions.connection_closed(0)
    lifecycle, proposed = active(driver, clock, sessions, listens)
    await lifecycle.ask_after_unheard()
    await lifecycle.round()
    assert not proposed
    beat(driver, clock, sessions, 0)
    await pass_time(driver, clock, sessions, lifecycle, 5, 0, 1, 2)
    assert not proposed


async def test_a_broker_that_was_never_heard_is_dead_when_nobody_listens_where_it_did(driver: Driver) -> None:
    clock, sessions, asked = TestClock(), BrokerSessions(10.0), list[str]()

    async def refuses(address: str) -> bool:
        asked.append(address)
        return True

    lifecycle, proposed = active(driver, clock, sessions, refuses)
    await pass_time(driver, clock, sessions, lifecycle, UNHEARD_S - 0.5, 1, 2, born_s=-100)
    assert not proposed and not asked
    await pass_time(driver, clock, sessions, lifecycle, 0.5, 1, 2, born_s=-100)
    assert asked == ["host:7000"]
    assert proposed[0] == c.SetBrokerAlive(0, driver.image.brokers[0].registration_epoch, False)
    assert takeovers(proposed) == [0]


async def test_a_broker_that_was_never_heard_and_does_not_refuse_gets_a_session_time_out(driver: Driver) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)

    async def refuses(address: str) -> bool:
        return False

    lifecycle, proposed = active(driver, clock, sessions, refuses)
    await pass_time(driver, clock, sessions, lifecycle, 9.5, 1, 2, born_s=-100)
    assert not proposed
    await pass_time(driver, clock, sessions, lifecycle, 2, 1, 2, born_s=-100)
    assert takeovers(proposed) == [0]


@pytest.mark.parametrize("how", ["heard", "registered"])
async def test_a_broker_that_comes_while_it_is_asked_after_is_not_dead(driver: Driver, how: str) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)

    async def refuses(address: str) -> bool:
        if how == "registered":
            register(driver, 0, "b")
        beat(driver, clock, sessions, 0)
        return True

    lifecycle, proposed = active(driver, clock, sessions, refuses)
    await pass_time(driver, clock, sessions, lifecycle, UNHEARD_S + 3, 1, 2, born_s=-100)
    assert not proposed


async def test_a_cluster_that_starts_as_a_whole_waits_for_who_is_slow_and_not_for_who_dies_meanwhile(
    driver: Driver,
) -> None:
    driver.run(c.CreateTopic(b"u" * 16, "u", 2, {}, False, False, (1, 2)))
    for broker in range(3):
        session(driver, broker, alive=False)
    clock, sessions = TestClock(), BrokerSessions(10.0)
    lifecycle, proposed = active(driver, clock, sessions)
    await pass_time(driver, clock, sessions, lifecycle, 60)
    await pass_time(driver, clock, sessions, lifecycle, 15, 1)
    await pass_time(driver, clock, sessions, lifecycle, 10, 1, 2)
    assert takeovers(proposed) == []
    sessions.connection_closed(2)
    await pass_time(driver, clock, sessions, lifecycle, 1, 1)
    assert takeovers(proposed) == [2]
    await pass_time(driver, clock, sessions, lifecycle, 3, 1)
    assert takeovers(proposed) == [2]
    await pass_time(driver, clock, sessions, lifecycle, 3, 1)
    assert takeovers(proposed) == [2, 0], "three session time-outs after the first one came back"


async def test_a_controller_that_comes_back_into_a_running_cluster_waits_for_no_start(driver: Driver) -> None:
    """Restarted a moment before it became active, it has not heard of a broker that dies with the active controller."""
    clock, sessions = TestClock(), BrokerSessions(10.0)
    long_ago_s = clock.now_s - 1000
    beat(driver, clock, sessions, 2)  # which came back itself a moment ago
    beat(driver, clock, sessions, 1, born_s=long_ago_s)
    lifecycle, proposed = active(driver, clock, sessions)
    await pass_time(driver, clock, sessions, lifecycle, 9, 1, 2, born_s=long_ago_s)
    assert not proposed
    await pass_time(driver, clock, sessions, lifecycle, 2, 1, 2, born_s=long_ago_s)
    assert takeovers(proposed) == [0], "after the one session time-out of a broker never heard"


async def test_the_start_of_a_cluster_is_the_same_for_a_controller_that_becomes_active_later(driver: Driver) -> None:
    clock, first, second = TestClock(), BrokerSessions(10.0, 40.0), BrokerSessions(10.0, 40.0)
    began_s = clock.now_s
    lifecycle, proposed = active(driver, clock, first)
    await pass_time(driver, clock, first, lifecycle, 12, 1, born_s=began_s)
    beat(driver, clock, second, 1, born_s=began_s)  # it comes later than the broker
    lifecycle, later = active(driver, clock, second)
    await pass_time(driver, clock, second, lifecycle, 27, 1, 2, born_s=began_s)
    assert takeovers(proposed) == takeovers(later) == []
    await pass_time(driver, clock, second, lifecycle, 2, 1, 2, born_s=began_s)
    assert takeovers(later) == [0], "40 s after the first one came back"


async def test_a_cluster_that_was_killed_as_a_whole_waits_as_long_for_who_is_slow(driver: Driver) -> None:
    """Nobody has said that its brokers are dead: the metadata have them alive when it starts again."""
    clock, sessions = TestClock(), BrokerSessions(10.0)
    lifecycle, proposed = active(driver, clock, sessions)
    await lifecycle.round()
    began_s = clock.now_s
    await pass_time(driver, clock, sessions, lifecycle, 29, 1, 2, born_s=began_s)
    assert takeovers(proposed) == []
    assert not driver.image.brokers[0].alive
    await pass_time(driver, clock, sessions, lifecycle, 2, 1, 2, born_s=began_s)
    assert takeovers(proposed) == [0]


async def test_ages_do_not_count_for_who_saw_all_brokers_go_and_one_come_back(driver: Driver) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)
    lifecycle, proposed = active(driver, clock, sessions)
    long_ago_s = clock.now_s - 1000
    await pass_time(driver, clock, sessions, lifecycle, 5, 0, 1, 2, born_s=long_ago_s)
    await pass_time(driver, clock, sessions, lifecycle, 60)  # the network between lost everything
    await pass_time(driver, clock, sessions, lifecycle, 29, 1, 2, born_s=long_ago_s)
    assert takeovers(proposed) == []
    await pass_time(driver, clock, sessions, lifecycle, 3, 1, 2, born_s=long_ago_s)
    assert takeovers(proposed) == [0]


async def test_who_stops_in_good_order_is_not_taken_over_from_at_once(driver: Driver) -> None:
    clock, sessions = TestClock(), BrokerSessions(10.0)
    lifecycle, proposed = active(driver, clock, sessions)
    await pass_time(driver, clock, sessions, lifecycle, 40, 0, 1, 2)
    sessions.leaving(0, clock.now_s)
    sessions.connection_closed(0)
    await pass_time(driver, clock, sessions, lifecycle, 9, 1, 2)
    assert [type(each) for each in proposed] == [c.SetBrokerAlive] and not driver.image.brokers[0].alive
    await pass_time(driver, clock, sessions, lifecycle, 2, 1, 2)
    assert takeovers(proposed) == [0]


async def test_work_that_fails_in_each_round_is_a_problem_until_it_succeeds(driver: Driver) -> None:
    """Only the log told of it, and nobody was declared dead, or elected, meanwhile."""
    clock, sessions = TestClock(), BrokerSessions(10.0)
    lifecycle, _ = active(driver, clock, sessions)
    beat(driver, clock, sessions, 0, 1, 2)
    sessions.connection_closed(0)

    def refuse(_command: c.AnyCommand) -> None:
        raise InvalidInput("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "run", refuse)
        await lifecycle.round()
        assert lifecycle.problems() == [], "the next round may succeed"
        clock.now_s += FAILING_S
        await lifecycle.round()
    assert lifecycle.problems() == [f"has failed at its work (liveness) for {FAILING_S:.0f} s: planted"]
    await lifecycle.round()
    assert lifecycle.problems() == [] and not driver.image.brokers[0].alive
