"""What reads of history may take of a busy machine (`tidelog.storage.reads.throttle`)."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.test_block_reader import KIB, Bucket
from tests.support.examples import examples
from tests.support.storage_world import CLUSTER, FastClock, inline
from tidelog.runtime.cpu_time import ByteCost, CpuTimes, SystemCpu
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.reads.throttle import (
    LOOK_S,
    MAX_WAIT_S,
    NO_BOUND_CORES,
    SEND_S_A_BYTE,
    WINDOW_S,
    ColdShare,
    ColdThrottle,
)

MIB = 1 << 20
SHARE = 0.1
READ_S_A_BYTE = 0.55e-9
"""What a read costs without the socket."""


class VirtualClock(FastClock):
    """Sleepers wake up in order of their time, once nothing else can go on."""

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._numbers), future))
        await future

    async def drive(self) -> None:
        """Let time pass, without end."""
        while True:
            for _ in range(5):
                await asyncio.sleep(0)
            if self._sleepers:
                when, _, future = heapq.heappop(self._sleepers)
                self.now_s = max(self.now_s, when)
                if not future.done():
                    future.set_result(None)


class Machine:
    """Its loop waits for a core as told, and others use as many cores as told; a meter for `ColdThrottle`."""

    def __init__(self, clock: FastClock, *, pressed: bool, others: float) -> None:
        self._clock = clock
        self._seen_s = clock.now_s
        self._others_s = self._waited_s = 0.0
        self.pressed = pressed
        self.others = others
        self.cold_s = 0.0
        self.send_s_a_byte = SEND_S_A_BYTE

    def times(self) -> CpuTimes:
        seconds, self._seen_s = self._clock.now_s - self._seen_s, self._clock.now_s
        self._others_s += seconds * self.others
        self._waited_s += seconds * (0.4 if self.pressed else 0.0)
        return CpuTimes(self._others_s + self.cold_s, (self._others_s + self.cold_s) / 3, self._waited_s)

    def thread_s(self) -> float:
        return self.cold_s


class World:
    """A throttle on a machine, with readers whose reads cost what is expected of them."""

    def __init__(self, *, pressed: bool = True, others: float = 0.9, share: float = SHARE, writes: bool = True) -> None:
        self.clock = VirtualClock()
        self.machine = Machine(self.clock, pressed=pressed, others=others)
        self.throttle = ColdThrottle(share, self.clock, self.machine, self._wal_end)
        self._writes = writes

    def _wal_end(self) -> int:
        return int(self.clock.now_s * self.machine.others * 100 * MIB) if self._writes else 0

    async def read(self, size: int = MIB, *, is_replay: bool = True) -> None:
        """One read; time passes in which the cold lane has a core."""
        if not self.throttle.try_take(size):
            await self.throttle.take(size, is_replay=is_replay)
        before = self.machine.cold_s
        with self.throttle.measured():
            self.machine.cold_s += size * READ_S_A_BYTE
        self.machine.cold_s += size * self.machine.send_s_a_byte
        self.throttle.settle(size, size)
        await self.clock.sleep(self.machine.cold_s - before)

    async def replay(self, seconds: float) -> float:
        """Read on for so long; the cores that it took."""
        started, before = self.clock.now_s, self.machine.cold_s
        while self.clock.now_s < started + seconds:
            await self.read()
        return (self.machine.cold_s - before) / (self.clock.now_s - started)


@contextlib.asynccontextmanager
async def driven(world: World | None = None) -> AsyncIterator[World]:
    one = world or World()
    driver = asyncio.ensure_future(one.clock.drive())
    async with asyncio.timeout(30):
        yield one
    driver.cancel()


# --- the arithmetic ---


class Driven(ColdShare):
    """A share, and the time and figures of its windows."""

    now = 0.0
    times = CpuTimes(0, 0, 0)
    wal_end = 0

    def windows(
        self, count: int, *, used: float, cold: float, run: float = 0.3, wait: float = 0.0, produced: int = MIB
    ) -> None:
        """So many windows in which these cores were used."""
        for _ in range(count):
            self.now += (seconds := WINDOW_S * 1.001)
            old = self.times
            self.times = CpuTimes(
                old.process_s + used * seconds, old.loop_run_s + run * seconds, old.loop_wait_s + wait * seconds
            )
            self.wal_end += int(produced * seconds)
            assert self.window_is_over(self.now, self.wal_end)
            self.close_window(self.times, cold * seconds, self.wal_end)


def test_the_rate_falls_to_the_share_at_once_when_pressed_by_producers() -> None:
    share = Driven(SHARE)
    share.windows(1, used=1.4, cold=0.4, wait=0.3, produced=100 * MIB)
    assert not share.is_bound, "nothing was measured before"
    share.windows(1, used=1.4, cold=0.4, wait=0.3, produced=100 * MIB)
    assert share.rate == pytest.approx(0.14)
    share.windows(5, used=1.4, cold=0.14, wait=0.3, produced=100 * MIB)
    assert share.rate == pytest.approx(0.14)


def test_the_rate_is_halved_when_pressed_by_others() -> None:
    share = Driven(SHARE)
    share.windows(1, used=1.4, cold=0.4, wait=0.3)
    rates = []
    for _ in range(3):
        share.windows(1, used=1.4, cold=min(0.4, share.rate), wait=0.3)
        rates.append(share.rate)
    assert rates == pytest.approx([0.2, 0.14, 0.14])


def test_the_rate_is_halved_while_reads_of_history_use_more_than_the_rest() -> None:
    share = Driven(SHARE)
    share.windows(1, used=1.4, cold=1.2, wait=0.7, produced=100 * MIB)
    rates = []
    for _ in range(4):
        share.windows(1, used=1.4, cold=min(1.2, share.rate), wait=0.7, produced=100 * MIB)
        rates.append(share.rate)
    assert rates == pytest.approx([0.6, 0.3, 0.15, SHARE * 1.4])


def test_a_rate_that_has_grown_is_halved_down_to_the_share() -> None:
    share = Driven(SHARE)
    share.windows(3, used=1.4, cold=0.4, wait=0.3)
    share.windows(6, used=1.4, cold=0.4)
    assert share.rate == pytest.approx(grown := 0.14 * 1.25**6)
    rates = []
    for _ in range(3):
        share.windows(1, used=1.4, cold=share.rate, wait=0.3)
        rates.append(share.rate)
    assert rates == pytest.approx([grown / 2, 0.14, 0.14])


def test_what_nothing_holds_back_is_looked_at_more_often_while_producers_write() -> None:
    share, wrote = ColdShare(SHARE), int(LOOK_S * 100 * MIB)
    assert share.window_is_over(0.0, 0)
    share.close_window(CpuTimes(0, 0, 0), 0.0, 0)
    assert not share.window_is_over(LOOK_S * 0.9, wrote)
    assert not share.window_is_over(LOOK_S, 0), "nobody writes"
    assert share.window_is_over(LOOK_S, wrote)
    share.close_window(CpuTimes(1.4 * LOOK_S, 0.5 * LOOK_S, 0.4 * LOOK_S), 0.0, wrote)
    assert share.is_bound
    assert not share.window_is_over(LOOK_S + WINDOW_S * 0.9, 10 * wrote)
    assert share.window_is_over(LOOK_S + WINDOW_S, 10 * wrote)


def test_the_rate_grows_until_it_is_no_bound_when_nothing_is_short() -> None:
    share = Driven(SHARE)
    share.windows(8, used=1.4, cold=0.4, wait=0.3)
    share.windows(1, used=1.4, cold=0.1)
    assert share.rate == pytest.approx(0.14 * 1.25)
    share.windows(math.ceil(math.log(NO_BOUND_CORES / share.rate, 1.25)), used=1.4, cold=0.1)
    assert not share.is_bound
    assert share.delay_s == 0


def test_the_rate_doubles_when_nobody_is_there_to_protect() -> None:
    share = Driven(SHARE)
    share.windows(3, used=1.4, cold=0.4, wait=0.3)
    share.windows(1, used=0.4, cold=0.3, wait=0.3)
    assert share.rate == pytest.approx(0.14 * 2)
    share.windows(3, used=0.4, cold=0.3, wait=0.3)
    assert not share.is_bound


@pytest.mark.parametrize(
    ("used", "cold", "run", "wait", "produced", "bound"),
    [
        pytest.param(1.4, 0.4, 0.3, 0.3, MIB, True, id="the cores are short"),
        pytest.param(1.4, 0.4, 0.95, 0.0, MIB, True, id="the loop has no time left"),
        pytest.param(1.4, 0.4, 0.95, 0.0, 0, False, id="nobody writes: the rest is the replay's own threads"),
        pytest.param(1.4, 0.4, 0.3, 0.3, 100 * KIB, False, id="a replay commits its offsets"),
        pytest.param(1.4, 0.4, 0.3, 0.02, 0, False, id="there is time and there are cores"),
        pytest.param(1.4, 0.4, 0.05, 0.02, 0, False, id="a loop that rarely runs waits a little"),
        pytest.param(1.2, 1.0, 0.6, 0.4, 0, False, id="a replay alone uses the machine"),
        pytest.param(1.4, 1.0, 0.6, 0.4, 0, False, id="what others use may be the replay's own"),
        pytest.param(
            0.06, 0.02, 0.1, 0.4, 0, False, id="other processes use the machine, nobody wants much of the broker"
        ),
        pytest.param(0.3, 0.15, 0.1, 0.9, 0, False, id="other processes use the machine, and nobody writes"),
        pytest.param(0.06, 0.02, 0.1, 0.3, 17 * MIB, False, id="producers want little"),
        pytest.param(0.3, 0.15, 0.1, 0.3, 17 * MIB, True, id="other processes use the machine, and producers would"),
        pytest.param(1.8, 1.2, 0.6, 0.4, 100 * MIB, True, id="many replays beside busy producers"),
    ],
)
def test_reads_are_bound_only_where_they_take_from_others(
    used: float, cold: float, run: float, wait: float, produced: int, bound: bool
) -> None:
    share = Driven(SHARE)
    share.windows(2, used=used, cold=cold, run=run, wait=wait, produced=produced)
    assert share.is_bound is bound


def test_a_window_that_nobody_closed_says_nothing() -> None:
    share = Driven(SHARE)
    share.windows(3, used=1.4, cold=0.4, wait=0.3)
    share.charge(1.0)
    assert share.window_is_over(share.now + 60, share.wal_end)
    share.close_window(share.times._replace(loop_wait_s=50.0), 0.0, 1 << 40)
    assert not share.is_bound
    assert share.delay_s == 0


def test_what_is_owed_and_what_is_saved_up_are_bounded() -> None:
    share = Driven(SHARE)
    share.windows(6, used=1.4, cold=0.4, wait=0.3)
    for _ in range(1000):
        share.charge(0.1)
    assert share.delay_s == pytest.approx(MAX_WAIT_S)
    share.window_is_over(share.now + 30, share.wal_end)
    share.charge(0.14 * 0.02)
    assert share.delay_s < 1e-9, "20 ms of the rate are saved"
    share.charge(0.14 * 0.1)
    assert share.delay_s == pytest.approx(0.1)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.floats(0.01, 1),
    st.lists(
        st.tuples(
            st.floats(0.001, 3),
            st.floats(0, 4),
            st.floats(0, 4),
            st.floats(0, 1),
            st.floats(0, 1),
            st.floats(-0.01, 0.1),
        ),
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_whatever_is_measured_the_rate_keeps_to_the_share_and_the_wait_to_its_bound(
    part: float, steps: list[tuple[float, float, float, float, float, float]], rng: random.Random
) -> None:
    share, now, times = ColdShare(part), 0.0, CpuTimes(0, 0, 0)
    closed = 0.0, 0.0
    for seconds, used, cold, running, waited, charge in steps:
        now += seconds
        times = CpuTimes(
            times.process_s + used * seconds, times.loop_run_s + running * seconds, times.loop_wait_s + waited * seconds
        )
        before = share.rate
        if share.window_is_over(now, wal_end := rng.randrange(1 << 40)):
            share.close_window(times, cold * seconds, wal_end)
            if share.rate < before:
                assert share.rate >= part * (times.process_s - closed[1]) / (now - closed[0]) * 0.999
            closed = now, times.process_s
        else:
            assert share.rate == before
        share.charge(charge)
        assert 0 <= share.delay_s <= MAX_WAIT_S * 1.001
        assert share.rate > 0


# --- readers ---


async def test_a_replay_is_held_to_its_share_while_others_need_the_machine_and_goes_at_full_speed_after() -> None:
    async with driven() as world:
        await world.replay(1.0)
        held = await world.replay(10.0)
        used = held + world.machine.others
        assert SHARE * used * 0.8 < held < SHARE * used * 1.2
        assert world.throttle.waits > 0
        assert world.throttle.waited_s > 8
        world.machine.pressed = False
        await world.replay(2.0)
        assert not world.throttle.is_bound
        assert await world.replay(5.0) > 0.95
        world.machine.pressed = True
        await world.replay(1.0)
        assert await world.replay(5.0) < 0.15


async def test_a_replay_goes_at_full_speed_where_nobody_writes_whatever_the_rest_seems_to_use() -> None:
    async with driven(World(writes=False)) as world:
        await world.replay(5.0)
        assert world.throttle.waits == 0


@pytest.mark.parametrize("others", [0.0, 0.1])
async def test_a_replay_beside_nobody_or_little_has_full_speed_on_a_machine_without_a_core_left(others: float) -> None:
    async with driven(World(others=others)) as world:
        assert await world.replay(5.0) > 0.95
        assert world.throttle.waits == 0


async def test_a_share_of_1_never_holds_anybody_back() -> None:
    async with driven(World(share=1.0)) as world:
        assert await world.replay(5.0) > 0.95
        assert world.throttle.waits == 0


async def test_a_first_read_does_not_stand_in_the_line_of_replays() -> None:
    async with driven() as world:
        await world.replay(1.0)
        replays = [asyncio.ensure_future(world.replay(5.0)) for _ in range(20)]
        await world.clock.sleep(0.5)
        worst = 0.0
        for _ in range(20):
            started = world.clock.now_s
            await world.read(4 * KIB, is_replay=False)
            worst = max(worst, world.clock.now_s - started)
            await world.clock.sleep(0.05)
        assert worst < 0.05, "a slice of 1 MiB is paid for in 8 ms"
        for one in replays:
            one.cancel()
        await asyncio.gather(*replays, return_exceptions=True)


async def test_replays_take_turns_and_no_first_reads_starve_them() -> None:
    async with driven() as world:
        await world.replay(1.0)
        counts = [0] * 5
        stop = world.clock.now_s + 20

        async def replay(number: int) -> None:
            while world.clock.now_s < stop:
                await world.read()
                counts[number] += 1

        async def jump() -> None:
            while world.clock.now_s < stop:
                await world.read(is_replay=False)

        await asyncio.gather(*(replay(number) for number in range(5)), *(jump() for _ in range(20)))
        assert min(counts) >= 3, "somebody waited longer than the bound"
        assert max(counts) - min(counts) <= 3


async def test_a_reader_that_goes_away_takes_nothing_and_holds_nobody_up() -> None:
    async with driven() as world:
        await world.replay(1.0)
        while world.throttle.try_take(MIB):
            pass
        gone = [asyncio.ensure_future(world.throttle.take(1 << 40, is_replay=True)) for _ in range(3)]
        last = asyncio.ensure_future(world.throttle.take(1, is_replay=True))
        await asyncio.sleep(0)
        started = world.clock.now_s
        for one in gone:
            one.cancel()
        async with asyncio.timeout(60):
            await last
        assert world.clock.now_s - started < MAX_WAIT_S


async def test_the_price_of_a_read_follows_what_reads_cost() -> None:
    async with driven() as world:
        await world.replay(1.0)
        before = await world.replay(5.0)
        world.machine.send_s_a_byte = 2 * READ_S_A_BYTE
        world.throttle.sent(256 * MIB, 256 * MIB * world.machine.send_s_a_byte)
        await world.replay(3.0)
        assert await world.replay(5.0) == pytest.approx(before, rel=0.2)


async def pressed_bucket() -> tuple[Bucket, BlockReader]:
    """Three objects with a stream, and a reader on a machine that is known to be pressed."""
    bucket = Bucket()
    for seed in range(3):
        await bucket.add({1: [16 * KIB] * 256}, seed=seed)
    machine = Machine(bucket.clock, pressed=True, others=0.9)
    throttle = ColdThrottle(0.01, bucket.clock, machine, lambda: int(bucket.clock.now_s * MIB))
    reader = bucket.reader = BlockReader(
        store=bucket.store,
        objects=bucket.objects,
        clock=bucket.clock,
        cluster_id=CLUSTER,
        cache_bytes=64 * MIB,
        offload=inline,
        throttle=throttle,
    )
    throttle.try_take(1)
    for _ in range(8):
        bucket.clock.now_s += WINDOW_S
        throttle.try_take(1)
    assert throttle.is_bound
    return bucket, reader


async def test_what_a_partition_needs_to_open_waits_for_nobody_and_nobody_waits_for_it() -> None:
    bucket, reader = await pressed_bucket()
    end, began = bucket.end(1), bucket.clock.now_s
    for _ in range(2):  # from the bucket, and from the cache
        offset = 0
        while offset < end:
            records = reader.read_cached(1, offset, end, 128 * KIB, is_urgent=True)
            if records is None:
                records = await reader.read(1, offset, end, 128 * KIB, is_urgent=True)
            offset = records[-1].base_offset + records[-1].count
    assert bucket.clock.now_s == began, "12 MiB twice, on a pressed machine"
    stats = reader.stats()
    assert (stats["cold_throttle_waits"], stats["cold_turn_waits"]) == (0, 0)
    assert reader.read_cached(1, 0, end, 1) is not None, "a turn was not taken either"
    await reader.close()


async def test_a_block_reader_waits_with_history_but_not_with_the_newest_object() -> None:
    bucket, reader = await pressed_bucket()
    newest = bucket.objects.slices[1][-1].start_offset
    end, offset, started, tail_began = bucket.end(1), 0, bucket.clock.now_s, 0.0
    got = []
    while offset < end:
        if offset >= newest and not tail_began:
            tail_began = bucket.clock.now_s
        records = reader.read_cached(1, offset, end, 128 * KIB)
        if records is None:
            records = await reader.read(1, offset, end, 128 * KIB)
        got += [record._replace(payload=bytes(record.payload)) for record in records]
        offset = records[-1].base_offset + records[-1].count
        await asyncio.sleep(0)
    assert got == bucket.records[1]
    assert tail_began - started > 0.2
    assert bucket.clock.now_s == tail_began
    stats = reader.stats()
    assert stats["cold_throttle_bound"] == 1
    assert stats["cold_throttle_waits"] > 0
    assert stats["cold_throttle_wait_seconds"] == pytest.approx(tail_began - started)
    await reader.close()


# --- the meter ---


def test_the_systems_figures_grow_with_work() -> None:
    cpu = SystemCpu()
    before, thread = cpu.times(), cpu.thread_s()
    while cpu.thread_s() < thread + 0.02:
        pass
    after = cpu.times()
    assert after.loop_run_s - before.loop_run_s >= 0.02
    assert after.process_s - before.process_s >= 0.02
    assert after.loop_wait_s >= before.loop_wait_s


def test_a_byte_costs_what_it_did_lately_within_bounds() -> None:
    cost = ByteCost(1e-9)
    cost.note(0, 1.0)
    cost.note(32 << 20, (32 << 20) * 3e-9)
    assert cost.seconds_a_byte == pytest.approx(2e-9)
    cost.note(1 << 30, 1e6)
    assert cost.seconds_a_byte == pytest.approx(1e-8)
    cost.note(1 << 30, 0.0)
    assert cost.seconds_a_byte == pytest.approx(1e-10)
