"""The reconciler against the image: whatever that becomes and whenever tasks end, what is open is what is wanted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from tests.support.kafka_world import NODE_ID, DataController
from tidelog.broker.partitions.move_table import MovePhase, MoveTable
from tidelog.broker.partitions.reconciler import PartitionPlan, PartitionReconciler, streams_to_open
from tidelog.controller.image.image import Delta
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import PartitionKey
from tidelog.runtime.errors import Unavailable

OTHER = 2
TOPIC = b"t" * 16
FIRST: PartitionKey = (TOPIC, 0)


class World:
    """The controller's state machine, its image, and a reconciler that hears each delta."""

    def __init__(self) -> None:
        self.controller = DataController()
        self.image = self.controller.image
        self.hints: set[PartitionKey] = set()
        self.moves = MoveTable(1, 5.0, random.Random(1))
        self.reconciler = PartitionReconciler(NODE_ID, self.moves, random.Random(1), lambda key, _: key in self.hints)
        self.controller.subscribe(self.heard)
        self.now = 0.0
        self.behind = 0
        """How many epochs the storage here is behind the metadata."""
        self.opened: dict[PartitionKey, int] = {}
        """What a shell has open, with leader epochs."""
        for broker in (NODE_ID, OTHER):
            self.controller.register(broker)

    def heard(self, delta: Delta) -> None:
        self.reconciler.image_changed(delta)

    def create(self, *owners: int, topic: bytes = TOPIC, name: str = "t") -> None:
        self.controller.apply(c.CreateTopic(topic, name, len(owners), {}, False, False, owners))

    def move(self, target: int, *keys: PartitionKey) -> None:
        self.controller.apply(c.MovePartitions(tuple(c.PartitionMove(*key, target) for key in keys)))

    def terms(self) -> dict[int, int]:
        """The master epochs in which storages serve here."""
        sets = self.image.replica_sets.values()
        return {each.id: each.master_epoch - self.behind for each in sets if each.master == NODE_ID}

    def plan(self) -> PartitionPlan:
        self.reconciler.refresh(self.image, self.now, self.terms())
        plan = self.reconciler.plan(self.image, self.now, 0)
        for key, _ in plan.closes:
            del self.opened[key]
        return plan

    def open(self, *keys: PartitionKey) -> None:
        """The tasks that open them end well."""
        for key in keys:
            epoch = self.reconciler.wanted[key].leader_epoch
            self.reconciler.opened(key, epoch)
            self.opened[key] = epoch
        self.reconciler.ended(keys)

    def all_open(self, *owners: int) -> None:
        self.create(*owners)
        (batch,) = self.plan().opens
        self.open(*batch)


def test_what_is_placed_here_is_opened_and_nothing_else() -> None:
    world = World()
    world.create(NODE_ID, OTHER, NODE_ID)
    plan = world.plan()
    assert [sorted(batch) for batch in plan.opens] == [[(TOPIC, 0), (TOPIC, 2)]]
    assert (plan.closes, plan.moves, plan.wait_s) == ([], [], None)
    assert world.plan().opens == [], "it is being opened"
    world.open((TOPIC, 0), (TOPIC, 2))
    assert world.plan().opens == [], "it is open"
    assert world.reconciler.unsettled() == []


def test_streams_are_asked_for_by_replica_set_and_master_epoch() -> None:
    world = World()
    world.create(NODE_ID)
    (batch,) = world.plan().opens
    wanted = batch[FIRST]
    first = wanted.partition.first_stream
    streams = [(first + number, wanted.leader_epoch) for number in range(4)]
    assert streams_to_open(batch.values()) == {(NODE_ID, wanted.master_epoch): streams}


def test_a_partition_is_opened_only_in_the_epoch_in_which_its_storage_serves() -> None:
    world = World()
    world.behind = 1
    world.create(NODE_ID)
    assert world.plan().opens == [], "the storage has not begun the new epoch"
    world.behind = 0
    world.reconciler.all_changed()
    assert [list(batch) for batch in world.plan().opens] == [[FIRST]]
    world.open(FIRST)
    world.behind = 1  # deposed and elected again
    world.controller.apply(c.Elect(NODE_ID, NODE_ID))
    assert world.plan().closes == [(FIRST, False)]
    world.reconciler.ended([FIRST])
    assert world.plan().opens == []


