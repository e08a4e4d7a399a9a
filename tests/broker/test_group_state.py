"""The classic group's state machine, transition by transition, as Kafka's clients see it."""

from __future__ import annotations

import struct

import pytest

from tests.broker.test_group_static_members import static_group
from tests.support.group_driver import DELAY_MS, REBALANCE_MS, SESSION_MS, WALL_MS, Driver
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.groups.messages import JoinedMember, JoinResult, SyncResult
from tidelog.broker.groups.state import NEW_MEMBER_JOIN_TIMEOUT_MS, ClassicGroup
from tidelog.broker.groups.state import GroupState as S


def subscription(*topics: str) -> bytes:
    body = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 1, len(topics)) + body + struct.pack(">i", -1)


# --- joining ----------------------------------------------------------------------------------------------------------


def test_a_dynamic_member_of_v4_is_told_its_id_first_and_must_come_back_with_it() -> None:
    d = Driver()
    answer = d.join_answer(d.join(client="app"))
    assert answer.error is E.MEMBER_ID_REQUIRED
    assert answer.member_id.startswith("app-")
    before = d.group.state
    d.join(answer.member_id)
    assert (before, d.group.state) == (S.EMPTY, S.PREPARING)


def test_an_old_client_is_taken_in_at_once() -> None:
    d = Driver()
    waiter = d.join(version=3)
    d.advance(DELAY_MS)
    assert d.join_answer(waiter).error is E.NONE


def test_an_id_given_out_is_forgotten_after_the_session_timeout() -> None:
    d = Driver()
    member_id = d.join_answer(d.join()).member_id
    d.advance(SESSION_MS)
    assert d.group.is_blank
    assert d.join_answer(d.join(member_id)).error is E.UNKNOWN_MEMBER_ID


def test_a_made_up_id_is_refused() -> None:
    d = Driver()
    assert d.join_answer(d.join("who")) == JoinResult(E.UNKNOWN_MEMBER_ID, "who")
    assert d.group.is_blank


def test_the_first_round_waits_for_the_initial_delay() -> None:
    d = Driver()
    _, waiter = d.enter()
    d.advance(DELAY_MS - 1)
    assert waiter not in d.answers
    d.advance(1)
    assert d.join_answer(waiter).generation == 1


def test_each_join_extends_the_initial_delay_up_to_the_rebalance_timeout() -> None:
    d = Driver()
    waiters = [d.enter(rebalance_ms=8_000)[1]]
    while d.group.state is S.PREPARING:
        d.advance(1_000)
        if d.group.state is S.PREPARING:
            waiters.append(d.enter(rebalance_ms=8_000)[1])
    assert d.now_ms == 8_000
    assert {d.join_answer(waiter).generation for waiter in waiters} == {1}


def test_without_joins_the_initial_delay_is_not_extended() -> None:
    d = Driver()
    d.enter()
    d.advance(1)
    d.enter()
    d.advance(2 * DELAY_MS)  # one extension for the second member
    assert d.group.state is S.COMPLETING


def test_only_the_leader_gets_the_members_and_all_get_the_same_generation() -> None:
    d = Driver()
    (a, wait_a), (b, wait_b) = d.enter(protocols={"range": b"A"}), d.enter(protocols={"range": b"B"})
    d.advance(2 * DELAY_MS)
    members = (JoinedMember(a, None, b"A"), JoinedMember(b, None, b"B"))
    assert d.join_answer(wait_a) == JoinResult(E.NONE, a, 1, "consumer", "range", a, members)
    assert d.join_answer(wait_b) == JoinResult(E.NONE, b, 1, "consumer", "range", a, ())


def test_a_full_group_refuses() -> None:
    d = Driver(max_size=2)
    d.stable(2)
    assert d.join_answer(d.join()).error is E.GROUP_MAX_SIZE_REACHED
    assert d.group.state is S.STABLE


def test_while_preparing_the_first_to_join_have_the_places() -> None:
    d = Driver(max_size=2)
    a, b = d.stable(2)
    d.leave(b)
    newcomer, wait_new = d.enter()
    wait_a = d.join(a)
    assert d.join_answer(wait_a).error is E.NONE
    assert d.join_answer(wait_new).error is E.NONE
    d.sync_all([a, newcomer])
    wait_a = d.join(a)  # the leader starts a round; nobody else fits in
    assert d.join_answer(d.join()).error is E.MEMBER_ID_REQUIRED
    assert wait_a not in d.answers


