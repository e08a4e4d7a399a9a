"""The partition log against a simple model: a list of batches and a few numbers, under crashes and clean restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from tests.support.fake_storage import FakeClock, FakeWorld, Process
from tests.support.guarded import append_guarded
from tidelog.batch.batch import (
    ControlType,
    Record,
    build_batch,
    control_type,
    iter_records,
    parse_header,
)
from tidelog.stream.errors import EarlierBatchMissing, OffsetOutOfRange, OutOfOrderSequence, TransactionNotVerified
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import FetchResult, PartitionLog
from tidelog.stream.producer_state import VerificationGuard

NOW = 1_700_000_000_000
CONFIG = LogConfig(
    segment_bytes=900,
    checkpoint_bytes=500,
    index_interval_bytes=150,
    retention_bytes=2500,
    retention_ms=10_000,
    message_timestamp_after_max_ms=1 << 60,
)
PRODUCERS = st.integers(1, 3)
T = TypeVar("T")


@dataclass
class Batch:
    """One batch of the model."""

    base: int
    count: int
    timestamp: int
    value: bytes
    epoch: int
    pid: int = -1
    sequence: int = -1
    txn: bool = False
    marker: ControlType | None = None

    @property
    def end(self) -> int:
        return self.base + self.count


class PartitionMachine(RuleBasedStateMachine):
    """Rules are what a broker does to a log; the invariants are what its clients see."""

    @initialize(hot=st.booleans(), rows=st.sampled_from([1, 2, 1024]))
    def begin(self, hot: bool, rows: int) -> None:
        self.config = msgspec.structs.replace(CONFIG, producers_per_piece=rows)
        self.runner = asyncio.Runner()
        self.world = FakeWorld()
        self.clock = FakeClock(NOW)
        self.hot = hot
        self.batches: list[Batch] = []
        self.start = 0
        self.serial = 0
        self.asked: dict[int, tuple[VerificationGuard, PartitionLog, int]] = {}
        """By producer: the guard of a question, its log, and how many batches and markers the producer had."""
        self.start_process()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def start_process(self) -> None:
        self.process = Process(self.world, self.clock, auto_confirm=False)
        self.process.storage.hot = self.hot
        self.log = self.run(self.process.open(self.config))

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else 0

    def sequence(self, pid: int) -> int:
        own = [one for one in self.batches if one.pid == pid and one.marker is None]
        return own[-1].sequence + own[-1].count if own else 0

    def open_txn(self, pid: int) -> int | None:
        first = None
        for one in self.batches:
            if one.pid == pid and one.marker is not None:
                first = None
            elif one.pid == pid and one.txn and first is None:
                first = one.base
        return first

    def send(self, one: Batch) -> memoryview:
        records = [Record(0, one.timestamp, b"k", one.value)] * one.count
        fields: dict[str, Any] = {}
        if one.pid >= 0:
            fields = {"producer_id": one.pid, "producer_epoch": 0, "base_sequence": one.sequence}
        return memoryview(bytearray(build_batch(records, transactional=one.txn, **fields)))

    def add(self, count: int, step: int, pid: int = -1, txn: bool = False) -> None:
        self.serial += 1
        self.clock.now_ms += 10
        one = Batch(
            self.end,
            count,
            self.clock.now_ms + step,
            b"%d" % self.serial,
            self.log.leader_epoch,
            pid,
            self.sequence(pid) if pid >= 0 else -1,
            txn,
        )
        result = append_guarded(self.log, self.send(one))
        assert (result.base_offset, result.last_offset, result.duplicate) == (one.base, one.end - 1, False)
        self.batches.append(one)

    # --- rules -------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), step=st.integers(-50, 50))
    def append_plain(self, count: int, step: int) -> None:
        self.add(count, step)

    @rule(pid=PRODUCERS, count=st.integers(1, 3), step=st.integers(-50, 50), txn=st.booleans())
    def append_idempotent(self, pid: int, count: int, step: int, txn: bool) -> None:
        self.add(count, step, pid, txn or self.open_txn(pid) is not None)

    def events(self, pid: int) -> int:
        return sum(one.pid == pid for one in self.batches)

    @rule(pid=PRODUCERS)
    def ask_about_a_transaction(self, pid: int) -> None:
        self.asked[pid] = self.log.begin_verification(pid, 0), self.log, self.events(pid)

    @rule(pid=PRODUCERS)
    def hear_that_it_may_begin(self, pid: int) -> None:
        """It counts unless the producer has done something since, or a marker came, or the log was opened anew."""
        if pid not in self.asked or self.open_txn(pid) is not None:
            return
        guard, log, events = self.asked[pid]
        self.clock.now_ms += 10
        one = Batch(self.end, 1, self.clock.now_ms, b"late", self.log.leader_epoch, pid, self.sequence(pid), True)
        if log is self.log and events == self.events(pid):
            assert self.log.append(self.send(one), guard=guard).base_offset == one.base
            self.batches.append(one)
        else:
            with pytest.raises(TransactionNotVerified):
                self.log.append(self.send(one), guard=guard)

    @rule(pid=PRODUCERS, back=st.integers(1, 7))
    def send_again(self, pid: int, back: int) -> None:
        own = [one for one in self.batches if one.pid == pid and one.marker is None]
        if len(own) < back:
            return
        one = own[-back]
        if back <= 5:
            result = self.log.append(self.send(one))
            assert (result.base_offset, result.last_offset, result.duplicate) == (one.base, one.end - 1, True)
        else:
            with pytest.raises(OutOfOrderSequence):
                self.log.append(self.send(one))

    @rule(pid=PRODUCERS, gap=st.integers(1, 5))
    def send_with_a_gap(self, pid: int, gap: int) -> None:
        sequence = self.sequence(pid)
        if sequence:
            with pytest.raises((OutOfOrderSequence, EarlierBatchMissing)):
                self.log.append(self.send(Batch(0, 1, NOW, b"", 0, pid, sequence + gap)))

    @rule(pid=PRODUCERS, kind=st.sampled_from(ControlType))
    def end_transaction(self, pid: int, kind: ControlType) -> None:
        if self.open_txn(pid) is None:
            return
        self.clock.now_ms += 10
        result = self.log.write_marker(
            pid, 0, commit=kind == ControlType.COMMIT, coordinator_epoch=0, transaction_version=1
        )
        assert result.base_offset == self.end
        epoch = self.log.leader_epoch
        self.batches.append(Batch(self.end, 1, self.clock.now_ms, b"", epoch, pid, -1, True, kind))

    @rule(share=st.floats(0, 1))
    def confirm(self, share: float) -> None:
        storage, wal = self.process.storage, len(self.world.wal)
        storage.confirm_to(storage.confirm.value + int((wal - storage.confirm.value) * share))

    @rule(back=st.integers(0, 12))
    def delete_records(self, back: int) -> None:
        target = self.log.high_watermark - back
        if target >= 0:
            assert self.finish(self.log.delete_records(target)) == max(self.start, target)
            self.start = max(self.start, target)

    @rule(seconds=st.sampled_from([0, 0, 0, 4, 11]))
    def housekeeping(self, seconds: int) -> None:
        self.clock.now_ms += seconds * 1000
        before = self.start
        self.start = self.finish(self.log.apply_retention())
        assert before <= self.start <= self.log.high_watermark
        if self.start < self.end and seconds == 0:
            assert self.log.size_bytes() < CONFIG.retention_bytes + 2 * CONFIG.segment_bytes or self.unconfirmed()

    def unconfirmed(self) -> bool:
        return self.log.high_watermark < self.log.log_end_offset

    def finish(self, work: Coroutine[Any, Any, T]) -> T:
        async def confirmed_meanwhile() -> T:
            task = asyncio.ensure_future(work)
            while not task.done():
                await asyncio.sleep(0)
                self.process.storage.confirm_all()
            return task.result()

        return self.run(confirmed_meanwhile())

    @rule()
    def restart_cleanly(self) -> None:
        self.finish(self.log.close())
        self.start_process()
        self.check_all_is_there()

    @rule(share=st.floats(0, 1))
    def crash(self, share: float) -> None:
        """A crash loses any part of what was not confirmed, from the end."""
        confirmed = self.log.high_watermark
        wal = len(self.world.wal)
        self.world.crash(self.world.confirmed + int((wal - self.world.confirmed) * share))
        self.start_process()
        end = self.log.log_end_offset
        assert end >= confirmed
        self.batches = [one for one in self.batches if one.end <= end]
        self.check_all_is_there()

    def check_all_is_there(self) -> None:
        assert self.log.high_watermark == self.log.log_end_offset == self.end
        assert self.log.log_start_offset == self.start

    # --- invariants --------------------------------------------------------------------------------------------------

    def visible(self, bound: int) -> list[Batch]:
        return [one for one in self.batches if one.end > self.start and one.end <= bound]

    def stable(self) -> int:
        bound = self.log.high_watermark
        for pid in range(1, 4):
            first = None
            for one in self.batches:
                if one.pid != pid or not one.txn or one.end > self.log.high_watermark:
                    continue
                if one.marker is not None:
                    first = None
                elif first is None:
                    first = one.base
            bound = min(bound, self.log.high_watermark if first is None else first)
        return max(bound, self.start)

    @precondition(lambda self: hasattr(self, "log"))
    @invariant()
    def offsets_are_in_order(self) -> None:
        log = self.log
        assert log.log_end_offset == self.end
        assert log.log_start_offset == self.start
        assert log.last_stable_offset == self.stable()
        assert log.last_stable_offset <= log.high_watermark <= log.log_end_offset
        assert log.size_bytes() >= 0

    @precondition(lambda self: hasattr(self, "log"))
    @invariant()
    def what_is_read_is_what_was_written(self) -> None:
        found = self.read_all(committed=False)
        expected = self.visible(self.log.high_watermark)
        assert [parse_header(part).base_offset for part in found.records] == [one.base for one in expected]
        for part, one in zip(found.records, expected, strict=True):
            assert self.log.epoch_at(max(one.base, self.start)) == one.epoch
            if one.marker is None:
                assert [record.value for record in iter_records(part)] == [one.value] * one.count

    @precondition(lambda self: hasattr(self, "log"))
    @invariant()
    def committed_readers_see_committed_records(self) -> None:
        found = self.read_all(committed=True)
        bound = self.log.last_stable_offset
        expected = []
        for one in self.visible(bound):
            if one.marker is None and not (one.txn and self.outcome(one) == ControlType.ABORT):
                expected += [one.value] * one.count
        assert as_a_consumer(found) == expected

    def outcome(self, one: Batch) -> ControlType | None:
        return next(m.marker for m in self.batches if m.pid == one.pid and m.marker is not None and m.base > one.base)

    def read_all(self, *, committed: bool) -> FetchResult:
        records: list[bytes | memoryview] = []
        aborted: dict[tuple[int, int], None] = {}
        at = self.start
        while True:
            found = self.log.read_hot(at, 200, committed=committed) if self.hot else None
            if found is None:
                found = self.run(self.log.read(at, 200, committed=committed))
            if not found.records:
                return FetchResult(records, list(aborted), 0)
            records += found.records
            aborted.update(dict.fromkeys(found.aborted))
            at = parse_header(found.records[-1]).next_offset

    @rule(step=st.integers(-100, 3000))
    def find_by_time(self, step: int) -> None:
        target = NOW + step
        found = self.run(self.log.offset_for_timestamp(target))
        expected = next(
            (
                (max(one.base, self.start), one.timestamp, one.epoch)
                for one in self.visible(self.log.high_watermark)
                if one.timestamp >= target
            ),
            None,
        )
        assert found == expected

    @rule()
    def find_the_largest_time(self) -> None:
        found = self.finish(self.log.offset_of_max_timestamp())
        left = self.visible(self.end)
        expected = max((one.timestamp for one in left), default=None)
        assert (None if found is None else found.timestamp) == expected

    @rule(offset=st.integers(0, 100))
    def read_out_of_range(self, offset: int) -> None:
        for bad in (self.start - 1 - offset, self.end + 1 + offset):
            with pytest.raises(OffsetOutOfRange):
                self.run(self.log.read(bad, 100, committed=False))


def as_a_consumer(found: FetchResult) -> list[bytes | None]:
    """The filtering of a read_committed consumer."""
    pending = sorted(found.aborted, key=lambda one: one[1])
    skipping: set[int] = set()
    values: list[bytes | None] = []
    for part in found.records:
        header = parse_header(part)
        while pending and pending[0][1] <= header.last_offset:
            skipping.add(pending.pop(0)[0])
        if header.is_control:
            if control_type(next(iter_records(part))) == ControlType.ABORT:
                skipping.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in skipping):
            values += [record.value for record in iter_records(part)]
    return values


PartitionMachine.TestCase.settings = settings(
    max_examples=examples(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPartitionLogAgainstAModel = PartitionMachine.TestCase