def test_what_does_not_open_is_tried_again_after_a_back_off_and_shown() -> None:
    world = World()
    world.create(NODE_ID)
    world.plan()
    error = Unavailable("the bucket is slow")
    world.reconciler.failed(FIRST, error, world.now)
    world.reconciler.ended([FIRST])
    plan = world.plan()
    assert plan.opens == []
    assert plan.wait_s is not None
    assert 0 < plan.wait_s <= 0.1
    assert world.reconciler.failure(FIRST) is error
    assert world.reconciler.problems() == ["t-0 does not open: the bucket is slow"]
    assert world.reconciler.unsettled() == [], "it has failed once"
    world.now += plan.wait_s
    assert [list(batch) for batch in world.plan().opens] == [[FIRST]]
    world.open(FIRST)
    assert world.reconciler.failing == 0


def test_a_deleted_partition_is_dropped_and_one_that_is_led_anew_is_closed_and_opened_again() -> None:
    world = World()
    world.all_open(NODE_ID)
    world.controller.apply(c.Elect(NODE_ID, NODE_ID))  # another master epoch, so a larger leader epoch
    assert world.plan().closes == [(FIRST, False)]
    assert world.plan().opens == [], "it is being closed"
    world.reconciler.ended([FIRST])
    assert [list(batch) for batch in world.plan().opens] == [[FIRST]]
    world.open(FIRST)
    world.controller.apply(c.DeleteTopic(TOPIC))
    found = world.reconciler.refresh(world.image, world.now, world.terms())
    assert found.deleted == [FIRST]
    assert world.plan().closes == [(FIRST, True)]
    world.reconciler.ended([FIRST])
    assert world.plan() == PartitionPlan()


def test_a_changed_configuration_keeps_open_what_is_open() -> None:
    world = World()
    world.all_open(NODE_ID)
    world.controller.apply(c.AlterTopicConfigs(TOPIC, {"retention.ms": "1"}))
    found = world.reconciler.refresh(world.image, world.now, world.terms())
    assert (found.topics, [key for key, _ in found.kept]) == ([TOPIC], [FIRST])
    assert world.plan() == PartitionPlan()


def test_what_has_a_target_is_moved_when_it_is_open_and_decided_anew_when_that_has_ended() -> None:
    world = World()
    world.create(NODE_ID)
    world.move(OTHER, FIRST)
    assert world.plan().moves == [], "it is not open yet"
    world.open(FIRST)
    ((move, _),) = world.plan().moves
    assert move.phase is MovePhase.UPLOADING
    world.reconciler.withdrawn(FIRST)
    assert world.reconciler.unsettled() == [], "it was open"
    assert world.plan() == PartitionPlan()
    world.moves.failed(move, Unavailable("no"), world.now, 0)
    world.moves.left()
    world.reconciler.ended([FIRST])
    plan = world.plan()
    assert [list(batch) for batch in plan.opens] == [[FIRST]], "it is led here still"
    world.open(FIRST)
    plan = world.plan()
    assert plan.moves == []
    assert plan.wait_s == pytest.approx(move.retry_at - world.now)


def test_streams_that_a_hand_over_opened_are_not_asked_for_if_there_is_a_hint() -> None:
    world = World()
    world.create(NODE_ID)
    world.reconciler.refresh(world.image, 0.0, world.terms())
    wanted = world.reconciler.wanted[FIRST]
    ((place, streams),) = streams_to_open([wanted]).items()
    world.controller.apply(c.OpenStreams(*place, tuple(streams)))
    world.hints.add(FIRST)
    plan = world.plan()
    assert plan.opens == []
    ((key, _, opened),) = plan.handed_over
    assert (key, sorted(opened)) == (FIRST, [stream_id for stream_id, _ in streams])


