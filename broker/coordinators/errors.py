"""Why a coordinator did not serve a request or write a record; the codes are Kafka's.

Entry: `WriteError` for the outcome of a write, `NotCoordinator` and related exceptions for requests.
"""

from __future__ import annotations

from enum import IntEnum

from tidelog.runtime.errors import NotLeader, Unavailable


class WriteError(IntEnum):
    """The outcome of a write: Kafka error codes (int16) that the requests of groups and of transactions both know."""

    UNKNOWN_SERVER_ERROR = -1
    """The log rejects the record; nothing was written."""
    NONE = 0
    COORDINATOR_NOT_AVAILABLE = 15
    """The log takes no records now. Nothing was applied, and nothing is left that could be."""
    NOT_COORDINATOR = 16
    """The partition is lost. Whether the records are durable is unknown here; who loads the log next will see."""
    INVALID_PRODUCER_EPOCH = 47
    """The log knows a newer epoch of the producer; this and the next two are told of transactions and markers only."""
    INVALID_TXN_STATE = 48
    """The transaction is not open in the log, and nothing guards that it is open at its coordinator."""
    TRANSACTION_COORDINATOR_FENCED = 52
    """The log knows a marker of a newer coordinator of the transaction."""


class NotCoordinator(NotLeader):
    """This broker does not coordinate the key: repeat FindCoordinator. Kafka: NOT_COORDINATOR (16)."""

    kafka_code = 16


class CoordinatorLoading(Unavailable):
    """The partition of the key is still being read. Kafka: COORDINATOR_LOAD_IN_PROGRESS (14)."""

    kafka_code = 14


class CoordinatorNotAvailable(Unavailable):
    """The coordinator cannot answer or persist now: retry later. Kafka: COORDINATOR_NOT_AVAILABLE (15)."""

    kafka_code = 15
