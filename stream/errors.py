"""The stream room's kinds of errors, each with its Kafka code. What a batch itself can have wrong is in `storage`.

Entry: the classes below; all are `runtime.errors.TidelogError`s.
"""

from __future__ import annotations

from runtime.errors import Fenced, InvalidInput, NotFound, Unavailable


class OffsetOutOfRange(NotFound):
    """The offset lies before the log start or past the log end. Kafka: OFFSET_OUT_OF_RANGE (1)."""

    kafka_code = 1


class OutOfOrderSequence(InvalidInput):
    """An idempotent producer's batch does not follow its last one. Kafka: OUT_OF_ORDER_SEQUENCE_NUMBER (45)."""

    kafka_code = 45


class InvalidProducerEpoch(Fenced):
    """A newer instance of the producer has written already. Kafka: INVALID_PRODUCER_EPOCH (47)."""

    kafka_code = 47


class InvalidTxnState(InvalidInput):
    """A producer mixes plain writes into its open transaction. Kafka: INVALID_TXN_STATE (48)."""

    kafka_code = 48


class FencedCoordinator(Fenced):
    """A marker came from an older transaction coordinator. Kafka: TRANSACTION_COORDINATOR_FENCED (52)."""

    kafka_code = 52


class FencedLeaderEpoch(Fenced):
    """The caller's leader epoch is older than the log's. Kafka: FENCED_LEADER_EPOCH (74)."""


class UnknownLeaderEpoch(Unavailable):
    """The caller's leader epoch is newer than the log's: this broker is behind. Kafka: UNKNOWN_LEADER_EPOCH (75)."""

    kafka_code = 75