@pytest.mark.parametrize(
    ("protocol_type", "protocols"),
    [
        ("consumer", {"other": b""}),
        ("connect", {"range": b""}),
        ("consumer", {}),
        ("", {"range": b""}),
    ],
)
def test_what_does_not_go_together_with_the_members_is_inconsistent(
    protocol_type: str, protocols: dict[str, bytes]
) -> None:
    d = Driver()
    d.stable(1)
    waiter = d.join(protocol_type=protocol_type, protocols=protocols)
    assert d.join_answer(waiter).error is E.INCONSISTENT_GROUP_PROTOCOL
    assert d.group.state is S.STABLE


def test_an_empty_group_takes_any_protocol_type() -> None:
    d = Driver()
    (a,) = d.stable(1)
    d.leave(a)
    assert d.group.state is S.EMPTY
    d.enter(protocol_type="connect", protocols={"compatible": b"\x00\xff"})
    assert d.group.protocol_type == "connect"


@pytest.mark.parametrize(
    ("members", "chosen"),
    [
        ([("range", "sticky"), ("range",)], "range"),
        ([("range", "sticky"), ("sticky", "range"), ("sticky", "range")], "sticky"),
        ([("a", "b", "c"), ("c", "b"), ("c", "b")], "c"),
        ([("x", "range"), ("y", "range")], "range"),
    ],
)
def test_the_vote_counts_first_choices_among_what_all_support(members: list[tuple[str, ...]], chosen: str) -> None:
    d = Driver()
    waiters = [d.enter(protocols=dict.fromkeys(names, b"m"))[1] for names in members]
    d.advance(len(members) * DELAY_MS)
    assert {d.join_answer(waiter).protocol for waiter in waiters} == {chosen}


# --- syncing ----------------------------------------------------------------------------------------------------------


def test_each_member_gets_the_leaders_bytes_unchanged_and_whoever_was_forgotten_gets_none() -> None:
    d = Driver(auto_persist=False)
    (a, _), (b, _), (c, _) = d.enter(), d.enter(), d.enter()
    d.advance(3 * DELAY_MS)
    early = d.sync(b, 1)
    lead = d.sync(a, 1, {a: b"\x00\x01", b: b"\xff" * 100})
    assert early not in d.answers, "an assignment is told only when it is durable"
    d.persist()
    assert d.sync_answer(lead) == SyncResult(E.NONE, "consumer", "range", b"\x00\x01")
    assert d.sync_answer(early).assignment == b"\xff" * 100
    assert d.sync_answer(d.sync(c, 1)) == SyncResult(E.NONE, "consumer", "range", b"")
    assert d.group.state is S.STABLE


def test_a_sync_in_a_stable_group_gets_the_assignment_again() -> None:
    d = Driver()
    a, b = d.stable(2)
    assert d.sync_answer(d.sync(b, 1)).assignment == b.encode()
    assert d.sync_answer(d.sync(a, 1, {a: b"other"})).assignment == a.encode()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"generation": 7}, E.ILLEGAL_GENERATION),
        ({"member_id": "who"}, E.UNKNOWN_MEMBER_ID),
        ({"protocol_type": "connect"}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol": "sticky"}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"instance": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({"protocol_type": "consumer", "protocol": "range"}, E.NONE),
    ],
)
def test_errors_of_sync(how: dict[str, object], error: E) -> None:
    d = Driver()
    (a,) = d.stable(1)
    arguments: dict[str, object] = {"member_id": a, "generation": 1} | how
    assert d.sync_answer(d.sync(**arguments)).error is error  # type: ignore[arg-type]


def test_a_sync_while_preparing_is_told_to_rejoin() -> None:
    d = Driver()
    a, b = d.stable(2)
    d.join(a)
    assert d.sync_answer(d.sync(b, 1)).error is E.REBALANCE_IN_PROGRESS


