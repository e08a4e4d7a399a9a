"""InitProducerId (22): a producer id for an idempotent producer.

Every call without a transactional id gets a fresh id with epoch 0; the id and epoch that v3+ may carry matter to
transactional producers only (KIP-360). Transactions are not served yet: a transactional id is answered with
UNSUPPORTED_VERSION, which clients report as "the broker does not support this" instead of retrying for ever.
"""

from __future__ import annotations

import logging
from typing import Any

from broker.errors import COORDINATOR_LOAD_IN_PROGRESS, INVALID_REQUEST, UNSUPPORTED_VERSION
from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from runtime.errors import TidelogError

log = logging.getLogger(__name__)

API_KEY = 22


async def handle(context: RequestContext, request: Any) -> Any:
    """Give out an id. Without a controller: COORDINATOR_LOAD_IN_PROGRESS, which every client retries, as Kafka says."""
    producer_id, epoch, error = -1, -1, 0
    if request.transactional_id is not None:
        error = UNSUPPORTED_VERSION if request.transactional_id else INVALID_REQUEST
    else:
        try:
            producer_id = await context.services.producer_ids.next_id()
            epoch = 0
        except TidelogError as failure:
            log.warning("no producer id could be given", extra={"client": context.client_host, "error": str(failure)})
            error = COORDINATOR_LOAD_IN_PROGRESS
    return schema.response(API_KEY, context.api_version).make(
        "InitProducerIdResponse", throttle_time=0, error_code=error, producer_id=producer_id, producer_epoch=epoch
    )


APIS = [ApiHandler(API_KEY, 0, 5, handle)]
