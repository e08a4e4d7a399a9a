"""Kafka's record batch (format v2): header, records, checks and compression. Bytes in, values out; no I/O.

It depends on `tidelog.runtime` only, so a reader of objects in the bucket (such as a Spark executor) needs neither a
broker nor a controller.

Invariants: the CRC32C of every received batch is checked (rule 10); offsets are 64 bits wide (rule 9); decompression is
bounded before memory is allocated (rule 12).

May import: `tidelog.runtime`. Entry: `tidelog.batch.batch`.
"""
