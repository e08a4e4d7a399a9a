"""TxnOffsetCommit (28): offsets that a transaction commits with its records.

The offsets are written to the group's offsets partition as a batch of the producer, and are pending until the
transaction's marker. That partition must be in the transaction, or nobody would send the marker: before the first batch
the transaction's coordinator is asked. From v5 on it adds the partition (KIP-890, second part); before, the client has
done that with AddOffsetsToTxn, and the question only verifies it. So does Kafka for all of these versions; they differ
in the errors that their clients know.

Entry: `APIS`.
"""

from __future__ import annotations

from tidelog.broker.coordinators.store import TxnProducer
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC
from tidelog.broker.groups.coordinator import CONCURRENT_TRANSACTIONS
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import TxnCommitRequest
from tidelog.broker.groups.records import NO_TIMESTAMP, OffsetKey, OffsetValue
from tidelog.broker.kafka.errors import COORDINATOR_LOAD_IN_PROGRESS, INVALID_TXN_STATE, NONE
from tidelog.broker.kafka.handlers.offsets import commit_error
from tidelog.broker.kafka.handlers.transactions import without_transactions
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.offsets import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from tidelog.runtime.errors import TidelogError

ADMIT_TIMEOUT_S = 5.0
"""How long the answer of the transaction's coordinator is waited for (offsets.commit.timeout.ms)."""
NETWORK_EXCEPTION = 13
COORDINATOR_NOT_AVAILABLE = 15
TRANSACTION_ABORTABLE = 120
_FIRST_THAT_KNOWS_LOADING = 2
_FIRST_THAT_KNOWS_ABORTABLE = 4
_FIRST_THAT_ADDS = 5
_ADMISSION_CODES = {7: 15, NETWORK_EXCEPTION: COORDINATOR_LOAD_IN_PROGRESS, 14: 15, 15: 15, 16: 15, 90: 47}
"""What a client is told of its transaction's coordinator. That one is not the coordinator that the client has asked: so
NOT_COORDINATOR would say the wrong thing. A client repeats 15 after a search for the group's coordinator, and 14
(COORDINATOR_LOAD_IN_PROGRESS, for NETWORK_EXCEPTION) without. INVALID_PRODUCER_EPOCH stands for PRODUCER_FENCED, which
this API does not have."""


async def txn_offset_commit(context: RequestContext, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
    """TxnOffsetCommit v0–v5. Partitions that cannot be committed are refused individually; the others are committed."""
    now_ms = context.services.clock.time_ms()
    errors: dict[tuple[str, int], int] = {}
    offsets: list[tuple[OffsetKey, OffsetValue]] = []
    for topic in request.topics:
        for one in topic.partitions:
            at = (topic.name, one.partition_index)
            metadata = one.committed_metadata or ""
            errors[at] = commit_error(context, *at, metadata)
            if errors[at] == NONE:
                record = context.services.controller.image.topic(topic.name)
                topic_id = record.id if record is not None else b""
                epoch = one.committed_leader_epoch
                value = OffsetValue(one.committed_offset, epoch, metadata, now_ms, NO_TIMESTAMP, topic_id)
                offsets.append((OffsetKey(request.group_id, *at), value))
    outcome = await _commit(context, request, offsets)
    topics = [
        TxnOffsetCommitResponseTopic(
            name=topic.name,
            partitions=[
                TxnOffsetCommitResponsePartition(
                    partition_index=one.partition_index,
                    error_code=errors[topic.name, one.partition_index] or outcome,
                )
                for one in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return TxnOffsetCommitResponse(topics=topics)


async def _commit(
    context: RequestContext, request: TxnOffsetCommitRequest, offsets: list[tuple[OffsetKey, OffsetValue]]
) -> int:
    if without_transactions(context.services) is not None:
        return INVALID_TXN_STATE
    commit = TxnCommitRequest(
        TxnProducer(request.producer_id, request.producer_epoch),
        MemberIdentity(request.member_id, request.group_instance_id),
        request.generation_id,
        offsets,
    )

    async def admit(partition: int) -> int:
        return await _admit(context, request, partition)

    try:
        code = await context.services.groups.commit_pending(request.group_id, commit, admit)
    except TidelogError as error:
        code = error.kafka_code
    if code == COORDINATOR_LOAD_IN_PROGRESS and context.api_version < _FIRST_THAT_KNOWS_LOADING:
        return COORDINATOR_NOT_AVAILABLE  # Java's producers of before 2.0 stop at the other (KAFKA-7296)
    return code


async def _admit(context: RequestContext, request: TxnOffsetCommitRequest, partition: int) -> int:
    """Ask the transaction's coordinator about the offsets partition; returns the code for the client."""
    version = context.api_version
    code = await _ask(context, request, partition)
    if code == CONCURRENT_TRANSACTIONS and version < _FIRST_THAT_ADDS:
        return COORDINATOR_NOT_AVAILABLE
    if code == TRANSACTION_ABORTABLE and version < _FIRST_THAT_KNOWS_ABORTABLE:
        return INVALID_TXN_STATE
    return _ADMISSION_CODES.get(code, code)


async def _ask(context: RequestContext, request: TxnOffsetCommitRequest, partition: int) -> int:
    at = (OFFSETS_TOPIC, partition)
    try:
        codes = await context.services.transactions.admit(
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            [at],
            add=context.api_version >= _FIRST_THAT_ADDS,
            timeout_s=ADMIT_TIMEOUT_S,
        )
    except TidelogError as error:
        return NETWORK_EXCEPTION if error.retriable else error.kafka_code
    return codes[at]


APIS = [serve(TxnOffsetCommitRequest, 0, 5, txn_offset_commit)]
