"""What the active controller has to do by itself, as commands that follow from the image."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.controller.controller_helpers import DELAY_MS, TOPIC, Driver
from tidelog.controller.active.drain_plan import DRAIN_AT_ONCE
from tidelog.controller.active.duties import DRAIN_SLOW_S, Duties, Duty, removable
from tidelog.controller.active.readers import ALL
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.image.image import Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import STREAMS_PER_PARTITION, DrainMode
from tidelog.controller.model.settings import ControllerSettings

REELECT_MS = 2_000


class World:
    """Brokers 0 and 1, and a topic with one partition on broker 0."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.sessions = BrokerSessions(10.0)
        self.controllers: Mapping[int, str] = {}
        self.duties = Duties(
            self.image, self.sessions, lambda: self.controllers, ControllerSettings(reelect_timeout_ms=REELECT_MS)
        )
        self.sessions.activated(0.0)
        for broker in (0, 1):
            self.driver.broker(broker)

    def image(self) -> Image:
        return self.driver.image

    def asked(self, duty: Duty, now: float = 0.0) -> list[c.AnyCommand]:
        """The commands of a duty, each carried out before the next is derived."""
        found: list[c.AnyCommand] = []
        for command in duty(now, self.driver.now_ms):
            found.append(command)
            self.driver.run(command)
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_at_rest_nothing_is_to_be_done(world: World) -> None:
    for broker in (0, 1):
        world.sessions.heartbeat(broker, world.image().brokers[broker].registration_epoch, broker, 0.0, 0.0)
    world.asked(world.duties.members)
    assert [command for duty in world.duties.all for command in world.asked(duty)] == []


def test_members_are_published_when_they_have_changed(world: World) -> None:
    world.controllers = {2: "b:1", 1: "a:1"}
    assert world.asked(world.duties.members) == [c.SetControllers(((1, "a:1"), (2, "b:1")))]
    assert world.asked(world.duties.members) == []


def test_prepared_ids_expire_and_their_objects_are_removed_after_the_delay(world: World) -> None:
    first = world.driver.run(c.PrepareObjects(2, 5_000))
    assert world.asked(world.duties.expiry) == []
    world.driver.now_ms += 5_000
    assert world.asked(world.duties.expiry) == [c.ExpireObjects((first, first + 1))]
    assert world.asked(world.duties.expiry) == [], "once"
    assert removable(world.image(), world.driver.now_ms, ALL) == ()
    assert removable(world.image(), world.driver.now_ms + DELAY_MS, ALL) == (first, first + 1)


def test_a_silent_broker_is_marked_dead_once(world: World) -> None:
    for broker in (0, 1):
        world.sessions.heartbeat(broker, world.image().brokers[broker].registration_epoch, broker, 0.0, 0.0)
    world.sessions.heartbeat(0, world.image().brokers[0].registration_epoch, 0, 15.0, 0.0)
    (command,) = world.asked(world.duties.liveness, now=16.0)
    assert isinstance(command, c.SetBrokerAlive)
    assert (command.broker_id, command.alive) == (1, False)
    assert world.asked(world.duties.liveness, now=16.0) == []


def test_the_late_end_of_an_old_connection_leaves_a_broker_alone_that_has_reconnected(world: World) -> None:
    registration = world.image().brokers[0].registration_epoch
    for connection in ("old", "new"):
        world.sessions.heartbeat(0, registration, connection, 0.0, 0.0)
    assert not world.sessions.connection_closed("old")
    assert world.asked(world.duties.liveness, now=1.0) == []
    assert world.sessions.connection_closed("new")
    (command,) = world.asked(world.duties.liveness, now=1.0)
    assert isinstance(command, c.SetBrokerAlive) and (command.broker_id, command.alive) == (0, False)


def test_the_target_of_a_move_whose_owner_is_silent_is_elected_when_the_streams_are_closed(world: World) -> None:
    world.driver.run(c.CreateTopic(TOPIC, "t", 1, {}, False, False, (0,)))
    epoch = world.image().replica_sets[0].master_epoch
    record = world.image().partition(TOPIC, 0)
    assert record is not None
    leader_epoch = world.image().leader(record)[1]
    streams = tuple((record.first_stream + number, leader_epoch) for number in range(4))
    world.driver.run(c.OpenStreams(0, epoch, streams))
    world.driver.run(c.MovePartitions((c.PartitionMove(TOPIC, 0, 1),)))
    assert world.asked(world.duties.elections) == [], "it has just begun"
    due = REELECT_MS / 1000
    assert world.asked(world.duties.elections, now=due) == [], "the owner has it open"
    world.driver.run(c.CloseStreams(0, epoch, streams))
    for hours in (-12, 12):
        world.driver.now_ms += hours * 3_600_000  # the wall clock; nothing is decided by it
        assert world.asked(world.duties.elections, now=due - 0.001) == []
    assert world.asked(world.duties.elections, now=due) == [c.ElectPartitions(((TOPIC, 0),))]
    assert world.asked(world.duties.elections, now=due) == []


def test_partitions_that_do_not_move_hold_up_no_others_of_a_draining_broker(world: World) -> None:
    """What its broker cannot open, because it is damaged or quarantined, stays there."""
    world.driver.run(c.CreateTopic(TOPIC, "t", 100, {}, False, False, (0,) * 100))
    stuck = [record for record in world.image().partitions(TOPIC) if record.index < 80]
    for record in stuck:
        epoch = world.image().leader(record)[1]
        streams = tuple((record.first_stream + step, epoch) for step in range(STREAMS_PER_PARTITION))
        world.driver.run(c.OpenStreams(0, world.image().replica_sets[0].master_epoch, streams))
    world.driver.run(c.DrainBroker(0, DrainMode.OPERATOR))

    for second in range(60):
        world.asked(world.duties.drains, float(second))
        moving = tuple((one.topic_id, one.index) for one in world.image().moving())
        assert len(moving) <= DRAIN_AT_ONCE or second > DRAIN_SLOW_S
        world.driver.run(c.ElectPartitions(moving))  # as if the source had closed what it has open
    assert world.image().index.partition_counts == {0: len(stuck), 1: 20}


def test_a_destroyed_object_waits_for_the_readers(world: World) -> None:
    first = world.driver.run(c.PrepareObjects(1, 5_000))
    world.driver.now_ms += 5_000
    world.asked(world.duties.expiry)
    destroyed_at = world.image().objects[first].destroyed_at
    assert destroyed_at == world.driver.index
    due_ms = world.driver.now_ms + DELAY_MS
    assert removable(world.image(), due_ms, destroyed_at - 1) == ()
    assert removable(world.image(), due_ms, destroyed_at) == (first,)
