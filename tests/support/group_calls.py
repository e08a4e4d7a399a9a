"""Group requests as a client sends them: through kio's bytes, the handler, and the response's bytes."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from broker.handlers import find_coordinator, groups, offsets
from broker.services import RequestContext
from broker.wire import schema
from tests.support.group_world import NODE, World

APIS = {api.api_key: api for api in [*find_coordinator.APIS, *groups.APIS, *offsets.APIS]}


def versions(api_key: int) -> range:
    """Every version served."""
    return range(APIS[api_key].min_version, APIS[api_key].max_version + 1)


def part(api_key: int, version: int, message: str, /, **fields: Any) -> Any:
    """A nested message of a request; fields the version does not have are left out."""
    return schema.request(api_key, version).make(message, **fields)


async def call(world: World, api_key: int, version: int, **fields: Any) -> Any:
    """One request; fields the version does not have are left out."""
    request = _through_bytes(part(api_key, version, load_request_schema(api_key, version).__name__, **fields))
    services: Any = SimpleNamespace(
        node_id=NODE,
        clock=world.clock,
        group=world.settings,
        controller=world.controller,
        groups=world.coordinator,
    )
    context = RequestContext(services, api_key, version, 7, "app", "10.0.0.7")
    response = await APIS[api_key].handle(context, request)
    assert type(response) is load_response_schema(api_key, version)
    return _through_bytes(response)


def _through_bytes(entity: Any) -> Any:
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    data = out.getvalue()
    decoded, size = entity_reader(type(entity))(data, 0)
    assert size == len(data)
    assert decoded == entity
    return decoded
