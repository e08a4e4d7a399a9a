"""The partitions that this broker leads: opening, closing, moving, and taking over from dead brokers.

Invariants: a partition serves only while its streams are open under this broker's epochs (rule 4); a move copies no
data, and loses none: the controller compares the end offsets that the source sends with the committed ends.

May import: `tidelog.broker.telemetry`, `tidelog.broker.settings`, `tidelog.controller`, `tidelog.stream` and below.
Entry: `tidelog.broker.partitions.manager.PartitionManager`; the decisions, without I/O, are in `reconciler` (what to
open, close and move) and `move_table` (the phases of a move). Private: `coalesce`.
"""
