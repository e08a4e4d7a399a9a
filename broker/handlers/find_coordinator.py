"""FindCoordinator: which broker looks after a group.

Key type 0 is a group: the leader of its `__consumer_offsets` partition. The topic is created by the first question, and
the answer waits shortly for its leader, so that a client's first attempt succeeds. Key type 1, a transactional id, is
answered INVALID_REQUEST with the reason, as is any other: COORDINATOR_NOT_AVAILABLE would be retried by every client
until its time-out, without a word to the user; INVALID_REQUEST fails at once in Java and librdkafka and shows the text.

Entry: `APIS`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from broker.groups.errors import GroupError
from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from runtime.errors import TidelogError

GROUP_KEY_TYPE = 0
NO_NODE = {"node_id": -1, "host": "", "port": -1}


async def find_coordinator(context: RequestContext, request: Any) -> Any:
    """FindCoordinator v0–v6; v4+ asks for many keys at once."""
    s = schema.response(context.api_key, context.api_version)
    key_type = getattr(request, "key_type", GROUP_KEY_TYPE)
    if context.api_version < 4:
        found = await _find(context, key_type, request.key)
        return s.make("FindCoordinatorResponse", throttle_time=0, **found)
    keys = request.coordinator_keys
    found_all = await asyncio.gather(*(_find(context, key_type, key) for key in keys))
    coordinators = [s.make("Coordinator", key=key, **found) for key, found in zip(keys, found_all, strict=True)]
    return s.make("FindCoordinatorResponse", throttle_time=0, coordinators=coordinators)


async def _find(context: RequestContext, key_type: int, key: str) -> dict[str, Any]:
    if key_type != GROUP_KEY_TYPE:
        message = "transactions are not served yet" if key_type == 1 else f"key type {key_type} is not served"
        return {"error_code": GroupError.INVALID_REQUEST, "error_message": message, **NO_NODE}
    try:
        broker = await context.services.groups.find(key)
    except TidelogError as error:
        return {"error_code": error.kafka_code, "error_message": str(error), **NO_NODE}
    return {"error_code": 0, "error_message": None, "node_id": broker.id, "host": broker.host, "port": broker.port}


APIS = [ApiHandler(10, 0, 6, find_coordinator)]
