"""A coordinator's batches in producers' transactions: no sequences, and a guard before the first of a transaction."""

from __future__ import annotations

import pytest

from tidelog.batch.batch import BatchHeader, ControlType, Record, build_batch, build_control_batch, parse_header
from tidelog.stream.errors import FencedCoordinator, InvalidProducerEpoch, InvalidTxnState
from tidelog.stream.producer_state import MAX_PRODUCERS, ProducerStates


def data(*, pid: int = 7, epoch: int = 0) -> BatchHeader:
    record = Record(0, 1_000, b"k", b"v")
    return parse_header(build_batch([record], producer_id=pid, producer_epoch=epoch, transactional=True))


def marker(*, epoch: int = 0) -> BatchHeader:
    kind = ControlType.COMMIT
    return parse_header(
        build_control_batch(kind, producer_id=7, producer_epoch=epoch, coordinator_epoch=1, timestamp=1_000)
    )


def test_a_batch_without_a_sequence_opens_the_transaction_and_leaves_the_sequences_alone() -> None:
    states = ProducerStates()
    states.append(data(), 10, 1_000, 0)
    found = states.get(7)
    assert found is not None
    assert (found.txn_start_offset, found.last_sequence, found.batches) == (10, -1, [])
    again = ProducerStates.decode(states.encode())
    assert again.first_ongoing() == 10
    completed = states.append_marker(marker(), 12, 1, 0)
    assert completed is not None and completed.first_offset == 10


def test_the_first_batch_of_a_transaction_needs_a_guard_that_nothing_of_the_producer_has_removed() -> None:
    states = ProducerStates()
    with pytest.raises(InvalidTxnState):
        states.check_transactional(data(), None)
    guard = states.begin_verification(7, 0)
    assert guard is not None and states.begin_verification(7, 0) is guard
    other = states.begin_verification(8, 0)
    with pytest.raises(InvalidTxnState):
        states.check_transactional(data(), other)
    states.check_transactional(data(), guard)
    states.append(data(), 0, 1_000, 0)
    assert states.begin_verification(7, 0) is None
    states.check_transactional(data(), None)
    assert states.begin_verification(7, 1) is not None  # the transaction after it
    with pytest.raises(InvalidTxnState):
        states.check_transactional(data(epoch=1), None)
    states.append_marker(marker(), 1, 1, 0)
    with pytest.raises(InvalidTxnState):
        states.check_transactional(data(), guard)
    late = states.begin_verification(7, 0)
    states.append_marker(marker(), 2, 1, 0)  # of a transaction without a batch here
    with pytest.raises(InvalidTxnState):
        states.check_transactional(data(), late)


def test_an_older_epoch_is_refused_with_or_without_a_guard() -> None:
    states = ProducerStates()
    states.append(data(epoch=2), 0, 1_000, 0)
    with pytest.raises(InvalidProducerEpoch):
        states.check_transactional(data(epoch=1), None)
    states.append_marker(marker(epoch=2), 1, 1, 0)
    with pytest.raises(InvalidProducerEpoch):
        states.check_transactional(data(epoch=1), states.begin_verification(7, 0))


def test_a_marker_of_version_2_has_a_newer_epoch_unless_it_repeats_one() -> None:
    states = ProducerStates()
    states.append(data(), 0, 1_000, 0)
    states.check_marker(marker(), 1)
    with pytest.raises(InvalidProducerEpoch):
        states.check_marker(marker(), 1, 2)
    states.check_marker(marker(epoch=1), 1, 2)
    states.append_marker(marker(epoch=1), 1, 5, 0)
    states.check_marker(marker(epoch=1), 5, 2)
    with pytest.raises(FencedCoordinator):
        states.check_marker(marker(epoch=1), 4, 2)


def test_questions_that_come_to_nothing_are_bounded() -> None:
    states = ProducerStates()
    first = states.begin_verification(7, 0)
    for producer_id in range(100, 100 + MAX_PRODUCERS):
        states.begin_verification(producer_id, 0)
    with pytest.raises(InvalidTxnState):
        states.check_transactional(data(), first)
