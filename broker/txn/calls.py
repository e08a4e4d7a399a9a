"""What brokers say to each other about transactions (`tidelog.broker.partitions.peers`), as msgpack arrays.

`txn_admit` asks the coordinator of a transactional id whether partitions are in its transaction, or adds them.
`txn_markers` asks the leaders of partitions to write the markers of ended transactions. Both answer with Kafka's error
codes, one for each partition in the order of the question. `txn_request` passes a client's request on to the
coordinator (`tidelog.broker.txn.requests`). A receiver reads what it knows of a longer array, so fields are only ever
added at the end, with defaults.

Invariants: a question names at most `MAX_PARTITIONS` partitions; a longer one is refused before it is acted on.

Entry: `AdmitParams`, `MarkersParams`, `TxnRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidelog.broker.txn.state import TxnReply
from tidelog.runtime.errors import CorruptData, InvalidInput
from tidelog.runtime.msgpack import DECODE_ERRORS

ADMIT = "txn_admit"
MARKERS = "txn_markers"
REQUEST = "txn_request"
MAX_PARTITIONS = 10_000
"""Bound of the partitions of one call."""

TopicPartition = tuple[str, int]
"""The name of a topic and the index of a partition."""


class AdmitParams(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of `txn_admit`; the result is a list of error codes (int16)."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: list[TopicPartition]
    add: bool
    """Add them to the transaction (KIP-890, Produce v12+); else they are only looked up."""
    topic_ids: dict[str, bytes] = {}
    """Of the topics that who asks has under these names; brokers of older versions tell none."""


class MarkerParams(msgspec.Struct, frozen=True, array_like=True):
    """The marker of one transaction."""

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int
    """Leader epoch of the coordinator's state partition (int32)."""
    transaction_version: int
    """2: the epoch is above that of the transaction's batches (KIP-890)."""
    partitions: list[TopicPartition]
    topic_ids: dict[str, bytes] = {}
    """Of the topics that the coordinator had under these names; brokers of older versions tell none."""


class MarkersParams(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of `txn_markers`; the result is a list of error codes for each marker."""

    markers: list[MarkerParams]


class InitCall(msgspec.Struct, frozen=True, array_like=True, tag="init"):
    """InitProducerId, as `InitRequest` has it."""

    transactional_id: str
    timeout_ms: int
    producer_id: int
    epoch: int
    enable_2pc: bool
    keep_prepared: bool


class AddCall(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """AddPartitionsToTxn and AddOffsetsToTxn."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: list[TopicPartition]
    version: int
    """The transaction version (KIP-890)."""


class EndCall(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """EndTxn."""

    transactional_id: str
    producer_id: int
    epoch: int
    commit: bool
    version: int
    """The transaction version (KIP-890)."""


TxnRequest = InitCall | AddCall | EndCall
"""Parameters of `txn_request`; the result are the fields of a `TxnReply`."""

_request: msgspec.msgpack.Decoder[TxnRequest] = msgspec.msgpack.Decoder(TxnRequest)
_reply = msgspec.msgpack.Decoder(TxnReply)
_admit = msgspec.msgpack.Decoder(AdmitParams)
_markers = msgspec.msgpack.Decoder(MarkersParams)
_codes = msgspec.msgpack.Decoder(list[int])
_codes_of_markers = msgspec.msgpack.Decoder(list[list[int]])


def read_admit(raw: msgspec.Raw) -> AdmitParams:
    """Decode the parameters of `txn_admit`. Raises `InvalidInput`."""
    try:
        params = _admit.decode(raw)
    except DECODE_ERRORS as error:
        raise InvalidInput(f"these are no parameters of {ADMIT}: {error}") from error
    _check_count(len(params.partitions))
    return params


def read_markers(raw: msgspec.Raw) -> MarkersParams:
    """Decode the parameters of `txn_markers`. Raises `InvalidInput`."""
    try:
        params = _markers.decode(raw)
    except DECODE_ERRORS as error:
        raise InvalidInput(f"these are no parameters of {MARKERS}: {error}") from error
    _check_count(sum(len(marker.partitions) for marker in params.markers))
    return params


def read_request(raw: msgspec.Raw) -> TxnRequest:
    """Decode the parameters of `txn_request`. Raises `InvalidInput`."""
    try:
        params = _request.decode(raw)
    except DECODE_ERRORS as error:
        raise InvalidInput(f"these are no parameters of {REQUEST}: {error}") from error
    if isinstance(params, AddCall):
        _check_count(len(params.partitions))
    return params


def read_reply(raw: msgspec.Raw) -> TxnReply:
    """Decode the result of `txn_request`. Raises `CorruptData`."""
    try:
        return _reply.decode(raw)
    except DECODE_ERRORS as error:
        raise CorruptData(f"this is no result of {REQUEST}: {error}") from error


def _check_count(partitions: int) -> None:
    if partitions > MAX_PARTITIONS:
        raise InvalidInput(f"{partitions} partitions in one call are more than {MAX_PARTITIONS}")


def read_codes(raw: msgspec.Raw, count: int) -> list[int]:
    """Decode the result of `txn_admit` for `count` partitions. Raises `CorruptData`."""
    try:
        codes = _codes.decode(raw)
    except DECODE_ERRORS as error:
        raise CorruptData(f"this is no result of {ADMIT}: {error}") from error
    if len(codes) != count:
        raise CorruptData(f"{len(codes)} results of {ADMIT} for {count} partitions")
    return codes


def read_codes_of_markers(raw: msgspec.Raw, markers: Sequence[MarkerParams]) -> list[list[int]]:
    """Decode the result of `txn_markers`. Raises `CorruptData`."""
    try:
        codes = _codes_of_markers.decode(raw)
    except DECODE_ERRORS as error:
        raise CorruptData(f"this is no result of {MARKERS}: {error}") from error
    if [len(each) for each in codes] != [len(marker.partitions) for marker in markers]:
        raise CorruptData(f"the results of {MARKERS} do not match its markers")
    return codes
