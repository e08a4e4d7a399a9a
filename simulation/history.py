"""The history of a run: what clients asked for, what they were told, and when. The checkers read nothing else.

An `Op` is one operation of one process, from its invocation to its outcome. After Jepsen, the outcome is

- `ok`: it happened, and this is what the client was told;
- `fail`: it certainly did not happen (refused before anything was done);
- `info`: nobody knows; it may have happened, may happen later, or never. A time-out is `info`, never `fail`;
- `open`: still going on. Where the history ends, that is as good as `info`.

A *process* is one client session: one producer with its producer id, one consumer. A client that starts anew is a new
process. A *value* identifies one record for good: no value is sent by two operations, so a client that tries again
by itself (not inside its library) takes a new one. A topic that is deleted and created again has another name in the
history, e.g. `orders@2`: offsets start again there. Times are microseconds of one clock from any start.

The file is JSON lines: first a `Header`, then one line for each operation in the order in which they began. Fields that
hold their default are left out.

Entry: `History` (`begin`, `end`, `save`), `load`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from runtime.errors import CorruptData, NotFound, StorageFailed

FORMAT = 2
"""Grows when a reader of the older one would misunderstand a file. New fields with defaults do not need that."""

Kind = Literal[
    "send",  # one record batch to one partition: values; told: offsets
    "poll",  # one answer for one partition: offset (where it began), values, offsets, epochs
    "assign",  # the process reads this partition anew, from `offset` (-1: wherever it is told to); group
    "revoke",  # the process must give it up, having read up to `offset`, until it is assigned it again; group
    "commit",  # group, offset
    "committed",  # asks for a group's committed offset: offset (-1: none)
    "list_offsets",  # told: log_start, high_watermark
    "delete_records",  # offset: everything before it goes (-1: everything); told: log_start
    "create_topic",  # deletes: whether retention may delete from it
    "delete_topic",
    "end_txn",  # txn, commits
    "fault",  # name, target; from its begin to its end
    "heal",  # all faults are gone from its end on; what follows must come to rest
]
Outcome = Literal["open", "ok", "fail", "info"]

UNKNOWN = -1
"""A value that is not the workload's; an offset, epoch or time that nobody was told."""


