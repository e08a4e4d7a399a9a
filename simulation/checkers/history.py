"""The history of a run: the clients' operations, their results, and the times. It is the only input of the checkers.

An `Op` is one operation of one process, from its invocation to its outcome. After Jepsen, the outcome is

- `ok`: it happened, with the recorded result;
- `fail`: it certainly did not happen (refused before anything was done);
- `info`: unknown; it may have happened, may happen later, or never. A time-out is `info`, never `fail`;
- `open`: still running. At the end of the history this is equivalent to `info`.

A *process* is one client session: one producer with its producer id, one consumer. A client that restarts is a new
process. A *value* identifies one record uniquely: no value is sent by two operations, so a client that retries by
itself (not inside its library) uses a new one. A topic that is deleted and created again has another name in the
history, e.g. `orders@2`: its offsets restart. Times are microseconds of one clock with an arbitrary origin.

The file is JSON lines: first a `Header`, then one line for each operation in the order in which they began. Fields with
their default value are left out.

Entry: `History` (`begin`, `end`, `save`), `load`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidelog.runtime.errors import CorruptData, NotFound, StorageFailed

FORMAT = 2
"""Incremented when an older reader would misread a file. New fields with defaults do not require that."""

TOLD_EVERY = 1_000
"""Operations between two calls that say how far a file is read."""

Kind = Literal[
    "send",  # one record batch to one partition: values; result: offsets
    "poll",  # one response for one partition: offset (its start), values, offsets, epochs
    "assign",  # the process starts to read this partition at `offset` (-1: at the returned offset); group
    "revoke",  # the process loses the partition, read up to `offset`, until the next `assign`; group
    "commit",  # group, offset
    "committed",  # reads a group's committed offset: offset (-1: none)
    "offset_for_time",  # time_ms; result: offset of the first record with that time or a later one (-1: none), found_ms
    "epoch_end",  # wanted_epoch; result: offset (its end), epoch (the newest one that is not newer than wanted)
    "list_offsets",  # result: log_start, high_watermark
    "delete_records",  # offset: deletes everything before it (-1: everything); result: log_start
    "create_topic",  # deletes: whether retention may delete from it; keeps, compacts, lag_us, tombstones_us
    "delete_topic",
    "set_config",  # topic, name: of the config, target: its value
    "append_config",  # target: an element of a list
    "config",  # result: target
    "init_txn",  # name: the transactional id; result: producer. Fences the sessions before
    "txn_commit",  # txn, group, offset: committed with the transaction
    "end_txn",  # txn, commits
    "marker",  # producer, offset, commits: the end of a transaction, as it is in the partition
    "audit",  # committed_only: the process has read the whole partition, up to `offset`
    "describe_txn",  # name: the transactional id, target: its state
    "cleaned",  # offset: log compaction has been over everything before it when this ended
    "left",  # log compaction may have left something alone meanwhile, which a snapshot or a branch held
    "fault",  # name, target; from its start to its end
    "heal",  # no faults after its end; the system must then become idle
]
Outcome = Literal["open", "ok", "fail", "info"]

UNKNOWN = -1
"""A value that is not the workload's; an offset, epoch or time that was not reported."""
LARGEST_TIME = -3
"""offset_for_time: asks for the first record with the largest time (KIP-734)."""
OUT_OF_RANGE = "out of range"
"""poll: the error of one that failed because a leader says that it has no such offset."""


