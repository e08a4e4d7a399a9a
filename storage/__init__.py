"""Durable data: object stores, the write-ahead log, object formats, caches and the upload pipeline.

This package knows streams only as numbers with 64-bit offsets. Of Kafka it knows only the record batch
(`tidelog.batch.batch`), which the formats here and the Spark reader share. What it needs from a controller
(object ids, commits, the list of objects of a stream) is declared in the protocol
`tidelog.storage.managers.ObjectManager`.

Invariants: a record is confirmed only after it is durable in the WAL (rule 1), uploaded only after it is confirmed
(rule 2), and removed from the WAL only after its upload is committed (rule 3).

May import: `batch`, `runtime`. Entry: `tidelog.storage.storage.Storage`, the facade over WAL, log cache, block reader
and uploads; `tidelog.storage.bucket.store.ObjectStore`, the interface to the bucket.
"""
