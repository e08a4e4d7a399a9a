"""Errors of the controller, and their encoding on the wire.

An error is sent as its class name, its message and hint, and its plain attributes (`CommitGap.stream_id`). The receiver
looks up the name among all loaded subclasses of `TidelogError`; an unknown name becomes a `RemoteError` with the same
text. Only `TidelogError` is sent.

Entry: `to_wire`, `from_wire`.
"""

from __future__ import annotations

import msgspec

from tidelog.runtime.errors import AlreadyExists, Fenced, InvalidInput, NotFound, TidelogError, Unavailable


class NotController(Unavailable):
    """This member is not the active controller; try another member. Kafka: NOT_CONTROLLER (41)."""

    kafka_code = 41
    address: str = ""
    """`host:port` of the active controller, if known."""

    def endpoint(self) -> tuple[str, int] | None:
        """Return `address` as host and port."""
        host, _, port = self.address.rpartition(":")
        return (host.strip("[]"), int(port)) if port.isdecimal() else None


class OtherCluster(NotController):
    """This member belongs to another cluster than the caller; try another member."""


class ImageTransferLost(Unavailable):
    """A request does not continue a transfer of this connection; load the image from its beginning."""


class OutcomeUnknown(Unavailable):
    """The command may or may not take effect. Retry it with the same dedupe id."""


class TopicExists(AlreadyExists):
    """A topic of this name exists. Kafka: TOPIC_ALREADY_EXISTS (36)."""

    kafka_code = 36


class InvalidTopic(InvalidInput):
    """The name is not legal, or collides with another in metrics ('.' and '_'). Kafka: INVALID_TOPIC_EXCEPTION (17)."""

    kafka_code = 17


class InvalidPartitions(InvalidInput):
    """The partition count is out of range. Kafka: INVALID_PARTITIONS (37)."""

    kafka_code = 37


class InvalidReplicationFactor(InvalidInput):
    """No replica set that is alive, and large enough, takes a partition. Kafka: INVALID_REPLICATION_FACTOR (38)."""

    kafka_code = 38
    retriable = True


class InvalidReplicaAssignment(InvalidInput):
    """An assignment names unknown replica sets or has the wrong length. Kafka: INVALID_REPLICA_ASSIGNMENT (39)."""

    kafka_code = 39


class UnknownTopicId(NotFound):
    """No topic has this id. Kafka: UNKNOWN_TOPIC_ID (100)."""

    kafka_code = 100


class ConfigsChanged(Unavailable):
    """The configs are not those that a change was computed from. Read them again, and compute it anew."""


class TopicIdTaken(InvalidInput):
    """The random topic id of a command is in use. Retry with another."""


class BrokerIdInUse(AlreadyExists):
    """Another live broker has this id. Kafka: DUPLICATE_BROKER_REGISTRATION (101)."""

    kafka_code = 101


class DirectoryInUse(BrokerIdInUse):
    """A live broker uses another copy of this data directory. Kafka: DUPLICATE_BROKER_REGISTRATION (101)."""

    exit_code = 9


class StaleBrokerEpoch(Fenced):
    """The broker has registered again since (a newer process). Kafka: STALE_BROKER_EPOCH (77)."""

    kafka_code = 77


class NotEligible(Fenced):
    """The broker may not become master: not alive or not in sync. Kafka: ELIGIBLE_LEADERS_NOT_AVAILABLE (83)."""

    kafka_code = 83


class ConfigurationRefused(InvalidInput):
    """A SyncStateSet or write quorum that a master asked for is not allowed. Its epochs are current.

    So no earlier copy of the request has taken effect. Every other refusal leaves that open: a master may forget what
    it asked for after this one only, and only if no copy is still on its way (`after_all` of the client).
    """


class BrokerNotDrained(InvalidInput):
    """The broker is alive and in use, or owns partitions: it cannot be removed."""


class NoPlaceToDrain(InvalidInput):
    """No other live broker can take the partitions."""


class RestartRefused(TidelogError):
    """A broker is not to be restarted now: another one is away, or a replica set cannot do without it."""

    retriable = True
    exit_code = 5


class TargetNotAlive(NotEligible):
    """The target of a partition's move is not alive. Kafka: PREFERRED_LEADER_NOT_AVAILABLE (80)."""

    kafka_code = 80
    retriable = True


class NoReassignmentInProgress(TidelogError):
    """The partition is not being moved. Kafka: NO_REASSIGNMENT_IN_PROGRESS (85)."""

    kafka_code = 85


class NotHandedOver(TidelogError):
    """The streams of the partition are still open, or hold records that are not in the bucket.

    Kafka: PREFERRED_LEADER_NOT_AVAILABLE (80).
    """

    kafka_code = 80
    retriable = True


class StaleCommand(InvalidInput):
    """The dedupe id is older than the results that the controller keeps."""


class CommandFailed(TidelogError):
    """Applying the command raised an unexpected exception and changed nothing. Every controller logs the traceback.

    The message names the command's kind and index only: it is kept in the replicated state, where the exception's text
    would differ between members.
    """


class RemoteError(TidelogError):
    """An error of a class that this process does not know (of a newer controller)."""


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error on the wire."""

    name: str
    """Class name."""
    message: str
    hint: str | None
    fields: dict[str, int | str | None]
    """Plain attributes beyond message and hint."""


def to_wire(error: TidelogError) -> ErrorInfo:
    """Encode an error."""
    fields = {
        key: value
        for key, value in vars(error).items()
        if key not in ("message", "hint") and not key.startswith("_") and isinstance(value, int | str | None)
    }
    return ErrorInfo(type(error).__name__, error.message, error.hint, fields)


def _find_class(name: str) -> type[TidelogError] | None:
    pending: list[type[TidelogError]] = [TidelogError]
    while pending:
        candidate = pending.pop()
        if candidate.__name__ == name:
            return candidate
        pending.extend(candidate.__subclasses__())
    return None


def from_wire(info: ErrorInfo) -> TidelogError:
    """Decode an error, as an instance of the same class if this process has it."""
    kind = _find_class(info.name)
    if kind is None:
        return RemoteError(f"{info.name}: {info.message}", hint=info.hint)
    error = kind.__new__(kind)
    TidelogError.__init__(error, info.message, hint=info.hint)
    for key, value in info.fields.items():
        setattr(error, key, value)
    return error
