"""Failover without a hot tier as a state machine: nothing that was acknowledged is lost, whoever takes over.

It runs brokers whose WALs are in the bucket, with fences as `tidelog.storage.wal.s3.chain` has them, and successors
that may stop, be late or be replaced at any step. It checks rules 3 and 4 where it counts: whoever owns a partition
finds every record that was ever acknowledged, and a master that was replaced acknowledges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tests.controller.test_controller_takeover import (
    PARTITIONS,
    keys_of,
    partition,
    register,
    session,
)
from tests.support.examples import examples
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import NotEligible
from tidelog.controller.model.records import NO_BROKER, StreamState
from tidelog.runtime.errors import Fenced, TidelogError
from tidelog.storage.commits import CommitObjects


@dataclass
class BucketWal:
    """The WAL of one replica set: what landed, and the newest fence."""

    fence: int = 0
    records: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(WAL end, stream, stream epoch, start, end) of the data streams."""
    end: int = 0


@dataclass
class Process:
    """A broker's process: it may be paused, and not know what has happened."""

    broker: int
    incarnation: int = 0
    running: bool = True
    master_epoch: int = 0
    logs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By partition: (leader epoch, next offset of its data stream)."""
    takeovers: dict[int, int] = field(default_factory=dict)
    """By replica set: the epoch this process takes it over with, and has fenced the WAL for."""


class FailoverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.wals = [BucketWal() for _ in range(3)]
        self.processes = [Process(broker) for broker in range(3)]
        self.acked = dict.fromkeys(range(PARTITIONS), 0)

    @initialize()
    def begin(self) -> None:
        for process in self.processes:
            self.start(process)
        self.driver.run(c.CreateTopic(TOPIC, "t", PARTITIONS, {}, False, False, (0, 1, 2, 0)))
        for index in range(PARTITIONS):
            self.open_log(index)

    def start(self, process: Process) -> None:
        process.incarnation += 1
        process.running, process.logs, process.takeovers = True, {}, {}
        process.master_epoch = register(self.driver, process.broker, str(process.incarnation))
        self.plant(process.broker, process.master_epoch)

    def plant(self, replica_set: int, epoch: int) -> bool:
        wal = self.wals[replica_set]
        if epoch <= wal.fence:
            return False
        wal.fence = epoch
        return True

    def attempt(self, command: c.AnyCommand) -> Any:
        try:
            return self.driver.run(command)
        except TidelogError as error:
            return error

    def draw(self, data: st.DataObject, *, running: bool = True) -> Process | None:
        found = [each for each in self.processes if each.running == running]
        return data.draw(st.sampled_from(found)) if found else None

    def data_stream(self, index: int) -> int:
        return partition(self.driver, index).first_stream + 1

    def recovered_end(self, replica_set: int, index: int) -> int:
        """Where a partition ends for whoever recovers the WAL of its owner."""
        record = self.driver.image.streams[self.data_stream(index)]
        end = record.end_offset
        for _, stream, epoch, start, stop in self.wals[replica_set].records:
            if stream == record.id and epoch >= record.owner_since_epoch and start == end:
                end = stop
        return end

    @rule(index=st.integers(0, PARTITIONS - 1))
    def open_log(self, index: int) -> None:
        one = partition(self.driver, index)
        process = self.processes[one.replica_set]
        if not process.running or index in process.logs:
            return
        _, epoch = self.driver.image.leader(one)
        pairs = tuple((one.first_stream + step, epoch) for step in range(4))
        if not isinstance(self.attempt(c.OpenStreams(process.broker, process.master_epoch, pairs)), TidelogError):
            process.logs[index] = (epoch, self.recovered_end(process.broker, index))
            assert process.logs[index][1] >= self.acked[index]

    @rule(data=st.data(), lands=st.booleans(), count=st.integers(1, 3))
    def append(self, data: st.DataObject, lands: bool, count: int) -> None:
        """A zombie appends, too: its session may be over, its partitions elsewhere."""
        able = [(process.broker, index) for process in self.processes if process.running for index in process.logs]
        if not able:
            return
        broker, index = data.draw(st.sampled_from(able))
        self.append_to(self.processes[broker], index, lands, count)

    def append_to(self, process: Process, index: int, lands: bool, count: int) -> None:
        epoch, start = process.logs[index]
        wal = self.wals[process.broker]
        if wal.fence != process.master_epoch:
            process.running = False  # 412: the WAL has failed, and the process ends
            return
        wal.end += 10
        wal.records.append((wal.end, self.data_stream(index), epoch, start, start + count))
        process.logs[index] = (epoch, start + count)
        if lands:  # else the answer gets lost: durable, and nobody knows
            self.acked[index] = start + count

    def upload(self, replica_set: int, epoch: int) -> Any:
        """Commit all that is in the WAL and not in the bucket yet, as `Storage` does."""
        wal, image = self.wals[replica_set], self.driver.image
        committed = image.replica_sets[replica_set].committed_wal_offset
        ranges: dict[int, tuple[int, int]] = {}
        for index in range(PARTITIONS):
            record = image.streams[self.data_stream(index)]
            if record.replica_set == replica_set and record.state == StreamState.OPENED:
                end = self.recovered_end(replica_set, index)
                if end > record.end_offset:
                    ranges[record.id] = (record.end_offset, end)
        if wal.end == committed:
            return None
        objects = []
        if ranges:
            new = new_object(self.driver.prepare(), *((stream, *ends) for stream, ends in sorted(ranges.items())))
            objects = [new]
        request = CommitObjects(replica_set, epoch, committed, wal.end, tuple(objects))
        result = self.attempt(c.Commit(request))
        if not isinstance(result, TidelogError):
            wal.records = []
        return result

    @rule(data=st.data())
    def upload_own(self, data: st.DataObject) -> None:
        process = self.draw(data)
        if process is not None and self.wals[process.broker].fence == process.master_epoch:
            self.upload(process.broker, process.master_epoch)

    @rule(data=st.data(), fences=st.booleans())
    def elect_successor(self, data: st.DataObject, fences: bool) -> None:
        image = self.driver.image
        lost = [one for one in range(3) if image.master_of(one) is None]
        living = [one for one in range(3) if image.master_of(one) is not None]
        if not lost or not living:
            return
        of, successor = data.draw(st.sampled_from(lost)), data.draw(st.sampled_from(living))
        epoch = self.driver.image.replica_sets[of].master_epoch
        result = self.attempt(c.ElectSuccessor(of, successor, epoch))
        if isinstance(result, TidelogError):
            assert isinstance(result, NotEligible), result
        elif fences:
            self.successors_fence()

    @rule()
    def successors_fence(self) -> None:
        for record in self.driver.image.replica_sets.values():
            process = self.processes[record.successor] if record.successor != NO_BROKER else None
            if process is not None and process.running and self.plant(record.id, record.master_epoch):
                process.takeovers[record.id] = record.master_epoch

    @rule(data=st.data(), uploads=st.booleans(), places=st.booleans(), some=st.integers(1, PARTITIONS))
    def successor_goes_on(self, data: st.DataObject, uploads: bool, places: bool, some: int) -> None:
        """With an epoch that may have ended long ago."""
        able = [(process.broker, of) for process in self.processes if process.running for of in process.takeovers]
        if not able:
            return
        broker, of = data.draw(st.sampled_from(able))
        self.go_on(self.processes[broker], of, uploads, places, some)

    def go_on(self, process: Process, of: int, uploads: bool, places: bool, some: int) -> None:
        epoch, wal = process.takeovers[of], self.wals[of]
        if wal.fence != epoch:
            del process.takeovers[of]
            return
        result = self.upload(of, epoch) if uploads else None
        if places:
            result = self.attempt(c.PlaceTakenOver(of, epoch, wal.end, keys_of(self.driver, of)[:some]))
        if isinstance(result, Fenced):
            del process.takeovers[of]

    @rule(data=st.data(), steps=st.integers(1, 6), paused=st.booleans(), uploads=st.booleans())
    def fail_over(self, data: st.DataObject, steps: int, paused: bool, uploads: bool) -> None:
        """The whole way, or a part of it: by chance alone it is rarely gone."""
        victim, successor = data.draw(st.permutations(self.processes))[:2]
        image = self.driver.image
        if not victim.running or not successor.running or image.master_of(successor.broker) is None:
            return
        for index in range(PARTITIONS):
            self.open_log(index)
        for index in list(victim.logs):
            self.append_to(victim, index, lands=True, count=1)
        victim.running = victim.running and paused
        session(self.driver, victim.broker, alive=False)
        of = victim.broker
        if steps > 1:
            self.attempt(c.ElectSuccessor(of, successor.broker, image.replica_sets[of].master_epoch))
        if steps > 2:
            self.successors_fence()
        if steps > 3 and of in successor.takeovers:
            self.go_on(successor, of, uploads, True, 2)
        if steps > 4 and of in successor.takeovers:
            self.go_on(successor, of, True, True, PARTITIONS)
        if steps > 5 and not victim.running:
            self.start(victim)

    @rule(data=st.data(), paused=st.booleans())
    def die(self, data: st.DataObject, paused: bool) -> None:
        """Or be stopped for so long that its session ends: a zombie goes on where it was."""
        process = self.draw(data)
        if process is not None:
            process.running = paused
            session(self.driver, process.broker, alive=False)

    @rule(data=st.data())
    def heartbeat_again(self, data: st.DataObject) -> None:
        process = self.draw(data)
        if process is not None:
            session(self.driver, process.broker, alive=True)

    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        process = self.draw(data, running=False)
        if process is not None:
            self.start(process)

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        for index in self.acked if self.driver.image.partition(TOPIC, 0) else ():
            owner = partition(self.driver, index).replica_set
            assert self.recovered_end(owner, index) >= self.acked[index], index

    @invariant()
    def one_process_at_most_can_acknowledge(self) -> None:
        for index in self.acked if self.driver.image.partition(TOPIC, 0) else ():
            able = [
                each.broker
                for each in self.processes
                if each.running and index in each.logs and self.wals[each.broker].fence == each.master_epoch
            ]
            assert len(able) <= 1, (index, able)

    @invariant()
    def master_or_successor(self) -> None:
        for record in self.driver.image.replica_sets.values():
            assert NO_BROKER in (record.master, record.successor)


TestFailover = FailoverMachine.TestCase
TestFailover.settings = settings(max_examples=examples(100), stateful_step_count=80, deadline=None)
