"""Messages about transactions: their producers, partitions, markers and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message


class InitProducerIdRequest(KafkaRequest):
    """InitProducerId (22), versions 0 to 6."""

    API_KEY: ClassVar[int] = 22

    transactional_id: str | None
    transaction_timeout_ms: int
    producer_id: int = -1  # v3+
    producer_epoch: int = -1  # v3+
    enable2_pc: bool = False  # v6+
    keep_prepared_txn: bool = False  # v6+


class InitProducerIdResponse(KafkaResponse):
    """InitProducerId (22), versions 0 to 6."""

    error_code: int
    producer_id: int = -1
    producer_epoch: int = -1
    ongoing_txn_producer_id: int = -1  # v6+
    ongoing_txn_producer_epoch: int = -1  # v6+
    throttle_time_ms: int = 0


class AddPartitionsToTxnTopic(Message):
    """An element of `AddPartitionsToTxnTransaction.topics`."""

    name: str
    partitions: tuple[int, ...]


class AddPartitionsToTxnTransaction(Message):
    """An element of `AddPartitionsToTxnRequest.transactions`."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    topics: tuple[AddPartitionsToTxnTopic, ...]
    verify_only: bool = False


class AddPartitionsToTxnRequest(KafkaRequest):
    """AddPartitionsToTxn (24), versions 0 to 5."""

    API_KEY: ClassVar[int] = 24

    transactions: tuple[AddPartitionsToTxnTransaction, ...] = ()  # v4+
    v3_and_below_transactional_id: str = ""
    v3_and_below_producer_id: int = -1
    v3_and_below_producer_epoch: int = -1
    v3_and_below_topics: tuple[AddPartitionsToTxnTopic, ...] = ()


class AddPartitionsToTxnPartitionResult(Message):
    """An element of `AddPartitionsToTxnTopicResult.results_by_partition`."""

    partition_index: int
    partition_error_code: int


class AddPartitionsToTxnTopicResult(Message):
    """An element of `AddPartitionsToTxnResult.topic_results`."""

    name: str
    results_by_partition: Sequence[AddPartitionsToTxnPartitionResult]


class AddPartitionsToTxnResult(Message):
    """An element of `AddPartitionsToTxnResponse.results_by_transaction`."""

    transactional_id: str
    topic_results: Sequence[AddPartitionsToTxnTopicResult]


class AddPartitionsToTxnResponse(KafkaResponse):
    """AddPartitionsToTxn (24), versions 0 to 5."""

    error_code: int = 0  # v4+
    results_by_transaction: Sequence[AddPartitionsToTxnResult] = ()  # v4+
    results_by_topic_v3_and_below: Sequence[AddPartitionsToTxnTopicResult] = ()
    throttle_time_ms: int = 0


class AddOffsetsToTxnRequest(KafkaRequest):
    """AddOffsetsToTxn (25), versions 0 to 4."""

    API_KEY: ClassVar[int] = 25

    transactional_id: str
    producer_id: int
    producer_epoch: int
    group_id: str


class AddOffsetsToTxnResponse(KafkaResponse):
    """AddOffsetsToTxn (25), versions 0 to 4."""

    error_code: int
    throttle_time_ms: int = 0


class EndTxnRequest(KafkaRequest):
    """EndTxn (26), versions 0 to 5."""

    API_KEY: ClassVar[int] = 26

    transactional_id: str
    producer_id: int
    producer_epoch: int
    committed: bool


class EndTxnResponse(KafkaResponse):
    """EndTxn (26), versions 0 to 5."""

    error_code: int
    producer_id: int = -1  # v5+
    producer_epoch: int = -1  # v5+
    throttle_time_ms: int = 0


class WritableTxnMarkerTopic(Message):
    """An element of `WritableTxnMarker.topics`."""

    name: str
    partition_indexes: tuple[int, ...]


class WritableTxnMarker(Message):
    """An element of `WriteTxnMarkersRequest.markers`."""

    producer_id: int
    producer_epoch: int
    transaction_result: bool
    topics: tuple[WritableTxnMarkerTopic, ...]
    coordinator_epoch: int
    transaction_version: int = 0  # v2+


class WriteTxnMarkersRequest(KafkaRequest):
    """WriteTxnMarkers (27), versions 1 to 2."""

    API_KEY: ClassVar[int] = 27

    markers: tuple[WritableTxnMarker, ...]


class WritableTxnMarkerPartitionResult(Message):
    """An element of `WritableTxnMarkerTopicResult.partitions`."""

    partition_index: int
    error_code: int


class WritableTxnMarkerTopicResult(Message):
    """An element of `WritableTxnMarkerResult.topics`."""

    name: str
    partitions: Sequence[WritableTxnMarkerPartitionResult]


class WritableTxnMarkerResult(Message):
    """An element of `WriteTxnMarkersResponse.markers`."""

    producer_id: int
    topics: Sequence[WritableTxnMarkerTopicResult]


class WriteTxnMarkersResponse(KafkaResponse):
    """WriteTxnMarkers (27), versions 1 to 2."""

    markers: Sequence[WritableTxnMarkerResult]


class DescribeTransactionsRequest(KafkaRequest):
    """DescribeTransactions (65), version 0."""

    API_KEY: ClassVar[int] = 65

    transactional_ids: tuple[str, ...]


class TransactionTopicData(Message):
    """An element of `DescribedTransaction.topics`."""

    topic: str
    partitions: Sequence[int]


class DescribedTransaction(Message):
    """An element of `DescribeTransactionsResponse.transaction_states`."""

    error_code: int
    transactional_id: str
    transaction_state: str = ""
    transaction_timeout_ms: int = 0
    transaction_start_time_ms: int = -1
    producer_id: int = -1
    producer_epoch: int = -1
    topics: Sequence[TransactionTopicData] = ()


class DescribeTransactionsResponse(KafkaResponse):
    """DescribeTransactions (65), version 0."""

    transaction_states: Sequence[DescribedTransaction]
    throttle_time_ms: int = 0


class ListTransactionsRequest(KafkaRequest):
    """ListTransactions (66), versions 0 to 2."""

    API_KEY: ClassVar[int] = 66

    state_filters: tuple[str, ...]
    producer_id_filters: tuple[int, ...]
    duration_filter: int = -1  # v1+
    transactional_id_pattern: str | None = None  # v2+


class ListedTransaction(Message):
    """An element of `ListTransactionsResponse.transaction_states`."""

    transactional_id: str
    producer_id: int
    transaction_state: str


class ListTransactionsResponse(KafkaResponse):
    """ListTransactions (66), versions 0 to 2."""

    error_code: int
    unknown_state_filters: Sequence[str] = ()
    transaction_states: Sequence[ListedTransaction] = ()
    throttle_time_ms: int = 0
