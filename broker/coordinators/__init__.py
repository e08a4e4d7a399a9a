"""What the coordinators of groups and of transactions share: each keeps its state in the log of an internal topic.

The leader of a partition of the topic coordinates the keys that hash to it. It reads the log into a store, writes
changes through one queue, and bounds the log by snapshots. What the records mean is the coordinators' own matter.

Invariants: a key is served only by the leader of its partition, after the whole log was read; a change is applied once
its record is confirmed by the quorum rule, in the order of the log; a change whose outcome is unknown unloads the
partition.

May import: `tidelog.broker.partitions` and the packages below. Entry: `tidelog.broker.coordinators.shards.ShardTable`.
"""
