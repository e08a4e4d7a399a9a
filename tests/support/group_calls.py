"""Group requests as a client sends them: through its bytes, the handler, and the bytes of the response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kio.index import load_request_schema

from tests.support import schema
from tests.support.group_world import NODE, World
from tidelog.broker.kafka.handlers import find_coordinator, groups, offsets, txn_offsets
from tidelog.broker.kafka.services import RequestContext
from tidelog.broker.kafka.wire.messages import REQUESTS
from tidelog.broker.kafka.wire.messages.base import KafkaResponse
from tidelog.broker.kafka.wire.reader import request_reader

APIS = {api.api_key: api for api in [*find_coordinator.APIS, *groups.APIS, *offsets.APIS, *txn_offsets.APIS]}


def versions(api_key: int) -> range:
    """Every version served."""
    return range(APIS[api_key].min_version, APIS[api_key].max_version + 1)


def part(api_key: int, version: int, message: str, /, **fields: Any) -> Any:
    """A nested message of a request; fields the version does not have are left out."""
    return schema.request(api_key, version).make(message, **fields)


async def call(world: World, api_key: int, version: int, **fields: Any) -> Any:
    """One request; fields the version does not have are left out."""
    request_class = load_request_schema(api_key, version)
    entity = part(api_key, version, request_class.__name__, **fields)
    request = request_reader(request_class, REQUESTS[api_key])(schema.body(entity), 0)
    return await answer_to(world, api_key, version, request)


async def answer_to(world: World, api_key: int, version: int, request: object) -> Any:
    """The answer of the handler to a request in the product's own form, through its bytes."""
    services: Any = SimpleNamespace(
        node_id=NODE,
        clock=world.clock,
        group=world.settings,
        controller=world.controller,
        groups=world.coordinator,
        transactions=world.transactions,
    )
    context = RequestContext(services, api_key, version, 7, "app", "10.0.0.7")
    response = await APIS[api_key].handle(context, request)
    assert isinstance(response, KafkaResponse)
    return schema.read_response(api_key, version, response)
