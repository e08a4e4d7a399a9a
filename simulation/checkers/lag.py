"""The worst real-time lag: how long consumers waited for available records, and the faults meanwhile.

An empty poll should have returned the records at or after its offset that had been acknowledged before it began. The
consumer has waited for them since the acknowledgement of the oldest; or since its process started reading there, or
received records from there, if that was later: a consumer that works through old records is not lagging, nor is one
that may read only what is committed. For a group, the wait continues while a revoked partition is assigned to no
member.

Entry: `worst_lag` for a partition, `explained` for its circumstances.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from tidelog.simulation.checkers.history import History, Op
from tidelog.simulation.checkers.index import Partition

SHOWN_FAULTS = 3


class Lag(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far behind a consumer was."""

    lag_us: int
    until_us: int
    reader: Op
    """The empty poll, or the first successful one after an `assign`; or the `revoke` after which no member of the group
    had the partition until then."""
    send: Op
    """The send that it should have returned."""
    read_meanwhile: int = 0
    """Records of other partitions that its process got while it waited."""
    faults: list[str] = []
    """Faults during the wait."""

    def text(self) -> str:
        """Return a one-line description."""
        op, since_us = self.reader, self.until_us - self.lag_us
        found = "had found" if op.kind == "poll" else "was between two assignments and had"
        said = f"process {op.process} {found} nothing of {op.topic}-{op.partition} from {since_us / 1e6:.1f} s on"
        said += f" until {self.until_us / 1e6:.1f} s, {self.read_meanwhile:,} records of others meanwhile"
        return f"{said}; {_listed(self.faults)}" if self.faults else said


def _listed(faults: list[str]) -> str:
    more = len(faults) - SHOWN_FAULTS
    return ", ".join(faults[:SHOWN_FAULTS]) + (f" and {more} faults more" if more > 0 else "")


class _Waits:
    """The waits of one partition's consumers; the worst is kept."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._offsets = sorted(partition.acknowledged)
        self._oldest: list[Op] = []
        """Of the acknowledged records from each offset on, the one that was acknowledged first."""
        for offset in reversed(self._offsets):
            op = partition.acknowledged[offset]
            self._oldest.append(op if not self._oldest or op.ended_us < self._oldest[-1].ended_us else self._oldest[-1])
        self._oldest.reverse()
        self.worst: Lag | None = None

    def note(self, reader: Op, position: int, progress_us: int, until_us: int) -> None:
        """Record that no records were received at `position` from `progress_us` until now."""
        at = bisect_left(self._offsets, max(position, self._partition.deleted_before(max(until_us, reader.ended_us))))
        if at == len(self._offsets):
            return
        lag_us = until_us - max(self._oldest[at].ended_us, progress_us)
        if lag_us > 0 and (self.worst is None or lag_us > self.worst.lag_us):
            self.worst = Lag(lag_us, until_us, reader, self._oldest[at])


def worst_lag(partition: Partition, end_us: int) -> Lag | None:
    """Return the worst real-time lag of a partition, None if there was none; `end_us` is the end of the history."""
    waits = _Waits(partition)
    progress: dict[int, int] = {}  # process → when it started to read here, or received records
    waiting: set[int] = set()  # processes that received nothing since they were assigned
    given_up: dict[str, Op] = {}  # group → the member that had the partition last, while no member has it
    for op in partition.polls:
        since_us = progress.get(op.process, 0)
        if op.kind == "assign":
            if (revoke := given_up.pop(op.group, None)) is not None:
                waits.note(revoke, revoke.offset, progress.get(revoke.process, 0), op.began_us)
            progress[op.process] = op.began_us
            waiting.add(op.process)
        elif op.kind == "revoke":
            waiting.discard(op.process)
            if op.offset >= 0:
                given_up[op.group] = op
        elif op.ok and op.values:
            if op.process in waiting:
                waits.note(op, op.offsets[0], since_us, op.began_us)
                waiting.remove(op.process)
            progress[op.process] = op.ended_us
        elif op.ok and op.position >= 0 and not op.committed_only:
            waits.note(op, op.position, since_us, op.began_us)
    for revoke in given_up.values():
        waits.note(revoke, revoke.offset, progress.get(revoke.process, 0), end_us)
    return waits.worst


def explained(lag: Lag, history: History) -> Lag:
    """Add the records that the process read meanwhile, and the faults."""
    since_us, op = lag.until_us - lag.lag_us, lag.reader
    read, faults = 0, []
    for each in history.ops:
        if each.kind == "poll" and each.process == op.process and since_us <= each.began_us <= lag.until_us:
            read += len(each.values)
        elif each.kind == "fault" and each.began_us <= lag.until_us and not 0 <= each.ended_us < since_us:
            faults.append(f"{each.name} ({each.target})" if each.target else each.name)
    return msgspec.structs.replace(lag, read_meanwhile=read, faults=faults)
