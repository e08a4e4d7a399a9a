"""How far a table is: its state in snapshots and properties, and the offsets of the next commit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_tidelog.jobs.table.state import (
    SnapshotFact,
    TableState,
    attempt_name,
    check_ends,
    find_state,
    next_chunk,
    read_state,
    starts,
)
from tests.support.examples import examples
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound

OFFSETS = st.dictionaries(st.integers(0, 200), st.integers(0, 1 << 62), max_size=4)
STATES = st.builds(
    TableState,
    topic=st.text(min_size=1, max_size=20),
    topic_id=st.text(max_size=22),
    kind=st.sampled_from(["", "raw", "json"]),
    number=st.integers(0, 1 << 60),
    run=st.text("0123456789abcdef", min_size=12, max_size=12),
    next=OFFSETS,
    has_all=st.booleans(),
    since=OFFSETS,
    upsert_by=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    pending=st.lists(st.text(max_size=5), max_size=2).map(tuple),
)


@given(STATES, st.integers(0, 1 << 40))
@settings(max_examples=examples(100), deadline=None)
def test_a_state_is_read_as_it_was_written(state: TableState, sequence: int) -> None:
    assert read_state(state.to_json(sequence), "somewhere") == (state, sequence)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"version": 1}', '{"version": 1, "next": 3}'])
def test_a_state_that_others_have_written_over_is_damage(text: str) -> None:
    with pytest.raises(CorruptData, match="somewhere"):
        read_state(text, "somewhere")


def test_a_state_of_a_newer_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match="version 2"):
        read_state('{"version": 2}', "somewhere")


@dataclass
class History:
    """A table's snapshots under commits of the job and of others, expiry and rollbacks; and what is true."""

    snapshots: dict[int, SnapshotFact] = field(default_factory=dict)
    truth: dict[int, TableState | None] = field(default_factory=dict)
    """Snapshot → the state that its data stands for."""
    current: int | None = None
    stored: str | None = None
    sequence: int = 0
    is_ambiguous: bool = False
    """It was rolled back, and history was expired before a run of the job."""
    is_rolled_back: bool = False

    def commit(self, *, is_jobs: bool) -> None:
        self.sequence += 1
        before = self.truth.get(self.current) if self.current is not None else None
        state, text = before, None
        if is_jobs:
            first = before or TableState("t", "id")
            start = first.next.get(0, 0)
            state = first.advanced(first.number + 1, f"{self.sequence:012x}", {0: (start, start + 5)}, (), {0: start})
            self.stored = text = state.to_json(self.sequence)
            self.is_ambiguous = self.is_rolled_back = False
        self.snapshots[self.sequence] = SnapshotFact(self.sequence, self.current, self.sequence, text)
        self.truth[self.sequence] = state
        self.current = self.sequence

    def roll_back(self, steps: int) -> None:
        for _ in range(steps):
            parent = self.snapshots[self.current].parent if self.current is not None else None
            if parent in self.snapshots:
                self.current, self.is_rolled_back = parent, True

    def expire(self, keep: int, *, forgets: bool) -> None:
        """Keep the newest; `forgets` as pyiceberg does, that there was something before."""
        kept: set[int] = set()
        at = self.current
        while at in self.snapshots and len(kept) < keep:
            kept.add(at)
            at = self.snapshots[at].parent
        left = {number: fact for number, fact in self.snapshots.items() if number in kept}
        for number, fact in left.items() if forgets else ():
            left[number] = fact._replace(parent=fact.parent if fact.parent in left else None)
        self.snapshots = left
        self.is_ambiguous = self.is_ambiguous or self.is_rolled_back


STEPS = st.one_of(
    st.just("job"),
    st.just("other"),
    st.tuples(st.just("back"), st.integers(1, 3)),
    st.tuples(st.just("expire"), st.integers(1, 3)),
)


