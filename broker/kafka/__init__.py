"""Kafka's protocol: the listener, its connections and their bounds, the wire format, and the handlers.

Invariants: responses leave a connection in the order of its requests; what all clients together may hold is bounded
before it is spent (rule 12); a request that cannot be decoded ends its connection and nothing else.

May import: `tidelog.broker.groups`, `partitions`, `telemetry`, `settings`. Entry:
`tidelog.broker.kafka.server.KafkaServer`; what a handler may use is `tidelog.broker.kafka.services.Services`.
"""
