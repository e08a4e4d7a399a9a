"""The answers to Kafka's requests, one module for each family of APIs.

A handler is `async def handle(context, request) -> response`, on the entities that `broker.wire.codec` decodes and
encodes. Each module lists what it serves in `APIS`; `broker.server` builds its table from these lists and nothing else.

May import: `broker.wire`, `broker.services`, and the rooms below. Entry: `broker.services.ApiHandler`.
"""