@given(st.lists(STEPS, max_size=25), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_the_state_of_a_table_is_found_whatever_others_do_to_its_history(
    steps: list[str | tuple[str, int]], forgets: bool
) -> None:
    history = History()
    for step in steps:
        if isinstance(step, str):
            history.commit(is_jobs=step == "job")
        elif step[0] == "back":
            history.roll_back(step[1])
        else:
            history.expire(step[1], forgets=forgets)
        if history.is_ambiguous:
            return
        wanted = history.truth.get(history.current) if history.current is not None else None
        try:
            found = find_state(history.current, history.snapshots, history.stored, "n.t")
        except NotFound:
            assert history.is_rolled_back, "only after a rollback to where it cannot be known"
            return
        assert found == wanted


def test_a_table_that_was_replaced_is_not_taken_for_one_that_the_job_has_written() -> None:
    stored = TableState("t", "id", number=4, run="aa", next={0: 9}).to_json(4)
    fresh = SnapshotFact(8, None, 8, None)
    with pytest.raises(NotFound, match="replaced or rolled back"):
        find_state(8, {8: fresh, 4: SnapshotFact(4, None, 4, stored)}, stored, "n.t")
    with pytest.raises(NotFound, match="000000000004-aa"):
        find_state(None, {}, stored, "n.t")
    assert find_state(8, {8: fresh}, None, "n.t") is None


@given(
    st.dictionaries(
        st.integers(0, 20), st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), max_size=8
    ),
    st.integers(1, 60),
)
@settings(max_examples=examples(200), deadline=None)
def test_chunks_are_bounded_and_together_all_that_is_there(topic: dict[int, tuple[int, int, int]], most: int) -> None:
    firsts = {partition: first for partition, (first, _, _) in topic.items()}
    known_ends = {partition: first + known for partition, (first, known, _) in topic.items() if known % 3}
    ends = {partition: first + known + more for partition, (first, known, more) in topic.items()}
    state, seen = TableState("t", "id", next=known_ends), 0
    wanted = sum(ends[partition] - known_ends.get(partition, firsts[partition]) for partition in topic)
    while ranges := next_chunk(state, ends, firsts, most):
        size = sum(end - start for start, end in ranges.values())
        assert size == min(most, wanted - seen)
        for partition, (start, end) in ranges.items():
            assert start == state.next.get(partition, firsts[partition])
            assert start < end <= ends[partition]
        state = state.advanced(state.number + 1, "a", ranges, (), starts(state, firsts))
        seen += size
    assert seen == wanted


def test_a_partition_that_ends_before_what_the_table_has_is_an_error() -> None:
    state = TableState("t", "id", next={3: 9})
    check_ends(state, {3: 9, 4: 0}, {})
    check_ends(state, {3: 12}, {3: 9})
    with pytest.raises(NotFound, match="t-3 ends at offset 5, and the table has it up to 9"):
        check_ends(state, {3: 5}, {3: 5})
    with pytest.raises(NotFound, match="t-3 has lost its records from offset 5 on, which the table has up to 9"):
        check_ends(state, {3: 12}, {3: 5})


def test_a_partition_that_may_be_read_up_to_less_than_the_table_has_is_waited_for() -> None:
    state = TableState("t", "id", next={3: 9})
    assert next_chunk(state, {3: 5, 4: 2}, {3: 0, 4: 0}, 100) == {4: (0, 2)}, "a transaction is open at 5"


def test_a_partition_that_was_empty_or_not_there_at_the_last_commit_leaves_nothing_out_silently() -> None:
    state, firsts = TableState("t", "id"), {0: 3, 1: 7, 2: 4}
    ranges = next_chunk(state, {0: 9, 1: 7, 2: 9}, firsts, 5)
    assert ranges == {0: (3, 5), 2: (4, 7)}
    state = state.advanced(1, "a", ranges, (), starts(state, firsts))
    assert state.next == {0: 5, 1: 7, 2: 7}
    trimmed = {0: 9, 1: 12, 2: 5, 3: 1}
    assert next_chunk(state, {0: 9, 1: 12, 2: 7, 3: 2}, trimmed, 100) == {0: (5, 9), 1: (7, 12), 3: (0, 2)}


def test_a_state_of_an_older_version_lets_a_partition_that_it_does_not_have_begin_anywhere() -> None:
    told = json.loads(TableState("t", "id", number=1, next={0: 6}).to_json(1))
    del told["has_all"]
    state, _ = read_state(json.dumps(told), "somewhere")
    assert next_chunk(state, {0: 6, 1: 12}, {0: 0, 1: 9}, 100) == {1: (9, 12)}


def test_names_of_attempts_sort_by_number() -> None:
    assert attempt_name(9, "ff") < attempt_name(10, "00") < attempt_name(10_000, "00")
