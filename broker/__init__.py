"""The broker: serves the Kafka protocol, leads partitions, coordinates groups and serves the admin HTTP endpoints.

`tidelog.broker.kafka.wire` encodes and decodes messages, `tidelog.broker.kafka.handlers` answers requests,
`tidelog.broker.partitions.manager` opens and closes the partition logs that the controller's image assigns to this
broker, `tidelog.broker.groups` coordinates consumer groups.

A broker starts in two stages. `tidelog.broker.node` connects to the controllers and learns the cluster id;
`tidelog.broker.parts`, the composition root, then creates all components from `tidelog.broker.inputs`, and
`tidelog.broker.running` starts and stops them. A component registers its metrics, problems and sections of `/status`
where it is created (`tidelog.broker.telemetry.registry`).

Invariants: nothing is acknowledged before the storage has confirmed it (rule 1); after the first failure, or when
another process has its id, a broker acknowledges nothing more; everything that a client can make it hold is bounded
(rule 12).

May import: `controller`, `stream`, `storage`, `runtime`. Entry: `tidelog.broker.node.BrokerNode`.
"""
