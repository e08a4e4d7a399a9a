"""How far a table is: the offsets that its data stands for, and how they are found again. No I/O.

Each commit of the job carries its state twice: in the summary of its snapshot, and as a property of the table that the
same commit sets. Commits of others (compaction, deletes, another engine) carry none. `find_state` takes the state of
the nearest ancestor of the current snapshot that has one: after a rollback that is an older one, and the job repeats
what was rolled back. When the ancestors that had one are expired, the property tells it. (So a table that is rolled
back, or replaced, has to be met by a run of the job before its history is expired: nothing tells that afterwards. The
parent of the oldest snapshot that is left tells nothing, because pyiceberg removes it.)

Invariants: `number` grows by at least one with each commit; a commit of number n was made on the state of the commit
before it and on no other, so what was written for a number that is reached already can never be committed
(`pyspark_tidelog.jobs.table.attempts`); `next` never goes back but by a rollback of the table; from a topic's first
commit on no offset of any of its partitions is left out silently, also of one that was empty then, or not there.

Entry: `TableState`, `find_state`, `check_ends`, `starts`, `next_chunk`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound

KEY = "tidelog.state"
"""The name of the state in summaries of snapshots and among the properties of a table."""
VERSION = 1


@dataclass(frozen=True)
class TableState:
    """What a table's data stands for, at one commit of a job."""

    topic: str
    topic_id: str
    """A topic that was deleted and created again has another."""
    kind: str = ""
    """`raw` or `json`."""
    number: int = 0
    """Of the commit, int64; 0: there is none yet."""
    run: str = ""
    """Of the attempt that made the commit: unique."""
    next: Mapping[int, int] = field(default_factory=dict)
    """Partition → the offset behind the last one that the table has, or at which it begins; see `starts`."""
    has_all: bool = False
    """`next` has all partitions that there were at the last commit. States of older versions had none that were empty
    all the time."""
    epochs: Mapping[int, int] = field(default_factory=dict)
    """Partition → the leader epoch in which it had all that the table has of it. States of older versions have none."""
    since: Mapping[int, int] = field(default_factory=dict)
    """Partition → the first offset of this commit."""
    upsert_by: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    """Names of files in the quarantine's attempt of this commit: they are added to the quarantine after it."""

    @property
    def commit(self) -> str:
        """Return the id of the commit."""
        return attempt_name(self.number, self.run)

    def advanced(
        self,
        number: int,
        run: str,
        ranges: Mapping[int, tuple[int, int]],
        pending: Sequence[str],
        begun: Mapping[int, int],
    ) -> TableState:
        """Return the state after a commit that adds ranges of offsets `[start, end)` of partitions.

        `begun` is what `starts` tells of all partitions before it.
        """
        assert number > self.number, (number, self)
        assert all(self.next.get(partition, 0) <= start < end for partition, (start, end) in ranges.items()), ranges
        since = {partition: start for partition, (start, _) in ranges.items()}
        behind = {**self.next, **begun, **{partition: end for partition, (_, end) in ranges.items()}}
        files = tuple(sorted(pending))
        return replace(self, number=number, run=run, next=behind, has_all=True, since=since, pending=files)

    def to_json(self, sequence: int) -> str:
        """Return the text for a commit whose snapshot has a sequence number."""
        return json.dumps(
            {
                "version": VERSION,
                "topic": self.topic,
                "topic_id": self.topic_id,
                "kind": self.kind,
                "number": self.number,
                "run": self.run,
                "next": {str(partition): self.next[partition] for partition in sorted(self.next)},
                "has_all": self.has_all,
                "epochs": {str(partition): self.epochs[partition] for partition in sorted(self.epochs)},
                "since": {str(partition): self.since[partition] for partition in sorted(self.since)},
                "upsert_by": list(self.upsert_by),
                "pending": list(self.pending),
                "sequence": sequence,
            },
            separators=(",", ":"),
        )


class SnapshotFact(NamedTuple):
    """What a table's metadata says of a snapshot."""

    id: int
    parent: int | None
    sequence: int
    state: str | None
    """The text under `KEY` in its summary."""


def attempt_name(number: int, run: str) -> str:
    """Return the name of an attempt to make a commit. Names sort by numbers."""
    return f"{number:012d}-{run}"


