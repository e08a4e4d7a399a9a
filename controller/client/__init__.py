"""Client of the controllers, for brokers, tools and Spark: commands, reads from a local image, heartbeats.

Invariants: a command has a dedupe id, so a retried command takes effect at most once; a call returns when the local
image contains its effect.

May import: `tidelog.controller.image`, `rpc`, `model`, and the protocols of `tidelog.storage` and `tidelog.stream`,
which it implements. Entry: `tidelog.controller.client.client.ControllerClient`.
"""
