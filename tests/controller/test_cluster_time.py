"""Deadlines in the replicated state are in cluster time: no wall clock moves them (rule 16)."""

from __future__ import annotations

import pytest

from tests.controller.controller_helpers import DELAY_MS, Driver
from tidelog.controller.machine.dedupe import CLIENT_TTL_MS
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import ObjectState

HOURS_MS = 3_600_000
START_MS = 1_750_000_000_000


class Timed(Driver):
    """Commands as an active controller sends them: with a wall clock, and what has elapsed in its term."""

    def __init__(self) -> None:
        self.wall_ms = START_MS
        self.elapsed_ms = 0
        super().__init__()

    def envelope(self, command: c.AnyCommand, client: str = "", sequence: int = 0, done: int = 0) -> c.Envelope:
        return c.Envelope(c.FORMAT_VERSION, self.term, self.wall_ms, client, sequence, done, command, self.elapsed_ms)

    def new_term(self) -> None:
        """Another controller becomes active; its monotonic clock has counted nothing of this term yet."""
        self.term, self.elapsed_ms = self.term + 1, 0
        self.run(c.BecomeActive(0, self.term, "cluster", DELAY_MS))

    def state_of(self, object_id: int) -> int:
        return self.image.objects[object_id].state


@pytest.fixture
def driver() -> Timed:
    return Timed()


@pytest.mark.parametrize("hours", [-12, 12])
def test_a_step_of_the_wall_clock_expires_nothing_and_keeps_nothing(driver: Timed, hours: int) -> None:
    object_id = driver.prepare(1, ttl_ms=10_000)
    driver.wall_ms += hours * HOURS_MS
    driver.elapsed_ms = 9_999
    driver.run(c.ExpireObjects((object_id,)))
    assert driver.state_of(object_id) == ObjectState.PREPARED
    driver.elapsed_ms = 10_000
    driver.run(c.ExpireObjects((object_id,)))
    assert driver.state_of(object_id) == ObjectState.DESTROYED
    driver.elapsed_ms += DELAY_MS - 1
    driver.run(c.ForgetObjects((object_id,)))
    assert object_id in driver.image.objects
    driver.elapsed_ms += 1
    driver.run(c.ForgetObjects((object_id,)))
    assert object_id not in driver.image.objects


def test_the_time_of_the_next_term_goes_on_where_the_last_one_was(driver: Timed) -> None:
    object_id = driver.prepare(1, ttl_ms=10_000)
    driver.elapsed_ms = 6_000
    driver.run(c.Barrier())
    driver.wall_ms += 12 * HOURS_MS  # the next active controller's clock is wrong
    driver.new_term()
    assert driver.image.cluster is not None
    assert driver.image.cluster.active_since_ms == START_MS + 6_000
    driver.elapsed_ms = 3_999
    driver.run(c.ExpireObjects((object_id,)))
    assert driver.state_of(object_id) == ObjectState.PREPARED
    driver.elapsed_ms = 4_000
    driver.run(c.ExpireObjects((object_id,)))
    assert driver.state_of(object_id) == ObjectState.DESTROYED


def test_a_late_command_of_an_old_term_moves_no_time(driver: Timed) -> None:
    driver.new_term()
    driver.term, driver.elapsed_ms = 1, 12 * HOURS_MS
    driver.apply(driver.envelope(c.Barrier()))
    assert driver.state.tables.time_ms == START_MS


def test_a_step_of_the_wall_clock_forgets_no_result(driver: Timed) -> None:
    first = driver.apply(driver.envelope(c.PrepareObjects(1, 1_000), "client", 1))
    driver.wall_ms += 2 * CLIENT_TTL_MS
    driver.apply(driver.envelope(c.Barrier(), "other", 1))
    again = driver.apply(driver.envelope(c.PrepareObjects(1, 1_000), "client", 1))
    assert bytes(again.value) == bytes(first.value), "the repeated command took effect once"


def test_times_for_users_follow_the_wall_clock_back_again(driver: Timed) -> None:
    driver.wall_ms += 12 * HOURS_MS
    driver.prepare()
    driver.wall_ms = START_MS + 5
    object_id = driver.prepare()
    assert driver.image.objects[object_id].since_ms == START_MS + 5


def test_members_agree_after_a_snapshot(driver: Timed) -> None:
    driver.prepare(1, ttl_ms=10_000)
    driver.elapsed_ms = 6_000
    driver.run(c.Barrier())
    other = ControllerState()
    other.load(driver.state.dump())
    assert other.tables.time_ms == START_MS + 6_000
    assert other.dump() == driver.state.dump()


def test_commands_and_snapshots_of_older_versions_keep_their_meaning() -> None:
    old = Driver()  # its envelopes do not say what has elapsed: the largest wall clock is the time
    object_id = old.prepare(1, ttl_ms=10_000)
    old.now_ms += 10_000
    old.run(c.ExpireObjects((object_id,)))
    assert old.image.objects[object_id].state == ObjectState.DESTROYED
    assert old.state.tables.time_ms == old.now_ms
