"""Kafka's wire format: kio for all APIs, and a hand-written zero-copy codec for Produce and Fetch.

No I/O here: bytes in, entities out, and back. May import: `runtime`, `storage.record_batch`.
Entry: `broker.wire.codec`.
"""
