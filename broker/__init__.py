"""The broker: it speaks Kafka's protocol, leads partitions, coordinates groups and serves the admin HTTP endpoints.

`broker.wire` turns bytes into requests and back, `broker.handlers` answers them, `broker.partitions` opens and closes
the partition logs that the controller's image assigns here, `broker.groups` coordinates consumer groups.

May import: `controller`, `stream`, `storage`, `runtime`. Entry: `broker.node.BrokerNode`.
"""
