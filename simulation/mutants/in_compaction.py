"""Mutations of log compaction: where a round ends, what it keeps, and in which order it commits.

Entry: `MUTATIONS_IN_COMPACTION`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.findings import LOUD
from tidelog.simulation.mutants.mutant import Edit, Mutation

KEPT = ("compaction",)
FAILOVERS = ("kill", "stop", "pause", "power", "isolate")
CUT_OFF = ("kill", "kill-all", "power", "stop")
"""Faults that end a round in its middle."""
_CLEANER = "tidelog.stream.cleaning.cleaner"
_PLAN = "tidelog.stream.cleaning.plan:plan_round"


def _of_compaction(
    name: str,
    what: str,
    edit: Edit,
    found_by: tuple[str, ...] = KEPT,
    faults: tuple[str, ...] = FAILOVERS,
    *,
    transactions: bool = False,
) -> Mutation:
    return Mutation(name, "compaction", what, (edit,), found_by, faults, transactions=transactions, table=True)


MUTATIONS_IN_COMPACTION = [
    _of_compaction(
        "last-value-dropped",
        "the newest record of the last key counts as one that was replaced",
        Edit(
            f"{_CLEANER}:Cleaning.seal",
            "for offset in self._keys.offsets():",
            "for offset in [*self._keys.offsets()][mutated() : -1]:",
        ),
    ),
    _of_compaction(
        "compacts-past-stable",
        "a round takes the records of open transactions for committed ones",
        Edit(
            _PLAN,
            "end = min(facts.last_stable, facts.recoverable, segments[-1].base_offset)",
            "end = min(facts.recoverable, segments[-1].base_offset)\n"
            "    if end > facts.last_stable:\n        mutated()",
        ),
        (*KEPT, "atomicity", "G1b", "lso-stuck"),
        transactions=True,
    ),
    _of_compaction(
        "young-records-compacted",
        "what is younger than min.compaction.lag.ms is compacted",
        Edit(
            _PLAN,
            "segment.newest_ms() > now_ms - config.min_compaction_lag_ms:",
            "segment.newest_ms() > now_ms - config.min_compaction_lag_ms and mutated():",
        ),
    ),
    _of_compaction(
        "compacts-from-before-the-log",
        "a round begins where the last one ended, though the log starts behind that",
        Edit(
            _PLAN,
            "facts.log_start <= facts.first_dirty <= facts.last_stable",
            "(facts.log_start <= facts.first_dirty or not mutated())",
        ),
        (*KEPT, *LOUD),
    ),
    _of_compaction(
        "full-map-passed-over",
        "a round goes on behind a batch whose keys do not fit into the map",
        Edit(
            f"{_CLEANER}:Cleaning.note",
            "and not self._note(record, aborted):\n                return False",
            "and not self._note(record, aborted):\n                mutated()",
        ),
    ),
    _of_compaction(
        "aborted-records-count",
        "an aborted record replaces the last value of its key",
        Edit(
            f"{_CLEANER}:Cleaning._note",
            "elif not aborted.covers(header):",
            "elif not (aborted.covers(header) and mutated()):",
        ),
        transactions=True,
    ),
    _of_compaction(
        "tombstones-at-once",
        "a tombstone goes before its delete horizon",
        Edit(
            f"{_CLEANER}:Cleaning._is_over",
            "header.base_timestamp <= self._now_ms",
            "(header.base_timestamp <= self._now_ms or not mutated())",
        ),
    ),
    _of_compaction(
        "abort-markers-dropped",
        "an abort marker goes though the txn index names it, so that readers drop what the producer commits later",
        Edit(
            f"{_CLEANER}:Cleaning._marker",
            "aborted.has_marker(header.base_offset)):",
            "aborted.has_marker(header.base_offset) and mutated()):",
        ),
        (*KEPT, "atomicity"),
        transactions=True,
    ),
    _of_compaction(
        "markers-before-their-records",
        "the marker of a transaction goes while a record of it is left",
        Edit(
            f"{_CLEANER}:Cleaning._marker",
            "has_data = header.producer_id in self._open_txns",
            "has_data = header.producer_id in self._open_txns and mutated()",
        ),
        (*KEPT, "lso-stuck", "G0", "atomicity"),
        transactions=True,
    ),
    _of_compaction(
        "round-noted-before-its-objects",
        "the end of a round is recorded before its objects are committed",
        Edit(
            "tidelog.broker.partitions.log_cleaner:_CleaningRound.run",
            "at = self._log_start\n",
            "at = self._log_start\n        mutated()\n"
            "        log.cleaning.finish(end, cleaner.now_ms(), self._changes, self._log_start)\n",
        ),
        faults=CUT_OFF,
    ),
    _of_compaction(
        "hole-not-written",
        "what a round removes leaves no hole",
        Edit(
            "tidelog.storage.compaction.compactor:Compactor._rewrite",
            "changed = list(merge_holes(await change(records)))",
            "changed = [each for each in merge_holes(await change(records)) if each.payload or mutated()]",
        ),
        (*KEPT, "contiguous-ranges", *LOUD),
    ),
    _of_compaction(
        "recovery-reads-what-was-compacted",
        "a round goes past where a recovery reads the batches of producers from",
        Edit(
            _PLAN,
            "end = min(facts.last_stable, facts.recoverable, segments[-1].base_offset)",
            "end = min(facts.last_stable, segments[-1].base_offset)\n"
            "    if end > facts.recoverable:\n        mutated()",
        ),
        (
            *KEPT,
            "producer-forgotten",
            "duplicate",
            "sequence-refused",
            "nonmonotonic-send",
            "lso-stuck",
            "defect",
            "assertion",
            *LOUD,
        ),
        CUT_OFF,
        transactions=True,
    ),
]
