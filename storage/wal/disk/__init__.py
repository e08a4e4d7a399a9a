"""The WAL in preallocated segment files on a local disk, with group commit.

Invariants: a torn tail is distinguished from damage: a record that fails its check ends the log only if nothing valid
follows it; the truncation by recovery is durable before anything is appended after it.

May import: `tidelog.storage.wal`, `tidelog.storage.settings`, `tidelog.runtime`.
Entry: `tidelog.storage.wal.disk.wal.DiskWal`; without a broker `tidelog.storage.wal.disk.inspect`.
Private: `log`, `receiving`, `scan`, `recovery`.
"""
