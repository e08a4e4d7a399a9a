"""The APIs of transactions: AddPartitionsToTxn, AddOffsetsToTxn, EndTxn, WriteTxnMarkers, and those that show them.

The rules are in `tidelog.broker.txn.state`; here requests are taken apart and answers put together. AddPartitionsToTxn
v4+ and WriteTxnMarkers are for brokers, which use calls of their own here, and for administrators
(`kafka-transactions.sh abort`). InitProducerId and TxnOffsetCommit have modules of their own.

Entry: `APIS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import re2

from tidelog.broker.coordinators.topic import OFFSETS_TOPIC
from tidelog.broker.kafka.patterns import compile_pattern
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
    AddPartitionsToTxnTransaction,
    DescribedTransaction,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    EndTxnResponse,
    ListedTransaction,
    ListTransactionsRequest,
    ListTransactionsResponse,
    TransactionTopicData,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from tidelog.broker.partitions.topic_config import INTERNAL_TOPICS
from tidelog.broker.txn.calls import AdmitParams, MarkerParams, TopicPartition
from tidelog.broker.txn.errors import TxnError, told_to_client
from tidelog.broker.txn.state import STATE_NAMES, ProducerPair, TxnDescription
from tidelog.controller.model.levels import TRANSACTIONS_LEVEL
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.steps import paced

INVALID_REGULAR_EXPRESSION = 128
_FIRST_OF_BROKERS = 4
"""AddPartitionsToTxn v4 has many transactions in a request."""
_FIRST_WITH_ABORTABLE = 5
"""AddPartitionsToTxn v5 knows TRANSACTION_ABORTABLE."""
_FIRST_WITH_PAIR = 5
"""EndTxn v5 answers with the pair of the next transaction (KIP-890)."""
_EPOCH_BUMP_VERSION = 2


def without_transactions(services: Services) -> str | None:
    """Why this cluster serves no transactions; None if it does."""
    level = services.controller.image.level
    if level >= TRANSACTIONS_LEVEL:
        return None
    return (
        f"transactions are served from feature level {TRANSACTIONS_LEVEL} on; the cluster is at level {level}: "
        "run `tidelog cluster upgrade` when all brokers have the new version"
    )


# --- AddPartitionsToTxn --------------------------------------------------------------------------------------------


async def add_partitions_to_txn(
    context: RequestContext, request: AddPartitionsToTxnRequest
) -> AddPartitionsToTxnResponse:
    """AddPartitionsToTxn v0-v5; v4+ has many transactions, and may only ask."""
    if context.api_version >= _FIRST_OF_BROKERS:
        results = [await _add_for_broker(context, each) for each in request.transactions]
        return AddPartitionsToTxnResponse(results_by_transaction=results)
    topics = request.v3_and_below_topics
    codes = await _add(
        context,
        request.v3_and_below_transactional_id,
        ProducerPair(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch),
        _partitions(topics),
    )
    return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=_results(topics, codes))


async def _add(
    context: RequestContext, transactional_id: str, producer: ProducerPair, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, int]:
    """Add all partitions, or none if one does not exist, or is of an internal topic, where no client may write."""
    services = context.services
    if without_transactions(services) is not None:
        return dict.fromkeys(partitions, TxnError.INVALID_TXN_STATE)
    refused = {each: TxnError.UNKNOWN_TOPIC_OR_PARTITION for each in partitions if not services.txn.knows(each)}
    refused |= {each: TxnError.TOPIC_AUTHORIZATION_FAILED for each in partitions if each[0] in INTERNAL_TOPICS}
    if refused:
        return {each: refused.get(each, TxnError.OPERATION_NOT_ATTEMPTED) for each in partitions}
    code = await _outcome(context, transactional_id, producer, partitions)
    return dict.fromkeys(partitions, code)


async def _outcome(
    context: RequestContext, transactional_id: str, producer: ProducerPair, partitions: Sequence[TopicPartition]
) -> int:
    try:
        error = await context.services.txn_requests.add_partitions(transactional_id, producer, partitions, 0)
    except TidelogError as failure:
        return failure.kafka_code
    return told_to_client(error, context.api_key, context.api_version)


async def _add_for_broker(
    context: RequestContext, transaction: AddPartitionsToTxnTransaction
) -> AddPartitionsToTxnResult:
    partitions = _partitions(transaction.topics)
    producer = ProducerPair(transaction.producer_id, transaction.producer_epoch)
    if transaction.verify_only:
        params = AdmitParams(transaction.transactional_id, *producer, list(partitions), add=False)
        try:
            found = await context.services.txn.admit(params)
        except TidelogError as failure:
            found = [failure.kafka_code] * len(partitions)
        codes = dict(zip(partitions, found, strict=True))
        if context.api_version < _FIRST_WITH_ABORTABLE:
            abortable, known = TxnError.TRANSACTION_ABORTABLE, TxnError.INVALID_TXN_STATE
            codes = {each: known if code == abortable else code for each, code in codes.items()}
    else:
        codes = await _add(context, transaction.transactional_id, producer, partitions)
    return AddPartitionsToTxnResult(
        transactional_id=transaction.transactional_id, topic_results=_results(transaction.topics, codes)
    )


def _partitions(topics: Iterable[AddPartitionsToTxnTopic]) -> list[TopicPartition]:
    return list(dict.fromkeys((topic.name, index) for topic in topics for index in topic.partitions))


def _results(
    topics: Iterable[AddPartitionsToTxnTopic], codes: Mapping[TopicPartition, int]
) -> list[AddPartitionsToTxnTopicResult]:
    return [
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=codes[topic.name, index])
                for index in topic.partitions
            ],
        )
        for topic in topics
    ]


# --- AddOffsetsToTxn, EndTxn ---------------------------------------------------------------------------------------


async def add_offsets_to_txn(context: RequestContext, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
    """AddOffsetsToTxn v0-v4: add the group's partition of `__consumer_offsets`."""
    services = context.services
    if not request.group_id:
        return AddOffsetsToTxnResponse(error_code=_INVALID_GROUP_ID)
    if without_transactions(services) is not None:
        return AddOffsetsToTxnResponse(error_code=TxnError.INVALID_TXN_STATE)
    producer = ProducerPair(request.producer_id, request.producer_epoch)
    try:
        await services.groups.find(request.group_id)
    except TidelogError as failure:
        return AddOffsetsToTxnResponse(error_code=failure.kafka_code)
    partition = services.groups.partition_of(request.group_id)
    assert partition is not None, "its coordinator was found"
    code = await _outcome(context, request.transactional_id, producer, [(OFFSETS_TOPIC, partition)])
    return AddOffsetsToTxnResponse(error_code=code)


