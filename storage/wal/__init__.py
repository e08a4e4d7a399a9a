"""The write-ahead log of one replica set: one protocol, and backends on disk, in the bucket and in memory.

Invariants: start ≤ durable ≤ end; what was appended becomes durable in order, or the WAL fails as a whole; a WAL is
trimmed only behind committed objects (rule 3); every record carries a CRC32C (rule 10); a replica takes nothing from a
master of an epoch below the one that it has promised.

May import: `tidelog.storage.bucket`, `tidelog.batch`, `tidelog.storage.settings`, `tidelog.runtime`.
Entry: `tidelog.storage.wal.base.Wal`. Private: `format`, `state`, `received` are for the backends (and for the tools
that inspect a WAL without a broker).
"""
