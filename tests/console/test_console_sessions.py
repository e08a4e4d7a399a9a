"""Sessions of the console: how they begin, end, and are bounded."""

from __future__ import annotations

import pytest

from tidelog.console.sessions import (
    FAILURES_S,
    IDLE_S,
    KEY_LIFE_S,
    LIFE_S,
    MAX_FAILURES,
    MAX_SESSIONS,
    Sessions,
    TooManyAttempts,
)


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_keeps_its_token_until_it_is_ended() -> None:
    sessions = Sessions(Time())
    one, other = sessions.begin("token"), sessions.begin("other")
    assert one != other
    assert (sessions.token_of(one), sessions.token_of(other), sessions.token_of("guessed")) == ("token", "other", None)
    sessions.end(one)
    assert (sessions.token_of(one), sessions.token_of(other)) == (None, "other")


def test_a_session_ends_when_it_is_idle_and_at_the_latest_after_its_life() -> None:
    time = Time()
    sessions = Sessions(time)
    idle, used = sessions.begin("t"), sessions.begin("t")
    while time.now < LIFE_S - IDLE_S / 2:
        assert sessions.token_of(used) == "t"
        time.now += IDLE_S / 2
    assert sessions.token_of(idle) is None
    time.now = LIFE_S
    assert sessions.token_of(used) is None
    assert len(sessions) == 0


def test_the_least_recently_used_session_makes_room() -> None:
    sessions = Sessions(Time())
    first, second = sessions.begin("t"), sessions.begin("t")
    sessions.token_of(first)
    for _ in range(MAX_SESSIONS - 1):
        sessions.begin("t")
    assert len(sessions) == MAX_SESSIONS
    assert (sessions.token_of(first), sessions.token_of(second)) == ("t", None)


def test_a_sign_in_key_works_once_and_not_for_long() -> None:
    time = Time()
    sessions = Sessions(time)
    key = sessions.new_key("token")
    assert sessions.take_key("wrong") is None
    assert sessions.take_key(key) == "token"
    assert sessions.take_key(key) is None
    late = sessions.new_key("token")
    time.now += KEY_LIFE_S
    assert sessions.take_key(late) is None


def test_wrong_tokens_are_not_tried_without_end() -> None:
    time = Time()
    sessions = Sessions(time)
    for _ in range(MAX_FAILURES):
        sessions.check_rate()
        sessions.failed()
    with pytest.raises(TooManyAttempts):
        sessions.check_rate()
    time.now += FAILURES_S
    sessions.check_rate()
