"""The few kinds of errors, each knowing its Kafka code, whether a retry can help, and what to do next.

An error raised anywhere in Tidelog on purpose is a `TidelogError`. Three facts ride on the class, so that a caller need
not know the message: `kafka_code` (what a Kafka client is told), `retriable` (whether the same request may succeed
later) and `exit_code` (what a command-line tool leaves behind). `hint` names the next step for a person.

A room adds kinds of its own by subclassing one of these; it does not invent a second hierarchy.
"""

from __future__ import annotations

from typing import ClassVar


class TidelogError(Exception):
    """The root of all errors that Tidelog raises on purpose.

    `message` says what was wrong and where the value came from; `hint` says what to do next.
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
    """The caller's input can never succeed as it stands. Kafka: INVALID_REQUEST (42)."""

    kafka_code = 42
    exit_code = 2


class ConfigError(InvalidInput):
    """A configuration key or value is wrong; the message names the key and the source it came from."""

    kafka_code = 40
    exit_code = 2


class NotFound(TidelogError):
    """The thing named does not exist (any more). Kafka: UNKNOWN_TOPIC_OR_PARTITION (3)."""

    kafka_code = 3
    exit_code = 3


class AlreadyExists(TidelogError):
    """The thing named exists already. Kafka: TOPIC_ALREADY_EXISTS (36)."""

    kafka_code = 36
    exit_code = 4


class NotLeader(TidelogError):
    """This broker does not lead the partition now. Kafka: NOT_LEADER_OR_FOLLOWER (6)."""

    kafka_code = 6
    retriable = True


class Fenced(TidelogError):
    """The caller's epoch is stale: somebody newer owns what it wants to change. Kafka: FENCED_LEADER_EPOCH (74).

    Never retried with the same epoch (DESIGN.md, rule 4).
    """

    kafka_code = 74


class Unavailable(TidelogError):
    """A dependency (bucket, controller, disk) does not answer now. Retriable. Kafka: REQUEST_TIMED_OUT (7)."""

    kafka_code = 7
    retriable = True
    exit_code = 5


class Overloaded(TidelogError):
    """A bound was reached and back-pressure applies. Retriable. Kafka: THROTTLING_QUOTA_EXCEEDED (89).

    Raised only where waiting is not possible; most bounds make the caller wait instead.
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
    """A file of our own on a local disk fails its check; nothing in it was changed."""

    def __init__(self, path: str, position: int, what: str, *, hint: str) -> None:
        """`position`: the byte of the file that `what` is about; what is checked as a whole begins there."""
        super().__init__(f"{path} at byte {position}: {what}", hint=hint)
        self.path = path
        self.position = position
        self.what = what


class Closed(TidelogError):
    """The object was closed by its owner; the caller should find the new one. Kafka: NOT_LEADER_OR_FOLLOWER (6)."""

    kafka_code = 6
    retriable = True