def test_a_record_that_cannot_be_written_fails_the_sync_and_starts_a_round() -> None:
    d = Driver(auto_persist=False)
    (a, _), (b, _) = d.enter(), d.enter()
    d.advance(2 * DELAY_MS)
    waits = [d.sync(b, 1), d.sync(a, 1, {a: b"x"})]
    d.persist(E.COORDINATOR_NOT_AVAILABLE)
    assert [d.sync_answer(waiter).error for waiter in waits] == [E.COORDINATOR_NOT_AVAILABLE] * 2
    assert d.group.state is S.PREPARING


def test_members_that_do_not_sync_in_time_are_out() -> None:
    d = Driver()
    (a, _), (b, _) = d.enter(session_ms=100_000), d.enter(session_ms=100_000)
    d.advance(2 * DELAY_MS)
    d.sync(a, 1, {a: b"x", b: b"y"})
    before = d.group.state
    d.advance(REBALANCE_MS)
    assert (before, d.group.state) == (S.STABLE, S.PREPARING)
    assert a in d.group.members
    assert b not in d.group.members


def test_the_sync_timer_ends_when_all_have_synced() -> None:
    d = Driver()
    ids = d.stable(2, session_ms=1_000_000)
    d.advance(2 * REBALANCE_MS)
    assert d.group.state is S.STABLE
    assert all(member_id in d.group.members for member_id in ids)


def test_an_assignment_that_comes_durable_after_the_next_round_began_is_not_told() -> None:
    d = Driver(auto_persist=False)
    (a, _), (b, _) = d.enter(), d.enter()
    d.advance(2 * DELAY_MS)
    waiter = d.sync(a, 1, {a: b"x"})
    d.leave(b)
    assert d.sync_answer(waiter).error is E.REBALANCE_IN_PROGRESS
    d.persist()
    assert d.group.state is S.PREPARING


def test_a_leader_that_asks_again_while_its_assignment_is_written_counts_with_the_later_one() -> None:
    d = Driver(auto_persist=False)
    a, _ = d.enter()
    d.advance(DELAY_MS)
    first, second = d.sync(a, 1, {a: b"1"}), d.sync(a, 1, {a: b"2"})
    assert d.sync_answer(first).error is E.REBALANCE_IN_PROGRESS
    d.persist()
    assert second not in d.answers
    d.persist()
    assert d.sync_answer(second).assignment == b"2"


# --- rejoining --------------------------------------------------------------------------------------------------------


def test_a_follower_that_rejoins_with_nothing_new_gets_the_current_generation() -> None:
    d = Driver()
    a, b = d.stable(2)
    answer = d.join_answer(d.join(b))
    assert (answer.error, answer.generation, answer.leader, answer.members) == (E.NONE, 1, a, ())
    assert d.group.state is S.STABLE


def test_a_follower_with_new_metadata_starts_a_round() -> None:
    d = Driver()
    _, b = d.stable(2)
    waiter = d.join(b, protocols={"range": b"new"})
    assert waiter not in d.answers
    assert d.group.state is S.PREPARING


def test_a_leader_that_rejoins_starts_a_round() -> None:
    d = Driver()
    a, b = d.stable(2)
    wait_a = d.join(a)
    assert d.group.state is S.PREPARING
    assert d.heartbeat(b, 1) is E.REBALANCE_IN_PROGRESS
    wait_b = d.join(b)
    assert d.join_answer(wait_a).generation == d.join_answer(wait_b).generation == 2


def test_a_member_that_lost_its_join_answer_gets_it_again() -> None:
    d = Driver()
    (a, wait_a), (b, wait_b) = d.enter(), d.enter()
    d.advance(2 * DELAY_MS)
    assert d.join_answer(d.join(a)) == d.join_answer(wait_a)
    assert d.join_answer(d.join(b)) == d.join_answer(wait_b)
    assert d.group.state is S.COMPLETING


def test_new_metadata_while_completing_sends_all_back_to_join() -> None:
    d = Driver()
    (a, _), (b, _) = d.enter(), d.enter()
    d.advance(2 * DELAY_MS)
    waiter = d.sync(b, 1)
    d.join(a, protocols={"range": b"new"})
    assert d.sync_answer(waiter).error is E.REBALANCE_IN_PROGRESS


