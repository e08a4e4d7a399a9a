"""The WAL over a disk that loses power, tears writes, fails fsync and fills up: nothing durable is lost, ever.

The state machine keeps a model of every record appended. After each crash, what recovers must be a contiguous prefix of
it that holds at least everything reported durable.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.storage.faulty_disk import FaultyDisk
from tests.storage.wal_harness import SEGMENT, append, make_wal, recovered, until
from tests.support.examples import examples
from tests.support.loops import VirtualLoop
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFailed, WalFull, WalRecord, WalRecordType
from tidelog.storage.wal.format import HEADER_BYTES

T = TypeVar("T")


def cancel_everything(loop: asyncio.AbstractEventLoop) -> None:
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.01))


class WalMachine(RuleBasedStateMachine):
    flush: Literal["sync", "async"] = "sync"

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.surprises: list[dict[str, Any]] = []  # exceptions in callbacks, which the loop would only log
        self.loop.set_exception_handler(lambda _loop, context: self.surprises.append(context))
        self.disk = FaultyDisk()
        self.model: list[
            tuple[int, int, WalRecordType, int, int, bytes]
        ] = []  # (offset, end, type, stream, base, payload)
        self.acknowledged = 0  # highest durable offset reported
        self.synced = 0  # what a power loss may not take
        self.trimmed = 0
        self.epoch = 0
        self.next_base = 0
        self.quick = False
        self.failed: list[Exception] = []

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    def turn(self, times: int) -> None:
        async def turns() -> None:
            for _ in range(times):
                await asyncio.sleep(0)

        self.run(turns())

    @initialize()
    def first_life(self) -> None:
        self.start()

    def start(self) -> None:
        async def begin() -> None:
            self.disk.blocks = self.quick
            self.wal = make_wal(self.disk, flush=self.flush, flush_interval_ms=20, max_record_bytes=10_000)
            self.wal.set_on_durable(self.on_durable)
            self.wal.set_on_failed(self.failed.append)
            records = await recovered(self.wal)
            self.check(records)
            self.epoch += 1
            start = self.wal.end_offset
            await self.wal.begin_epoch(self.epoch)
            self.model.append((start, start + HEADER_BYTES, WalRecordType.EPOCH_START, 0, 0, b""))
            self.acknowledged = self.wal.durable_offset

        self.failed.clear()
        self.run(asyncio.wait_for(begin(), 30))

    def check(self, records: list[WalRecord]) -> None:
        first = self.wal.start_offset
        assert first <= max(self.trimmed, 0)
        assert self.wal.end_offset >= self.survives, "durable records were lost"
        self.model = [entry for entry in self.model if first <= entry[0] < self.wal.end_offset]
        seen = [(r.offset, r.end_offset, r.type, r.stream_id, r.base_offset, bytes(r.payload)) for r in records]
        assert seen == self.model
        ends = [first, *(end for _, end, *_ in seen)]
        assert ends[:-1] == [offset for offset, *_ in seen] and ends[-1] == self.wal.end_offset

    survives = 0

    def on_durable(self, offset: int) -> None:
        assert offset > self.acknowledged or offset == self.wal.durable_offset
        assert not self.failed, "acknowledged after the failure"
        self.acknowledged = offset

    @rule(size=st.integers(0, 3000), count=st.integers(1, 5), turns=st.integers(0, 3))
    def append(self, size: int, count: int, turns: int) -> None:
        self.run(self.append_all(size, count, turns))

    async def append_all(self, size: int, count: int, turns: int) -> None:
        for _ in range(count):
            payload = random.Random(self.next_base).randbytes(size)
            before = self.wal.end_offset
            try:
                end = self.wal.append(
                    StreamAppend(9, 1, self.next_base, 1, [payload[: size // 2], memoryview(payload)[size // 2 :]])
                )
            except (WalFull, WalFailed):
                assert self.wal.end_offset == before
                return
            self.model.append((before, end, WalRecordType.DATA, 9, self.next_base, payload))
            self.next_base += 1
            for _ in range(turns):
                await asyncio.sleep(0)
            self.wal.note_confirmed(self.wal.durable_offset)

    @rule(size=st.integers(SEGMENT, 10_000))
    def append_larger_than_a_segment(self, size: int) -> None:
        self.append(size, 1, 0)

    @rule(turns=st.integers(1, 30))
    def let_the_loop_turn(self, turns: int) -> None:
        self.turn(turns)

    @rule()
    def let_timers_fire(self) -> None:
        self.run(asyncio.sleep(0.025))

    @rule(stalled=st.booleans())
    def stall_the_device(self, stalled: bool) -> None:
        self.disk.stalled = stalled
        if not stalled:
            self.run(self.resume())

    async def resume(self) -> None:
        self.disk.run()

    @rule(quick=st.booleans())
    def write_on_the_loops_thread(self, quick: bool) -> None:
        self.quick = self.disk.blocks = quick

    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        ends = [end for _, end, *_ in self.model if end <= self.wal.durable_offset]
        if not ends or self.disk.stalled or self.failed:
            return
        offset = ends[int(part * (len(ends) - 1))]
        self.trimmed = max(self.trimmed, offset)
        self.run(asyncio.wait_for(self.wal.trim(offset), 30))

    @rule(more=st.integers(0, 40_000))
    def limit_the_disk(self, more: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes + more

    @rule()
    def give_the_disk_room(self) -> None:
        self.disk.capacity_bytes = 1 << 62

    @rule(seed=st.integers(0, 1 << 20), after=st.integers(0, 12), killed=st.booleans())
    def crash(self, seed: int, after: int, killed: bool) -> None:
        self.disk.crash_after = after
        if not self.disk.stalled:
            self.turn(after)
        self.go_down(random.Random(seed), killed)
        self.start()

    @rule(nth=st.integers(1, 3), kind=st.sampled_from(["fsync", "write"]), seed=st.integers(0, 1 << 20))
    def device_error(self, nth: int, kind: str, seed: int) -> None:
        self.give_the_disk_room()
        self.stall_the_device(False)
        self.disk.fail_at[kind] = (nth, errno.EIO)
        for _ in range(nth + 1):
            self.append(100, 1, 8)
        if not self.failed and self.flush == "async":
            self.run(asyncio.sleep(0.05))
        if self.failed:
            assert len(self.failed) == 1
            with pytest.raises(WalFailed):
                self.wal.append(StreamAppend(1, 1, 0, 1, []))
            with pytest.raises(WalFailed):
                self.run(self.wal.writable())
        self.go_down(random.Random(seed), killed=False)
        self.start()

    @rule()
    def restart_cleanly(self) -> None:
        self.give_the_disk_room()
        self.stall_the_device(False)
        if self.failed:
            return
        end = self.wal.end_offset
        self.run(asyncio.wait_for(self.wal.close(), 30))
        self.survives = end
        cancel_everything(self.loop)
        self.disk = FaultyDisk(self.disk.files)
        self.start()

    def go_down(self, rng: random.Random, killed: bool) -> None:
        lost = self.wal.stats()["unsynced_bytes"] if self.flush == "async" and not killed else None
        self.survives = self.acknowledged if lost is None else self.wal.end_offset - lost
        self.disk = self.disk.process_killed() if killed else self.disk.power_loss(rng)
        cancel_everything(self.loop)

    @invariant()
    def offsets_are_in_order(self) -> None:
        assert not self.surprises
        if hasattr(self, "wal"):
            wal = self.wal
            assert wal.start_offset <= wal.durable_offset <= wal.end_offset
            assert wal.durable_offset == max(self.acknowledged, wal.start_offset)
            stats = wal.stats()
            assert stats["disk_bytes"] <= 8 * SEGMENT + self.epoch * HEADER_BYTES

    def teardown(self) -> None:
        if hasattr(self, "wal"):
            self.go_down(random.Random(0), killed=False)
            self.start()
            self.disk.crashed = True
            cancel_everything(self.loop)
        self.loop.close()


class AsyncFlushMachine(WalMachine):
    flush = "async"


MODEST = settings(
    max_examples=examples(40),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestSync = WalMachine.TestCase
TestSync.settings = MODEST
TestAsync = AsyncFlushMachine.TestCase
TestAsync.settings = MODEST


@pytest.mark.parametrize("torn", range(3))
def test_a_crash_at_every_step_of_a_roll_loses_nothing(torn: int) -> None:
    """Power lost after each single disk operation of a life that rolls, trims and recycles."""

    def life(steps: int) -> bool:
        loop = VirtualLoop()
        disk = FaultyDisk()
        disk.crash_after = steps
        sent: list[tuple[int, bytes]] = []
        state = {"durable": 0, "trimmed": 0}

        async def work() -> None:
            wal = make_wal(disk)
            wal.set_on_durable(lambda offset: state.update(durable=offset))
            await recovered(wal)
            await wal.begin_epoch(1)
            for i in range(14):
                payload = bytes([i]) * 2500
                sent.append((await append(wal, i, payload), payload))
                if i == 9:
                    await until(lambda: wal.durable_offset == wal.end_offset)
                    wal.note_confirmed(wal.durable_offset)
                    state["trimmed"] = wal.durable_offset
                    await wal.trim(wal.durable_offset)
                await asyncio.sleep(0)
            await wal.close()

        async def watched() -> asyncio.Task[None]:
            task = asyncio.create_task(work())
            await until(lambda: task.done() or disk.crashed)
            return task

        loop.run_until_complete(watched())
        finished = not disk.crashed
        back = disk.power_loss(random.Random(steps * 7 + torn))
        cancel_everything(loop)

        async def look() -> tuple[int, list[WalRecord]]:
            wal = make_wal(back)
            records = await recovered(wal)
            await wal.begin_epoch(2)
            await wal.close()
            return wal.start_offset, records

        start, records = loop.run_until_complete(asyncio.wait_for(look(), 30))
        cancel_everything(loop)
        loop.close()
        assert start <= state["trimmed"]
        end = records[-1].end_offset if records else 0
        assert end >= state["durable"]
        assert [bytes(r.payload) for r in records if r.count] == [p for e, p in sent if start < e <= end]
        return finished

    steps = 0
    while not life(steps):
        steps += 1
    assert steps > 60
