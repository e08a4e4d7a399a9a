"""GetTelemetrySubscriptions (71) and PushTelemetry (72): clients send their metrics to the broker (KIP-714).

They become metrics of this broker's `/metrics` (`tidelog.broker.telemetry.client_metrics`). Without a subscription, or
with `kafka.telemetry_max_bytes=0`, ApiVersions does not list these APIs, as Kafka's brokers without a receiver of
metrics. Clients that connect later see them; one that knows them goes on asking.
"""

from __future__ import annotations

from tidelog.broker.kafka.client_telemetry import ACCEPTED_CODECS
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.telemetry import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
    PushTelemetryRequest,
    PushTelemetryResponse,
)


def _facts(context: RequestContext) -> dict[str, str]:
    return {**context.extra, "client_id": context.client_id or "", "client_source_address": context.client_host}


async def get_telemetry_subscriptions(
    context: RequestContext, request: GetTelemetrySubscriptionsRequest
) -> GetTelemetrySubscriptionsResponse:
    """GetTelemetrySubscriptions v0."""
    services = context.services
    told = services.telemetry.subscribe(request.client_instance_id, _facts(context), services.clock.monotonic())
    if isinstance(told, int):
        return GetTelemetrySubscriptionsResponse(error_code=told)
    return GetTelemetrySubscriptionsResponse(
        client_instance_id=told.id,
        subscription_id=told.subscription_id,
        accepted_compression_types=ACCEPTED_CODECS,
        push_interval_ms=told.interval_ms,
        telemetry_max_bytes=services.telemetry.max_bytes,
        requested_metrics=told.metrics,
    )


async def push_telemetry(context: RequestContext, request: PushTelemetryRequest) -> PushTelemetryResponse:
    """PushTelemetry v0."""
    services = context.services
    code = services.telemetry.push(request, _facts(context), services.clock.monotonic())
    return PushTelemetryResponse(error_code=code)


APIS = [
    serve(GetTelemetrySubscriptionsRequest, 0, 0, get_telemetry_subscriptions),
    serve(PushTelemetryRequest, 0, 0, push_telemetry),
]