def test_a_join_on_a_second_connection_answers_the_first() -> None:
    d = Driver()
    a, first = d.enter()
    second = d.join(a)
    assert d.join_answer(first).error is E.REBALANCE_IN_PROGRESS
    d.advance(DELAY_MS)
    assert d.join_answer(second).error is E.NONE


def test_the_round_completes_as_soon_as_all_have_rejoined() -> None:
    d = Driver()
    a, b = d.stable(2)
    _c, wait_c = d.enter()
    d.join(a)
    assert wait_c not in d.answers
    d.join(b)
    assert d.join_answer(wait_c).generation == 2


def test_the_round_waits_for_ids_that_were_given_out() -> None:
    d = Driver()
    (a,) = d.stable(1)
    given = d.join_answer(d.join()).member_id
    wait_a = d.join(a)
    assert wait_a not in d.answers
    d.join(given)
    assert d.join_answer(wait_a).generation == 2


def test_members_that_do_not_rejoin_in_time_are_out() -> None:
    d = Driver()
    a, b = d.stable(2)
    wait_a = d.join(a)
    while wait_a not in d.answers:
        d.heartbeat(b, 1)  # alive, and not rejoining
        d.advance(1_000)
    assert d.now_ms >= REBALANCE_MS
    assert b not in d.group.members
    assert len(d.join_answer(wait_a).members) == 1
    assert d.heartbeat(b, 1) is E.UNKNOWN_MEMBER_ID