_INVALID_GROUP_ID = 24


async def end_txn(context: RequestContext, request: EndTxnRequest) -> EndTxnResponse:
    """EndTxn v0-v5: answered when the decision is durable; the markers follow."""
    if without_transactions(context.services) is not None:
        return EndTxnResponse(error_code=TxnError.INVALID_TXN_STATE)
    version = _EPOCH_BUMP_VERSION if context.api_version >= _FIRST_WITH_PAIR else 0
    producer = ProducerPair(request.producer_id, request.producer_epoch)
    try:
        reply = await context.services.txn_requests.end(
            request.transactional_id, producer, commit=request.committed, version=version
        )
    except TidelogError as failure:
        return EndTxnResponse(error_code=failure.kafka_code)
    error = told_to_client(reply.error, context.api_key, context.api_version)
    return EndTxnResponse(error_code=error, producer_id=reply.producer_id, producer_epoch=reply.epoch)


# --- WriteTxnMarkers -----------------------------------------------------------------------------------------------


async def write_txn_markers(context: RequestContext, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    """WriteTxnMarkers v1-v2: end hanging transactions in partitions that this broker leads."""
    markers = [
        MarkerParams(
            each.producer_id,
            each.producer_epoch,
            each.transaction_result,
            each.coordinator_epoch,
            each.transaction_version,
            [(topic.name, index) for topic in each.topics for index in topic.partition_indexes],
        )
        for each in request.markers
    ]
    codes = await context.services.marker_writer.write(markers)
    results = []
    for each, found in zip(request.markers, codes, strict=True):
        left = iter(found)
        topics = [
            WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=[
                    WritableTxnMarkerPartitionResult(partition_index=index, error_code=next(left))
                    for index in topic.partition_indexes
                ],
            )
            for topic in each.topics
        ]
        results.append(WritableTxnMarkerResult(producer_id=each.producer_id, topics=topics))
    return WriteTxnMarkersResponse(markers=results)


