"""Idempotence and transactions as one partition sees them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.batch.batch import BatchHeader, ControlType, Record, build_batch, build_control_batch, parse_header
from tidelog.stream import producer_state
from tidelog.stream.errors import (
    FencedCoordinator,
    InvalidProducerEpoch,
    InvalidTxnState,
    OutOfOrderSequence,
    TransactionNotVerified,
    VerificationLapsed,
)
from tidelog.stream.producer_state import GUARD_EXPIRATION_MS, OpenTransaction, ProducerStates, VerificationGuard

MAX = (1 << 31) - 1
ROW = Record(0, 1000, b"k", b"v")


def batch(sequence: int, *, epoch: int = 0, count: int = 1, pid: int = 7, txn: bool = False) -> BatchHeader:
    built = build_batch([ROW] * count, producer_id=pid, producer_epoch=epoch, base_sequence=sequence, transactional=txn)
    return parse_header(built)


def marker(*, pid: int = 7, epoch: int = 0) -> BatchHeader:
    built = build_control_batch(
        ControlType.COMMIT, producer_id=pid, producer_epoch=epoch, coordinator_epoch=1, timestamp=1000
    )
    return parse_header(built)


def put(states: ProducerStates, header: BatchHeader, offset: int, now_ms: int = 0) -> None:
    assert states.check(header) is None
    states.append(header, offset, 1000, now_ms)


def test_batches_in_sequence_are_taken() -> None:
    states = ProducerStates()
    put(states, batch(0, count=3), 10)
    put(states, batch(3, count=2), 13)
    put(states, batch(5), 15)


def test_the_last_five_batches_are_known_as_duplicates_with_their_offsets() -> None:
    states = ProducerStates()
    for n in range(7):
        put(states, batch(2 * n, count=2), 100 + 2 * n)
    for n in range(2, 7):
        original = states.check(batch(2 * n, count=2))
        assert original is not None
        assert (original.base_offset, original.last_offset) == (100 + 2 * n, 101 + 2 * n)
    with pytest.raises(OutOfOrderSequence):
        states.check(batch(2, count=2))


def test_a_duplicate_must_match_first_and_last_sequence() -> None:
    states = ProducerStates()
    put(states, batch(0, count=3), 0)
    for header in (batch(0, count=2), batch(1, count=2)):
        with pytest.raises(OutOfOrderSequence) as caught:
            states.check(header)
        assert caught.value.kafka_code == 45


def test_a_gap_is_out_of_order() -> None:
    states = ProducerStates()
    put(states, batch(0), 0)
    with pytest.raises(OutOfOrderSequence):
        states.check(batch(2))


def test_an_unknown_producer_may_start_anywhere() -> None:
    states = ProducerStates()
    put(states, batch(4711), 0)
    put(states, batch(4712), 1)


def test_an_older_epoch_is_refused_and_a_newer_one_starts_at_zero() -> None:
    states = ProducerStates()
    put(states, batch(0, epoch=3), 0)
    with pytest.raises(InvalidProducerEpoch) as caught:
        states.check(batch(1, epoch=2))
    assert caught.value.kafka_code == 47
    with pytest.raises(OutOfOrderSequence):
        states.check(batch(1, epoch=4))
    put(states, batch(0, epoch=4), 1)
    with pytest.raises(InvalidProducerEpoch):
        states.check(batch(1, epoch=3))


def test_duplicates_do_not_reach_over_epochs() -> None:
    states = ProducerStates()
    put(states, batch(0), 0)
    put(states, batch(0, epoch=1), 1)
    original = states.check(batch(0, epoch=1))
    assert original is not None
    assert original.base_offset == 1


def test_sequences_wrap_after_the_largest_int32() -> None:
    states = ProducerStates()
    put(states, batch(MAX - 1), 0)
    put(states, batch(MAX, count=3), 1)
    original = states.check(batch(MAX, count=3))
    assert original is not None
    assert (original.first_sequence, original.last_sequence) == (MAX, 1)
    put(states, batch(2), 4)
    assert states.check(batch(2)) is not None
    with pytest.raises(OutOfOrderSequence):
        states.check(batch(MAX))


def test_what_may_follow_a_batch_that_is_missing_is_told_from_what_is_behind() -> None:
    states = ProducerStates()
    put(states, batch(MAX - 1), 10)
    ahead = [batch(0), batch(5), batch(MAX // 2 - 1), batch(0, epoch=1), batch(9, epoch=1)]
    assert all(states.sends_ahead(header, 11) for header in ahead)
    behind = [batch(MAX), batch(MAX - 1), batch(MAX // 2 + 1), batch(MAX - 9)]
    assert not any(states.sends_ahead(header, 11) for header in behind)
    assert not states.sends_ahead(batch(0, pid=8), 11), "nobody knows its producer"
    assert not states.sends_ahead(batch(0), 10), "its producer has appended since"
    put(states, batch(0, epoch=1), 11)
    assert not states.sends_ahead(batch(MAX, epoch=0), 99), "of an epoch that is over"


def test_a_batch_ending_at_the_largest_sequence_is_followed_by_zero() -> None:
    states = ProducerStates()
    put(states, batch(MAX - 1, count=2), 0)
    put(states, batch(0), 2)


def test_silent_producers_expire_unless_a_transaction_is_open() -> None:
    states = ProducerStates()
    put(states, batch(0, pid=1), 0, now_ms=0)
    put(states, batch(0, pid=2), 1, now_ms=600)
    put(states, batch(0, pid=3, txn=True), 2, now_ms=0)
    assert states.expire(1000, 1000) == 1
    assert [state.producer_id for state in states.all()] == [2, 3]
    put(states, batch(99, pid=1), 3, now_ms=1000)


def test_the_number_of_producers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "MAX_PRODUCERS", 20)
    states = ProducerStates()
    for pid in range(50):
        put(states, batch(0, pid=pid), pid, now_ms=pid)
        assert len(states) <= 20
    assert states.get(49) is not None
    assert states.get(0) is None


def test_the_first_undecided_offset_is_the_oldest_open_transaction() -> None:
    states = ProducerStates()
    put(states, batch(0, pid=1), 0)
    assert states.first_unstable() is None
    put(states, batch(0, pid=2, txn=True), 1)
    put(states, batch(0, pid=3, txn=True), 2)
    put(states, batch(1, pid=2, txn=True), 3)
    assert states.first_unstable() == 1
    completed = states.append_marker(marker(pid=2), 4, 1, 0)
    assert completed == (2, 1, 4)
    assert states.first_ongoing() == 2
    assert states.first_unstable() == 1, "the marker itself is not confirmed"
    states.confirmed(4)
    assert states.first_unstable() == 1
    states.confirmed(5)
    assert states.first_unstable() == 2
    states.append_marker(marker(pid=3), 5, 1, 0)
    states.confirmed(6)
    assert states.first_unstable() is None


def test_plain_writes_inside_a_transaction_are_refused() -> None:
    states = ProducerStates()
    put(states, batch(0, txn=True), 0)
    with pytest.raises(InvalidTxnState) as caught:
        states.check(batch(1))
    assert caught.value.kafka_code == 48


def test_markers_are_fenced_by_producer_and_coordinator_epoch() -> None:
    states = ProducerStates()
    put(states, batch(0, epoch=2, txn=True), 0)
    with pytest.raises(InvalidProducerEpoch):
        states.check_marker(marker(epoch=1), 5, 0)
    states.append_marker(marker(epoch=2), 1, 5, 0)
    with pytest.raises(FencedCoordinator):
        states.check_marker(marker(epoch=2), 4, 0)
    states.check_marker(marker(epoch=2), 5, 0)


def test_a_marker_with_a_newer_epoch_restarts_sequences() -> None:
    states = ProducerStates()
    put(states, batch(0, txn=True, count=4), 0)
    states.append_marker(marker(epoch=1), 4, 1, 0)
    with pytest.raises(OutOfOrderSequence):
        states.check(batch(4, epoch=1, txn=True))
    put(states, batch(0, epoch=1, txn=True), 5)


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 4), st.booleans(), st.booleans()), max_size=30
    )
)
def test_snapshots_round_trip(steps: list[tuple[int, int, int, bool, bool]]) -> None:
    states = ProducerStates()
    offset = 0
    for pid, epoch, count, txn, end in steps:
        known = states.get(pid)
        if end and known is not None:
            states.append_marker(marker(pid=pid, epoch=max(epoch, known.epoch)), offset, 1, offset)
            offset += 1
            continue
        sequence = known.last_sequence + 1 if known is not None and known.epoch >= epoch else 0
        epoch = max(epoch, known.epoch if known else 0)
        txn = txn or (known is not None and known.txn_start_offset >= 0)
        put(states, batch(sequence, pid=pid, epoch=epoch, count=count, txn=txn), offset, now_ms=offset)
        offset += count
    states.confirmed(offset)
    again = ProducerStates.decode(states.encode())
    assert again.encode() == states.encode()
    assert again.first_unstable() == states.first_unstable()
    assert [vars_of(state) for state in again.all()] == [vars_of(state) for state in states.all()]


def vars_of(state: producer_state.ProducerState) -> tuple[object, ...]:
    return tuple(getattr(state, name) for name in type(state).__slots__)


# --- guards and markers ----------------------------------------------------------------------------------------------


def test_a_transaction_begins_only_with_a_guard_and_goes_on_without_one() -> None:
    states = ProducerStates()
    with pytest.raises(TransactionNotVerified) as caught:
        states.require_verified(batch(0, txn=True), None)
    assert caught.value.kafka_code == 120
    guard = states.begin_verification(7, 0, 0)
    states.require_verified(batch(0, txn=True), guard)
    put(states, batch(0, txn=True), 0)
    states.require_verified(batch(1, txn=True), None)
    assert states.has_open_transaction(7, 0) and not states.has_open_transaction(7, 1)
    with pytest.raises(TransactionNotVerified):
        states.require_verified(batch(0, epoch=1, txn=True), None)
    states.append_marker(marker(), 1, 1, 0)
    states.end_verification(7, 1)
    for stale in (None, guard):
        with pytest.raises(TransactionNotVerified):
            states.require_verified(batch(1, txn=True), stale)


@pytest.mark.parametrize("event", ["data", "marker"])
def test_a_late_answer_lets_nothing_in_behind_an_append_or_a_marker(event: str) -> None:
    states = ProducerStates()
    late = states.begin_verification(7, 0, 0)
    if event == "data":
        put(states, batch(0), 0)
    else:
        states.append_marker(marker(), 0, 1, 0)
        states.end_verification(7, 1)
    with pytest.raises(TransactionNotVerified):
        states.require_verified(batch(1, txn=True), late)
    again = states.begin_verification(7, 0, 0)
    assert again is not late
    states.require_verified(batch(1, txn=True), again)
    with pytest.raises(TransactionNotVerified):
        states.require_verified(batch(1, txn=True), late)


def test_a_marker_of_version_2_fences_its_transaction_and_lets_in_the_next_one() -> None:
    states = ProducerStates()
    put(states, batch(0, txn=True), 0)
    fenced = batch(1, epoch=0, txn=True)
    guard = states.begin_verification(7, 1, 0)
    states.append_marker(marker(epoch=1), 1, 1, 0)
    states.end_verification(7, 2)
    states.require_verified(batch(0, epoch=1, txn=True), guard)
    with pytest.raises(InvalidProducerEpoch):
        states.require_verified(fenced, guard)


def test_guards_of_other_producers_stay() -> None:
    states = ProducerStates()
    guards = [states.begin_verification(pid, 0, 0) for pid in range(3)]
    put(states, batch(0, pid=1), 0)
    states.require_verified(batch(0, pid=0, txn=True), guards[0])
    states.require_verified(batch(0, pid=2, txn=True), guards[2])
    with pytest.raises(TransactionNotVerified):
        states.require_verified(batch(0, pid=0, txn=True), guards[2])


def test_a_fenced_producer_needs_no_question() -> None:
    states = ProducerStates()
    put(states, batch(0, epoch=4), 0)
    with pytest.raises(InvalidProducerEpoch):
        states.begin_verification(7, 3, 0)
    with pytest.raises(InvalidProducerEpoch):
        states.require_verified(batch(0, epoch=3, txn=True), None)
    states.begin_verification(7, 4, 0)


def test_the_number_of_guards_and_their_age_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "MAX_GUARDS", 3)
    states = ProducerStates()
    guards = [states.begin_verification(pid, 0, pid) for pid in range(4)]
    with pytest.raises(VerificationLapsed) as caught:
        states.require_verified(batch(0, pid=0, txn=True), guards[0])
    assert caught.value.retriable and caught.value.kafka_code == 19
    states.expire(GUARD_EXPIRATION_MS + 2, 1)
    for pid in (1, 2):
        with pytest.raises(VerificationLapsed):
            states.require_verified(batch(0, pid=pid, txn=True), guards[pid])
    states.require_verified(batch(0, pid=3, txn=True), guards[3])


def test_a_producer_without_batches_starts_at_zero_where_that_is_required() -> None:
    states = ProducerStates()
    with pytest.raises(OutOfOrderSequence):
        states.require_first_sequence(batch(4, txn=True))
    states.require_first_sequence(batch(0, txn=True))
    put(states, batch(0), 0)
    states.require_first_sequence(batch(1, txn=True))


def test_a_marker_of_version_2_has_a_larger_epoch_and_fences_the_batches_before_it() -> None:
    states = ProducerStates()
    put(states, batch(0, epoch=5, txn=True), 0)
    for epoch in (4, 5):
        with pytest.raises(InvalidProducerEpoch) as caught:
            states.check_marker(marker(epoch=epoch), 1, 2)
        assert caught.value.kafka_code == 47
    for version in (0, 1):
        states.check_marker(marker(epoch=5), 1, version)
    states.check_marker(marker(epoch=6), 1, 2)
    assert states.append_marker(marker(epoch=6), 1, 1, 0) == (7, 0, 1)
    states.check_marker(marker(epoch=6), 1, 2)  # a repeat of it
    assert states.append_marker(marker(epoch=6), 2, 1, 0) is None
    with pytest.raises(InvalidProducerEpoch):
        states.check(batch(1, epoch=5, txn=True))
    put(states, batch(0, epoch=6, txn=True), 3)
    with pytest.raises(InvalidProducerEpoch):
        states.check_marker(marker(epoch=6), 1, 2)  # a repeat that comes late ends no newer transaction


def test_markers_of_unknown_producers_keep_the_table_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "MAX_PRODUCERS", 20)
    states = ProducerStates()
    for pid in range(50):
        states.append_marker(marker(pid=pid), pid, 1, pid)
        assert len(states) <= 20


def test_the_broker_s_own_batches_in_a_transaction_have_no_sequence() -> None:
    states = ProducerStates()
    states.append(batch(-1, txn=True), 0, 1000, 0)
    states.append(batch(-1, txn=True, count=3), 1, 1000, 0)
    state = states.get(7)
    assert state is not None and (state.last_sequence, state.txn_start_offset) == (-1, 0)


def test_open_transactions_are_listed_with_their_age() -> None:
    states = ProducerStates()
    put(states, batch(0, pid=2, epoch=3, txn=True), 10, now_ms=100)
    put(states, batch(0, pid=1, txn=True), 11, now_ms=200)
    put(states, batch(1, pid=2, epoch=3, txn=True), 12, now_ms=300)
    first, second = OpenTransaction(2, 3, 10, 100), OpenTransaction(1, 0, 11, 200)
    assert states.open_transactions() == [first, second]
    again = ProducerStates.decode(states.encode())
    assert again.open_transactions() == [first._replace(since_ms=300), second]
    states.append_marker(marker(pid=2, epoch=3), 13, 1, 400)
    assert states.open_transactions() == [second]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "send", "send", "plain", "marker"]),
        st.integers(1, 2),
        st.integers(-1, 1),
        st.integers(0, 9),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(_STEPS)
def test_no_batch_gets_in_behind_a_marker_and_no_marker_behind_a_newer_epoch(
    steps: list[tuple[str, int, int, int, int]],
) -> None:
    """Against a model that remembers everything: when each question was asked, and what each producer has done."""
    states = ProducerStates()
    asked: dict[int, list[tuple[VerificationGuard, int]]] = {1: [], 2: []}
    events = {1: 0, 2: 0}
    epochs: dict[int, int] = {}
    open_since: dict[int, int] = {}
    offset = 0
    for kind, pid, step, which, version in steps:
        current = epochs.get(pid)
        epoch = max((current or 0) + step, 0)
        is_stale = current is not None and epoch < current
        if kind == "ask":
            if is_stale:
                with pytest.raises(InvalidProducerEpoch):
                    states.begin_verification(pid, epoch, 0)
            else:
                asked[pid].append((states.begin_verification(pid, epoch, 0), events[pid]))
            continue
        if kind == "marker":
            is_open = pid in open_since
            if is_stale or (version == 2 and epoch == current and is_open):
                with pytest.raises(InvalidProducerEpoch):
                    states.check_marker(marker(pid=pid, epoch=epoch), 1, version)
                continue
            states.check_marker(marker(pid=pid, epoch=epoch), 1, version)
            completed = states.append_marker(marker(pid=pid, epoch=epoch), offset, 1, 0)
            states.end_verification(pid, version)
            assert completed == ((pid, open_since.pop(pid), offset) if is_open else None)
            events[pid] += version < 2  # one of version 2 fences by its epoch
        else:
            known = states.get(pid)
            sequence = known.last_sequence + 1 if known is not None and epoch == current else 0
            header = batch(sequence, pid=pid, epoch=epoch, txn=kind == "send")
            guard, at = asked[pid][which % len(asked[pid])] if asked[pid] else (None, -1)
            goes_on = pid in open_since and epoch == current
            if is_stale:
                with pytest.raises(InvalidProducerEpoch):
                    states.require_verified(header, guard)
                continue
            if kind == "plain" and pid in open_since:
                with pytest.raises(InvalidTxnState):
                    states.check(header)
                continue
            if kind == "send" and not goes_on and at != events[pid]:
                with pytest.raises(TransactionNotVerified):
                    states.require_verified(header, guard)
                continue
            if kind == "send":
                states.require_verified(header, guard)
                open_since.setdefault(pid, offset)
            put(states, header, offset)
            events[pid] += 1
        epochs[pid] = epoch
        offset += 1
        assert {one.producer_id: one.first_offset for one in states.open_transactions()} == open_since
        assert states.first_ongoing() == min(open_since.values(), default=None)
