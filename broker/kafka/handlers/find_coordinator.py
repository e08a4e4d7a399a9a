"""FindCoordinator: the broker that coordinates a group.

Key type 0 is a group: the leader of its `__consumer_offsets` partition. Key type 1 is a transactional id: the leader of
its `__transaction_state` partition. The first request creates the topic, and waits briefly for its leader, so that a
client's first attempt succeeds. Where the feature level has no transactions yet, a transactional id is answered with
TRANSACTIONAL_ID_AUTHORIZATION_FAILED and the reason: after any other error librdkafka retries without end and without a
message; after this one it fails at once, as Java and aiokafka do. Any other key type is INVALID_REQUEST.

Entry: `APIS`.
"""

from __future__ import annotations

from tidelog.broker.groups.errors import GroupError
from tidelog.broker.kafka.handlers.admin_errors import each
from tidelog.broker.kafka.handlers.transactions import without_transactions
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.groups import FindCoordinatorRequest, FindCoordinatorResponse, FoundCoordinator
from tidelog.broker.txn.errors import TxnError
from tidelog.runtime.errors import TidelogError

GROUP_KEY_TYPE = 0
TRANSACTION_KEY_TYPE = 1
_FIRST_WITH_MANY = 4
_KEYS_AT_ONCE = 256
"""Each may wait until its coordinator is known."""


async def find_coordinator(context: RequestContext, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    """FindCoordinator v0–v6; v4+ has many keys."""
    key_type = request.key_type
    if context.api_version < _FIRST_WITH_MANY:
        found = await _find(context, key_type, request.key)
        return FindCoordinatorResponse(
            error_code=found.error_code,
            error_message=found.error_message,
            node_id=found.node_id,
            host=found.host,
            port=found.port,
        )
    keys = dict.fromkeys(request.coordinator_keys)
    coordinators = await each(keys, lambda key: _find(context, key_type, key), _KEYS_AT_ONCE)
    return FindCoordinatorResponse(coordinators=coordinators)


async def _find(context: RequestContext, key_type: int, key: str) -> FoundCoordinator:
    services = context.services
    if key_type not in (GROUP_KEY_TYPE, TRANSACTION_KEY_TYPE):
        message = f"key type {key_type} is not served"
        return FoundCoordinator(key=key, error_code=GroupError.INVALID_REQUEST, error_message=message)
    if key_type == TRANSACTION_KEY_TYPE:
        refused = without_transactions(services)
        if refused is None and not key:
            refused = "the transactional id is empty"
        if refused is not None:
            code = TxnError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED if key else TxnError.INVALID_REQUEST
            return FoundCoordinator(key=key, error_code=code, error_message=refused)
    try:
        coordinator = services.groups if key_type == GROUP_KEY_TYPE else services.txn
        broker = await coordinator.find(key)
    except TidelogError as error:
        return FoundCoordinator(key=key, error_code=error.kafka_code, error_message=str(error))
    return FoundCoordinator(key=key, node_id=broker.id, host=broker.host, port=broker.port)


APIS = [serve(FindCoordinatorRequest, 0, 6, find_coordinator)]
