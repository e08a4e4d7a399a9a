"""The Kafka error codes of transactions, and what becomes of a code on its way to a client.

Entry: `TxnError`; `append_failure` for a state record that could not be written, `told_to_client` for a request of an
old version.
"""

from __future__ import annotations

from enum import IntEnum


class TxnError(IntEnum):
    """Kafka's error codes (int16) used by transactions."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_LEADER_OR_FOLLOWER = 6
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    TOPIC_AUTHORIZATION_FAILED = 29
    INVALID_REQUEST = 42
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    PRODUCER_FENCED = 90
    TRANSACTIONAL_ID_NOT_FOUND = 105
    TRANSACTION_ABORTABLE = 120


_NOT_AVAILABLE = frozenset((3, 7, 19, 20))
"""UNKNOWN_TOPIC_OR_PARTITION, REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS (before and after the append)."""
_MOVED = frozenset((6, 56))
"""NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR."""

_FIRST_VERSION_THAT_KNOWS_FENCED = {22: 4, 24: 2, 25: 2, 26: 2}
"""By API key: InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn (KIP-588)."""


def append_failure(code: int) -> TxnError:
    """What a caller is told when the append of its state record failed with the Kafka error `code`.

    Kafka's mapping: what a retry here may mend is COORDINATOR_NOT_AVAILABLE, what another broker serves is
    NOT_COORDINATOR, and all else UNKNOWN_SERVER_ERROR.
    """
    if code in _NOT_AVAILABLE:
        return TxnError.COORDINATOR_NOT_AVAILABLE
    return TxnError.NOT_COORDINATOR if code in _MOVED else TxnError.UNKNOWN_SERVER_ERROR


def told_to_client(error: TxnError, api_key: int, api_version: int) -> TxnError:
    """The code for a client: INVALID_PRODUCER_EPOCH in place of PRODUCER_FENCED where the version does not know that.

    PRODUCER_FENCED came with InitProducerId v4 and AddPartitionsToTxn, AddOffsetsToTxn and EndTxn v2 (KIP-588).
    """
    if error is TxnError.PRODUCER_FENCED and api_version < _FIRST_VERSION_THAT_KNOWS_FENCED.get(api_key, 0):
        return TxnError.INVALID_PRODUCER_EPOCH
    return error
