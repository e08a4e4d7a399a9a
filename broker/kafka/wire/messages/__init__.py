"""Requests and responses for handlers: one class for all versions of a message, with fields that mypy checks.

`tidelog.broker.kafka.wire.reader` fills requests and `tidelog.broker.kafka.wire.writer` writes responses, both
following the layout of kio's class for the version. Produce and Fetch have codecs and classes of their own
(`tidelog.broker.kafka.wire.produce`, `tidelog.broker.kafka.wire.fetch`).

Invariants: a field that some served version lacks has a default; fields, names and types agree with kio's classes of
every served version (tests/broker/test_messages.py).

May import: nothing of Tidelog. Entry: `REQUESTS`. The rules for fields: `tidelog.broker.kafka.wire.messages.base`; the
reasons: docs/design/0011-typed-requests.md.
"""

from __future__ import annotations

from tidelog.broker.kafka.wire.messages import cluster, configs, groups, logs, offsets, telemetry, topics, transactions
from tidelog.broker.kafka.wire.messages.base import KafkaRequest

_MODULES = (cluster, configs, groups, logs, offsets, telemetry, topics, transactions)

REQUESTS: dict[int, type[KafkaRequest]] = {
    found.API_KEY: found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, KafkaRequest) and found is not KafkaRequest
}
"""The request class of each API key, except Produce and Fetch."""
