"""Errors of streams and partition logs, each with its Kafka code. Errors of a batch itself are in `tidelog.batch`.

Entry: the classes below; all are subclasses of `tidelog.runtime.errors.TidelogError`.
"""

from __future__ import annotations

from tidelog.runtime.errors import CorruptData, Fenced, InvalidInput, NotFound, Unavailable


class OffsetOutOfRange(NotFound):
    """The offset is below the log start or above the log end. Kafka: OFFSET_OUT_OF_RANGE (1)."""

    kafka_code = 1


class OffsetNotAvailable(Unavailable):
    """A new leader does not know yet how much of what it inherited is confirmed. Kafka: OFFSET_NOT_AVAILABLE (78)."""

    kafka_code = 78


class OutOfOrderSequence(InvalidInput):
    """An idempotent producer's batch does not follow its last one. Kafka: OUT_OF_ORDER_SEQUENCE_NUMBER (45)."""

    kafka_code = 45


class EarlierBatchMissing(Unavailable):
    """A batch was refused because one before it was, or may have been: the producer sends both again.

    Kafka: NOT_LEADER_OR_FOLLOWER (6), as for the batch before it.
    """

    kafka_code = 6


class InvalidProducerEpoch(Fenced):
    """A newer instance of the producer has already written. Kafka: INVALID_PRODUCER_EPOCH (47)."""

    kafka_code = 47


class InvalidTxnState(InvalidInput):
    """A producer sends non-transactional batches in its open transaction. Kafka: INVALID_TXN_STATE (48)."""

    kafka_code = 48


class TransactionNotVerified(InvalidInput):
    """A transactional batch has no open transaction in the partition, and no valid word of the coordinator.

    Kafka: TRANSACTION_ABORTABLE (120), which before Produce v11 is INVALID_TXN_STATE (48).
    """

    kafka_code = 120


class VerificationLapsed(Unavailable):
    """The guard of a question to the coordinator was removed for want of room: send the batch again.

    Kafka: NOT_ENOUGH_REPLICAS (19), which every producer retries.
    """

    kafka_code = 19


class FencedCoordinator(Fenced):
    """A marker came from an older transaction coordinator. Kafka: TRANSACTION_COORDINATOR_FENCED (52)."""

    kafka_code = 52


class FencedLeaderEpoch(Fenced):
    """The caller's leader epoch is older than the log's. Kafka: FENCED_LEADER_EPOCH (74)."""


class UnknownLeaderEpoch(Unavailable):
    """The caller's leader epoch is newer than the log's: this broker is behind. Kafka: UNKNOWN_LEADER_EPOCH (75)."""

    kafka_code = 75


class UnknownVersion(CorruptData):
    """A value of a partition's metadata has a version that this process does not know (rule 18)."""


def require_version(found: int, known: int, what: str) -> None:
    """Check the version in a value that was read. Raises `UnknownVersion`."""
    if found != known:
        raise UnknownVersion(
            f"{what} of a partition has version {found}; this process reads {known}",
            hint="start the version that wrote it, or a newer one",
        )
