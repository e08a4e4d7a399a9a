"""Compaction: replaces many small objects by few large ones.

Invariants: the output ranges equal the input ranges less what is trimmed, checked by the compactor before it commits
and by the controller again (rule 7); every byte read is checked (rule 10); inputs stay until no reader needs
them (rule 6).

May import: `tidelog.storage.objects`, `tidelog.storage.bucket`, the protocols of `tidelog.storage`, `tidelog.runtime`.
Entry: `tidelog.storage.compaction.compactor.Compactor`; the decisions, without I/O, are in `plan`, `check` and
`throttle`.
"""
