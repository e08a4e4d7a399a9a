"""Streams, and the Kafka partition on top of them.

A stream is an append-only sequence of record batches with int64 offsets, an epoch and at most one open owner. A
partition log has four streams: meta (key-value), data (record batches; stream offset = Kafka offset), time (time
index), txn (aborted transactions). The protocol `tidelog.stream.managers.StreamManager` declares the calls to a
controller (open, close, trim).

Invariants: a stream is appended to only by its owner under the newest epoch (rule 4); offsets have no gaps (rule 5);
nothing past the high watermark is returned; what a snapshot or index tells is checked against the data it names.

May import: `storage`, `batch`, `runtime`. Entry: `tidelog.stream.partition_log.PartitionLog`.
"""
