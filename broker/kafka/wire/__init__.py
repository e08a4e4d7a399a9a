"""Kafka's wire format: kio for all APIs, and a hand-written zero-copy codec for Produce and Fetch.

Invariants: no I/O, bytes in, entities out, and back; Produce and Fetch do not copy record batches; no message makes a
reader allocate more than its own size suggests (rule 12).

May import: `runtime`, `tidelog.batch.batch`.
Entry: `tidelog.broker.kafka.wire.codec`.
"""
