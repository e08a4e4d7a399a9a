"""The plan of a rolling restart, and where a step is: from what the cluster says, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.cli.rolling_restart import LATE_HINTS, Phase, plan, step_phase
from tidelog.runtime.errors import NotFound

Document = dict[str, Any]


def broker(broker_id: int, **changes: Any) -> Document:
    row = {"id": broker_id, "alive": True, "drain": "none", "registration_epoch": 1, "partitions": 3, "hindrances": []}
    return {**row, **changes}


def replica_set(set_id: int, **changes: Any) -> Document:
    row = {"id": set_id, "master": set_id, "electing": False, "members": [1, 2, 3], "in_sync": [1, 2, 3]}
    return {**row, "master_epoch": 1, "elects": True, "partitions": 3, **changes}


def cluster(*brokers: Document, sets: tuple[Document, ...] = (), active: int = 9) -> Document:
    rows = brokers or tuple(map(broker, (1, 2, 3)))
    controllers = [{"id": each, "state": "active" if each == active else "follower"} for each in (1, 2, 3, 9)]
    return {
        "brokers": list(rows),
        "replica_sets": [*sets] or [replica_set(each["id"]) for each in rows],
        "controllers": controllers,
    }


def test_brokers_come_by_id_whatever_order_they_are_asked_for_in() -> None:
    assert [step.broker for step in plan(cluster())] == [1, 2, 3]
    assert [step.broker for step in plan(cluster(), [3, 1, 3])] == [1, 3]


def test_the_active_controllers_process_is_the_last_one() -> None:
    steps = plan(cluster(active=1))
    assert [(step.broker, step.is_active_controller) for step in steps] == [(2, False), (3, False), (1, True)]


def test_an_unknown_broker_is_named() -> None:
    with pytest.raises(NotFound, match="there is no broker 7"):
        plan(cluster(), [1, 7])


def test_a_drained_broker_is_left_alone_and_what_hinders_a_step_is_told() -> None:
    steps = plan(cluster(broker(1, drain="operator"), broker(2, hindrances=["broker 3 is dead"])))
    assert [(bool(step.skipped), step.hindrances) for step in steps] == [(True, []), (False, ["broker 3 is dead"])]


def phase(row: Document, home: Document | None = None, *, is_ready: bool = True) -> Phase:
    sets = (home or replica_set(1), replica_set(2))
    return step_phase(cluster(row, broker(2), sets=sets), 1, 1, is_ready=is_ready)


def test_a_step_goes_from_the_end_of_the_process_to_the_lead_of_its_set() -> None:
    again = broker(1, registration_epoch=2)
    follows = replica_set(1, master=2)
    assert phase(broker(1)) is Phase.ENDING
    assert phase(broker(1, drain="shutdown"), follows) is Phase.ENDING
    assert phase(broker(1, alive=False), follows) is Phase.AWAY
    assert phase(again, follows, is_ready=False) is Phase.STARTING
    assert phase(again, replica_set(1, master=2, in_sync=[2, 3])) is Phase.CATCHING_UP
    assert phase(again, follows) is Phase.FOLLOWING
    assert phase(again, replica_set(1, master=2, electing=True)) is Phase.ELECTING
    assert phase(again) is Phase.DONE


def test_a_new_process_that_dies_is_awaited_again() -> None:
    assert phase(broker(1, registration_epoch=2, alive=False)) is Phase.AWAY
    assert phase(broker(1, registration_epoch=3)) is Phase.DONE


def test_another_brokers_set_that_it_is_not_in_sync_with_is_awaited_and_one_without_it_is_not() -> None:
    again = broker(1, registration_epoch=2)
    sets = (replica_set(1), replica_set(2, in_sync=[2, 3]))
    assert step_phase(cluster(again, broker(2), sets=sets), 1, 1, is_ready=True) is Phase.CATCHING_UP
    sets = (replica_set(1), replica_set(2, members=[2, 3], in_sync=[2]))
    assert step_phase(cluster(again, broker(2), sets=sets), 1, 1, is_ready=True) is Phase.DONE


def test_a_set_of_one_is_led_by_its_broker_when_that_is_ready() -> None:
    alone = replica_set(1, elects=False, members=[1], in_sync=[1], master=None)
    assert phase(broker(1, registration_epoch=2), alone) is Phase.DONE


def test_a_broker_that_was_removed_meanwhile_is_named() -> None:
    with pytest.raises(NotFound, match="broker 1 was removed"):
        step_phase(cluster(broker(2)), 1, 1, is_ready=False)


def test_whatever_does_not_end_has_a_next_step() -> None:
    assert {*LATE_HINTS} == {*Phase} - {Phase.DONE}
