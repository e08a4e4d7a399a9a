"""The balancer's schedule: whatever happens meanwhile, a batch names only what may move, and never too much of it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.controller.controller_helpers import TOPIC, Driver
from tests.support.examples import examples
from tidelog.controller.active.balance_schedule import LOOK_S, MODE_KEY, BalanceSchedule
from tidelog.controller.image.image import Delta
from tidelog.controller.image.leading import takers
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model import commands as c
from tidelog.controller.model.load import BrokerLoad, PartitionLoad
from tidelog.controller.model.records import NO_REPLICA_SET
from tidelog.controller.model.settings import BalancerSettings, ScaleSettings
from tidelog.runtime.steps import at_once

LIMIT = 3
BROKERS = (1, 2, 3)


class Schedule(RuleBasedStateMachine):
    """Looks at any time, commands that are refused, moves that end, brokers that come and go, operators that ask."""

    @initialize()
    def begin_world(self) -> None:
        self.driver = Driver()
        for broker in BROKERS:
            self.driver.broker(broker)
        self.driver.run(c.CreateTopic(TOPIC, "t", 12, {}, False, False, (1,) * 12))
        options = BalancerSettings(mode="on", min_bytes_per_s=0, min_requests_per_s=1_000, max_moves_in_flight=LIMIT)
        self.schedule = BalanceSchedule(options, ScaleSettings(), lambda: self.driver.image)
        self.now_s = 0.0
        self.issued = 0
        self.schedule.activated(self.now_s)

    def report(self) -> None:
        for broker in BROKERS:
            owned = [one for one in self.driver.image.all_partitions() if one.replica_set == broker]
            rows = tuple(PartitionLoad(one.first_stream, 1_000_000, 0, 0) for one in owned)
            load = BrokerLoad(1_000_000 * len(rows), 0, 0, 0, rows)
            self.schedule.loads.note(broker, 1, load, self.now_s)

    def take(self, command: c.MovePartitions | None, taken: bool) -> None:
        """What the shell does with what it is given; the command is refused if it is not `taken`."""
        if command is None:
            return
        image = self.driver.image
        lives = {each for each in image.replica_sets if image.master_of(each) is not None}
        going_on = [each for each in image.moving() if {each.replica_set, each.target} <= lives]
        assert 0 < len(command.moves) <= LIMIT - len(going_on), "too many at once"
        for each in command.moves:
            record = image.partition(each.topic_id, each.index)
            assert record is not None
            assert record.target == NO_REPLICA_SET, "it moves already"
            assert each.replica_set in takers(image), "nobody takes it there"
            assert each.replica_set != record.replica_set
        if not taken:
            return
        self.driver.run(command)
        rows = [RowChange("partitions", key, image.partition(*key)) for key in image.index.moving]
        self.schedule.note(Delta(self.driver.index, rows), self.now_s)
        self.schedule.issued(command, self.now_s)
        self.issued += len(command.moves)

    @rule(seconds=st.sampled_from([3.0, 400.0, 0.1, LOOK_S]), ended=st.integers(0, LIMIT), taken=st.booleans())
    def look(self, seconds: float, ended: int, taken: bool) -> None:
        self.now_s += seconds
        for key in sorted(self.driver.image.index.moving)[:ended]:
            self.driver.run(c.ElectPartitions((key,)))
        self.report()
        self.take(at_once(self.schedule.look(self.now_s, self.driver.now_ms)), taken)

    @rule(taken=st.booleans())
    def somebody_asks(self, taken: bool) -> None:
        self.report()
        self.take(at_once(self.schedule.begin_now(self.now_s, self.driver.now_ms)), taken)

    @rule(index=st.integers(0, 11), place=st.sampled_from(BROKERS))
    def an_operator_moves_a_partition(self, index: int, place: int) -> None:
        self.driver.run(c.MovePartitions((c.PartitionMove(TOPIC, index, place),)))

    @rule(mode=st.sampled_from([b"on", b"advise", b"off"]))
    def change_the_mode(self, mode: bytes) -> None:
        self.driver.run(c.PutKv(MODE_KEY, mode))

    @precondition(lambda self: self.driver.image.index.moving)
    @rule()
    def a_move_is_cancelled(self) -> None:
        key = min(self.driver.image.index.moving)
        self.driver.run(c.MovePartitions((c.PartitionMove(*key, NO_REPLICA_SET),)))

    @rule(broker=st.sampled_from([2, 3]), alive=st.booleans())
    def a_broker_comes_or_goes(self, broker: int, alive: bool) -> None:
        record = self.driver.image.brokers[broker]
        self.driver.run(c.SetBrokerAlive(broker, record.registration_epoch, alive))

    @invariant()
    def what_operators_are_told(self) -> None:
        if not hasattr(self, "schedule"):
            return
        status = self.schedule.status(self.now_s)
        assert status["issued"] == self.issued
        assert self.schedule.has_more == (status["left"] > 0)


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
