"""UnregisterBroker (64): takes a broker out of the cluster, as `tidelog broker remove` does.

Kafka forgets the registration of a broker that may still lead partitions. Here a broker is removed that is drained, or
dead and owns nothing; for any other the answer says what to do first.
"""

from __future__ import annotations

from tidelog.broker.kafka.errors import BROKER_ID_NOT_REGISTERED
from tidelog.broker.kafka.handlers.admin_errors import outcome
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.cluster import UnregisterBrokerRequest, UnregisterBrokerResponse


async def unregister_broker(context: RequestContext, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
    """UnregisterBroker v0. Answers BROKER_ID_NOT_REGISTERED if there is no such broker."""
    services, broker_id = context.services, request.broker_id
    caught_up = await outcome(services.controller.catch_up())
    if caught_up.code:
        return UnregisterBrokerResponse(error_code=caught_up.code, error_message=caught_up.message)
    if broker_id not in services.controller.image.brokers:
        return UnregisterBrokerResponse(
            error_code=BROKER_ID_NOT_REGISTERED, error_message=f"there is no broker {broker_id}"
        )
    done = await outcome(services.remove_broker(broker_id))
    return UnregisterBrokerResponse(error_code=done.code, error_message=done.message)


APIS = [serve(UnregisterBrokerRequest, 0, 0, unregister_broker)]