def read_state(text: str, source: str) -> tuple[TableState, int]:
    """Return a state and the sequence number of its snapshot. Raises `CorruptData`, `InvalidInput`."""
    try:
        told: dict[str, Any] = json.loads(text)
        version = told["version"]
        if version != VERSION:
            raise InvalidInput(
                f"{source} has a state of version {version!r}, and this is version {VERSION}",
                hint="a newer Tidelog wrote it: use that",
            )
        state = TableState(
            topic=str(told["topic"]),
            topic_id=str(told["topic_id"]),
            kind=str(told["kind"]),
            number=int(told["number"]),
            run=str(told["run"]),
            next={int(partition): int(offset) for partition, offset in told["next"].items()},
            has_all=bool(told.get("has_all", False)),
            epochs={int(partition): int(epoch) for partition, epoch in told.get("epochs", {}).items()},
            since={int(partition): int(offset) for partition, offset in told["since"].items()},
            upsert_by=tuple(map(str, told["upsert_by"])),
            pending=tuple(map(str, told["pending"])),
        )
        return state, int(told["sequence"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(f"{source}: {KEY} cannot be read: {error!r}", hint="did another program write it?") from error


def find_state(
    current: int | None, snapshots: Mapping[int, SnapshotFact], stored: str | None, table: str
) -> TableState | None:
    """Return the state of a table; None if no job has written to it.

    `stored` is the property. Raises `NotFound` when the state was lost, `CorruptData`.
    """
    at, oldest = current, None
    while at is not None and at in snapshots:
        fact = snapshots[at]
        if fact.state is not None:
            return read_state(fact.state, f"snapshot {fact.id} of {table}")[0]
        at, oldest = fact.parent, fact
    if stored is None:
        return None
    state, sequence = read_state(stored, f"the properties of {table}")
    is_expired = all(fact.sequence != sequence for fact in snapshots.values())
    if is_expired and oldest is not None and oldest.sequence > sequence:
        return state  # ancestors are expired, and the snapshot of the state is one of these
    raise NotFound(
        f"table {table} was replaced or rolled back to what no job has written: its offsets are not known"
        f" (the last were those of commit {state.commit})",
        hint=f"remove the property {KEY} to begin at the topic's first offset, or write to another table",
    )


def check_ends(state: TableState, log_ends: Mapping[int, int], epoch_ends: Mapping[int, int]) -> None:
    """Raise `NotFound` when a partition has no more, or has others, of the records that the table has of it.

    `epoch_ends`: where the leader epochs of the state end, which newer ones have followed.
    """
    for partition, end in log_ends.items():
        behind, left = state.next.get(partition, 0), epoch_ends.get(partition, end)
        if end < behind:
            raise NotFound(
                f"{state.topic}-{partition} ends at offset {end}, and the table has it up to {behind}",
                hint="the topic has lost records, or this is another cluster",
            )
        if left < behind:
            raise NotFound(
                f"{state.topic}-{partition} has lost its records from offset {left} on, which the table has up to"
                f" {behind}: others have their offsets now",
                hint="the job repeats what is rolled back: roll the table back to a snapshot from before them, with"
                " pyiceberg or any engine; or write to another table",
            )


def starts(state: TableState, firsts: Mapping[int, int]) -> dict[int, int]:
    """Return where each partition goes on; `firsts` are the first offsets that exist, and tell which partitions are.

    A topic of which the table has nothing yet begins there. A partition that was added after the last commit begins at
    0: what is gone of it already is lost, and not left out.
    """
    return {partition: state.next.get(partition, 0 if state.has_all else first) for partition, first in firsts.items()}


def next_chunk(
    state: TableState, ends: Mapping[int, int], firsts: Mapping[int, int], max_offsets: int
) -> dict[int, tuple[int, int]]:
    """Return the offsets `[start, end)` of each partition for the next commit, at most `max_offsets` in all.

    What is there is shared out evenly; what a partition does not need is left to others. `firsts` are the first
    offsets that exist; see `starts`. `ends` are those up to which it may be read, and may lie before what the table
    has.
    """
    assert max_offsets > 0
    begun = starts(state, firsts)
    wanted = {partition: end - begun[partition] for partition, end in ends.items() if end > begun[partition]}
    shares: dict[int, int] = {}
    left = max_offsets
    by_need = sorted(wanted, key=lambda each: (wanted[each], each))
    for index, partition in enumerate(by_need):
        shares[partition] = min(wanted[partition], -(-left // (len(by_need) - index)))
        left -= shares[partition]
    return {
        partition: (begun[partition], begun[partition] + shares[partition])
        for partition in sorted(shares)
        if shares[partition] > 0
    }
