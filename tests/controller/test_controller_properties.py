"""Rules 4, 5, 6 and 7 of docs/rules.md under any sequence of commands, and what replication rests on.

A small model beside the state machine knows what every stream should hold; after each command the tables, the image
that followed the mutations, and the derived indexes must agree with it. At the end the whole log is replayed from the
start and from a snapshot in the middle: the bytes must be equal.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.controller.controller_helpers import DELAY_MS, Driver
from tests.support.examples import examples
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.index import MetadataIndex
from tidelog.controller.machine.slices import unpack
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import KEY_TYPES, RowChange
from tidelog.controller.model import commands as c
from tidelog.controller.model.leases import (
    EndLease,
    ExpireLeases,
    LeaseRecord,
    RenewLease,
    TakeLease,
    held_version,
)
from tidelog.controller.model.records import STREAMS_PER_PARTITION, ObjectState, StreamRecord, StreamState
from tidelog.controller.model.snapshots import (
    CreateBranch,
    CreateSnapshot,
    CutRefused,
    DeleteSnapshot,
    Ends,
    TopicCut,
    extent_at,
)
from tidelog.runtime.errors import TidelogError
from tidelog.storage.commits import (
    CommitGap,
    CommitObjects,
    CommitRefused,
    CompactObjects,
    NewObject,
    StreamRange,
    pack_ranges,
)

BROKERS = st.integers(0, 1)


def replay(log: list[c.Envelope], cut: int | None = None) -> bytes:
    """The dump after the whole log; with `cut` the state goes through a snapshot before that command."""
    state = ControllerState()
    for index, envelope in enumerate(log, start=1):
        if index == cut:
            fresh = ControllerState()
            fresh.load(state.dump())
            state = fresh
        state.apply(envelope, index)
    return state.dump()


def index_facts(index: MetadataIndex) -> dict[str, Any]:
    slices = {key: unpack(each) for key, each in index.slices.items()}
    live = {key: value for key, value in index.live_slices.items() if value}
    counts = {key: value for key, value in index.partition_counts.items() if value}
    return {**vars(index), "slices": slices, "live_slices": live, "partition_counts": counts}


class ControllerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.topics = 0
        self.ends: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.master_epochs: dict[int, int] = {}
        self.readable: set[int] = set()
        self.gone: set[int] = set()
        self.sequence = 0
        self.cut = 0
        self.snapshots = 0
        self.behind = Image()
        """Of a follower that is too far behind for deltas each time."""
        self.held: dict[str, set[int]] = {}
        """The objects that each snapshot found its offsets in."""

    def try_run(self, command: c.AnyCommand) -> TidelogError | None:
        try:
            self.driver.run(command)
        except TidelogError as error:
            return error
        return None

    @initialize()
    def two_brokers_with_open_streams(self) -> None:
        for broker in (0, 1):
            self.driver.broker(broker)
        self.create_topic_with(2)
        for broker in (0, 1):
            self.open_all(broker)

    @rule(broker=BROKERS, incarnation=st.sampled_from("abc"), reopens=st.booleans())
    def register_and_elect(self, broker: int, incarnation: str, reopens: bool) -> None:
        self.driver.broker(broker, incarnation)
        if reopens:
            self.open_all(broker)

    @rule(broker=BROKERS, alive=st.booleans())
    def session(self, broker: int, alive: bool) -> None:
        record = self.driver.image.brokers.get(broker)
        if record is not None:
            self.driver.run(c.SetBrokerAlive(broker, record.registration_epoch, alive))

    @rule(partitions=st.integers(1, 3))
    def create_topic(self, partitions: int) -> None:
        self.create_topic_with(partitions)

    def create_topic_with(self, partitions: int) -> None:
        self.topics += 1
        topic_id = self.topics.to_bytes(16, "big")
        if self.try_run(c.CreateTopic(topic_id, f"t{self.topics}", partitions, {}, False, False, None)) is None:
            for each in self.driver.image.partitions(topic_id):
                for stream_id in range(each.first_stream, each.first_stream + 4):
                    assert stream_id not in self.ends, "a stream id was used again"
                    self.ends[stream_id] = self.starts[stream_id] = 0

    @precondition(lambda self: self.driver.image.topics)
    @rule(data=st.data())
    def delete_topic(self, data: st.DataObject) -> None:
        topic_id = data.draw(st.sampled_from(sorted(self.driver.image.topics)))
        streams = [p.first_stream + step for p in self.driver.image.partitions(topic_id) for step in range(4)]
        self.driver.run(c.DeleteTopic(topic_id))
        assert not any(stream_id in self.driver.image.streams for stream_id in streams)

    def draw_stream(self, data: st.DataObject) -> StreamRecord:
        return self.driver.image.streams[data.draw(st.sampled_from(sorted(self.driver.image.streams)))]

    @precondition(lambda self: self.driver.image.streams)
    @rule(data=st.data(), broker=BROKERS, stale=st.integers(0, 1), step=st.integers(-1, 2))
    def open_stream(self, data: st.DataObject, broker: int, stale: int, step: int) -> None:
        before = self.draw_stream(data)
        epoch = before.epoch + step
        replica_set = self.driver.image.replica_sets.get(broker)
        master_epoch = (replica_set.master_epoch if replica_set is not None else 0) - stale
        error = self.try_run(c.OpenStreams(broker, master_epoch, ((before.id, epoch),)))
        after = self.driver.image.streams[before.id]
        if error is not None:
            assert after == before
        else:  # rule 4
            assert not stale and epoch >= max(0, before.epoch) and after.state == StreamState.OPENED
            assert before.state == StreamState.CLOSED or epoch > before.epoch or before.replica_set == broker
            assert (after.start_offset, after.end_offset) == (before.start_offset, before.end_offset)

    def open_all(self, broker: int) -> None:
        """As a broker does after an election: so that commits get somewhere."""
        mine = [each for each in self.driver.image.streams.values() if each.replica_set == broker]
        epoch = self.driver.image.replica_sets[broker].master_epoch
        pairs = tuple((each.id, max(each.epoch, epoch)) for each in mine)
        if pairs:
            self.driver.run(c.OpenStreams(broker, epoch, pairs))

    @rule(broker=BROKERS)
    def open_everything(self, broker: int) -> None:
        self.open_all(broker)

    @precondition(lambda self: self.driver.image.streams)
    @rule(data=st.data())
    def close_stream(self, data: st.DataObject) -> None:
        stream = self.draw_stream(data)
        epoch = self.driver.image.replica_sets[stream.replica_set].master_epoch
        self.try_run(c.CloseStreams(stream.replica_set, epoch, ((stream.id, stream.epoch),)))

    @precondition(lambda self: self.driver.image.streams)
    @rule(data=st.data(), offset=st.integers(0, 40), stale=st.sampled_from([0, 0, 1]))
    def trim(self, data: st.DataObject, offset: int, stale: int) -> None:
        stream = self.draw_stream(data)
        error = self.try_run(c.TrimStream(stream.id, stream.epoch - stale, offset))
        assert (error is not None) == bool(stale)
        if error is None:
            self.starts[stream.id] = max(self.starts[stream.id], offset)

    @rule(data=st.data(), broker=BROKERS)
    def commit(self, data: st.DataObject, broker: int) -> None:
        self.commit_with(data, broker, 0, 0)

    @rule(data=st.data(), broker=BROKERS)
    def commit_again(self, data: st.DataObject, broker: int) -> None:
        self.commit_with(data, broker, 0, 0)

    @rule(data=st.data(), broker=BROKERS, skew=st.sampled_from([1, -1, 0]), stale=st.sampled_from([0, 0, 1]))
    def commit_wrongly(self, data: st.DataObject, broker: int, skew: int, stale: int) -> None:
        self.commit_with(data, broker, skew, stale)

    def commit_with(self, data: st.DataObject, broker: int, skew: int, stale: int) -> None:
        replica_set = self.driver.image.replica_sets.get(broker)
        if replica_set is None:
            return
        any_stream = data.draw(st.integers(0, 4)) == 0
        candidates = sorted(
            each.id
            for each in self.driver.image.streams.values()
            if any_stream or (each.replica_set == broker and each.state == StreamState.OPENED and not each.quarantined)
        )
        chosen = data.draw(st.lists(st.sampled_from(candidates), unique=True, max_size=4)) if candidates else []
        chosen += data.draw(st.lists(st.integers(100_000, 100_001), unique=True, max_size=1))  # deleted long ago
        pieces: list[StreamRange] = []
        for number, stream_id in enumerate(sorted(chosen)):
            start = self.ends.get(stream_id, 0) + (skew if number == 0 else 0)
            pieces.append(StreamRange(stream_id, start, start + data.draw(st.integers(1, 9))))
        half = data.draw(st.integers(0, len(pieces)))
        first = self.driver.prepare(2)
        objects = tuple(
            NewObject(first + at, 1, 10, pack_ranges(part))
            for at, part in enumerate((pieces[:half], pieces[half:]))
            if part
        )
        wal = replica_set.committed_wal_offset
        request = CommitObjects(broker, replica_set.master_epoch - stale, wal, wal + 5, objects)
        before = dict(self.driver.image.streams)
        error = self.try_run(c.Commit(request))
        if error is None:
            assert not stale
            for piece in pieces:
                if piece.stream_id in self.driver.image.streams:  # rule 5
                    assert piece.start_offset == before[piece.stream_id].end_offset
                    assert not before[piece.stream_id].quarantined
                    self.ends[piece.stream_id] = piece.end_offset
            repeated = self.driver.apply(self.driver.envelope(c.Commit(request)))
            assert repeated.error is None
        else:
            assert isinstance(error, CommitGap | CommitRefused | TidelogError)
            for stream_id, old in before.items():
                assert self.driver.image.streams[stream_id].end_offset == old.end_offset
            if isinstance(error, CommitGap) and error.stream_id is not None:
                assert self.driver.image.streams[error.stream_id].quarantined

    @rule(data=st.data(), broker=BROKERS, fault=st.sampled_from(["", "", "", "lack", "extra", "again", "stale"]))
    def compact(self, data: st.DataObject, broker: int, fault: str) -> None:
        """Replace some committed objects by one stream object for each run of each stream that lives."""
        image = self.driver.image
        committed = sorted(each.id for each in image.objects.values() if each.state == ObjectState.COMMITTED)
        if not committed or broker not in image.replica_sets:
            return
        inputs = data.draw(st.lists(st.sampled_from(committed), unique=True, min_size=1, max_size=4))
        runs: list[StreamRange] = []
        for piece in sorted(
            (each for one in inputs for each in image.objects[one].ranges),
            key=lambda each: (each.stream_id, each.start_offset),
        ):
            stream = image.streams.get(piece.stream_id)
            if stream is not None and piece.end_offset <= stream.start_offset and data.draw(st.booleans()):
                continue  # trimmed: may be left out
            if runs and runs[-1].stream_id == piece.stream_id and runs[-1].end_offset == piece.start_offset:
                piece = StreamRange(piece.stream_id, runs.pop().start_offset, piece.end_offset)
            runs.append(piece)
        if fault == "lack" and runs:
            runs[-1] = StreamRange(runs[-1].stream_id, runs[-1].start_offset, runs[-1].end_offset - 1)
            runs = [each for each in runs if each.start_offset < each.end_offset]
        if fault == "extra" and runs:
            runs[0] = StreamRange(runs[0].stream_id, runs[0].start_offset, runs[0].end_offset + 1)
        if not runs:
            return
        first = self.driver.prepare(len(runs))
        outputs = tuple(NewObject(first + at, 2, 10, pack_ranges((piece,))) for at, piece in enumerate(runs))
        epoch = image.replica_sets[broker].master_epoch - (fault == "stale")
        command = c.Compact(CompactObjects(broker, epoch, tuple(inputs), outputs))
        before = {each: image.objects[each] for each in inputs}
        is_held = any(objects.intersection(inputs) for objects in (*self.held.values(), self.branch_objects()))
        error = self.try_run(command)
        if error is not None:
            assert is_held or fault in ("lack", "extra", "stale"), error
            assert all(image.objects[each] == record for each, record in before.items())
        else:
            assert fault != "stale" and not is_held
            assert all(image.objects[each].state == ObjectState.DESTROYED for each in inputs)  # rule 6
            assert all(image.objects[each].ranges == record.ranges for each, record in before.items())
            if fault == "again":
                objects = dict(image.objects)
                assert self.try_run(command) is None
                assert image.objects == objects

    @rule(sequence_step=st.integers(0, 1), count=st.integers(1, 3))
    def prepare_with_dedupe(self, sequence_step: int, count: int) -> None:
        self.sequence = max(1, self.sequence + sequence_step)
        envelope = self.driver.envelope(c.PrepareObjects(count, 50), "client", self.sequence, self.sequence)
        first = self.driver.apply(envelope)
        objects = len(self.driver.image.objects)
        assert self.driver.apply(envelope) == first
        assert len(self.driver.image.objects) == objects

    @rule(step=st.integers(-50, 700))
    def time_passes(self, step: int) -> None:
        self.driver.now_ms += step

    @rule(ttl_ms=st.sampled_from((1_000, 5_000)), hold_ms=st.sampled_from((500, 4_000)))
    def take_lease(self, ttl_ms: int, hold_ms: int) -> None:
        lease = self.driver.run(TakeLease("reader", ttl_ms, hold_ms), LeaseRecord)
        assert lease.version == self.driver.index

    @precondition(lambda self: self.driver.image.leases)
    @rule(data=st.data(), back=st.integers(0, 20))
    def renew_lease(self, data: st.DataObject, back: int) -> None:
        lease = self.driver.image.leases[data.draw(st.sampled_from(sorted(self.driver.image.leases)))]
        self.try_run(RenewLease(lease.id, 1_000, max(0, self.driver.index - back)))
        assert self.driver.image.leases[lease.id].version >= lease.version

    @precondition(lambda self: self.driver.image.leases)
    @rule(data=st.data(), expires=st.booleans())
    def end_lease(self, data: st.DataObject, expires: bool) -> None:
        leases = self.driver.image.leases
        lease = leases[data.draw(st.sampled_from(sorted(leases)))]
        self.driver.run(ExpireLeases(tuple(leases)) if expires else EndLease(lease.id))
        if expires:
            assert (lease.id in self.driver.image.leases) == (lease.expires_ms > self.driver.state.tables.time_ms)
        else:
            assert lease.id not in self.driver.image.leases

    @precondition(lambda self: self.driver.image.topics)
    @rule(data=st.data(), beyond=st.sampled_from([0, 0, 0, 1]))
    def create_snapshot(self, data: st.DataObject, beyond: int) -> None:
        image = self.driver.image
        topic_ids = data.draw(st.lists(st.sampled_from(sorted(image.topics)), unique=True, min_size=1, max_size=2))
        self.snapshots += 1
        name = f"s{self.snapshots}"
        cuts, wrong = [], False
        for topic_id in topic_ids:
            ends: list[Ends] = []
            for partition in image.partitions(topic_id):
                streams = [image.streams[partition.first_stream + place] for place in range(STREAMS_PER_PARTITION)]
                chosen = [
                    data.draw(st.integers(each.start_offset, max(each.start_offset, each.end_offset))) + beyond * 100
                    for each in streams
                ]
                wrong |= any(
                    end > each.end_offset or each.quarantined for end, each in zip(chosen, streams, strict=True)
                )
                ends.append((chosen[0], chosen[1], chosen[2], chosen[3]))
            cuts.append(TopicCut(topic_id, tuple(ends)))
        error = self.try_run(CreateSnapshot(name, tuple(cuts)))
        assert isinstance(error, CutRefused) if wrong else error is None, error
        if not wrong:
            self.held[name] = {
                each.object_id
                for _, extent in image.snapshots[name].extents()
                for each in image.find_objects(extent.stream_id, extent.start_offset, extent.end_offset, 1_000)
            }

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def delete_snapshot(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.driver.run(DeleteSnapshot(name))
        del self.held[name]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def create_branch(self, data: st.DataObject) -> None:
        image = self.driver.image
        snapshot = image.snapshots[data.draw(st.sampled_from(sorted(self.held)))]
        source = data.draw(st.sampled_from(snapshot.topics))
        self.topics += 1
        topic_id = self.topics.to_bytes(16, "big")
        if self.try_run(CreateBranch(snapshot.name, source.name, topic_id, f"t{self.topics}", {})) is not None:
            return
        for partition, held in zip(image.partitions(topic_id), source.partitions, strict=True):
            assert image.branches[partition.first_stream].extents == held.extents
            for place in range(STREAMS_PER_PARTITION):
                stream_id = partition.first_stream + place
                self.starts[stream_id], self.ends[stream_id] = held.starts[place], held.ends[place]

    def branch_objects(self) -> set[int]:
        """What branches share, by their streams."""
        image = self.driver.image
        found: set[int] = set()
        for branch in image.branches.values():
            for place, extents in enumerate(branch.extents):
                stream = image.streams[branch.first_stream + place]
                for extent in extents:
                    start = max(extent.start_offset, stream.start_offset)
                    slices = image.find_objects(extent.stream_id, start, extent.end_offset, 1_000)
                    found.update(each.object_id for each in slices)
        return found

    @rule()
    def lifecycle(self) -> None:
        index = self.driver.image.index
        self.driver.run(c.ExpireObjects(tuple(sorted(index.prepared))))
        before = dict(self.driver.image.objects)
        self.driver.run(c.ForgetObjects(tuple(sorted(before))))
        for object_id, record in before.items():  # rule 6
            if object_id not in self.driver.image.objects:
                assert record.state == ObjectState.DESTROYED
                assert record.since_ms + DELAY_MS <= self.driver.state.tables.now_ms
                assert record.destroyed_at <= held_version(self.driver.image.leases.values())
                self.gone.add(object_id)

    @rule()
    def remember_a_cut(self) -> None:
        self.cut = self.driver.index

    @rule()
    def reload(self) -> None:
        image = self.driver.image
        self.behind.apply(Delta(image.version, self.behind.difference(image), {}))
        assert not self.behind.difference(image)
        assert index_facts(self.behind.index) == index_facts(image.index)

    @invariant()
    def epochs_never_go_down(self) -> None:
        for stream in self.driver.image.streams.values():
            assert stream.epoch >= self.epochs.get(stream.id, -1)
            self.epochs[stream.id] = stream.epoch
        for record in self.driver.image.replica_sets.values():
            assert record.master_epoch >= self.master_epochs.get(record.id, 0)
            self.master_epochs[record.id] = record.master_epoch

    @invariant()
    def streams_are_what_the_model_says_and_are_covered_without_a_hole(self) -> None:
        image = self.driver.image
        for stream in image.streams.values():
            assert (stream.start_offset, stream.end_offset) == (self.starts[stream.id], self.ends[stream.id])
            at = stream.start_offset
            while at < stream.end_offset:
                found = image.find_objects(stream.id, at, stream.end_offset, 1_000)
                assert found, (stream, at)
                branch = image.branches.get(stream.id - stream.id % STREAMS_PER_PARTITION)
                extent = extent_at(branch.extents[stream.id % STREAMS_PER_PARTITION], at) if branch else None
                named, end = image.resolve(stream.id, at, stream.end_offset)
                whose, until = (stream.id, end) if extent is None else (extent.stream_id, extent.end_offset)
                assert (named, end) == (whose, min(until, stream.end_offset))
                assert image.resolve(named, at, end) == (named, end), "what is resolved stays as it is"
                for each in found:
                    assert each.start_offset <= at < each.end_offset  # rules 5 and 7: conserved, contiguous
                    assert each.end_offset <= end or extent is None, "no slice goes beyond the cut"
                    record = image.objects[each.object_id]
                    assert record.state == ObjectState.COMMITTED  # rule 6
                    assert any(p.stream_id == named and p.start_offset <= at < p.end_offset for p in record.ranges)
                    at = each.end_offset

    @invariant()
    def no_object_is_committed_without_a_reader_and_none_comes_back(self) -> None:
        image = self.driver.image
        assert not self.gone & image.objects.keys()
        for record in image.objects.values():
            if record.state == ObjectState.COMMITTED:
                held = (*self.held.values(), self.branch_objects())
                assert any(record.id in objects for objects in held) or any(
                    each.stream_id in image.streams and each.end_offset > image.streams[each.stream_id].start_offset
                    for each in record.ranges
                )

    @invariant()
    def what_a_snapshot_holds_stays_in_the_same_objects_without_a_hole(self) -> None:
        image = self.driver.image
        for name, objects in self.held.items():
            found = set()
            for _, extent in image.snapshots[name].extents():
                at = extent.start_offset
                for each in image.find_objects(extent.stream_id, at, extent.end_offset, 1_000):
                    assert each.start_offset <= at < each.end_offset
                    assert image.objects[each.object_id].state == ObjectState.COMMITTED  # rule 6
                    found.add(each.object_id)
                    at = each.end_offset
                assert at >= extent.end_offset
            assert found == objects

    @invariant()
    def the_image_is_the_state(self) -> None:
        tables = self.driver.state.tables
        for image in (self.driver.image, self.driver.local_image):
            for name in KEY_TYPES:
                assert image.table(name) == getattr(tables, name).rows
            assert image.version == self.driver.state.version
            assert image.index.live_slices == tables.index.live_slices

    def teardown(self) -> None:
        dump = self.driver.state.dump()
        assert replay(self.driver.log) == dump
        if self.cut:
            assert replay(self.driver.log, self.cut) == dump
        restored = ControllerState()
        restored.load(dump)
        assert restored.dump() == dump
        loaded = Image()
        rows = [
            RowChange(name, key, record) for name, table in self.driver.image.rows() for key, record in table.items()
        ]
        loaded.apply(Delta(1, rows))
        live, fresh = index_facts(self.driver.image.index), index_facts(loaded.index)
        assert live == fresh == index_facts(restored.tables.index), "the index is not a function of the tables"


TestControllerMachine = ControllerMachine.TestCase
TestControllerMachine.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
