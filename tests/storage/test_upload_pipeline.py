"""The uploads under way: they commit in the order of the WAL, whatever lands first and however commits are refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from tidelog.runtime.errors import Fenced, NotFound, TidelogError, Unavailable
from tidelog.storage.cache.log_cache import CacheEntry, Fate, StreamLog
from tidelog.storage.commits import CommitGap
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import UploadSettings
from tidelog.storage.uploads.pipeline import REFUSALS, NextStep, PreparedIds, Upload, UploadPipeline, UploadState
from tidelog.storage.uploads.plan import UploadPlanner, layout

STALE_AT = 1000.0


class World:
    """A pipeline over a planner, and records of streams 1 to 4 in the WAL: 10 bytes each."""

    def __init__(self, max_in_flight: int = 3, size_bytes: int = 20) -> None:
        options = UploadSettings(size_bytes=size_bytes, age_ms=1000, max_in_flight=max_in_flight)
        self.planner = UploadPlanner(options, 0)
        self.owned = {1, 2, 3, 4}
        self.pipeline = UploadPipeline(self.planner, options, random.Random(1), self.owned.__contains__)
        self.planner.release([])
        self.pipeline.start()
        self.logs = {stream: StreamLog(stream, 0) for stream in self.owned}
        self.wal_end = 0
        self.now = 0.0

    def append(self, *streams: int) -> None:
        for stream in streams:
            log = self.logs[stream]
            record = StreamEntry(log.end_offset, 1, b"x")
            log.push(record)
            self.wal_end += 10
            self.planner.add(CacheEntry(self.wal_end, log, record))

    def begin(self, confirmed: int | None = None) -> list[Upload]:
        return self.pipeline.begin_due(self.now, self.wal_end if confirmed is None else confirmed)

    def land(self, upload: Upload, stale_at: float = STALE_AT) -> None:
        self.pipeline.landed(upload, layout(upload.task, 1 << 20), [], stale_at)

    def committing(self, *streams: int) -> Upload:
        """An upload of one record of each stream whose commit is being asked."""
        self.append(*streams)
        self.planner.force(self.wal_end)
        (upload,) = self.begin()
        self.land(upload)
        assert self.pipeline.begin_commit(upload, self.now)
        return upload

    def refuse(self, upload: Upload, error: TidelogError, *, is_committed: bool = False) -> NextStep:
        return self.pipeline.refused(upload, error, self.now, is_committed=is_committed).next


def test_uploads_begin_while_there_is_room_and_follow_each_other_in_the_wal() -> None:
    world = World(max_in_flight=3)
    world.append(*[1, 2] * 5)
    begun = world.begin()
    assert [(one.task.wal_start, one.task.wal_end) for one in begun] == [(0, 20), (20, 40), (40, 60)]
    assert world.pipeline.is_full
    assert world.begin() == []
    assert (world.pipeline.watch_at(), world.pipeline.wait_s(0.0)) == (None, None)  # the end of one comes first


def test_the_age_is_that_of_the_oldest_confirmed_byte_that_is_not_committed() -> None:
    world = World()
    assert world.pipeline.pending_age_s(5.0) == 0
    world.append(1)
    world.begin()
    assert world.pipeline.pending_age_s(0.4) == pytest.approx(0.4)
    world.now = 1.0
    (upload,) = world.begin()
    world.append(2)
    world.now = 1.5
    assert world.begin() == []
    assert world.pipeline.pending_age_s(60.0) == pytest.approx(60.0)
    world.land(upload)
    assert world.pipeline.begin_commit(upload, world.now)
    world.pipeline.committed(upload)
    assert world.pipeline.finish(upload) is None
    assert world.pipeline.pending_age_s(2.0) == pytest.approx(0.5)


def test_with_room_it_says_at_which_confirm_offset_and_after_what_time_to_look_again() -> None:
    world = World()
    assert (world.pipeline.watch_at(), world.pipeline.wait_s(0.0)) == (1, None)
    world.append(1)
    assert world.begin() == []
    assert (world.pipeline.watch_at(), world.pipeline.wait_s(0.0)) == (20, 1.0)
    assert world.pipeline.wait_s(0.4) == pytest.approx(0.6)


def test_what_is_not_confirmed_is_in_no_upload() -> None:
    world = World()
    world.append(1, 1, 1, 1)
    assert [one.task.wal_end for one in world.begin(confirmed=20)] == [20]
    assert [one.task.wal_end for one in world.begin(confirmed=39)] == []


def test_only_the_oldest_may_commit_however_early_others_land() -> None:
    world = World()
    world.append(1, 1, 1, 1)
    first, second = world.begin()
    world.land(second)
    assert not world.pipeline.has_turn(second)
    with pytest.raises(AssertionError, match="order of the WAL"):
        world.pipeline.begin_commit(second, 0.0)
    world.land(first)
    assert world.pipeline.begin_commit(first, 0.0)
    world.pipeline.committed(first)
    assert not world.pipeline.has_turn(second), "the records of the first are not let go yet"
    assert world.pipeline.finish(first) is second
    assert world.pipeline.has_turn(second)


def test_the_wal_may_be_trimmed_up_to_what_is_committed_and_no_further() -> None:
    world = World()
    world.append(1, 1, 1, 1)
    first, second = world.begin()
    world.land(first)
    world.land(second)
    assert world.pipeline.committed_offset == 0
    world.pipeline.begin_commit(first, 0.0)
    assert world.pipeline.committed_offset == 0
    world.pipeline.committed(first)
    assert world.pipeline.committed_offset == 20


@pytest.mark.parametrize("change", ["old ids", "a stream is gone"])
def test_what_is_not_current_when_its_turn_comes_is_laid_out_again(change: str) -> None:
    world = World()
    world.append(1, 2)
    (upload,) = world.begin()
    world.land(upload)
    if change == "old ids":
        world.now = STALE_AT
    else:
        world.logs[2].fate = Fate.DROP
    assert not world.pipeline.begin_commit(upload, world.now)
    assert (upload.state, world.pipeline.rebuilt) == (UploadState.PUTTING, 1)
    world.land(upload, stale_at=2 * STALE_AT)
    assert world.pipeline.begin_commit(upload, world.now)


def test_a_commit_with_unknown_outcome_is_asked_again_unless_the_metadata_shows_it() -> None:
    world = World()
    upload = world.committing(1)
    assert world.refuse(upload, Unavailable("late"), is_committed=True) is NextStep.COMMIT
    assert (world.pipeline.found_committed(upload, is_committed=False), upload.state) == (False, UploadState.COMMITTING)
    assert (world.pipeline.found_committed(upload, is_committed=True), upload.state) == (True, UploadState.COMMITTED)


@pytest.mark.parametrize("error", [CommitGap("gap", stream_id=1), NotFound("an id")])
def test_a_refusal_of_what_the_metadata_shows_committed_is_success(error: TidelogError) -> None:
    world = World()
    upload = world.committing(1)
    assert world.refuse(upload, error, is_committed=True) is NextStep.FINISH
    assert world.pipeline.committed_offset == 10


def test_a_gap_in_a_stream_quarantines_it_and_the_upload_is_laid_out_again() -> None:
    world = World()
    upload = world.committing(1, 2)
    answer = world.pipeline.refused(upload, CommitGap("gap", stream_id=2), 0.0, is_committed=False)
    assert (answer.next, answer.stream) == (NextStep.QUARANTINE, world.logs[2])
    assert upload.state is UploadState.PUTTING


@pytest.mark.parametrize("stream", [None, 3])
def test_a_gap_elsewhere_stops_uploads(stream: int | None) -> None:
    world = World()
    assert world.refuse(world.committing(1, 2), CommitGap("gap", stream_id=stream)) is NextStep.STOP


def test_an_unknown_stream_is_left_out_at_once_and_an_unknown_id_is_replaced_after_a_delay() -> None:
    world = World()
    upload = world.committing(1, 2)
    answer = world.pipeline.refused(upload, NotFound("an id"), 0.0, is_committed=False)
    assert answer.next is NextStep.PUT
    assert answer.delay_s > 0
    world.land(upload)
    world.pipeline.begin_commit(upload, 0.0)
    world.owned.discard(2)
    answer = world.pipeline.refused(upload, NotFound("stream 2"), 0.0, is_committed=False)
    assert (answer.next, answer.delay_s) == (NextStep.PUT, 0.0)
    assert (world.logs[1].fate, world.logs[2].fate) == (Fate.UPLOAD, Fate.DROP)


def test_a_refusal_for_good_is_asked_some_times_and_then_stops_uploads() -> None:
    world = World()
    upload = world.committing(1)
    answers = [world.refuse(upload, Fenced("stale")) for _ in range(REFUSALS + 1)]
    assert answers == [NextStep.COMMIT] * REFUSALS + [NextStep.STOP]


@pytest.mark.parametrize("cause", ["a stream was lost", "the ids are old"])
def test_a_fence_that_has_another_cause_lays_the_upload_out_again(cause: str) -> None:
    world = World()
    upload = world.committing(1)
    if cause == "a stream was lost":
        world.owned.discard(1)
    else:
        world.now = STALE_AT
    assert world.refuse(upload, Fenced("stale")) is NextStep.PUT


def test_after_a_stop_nothing_begins_or_commits() -> None:
    world = World()
    world.append(1, 1)
    (upload,) = world.begin()
    world.land(upload)
    world.pipeline.stop()
    world.append(1, 1)
    assert world.begin() == []
    with pytest.raises(AssertionError):
        world.pipeline.begin_commit(upload, 0.0)


def test_ids_at_hand_are_for_single_objects_and_for_half_of_their_time() -> None:
    ids = PreparedIds(ttl_ms=1000)
    assert ids.missing(0.0) == 2
    ids.add(7, 2, 0.0)
    assert ids.missing(0.4) == 0
    assert ids.take(3, 0.0) is None
    assert ids.take(1, 0.4) == (7, 0.0)
    assert ids.missing(0.4) == 1
    assert ids.take(1, 0.5) is None, "it is too old"
    assert ids.missing(0.5) == 2
    assert ids.stale_at(3.0) == pytest.approx(3.7)


class Uploads(RuleBasedStateMachine):
    """A shell that does its steps in any order over a controller that answers anything; see the invariants."""

    @initialize(max_in_flight=st.integers(1, 4))
    def begin_world(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.world = World(max_in_flight=max_in_flight)
        self.confirmed = 0
        self.uploads: list[Upload] = []
        self.controller = 0
        """The committed WAL offset."""
        self.ends = dict.fromkeys(self.world.logs, 0)
        """The committed ends of the streams."""

    def commit(self, upload: Upload) -> None:
        """What the controller does with a commit that arrives; the same again is success."""
        if self.controller >= upload.task.wal_end:
            return
        assert upload.task.wal_start == self.controller, "a gap in the WAL (rule 5)"
        self.controller = upload.task.wal_end
        for each in upload.layout.objects:
            for part in each.parts:
                stream, records = part.log.stream_id, part.records
                assert records[0].base_offset == self.ends[stream], "a gap in a stream (rule 5)"
                self.ends[stream] = records[-1].base_offset + records[-1].count

    def of(self, state: UploadState) -> list[Upload]:
        return [one for one in self.uploads if one.state is state]

    @rule(
        streams=st.lists(st.integers(1, 4), min_size=2, max_size=5),
        share=st.sampled_from([1.0, 0.5]),
        waited=st.sampled_from([0.0, 0.5, 2.0]),
    )
    def append_and_confirm(self, streams: list[int], share: float, waited: float) -> None:
        self.world.append(*streams)
        self.world.now += waited
        self.confirmed += int((self.world.wal_end - self.confirmed) * share) // 10 * 10
        self.uploads += self.world.begin(self.confirmed)

    @precondition(lambda self: self.uploads)
    @rule(
        number=st.integers(0, 3),
        good_for=st.sampled_from([50.0, 1.0, 0.0]),
        arrives=st.booleans(),
        error=st.sampled_from([None, Unavailable("late"), NotFound("an id"), Fenced("by another cause")]),
    )
    def step(self, number: int, good_for: float, arrives: bool, error: TidelogError | None) -> None:
        """The next step of one of the uploads: it lands, its commit is begun or answered, or it is finished."""
        upload = self.uploads[number % len(self.uploads)]
        if upload.state is UploadState.PUTTING:
            self.world.land(upload, self.world.now + good_for)
        elif upload.state is UploadState.COMMITTING:
            self.answer(upload, arrives, error)
        elif upload.state is UploadState.COMMITTED:
            self.finish()
        elif self.world.pipeline.has_turn(upload):
            self.world.pipeline.begin_commit(upload, self.world.now)

    def answer(self, upload: Upload, arrives: bool, error: TidelogError | None) -> None:
        if error is None:
            self.commit(upload)
            self.world.pipeline.committed(upload)
            return
        if arrives and isinstance(error, Unavailable):
            self.commit(upload)
        is_committed = self.controller >= upload.task.wal_end
        if isinstance(error, Fenced):
            upload.stale_at = self.world.now  # else the sixth one stops everything
        if self.world.refuse(upload, error, is_committed=is_committed) is NextStep.COMMIT:
            self.world.pipeline.found_committed(upload, is_committed=is_committed)

    def finish(self) -> None:
        following = self.world.pipeline.finish(self.uploads.pop(0))
        assert following is (self.uploads[0] if self.uploads else None)

    @rule(stream=st.integers(1, 4), fate=st.sampled_from([Fate.DROP, Fate.QUARANTINE]))
    def change_fate(self, stream: int, fate: Fate) -> None:
        self.world.logs[stream].fate = fate

    @invariant()
    def what_must_hold(self) -> None:
        if not hasattr(self, "world"):
            return
        pipeline = self.world.pipeline
        assert pipeline.in_flight == len(self.uploads) <= self.max_in_flight
        assert all(one.task.wal_end <= self.confirmed for one in self.uploads)
        assert pipeline.committed_offset <= self.controller
        done = (UploadState.COMMITTING, UploadState.COMMITTED)
        assert all(one.state not in done for one in self.uploads[1:])

    def teardown(self) -> None:
        """Without faults everything that is confirmed is committed."""
        if not hasattr(self, "world"):
            return
        self.confirmed = self.world.wal_end
        while True:
            self.world.planner.force(self.confirmed)
            self.uploads += self.world.begin(self.confirmed)
            if not self.uploads:
                break
            for each in self.of(UploadState.PUTTING):
                self.world.land(each, self.world.now + 1)
            first = self.uploads[0]
            if first.state is UploadState.LANDED and not self.world.pipeline.begin_commit(first, self.world.now):
                continue
            if first.state is UploadState.COMMITTING:
                self.commit(first)
                self.world.pipeline.committed(first)
            self.finish()
        assert self.controller == self.world.pipeline.committed_offset == self.world.wal_end


TestUploads = Uploads.TestCase
TestUploads.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
