"""Partition moves in the controller's state: what each command takes and refuses, and that nothing is ever lost.

The machine at the end runs brokers that keep to the protocol of docs/design/0006-partition-moves.md, with everything
around them that may go wrong: deaths at any step, commands whose outcome is not known and that arrive much later or
twice, placements that change all the time. It checks rules 3 and 4 where it counts: whoever opens a partition finds
every record that was ever acknowledged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tests.support.examples import examples
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.lifecycle import Lifecycle
from tidelog.controller.active.readers import Readers
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.image.image import Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import (
    ErrorInfo,
    InvalidReplicaAssignment,
    NoReassignmentInProgress,
    NotHandedOver,
    TargetNotAlive,
    from_wire,
)
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionRecord, StreamState
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound, TidelogError
from tidelog.stream.opened import OpenedStream

Key = tuple[bytes, int]
ERRORS = list[ErrorInfo | None]


def judge(driver: Driver, command: c.AnyCommand) -> TidelogError | None:
    """What the only partition of a command was refused with."""
    (found,) = driver.run(command, ERRORS)
    return None if found is None else from_wire(found)


def move(driver: Driver, target: int, index: int = 0) -> TidelogError | None:
    return judge(driver, c.MovePartitions((c.PartitionMove(TOPIC, index, target),)))


def closed(driver: Driver, index: int = 0, **changes: Any) -> c.ClosedPartition:
    partition = driver.image.partition(TOPIC, index)
    assert partition is not None
    streams = [driver.image.streams[partition.first_stream + step] for step in range(4)]
    ends = tuple(stream.end_offset for stream in streams)
    facts = {"epoch": streams[0].epoch, "end_offsets": ends, **changes}
    return c.ClosedPartition(TOPIC, index, **facts)


def record(driver: Driver, index: int = 0) -> PartitionRecord:
    found = driver.image.partition(TOPIC, index)
    assert found is not None
    return found


def open_on(driver: Driver, broker: int, index: int = 0) -> list[OpenedStream]:
    partition = record(driver, index)
    _, epoch = driver.image.leader(partition)
    pairs = tuple((partition.first_stream + step, epoch) for step in range(4))
    master_epoch = driver.image.replica_sets[broker].master_epoch
    opened: list[OpenedStream] = driver.run(c.OpenStreams(broker, master_epoch, pairs), list[OpenedStream])
    return opened


@pytest.fixture
def driver() -> Driver:
    """Brokers 0, 1 and 2; one partition, open on broker 0."""
    driver = Driver()
    for broker in (0, 1, 2):
        driver.broker(broker)
    driver.run(c.CreateTopic(TOPIC, "t", 1, {}, False, False, (0,)))
    open_on(driver, 0)
    return driver


def hand_over(driver: Driver, broker: int = 0, **changes: Any) -> TidelogError | None:
    epoch = driver.image.replica_sets[broker].master_epoch
    return judge(driver, c.HandOver(broker, epoch, (closed(driver, **changes),)))


def test_a_placement_is_committed_without_an_election(driver: Driver) -> None:
    before = driver.image.leader(record(driver))
    driver.now_ms = 5_000
    assert move(driver, 1) is None
    assert (record(driver).replica_set, record(driver).target, record(driver).moving_since_ms) == (0, 1, 5_000)
    assert driver.image.leader(record(driver)) == before
    assert [each.index for each in driver.image.moving()] == [0]


def test_the_same_placement_again_changes_nothing_and_another_one_wins(driver: Driver) -> None:
    move(driver, 1)
    since = record(driver).moving_since_ms
    driver.now_ms += 1
    assert move(driver, 1) is None
    assert record(driver).moving_since_ms == since
    assert move(driver, 2) is None
    assert record(driver).target == 2


def test_a_move_back_home_or_a_cancel_ends_the_move(driver: Driver) -> None:
    for end in (0, NO_REPLICA_SET):
        move(driver, 1)
        assert move(driver, end) is None
        assert record(driver).target == NO_REPLICA_SET
        assert not driver.image.moving()
    assert move(driver, 0) is None
    assert isinstance(move(driver, NO_REPLICA_SET), NoReassignmentInProgress)


def test_a_move_needs_a_partition_and_a_living_target(driver: Driver) -> None:
    assert isinstance(move(driver, 1, index=7), NotFound)
    assert isinstance(move(driver, 9), InvalidReplicaAssignment)
    epoch = driver.image.brokers[1].registration_epoch
    driver.run(c.SetBrokerAlive(1, epoch, False))
    assert isinstance(move(driver, 1), InvalidReplicaAssignment)
    with pytest.raises(InvalidInput, match="1 to 1024"):
        driver.run(c.MovePartitions(()))
    with pytest.raises(InvalidInput):
        driver.run(c.MovePartitions((c.PartitionMove(TOPIC, 0, 1),) * 1_025))


def test_each_partition_of_a_command_stands_for_itself(driver: Driver) -> None:
    moves = (c.PartitionMove(TOPIC, 9, 1), c.PartitionMove(TOPIC, 0, 1))
    first, second = driver.run(c.MovePartitions(moves), ERRORS)
    assert first.name == "NotFound"
    assert second is None
    assert record(driver).target == 1


def test_a_hand_over_closes_the_streams_and_elects_the_target_in_one_step(driver: Driver) -> None:
    _, old_epoch = driver.image.leader(record(driver))
    move(driver, 1)
    assert hand_over(driver) is None
    partition = record(driver)
    leader, epoch = driver.image.leader(partition)
    assert (leader, partition.replica_set, partition.target) == (1, 1, NO_REPLICA_SET)
    assert epoch > old_epoch
    assert all(driver.image.streams[partition.first_stream + n].state == StreamState.CLOSED for n in range(4))
    opened = open_on(driver, 1)
    assert [each.owner_since_epoch for each in opened] == [epoch] * 4
    with pytest.raises(Fenced):
        open_on(driver, 0)


def ready(driver: Driver, broker: int, later: int = 0) -> dict[str, int]:
    """What a broker says of itself; `later`: its master epoch has moved on since."""
    epoch = driver.image.replica_sets[broker].master_epoch
    return {"ready_replica_set": broker, "ready_master_epoch": epoch - later}


def states(driver: Driver) -> set[tuple[int, int, int]]:
    first = record(driver).first_stream
    streams = [driver.image.streams[first + n] for n in range(4)]
    return {(one.state, one.replica_set, one.epoch) for one in streams}


def test_a_target_that_is_ready_has_its_streams_opened_by_the_hand_over(driver: Driver) -> None:
    move(driver, 1)
    assert hand_over(driver, **ready(driver, 1)) is None
    leader, epoch = driver.image.leader(record(driver))
    assert leader == 1
    assert states(driver) == {(StreamState.OPENED, 1, epoch)}
    first = record(driver).first_stream
    told = [driver.image.streams[first + n] for n in range(4)]
    assert open_on(driver, 1) == [one.as_opened() for one in told], "asking would change nothing"
    assert {one.owner_since_epoch for one in told} == {epoch}
    with pytest.raises(Fenced):
        open_on(driver, 0)


@pytest.mark.parametrize(("said", "later"), [(1, 1), (2, 0)])
def test_what_an_earlier_life_or_another_target_said_opens_nothing(driver: Driver, said: int, later: int) -> None:
    move(driver, 1)
    _, before = driver.image.leader(record(driver))
    assert hand_over(driver, **ready(driver, said, later)) is None
    assert driver.image.leader(record(driver))[0] == 1
    assert states(driver) == {(StreamState.CLOSED, 0, before)}
    open_on(driver, 1)


def test_a_hand_over_is_refused_while_something_is_not_in_the_bucket(driver: Driver) -> None:
    move(driver, 1)
    assert isinstance(hand_over(driver, end_offsets=(0, 1, 0, 0)), NotHandedOver)
    assert record(driver).replica_set == 0
    data = record(driver).first_stream + 1
    driver.commit(driver.image.replica_sets[0].master_epoch, (0, 9), new_object(driver.prepare(), (data, 0, 1)))
    assert hand_over(driver, end_offsets=(0, 1, 0, 0)) is None


def test_a_hand_over_is_refused_after_a_cancel_by_a_stale_epoch_and_without_a_living_target(driver: Driver) -> None:
    assert isinstance(hand_over(driver), NoReassignmentInProgress)
    move(driver, 1)
    assert isinstance(hand_over(driver, epoch=0), Fenced)
    with pytest.raises(Fenced, match="stale"):
        driver.run(c.HandOver(0, driver.image.replica_sets[0].master_epoch - 1, (closed(driver),)))
    driver.run(c.SetBrokerAlive(1, driver.image.brokers[1].registration_epoch, False))
    assert isinstance(hand_over(driver), TargetNotAlive)
    assert record(driver).target == 1
    assert driver.image.leader(record(driver))[0] == 0


def test_the_meta_stream_starts_at_its_rewrite_after_a_hand_over(driver: Driver) -> None:
    meta = record(driver).first_stream
    driver.commit(driver.image.replica_sets[0].master_epoch, (0, 9), new_object(driver.prepare(), (meta, 0, 7)))
    move(driver, 1)
    assert hand_over(driver, meta_start=5) is None
    assert (driver.image.streams[meta].start_offset, driver.image.streams[meta].end_offset) == (5, 7)


def test_a_hand_over_that_comes_after_a_reclaim_and_a_reopening_is_stale(driver: Driver) -> None:
    move(driver, 1)
    late = c.HandOver(0, driver.image.replica_sets[0].master_epoch, (closed(driver),))
    _, old_epoch = driver.image.leader(record(driver))
    assert judge(driver, c.ReclaimPartitions(late.replica_set_id, late.master_epoch, ((TOPIC, 0),))) is None
    assert driver.image.leader(record(driver)) == (0, old_epoch + 1)
    open_on(driver, 0)
    assert isinstance(judge(driver, late), Fenced)
    assert record(driver).replica_set == 0


def test_a_reclaim_after_the_hand_over_took_effect_is_refused(driver: Driver) -> None:
    move(driver, 1)
    hand_over(driver)
    epoch = driver.image.replica_sets[0].master_epoch
    assert isinstance(judge(driver, c.ReclaimPartitions(0, epoch, ((TOPIC, 0),))), Fenced)


def test_an_election_needs_closed_streams(driver: Driver) -> None:
    move(driver, 1)
    elect = c.ElectPartitions(((TOPIC, 0),))
    assert isinstance(judge(driver, elect), NotHandedOver)
    streams = closed_streams(driver)
    driver.run(c.CloseStreams(0, driver.image.replica_sets[0].master_epoch, streams))
    assert judge(driver, elect) is None
    assert driver.image.leader(record(driver))[0] == 1
    assert isinstance(judge(driver, elect), NoReassignmentInProgress)


def closed_streams(driver: Driver) -> tuple[tuple[int, int], ...]:
    first = record(driver).first_stream
    return tuple((first + step, driver.image.streams[first + step].epoch) for step in range(4))


def test_a_stream_that_is_open_elsewhere_is_never_taken_over_by_a_larger_epoch(driver: Driver) -> None:
    first = record(driver).first_stream
    with pytest.raises(Fenced):
        driver.run(c.OpenStreams(1, driver.image.replica_sets[1].master_epoch, ((first, 1_000),)))


class OneTime:
    """A clock that stands."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def time_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("not used")


