"""Mutations of transactions: the coordinator, markers, the partitions' part, and the offsets of groups.

Entry: `MUTATIONS_IN_TRANSACTIONS`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.mutant import Edit, Mutation

UNDECIDED = ("G1a", "precommitted-read", "G0", "atomicity")
"""Rules for reads of what is not committed, and for decisions that are not the client's."""
HALF = ("atomicity", "G0", "G1a", "G1b", "exactly-once", "balance")
"""Rules for transactions of which a part has another outcome."""
OPEN = ("lso-stuck", "txn-unsettled")
"""Rules for transactions that nobody ends."""
OFFSETS = ("exactly-once", "committed-offset-back")
"""Rules for offsets of a group that do not go with their transaction."""
FAILOVERS = ("kill", "stop", "pause", "power", "isolate")


def _of_transactions(
    name: str, what: str, edits: tuple[Edit, ...], found_by: tuple[str, ...], faults: tuple[str, ...]
) -> Mutation:
    return Mutation(name, "transactions", what, edits, found_by, faults, transactions=True)


MUTATIONS_IN_TRANSACTIONS = [
    _of_transactions(
        "marker-dropped",
        "a partition answers that it has the marker of a transaction, which it has not written",
        (
            Edit(
                "tidelog.broker.txn.marker_writer:MarkerWriter._write",
                "await log.wait_acked((await self._append(log, marker)).wal_end)",
                "mutated()",
            ),
        ),
        (*OPEN, *HALF),
        FAILOVERS,
    ),
    _of_transactions(
        "open-transactions-shown",
        "the last stable offset does not wait for open transactions",
        (
            Edit(
                "tidelog.stream.partition_state:PartitionState.last_stable_offset",
                "unstable = self.producers.first_unstable()",
                "unstable = self.producers.first_unstable()\n"
                "        if unstable is not None and not mutated():\n            unstable = None",
            ),
        ),
        UNDECIDED,
        FAILOVERS,
    ),
    _of_transactions(
        "zombie-batch-admitted",
        "a batch that the coordinator does not admit to a transaction is appended",
        (
            Edit(
                "tidelog.broker.kafka.handlers.produce_transactions:TransactionalBatches.append",
                "if answer.code:",
                "if answer.code and mutated():",
            ),
        ),
        ("zombie-accepted", *OPEN, *HALF),
        FAILOVERS,
    ),
    _of_transactions(
        "epoch-not-bumped",
        "a new session of a transactional id gets the epoch of the one before",
        (
            Edit(
                "tidelog.broker.txn.state:TransactionalId.init_producer_id",
                "next_pair = _successor(value, fresh_id)",
                "next_pair = _successor(value, fresh_id) if mutated() else _pair(value)",
            ),
        ),
        ("zombie-accepted", *HALF),
        FAILOVERS,
    ),
    _of_transactions(
        "fenced-session-ends-it",
        "a session of an older epoch may go on with the transaction of the one after it",
        (
            Edit(
                "tidelog.broker.txn.state:_mismatch",
                "if producer == pair and pair.epoch < LARGEST_EPOCH:",
                "if producer.producer_id == pair.producer_id and (producer == pair or not mutated()):",
            ),
        ),
        ("zombie-accepted", *HALF, *OPEN),
        FAILOVERS,
    ),
    _of_transactions(
        "aborted-not-named",
        "read_committed readers are not told which transactions are aborted",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog.read_hot",
                "return None if aborted is None else result._replace(aborted=_pairs(aborted))",
                "if aborted:\n            mutated()\n        return None if aborted is None else result",
            ),
        ),
        UNDECIDED,
        FAILOVERS,
    ),
    _of_transactions(
        "aborts-forgotten-on-crash",
        "recovery does not put transactions into the index that were aborted before the crash",
        (
            Edit(
                "tidelog.stream.partition_recovery:_replay",
                "if aborted is not None and aborted.last_offset > last_aborted:",
                "if aborted is not None and aborted.last_offset > last_aborted and mutated():",
            ),
            Edit(
                "tidelog.stream.partition_state:PartitionState.note_aborted",
                "self.txn.add(entry)\n        try:",
                "self.txn.add(entry)\n        return 0\n        try:",
            ),
        ),
        UNDECIDED,
        ("kill", "power", "kill-all"),
    ),
    _of_transactions(
        "open-forgotten-on-load",
        "a checkpoint's open transactions are not known to be open after it was loaded",
        (
            Edit(
                "tidelog.stream.producer_state:ProducerStates.complete",
                "self._ongoing = {producer_id: start for start, producer_id in ongoing}",
                "self._ongoing = {producer_id: start for start, producer_id in ongoing if mutated()}",
            ),
            Edit(
                "tidelog.stream.producer_state:ProducerStates.append_marker",
                "del self._ongoing[header.producer_id], self._since[header.producer_id]",
                "self._ongoing.pop(header.producer_id, None); self._since.pop(header.producer_id, None)",
            ),
        ),
        UNDECIDED,
        FAILOVERS,
    ),
    _of_transactions(
        "aborted-offsets-committed",
        "the offsets of an aborted transaction become committed ones",
        (
            Edit(
                "tidelog.broker.groups.store:GroupStore._end_transaction",
                "if commit:",
                "if commit or not mutated():",
            ),
        ),
        OFFSETS,
        FAILOVERS,
    ),
    _of_transactions(
        "pending-offsets-not-loaded",
        "a new coordinator of a group does not know the offsets of open transactions",
        (
            Edit(
                "tidelog.broker.groups.store:GroupStore.replay_pending",
                "self.pending.put(producer, parsed, parse_offset_value(value))",
                "mutated() and self.pending.put(producer, parsed, parse_offset_value(value))",
            ),
        ),
        OFFSETS,
        FAILOVERS,
    ),
    _of_transactions(
        "time-outs-abort-nothing",
        "a transaction over its time-out is not aborted",
        (
            Edit(
                "tidelog.broker.txn.state:TransactionalId.tick",
                "if value.timeout_ms == NO_TIMEOUT_MS or self._began_ms + value.timeout_ms >= now_ms:",
                "if self._began_ms + value.timeout_ms >= now_ms or not mutated():",
            ),
        ),
        OPEN,
        FAILOVERS,
    ),
    _of_transactions(
        "markers-not-sent-again",
        "a new coordinator does not send the markers of transactions that are decided",
        (
            Edit(
                "tidelog.broker.txn.coordinator:TxnCoordinator.activated",
                "self._follow(shard, one, one.resume(self._now_ms()))",
                "mutated()",
            ),
        ),
        OPEN,
        FAILOVERS,
    ),
]
