"""What is told of WAL files that were removed or replaced under a running broker (`tidelog.storage.wal.disk.watch`).

Entry: `missing_wal_files`.
"""

from __future__ import annotations

_NAMED = 3
"""Files that the sentence names."""


def missing_wal_files(replica_set: int, broker_id: int, missing: tuple[str, ...]) -> list[str]:
    """Return what is wrong with a broker's WAL of a replica set: one sentence, or none.

    `missing`: `Wal.missing_files`.
    """
    if not missing:
        return []
    named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
    return [
        f"files of the WAL of replica set {replica_set} were removed or replaced while broker {broker_id} uses them"
        f" ({named}): records that are neither in the bucket nor in another replica are lost when it ends. Run"
        " `tidelog wal drain` before you stop it"
    ]
