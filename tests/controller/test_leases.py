"""Leases of readers outside the cluster: what they hold, for how long, and that nothing ends them early (rule 6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.controller.controller_helpers import DELAY_MS, Driver, make_client, make_node, new_object, until
from tests.controller.test_cluster_time import HOURS_MS, Timed
from tidelog.controller.active.duties import Duties, removable
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.image.image import Image
from tidelog.controller.image.transfer import ImageReceiver, ImageSender
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.leases import (
    MAX_HOLDER_CHARS,
    MAX_LEASES,
    MAX_TTL_MS,
    MIN_TTL_MS,
    NOTHING_HELD,
    EndLease,
    ExpireLeases,
    LeaseOver,
    LeaseRecord,
    RenewLease,
    TakeLease,
    held_version,
)
from tidelog.controller.model.levels import UnsupportedLevel
from tidelog.controller.model.records import ObjectState
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import InvalidInput, Overloaded
from tidelog.storage.commits import CompactObjects

TTL_MS = 10_000
HOLD_MS = 60_000


@pytest.fixture
def driver() -> Driver:
    """Broker 0 with a stream, open, in one committed object."""
    found = Driver()
    epoch = found.broker(0)
    (stream,) = found.topic()
    found.run(c.OpenStreams(0, epoch, ((stream, 0),)))
    found.commit(epoch, (0, 10), new_object(found.prepare(), (stream, 0, 5)))
    return found


def take(driver: Driver, *, ttl_ms: int = TTL_MS, hold_ms: int = HOLD_MS) -> LeaseRecord:
    found: LeaseRecord = driver.run(TakeLease("a reader", ttl_ms, hold_ms), LeaseRecord)
    return found


def renew(driver: Driver, lease: LeaseRecord, version: int = 0, ttl_ms: int = TTL_MS) -> LeaseRecord:
    found: LeaseRecord = driver.run(RenewLease(lease.id, ttl_ms, version), LeaseRecord)
    return found


def compact(driver: Driver) -> int:
    """Replace the only committed object; return its id."""
    (old,) = [each for each in driver.image.objects.values() if each.state == ObjectState.COMMITTED]
    (piece,) = old.ranges
    epoch = driver.image.replica_sets[0].master_epoch
    new = new_object(driver.prepare(), (piece.stream_id, piece.start_offset, piece.end_offset))
    driver.run(c.Compact(CompactObjects(0, epoch, (old.id,), (new,))))
    return old.id


def removable_now(driver: Driver) -> tuple[int, ...]:
    return removable(driver.image, driver.state.tables.time_ms, held_version(driver.image.leases.values()))


def test_what_is_destroyed_after_a_lease_was_taken_stays_and_what_was_destroyed_before_goes(driver: Driver) -> None:
    before = compact(driver)
    lease = take(driver)
    assert lease.version == driver.index == driver.image.version
    after = compact(driver)
    driver.now_ms += DELAY_MS
    driver.run(c.Barrier())
    assert removable_now(driver) == (before,)
    driver.run(EndLease(lease.id))
    assert removable_now(driver) == (before, after)
    driver.run(EndLease(lease.id))
    assert held_version(driver.image.leases.values()) == NOTHING_HELD


def test_the_metadata_do_not_forget_an_object_that_a_lease_holds_whoever_asks_for_it(driver: Driver) -> None:
    lease = take(driver)
    held = compact(driver)
    driver.now_ms += DELAY_MS
    driver.run(c.ForgetObjects((held,)))
    assert driver.image.objects[held].state == ObjectState.DESTROYED
    driver.run(EndLease(lease.id))
    driver.run(c.ForgetObjects((held,)))
    assert held not in driver.image.objects


def test_the_oldest_lease_counts(driver: Driver) -> None:
    first = take(driver)
    destroyed = compact(driver)
    second = take(driver)
    assert second.id > first.id and second.version > first.version
    driver.now_ms += DELAY_MS
    driver.run(c.Barrier())
    assert removable_now(driver) == ()
    driver.run(EndLease(first.id))
    assert removable_now(driver) == (destroyed,)


def test_a_renewal_moves_a_lease_on_and_never_back(driver: Driver) -> None:
    lease = take(driver)
    destroyed = compact(driver)
    driver.now_ms += DELAY_MS
    assert renew(driver, lease).version == lease.version
    newer = renew(driver, lease, driver.index)
    assert newer.version > lease.version
    assert removable_now(driver) == (destroyed,)
    assert renew(driver, lease, lease.version).version == newer.version
    with pytest.raises(InvalidInput, match="has not reached version"):
        renew(driver, lease, driver.index + 2)


def test_a_lease_expires_when_it_is_not_renewed_and_not_before(driver: Driver) -> None:
    lease = take(driver)
    driver.now_ms += TTL_MS - 1
    driver.run(ExpireLeases((lease.id,)))
    assert lease.id in driver.image.leases
    renew(driver, lease)
    driver.now_ms += TTL_MS - 1
    driver.run(ExpireLeases((lease.id,)))
    assert lease.id in driver.image.leases
    driver.now_ms += 1
    driver.run(ExpireLeases((lease.id, lease.id + 5)))
    assert lease.id not in driver.image.leases
    with pytest.raises(LeaseOver, match="has ended"):
        renew(driver, lease)
    assert take(driver).id > lease.id, "an id is never used again"


def test_a_renewal_after_the_time_is_over_counts_if_nobody_has_ended_the_lease(driver: Driver) -> None:
    lease = take(driver)
    driver.now_ms += 2 * TTL_MS
    assert renew(driver, lease).expires_ms == driver.now_ms + TTL_MS


def test_one_version_is_held_for_its_bound_and_a_newer_one_again(driver: Driver) -> None:
    lease = take(driver)
    driver.now_ms += HOLD_MS - 1
    assert renew(driver, lease).expires_ms == lease.ends_ms, "no renewal goes beyond the bound"
    driver.now_ms += 1
    with pytest.raises(LeaseOver, match=r"has held version \d+ for 60 s, its bound"):
        renew(driver, lease)
    moved = renew(driver, lease, driver.index)
    assert (moved.expires_ms, moved.ends_ms) == (driver.now_ms + TTL_MS, driver.now_ms + HOLD_MS)


def test_a_shorter_time_to_live_takes_nothing_back(driver: Driver) -> None:
    lease = take(driver)
    assert renew(driver, lease, ttl_ms=MIN_TTL_MS).expires_ms == lease.expires_ms


@pytest.mark.parametrize("hours", [-12, 12])
def test_no_wall_clock_ends_or_keeps_a_lease(hours: int) -> None:
    driver = Timed()
    lease = take(driver)
    driver.wall_ms += hours * HOURS_MS
    driver.elapsed_ms = TTL_MS - 1
    driver.run(ExpireLeases((lease.id,)))
    assert lease.id in driver.image.leases
    driver.new_term()
    driver.elapsed_ms = 1
    driver.run(ExpireLeases((lease.id,)))
    assert lease.id not in driver.image.leases, "the next active controller goes on with its time"


def test_what_is_no_lease_is_refused(driver: Driver) -> None:
    for holder in ("", "x" * (MAX_HOLDER_CHARS + 1)):
        with pytest.raises(InvalidInput, match="holder"):
            driver.run(TakeLease(holder, TTL_MS, HOLD_MS))
    for ttl_ms in (0, MIN_TTL_MS - 1, MAX_TTL_MS + 1):
        with pytest.raises(InvalidInput, match="time to live"):
            take(driver, ttl_ms=ttl_ms)
        with pytest.raises(InvalidInput, match="time to live"):
            driver.run(RenewLease(1, ttl_ms))
    with pytest.raises(InvalidInput, match="cannot hold"):
        take(driver, hold_ms=0)
    assert not driver.image.leases


def test_the_number_of_leases_is_bounded(driver: Driver) -> None:
    for _ in range(MAX_LEASES):
        take(driver)
    with pytest.raises(Overloaded, match="tidelog lease list") as caught:
        take(driver)
    assert str(MAX_LEASES) in caught.value.message


def test_leases_are_in_snapshots_and_in_images(driver: Driver) -> None:
    lease = take(driver)
    again = ControllerState()
    again.load(driver.state.dump())
    assert again.tables.leases.get(lease.id) == lease
    assert again.dump() == driver.state.dump()
    sender, receiver = ImageSender(1, driver.image, chunk_rows=3, chunk_bytes=1_000), ImageReceiver()
    while not receiver.is_whole:
        chunk = msgspec.msgpack.encode(sender.next_chunk())
        receiver.take(msgspec.Raw(chunk))
    assert ("leases", lease.id, lease) in receiver.rows


def test_there_are_none_below_level_3() -> None:
    with pytest.raises(UnsupportedLevel, match="TakeLease needs feature level 3"):
        c.encode_envelope(c.Envelope(1, 1, 5, "", 0, 0, TakeLease("a", TTL_MS, HOLD_MS)), 2)


def test_the_active_controller_ends_what_has_expired(driver: Driver) -> None:
    duties = Duties(lambda: driver.image, BrokerSessions(10.0), dict, ControllerSettings())
    first, second = take(driver), take(driver, ttl_ms=2 * TTL_MS)
    assert list(duties.leases(0.0, driver.now_ms + TTL_MS - 1)) == []
    assert list(duties.leases(0.0, driver.now_ms + TTL_MS)) == [ExpireLeases((first.id,))]
    assert list(duties.leases(0.0, driver.now_ms + 2 * TTL_MS)) == [ExpireLeases((first.id, second.id))]


async def test_a_lease_holds_objects_in_the_bucket_over_a_restart_of_the_controller(
    tmp_path: Path, quick_rounds: float
) -> None:
    deleted: list[int] = []

    async def delete(object_ids: Any) -> None:
        deleted.extend(object_ids)

    def destroyed(image: Image) -> set[int]:
        return {each.id for each in image.objects.values() if each.state == ObjectState.DESTROYED}

    settings = ControllerSettings(lease_max_hold_ms=3_000_000)
    node = make_node(tmp_path, delete_objects=delete, delete_delay_ms=10, settings=settings)
    await node.start()
    await node.wait_active(5.0)
    client = make_client(node.address)
    await client.start()
    first = await client.prepare_objects(1, 10)
    await until(lambda: first in deleted)
    lease = await client.leases.take("a reader", MAX_TTL_MS)
    assert client.image.leases[lease.id] == lease
    assert client.image.version >= lease.version
    assert lease.hold_ms == 3_000_000, "the setting is the bound"
    held = await client.prepare_objects(2, 10)
    await until(lambda: destroyed(client.image) == {held, held + 1})
    await client.close()
    await node.close()

    node = make_node(tmp_path, delete_objects=delete, delete_delay_ms=10, settings=settings)
    await node.start()
    await node.wait_active(5.0)
    client = make_client(node.address)
    await client.start()
    later = await client.leases.take("another one", MAX_TTL_MS)
    await client.leases.end(later.id)
    rounds_s = SystemClock().monotonic() + 8 * quick_rounds
    await until(lambda: SystemClock().monotonic() > rounds_s)
    assert deleted == [first], "the lease of before the restart holds the others"
    await client.leases.end(lease.id)
    await until(lambda: not client.image.objects)
    assert sorted(deleted) == [first, held, held + 1]
    with pytest.raises(LeaseOver):
        await client.leases.renew(lease.id, TTL_MS)
    await client.close()
    await node.close()
