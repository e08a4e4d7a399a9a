"""InitProducerId (22): a producer id for an idempotent producer, or the producer id of a transactional id.

A call without a transactional id gets a new id with epoch 0. One with a transactional id asks its coordinator
(`tidelog.broker.txn.requests`): it fences the producers that had the id before (KIP-98, KIP-360, KIP-939).
"""

from __future__ import annotations

import logging

from tidelog.broker.kafka.errors import COORDINATOR_LOAD_IN_PROGRESS, UNSUPPORTED_VERSION
from tidelog.broker.kafka.handlers.transactions import without_transactions
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.transactions import InitProducerIdRequest, InitProducerIdResponse
from tidelog.broker.txn.errors import told_to_client
from tidelog.broker.txn.state import InitRequest
from tidelog.runtime.errors import TidelogError

logger = logging.getLogger(__name__)


async def handle(context: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Allocate an id. Without a controller: COORDINATOR_LOAD_IN_PROGRESS, which every client retries, as in Kafka."""
    if request.transactional_id is not None:
        return await _transactional(context, request.transactional_id, request)
    try:
        producer_id = await context.services.producer_ids.next_id()
    except TidelogError as failure:
        return InitProducerIdResponse(error_code=_not_allocated(context, failure))
    return InitProducerIdResponse(error_code=0, producer_id=producer_id, producer_epoch=0)


def _not_allocated(context: RequestContext, failure: TidelogError) -> int:
    extra = {"client": context.client_host, "error": str(failure)}
    logger.warning("no producer id could be allocated", extra=extra)
    return COORDINATOR_LOAD_IN_PROGRESS


async def _transactional(
    context: RequestContext, transactional_id: str, request: InitProducerIdRequest
) -> InitProducerIdResponse:
    if without_transactions(context.services) is not None:
        return InitProducerIdResponse(error_code=UNSUPPORTED_VERSION)
    asked = InitRequest(
        request.transaction_timeout_ms,
        request.producer_id,
        request.producer_epoch,
        request.enable2_pc,
        request.keep_prepared_txn,
    )
    try:
        reply = await context.services.txn_requests.init_producer_id(transactional_id, asked)
    except TidelogError as failure:
        return InitProducerIdResponse(error_code=failure.kafka_code)
    return InitProducerIdResponse(
        error_code=told_to_client(reply.error, request.API_KEY, context.api_version),
        producer_id=reply.producer_id,
        producer_epoch=reply.epoch,
        ongoing_txn_producer_id=reply.ongoing_producer_id,
        ongoing_txn_producer_epoch=reply.ongoing_epoch,
    )


APIS = [serve(InitProducerIdRequest, 0, 6, handle)]
