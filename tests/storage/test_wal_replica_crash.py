"""A replica over a disk that loses power, tears writes and fills up, as follower and as master, in any order.

The machine keeps the log of the present master, of which the replica's is a prefix, and what the replica may hold.
After each crash, what recovers must be a prefix of that which has at least everything reported durable; a truncation
leaves the old or the new log; a promise that returned holds; and a torn group is never taken for damage.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.storage.faulty_disk import FaultyDisk
from tests.storage.test_wal_crash import cancel_everything
from tests.storage.wal_harness import SEGMENT, small, until
from tests.storage.wal_replicas import Line, MasterLog, line_of
from tests.support.examples import examples
from tests.support.loops import VirtualLoop
from tidelog.runtime.errors import CorruptData, Fenced
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFull, WalRecord, WalRecordType
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.format import HEADER_BYTES

T = TypeVar("T")
GROUP = 1500
"""Smaller than some records, larger than most."""


class ReplicaMachine(RuleBasedStateMachine):
    flush: Literal["sync", "async"] = "sync"

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.surprises: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _loop, context: self.surprises.append(context))
        self.rng = random.Random(1)
        self.disk = FaultyDisk()
        self.master = MasterLog()
        """The log of the present master, whose prefix the replica's must be but for what it has to cut."""
        self.model: list[Line] = []
        """What the replica may hold: no more than this, and of this at least `survives`."""
        self.cut: int | None = None
        """A truncation that may have happened."""
        self.acknowledged = self.trimmed = self.confirmed = 0
        self.promised = -1
        self.epoch = 0
        self.next_base = 0
        self.failed: list[Exception] = []

    # lives

    @initialize(seed=st.integers(0, 1 << 20))
    def first_life(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.epoch = 1
        self.master.begin(1)
        self.start()

    def start(self) -> None:
        async def begin() -> None:
            self.wal = DiskWal(
                self.disk,
                small(flush=self.flush, flush_interval_ms=5, max_record_bytes=10_000),
                rng=random.Random(7),
                group_bytes=GROUP,
            )
            self.wal.set_on_durable(self.on_durable)
            self.wal.set_on_failed(self.failed.append)
            records: list[WalRecord] = []
            confirm = await self.wal.recover(records.append)
            self.check(records, confirm)
            self.acknowledged = self.wal.durable_offset

        self.failed.clear()
        self.loop.run_until_complete(asyncio.wait_for(begin(), 30))

    survives = 0

    def check(self, records: list[WalRecord], confirm: int) -> None:
        first, end = self.wal.start_offset, self.wal.end_offset
        assert first <= self.trimmed
        assert end >= self.survives or end == self.cut, "durable records were lost"
        self.model = [line for line in self.model if first <= line.offset < end]
        assert [line_of(record) for record in records] == self.model
        assert (self.model[-1].end_offset if self.model else first) == end
        assert confirm <= min(end, self.confirmed)
        assert self.wal.promised_epoch >= self.promised
        self.cut = None

    def on_durable(self, offset: int) -> None:
        assert offset == self.wal.durable_offset and offset > self.acknowledged
        self.acknowledged = offset

    def do(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run it to its end, or to the crash, after which the next life has begun."""

        async def watched() -> asyncio.Task[T]:
            task = self.loop.create_task(work)
            await until(lambda: task.done() or self.disk.crashed)
            return task

        task = self.loop.run_until_complete(watched())
        if self.disk.crashed:
            self.power_loss()
            return None
        return task.result()

    def power_loss(self, killed: bool = False) -> None:
        lost = self.wal.stats()["unsynced_bytes"] if self.flush == "async" and not killed else 0
        self.survives = min(self.acknowledged, self.wal.end_offset - lost)
        self.disk = self.disk.process_killed() if killed else self.disk.power_loss(self.rng)
        cancel_everything(self.loop)
        self.start()

    # what the set does

    @rule(sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 3000)), min_size=1, max_size=6))
    def the_master_writes(self, sizes: list[int]) -> None:
        if self.wal.master_epoch < 0:
            for size in sizes:
                self.master.write(self.next_base, self.rng.randbytes(size), self.confirmed)
                self.next_base += 1

    @rule(size=st.integers(SEGMENT, 10_000))
    def the_master_writes_a_record_larger_than_a_segment(self, size: int) -> None:
        self.the_master_writes([size])

    @rule(part=st.floats(0, 1), promises=st.booleans(), gap=st.integers(1, 3))
    def another_is_elected(self, part: float, promises: bool, gap: int) -> None:
        """Its log lacks a part of the unconfirmed tail of the one before, and has an epoch of its own."""
        self.epoch += gap
        if promises or self.wal.master_epoch >= 0:
            self.promise(self.epoch)
            if self.promised < self.epoch:
                return  # the crash came first, or the disk is full: no promise was given
        ends = [line.end_offset for line in self.master.lines if line.end_offset >= self.confirmed]
        self.master = self.master.upto(ends[int(part * (len(ends) - 1))])
        self.master.begin(self.epoch, self.confirmed)
        self.match()

    def promise(self, epoch: int) -> None:
        async def work() -> None:
            was = self.wal.durable_offset
            await self.wal.promise(epoch)
            self.promised = epoch
            assert self.wal.durable_offset == self.wal.end_offset >= was

        self.quietly(work())

    def quietly(self, work: Coroutine[Any, Any, None]) -> None:
        async def unless_full() -> None:
            with contextlib.suppress(WalFull):
                await work

        self.do(unless_full())

    def match(self) -> None:
        """Do what a follower does when it meets a master: cut what the master does not have."""
        mine = self.wal.epoch_history
        cut = mine.common_point(self.wal.end_offset, self.master.history, self.master.end_offset)
        cut = self.wal.start_offset if cut is None else cut

        async def work() -> None:
            self.cut = cut
            try:
                await self.wal.truncate(cut, master_epoch=self.epoch)
            finally:
                if self.wal.end_offset <= cut:
                    self.model = [line for line in self.model if line.offset < cut]
                    self.acknowledged = min(self.acknowledged, cut)
            self.cut = None
            self.promised = self.epoch

        self.quietly(work())

    @rule(count=st.integers(1, 8), turns=st.integers(0, 20))
    def receive(self, count: int, turns: int) -> None:
        if self.wal.master_epoch >= 0:
            return
        if not self.is_matched():
            self.match()
        if self.is_matched():
            self.quietly(self.receive_some(count, turns))

    def is_matched(self) -> bool:
        """Whether the replica's log is a prefix of the master's, in bytes and epochs."""
        end = self.wal.end_offset
        if self.wal.epoch_history.entries:
            return self.wal.epoch_history.common_point(end, self.master.history, self.master.end_offset) == end
        return end == self.wal.start_offset

    async def receive_some(self, count: int, turns: int) -> None:
        at = self.wal.end_offset
        lines, raw, epoch, epoch_start = self.master.batch(at, count)
        known = len(self.model)
        self.model += lines  # all of it may be found after a crash
        try:
            accepted = await self.wal.receive(at, epoch, epoch_start, raw, master_epoch=self.epoch)
            self.promised = self.epoch if lines else self.promised
        except WalFull:
            assert self.wal.end_offset == at
            accepted = []
        assert [line_of(record) for record in accepted] == lines[: len(accepted)]
        del self.model[known + len(accepted) :]
        assert self.wal.end_offset == (self.model[-1].end_offset if accepted else at)
        for _ in range(turns):
            await asyncio.sleep(0)

    @rule(gap=st.integers(1, 3))
    def become_master(self, gap: int) -> None:
        if not self.is_matched() or self.wal.end_offset < self.confirmed:
            return  # who lacks a confirmed byte is never elected
        self.epoch += gap
        start = self.wal.end_offset
        line = Line(start, start + HEADER_BYTES, self.epoch, WalRecordType.EPOCH_START, 0, b"")
        before = self.model.copy()
        log = self.master.upto(start)
        log.begin(self.epoch)

        async def work() -> None:
            self.model.append(line)
            self.master = log
            try:
                await self.wal.begin_epoch(self.epoch)
            except WalFull:
                self.model = before
                raise

        self.quietly(work())

    @rule(size=st.integers(0, 3000), count=st.integers(1, 5), turns=st.integers(0, 3))
    def append(self, size: int, count: int, turns: int) -> None:
        async def work() -> None:
            for _ in range(count):
                payload = self.rng.randbytes(size)
                before = self.wal.end_offset
                end = self.wal.append(StreamAppend(9, 1, self.next_base, 1, [payload]))
                line = Line(before, end, self.wal.master_epoch, WalRecordType.DATA, self.next_base, payload)
                self.model.append(line)
                self.master.lines.append(line)
                self.next_base += 1
                for _ in range(turns):
                    await asyncio.sleep(0)

        if self.wal.master_epoch >= 0:
            self.quietly(work())

    @rule(part=st.floats(0, 1))
    def confirm(self, part: float) -> None:
        """What the quorum holds is the master's; a follower may lack it, or have more that it must cut."""
        durable = self.wal.synced_offset if self.wal.master_epoch >= 0 else self.master.end_offset
        ends = [line.end_offset for line in self.master.lines if self.confirmed < line.end_offset <= durable]
        if ends and self.is_matched():
            self.confirmed = ends[int(part * (len(ends) - 1))]
            self.wal.note_confirmed(self.confirmed)

    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        bound = min(self.confirmed, self.wal.durable_offset)
        ends = [line.end_offset for line in self.model if line.end_offset <= bound]
        if ends and self.is_matched():
            offset = ends[int(part * (len(ends) - 1))]
            self.trimmed = max(self.trimmed, offset)
            self.do(self.wal.trim(offset))

    # what a replica refuses

    @rule(back=st.integers(1, 3))
    def a_master_of_an_older_epoch_is_fenced(self, back: int) -> None:
        old = self.wal.promised_epoch - back
        if old < 0:
            return
        before = (self.wal.end_offset, self.wal.epoch_history.copy())

        async def work() -> None:
            with pytest.raises(Fenced):
                await self.wal.promise(old)
            with pytest.raises(Fenced):
                await self.wal.begin_epoch(old)
            with pytest.raises(Fenced):
                await self.wal.truncate(self.wal.start_offset, master_epoch=old)
            with pytest.raises(Fenced):
                await self.wal.restart_at(0, master_epoch=old)

        self.do(work())
        if not self.survived_a_crash(before[0]):
            assert (self.wal.end_offset, self.wal.epoch_history) == before

    def survived_a_crash(self, end_offset: int) -> bool:
        return self.wal.end_offset != end_offset

    @rule()
    def nothing_confirmed_is_ever_cut(self) -> None:
        confirmed = min(self.wal.confirm_offset, self.wal.end_offset)
        ends = [line.end_offset for line in self.model if self.wal.start_offset <= line.end_offset < confirmed]
        if not ends or self.wal.master_epoch >= 0 or self.epoch < self.wal.promised_epoch:
            return
        end = self.wal.end_offset

        async def work() -> None:
            with pytest.raises(CorruptData, match="confirmed"):
                await self.wal.truncate(self.rng.choice(ends), master_epoch=self.epoch)
            assert self.wal.end_offset == end

        self.do(work())

    # what happens to it

    @rule(turns=st.integers(1, 30))
    def let_the_loop_turn(self, turns: int) -> None:
        async def work() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.do(work())

    @rule(after=st.one_of(st.integers(0, 6), st.integers(0, 40)))
    def the_power_will_go(self, after: int) -> None:
        """After so many more operations of the disk, in whatever is done then."""
        self.disk.crash_after = after

    @rule(killed=st.booleans())
    def crash(self, killed: bool) -> None:
        self.power_loss(killed)

    @rule(more=st.integers(0, 40_000))
    def limit_the_disk(self, more: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes + more

    @rule()
    def give_the_disk_room(self) -> None:
        self.disk.capacity_bytes = 1 << 62

    @rule()
    def restart_cleanly(self) -> None:
        self.give_the_disk_room()
        end = self.wal.end_offset

        async def work() -> bool:
            await self.wal.close()
            return True

        if self.do(work()):
            self.acknowledged = self.survives = end
            confirm = min(self.wal.confirm_offset, end) if self.promised >= 0 else 0
            cancel_everything(self.loop)
            self.disk = FaultyDisk(self.disk.files)
            self.start()
            assert self.wal.confirm_offset >= confirm, "the confirm offset moved back"

    @invariant()
    def offsets_are_in_order(self) -> None:
        assert not self.surprises
        assert not self.failed
        if hasattr(self, "wal"):
            wal = self.wal
            assert wal.start_offset <= wal.durable_offset <= wal.end_offset and wal.synced_offset <= wal.durable_offset
            assert (self.model[-1].end_offset if self.model else wal.start_offset) == wal.end_offset
            assert wal.stats()["disk_bytes"] <= 8 * SEGMENT + self.epoch * HEADER_BYTES

    def teardown(self) -> None:
        if hasattr(self, "wal"):
            self.power_loss()
            self.disk.crashed = True
            cancel_everything(self.loop)
        self.loop.close()


class AsyncReplicaMachine(ReplicaMachine):
    flush = "async"


MODEST = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestReplica = ReplicaMachine.TestCase
TestReplica.settings = MODEST
TestAsyncReplica = AsyncReplicaMachine.TestCase
TestAsyncReplica.settings = MODEST
