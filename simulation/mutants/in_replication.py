"""Mutations of the hot tier: `tidelog.storage.replication`, `tidelog.storage.wal.disk`, `tidelog.broker.replication`.

They take effect in clusters whose WALs have several replicas, one in three. What each protects is in
docs/design/0015-hot-tier.md, section by section.

Entry: `MUTATIONS_IN_REPLICATION`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.findings import GONE, LOUD
from tidelog.simulation.mutants.mutant import Edit, Mutation

_UNEQUAL = ("confirmed-alone", "two-masters", "promise-broken", "replicas-differ", *GONE)
"""Rules for replicas that are not what a quorum has, and for what comes of it."""
_ELECTIONS = ("kill", "power", "pause", "isolate", "uninformed", "reset", "slow")

MUTATIONS_IN_REPLICATION = [
    Mutation(
        "old-epochs-counted",
        "8",
        "a new master confirms bytes of older epochs by counting alone, before the start record of its own",
        (
            Edit(
                "tidelog.storage.replication.master:Master._advance",
                "if offset >= self._epoch_confirmable_at and offset > self.confirm_offset:",
                "if offset > self.confirm_offset and (offset >= self._epoch_confirmable_at or not mutated()):",
            ),
        ),
        _UNEQUAL,
        _ELECTIONS,
    ),
    Mutation(
        "empty-epoch-kept",
        "8",
        "an epoch in which nothing was written stays in the history, at the start of the next one",
        (
            Edit(
                "tidelog.storage.wal.epochs:EpochHistory.append",
                "if start_offset == last_start:",
                "if start_offset == last_start and mutated():",
            ),
        ),
        (*_UNEQUAL, *LOUD, "defect"),
        ("power", "kill", "uninformed"),
    ),
    Mutation(
        "pending-set-ignored",
        "8",
        "a master confirms by the configuration that it knows, whatever it has asked the controllers for",
        (
            Edit(
                "tidelog.storage.replication.master:Master._advance",
                "in_force = (self.configuration, self.pending, self.prepared)",
                "in_force = (self.configuration, self.pending and (mutated() or None),"
                " self.prepared and (mutated() or None))",
            ),
        ),
        _UNEQUAL,
        ("reset", "slow", "cut", "isolate", "raft-disk", "disk"),
    ),
    Mutation(
        "missing-member-left-out",
        "8",
        "a member of the set that the master has heard nothing of does not hold the confirm offset back",
        (
            Edit(
                "tidelog.storage.replication.configuration:SetConfiguration.held_by_quorum",
                "held.get(member, -1) for member in self.members)",
                "held[member] for member in self.members if member in held or mutated())",
            ),
            Edit(
                "tidelog.storage.replication.configuration:SetConfiguration.held_by_quorum",
                "return ends[self.quorum - 1]",
                "return ends[min(self.quorum, len(ends)) - 1] if ends else -1",
            ),
        ),
        _UNEQUAL,
        _ELECTIONS,
    ),
    Mutation(
        "cut-without-mark",
        "8",
        "a follower that truncates goes on before the cut is on its disk",
        (
            Edit(
                "tidelog.storage.wal.disk.wal:DiskWal._truncate",
                "marks = marks._replace(cut_at=offset)",
                "mutated()",
            ),
        ),
        (*_UNEQUAL, *LOUD, "defect", "assertion"),
        ("isolate", "power", "kill-all"),
    ),
    Mutation(
        "batch-over-epochs",
        "8",
        "a batch of records that is read for a follower goes on into the next epoch, and the follower takes it",
        (
            Edit(
                "tidelog.storage.replication.sending:FollowerLink.batch",
                "if index + 1 < len(entries) else end_offset",
                "if index + 1 < len(entries) and mutated() else end_offset",
            ),
            Edit(
                "tidelog.storage.wal.disk.wal:DiskWal.read_raw",
                "self._history.end_after(start_offset, self._end))",
                "self._end)",
            ),
            Edit(
                "tidelog.storage.wal.disk.wal:DiskWal.read_raw",
                "if entry is None or runs.epochs != {entry.epoch}:",
                "if entry is None:",
            ),
            Edit("tidelog.storage.wal.received:parse_received", "if header.master_epoch != epoch:", "if False:"),
        ),
        (*_UNEQUAL, *LOUD, "defect"),
        ("kill", "power", "kill-all", "pause", "isolate", "reset", "unmount"),
    ),
    Mutation(
        "promise-without-fence",
        "4",
        "a member tells where its WAL ends for an election, and goes on taking bytes from the master before",
        (
            Edit(
                "tidelog.broker.replication.replica:HotReplica.promise",
                "if self.master is None or self.master.epoch < epoch:",
                "if (self.master is None or self.master.epoch < epoch) and mutated():",
            ),
            Edit("tidelog.broker.replication.replica:HotReplica.promise", "await wal.promise(epoch)", "pass"),
        ),
        _UNEQUAL,
        ("uninformed", "slow"),
    ),
    Mutation(
        "quorum-before-commit",
        "8",
        "a configuration counts as soon as the master has asked for it, and the present one no more",
        (
            Edit(
                "tidelog.storage.replication.master:Master.change",
                "self.pending, self.prepared = wanted, None",
                "self.pending, self.prepared, self.configuration = wanted, None, (mutated() or wanted)",
            ),
        ),
        _UNEQUAL,
        _ELECTIONS,
    ),
    Mutation(
        "unconfirmed-read-at-follower",
        "2",
        "a follower gives its readers everything that its WAL has",
        (
            Edit(
                "tidelog.broker.partitions.read_replicas:FollowedLog._confirmed_end",
                "replica.wal.confirm_offset",
                "mutated() or replica.wal.end_offset",
            ),
        ),
        ("unconfirmed-read", *GONE),
        _ELECTIONS,
    ),
    Mutation(
        "older-copies-elected",
        "13",
        "WALs that all end before what is in the bucket elect one of them",
        (
            Edit(
                "tidelog.controller.model.replication:was_set_back",
                "best.end_offset < record.committed_wal_offset",
                "best.end_offset < record.committed_wal_offset and mutated()",
            ),
        ),
        (*_UNEQUAL, *LOUD, "defect"),
        ("older", "slow"),
    ),
    Mutation(
        "older-copy-promises",
        "13",
        "a WAL that ends before what it is known to have had may promise",
        (
            Edit(
                "tidelog.controller.machine.replica_elections:_check_promise",
                "promise.end_offset < end",
                "promise.end_offset < end and mutated()",
            ),
        ),
        (*_UNEQUAL, *LOUD, "defect"),
        ("older", "slow", "kill"),
    ),
]
