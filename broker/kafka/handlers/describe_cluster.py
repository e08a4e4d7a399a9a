"""DescribeCluster: the living brokers (from v2 on request also the others), and the cluster id."""

from __future__ import annotations

from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)

BROKERS, CONTROLLERS = 1, 2
MISMATCHED_ENDPOINT_TYPE = 114
UNSUPPORTED_ENDPOINT_TYPE = 115
NOT_ASKED = -(1 << 31)

CLUSTER_OPERATIONS = sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))
"""Create, alter, describe, cluster action, describe and alter configs, idempotent write: all, without an authorizer."""


async def describe_cluster(context: RequestContext, request: DescribeClusterRequest) -> DescribeClusterResponse:
    """DescribeCluster v0–2. Controllers (endpoint type 2) do not serve the Kafka protocol."""
    services = context.services
    image = services.controller.image
    endpoint = request.endpoint_type
    code, message = 0, None
    if endpoint == CONTROLLERS:
        code, message = (
            MISMATCHED_ENDPOINT_TYPE,
            "this is a broker's endpoint; controllers do not speak Kafka's protocol",
        )
    elif endpoint != BROKERS:
        code, message = UNSUPPORTED_ENDPOINT_TYPE, f"endpoint type {endpoint}: 1 (brokers) is served"
    fenced_too = request.include_fenced_brokers
    listed = [image.brokers[broker] for broker in sorted(image.brokers)] if code == 0 else []
    return DescribeClusterResponse(
        error_code=code,
        error_message=message,
        endpoint_type=endpoint,
        cluster_id=image.cluster_id,
        controller_id=services.named_controller if code == 0 else -1,
        brokers=[
            DescribeClusterBroker(
                broker_id=broker.id,
                host=broker.host,
                port=broker.port,
                rack=broker.rack or None,
                is_fenced=not broker.alive,
            )
            for broker in listed
            if broker.alive or fenced_too
        ],
        cluster_authorized_operations=CLUSTER_OPERATIONS
        if request.include_cluster_authorized_operations
        else NOT_ASKED,
    )


APIS = [serve(DescribeClusterRequest, 0, 2, describe_cluster)]
