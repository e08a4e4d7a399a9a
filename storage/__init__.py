"""Bytes that last: object stores, the write-ahead log, object formats, caches and the upload pipeline.

This room knows streams only as numbers with 64-bit offsets, and Kafka not at all but for record batches
(`storage.record_batch`), which the formats here and the Spark reader share. What it needs from a controller (object
ids, commits, the list of objects of a stream) it states as the protocol `storage.managers.ObjectManager`.

May import: `runtime`. Entry: `storage.storage.Storage`, the facade that ties WAL, log cache, block reader and uploads
together; `storage.object_store.ObjectStore`, the door to the bucket.
"""
