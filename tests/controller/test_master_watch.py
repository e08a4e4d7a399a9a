"""Elections that the active controller begins: dead masters, silent ones, drains, and preferred masters."""

from __future__ import annotations

from tests.controller.replica_trio import Trio
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.masters import PATIENCE_S
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
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
