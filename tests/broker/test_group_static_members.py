"""Static members of a classic group (KIP-345): restarts without a round, and who is fenced."""

from __future__ import annotations

from tests.support.group_driver import DELAY_MS, REBALANCE_MS, Driver
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.groups.state import GroupState as S


def static_group(**how: object) -> tuple[Driver, str, str]:
    """Stable, with static members i-a (the leader) and i-b."""
    d = Driver(auto_persist=bool(how.pop("auto_persist", True)))
    waiters = [d.join(instance="i-a", **how), d.join(instance="i-b", **how)]  # type: ignore[arg-type]
    d.advance(2 * DELAY_MS)
    a, b = (d.join_answer(waiter).member_id for waiter in waiters)
    d.sync_all([a, b])
    while d.persists:
        d.persist()
    assert d.group.state is S.STABLE
    return d, a, b


def test_a_static_member_needs_no_second_request() -> None:
    d = Driver()
    waiter = d.join(instance="i-1")
    d.advance(DELAY_MS)
    answer = d.join_answer(waiter)
    assert answer.error is E.NONE
    assert answer.member_id.startswith("i-1-")
    assert answer.members[0].instance_id == "i-1"


def test_a_static_follower_that_restarts_gets_its_place_without_a_round() -> None:
    d, a, b = static_group()
    records = len(d.log)
    answer = d.join_answer(d.join(instance="i-b"))
    assert answer.error is E.NONE
    assert answer.member_id not in (a, b)
    assert (answer.generation, answer.leader, answer.members, answer.skip_assignment) == (1, a, (), False)
    assert d.group.state is S.STABLE
    assert d.sync_answer(d.sync(answer.member_id, 1, instance="i-b")).assignment == b.encode()
    assert d.heartbeat(a, 1, "i-a") is E.NONE
    assert len(d.log) == records + 1
    assert {member.member_id for member in d.log[-1].members} == {a, answer.member_id}


def test_the_process_that_a_static_member_replaced_is_fenced() -> None:
    d, _, b = static_group()
    new = d.join_answer(d.join(instance="i-b")).member_id
    assert d.heartbeat(b, 1, "i-b") is E.FENCED_INSTANCE_ID
    assert d.sync_answer(d.sync(b, 1, instance="i-b")).error is E.FENCED_INSTANCE_ID
    assert d.commit(b, 1, "i-b") is E.FENCED_INSTANCE_ID
    assert d.join_answer(d.join(b, instance="i-b")).error is E.FENCED_INSTANCE_ID
    assert d.leave((b, "i-b")) == [E.FENCED_INSTANCE_ID]
    assert d.heartbeat(b, 1) is E.UNKNOWN_MEMBER_ID
    assert d.heartbeat(new, 1, "i-b") is E.NONE


def test_a_static_leader_that_restarts_is_told_the_members_but_need_not_assign() -> None:
    d, _, b = static_group()
    answer = d.join_answer(d.join(instance="i-a"))
    assert answer.leader == answer.member_id
    assert answer.skip_assignment
    assert {member.member_id for member in answer.members} == {answer.member_id, b}
    assert d.group.state is S.STABLE


def test_an_older_static_leader_that_restarts_is_told_that_its_old_id_leads() -> None:
    d, a, _ = static_group(version=8)
    answer = d.join_answer(d.join(instance="i-a", version=8))
    assert (answer.leader, answer.members, answer.skip_assignment) == (a, (), False)
    assert d.group.members.leader == answer.member_id


def test_a_static_member_that_restarts_with_other_metadata_keeps_the_round_if_the_protocol_stays() -> None:
    d, *_ = static_group()
    answer = d.join_answer(d.join(instance="i-b", protocols={"range": b"new"}))
    assert answer.error is E.NONE
    assert d.group.state is S.STABLE


def test_a_static_member_that_changes_the_chosen_protocol_starts_a_round() -> None:
    d, *_ = static_group(protocols={"range": b"", "sticky": b""})
    waiter = d.join(instance="i-b", protocols={"sticky": b""})
    assert waiter not in d.answers
    assert d.group.state is S.PREPARING


def test_a_static_member_that_restarts_while_completing_starts_a_round() -> None:
    d = Driver()
    waiters = [d.join(instance="i-a"), d.join(instance="i-b")]
    d.advance(2 * DELAY_MS)
    b = d.join_answer(waiters[1]).member_id
    old = d.sync(b, 1, instance="i-b")
    d.join(instance="i-b")
    assert d.sync_answer(old).error is E.FENCED_INSTANCE_ID
    assert d.group.state is S.PREPARING


def test_a_static_member_that_restarts_while_preparing_takes_the_waiting_place() -> None:
    d = Driver()
    first = d.join(instance="i-a")
    second = d.join(instance="i-a")
    assert d.join_answer(first).error is E.FENCED_INSTANCE_ID
    d.advance(DELAY_MS)
    assert d.join_answer(second).error is E.NONE
    assert len(d.group.members) == 1


def test_a_static_member_that_does_not_rejoin_stays_until_its_session_ends() -> None:
    d, a, b = static_group(session_ms=60_000)
    waiter = d.join(a, instance="i-a", session_ms=60_000)
    d.advance(REBALANCE_MS)
    answer = d.join_answer(waiter)
    assert {member.member_id for member in answer.members} == {a, b}
    assert b in d.group.members


def test_with_no_static_member_back_the_round_goes_on_until_sessions_end() -> None:
    d, a, b = static_group(session_ms=100_000)
    d.leave(("", "i-a"))
    d.advance(REBALANCE_MS + 1)
    before = d.group.state
    assert b in d.group.members
    d.advance(100_000)
    assert (before, d.group.state) == (S.PREPARING, S.EMPTY)
    assert a not in d.group.members


def test_an_administrator_removes_a_static_member_by_instance_id() -> None:
    d, *_ = static_group()
    assert d.leave(("", "i-b"), ("", "i-b"), ("", "i-z")) == [E.NONE, E.UNKNOWN_MEMBER_ID, E.UNKNOWN_MEMBER_ID]
    assert d.group.members.static_member_id("i-b") is None
    assert d.group.state is S.PREPARING


def test_a_swap_that_cannot_be_written_is_told() -> None:
    d, *_ = static_group(auto_persist=False)
    waiter = d.join(instance="i-b")
    d.persist(E.COORDINATOR_NOT_AVAILABLE)
    assert d.join_answer(waiter).error is E.COORDINATOR_NOT_AVAILABLE
    again = d.join(instance="i-b")
    d.persist()
    assert d.join_answer(again).error is E.NONE


def test_a_swap_that_a_round_overtakes_is_answered_by_the_round() -> None:
    d, a, _ = static_group(auto_persist=False)
    waiter = d.join(instance="i-b")
    wait_a = d.join(a, instance="i-a")
    assert d.join_answer(waiter).generation == d.join_answer(wait_a).generation == 2
    d.persist()
    assert d.group.state is S.COMPLETING


def test_an_id_given_to_a_dynamic_member_cannot_become_a_static_one() -> None:
    d = Driver()
    given = d.join_answer(d.join()).member_id
    assert d.join_answer(d.join(given, instance="i")).error is E.UNKNOWN_MEMBER_ID