def test_if_the_leader_does_not_rejoin_another_leads() -> None:
    d = Driver()
    a, b = d.stable(2, session_ms=60_000)
    waiter = d.join(b, protocols={"range": b"new"}, session_ms=60_000)
    d.advance(REBALANCE_MS)
    assert d.join_answer(waiter).leader == b
    assert len(d.join_answer(waiter).members) == 1
    assert a not in d.group.members


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_silent_member_is_out_after_its_session() -> None:
    d = Driver()
    a, b = d.stable(2)
    for _ in range(4):
        d.advance(SESSION_MS // 3)
        assert d.heartbeat(a, d.group.generation) in (E.NONE, E.REBALANCE_IN_PROGRESS)
    assert b not in d.group.members
    assert d.group.state is S.PREPARING


def test_the_last_member_out_leaves_an_empty_group_and_a_record_of_it() -> None:
    d = Driver()
    d.stable(1)
    d.advance(SESSION_MS)
    assert d.group.state is S.EMPTY
    assert d.log[-1].members == ()
    assert d.log[-1].generation == d.group.generation == 2
    assert d.log[-1].leader is d.log[-1].protocol is None
    assert d.log[-1].protocol_type == "consumer"


def test_heartbeats_keep_a_session() -> None:
    d = Driver()
    (a,) = d.stable(1)
    for _ in range(20):
        d.advance(SESSION_MS - 1)
        assert d.heartbeat(a, 1) is E.NONE
    assert d.group.state is S.STABLE


def test_commits_keep_a_session() -> None:
    d = Driver()
    (a,) = d.stable(1)
    for _ in range(5):
        d.advance(SESSION_MS - 1)
        assert d.commit(a, 1) is E.NONE
    assert d.group.state is S.STABLE


def test_a_member_that_waits_for_a_round_does_not_need_heartbeats() -> None:
    d = Driver()
    a, b = d.stable(2)
    wait_a = d.join(a)
    d.advance(SESSION_MS // 2)
    d.heartbeat(b, 1)
    d.advance(SESSION_MS - 1)
    assert a in d.group.members
    d.join(b)
    assert d.join_answer(wait_a).error is E.NONE


def test_a_follower_that_waits_for_the_leader_does_not_need_heartbeats() -> None:
    d = Driver()
    (a, _), (b, _) = d.enter(), d.enter()
    d.advance(2 * DELAY_MS)
    waiter = d.sync(b, 1)
    d.advance(SESSION_MS)  # the leader died; its session ends the round
    assert a not in d.group.members
    assert b in d.group.members
    assert d.sync_answer(waiter).error is E.REBALANCE_IN_PROGRESS


def test_a_new_member_that_waits_too_long_is_told_to_start_over() -> None:
    d = Driver(delay_ms=NEW_MEMBER_JOIN_TIMEOUT_MS * 2)
    waiter = d.join(version=3, rebalance_ms=NEW_MEMBER_JOIN_TIMEOUT_MS * 3)
    d.advance(NEW_MEMBER_JOIN_TIMEOUT_MS)
    assert d.join_answer(waiter).error is E.UNKNOWN_MEMBER_ID
    assert not len(d.group.members)


def test_a_client_that_went_away_while_joining_is_out_after_its_session() -> None:
    d = Driver()
    d.enter()  # its connection breaks now; nobody reads the answer
    d.advance(DELAY_MS + SESSION_MS)
    assert d.group.state is S.EMPTY


@pytest.mark.parametrize(
    ("state", "error"),
    [("stable", E.NONE), ("completing", E.NONE), ("preparing", E.REBALANCE_IN_PROGRESS)],
)
def test_what_a_heartbeat_says_in_each_state(state: str, error: E) -> None:
    d = Driver()
    a, b = d.stable(2)
    if state != "stable":
        d.join(a)
    if state == "completing":
        d.join(b)
    assert d.heartbeat(b, d.group.generation) is error


def test_errors_of_heartbeat() -> None:
    d = Driver()
    (a,) = d.stable(1)
    assert d.heartbeat("who", 1) is E.UNKNOWN_MEMBER_ID
    assert d.heartbeat(a, 0) is E.ILLEGAL_GENERATION
    assert d.heartbeat(a, 1, "nobody") is E.UNKNOWN_MEMBER_ID


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_leave_starts_a_round_for_the_others() -> None:
    d = Driver()
    a, b = d.stable(2)
    assert d.leave(b) == [E.NONE]
    assert d.heartbeat(a, 1) is E.REBALANCE_IN_PROGRESS
    assert d.join_answer(d.join(a)).generation == 2


def test_a_batch_of_leaves_answers_each_and_rebalances_once() -> None:
    d = Driver()
    a, b, c = d.stable(3)
    assert d.leave(b, "who", c, ("", "nobody")) == [E.NONE, E.UNKNOWN_MEMBER_ID, E.NONE, E.UNKNOWN_MEMBER_ID]
    assert [member.member_id for member in d.group.members] == [a]
    assert d.group.state is S.PREPARING


def test_an_id_that_was_given_out_may_leave_without_a_round() -> None:
    d = Driver()
    d.stable(1)
    given = d.join_answer(d.join()).member_id
    assert d.leave(given) == [E.NONE]
    assert d.group.state is S.STABLE


def test_a_leave_completes_a_round_that_waited_only_for_the_leaver() -> None:
    d = Driver()
    a, b = d.stable(2)
    waiter = d.join(a)
    d.leave(b)
    assert d.join_answer(waiter).generation == 2


def test_who_is_removed_while_waiting_is_told() -> None:
    d = Driver()
    a, b = d.stable(2)
    waiter = d.join(a)
    d.leave(a)
    assert d.join_answer(waiter).error is E.UNKNOWN_MEMBER_ID
    d.join(b)
    waiter = d.sync(b, 2)
    assert waiter in d.answers  # b leads now
    (c, wait_c) = d.enter()
    d.join(b)
    assert d.join_answer(wait_c).generation == 3
    waiter = d.sync(c, 3)
    d.leave(c)
    assert d.sync_answer(waiter).error is E.UNKNOWN_MEMBER_ID


def test_all_leave_and_the_group_is_empty() -> None:
    d = Driver()
    ids = d.stable(3)
    assert d.leave(*ids) == [E.NONE] * 3
    assert d.group.state is S.EMPTY
    assert d.log[-1].members == ()


# --- offsets ----------------------------------------------------------------------------------------------------------


def test_who_may_commit() -> None:
    d = Driver()
    assert d.commit() is E.NONE, "an Empty group takes commits of simple consumers"
    assert d.commit("who", -1) is E.NONE
    assert d.commit("who", 1) is E.UNKNOWN_MEMBER_ID
    a, b = d.stable(2)
    assert d.commit(a, 1) is E.NONE
    assert d.commit() is E.UNKNOWN_MEMBER_ID
    assert d.commit(a, -1) is E.ILLEGAL_GENERATION
    assert d.commit(a, 2) is E.ILLEGAL_GENERATION
    d.join(a)
    assert d.commit(b, 1) is E.NONE, "while preparing, members commit what they did"
    d.join(b)
    assert d.commit(b, 2) is E.REBALANCE_IN_PROGRESS
    assert d.commit(b, 1) is E.ILLEGAL_GENERATION


def test_which_offsets_may_expire_in_each_state() -> None:
    d = Driver()
    assert d.group.expiry() is not None
    a, b = d.stable(2, protocols={"range": subscription("t", "u")})
    expiry = d.group.expiry()
    assert expiry is not None
    assert expiry.since_ms is None
    assert set(expiry.keep_topics) == {"t", "u"}
    assert d.group.is_subscribed("t")
    assert not d.group.is_subscribed("x")
    d.join(a)
    assert d.group.expiry() is None
    d.leave(a, b)
    expiry = d.group.expiry()
    assert expiry is not None
    assert (expiry.since_ms, expiry.keep_topics) == (WALL_MS + d.now_ms, ())


def test_a_subscription_that_cannot_be_read_keeps_all_offsets() -> None:
    d = Driver()
    d.stable(1, protocols={"range": b"\x00"})
    assert d.group.expiry() is None
    assert d.group.is_subscribed("anything")


def test_a_group_of_another_protocol_type_keeps_its_offsets_while_it_lives() -> None:
    d = Driver()
    d.stable(1, protocol_type="connect")
    assert d.group.expiry() is None


# --- the end and the beginning ----------------------------------------------------------------------------------------


def test_a_group_that_moves_away_answers_all_who_wait() -> None:
    d = Driver()
    (_, wait_a), (_, wait_b) = d.enter(), d.enter()
    d.group.shut(E.NOT_COORDINATOR)
    d.collect()
    assert d.join_answer(wait_a).error is d.join_answer(wait_b).error is E.NOT_COORDINATOR
    assert d.group.next_deadline_ms() is None


def test_a_dead_group_sends_everybody_away() -> None:
    d = Driver()
    (a,) = d.stable(1)
    d.leave(a)
    d.group.begin_delete()
    assert d.join_answer(d.join()).error is E.COORDINATOR_NOT_AVAILABLE
    assert d.sync_answer(d.sync(a, 1)).error is E.COORDINATOR_NOT_AVAILABLE
    assert d.heartbeat(a, 1) is E.COORDINATOR_NOT_AVAILABLE
    assert d.commit() is E.COORDINATOR_NOT_AVAILABLE
    assert d.leave(a) == [E.UNKNOWN_MEMBER_ID]
    d.group.undo_delete()
    assert d.join_answer(d.join()).error is E.MEMBER_ID_REQUIRED


def test_a_group_loaded_from_its_record_is_the_group_it_was() -> None:
    d, a, b = static_group()
    loaded = ClassicGroup.load("g", d.log[-1], d.limits, d.rng, d.now)
    assert loaded.state is S.STABLE
    assert (loaded.generation, loaded.protocol, loaded.protocol_type) == (1, "range", "consumer")
    assert loaded.members.leader == a
    assert loaded.members.values("range") == d.group.members.values("range")
    assert loaded.members.static_member_id("i-b") == b
    d.group = loaded
    assert d.heartbeat(b, 1, "i-b") is E.NONE
    assert d.sync_answer(d.sync(b, 1, instance="i-b")).assignment == b.encode()
    d.advance(SESSION_MS)
    assert d.group.state is S.EMPTY


def test_an_empty_record_loads_as_an_empty_group_that_remembers_its_generation() -> None:
    d = Driver()
    (a,) = d.stable(1)
    d.leave(a)
    loaded = ClassicGroup.load("g", d.log[-1], d.limits, d.rng, d.now)
    assert (loaded.state, loaded.generation) == (S.EMPTY, 2)
    d.group = loaded
    _, waiter = d.enter()
    d.advance(DELAY_MS)
    assert d.join_answer(waiter).generation == 3
