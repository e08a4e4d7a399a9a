"""The WAL as a chain of objects in the bucket, without a disk.

Invariants: objects are created under consecutive sequence numbers, each only if it does not exist, so a fenced writer
fails to create its next object and acknowledges nothing more (rules 4 and 14).

May import: `tidelog.storage.wal`, `tidelog.storage.bucket`, `tidelog.storage.settings`, `tidelog.runtime`.
Entry: `tidelog.storage.wal.s3.wal.S3Wal`; without a broker `tidelog.storage.wal.s3.inspect`; when a broker is removed
`tidelog.storage.wal.s3.removed`. The rules, without I/O, are in `chain`.
Private: `recovery`, `chain`.
"""
