"""All the APIs that this broker serves, collected from the handlers' lists.

Entry: `all_apis`. ApiVersions is not in it: `tidelog.broker.kafka.server` makes it from what it is given.
"""

from __future__ import annotations

from tidelog.broker.kafka.handlers import (
    acls,
    client_telemetry,
    config_resources,
    configs,
    delete_records,
    describe_cluster,
    describe_producers,
    describe_quorum,
    describe_topics,
    elections,
    features,
    fetch,
    find_coordinator,
    groups,
    init_producer_id,
    leader_epoch,
    list_offsets,
    log_dirs,
    metadata,
    offsets,
    produce,
    topics,
    transactions,
    txn_offsets,
    unregister_broker,
)
from tidelog.broker.kafka.services import ApiHandler

_MODULES = (
    acls,
    client_telemetry,
    config_resources,
    configs,
    delete_records,
    describe_cluster,
    describe_producers,
    describe_quorum,
    describe_topics,
    elections,
    features,
    fetch,
    find_coordinator,
    groups,
    init_producer_id,
    leader_epoch,
    list_offsets,
    log_dirs,
    metadata,
    offsets,
    produce,
    topics,
    transactions,
    txn_offsets,
    unregister_broker,
)


def all_apis(*, telemetry: bool = True) -> list[ApiHandler]:
    """Every handler, in no particular order; each API key once. `telemetry`: with those of client telemetry."""
    return [api for module in _MODULES if telemetry or module is not client_telemetry for api in module.APIS]