# --- DescribeTransactions, ListTransactions ------------------------------------------------------------------------


async def describe_transactions(
    context: RequestContext, request: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    """DescribeTransactions v0. One that is named several times is described once: it may have many partitions."""
    states = [await _describe(context, each) async for each in paced(dict.fromkeys(request.transactional_ids))]
    return DescribeTransactionsResponse(transaction_states=states)


async def _describe(context: RequestContext, transactional_id: str) -> DescribedTransaction:
    try:
        found = await context.services.txn.describe(transactional_id)
    except TidelogError as failure:
        return DescribedTransaction(error_code=failure.kafka_code, transactional_id=transactional_id)
    if found is None:
        error = TxnError.TRANSACTIONAL_ID_NOT_FOUND
        return DescribedTransaction(error_code=error, transactional_id=transactional_id)
    by_topic: dict[str, list[int]] = {}
    for topic, index in sorted(found.partitions):
        by_topic.setdefault(topic, []).append(index)
    return DescribedTransaction(
        error_code=0,
        transactional_id=transactional_id,
        transaction_state=found.state,
        transaction_timeout_ms=found.timeout_ms,
        transaction_start_time_ms=found.started_ms,
        producer_id=found.producer_id,
        producer_epoch=found.epoch,
        topics=[TransactionTopicData(topic=topic, partitions=indexes) for topic, indexes in by_topic.items()],
    )


async def list_transactions(context: RequestContext, request: ListTransactionsRequest) -> ListTransactionsResponse:
    """ListTransactions v0-v2: the ids of the state partitions led here that match all filters."""
    pattern = None
    if request.transactional_id_pattern:
        try:
            pattern = compile_pattern(request.transactional_id_pattern)
        except re2.error:
            return ListTransactionsResponse(error_code=INVALID_REGULAR_EXPRESSION)
    try:
        found = context.services.txn.list_transactions()
    except TidelogError as failure:
        return ListTransactionsResponse(error_code=failure.kafka_code)
    states = frozenset(request.state_filters)
    ids = frozenset(request.producer_id_filters)

    def matches(one: TxnDescription) -> bool:
        return (
            (not states or one.state in states)
            and (not ids or one.producer_id in ids)
            and (request.duration_filter < 0 or context.services.txn.age_ms(one) > request.duration_filter)
            and (pattern is None or pattern.fullmatch(one.transactional_id) is not None)
        )

    listed = [
        ListedTransaction(
            transactional_id=one.transactional_id, producer_id=one.producer_id, transaction_state=one.state
        )
        for one in found
        if matches(one)
    ]
    unknown = [name for name in request.state_filters if name not in STATE_NAMES.values()]
    return ListTransactionsResponse(error_code=0, unknown_state_filters=unknown, transaction_states=listed)


APIS = [
    serve(AddPartitionsToTxnRequest, 0, 5, add_partitions_to_txn),
    serve(AddOffsetsToTxnRequest, 0, 4, add_offsets_to_txn),
    serve(EndTxnRequest, 0, 5, end_txn),
    serve(WriteTxnMarkersRequest, 1, 2, write_txn_markers),
    serve(DescribeTransactionsRequest, 0, 0, describe_transactions),
    serve(ListTransactionsRequest, 0, 2, list_transactions),
]
