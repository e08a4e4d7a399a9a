"""Failover without a hot tier in the controller's state: who may take over, what is placed, and that nothing is lost.

The machine at the end runs brokers whose WALs are in the bucket, with fences as `tidelog.storage.wal.s3.chain` has
them, and successors that may stop, be late or be replaced at any step. It checks rules 3 and 4 where it counts: whoever
owns a partition finds every record that was ever acknowledged, and a master that was replaced acknowledges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tests.support.examples import examples
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.lifecycle import Lifecycle, Refuses
from tidelog.controller.active.readers import Readers
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.active.sessions import UNHEARD_S, BrokerSessions
from tidelog.controller.image.image import Image
from tidelog.controller.image.lost import TakeoverState, lost_replica_sets, next_successor
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import NotEligible, NotHandedOver
from tidelog.controller.model.records import NO_BROKER, PartitionRecord, StreamState
from tidelog.runtime.errors import Fenced, TidelogError
from tidelog.storage.commits import CommitObjects

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
        duties=Duties(role.image, sessions, dict, 2_000),
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


@dataclass
class BucketWal:
    """The WAL of one replica set: what landed, and the newest fence."""

    fence: int = 0
    records: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(WAL end, stream, stream epoch, start, end) of the data streams."""
    end: int = 0


@dataclass
class Process:
    """A broker's process: it may be paused, and not know what has happened."""

    broker: int
    incarnation: int = 0
    running: bool = True
    master_epoch: int = 0
    logs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By partition: (leader epoch, next offset of its data stream)."""
    takeovers: dict[int, int] = field(default_factory=dict)
    """By replica set: the epoch this process takes it over with, and has fenced the WAL for."""


class FailoverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.wals = [BucketWal() for _ in range(3)]
        self.processes = [Process(broker) for broker in range(3)]
        self.acked = dict.fromkeys(range(PARTITIONS), 0)

    @initialize()
    def begin(self) -> None:
        for process in self.processes:
            self.start(process)
        self.driver.run(c.CreateTopic(TOPIC, "t", PARTITIONS, {}, False, False, (0, 1, 2, 0)))
        for index in range(PARTITIONS):
            self.open_log(index)

    def start(self, process: Process) -> None:
        process.incarnation += 1
        process.running, process.logs, process.takeovers = True, {}, {}
        process.master_epoch = register(self.driver, process.broker, str(process.incarnation))
        self.plant(process.broker, process.master_epoch)

    def plant(self, replica_set: int, epoch: int) -> bool:
        wal = self.wals[replica_set]
        if epoch <= wal.fence:
            return False
        wal.fence = epoch
        return True

    def attempt(self, command: c.AnyCommand) -> Any:
        try:
            return self.driver.run(command)
        except TidelogError as error:
            return error

    def draw(self, data: st.DataObject, *, running: bool = True) -> Process | None:
        found = [each for each in self.processes if each.running == running]
        return data.draw(st.sampled_from(found)) if found else None

    def data_stream(self, index: int) -> int:
        return partition(self.driver, index).first_stream + 1

    def recovered_end(self, replica_set: int, index: int) -> int:
        """Where a partition ends for whoever recovers the WAL of its owner."""
        record = self.driver.image.streams[self.data_stream(index)]
        end = record.end_offset
        for _, stream, epoch, start, stop in self.wals[replica_set].records:
            if stream == record.id and epoch >= record.owner_since_epoch and start == end:
                end = stop
        return end

    @rule(index=st.integers(0, PARTITIONS - 1))
    def open_log(self, index: int) -> None:
        one = partition(self.driver, index)
        process = self.processes[one.replica_set]
        if not process.running or index in process.logs:
            return
        _, epoch = self.driver.image.leader(one)
        pairs = tuple((one.first_stream + step, epoch) for step in range(4))
        if not isinstance(self.attempt(c.OpenStreams(process.broker, process.master_epoch, pairs)), TidelogError):
            process.logs[index] = (epoch, self.recovered_end(process.broker, index))
            assert process.logs[index][1] >= self.acked[index]

    @rule(data=st.data(), lands=st.booleans(), count=st.integers(1, 3))
    def append(self, data: st.DataObject, lands: bool, count: int) -> None:
        """A zombie appends, too: its session may be over, its partitions elsewhere."""
        able = [(process.broker, index) for process in self.processes if process.running for index in process.logs]
        if not able:
            return
        broker, index = data.draw(st.sampled_from(able))
        self.append_to(self.processes[broker], index, lands, count)

    def append_to(self, process: Process, index: int, lands: bool, count: int) -> None:
        epoch, start = process.logs[index]
        wal = self.wals[process.broker]
        if wal.fence != process.master_epoch:
            process.running = False  # 412: the WAL has failed, and the process ends
            return
        wal.end += 10
        wal.records.append((wal.end, self.data_stream(index), epoch, start, start + count))
        process.logs[index] = (epoch, start + count)
        if lands:  # else the answer gets lost: durable, and nobody knows
            self.acked[index] = start + count

    def upload(self, replica_set: int, epoch: int) -> Any:
        """Commit all that is in the WAL and not in the bucket yet, as `Storage` does."""
        wal, image = self.wals[replica_set], self.driver.image
        committed = image.replica_sets[replica_set].committed_wal_offset
        ranges: dict[int, tuple[int, int]] = {}
        for index in range(PARTITIONS):
            record = image.streams[self.data_stream(index)]
            if record.replica_set == replica_set and record.state == StreamState.OPENED:
                end = self.recovered_end(replica_set, index)
                if end > record.end_offset:
                    ranges[record.id] = (record.end_offset, end)
        if wal.end == committed:
            return None
        objects = []
        if ranges:
            new = new_object(self.driver.prepare(), *((stream, *ends) for stream, ends in sorted(ranges.items())))
            objects = [new]
        request = CommitObjects(replica_set, epoch, committed, wal.end, tuple(objects))
        result = self.attempt(c.Commit(request))
        if not isinstance(result, TidelogError):
            wal.records = []
        return result

    @rule(data=st.data())
    def upload_own(self, data: st.DataObject) -> None:
        process = self.draw(data)
        if process is not None and self.wals[process.broker].fence == process.master_epoch:
            self.upload(process.broker, process.master_epoch)

    @rule(data=st.data(), fences=st.booleans())
    def elect_successor(self, data: st.DataObject, fences: bool) -> None:
        image = self.driver.image
        lost = [one for one in range(3) if image.master_of(one) is None]
        living = [one for one in range(3) if image.master_of(one) is not None]
        if not lost or not living:
            return
        of, successor = data.draw(st.sampled_from(lost)), data.draw(st.sampled_from(living))
        epoch = self.driver.image.replica_sets[of].master_epoch
        result = self.attempt(c.ElectSuccessor(of, successor, epoch))
        if isinstance(result, TidelogError):
            assert isinstance(result, NotEligible), result
        elif fences:
            self.successors_fence()

    @rule()
    def successors_fence(self) -> None:
        for record in self.driver.image.replica_sets.values():
            process = self.processes[record.successor] if record.successor != NO_BROKER else None
            if process is not None and process.running and self.plant(record.id, record.master_epoch):
                process.takeovers[record.id] = record.master_epoch

    @rule(data=st.data(), uploads=st.booleans(), places=st.booleans(), some=st.integers(1, PARTITIONS))
    def successor_goes_on(self, data: st.DataObject, uploads: bool, places: bool, some: int) -> None:
        """With an epoch that may have ended long ago."""
        able = [(process.broker, of) for process in self.processes if process.running for of in process.takeovers]
        if not able:
            return
        broker, of = data.draw(st.sampled_from(able))
        self.go_on(self.processes[broker], of, uploads, places, some)

    def go_on(self, process: Process, of: int, uploads: bool, places: bool, some: int) -> None:
        epoch, wal = process.takeovers[of], self.wals[of]
        if wal.fence != epoch:
            del process.takeovers[of]
            return
        result = self.upload(of, epoch) if uploads else None
        if places:
            result = self.attempt(c.PlaceTakenOver(of, epoch, wal.end, keys_of(self.driver, of)[:some]))
        if isinstance(result, Fenced):
            del process.takeovers[of]

    @rule(data=st.data(), steps=st.integers(1, 6), paused=st.booleans(), uploads=st.booleans())
    def fail_over(self, data: st.DataObject, steps: int, paused: bool, uploads: bool) -> None:
        """The whole way, or a part of it: by chance alone it is rarely gone."""
        victim, successor = data.draw(st.permutations(self.processes))[:2]
        image = self.driver.image
        if not victim.running or not successor.running or image.master_of(successor.broker) is None:
            return
        for index in range(PARTITIONS):
            self.open_log(index)
        for index in list(victim.logs):
            self.append_to(victim, index, lands=True, count=1)
        victim.running = victim.running and paused
        session(self.driver, victim.broker, alive=False)
        of = victim.broker
        if steps > 1:
            self.attempt(c.ElectSuccessor(of, successor.broker, image.replica_sets[of].master_epoch))
        if steps > 2:
            self.successors_fence()
        if steps > 3 and of in successor.takeovers:
            self.go_on(successor, of, uploads, True, 2)
        if steps > 4 and of in successor.takeovers:
            self.go_on(successor, of, True, True, PARTITIONS)
        if steps > 5 and not victim.running:
            self.start(victim)

    @rule(data=st.data(), paused=st.booleans())
    def die(self, data: st.DataObject, paused: bool) -> None:
        """Or be stopped for so long that its session ends: a zombie goes on where it was."""
        process = self.draw(data)
        if process is not None:
            process.running = paused
            session(self.driver, process.broker, alive=False)

    @rule(data=st.data())
    def heartbeat_again(self, data: st.DataObject) -> None:
        process = self.draw(data)
        if process is not None:
            session(self.driver, process.broker, alive=True)

    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        process = self.draw(data, running=False)
        if process is not None:
            self.start(process)

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        for index in self.acked if self.driver.image.partition(TOPIC, 0) else ():
            owner = partition(self.driver, index).replica_set
            assert self.recovered_end(owner, index) >= self.acked[index], index

    @invariant()
    def one_process_at_most_can_acknowledge(self) -> None:
        for index in self.acked if self.driver.image.partition(TOPIC, 0) else ():
            able = [
                each.broker
                for each in self.processes
                if each.running and index in each.logs and self.wals[each.broker].fence == each.master_epoch
            ]
            assert len(able) <= 1, (index, able)

    @invariant()
    def master_or_successor(self) -> None:
        for record in self.driver.image.replica_sets.values():
            assert NO_BROKER in (record.master, record.successor)


TestFailover = FailoverMachine.TestCase
TestFailover.settings = settings(max_examples=examples(100), stateful_step_count=80, deadline=None)
