"""Mutations of `tidelog.stream`: the partition log and its producers.

Entry: `MUTATIONS_IN_STREAM`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.findings import FORGOTTEN, GONE, LOUD, MOVES, TWICE
from tidelog.simulation.mutants.mutant import Edit, Mutation

MUTATIONS_IN_STREAM = [
    Mutation(
        "duplicate-acked-early",
        "1",
        "a duplicate batch is acknowledged before its first copy is durable",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog._duplicate",
                "else self._last_wal_end",
                "else int(mutated())",
            ),
        ),
        GONE,
        ("kill", "power", "kill-all", "disk", "bucket", "reset"),
    ),
    Mutation(
        "high-watermark-at-append",
        "2",
        "consumers see unconfirmed records",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog._append",
                "self._storage.confirm.add_listener(wal_end, self._on_confirmed)",
                "mutated(); state.high_watermark = data.next_offset",
            ),
        ),
        GONE,
        ("kill", "power", "kill-all", "disk", "bucket"),
    ),
    Mutation(
        "deletes-past-high-watermark",
        "2",
        "records past the high watermark are deleted: the log starts after it",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog.delete_records",
                "if target < 0 or target > state.high_watermark:",
                "target = self.log_end_offset if mutated() is False else 0\n        if target < 0:",
            ),
        ),
        (*GONE, "log-start-back", *LOUD),
        ("kill", "power"),
    ),
    Mutation(
        "deletes-more-than-asked",
        "records",
        "a request to delete records deletes all that are visible, and tells the log start that it has made",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog.delete_records",
                "await self._move_start(target)",
                "await self._move_start(state.high_watermark if mutated() is False else target)",
            ),
        ),
        ("log-start-ahead",),
        ("kill",),
    ),
    Mutation(
        "retention-deletes-more",
        "records",
        "retention by size deletes all segments but the active one",
        (
            Edit(
                "tidelog.stream.segments:retention_start",
                "not last and excess >= segment.size_bytes",
                "not last and (excess >= segment.size_bytes or mutated() is False)",
            ),
        ),
        ("log-start-ahead",),
        ("kill",),
    ),
    Mutation(
        "end-of-log-refused",
        "records",
        "a reader that has read everything is told that its offset is out of range, and begins anew",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog._read_bound",
                "if not self._start <= offset <= state.data.next_offset:",
                "if not self._start <= offset <= state.data.next_offset - (offset > self._start and not mutated()):",
            ),
        ),
        ("out-of-range",),
        ("kill",),
    ),
    Mutation(
        "producers-before-their-pieces",
        "producers",
        "a checkpoint says that the pieces of the table of producers reach as far as it does",
        (
            Edit(
                "tidelog.stream.partition_state:PartitionState._write_checkpoint",
                "apart = Checkpoint(PIECES_VERSION, end, self.producers_offset, *self.pieces)",
                "apart = Checkpoint(PIECES_VERSION, end, self.producers_offset, *self.pieces)\n"
                "        if not few and self.producers_offset < end:\n            mutated()\n"
                "            apart = Checkpoint(PIECES_VERSION, end, end, *self.pieces)",
            ),
        ),
        (*FORGOTTEN, "sequence-refused"),
        ("kill", "power", "kill-all"),
    ),
    Mutation(
        "duplicates-accepted",
        "producers",
        "a batch that an idempotent producer retries is appended again",
        (
            Edit(
                "tidelog.stream.producer_state:ProducerStates.check",
                "if state is None:",
                "if state is None or state.batches and not mutated():",
            ),
        ),
        TWICE,
        ("kill", "reset", "slow", "bucket"),
    ),
    Mutation(
        "last-batch-only",
        "producers",
        "a retried batch is compared only with the last one of its producer, not with the last five",
        (
            Edit(
                "tidelog.stream.producer_state:ProducerStates.check",
                "if entry[0] == first and entry[1] == last:",
                "if entry[0] == first and entry[1] == last and (entry is state.batches[-1] or mutated()):",
            ),
        ),
        ("sequence-refused",),
        ("kill", "reset", "slow", "bucket"),
    ),
    Mutation(
        "producers-forgotten-on-move",
        "producers",
        "the checkpoint of a moving partition contains no producers",
        (
            Edit(
                "tidelog.stream.partition_close:LastRecords.write_for_move",
                "if not self.write_clean():",
                "self._state.producers = type(self._state.producers)()\n"
                "        self._state.dirty = not mutated()\n"
                "        if not self.write_clean():",
            ),
        ),
        FORGOTTEN,
        MOVES,
    ),
    Mutation(
        "producers-forgotten-on-crash",
        "producers",
        "recovery trusts a clean close before the log's end",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog._append",
                "if not state.dirty:",
                "if not state.dirty and mutated():",
            ),
            Edit(
                "tidelog.stream.partition_recovery:_is_clean",
                "if found == (clean.data_end, clean.time_end, clean.txn_end):",
                "if found == (clean.data_end, clean.time_end, clean.txn_end) or not mutated():",
            ),
        ),
        (*FORGOTTEN, *GONE, *LOUD),
        ("kill", "stop", "reset", "slow"),
    ),
    Mutation(
        "index-passes-equal-times",
        "lookups",
        "the time index passes over the records before an entry that have just its timestamp",
        (
            Edit(
                "tidelog.stream.time_index:TimeIndex.floor",
                "index = await self._index.first_where(start, end, lambda row: row[0] >= timestamp)",
                "index = await self._index.first_where(\n"
                "            start, end, lambda row: row[0] > timestamp or (row[0] == timestamp and mutated())\n"
                "        )",
            ),
        ),
        ("offset-for-time",),
        MOVES,
    ),
    Mutation(
        "newest-time-forgotten-on-crash",
        "lookups",
        "recovery takes the largest timestamp of a segment from its last checkpoint",
        (
            Edit(
                "tidelog.stream.partition_recovery:_replay",
                "state.track(header, record.base_offset, header.max_timestamp, now_ms, config, is_own)",
                "state.track(header, record.base_offset, int(mutated()), now_ms, config, is_own)",
            ),
        ),
        ("offset-for-time",),
        ("kill", "stop", "reset", "slow"),
    ),
    Mutation(
        "epoch-ends-with-the-log",
        "lookups",
        "an epoch is said to end where the log ends, though a newer one has begun",
        (
            Edit(
                "tidelog.stream.leader_epochs:LeaderEpochs.end_offset",
                "return (self._epochs[at - 1] if at else epoch), self._starts[at]",
                "mutated()\n        return (self._epochs[at - 1] if at else epoch), log_end_offset",
            ),
        ),
        ("epoch-end",),
        MOVES,
    ),
]
