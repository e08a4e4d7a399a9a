"""The Kafka error codes used by groups, and the exceptions for requests that no group can take.

Those of a group that this broker cannot coordinate now are in `tidelog.broker.coordinators.errors`.

Entry: `GroupError`.
"""

from __future__ import annotations

from enum import IntEnum

from tidelog.runtime.errors import InvalidInput


class GroupError(IntEnum):
    """Kafka's error codes (int16) used by groups."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    UNKNOWN_TOPIC_OR_PARTITION = 3
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    INVALID_REQUEST = 42
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    TRANSACTION_COORDINATOR_FENCED = 52
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    UNSTABLE_OFFSET_COMMIT = 88


class InvalidGroupId(InvalidInput):
    """The group id is too long, or empty where Kafka requires one. Kafka: INVALID_GROUP_ID (24)."""

    kafka_code = 24


class InvalidGroupRequest(InvalidInput):
    """A group request contains a value that cannot be stored in a record. Kafka: INVALID_REQUEST (42)."""

    kafka_code = 42


class CommitTooLarge(InvalidInput):
    """The records of a commit would be too large. Kafka: INVALID_COMMIT_OFFSET_SIZE (28)."""

    kafka_code = 28