class Op(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One operation. `Kind` documents the fields of each kind."""

    index: int
    """Its position in the history, from 0, in the order of start times."""
    kind: Kind
    process: int
    began_us: int
    ended_us: int = UNKNOWN
    outcome: Outcome = "open"
    topic: str = ""
    partition: int = UNKNOWN
    offset: int = UNKNOWN
    """poll: the start offset of the fetch; commit, committed, assign, delete_records: the offset itself."""
    values: list[int] = []
    """The records' values, in the order of the batch or of the response; `UNKNOWN` for foreign records."""
    offsets: list[int] = []
    """As long as `values`; empty if not reported."""
    epochs: list[int] = []
    """poll: the records' leader epochs; empty if the client does not report them."""
    next_offset: int = UNKNOWN
    """poll: the start of the next one; by default after the last record, or the start of this one."""
    high_watermark: int = UNKNOWN
    """Only from the response to a request sent after `began_us`, not from a cache."""
    log_start: int = UNKNOWN
    """As `high_watermark`."""
    epoch: int = UNKNOWN
    """send: the leader epoch under which it was acknowledged, if known; offset_for_time: that of the record; epoch_end:
    the one whose end was told."""
    wanted_epoch: int = UNKNOWN
    """epoch_end: the one asked for."""
    times: list[int] = []
    """send: for each value the timestamp of its record, in ms."""
    time_ms: int = UNKNOWN
    """offset_for_time: the timestamp asked for."""
    found_ms: int = UNKNOWN
    """offset_for_time: that of the record found."""
    idempotent: bool = False
    acks: int = -1
    """send: as in Kafka. Only -1 (all) guarantees durability."""
    group: str = ""
    txn: int = UNKNOWN
    """send, txn_commit, end_txn: the number of the transaction."""
    commits: bool = False
    """end_txn, marker: commit, not abort."""
    committed_only: bool = False
    """poll, list_offsets, audit: `isolation.level=read_committed`."""
    producer: int = UNKNOWN
    """send, init_txn, marker: the producer id."""
    causes: list[int] = []
    """send in a transaction: for each value the one that it was made of, which the transaction has consumed."""
    amounts: list[int] = []
    """send: for each value by how much it changes the balance of all accounts."""
    keys: list[int] = []
    """send, poll of a compacted topic: for each value the key of its record, `UNKNOWN` for none."""
    tombstones: list[int] = []
    """send, poll of a compacted topic: those of `values` whose records have no value."""
    deletes: bool = False
    """create_topic: retention may delete from it, so the reported log start is trusted."""
    keeps: int = 0
    """create_topic: so many records stay at least, the newest ones, whatever retention deletes."""
    compacts: bool = False
    """create_topic: log compaction removes records that a later one of their key has replaced."""
    lag_us: int = 0
    """create_topic: for so long nothing is removed for a record, from when it was sent."""
    tombstones_us: int = 0
    """create_topic: for so long a tombstone stays, from when it was sent."""
    name: str = ""
    """fault: its name."""
    target: str = ""
    """fault: its target."""
    error: str = ""
    """The client's error if the outcome is not ok."""

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
        """poll: the start of the next one; `UNKNOWN` for an empty poll without a start offset."""
        if self.next_offset >= 0:
            return self.next_offset
        return self.offsets[-1] + 1 if self.offsets else self.offset

    def text(self) -> str:
        """Return a one-line description."""
        where = f" {self.topic}-{self.partition}" if self.partition >= 0 else f" {self.topic}" if self.topic else ""
        ends = f"{self.ended_us / 1e6:.6f}" if self.ended_us >= 0 else "…"
        parts = [f"#{self.index} p{self.process} {self.kind}{where} {self.began_us / 1e6:.6f}–{ends} s {self.outcome}"]
        numbers = (
            "offset",
            "next_offset",
            "log_start",
            "high_watermark",
            "epoch",
            "wanted_epoch",
            "txn",
            "producer",
            "time_ms",
            "found_ms",
        )
        parts += [f"{name} {got}" for name in numbers if (got := getattr(self, name)) != UNKNOWN]
        parts += [f"{name} {got}" for name in ("group", "name", "target", "error") if (got := getattr(self, name))]
        if self.kind in ("end_txn", "marker"):
            parts.append("commits" if self.commits else "aborts")
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
    """Origin: seed, command, configuration. Informational; not read by checkers."""


class History:
    """Operations in the order in which they began.

    `begin` may be called by several threads; an operation is ended by the thread that began it.
    """

    def __init__(self, ops: Iterable[Op] = (), about: dict[str, Any] | None = None) -> None:
        self.ops = list(ops)
        self.about = dict(about or {})
        self._numbers = itertools.count(len(self.ops))

    def __len__(self) -> int:
        return len(self.ops)

    def begin(self, kind: Kind, process: int, time_us: int, **fields: Any) -> Op:
        """Record an invocation. `fields` are those of `Op`."""
        op = Op(index=next(self._numbers), kind=kind, process=process, began_us=time_us, **fields)
        self.ops.append(op)
        return op

    @staticmethod
    def end(op: Op, outcome: Outcome, time_us: int, **fields: Any) -> None:
        """Record the outcome and the result. An uncertain operation may become known later."""
        for name, value in fields.items():
            setattr(op, name, value)
        op.ended_us = time_us
        op.outcome = outcome

    def note(self, kind: Kind, process: int, time_us: int, **fields: Any) -> Op:
        """Record an instantaneous operation that cannot fail, such as `assign` or `heal`."""
        op = self.begin(kind, process, time_us, **fields)
        self.end(op, "ok", time_us)
        return op

    def save(self, path: Path) -> None:
        """Write the file. Raises `StorageFailed`."""
        self.ops.sort(key=lambda op: op.index)  # threads append in arbitrary order
        encoder = msgspec.json.Encoder()
        try:
            with path.open("wb") as file:
                file.write(encoder.encode(Header(tidelog_history=FORMAT, about=self.about)) + b"\n")
                for op in self.ops:
                    file.write(encoder.encode(op) + b"\n")
        except OSError as error:
            raise StorageFailed(f"cannot write the history to {path}: {error.strerror}") from error


def load(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> History:
    """Read a file; `progress` is told how many bytes of it are read, and how many it has. Raises `NotFound`,
    `StorageFailed`, and `CorruptData` if it is invalid or of a later version."""
    try:
        with path.open("rb") as file:
            total, done = os.fstat(file.fileno()).st_size, 0
            header = _header(path, file.readline())
            decoder = msgspec.json.Decoder(Op)
            ops = []
            for number, line in enumerate(file):
                done += len(line)
                if number % TOLD_EVERY == 0:
                    progress(done, total)
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
    for name in ("offsets", "epochs", "causes", "amounts", "keys"):
        if getattr(op, name) and len(getattr(op, name)) != len(op.values):
            raise CorruptData(f"{path}, line {number + 2}: {len(op.values)} values, but another number of {name}")
    if op.kind == "poll" and op.values and not op.offsets:
        raise CorruptData(f"{path}, line {number + 2}: a poll with values, but without their offsets")


def _short(numbers: list[int]) -> str:
    if len(numbers) <= 6:
        return str(numbers)
    return f"[{numbers[0]}, {numbers[1]}, … {len(numbers) - 3} more …, {numbers[-1]}]"
