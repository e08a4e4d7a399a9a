"""ListConfigResources (74): which resources can have configs (KIP-1142); v0 is KIP-714's list of client metrics."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.broker.kafka import named_configs
from tidelog.broker.kafka.errors import UNSUPPORTED_VERSION
from tidelog.broker.kafka.handlers.configs import BROKER, TOPIC
from tidelog.broker.kafka.loggers import BROKER_LOGGER
from tidelog.broker.kafka.named_configs import CLIENT_METRICS, GROUP
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.configs import (
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
    ListedConfigResource,
)
from tidelog.controller.image.image import Image


def _brokers(image: Image) -> list[str]:
    return [str(broker) for broker in sorted(image.brokers)]


NAMES: dict[int, Callable[[Image], list[str]]] = {
    TOPIC: lambda image: sorted(image.topic_ids),
    BROKER: _brokers,
    BROKER_LOGGER: _brokers,
    CLIENT_METRICS: lambda image: named_configs.named(image, CLIENT_METRICS),
    GROUP: lambda image: named_configs.named(image, GROUP),
}
"""The names of each type's resources. Groups are those that have configs of their own."""


async def list_config_resources(
    context: RequestContext, request: ListConfigResourcesRequest
) -> ListConfigResourcesResponse:
    """ListConfigResources v0–1. No types means all of them; an unknown one is answered with UNSUPPORTED_VERSION."""
    image: Image = context.services.controller.image
    wanted = [CLIENT_METRICS] if context.api_version == 0 else sorted(set(request.resource_types) or NAMES)
    if not all(resource_type in NAMES for resource_type in wanted):
        return ListConfigResourcesResponse(error_code=UNSUPPORTED_VERSION, config_resources=())
    return ListConfigResourcesResponse(
        error_code=0,
        config_resources=[
            ListedConfigResource(resource_name=name, resource_type=resource_type)
            for resource_type in wanted
            for name in NAMES[resource_type](image)
        ],
    )


APIS = [serve(ListConfigResourcesRequest, 0, 1, list_config_resources)]
