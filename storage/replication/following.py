"""`WalFollower`: what a follower does with a master's WAL. Sans-IO: it decides, the caller cuts, writes and answers.

A connection goes through these steps; anything else on it ends it:

    HELLO sent → WELCOME: `matched` says how to make this WAL a prefix of the master's → cut, durably
    → ACK of the new end, at once (A7) → RECORDS: `fits`, then written, and acknowledged when they are durable

A WELCOME may come again on a connection whose master was elected anew (A3).

Truncation (A5): the newest epoch that both histories have with the same start gives the cut, the smaller of its two
ends. Bytes below this replica's confirm offset are never cut: they may have been acknowledged (rule 8). Where nothing
is common, or the master has trimmed what would follow, the WAL starts over, provided that everything confirmed in it is
in the bucket; otherwise the connection ends with an alarm, and nothing is changed. (An old master whose first epoch
reached nobody has nothing in common with the others; neither has a WAL that was trimmed to the start of bytes that only
it had.) Files of a WAL that starts over are kept aside unless all of it is in the bucket: a replica knows of a
confirmation later than its master (rule 13). So are those of a WAL that has records which an operator has given up: it
starts over where another one is cut. (It is in no SyncStateSet: nothing that was counted is lost with what it has.)

A WAL starts over at the committed WAL offset, where the master's log has it: what is before is confirmed, so it is the
same everywhere, and nobody needs it from a WAL any more. It does not start over before that, at the master's first
offset: it would end before what it has promised and acknowledged, like a disk that was rolled back.

Entry: `WalFollower`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tidelog.runtime.errors import CorruptData, Fenced
from tidelog.storage.replication.frames import BadFrame, Records, Welcome
from tidelog.storage.wal.epochs import EpochHistory


class Diverged(CorruptData):
    """This WAL and the master's have no common point that keeps everything confirmed: nothing was changed."""


class Step(Enum):
    """What makes a follower's WAL a prefix of its master's."""

    KEEP = "keep"
    """It is one."""
    TRUNCATE = "truncate"
    """Cut at the offset."""
    RESTART = "restart"
    """Begin an empty WAL at the offset: all that was in it is in the bucket."""
    REPLACE = "replace"
    """The same, and keep the old one's files aside: its end is not in the bucket, and not known to be confirmed; or it
    may have records that an operator has given up."""


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome of a handshake."""

    step: Step
    offset: int
    """The end of the WAL afterwards (int64 bytes)."""


@dataclass(frozen=True, slots=True)
class LocalWal:
    """The follower's WAL at the moment of a handshake. Everything in it is durable."""

    start_offset: int
    end_offset: int
    confirm_offset: int
    promised_epoch: int
    history: EpochHistory


class WalFollower:
    """One connection of a follower to its master."""

    def __init__(self) -> None:
        self.master_epoch = -1
        """That of the master; -1 before its WELCOME."""
        self.confirm_offset = 0
        """The largest confirm offset that the master has told; it may lie after this WAL's end."""
        self.committed_offset = 0
        """Everything before it is in committed objects."""

    def matched(self, mine: LocalWal, master: Welcome, committed_offset: int, *, given_up: bool = False) -> Match:
        """Return how this WAL becomes a prefix of the master's.

        `committed_offset` is what this broker's own metadata says of the replica set: what the master says of it does
        not decide what is thrown away. `given_up`: this WAL may have records that an operator has given up. Raises
        `Fenced` for a master of an older epoch than was promised, `Diverged`.
        """
        if master.master_epoch < max(mine.promised_epoch, mine.history.last_epoch, self.master_epoch):
            raise Fenced(
                f"the master is of epoch {master.master_epoch}; this replica has promised"
                f" {max(mine.promised_epoch, mine.history.last_epoch)}"
            )
        match = self._match(mine, master, committed_offset, given_up=given_up)
        self.master_epoch = master.master_epoch
        self._note(master.confirm_offset, master.committed_offset)
        return match

    def _match(self, mine: LocalWal, master: Welcome, committed_offset: int, *, given_up: bool) -> Match:
        gone = max(committed_offset, mine.start_offset)
        begin = max(master.start_offset, min(gone, master.end_offset))
        cut = mine.history.common_point(mine.end_offset, EpochHistory(master.epochs), master.end_offset)
        if cut is not None and mine.start_offset <= cut and master.start_offset <= cut:
            if cut < mine.confirm_offset:
                raise Diverged(
                    f"this WAL and the master's part at {cut}; everything before {mine.confirm_offset} is confirmed",
                    hint="report this; keep the directories of all members of the replica set",
                )
            if given_up and cut < mine.end_offset:
                return Match(Step.REPLACE, begin)
            return Match(Step.KEEP if cut == mine.end_offset else Step.TRUNCATE, cut)
        if mine.confirm_offset > gone:
            raise Diverged(
                f"this WAL [{mine.start_offset}, {mine.end_offset}) and the master's [{master.start_offset},"
                f" {master.end_offset}) have no common point; {mine.confirm_offset} is confirmed, {committed_offset}"
                " in the bucket",
                hint="is this the WAL of another cluster? Keep it; a replica without a WAL is filled by its master",
            )
        if mine.end_offset == mine.start_offset == begin:
            return Match(Step.KEEP, begin)
        return Match(Step.REPLACE if given_up or mine.end_offset > gone else Step.RESTART, begin)

    def fits(self, records: Records, end_offset: int) -> bool:
        """Note a frame's offsets; return whether it has records to write at `end_offset`, this WAL's end.

        Raises `Fenced` for another master epoch than the connection's, `BadFrame` for records that do not follow.
        """
        if records.master_epoch != self.master_epoch:
            raise Fenced(f"records of master epoch {records.master_epoch} on a connection of epoch {self.master_epoch}")
        if len(records.body):
            if records.offset != end_offset:
                raise BadFrame(f"records at {records.offset} were sent; this WAL ends at {end_offset}")
            if not records.epoch_start <= records.offset or records.epoch > records.master_epoch:
                raise BadFrame(
                    f"records at {records.offset} of epoch {records.epoch}, which begins at {records.epoch_start},"
                    f" from the master of epoch {records.master_epoch}"
                )
        self._note(records.confirm_offset, records.committed_offset)
        return bool(len(records.body))

    def confirmed(self, durable_offset: int) -> int:
        """Return up to which offset this replica knows its own bytes to be confirmed."""
        return min(self.confirm_offset, durable_offset)

    def _note(self, confirm_offset: int, committed_offset: int) -> None:
        self.confirm_offset = max(self.confirm_offset, confirm_offset)
        self.committed_offset = max(self.committed_offset, committed_offset)
