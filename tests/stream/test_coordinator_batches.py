"""A coordinator's batches in producers' transactions: without sequences."""

from __future__ import annotations

from tidelog.batch.batch import BatchHeader, ControlType, Record, build_batch, build_control_batch, parse_header
from tidelog.stream.producer_state import ProducerStates


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
    assert (found.txn_start_offset, found.last_sequence) == (10, -1)
    again = ProducerStates.decode(states.encode())
    assert again.first_ongoing() == 10
    completed = states.append_marker(marker(), 12, 1, 0)
    assert completed is not None and completed.first_offset == 10
