"""`producer-forgotten`: silent where a partition opens with the producers that it had, loud where one is missing."""

from __future__ import annotations

import pytest

from tidelog.batch.batch import ControlType, Record, build_batch, build_control_batch
from tidelog.simulation.world.producer_watch import ProducerWatch, producer_batch
from tidelog.stream.partition_log import ProducerInfo

STREAM, OTHER = 5, 9
PRODUCER = 1000
LAST = (1 << 31) - 1
"""The sequence that 0 follows."""


def sent(first: int, *, epoch: int = 0, records: int = 1) -> bytes:
    """A batch of the producer."""
    return build_batch(
        [Record(0, 0, None, b"v")] * records, producer_id=PRODUCER, producer_epoch=epoch, base_sequence=first
    )


def marker(epoch: int) -> bytes:
    """The end of a transaction of the producer."""
    return build_control_batch(
        ControlType.COMMIT, producer_id=PRODUCER, producer_epoch=epoch, coordinator_epoch=0, timestamp=0
    )


def info(last_sequence: int, epoch: int = 0) -> ProducerInfo:
    """What a partition knows of the producer."""
    return ProducerInfo(PRODUCER, epoch, last_sequence, 0, -1, -1)


def found(confirmed: list[bytes], known: list[ProducerInfo]) -> list[str]:
    """What is said of a partition that opens knowing `known`, after these batches were confirmed."""
    messages: list[str] = []
    watch = ProducerWatch(lambda rule, message: messages.append(f"{rule}: {message}"))
    for each in confirmed:
        batch = producer_batch(each)
        assert batch is not None
        watch.confirms(STREAM, 1, batch)
    watch.opens(OTHER, 2, [])
    watch.opens(STREAM, 2, known)
    return messages


@pytest.mark.parametrize(
    ("confirmed", "known"),
    [
        ([sent(0), sent(1, records=3)], [info(3)]),
        ([sent(0)], [info(1)]),  # an unconfirmed batch more
        ([sent(LAST)], [info(1)]),
        ([sent(7)], [info(0, epoch=1)]),
        ([sent(0), marker(0)], [info(0)]),
        ([sent(0), marker(1)], [info(-1, epoch=1)]),  # KIP-890: the marker's epoch is the next one
        ([sent(0), marker(1), sent(0, epoch=1)], [info(0, epoch=1)]),
        ([sent(-1)], [info(-1)]),  # offsets of a transaction have no sequence
    ],
)
def test_silent_where_the_producer_is_known_as_it_was_or_further_on(
    confirmed: list[bytes], known: list[ProducerInfo]
) -> None:
    assert found(confirmed, known) == []


@pytest.mark.parametrize(
    ("confirmed", "known", "says"),
    [
        ([sent(0)], [], "wrote up to sequence 0 of epoch 0, and it is unknown"),
        ([sent(0), sent(1, records=3)], [info(0)], "up to sequence 3 of epoch 0, and it is known up to sequence 0 of"),
        ([sent(LAST, records=2)], [info(LAST)], f"sequence 0 of epoch 0, and it is known up to sequence {LAST} of"),
        ([sent(0)], [info(-1)], "it is known up to sequence -1 of epoch 0"),
        ([sent(5), sent(0, epoch=1)], [info(5)], "up to sequence 0 of epoch 1, and it is known up to sequence 5 of"),
        ([sent(0), marker(1)], [info(0)], "up to sequence -1 of epoch 1, and it is known up to sequence 0 of epoch 0"),
    ],
)
def test_loud_where_the_producer_is_missing_or_as_it_was_before(
    confirmed: list[bytes], known: list[ProducerInfo], says: str
) -> None:
    (message,) = found(confirmed, known)
    assert message.startswith(f"producer-forgotten: stream {STREAM} opened with epoch 2: producer {PRODUCER} ")
    assert says in message


def test_a_batch_without_a_producer_says_nothing() -> None:
    assert producer_batch(build_batch([Record(0, 0, None, b"v")])) is None


def test_who_opens_in_an_epoch_of_the_past_knows_what_was_written_until_then() -> None:
    messages: list[str] = []
    watch = ProducerWatch(lambda rule, message: messages.append(message))
    for epoch, first in ((2, 0), (3, 1)):
        batch = producer_batch(sent(first))
        assert batch is not None
        watch.confirms(STREAM, epoch, batch)
    watch.opens(STREAM, 2, [info(0)])
    assert messages == []
    watch.opens(STREAM, 3, [info(0)])
    assert len(messages) == 1


def test_a_deleted_stream_is_forgotten() -> None:
    messages: list[str] = []
    watch = ProducerWatch(lambda rule, message: messages.append(message))
    batch = producer_batch(sent(0))
    assert batch is not None
    watch.confirms(STREAM, 1, batch)
    watch.forget(STREAM)
    watch.forget(OTHER)
    watch.opens(STREAM, 2, [])
    assert messages == []
