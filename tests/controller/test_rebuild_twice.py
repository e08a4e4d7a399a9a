"""One state of the metadata that several clusters begin with gives out no number twice."""

from __future__ import annotations

import pytest

from tests.controller.test_rebuild_plan import lost_cluster
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.rebuild.adopt import Adoption, adopt
from tidelog.controller.rebuild.plan import make_plan

DAY_MS = 24 * 3600 * 1000


def numbers(adoption: Adoption) -> dict[str, int]:
    """What the first elections, producers, leases and topics of a cluster get: they grow from there."""
    driver, (_, object_id) = lost_cluster()
    old = ControllerState()
    old.load(driver.state.dump())
    tables = adopt(old, make_plan(old.tables, {object_id: 100}, []), adoption).tables
    masters = {each.id: each.master_epoch for each in tables.replica_sets.values()}
    leaders = {f"{each.index}": each.epoch_base + masters[each.replica_set] for each in tables.partitions.values()}
    counters = {name: tables.counters.get(name) or 0 for name in ("producer", "lease", "stream")}
    registered = {f"broker {each.id}": each.registration_epoch for each in tables.brokers.values()}
    return leaders | counters | registered


@pytest.mark.parametrize("brokers", [[1, 2], [2]])
def test_a_rebuild_after_one_that_left_no_state_is_as_far_from_it_as_that_from_the_old_cluster(
    brokers: list[int],
) -> None:
    first, second = (numbers(Adoption(brokers, generation, 9, 5_000)) for generation in (2, 3))
    assert all(second[name] - first[name] >= 1_000 for name in first), (first, second)


def test_two_restores_of_one_backup_are_as_far_apart_as_their_times() -> None:
    """Each is in a bucket of its own, where nothing tells of the other; producers and consumers may have seen both."""
    first, second = (numbers(Adoption([1, 2], 2, 9, 5_000, age_ms)) for age_ms in (DAY_MS, 2 * DAY_MS))
    assert all(second[name] - first[name] >= DAY_MS // 10_000 for name in first if name != "stream"), (first, second)
    assert second["producer"] - first["producer"] >= DAY_MS
    behind, far = (numbers(Adoption([1, 2], 2, 9, 5_000, age_ms)) for age_ms in (-DAY_MS, 1 << 60))
    assert behind == numbers(Adoption([1, 2], 2, 9, 5_000)), "of a clock that was ahead when the state was written"
    assert max(value for name, value in far.items() if name not in {"producer", "lease", "stream"}) < 1 << 31
