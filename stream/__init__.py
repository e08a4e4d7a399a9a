"""Streams, and the Kafka partition on top of them.

A stream is an append-only sequence of record batches with int64 offsets, an epoch and one open owner. A partition log
is made of four: meta (key-value), data (record batches; stream offset = Kafka offset), time (time index), txn (aborted
transactions). What it needs from a controller (open, close, trim) is the protocol `stream.managers.StreamManager`.

May import: `storage`, `runtime`. Entry: `stream.partition_log.PartitionLog`.
"""
