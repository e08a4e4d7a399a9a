"""`confirmed-lost`: silent on WALs that keep what they confirmed, and loud on each one that does not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest

from tidelog.simulation.world.confirmed import Confirmed
from tidelog.simulation.world.disk import Platters, SimDisk
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.simulation.world.watch import Watch
from tidelog.simulation.world.watched_wal import watched
from tidelog.storage.ack_gate import AckGate
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import Wal
from tidelog.storage.wal.disk.wal import DiskWal

SETTINGS = WalSettings(kind="disk", segment_bytes=1 << 16, max_bytes=1 << 18, max_record_bytes=1 << 12)
STREAM = 5
EPOCH_BEGUN = 64
"""WAL bytes of the record that begins an epoch."""
COUNT = 4
"""Records that a life appends, with one stream offset each."""


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


async def live(
    loop: VirtualLoop, platters: Platters, watch: Watch, epoch: int, offset: int, *, gate: AckGate | None = None
) -> Wal:
    """A broker that starts, appends, confirms what is durable and let through by the gate, and is gone."""
    gate = gate or AckGate()
    wal = watched(DiskWal(SimDisk(platters, loop, random.Random(epoch)), SETTINGS, rng=random.Random(1)), watch, 1)
    await wal.recover(lambda record: None)
    wal.set_on_durable(lambda durable: wal.note_confirmed(gate.admit(durable)))
    await wal.begin_epoch(epoch)
    for step in range(COUNT):
        wal.append(StreamAppend(STREAM, epoch, offset + step, 1, [b"x" * 100]))
    await asyncio.sleep(1)
    assert wal.durable_offset == wal.end_offset
    return wal


def lives(loop: VirtualLoop, between: Callable[[Platters], None], second_offset: int = COUNT) -> list[str]:
    """What is found of two lives with a power loss between them."""
    watch, platters = Watch(), Platters()

    async def work() -> None:
        await live(loop, platters, watch, 1, 0)
        platters.lose_power(random.Random(1))
        between(platters)
        await live(loop, platters, watch, 2, second_offset)

    loop.run_until_complete(work())
    return [finding.message for finding in watch.findings if finding.rule == "confirmed-lost"]


def test_silent_when_all_that_was_confirmed_is_recovered(loop: VirtualLoop) -> None:
    assert lives(loop, lambda platters: None) == []


def test_a_wal_that_begins_before_what_it_confirmed_is_found(loop: VirtualLoop) -> None:
    found = lives(loop, lambda platters: platters.files.clear())
    assert len(found) == 1
    assert "the WAL of replica set 1 continues at 0 with epoch 2" in found[0]


def test_a_recovered_tail_that_its_stream_does_not_get_is_found(loop: VirtualLoop) -> None:
    (found,) = lives(loop, lambda platters: None, second_offset=COUNT - 1)
    assert f"stream {STREAM} continues at {COUNT - 1} with epoch 2; epoch 1 confirmed it up to {COUNT}" in found


@pytest.mark.parametrize(("is_open", "findings"), [(False, 0), (True, 2)])
def test_what_waits_behind_a_closed_gate_is_not_confirmed_and_may_be_lost(
    loop: VirtualLoop, is_open: bool, findings: int
) -> None:
    watch, platters, gate = Watch(), Platters(), AckGate()

    async def work() -> None:
        committed = (await live(loop, platters, watch, 1, 0)).durable_offset
        if not is_open:
            gate.close(committed + EPOCH_BEGUN)
        await live(loop, platters, watch, 2, COUNT, gate=gate)
        other = Platters()
        wal = watched(DiskWal(SimDisk(other, loop, random.Random(3)), SETTINGS, rng=random.Random(1)), watch, 1)
        await wal.recover(lambda record: None)
        await wal.reset(committed + EPOCH_BEGUN)
        await wal.begin_epoch(3)
        wal.append(StreamAppend(STREAM, 3, COUNT, 1, [b"x" * 100]))
        await asyncio.sleep(1)

    loop.run_until_complete(work())
    assert len([finding for finding in watch.findings if finding.rule == "confirmed-lost"]) == findings


def told(*calls: tuple[str, int, int, int]) -> int:
    """How much is found when this is told: method, id, epoch, offset."""
    found: list[str] = []
    confirmed = Confirmed(lambda rule, message: found.append(message))
    for name, key, epoch, offset in calls:
        getattr(confirmed, name)(key, epoch, offset)
    return len(found)


@pytest.mark.parametrize("kind", ["wal", "stream"])
@pytest.mark.parametrize(("late", "findings"), [(10, 0), (11, 1)])
def test_a_zombie_may_be_late_with_what_its_successor_has_and_with_nothing_else(
    kind: str, late: int, findings: int
) -> None:
    begins = "wal_begins" if kind == "wal" else "stream_goes_on"
    calls = ((begins, 1, 1, 0), (f"{kind}_holds", 1, 1, 5), (begins, 1, 2, 10), (f"{kind}_holds", 1, 1, late))
    assert told(*calls) == findings


@pytest.mark.parametrize(("opened", "findings"), [(5, 0), (4, 1)])
def test_a_master_without_a_quorum_begins_nothing_and_yet_must_have_what_was_confirmed(
    opened: int, findings: int
) -> None:
    calls = (("stream_goes_on", 1, 1, 0), ("stream_holds", 1, 1, 5), ("stream_opens", 1, 2, opened))
    assert told(*calls) == findings
    later = ("stream_holds", 1, 1, 8)
    assert told(*calls, later) == findings, "nothing of epoch 2 was confirmed: epoch 1 may go on elsewhere"
    assert told(*calls, ("stream_goes_on", 1, 2, 5), later) == findings + 1


@pytest.mark.parametrize(("epoch", "findings"), [(3, 1), (1, 0)])
def test_a_recovered_record_counts_unless_its_stream_has_a_later_owner(epoch: int, findings: int) -> None:
    calls = (("stream_goes_on", 1, 2, 0), ("stream_recovered", 1, epoch, 7), ("stream_goes_on", 1, 4, 5))
    assert told(*calls) == findings


@pytest.mark.parametrize(("end", "findings"), [(5, 0), (6, 1)])
def test_what_is_read_must_be_confirmed(end: int, findings: int) -> None:
    watch = Watch()
    watch.confirmed.stream_goes_on(1, 1, 0)
    watch.confirmed.stream_holds(1, 1, 5)
    watch.confirmed.stream_was_read(1, end, "at a follower")
    watch.confirmed.stream_was_read(2, end, "at its leader")  # of which nobody has appended anything
    assert [finding.rule for finding in watch.findings] == ["unconfirmed-read"] * findings


def test_a_replica_set_that_was_removed_and_comes_back_starts_over() -> None:
    watch = Watch()
    watch.confirmed.wal_holds(1, 1, 500)
    watch.confirmed.forget_wal(1)
    watch.confirmed.wal_begins(1, 2, 0)
    assert watch.findings == []


def test_another_wal_takes_the_place_of_one_whose_records_are_all_committed_or_of_no_stream() -> None:
    watch = Watch()
    watch.confirmed.wal_holds(1, 1, 464)
    watch.confirmed.stream_holds(7, 1, 20)
    watch.confirmed.wal_starts_over(1, 400)
    watch.confirmed.wal_begins(1, 2, 400)
    assert watch.findings == []
    watch.confirmed.stream_goes_on(7, 2, 19)
    assert len(watch.findings) == 1, "a record of a living stream is missed all the same"
