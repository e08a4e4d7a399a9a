"""Errors of confluent-kafka as those of Tidelog, for the console and the command line.

Entry: `translate`, `record_headers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidelog.runtime.errors import (
    AlreadyExists,
    CorruptData,
    InvalidInput,
    NotFound,
    StorageFailed,
    TidelogError,
    Unavailable,
)

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException, Message

START_HINT: Final = "start one with `tidelog up`, or name a broker with --bootstrap HOST:PORT"


def translate(error: KafkaException | KafkaError, what: str = "") -> TidelogError:
    """Convert an error of confluent-kafka to a `TidelogError`; the message begins with `what`."""
    from confluent_kafka import KafkaException

    cause: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
    kind, hint = _kinds().get(cause.code(), (TidelogError, None))
    if kind is TidelogError and cause.retriable():
        kind = Unavailable
    text = cause.str() or cause.name()
    return kind(f"{what}: {text}" if what else text, hint=hint)


def record_headers(message: Message) -> list[tuple[str, Any]] | None:
    """Return a record's headers; None if one has a name that is no UTF-8, for then the library tells none of them."""
    try:
        headers = message.headers()
    except (SystemError, UnicodeDecodeError):  # it raises the second one, and the interpreter turns it into the first
        return None
    return list(headers.items()) if isinstance(headers, dict) else list(headers or [])


def _kinds() -> dict[int, tuple[type[TidelogError], str | None]]:
    """Kafka error code → kind of error and hint."""
    from confluent_kafka import KafkaError as K

    rows: list[tuple[type[TidelogError], str | None, tuple[int, ...]]] = [
        (NotFound, "`tidelog topic list` shows the topics", (K.UNKNOWN_TOPIC_OR_PART, K._UNKNOWN_TOPIC)),
        (NotFound, "`tidelog topic describe` shows the partitions", (K._UNKNOWN_PARTITION,)),
        (NotFound, "`tidelog group list` shows the groups", (K.GROUP_ID_NOT_FOUND,)),
        (AlreadyExists, "`tidelog topic describe` shows it; --if-not-exists accepts it", (K.TOPIC_ALREADY_EXISTS,)),
        (InvalidInput, None, (K.TOPIC_EXCEPTION, K.INVALID_PARTITIONS, K.INVALID_REPLICATION_FACTOR, K._INVALID_ARG)),
        (InvalidInput, None, (K.INVALID_REPLICA_ASSIGNMENT, K.INVALID_REQUEST, K.POLICY_VIOLATION, K.INVALID_GROUP_ID)),
        (InvalidInput, "`tidelog topic describe NAME --configs` shows what a topic has", (K.INVALID_CONFIG,)),
        (InvalidInput, "see max.message.bytes in `tidelog topic describe`", (K.MSG_SIZE_TOO_LARGE,)),
        (InvalidInput, "see message.timestamp.*.max.ms in `tidelog topic describe`", (K.INVALID_TIMESTAMP,)),
        (Unavailable, "stop its members first; `tidelog group describe` shows them", (K.NON_EMPTY_GROUP,)),
        (Unavailable, START_HINT, (K._TRANSPORT, K._ALL_BROKERS_DOWN, K._RESOLVE)),
        (Unavailable, "try again; see `tidelog status`", (K._TIMED_OUT, K._MSG_TIMED_OUT, K.REQUEST_TIMED_OUT)),
        (Unavailable, "try again; see `tidelog status`", (K.LEADER_NOT_AVAILABLE, K.NOT_LEADER_FOR_PARTITION)),
        (Unavailable, "try again; see `tidelog status`", (K._NOENT,)),  # "no leaders found", of the library itself
        (StorageFailed, "see `tidelog status`", (K.KAFKA_STORAGE_ERROR,)),
        (CorruptData, "see `tidelog status`", (K.INVALID_MSG, K._BAD_MSG)),
    ]
    return {code: (kind, hint) for kind, hint, codes in rows for code in codes}
