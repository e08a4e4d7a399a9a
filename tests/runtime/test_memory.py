"""When everything is collected: the process grew and nothing that it holds on purpose says why, or an hour is over."""

from __future__ import annotations

from tidelog.runtime.memory import LONGEST_S, UNEXPLAINED_BYTES, CollectionWatch

MIB = 1 << 20


def test_growth_that_the_accounts_do_not_explain_is_due_once() -> None:
    watch = CollectionWatch(100 * MIB, 10 * MIB, 0)
    assert not watch.is_due(100 * MIB + UNEXPLAINED_BYTES - 1, 10 * MIB, 1)
    assert watch.is_due(100 * MIB + UNEXPLAINED_BYTES, 10 * MIB, 2)
    assert not watch.is_due(100 * MIB + UNEXPLAINED_BYTES, 10 * MIB, 3)
    assert watch.is_due(100 * MIB + 2 * UNEXPLAINED_BYTES, 10 * MIB, 4)


def test_caches_that_fill_up_are_no_reason_and_what_grows_beside_them_is() -> None:
    watch = CollectionWatch(100 * MIB, 0, 0)
    assert not watch.is_due(600 * MIB, 480 * MIB, 1)
    assert watch.is_due(600 * MIB + UNEXPLAINED_BYTES, 500 * MIB, 2)


def test_memory_that_is_freed_and_taken_again_is_no_reason() -> None:
    watch = CollectionWatch(600 * MIB, 500 * MIB, 0)
    assert not watch.is_due(600 * MIB, 100 * MIB, 1)
    assert not watch.is_due(600 * MIB, 500 * MIB, 2)


def test_an_hour_is_due_whatever_the_size() -> None:
    watch = CollectionWatch(100 * MIB, 0, 5)
    assert not watch.is_due(100 * MIB, 0, LONGEST_S)
    assert watch.is_due(50 * MIB, 0, 5 + LONGEST_S)
    assert not watch.is_due(50 * MIB, 0, 6 + LONGEST_S)
