"""InitProducerId (22): a producer id for an idempotent producer.

Every call without a transactional id gets a new id with epoch 0; the id and epoch in v3+ matter to
transactional producers only (KIP-360). Transactions are not served yet: a transactional id is answered with
UNSUPPORTED_VERSION, which clients report as "the broker does not support this" instead of retrying indefinitely.
"""

from __future__ import annotations

import logging

from tidelog.broker.kafka.errors import COORDINATOR_LOAD_IN_PROGRESS, INVALID_REQUEST, UNSUPPORTED_VERSION
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.transactions import InitProducerIdRequest, InitProducerIdResponse
from tidelog.runtime.errors import TidelogError

logger = logging.getLogger(__name__)


async def handle(context: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Allocate an id. Without a controller: COORDINATOR_LOAD_IN_PROGRESS, which every client retries, as in Kafka."""
    producer_id, epoch, error = -1, -1, 0
    if request.transactional_id is not None:
        error = UNSUPPORTED_VERSION if request.transactional_id else INVALID_REQUEST
    else:
        try:
            producer_id = await context.services.producer_ids.next_id()
            epoch = 0
        except TidelogError as failure:
            logger.warning(
                "no producer id could be allocated", extra={"client": context.client_host, "error": str(failure)}
            )
            error = COORDINATOR_LOAD_IN_PROGRESS
    return InitProducerIdResponse(error_code=error, producer_id=producer_id, producer_epoch=epoch)


APIS = [serve(InitProducerIdRequest, 0, 5, handle)]
