"""The newest data in memory: records of the WAL that are not evicted yet. Tail reads are served from it.

Invariants: records that are not uploaded are never evicted; memory is bounded, and a record is charged its actual
memory footprint (rule 12).

May import: `tidelog.storage.wal`, the protocols of `tidelog.storage`, `tidelog.runtime`.
Entry: `tidelog.storage.cache.log_cache.LogCache`.
"""
