"""Errors that only Kafka's protocol knows, and how the house's errors are told to a Kafka client.

A handler never lets a `TidelogError` escape: it answers with the error's Kafka code, per partition where the protocol
has a place for it. Some clients treat a code they do not expect in a response as a bug of their own and stop (the Java
consumer raises IllegalStateException), so `fetch_code` and `produce_code` translate into the codes these responses
are documented to carry.
"""

from __future__ import annotations

from typing import ClassVar

from tidelog.runtime.errors import CorruptData, InvalidInput, TidelogError

NONE = 0
UNKNOWN_SERVER_ERROR = -1
OFFSET_OUT_OF_RANGE = 1
CORRUPT_MESSAGE = 2
UNKNOWN_TOPIC_OR_PARTITION = 3
LEADER_NOT_AVAILABLE = 5
NOT_LEADER_OR_FOLLOWER = 6
REQUEST_TIMED_OUT = 7
NETWORK_EXCEPTION = 13
COORDINATOR_LOAD_IN_PROGRESS = 14
COORDINATOR_NOT_AVAILABLE = 15
NOT_COORDINATOR = 16
INVALID_TOPIC_EXCEPTION = 17
NOT_ENOUGH_REPLICAS = 19
INVALID_REQUIRED_ACKS = 21
UNSUPPORTED_VERSION = 35
TOPIC_ALREADY_EXISTS = 36
INVALID_REQUEST = 42
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
CONCURRENT_TRANSACTIONS = 51
TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
KAFKA_STORAGE_ERROR = 56
LOG_DIR_NOT_FOUND = 57
FETCH_SESSION_ID_NOT_FOUND = 70
INVALID_FETCH_SESSION_EPOCH = 71
FENCED_LEADER_EPOCH = 74
UNKNOWN_LEADER_EPOCH = 75
UNSUPPORTED_COMPRESSION_TYPE = 76
INVALID_RECORD = 87
THROTTLING_QUOTA_EXCEEDED = 89
PRODUCER_FENCED = 90
UNKNOWN_TOPIC_ID = 100
BROKER_ID_NOT_REGISTERED = 102
FETCH_SESSION_TOPIC_ID_ERROR = 106
UNKNOWN_SUBSCRIPTION_ID = 117
TELEMETRY_TOO_LARGE = 118
TRANSACTION_ABORTABLE = 120

_FETCH_CODES = {
    LEADER_NOT_AVAILABLE: NOT_LEADER_OR_FOLLOWER,
    REQUEST_TIMED_OUT: KAFKA_STORAGE_ERROR,
    THROTTLING_QUOTA_EXCEEDED: KAFKA_STORAGE_ERROR,
}
_PRODUCE_CODES = {
    LEADER_NOT_AVAILABLE: NOT_LEADER_OR_FOLLOWER,
    FENCED_LEADER_EPOCH: NOT_LEADER_OR_FOLLOWER,
    THROTTLING_QUOTA_EXCEEDED: KAFKA_STORAGE_ERROR,
}


class MalformedRequest(InvalidInput):
    """Bytes that are no request of the version they claim. The connection is closed. Kafka: INVALID_REQUEST (42)."""

    reason: ClassVar[str] = "malformed"
    """Label of `tidelog_connections_dropped_total`."""


class NotKafka(MalformedRequest):
    """The first bytes are another protocol's, or nobody's."""

    reason = "not_kafka"


class OversizedRequest(MalformedRequest):
    """A request over `kafka.max_request_bytes`, or with more in it than one request may have."""

    reason = "oversized"


class NotServed(MalformedRequest):
    """An API key, or a version of it, that ApiVersions does not list."""

    reason = "not_served"


class CloseConnection(TidelogError):
    """Raised by a handler that has no other way to answer: a failed Produce with acks=0, as Kafka does."""


def fetch_code(error: TidelogError) -> int:
    """The code of `error` in a Fetch response: only what consumers expect there, retriable where the error is.

    Data that is damaged or quarantined is always CORRUPT_MESSAGE, which consumers report: they would repeat a
    KAFKA_STORAGE_ERROR endlessly without a log line.
    """
    if isinstance(error, CorruptData):
        return CORRUPT_MESSAGE
    return _FETCH_CODES.get(error.kafka_code, error.kafka_code)


def produce_code(error: Exception) -> int:
    """The code of `error` in a Produce response. A defect is the storage's failure to its producers."""
    if not isinstance(error, TidelogError):
        return KAFKA_STORAGE_ERROR
    return _PRODUCE_CODES.get(error.kafka_code, error.kafka_code)
