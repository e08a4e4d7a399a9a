"""Base classes of errors, each with its Kafka code, whether a retry can help, and a hint.

Every error that Tidelog raises on purpose is a `TidelogError`. Three facts are attributes of the class, so a caller
need not parse the message: `kafka_code` (for a Kafka client), `retriable` (whether the same request may succeed later)
and `exit_code` (of a command-line tool). `hint` names the next step for a person.

Other packages add errors by subclassing one of these and define no second hierarchy.
"""

from __future__ import annotations

from typing import ClassVar


class TidelogError(Exception):
    """Base class of all errors that Tidelog raises on purpose.

    `message` states what is wrong and the origin of the value; `hint` states what to do next.
    """

    kafka_code: ClassVar[int] = -1
    """The Kafka error code (int16) for a client; -1 is UNKNOWN_SERVER_ERROR."""
    retriable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidInput(TidelogError):
    """The caller's input is invalid and cannot succeed on a retry. Kafka: INVALID_REQUEST (42)."""

    kafka_code = 42
    exit_code = 2


class ConfigError(InvalidInput):
    """A configuration key or value is invalid; the message names the key and its source."""

    kafka_code = 40
    exit_code = 2


class NotFound(TidelogError):
    """The named object does not exist (any more). Kafka: UNKNOWN_TOPIC_OR_PARTITION (3)."""

    kafka_code = 3
    exit_code = 3


class AlreadyExists(TidelogError):
    """The named object already exists. Kafka: TOPIC_ALREADY_EXISTS (36)."""

    kafka_code = 36
    exit_code = 4


class NotLeader(TidelogError):
    """This broker is not the leader of the partition. Kafka: NOT_LEADER_OR_FOLLOWER (6)."""

    kafka_code = 6
    retriable = True


class Fenced(TidelogError):
    """The caller's epoch is stale: there is a newer owner. Kafka: FENCED_LEADER_EPOCH (74).

    Never retried with the same epoch (docs/rules.md, rule 4).
    """

    kafka_code = 74


class Unavailable(TidelogError):
    """A dependency (bucket, controller, disk) does not respond now. Retriable. Kafka: REQUEST_TIMED_OUT (7)."""

    kafka_code = 7
    retriable = True
    exit_code = 5


class Overloaded(TidelogError):
    """A bound was reached and back-pressure applies. Retriable. Kafka: THROTTLING_QUOTA_EXCEEDED (89).

    Raised only where the caller cannot wait; most bounds make the caller wait instead.
    """

    kafka_code = 89
    retriable = True
    exit_code = 5


class StorageFailed(TidelogError):
    """A disk or WAL failed and this process cannot use it any more. Kafka: KAFKA_STORAGE_ERROR (56)."""

    kafka_code = 56
    retriable = True
    exit_code = 6


class CorruptData(TidelogError):
    """Bytes failed their check. The data is quarantined, never served. Kafka: CORRUPT_MESSAGE (2)."""

    kafka_code = 2
    exit_code = 7


class DamagedFile(CorruptData):
    """A local file of Tidelog fails its check; its content was not changed."""

    def __init__(self, path: str, position: int, what: str, *, hint: str) -> None:
        """`position`: the byte of the file that `what` refers to; the start of the part that is checked as a whole."""
        super().__init__(f"{path} at byte {position}: {what}", hint=hint)
        self.path = path
        self.position = position
        self.what = what


class Closed(TidelogError):
    """The object was closed; the caller should look up its successor. Kafka: NOT_LEADER_OR_FOLLOWER (6)."""

    kafka_code = 6
    retriable = True