TOPICS = [bytes([number]) * 16 for number in (1, 2)]
OWNERS = st.lists(st.sampled_from([NODE_ID, OTHER]), min_size=1, max_size=3)


class Reconciling(RuleBasedStateMachine):
    """Topics come and go, partitions get targets, masters change; tasks end in any order, well or not."""

    @initialize()
    def begin_world(self) -> None:
        self.world = World()
        self.tasks: list[tuple[str, list[Any]]] = []
        """Tasks that go on: what they do, with the keys (or the move) in their hands."""
        self.world.all_open(NODE_ID, NODE_ID, OTHER)
        assert self.world.plan() == PartitionPlan()

    @rule(number=st.integers(0, 1), owners=OWNERS)
    def create_or_delete(self, number: int, owners: list[int]) -> None:
        topic = TOPICS[number]
        if topic in self.world.image.topics:
            self.world.controller.apply(c.DeleteTopic(topic))
        else:
            self.world.create(*owners, topic=topic, name=f"t{number}")

    @rule(broker=st.sampled_from([NODE_ID, OTHER]))
    def elect(self, broker: int) -> None:
        self.world.controller.apply(c.Elect(broker, broker))

    @precondition(lambda self: self.world.image.topics)
    @rule(data=st.data(), place=st.sampled_from([OTHER, OTHER, -1]))
    def give_a_target(self, data: st.DataObject, place: int) -> None:
        keys = [(one.topic_id, one.index) for one in self.world.image.all_partitions()]
        self.world.move(place, data.draw(st.sampled_from(keys)))

    def plan(self, waited: float) -> None:
        self.world.now += waited
        plan = self.world.plan()
        self.tasks += [("move", [move]) for move, _ in plan.moves]
        self.tasks += [("close", [key]) for key, _ in plan.closes]
        self.tasks += [("open", list(batch)) for batch in plan.opens]

    @rule(waited=st.sampled_from([40.0, 0.0]), number=st.integers(0, 5), well=st.booleans())
    def plan_and_end_a_task(self, waited: float, number: int, well: bool) -> None:
        self.plan(waited)
        if self.tasks:
            self.end_a_task(number % len(self.tasks), well)

    def end_a_task(self, number: int, well: bool) -> None:
        kind, held = self.tasks.pop(number)
        world = self.world
        if kind == "move":
            (move,) = held
            if well:
                world.reconciler.withdrawn(move.key)
                del world.opened[move.key]
            world.moves.failed(move, Unavailable("no"), world.now, 0)
            world.moves.left()
            world.reconciler.ended([move.key])
        elif kind == "close":
            world.reconciler.ended(held)
        else:
            for key in held:
                if well and key in world.reconciler.wanted:
                    world.reconciler.opened(key, world.reconciler.wanted[key].leader_epoch)
                    world.opened[key] = world.reconciler.wanted[key].leader_epoch
                else:
                    world.reconciler.failed(key, Unavailable("no"), world.now)
            world.reconciler.ended(held)

    @invariant()
    def one_task_at_a_time(self) -> None:
        if not hasattr(self, "world"):
            return
        held = [key for kind, keys in self.tasks for key in ([keys[0].key] if kind == "move" else keys)]
        assert len(held) == len(set(held))

    def teardown(self) -> None:
        """When nothing changes any more and nothing fails, what is open is what is placed here, under its epoch."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for number in range(6):
            while self.tasks:  # moves fail: at first when the log was withdrawn, then before
                self.end_a_task(0, self.tasks[0][0] != "move" or number == 0)
            self.plan(10.0)
        assert all(kind == "move" for kind, _ in self.tasks)
        placed = {}
        for one in world.image.all_partitions():
            leader, epoch = world.image.leader(one)
            if leader == NODE_ID:
                placed[one.topic_id, one.index] = epoch
        assert world.opened == placed
        assert world.reconciler.unsettled() == []


TestReconciling = Reconciling.TestCase
TestReconciling.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
