"""Check that the system is up to date and becomes idle: lag, failed-after-heal.

The worst real-time lag (`tidelog.simulation.checkers.lag`) is a finding when it exceeds `CheckOptions.max_lag_us`.
"""

from __future__ import annotations

from tidelog.simulation.checkers.finding import CheckOptions, Findings
from tidelog.simulation.checkers.index import HistoryIndex, Partition
from tidelog.simulation.checkers.lag import worst_lag


def check_rest(index: HistoryIndex, partition: Partition, end_us: int, options: CheckOptions, found: Findings) -> None:
    """Check the lag, and that sends long after the end of all faults succeed."""
    worst = worst_lag(partition, end_us) if options.max_lag_us is not None else None
    if worst is not None and options.max_lag_us is not None and worst.lag_us > options.max_lag_us:
        said = f"{partition.name}: a consumer waited for {worst.lag_us / 1e6:.3f} s where something was acknowledged"
        at = (partition.topic, partition.number, worst.reader.index)
        found.add("lag", said, worst.send, worst.reader, at=at)
    if options.settle_us is None or index.healed is None:
        return
    for op in partition.sends:
        if (
            op.began_us > index.healed.ended_us + options.settle_us
            and not op.ok
            and op.began_us < partition.gone_from_us
        ):
            late_s = (op.began_us - index.healed.ended_us) / 1e6
            said = f"{partition.name}: a send begun {late_s:.3f} s after all was healed: {op.error or op.outcome}"
            found.add("failed-after-heal", said, index.healed, op, at=(partition.topic, partition.number, op.index))
