"""Log compaction: what of a partition's data goes, and when (docs/design/0025). Sans-IO.

Invariants: an offset never moves, and no stretch of offsets is lost: what is removed leaves a hole. Of each key the
last committed record stays, or nothing of the key does, once its tombstone's time is over. What a reader of committed
records sees of a key's last value is the same before and after.

May import: the modules of `tidelog.stream` that do no I/O, `tidelog.storage.records`, `tidelog.batch`.
Entry: `tidelog.stream.cleaning.plan.plan_round`, `tidelog.stream.cleaning.key_map.KeyMap`,
`tidelog.stream.cleaning.cleaner.Cleaning`.
"""