async def test_the_timer_elects_only_what_is_closed_and_due(driver: Driver) -> None:
    proposed: list[c.AnyCommand] = []

    async def propose(command: c.AnyCommand) -> None:
        proposed.append(command)
        driver.run(command)

    clock = OneTime(driver.now_ms)
    sessions = BrokerSessions(1_000.0)

    def image() -> Image:
        return driver.image

    role = ActiveRole(image, propose, lambda: True, lambda: clock.now_ms)
    duties = Duties(role.image, sessions, dict, ControllerSettings())
    lifecycle = Lifecycle(role, sessions=sessions, readers=Readers(60.0), clock=clock, delete=None, duties=duties)
    move(driver, 1)
    await lifecycle.round()
    clock.now_ms += 10_000
    await lifecycle.round()
    assert not proposed, "the owner has it open"
    move(driver, -1)
    driver.run(c.CloseStreams(0, driver.image.replica_sets[0].master_epoch, closed_streams(driver)))
    await lifecycle.round()
    move(driver, 1)
    await lifecycle.round()
    clock.now_ms += 1_999
    await lifecycle.round()
    assert not proposed, "not yet"
    clock.now_ms += 1
    await lifecycle.round()
    assert driver.image.leader(record(driver))[0] == 1
    await lifecycle.round()
    assert len(proposed) == 1