class Op(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One operation. Which fields matter for which kind: see `Kind`."""

    index: int
    """Its place in the history, from 0, in the order of beginnings."""
    kind: Kind
    process: int
    began_us: int
    ended_us: int = UNKNOWN
    outcome: Outcome = "open"
    topic: str = ""
    partition: int = UNKNOWN
    offset: int = UNKNOWN
    """poll: where the fetch began; commit, committed, assign, delete_records: the offset itself."""
    values: list[int] = []
    """The records' values, in the order of the batch or of the answer; `UNKNOWN` for records of others."""
    offsets: list[int] = []
    """As long as `values`; empty where nobody was told."""
    epochs: list[int] = []
    """poll: the records' leader epochs; empty where the client does not tell."""
    next_offset: int = UNKNOWN
    """poll: where the next one begins; unless given, one behind the last record, or where this one began."""
    high_watermark: int = UNKNOWN
    """Only if the answer to a request that was sent after `began_us` said so, not from a cache."""
    log_start: int = UNKNOWN
    """As `high_watermark`."""
    epoch: int = UNKNOWN
    """send: the leader epoch under which it was acknowledged, where that is known."""
    idempotent: bool = False
    acks: int = -1
    """send: as in Kafka. Only -1 (all) promises anything."""
    group: str = ""
    txn: int = UNKNOWN
    """send, end_txn: one transaction, by a number of its own."""
    commits: bool = False
    """end_txn: commit, not abort."""
    committed_only: bool = False
    """poll: `isolation.level=read_committed`."""
    deletes: bool = False
    """create_topic: retention may delete from it, so a log start is believed."""
    name: str = ""
    """fault: which."""
    target: str = ""
    """fault: what was hit."""
    error: str = ""
    """What the client was told when the outcome is not ok."""

    @property
    def ok(self) -> bool:
        """Whether it certainly happened."""
        return self.outcome == "ok"

    @property
    def uncertain(self) -> bool:
        """Whether it may have happened, may happen later, or never."""
        return self.outcome in ("info", "open")

    @property
    def position(self) -> int:
        """poll: where the next one begins; `UNKNOWN` if it was empty and does not say where it began."""
        if self.next_offset >= 0:
            return self.next_offset
        return self.offsets[-1] + 1 if self.offsets else self.offset

    def text(self) -> str:
        """One line for people."""
        where = f" {self.topic}-{self.partition}" if self.partition >= 0 else f" {self.topic}" if self.topic else ""
        ends = f"{self.ended_us / 1e6:.6f}" if self.ended_us >= 0 else "…"
        parts = [f"#{self.index} p{self.process} {self.kind}{where} {self.began_us / 1e6:.6f}–{ends} s {self.outcome}"]
        numbers = ("offset", "next_offset", "log_start", "high_watermark", "epoch", "txn")
        parts += [f"{name} {got}" for name in numbers if (got := getattr(self, name)) != UNKNOWN]
        parts += [f"{name} {got}" for name in ("group", "name", "target", "error") if (got := getattr(self, name))]
        if self.values:
            parts.append(f"values {_short(self.values)}")
        if self.offsets:
            parts.append(f"at {_short(self.offsets)}")
        return ", ".join(parts)


class Header(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first line of a file."""

    tidelog_history: int
    """`FORMAT` of the writer."""
    about: dict[str, Any] = {}
    """What made it: seed, command, configuration. For people; no checker reads it."""


class History:
    """Operations in the order in which they began.

    `begin` may be called by several threads; an operation is ended by whoever began it.
    """

    def __init__(self, ops: Iterable[Op] = (), about: dict[str, Any] | None = None) -> None:
        self.ops = list(ops)
        self.about = dict(about or {})
        self._numbers = itertools.count(len(self.ops))

    def __len__(self) -> int:
        return len(self.ops)

    def begin(self, kind: Kind, process: int, time_us: int, **fields: Any) -> Op:
        """Note an invocation. `fields` are an `Op`'s."""
        op = Op(index=next(self._numbers), kind=kind, process=process, began_us=time_us, **fields)
        self.ops.append(op)
        return op

    @staticmethod
    def end(op: Op, outcome: Outcome, time_us: int, **fields: Any) -> None:
        """Note its outcome, and what came with it. An operation that was uncertain may become known later."""
        for name, value in fields.items():
            setattr(op, name, value)
        op.ended_us = time_us
        op.outcome = outcome

    def note(self, kind: Kind, process: int, time_us: int, **fields: Any) -> Op:
        """An operation that takes no time and cannot fail, such as `assign` or `heal`."""
        op = self.begin(kind, process, time_us, **fields)
        self.end(op, "ok", time_us)
        return op

    def save(self, path: Path) -> None:
        """Write the file. Raises `StorageFailed`."""
        self.ops.sort(key=lambda op: op.index)  # threads append in any order
        encoder = msgspec.json.Encoder()
        try:
            with path.open("wb") as file:
                file.write(encoder.encode(Header(tidelog_history=FORMAT, about=self.about)) + b"\n")
                for op in self.ops:
                    file.write(encoder.encode(op) + b"\n")
        except OSError as error:
            raise StorageFailed(f"cannot write the history to {path}: {error.strerror}") from error


def load(path: Path) -> History:
    """Read a file. Raises `NotFound`, `StorageFailed`, and `CorruptData` if it is none, or of a later version."""
    try:
        with path.open("rb") as file:
            header = _header(path, file.readline())
            decoder = msgspec.json.Decoder(Op)
            ops = []
            for number, line in enumerate(file):
                try:
                    op = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise CorruptData(f"{path}, line {number + 2}: {error}") from error
                _well_formed(path, number, op)
                ops.append(op)
    except FileNotFoundError as error:
        raise NotFound(f"there is no history {path}", hint="`tidelog chaos --history FILE` writes one") from error
    except OSError as error:
        raise StorageFailed(f"cannot read {path}: {error.strerror}") from error
    return History(ops, header.about)


def _header(path: Path, line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptData(f"{path} is no history of Tidelog: its first line is no header ({error})") from error
    if header.tidelog_history > FORMAT:
        raise CorruptData(
            f"{path} is of version {header.tidelog_history}, this Tidelog reads up to {FORMAT}",
            hint="read it with the version that wrote it",
        )
    return header


def _well_formed(path: Path, number: int, op: Op) -> None:
    if op.index != number:
        raise CorruptData(f"{path}, line {number + 2}: operation {op.index} where {number} was due")
    for name in ("offsets", "epochs"):
        if getattr(op, name) and len(getattr(op, name)) != len(op.values):
            raise CorruptData(f"{path}, line {number + 2}: {len(op.values)} values, but another number of {name}")
    if op.kind == "poll" and op.values and not op.offsets:
        raise CorruptData(f"{path}, line {number + 2}: a poll with values, but without their offsets")


def _short(numbers: list[int]) -> str:
    if len(numbers) <= 6:
        return str(numbers)
    return f"[{numbers[0]}, {numbers[1]}, … {len(numbers) - 3} more …, {numbers[-1]}]"
