"""Health follows the operation that ended last, and the age of the oldest one that has not ended."""

from __future__ import annotations

from tidelog.runtime.errors import Unavailable
from tidelog.runtime.health import FLAP_WINDOW_S, FORGET_S, STUCK_S, Flapping, OperationHealth, ProgressHealth


def test_a_failure_is_a_problem_until_the_next_success() -> None:
    health = OperationHealth("put")
    assert health.problem(0) == ""
    health.failed(1, Unavailable("denied"), health.begin(0))
    assert health.problem(1) == "put fails: denied"
    health.failed(2, Unavailable("denied"), health.begin(1))
    assert health.problem(500) == "put fails 2 times in a row: denied"
    health.succeeded(501, health.begin(500))
    assert health.problem(501) == ""
    assert health.report(502)["last_success_age_ms"] == 1000


def test_an_operation_without_an_answer_is_a_problem_unless_others_succeed() -> None:
    health = OperationHealth("get")
    hangs = health.begin(10)
    assert health.problem(10 + STUCK_S - 0.1) == ""
    assert "no answer" in health.problem(10 + STUCK_S)
    health.succeeded(15, health.begin(14))
    assert health.problem(15) == "", "the next one was answered: one is slow"
    assert "no answer for 4 s" in health.problem(15 + STUCK_S)
    health.dropped(hangs)
    assert health.problem(1000) == "", "nothing is waiting"
    health.begin(1000, allowance_s=10)
    assert health.problem(1010) == "" and health.oldest_s(1005) == 0
    assert health.problem(1010 + STUCK_S)


def test_an_old_failure_is_forgiven_only_after_a_later_check() -> None:
    health = OperationHealth("list")
    health.failed(100, Unavailable("denied"))
    health.forgive(99, 100 + 2 * FORGET_S)
    assert health.problem(300), "the check was before the failure"
    health.forgive(101, 100 + FORGET_S / 2)
    assert health.problem(300), "it was just now"
    health.forgive(101, 101 + FORGET_S)
    assert not health.problem(300)


def test_counters_that_stand_still_while_something_waits_are_a_problem() -> None:
    health = ProgressHealth("WAL append")
    for second in range(10):
        health.sample(second, 100, 100)
        assert not health.problem(second)
    for second in range(10, 20):
        health.sample(second, 1000, second)
        assert not health.problem(second), "slow, and it moves"
    for second in range(20, 25):
        health.sample(second, 2000, 19)
    assert "no progress for 5 s" in health.problem(24)
    health.sample(25, 2000, 2000)
    assert not health.problem(100)


def test_what_is_lost_again_and_again_is_a_problem_between_the_losses() -> None:
    peer = Flapping()
    peer.lost(10)
    assert not peer.problem(11), "one restart"
    peer.lost(20)
    assert "lost" in peer.problem(21) and "lost" in peer.problem(10 + FLAP_WINDOW_S)
    assert not peer.problem(11 + FLAP_WINDOW_S)