@dataclass
class Process:
    """One broker: what lives in its process, and its WAL, which outlives it."""

    broker: int
    incarnation: int = 0
    running: bool = False
    master_epoch: int = 0
    open: dict[Key, int] = field(default_factory=dict)
    """Leader epochs of the logs that take appends."""
    closing: dict[Key, int] = field(default_factory=dict)
    """Closed for a hand-over, with the epochs they were opened with."""
    doubtful: set[Key] = field(default_factory=set)
    """A hand-over was sent and its outcome is not known."""
    wal: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(stream, epoch, start, end) of the data streams."""
    wal_committed: int = 0


class MoveMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.processes = [Process(broker) for broker in range(3)]
        self.acked: dict[Key, int] = {}
        self.in_flight: list[c.AnyCommand] = []
        self.epochs: dict[int, int] = {}
        self.leader_epochs: dict[Key, tuple[int, int]] = {}
        self.placed: dict[Key, int] = {}

    @initialize()
    def begin(self) -> None:
        for process in self.processes:
            self.start(process)
        self.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (0, 1)))
        for index in range(2):
            self.acked[TOPIC, index] = 0
            self.placed[TOPIC, index] = index

    # -- helpers

    def process(self, data: st.DataObject, running: bool = True) -> Process | None:
        found = [each for each in self.processes if each.running == running]
        return data.draw(st.sampled_from(found)) if found else None

    def key(self, data: st.DataObject) -> Key:
        return data.draw(st.sampled_from(sorted(self.acked)))

    def pairs(self, *, may: Callable[[Process, Key], bool]) -> list[tuple[Process, Key]]:
        return [(each, key) for each in self.processes if each.running for key in self.acked if may(each, key)]

    def can_open(self) -> list[tuple[Process, Key]]:
        return self.pairs(
            may=lambda process, key: (
                record(self.driver, key[1]).replica_set == process.broker
                and key not in process.open
                and key not in process.doubtful
            )
        )

    def can_append(self) -> list[tuple[Process, Key]]:
        return self.pairs(may=lambda process, key: key in process.open)

    def can_close(self) -> list[tuple[Process, Key]]:
        return self.pairs(
            may=lambda process, key: key in process.open and record(self.driver, key[1]).target != NO_REPLICA_SET
        )

    def can_hand_over(self) -> list[tuple[Process, Key]]:
        return self.pairs(may=lambda process, key: key in process.closing and key not in process.doubtful)

    def can_reclaim(self) -> list[tuple[Process, Key]]:
        return self.pairs(may=lambda process, key: key in process.doubtful)

    def attempt(self, command: c.AnyCommand) -> TidelogError | None:
        try:
            return judge(self.driver, command)
        except TidelogError as error:
            return error

    def start(self, process: Process) -> None:
        process.incarnation += 1
        process.running = True
        process.open.clear()
        process.closing.clear()
        process.doubtful.clear()
        process.master_epoch = self.driver.broker(process.broker, str(process.incarnation))

    def data_stream(self, key: Key) -> int:
        return record(self.driver, key[1]).first_stream + 1

    def tail(self, process: Process, stream_id: int) -> int:
        """Where the stream ends with what the WAL holds of it and counts: as `tidelog.storage.cache.recovered` does."""
        stream = self.driver.image.streams[stream_id]
        end = stream.end_offset
        for one, epoch, start, stop in process.wal:
            if one == stream_id and epoch >= stream.owner_since_epoch and start >= end:
                assert start == end, "a gap between the bucket and the WAL"
                end = stop
        return end

    # -- what brokers do

    @precondition(lambda self: self.can_open())
    @rule(data=st.data())
    def open_log(self, data: st.DataObject) -> None:
        self.opens(*data.draw(st.sampled_from(self.can_open())), twice=data.draw(st.booleans()))

    def opens(self, process: Process, key: Key, *, twice: bool) -> None:
        """Open the log; `twice`: the request arrives a second time, later. What a hand-over opened needs no request."""
        partition = record(self.driver, key[1])
        epoch = partition.epoch_base + process.master_epoch
        pairs = tuple((partition.first_stream + step, epoch) for step in range(4))
        command = c.OpenStreams(process.broker, process.master_epoch, pairs)
        streams = [self.driver.image.streams[one] for one, _ in pairs]
        ours = (StreamState.OPENED, process.broker, epoch)
        if twice or any((one.state, one.replica_set, one.epoch) != ours for one in streams):
            if twice:
                self.in_flight.append(command)
            self.driver.run(command)
        process.closing.pop(key, None)
        process.open[key] = epoch
        end = self.tail(process, partition.first_stream + 1)
        assert end == self.acked[key], f"{self.acked[key]} acknowledged, {end} found"

    @precondition(lambda self: self.can_append())
    @rule(data=st.data(), count=st.integers(1, 5))
    def append(self, data: st.DataObject, count: int) -> None:
        self.appends(*data.draw(st.sampled_from(self.can_append())), count)

    def appends(self, process: Process, key: Key, count: int) -> None:
        start = self.acked[key]
        process.wal.append((self.data_stream(key), process.open[key], start, start + count))
        self.acked[key] = start + count

    @rule(data=st.data())
    def upload(self, data: st.DataObject) -> None:
        process = self.process(data)
        if process is not None:
            self.uploads(process)

    def uploads(self, process: Process) -> None:
        ranges = []
        for stream_id in sorted({row[0] for row in process.wal}):
            stream = self.driver.image.streams[stream_id]
            end = self.tail(process, stream_id) if stream.replica_set == process.broker else stream.end_offset
            if end > stream.end_offset and stream.state == StreamState.OPENED:
                ranges.append((stream_id, stream.end_offset, end))
        if ranges:
            wal = self.driver.image.replica_sets[process.broker].committed_wal_offset
            new = new_object(self.driver.prepare(), *ranges)
            self.driver.commit(process.master_epoch, (wal, wal + 5), new, replica_set=process.broker)

    @precondition(lambda self: self.can_close())
    @rule(data=st.data())
    def close_log(self, data: st.DataObject) -> None:
        """The source stops taking appends; what is appended is uploaded later, or not."""
        process, key = data.draw(st.sampled_from(self.can_close()))
        process.closing[key] = process.open.pop(key)

    @precondition(lambda self: self.can_hand_over())
    @rule(data=st.data(), arrives=st.booleans(), answered=st.booleans(), ready=st.integers(-1, 2))
    def hand_over_log(self, data: st.DataObject, arrives: bool, answered: bool, ready: int) -> None:
        found = data.draw(st.sampled_from(self.can_hand_over()))
        self.hands_over(*found, arrives=arrives, answered=answered, ready=ready)

    def hands_over(self, process: Process, key: Key, *, arrives: bool, answered: bool, ready: int) -> None:
        """`ready`: the broker that has said, in the life it has now or had last, that it would serve at once."""
        ends = [self.driver.image.streams[record(self.driver, key[1]).first_stream + n].end_offset for n in range(4)]
        ends[1] = self.acked[key]
        item = c.ClosedPartition(*key, process.closing[key], (ends[0], ends[1], ends[2], ends[3]))
        if ready >= 0:
            said = self.processes[ready]
            item = msgspec.structs.replace(item, ready_replica_set=said.broker, ready_master_epoch=said.master_epoch)
        command = c.HandOver(process.broker, process.master_epoch, (item,))
        if arrives:
            error = self.attempt(command)
            if answered:
                if error is None:
                    del process.closing[key]
                return
        self.in_flight.append(command)
        process.doubtful.add(key)

    @precondition(lambda self: self.can_reclaim())
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        self.reclaims(*data.draw(st.sampled_from(self.can_reclaim())))

    def reclaims(self, process: Process, key: Key) -> None:
        self.attempt(c.ReclaimPartitions(process.broker, process.master_epoch, (key,)))
        process.doubtful.discard(key)
        process.closing.pop(key)

    @precondition(lambda self: self.can_append())
    @rule(data=st.data(), before=st.integers(0, 2), after=st.integers(0, 2), arrives=st.booleans())
    def a_hand_over_gets_lost(self, data: st.DataObject, before: int, after: int, arrives: bool) -> None:
        """A whole attempt up to a hand-over without an answer, and on: one step at a time it is hardly ever drawn."""
        process, key = data.draw(st.sampled_from(self.can_append()))
        others = [each.broker for each in self.processes if each is not process]
        self.places(key, data.draw(st.sampled_from(others)))
        if record(self.driver, key[1]).target == NO_REPLICA_SET:
            return  # nobody lives there
        if before:
            self.appends(process, key, before)
        if data.draw(st.booleans()):
            self.uploads(process)
        process.closing[key] = process.open.pop(key)
        self.hands_over(process, key, arrives=arrives, answered=False, ready=data.draw(st.integers(-1, 2)))
        lost, opened = self.in_flight[-1], self.openings_under_way(key)
        if data.draw(st.booleans()):
            self.reclaims(process, key)
            if (process, key) in self.can_open():
                self.opens(process, key, twice=data.draw(st.booleans()))
                if after:
                    self.appends(process, key, after)
        for late in data.draw(st.sampled_from([[], [lost], opened, [lost, *opened], [*opened, lost]])):
            self.comes_late(late)

    # -- what operators and the controller do

    @rule(data=st.data(), wanted=st.integers(-1, 2))
    def place(self, data: st.DataObject, wanted: int) -> None:
        self.places(self.key(data), wanted)

    def places(self, key: Key, wanted: int) -> None:
        if self.attempt(c.MovePartitions((c.PartitionMove(*key, wanted),))) is None:
            self.placed[key] = record(self.driver, key[1]).replica_set if wanted < 0 else wanted

    @precondition(lambda self: self.driver.image.moving())
    @rule(data=st.data())
    def elect(self, data: st.DataObject) -> None:
        self.attempt(c.ElectPartitions((self.key(data),)))

    # -- what goes wrong

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), stays=st.booleans())
    def something_late_arrives(self, data: st.DataObject, stays: bool) -> None:
        at = data.draw(st.integers(0, len(self.in_flight) - 1))
        command = self.in_flight[at] if stays else self.in_flight.pop(at)
        self.comes_late(command)

    def comes_late(self, command: c.AnyCommand) -> None:
        with contextlib.suppress(TidelogError):
            self.driver.run(command)

    def openings_under_way(self, key: Key) -> list[c.AnyCommand]:
        first = record(self.driver, key[1]).first_stream
        return [each for each in self.in_flight if isinstance(each, c.OpenStreams) and each.streams[0][0] == first]

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        process = self.process(data)
        if process is not None:
            process.running = False
            process.open.clear()
            self.session(process, alive=False)

    @rule(data=st.data(), alive=st.booleans())
    def session_flaps(self, data: st.DataObject, alive: bool) -> None:
        process = self.process(data)
        if process is not None:
            self.session(process, alive=alive)

    def session(self, process: Process, *, alive: bool) -> None:
        epoch = self.driver.image.brokers[process.broker].registration_epoch
        self.driver.run(c.SetBrokerAlive(process.broker, epoch, alive))

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        process = self.process(data, running=False)
        if process is not None:
            self.start(process)

    # -- what must hold

    @invariant()
    def one_process_at_most_takes_appends(self) -> None:
        for key in self.acked:
            owners = [each.broker for each in self.processes if key in each.open]
            assert len(owners) <= 1, owners
            if owners:
                assert owners == [record(self.driver, key[1]).replica_set]

    @invariant()
    def epochs_never_go_down_and_name_one_leader(self) -> None:
        for stream in self.driver.image.streams.values():
            assert stream.epoch >= self.epochs.get(stream.id, -1)
            self.epochs[stream.id] = stream.epoch
        for key in self.acked:
            partition = record(self.driver, key[1])
            _, epoch = self.driver.image.leader(partition)
            known, owner = self.leader_epochs.get(key, (-1, -1))
            assert epoch > known or (epoch, partition.replica_set) == (known, owner)
            if owner not in (-1, partition.replica_set):
                assert self.driver.image.brokers[partition.replica_set].alive, "a dead broker was elected"
            self.leader_epochs[key] = epoch, partition.replica_set

    @invariant()
    def the_last_placement_wins(self) -> None:
        for key, wanted in self.placed.items():
            partition = record(self.driver, key[1])
            assert wanted == (partition.replica_set if partition.target == NO_REPLICA_SET else partition.target)
            assert partition.target != partition.replica_set
            assert (key in self.driver.image.index.moving) == (partition.target != NO_REPLICA_SET)
            assert (partition.moving_since_ms > 0) == (partition.target != NO_REPLICA_SET)

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        """Between the owner's WAL and the bucket there is always all of it."""
        for key, acked in self.acked.items():
            stream = self.driver.image.streams[self.data_stream(key)]
            assert self.tail(self.processes[stream.replica_set], stream.id) == acked
            if stream.state == StreamState.CLOSED:
                assert stream.end_offset == acked


TestMoveMachine = MoveMachine.TestCase
TestMoveMachine.settings = settings(max_examples=examples(150), stateful_step_count=80, deadline=None)
