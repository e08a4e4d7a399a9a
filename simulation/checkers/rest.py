"""Is the system up to date, and did it come to rest? lag, failed-after-heal.

The *real-time lag* of a poll that found nothing is the age of the oldest record that it should have found: acknowledged
before the poll began, at or behind its offset. The worst one is always measured (`worst_lag`); it is a finding when it
exceeds `CheckOptions.max_lag_us`. A poll that finds something is not behind, it is reading.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from simulation.checkers.finding import CheckOptions, Findings
from simulation.checkers.index import Index, Partition
from simulation.history import Op


class Lag(msgspec.Struct, frozen=True):
    """How far behind a poll was."""

    lag_us: int
    poll: Op
    send: Op
    """What it should have found."""


def worst_lag(partition: Partition) -> Lag | None:
    """The worst real-time lag of a partition, if any poll was behind at all."""
    offsets = sorted(partition.acknowledged)
    oldest: list[Op] = []  # of the acknowledged records from each offset on, the one that was acknowledged first
    for offset in reversed(offsets):
        op = partition.acknowledged[offset]
        oldest.append(op if not oldest or op.ended_us < oldest[-1].ended_us else oldest[-1])
    oldest.reverse()
    worst: Lag | None = None
    for op in partition.polls:
        if op.kind != "poll" or not op.ok or op.values or op.position < 0:
            continue
        at = bisect_left(offsets, max(op.position, partition.deleted_before(op.ended_us)))
        if at == len(offsets):
            continue
        lag_us = op.began_us - oldest[at].ended_us
        if lag_us > 0 and (worst is None or lag_us > worst.lag_us):
            worst = Lag(lag_us, op, oldest[at])
    return worst


def check_rest(index: Index, partition: Partition, options: CheckOptions, found: Findings) -> None:
    """Lag beyond the bound, and sends that fail although everything was healed long ago."""
    worst = worst_lag(partition) if options.max_lag_us is not None else None
    if worst is not None and options.max_lag_us is not None and worst.lag_us > options.max_lag_us:
        said = f"{partition.name}: a poll found nothing {worst.lag_us / 1e6:.3f} s after an acknowledgement"
        at = (partition.topic, partition.number, worst.poll.position)
        found.add("lag", f"{said} at or behind its offset {worst.poll.position}", worst.send, worst.poll, at=at)
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
