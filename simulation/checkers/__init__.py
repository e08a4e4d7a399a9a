"""The checkers: they read a history and return findings, each with the operations that prove it.

After Jepsen's workload for Kafka; docs/checkers.md defines each rule in words.

Invariants: the checkers allow for uncertainty: an uncertain operation may have happened or not, a deleted range may be
missing, and only real time and the order within one process order events. So a finding is always a violation, never a
suspicion. The running time is O(n log n).

May import: `tidelog.broker` and the packages below. Entry: `check` for a history.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.simulation.checkers.compaction import check_compaction
from tidelog.simulation.checkers.configs import check_configs
from tidelog.simulation.checkers.finding import CheckOptions, Finding, Findings
from tidelog.simulation.checkers.history import History
from tidelog.simulation.checkers.index import build
from tidelog.simulation.checkers.lag import Lag, explained, worst_lag
from tidelog.simulation.checkers.ledger import check_ledger
from tidelog.simulation.checkers.lookups import check_lookups
from tidelog.simulation.checkers.marks import check_marks
from tidelog.simulation.checkers.polls import check_polls
from tidelog.simulation.checkers.rest import check_rest
from tidelog.simulation.checkers.sends import check_sends
from tidelog.simulation.checkers.transactions import check_committed_gaps, check_transactions
from tidelog.simulation.checkers.writes import check_reads, check_writes

RULES = (
    "lost-write",
    "unseen",
    "duplicate",
    "inconsistent-offsets",
    "phantom-read",
    "G1a",
    "precommitted-read",
    "G0",
    "G1b",
    "G1c",
    "atomicity",
    "exactly-once",
    "balance",
    "zombie-accepted",
    "lso-stuck",
    "txn-unsettled",
    "compaction",
    "int-nonmonotonic-poll",
    "nonmonotonic-poll",
    "int-poll-skip",
    "poll-skip",
    "int-nonmonotonic-send",
    "int-send-skip",
    "nonmonotonic-send",
    "send-skip",
    "high-watermark-back",
    "log-start-back",
    "log-start-ahead",
    "out-of-range",
    "committed-offset-back",
    "epoch-back",
    "offset-for-time",
    "epoch-end",
    "config-lost",
    "lag",
    "failed-after-heal",
)
"""Every rule of the checkers, in the order of docs/checkers.md."""

__all__ = ["RULES", "CheckOptions", "Finding", "Lag", "check", "lag_of"]


def check(
    history: History,
    options: CheckOptions | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Return all findings of a history, by rule in the order of `RULES`, then by the first operation.

    `progress` is told how many partitions are done, and how many there are.
    """
    options = options or CheckOptions()
    found = Findings()
    index = build(history, found)
    end_us = _end_us(history)
    for done, partition in enumerate(index.partitions.values()):
        progress(done, len(index.partitions))
        gaps, of_committed = check_polls(partition, options, found)
        check_writes(index, partition, gaps, end_us, options, found)
        check_reads(index, partition, found)
        check_sends(partition, found)
        check_marks(partition, options, found)
        check_lookups(index, partition, found)
        check_rest(index, partition, end_us, options, found)
        check_committed_gaps(index, partition, of_committed, found)
        if partition.compacted is not None:
            check_compaction(index, partition, [*gaps, *of_committed], found)
    check_transactions(index, found)
    check_ledger(index, found)
    check_configs(index, found)
    order = {rule: number for number, rule in enumerate(RULES)}
    return sorted(found.found, key=lambda one: (order[one.rule], one.ops[-1].index))


def lag_of(history: History) -> Lag | None:
    """Return the worst real-time lag of all partitions; None if no consumer was ever behind."""
    partitions, end_us = build(history, Findings()).partitions.values(), _end_us(history)
    found = [lag for each in partitions if (lag := worst_lag(each, end_us)) is not None]
    return explained(max(found, key=lambda lag: lag.lag_us), history) if found else None


def _end_us(history: History) -> int:
    return max((op.ended_us for op in history.ops), default=0)
