"""A tiny reference model: one partition that does everything right, used by clients whose operations overlap at random.

Every operation has a moment between its beginning and its end at which the log carries it out, or it never does and its
outcome is `info` or `fail`. What comes out is a correct history, whatever the choices were.

Entry: `generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tidelog.simulation.checkers.history import LARGEST_TIME, History, Op, Outcome

GROUP = "g"
FINAL_READER = 99


@dataclass
class _Client:
    process: int
    kinds: tuple[str, ...]
    idempotent: bool = False
    position: int = 0
    op: Op | None = None
    applied: bool = False
    told: dict[str, Any] = field(default_factory=dict)


class ReferenceLog:
    """The partition and its clients; one `step` moves one client by one event."""

    def __init__(self, random: Random, start_value: int = 0) -> None:
        self.history = History()
        self.values: list[int] = []
        self.epochs: list[int] = []
        self.times: list[int] = []
        self.log_start = 0
        self.committed = -1
        self.epoch = 1
        self._random = random
        self._next_value = start_value
        self._now_us = 0
        self._clients = [
            _Client(1, ("send",), idempotent=True),
            _Client(2, ("send",), idempotent=True),
            _Client(3, ("send",)),
            _Client(4, ("poll",)),
            _Client(5, ("poll", "commit")),
            _Client(6, ("list_offsets", "committed")),
            _Client(7, ("delete_records",)),
            _Client(8, ("offset_for_time", "epoch_end")),
        ]

    def now(self) -> int:
        self._now_us += self._random.randrange(1, 5)
        return self._now_us

    def step(self) -> None:
        weights = (4, 4, 4, 4, 4, 2, 0.6, 2)
        (client,) = self._random.choices(self._clients, weights)
        if client.op is None:
            self._begin(client)
        elif not client.applied and self._random.random() < 0.95:
            client.told = getattr(self, f"_{client.op.kind}")(client, client.op)
            client.applied = True
        else:
            self._end(client)
        if self._random.random() < 0.02:
            self.epoch += 1

    def finish(self) -> History:
        """Heal, and read everything that is there."""
        for client in self._clients:
            if client.op is not None and self._random.random() < 0.7:
                self._end(client)
        self.history.note("heal", 0, self.now())
        client = _Client(FINAL_READER, ("poll",), position=self.log_start)
        self.history.note("assign", FINAL_READER, self.now(), topic="t", partition=0, offset=self.log_start)
        while client.position < len(self.values):
            op = client.op = self.history.begin("poll", FINAL_READER, self.now(), topic="t", partition=0)
            self.history.end(op, "ok", self.now(), **self._poll(client, op))
        op = self.history.begin("list_offsets", FINAL_READER, self.now(), topic="t", partition=0)
        self.history.end(op, "ok", self.now(), **self._list_offsets(client, op))
        return self.history

    def _begin(self, client: _Client) -> None:
        kind: Any = self._random.choice(client.kinds)
        fields: dict[str, Any] = {"topic": "t", "partition": 0}
        if kind == "send":
            count = self._random.randrange(1, 4)
            fields["values"] = list(range(self._next_value, self._next_value + count))
            fields["idempotent"] = client.idempotent
            fields["times"] = [self._random.randrange(30) for _ in range(count)]
            self._next_value += count
        elif kind == "poll" and self._random.random() < 0.1:
            client.position = self._random.randrange(self.log_start, len(self.values) + 1)
            self.history.note("assign", client.process, self.now(), **fields, offset=client.position)
        elif kind == "commit":
            fields |= {"group": GROUP, "offset": client.position}
        elif kind == "committed":
            fields["group"] = GROUP
        elif kind == "offset_for_time":
            fields["time_ms"] = self._random.choice((LARGEST_TIME, self._random.randrange(32)))
        elif kind == "epoch_end":
            fields["wanted_epoch"] = self._random.randrange(self.epoch + 1)
        elif kind == "delete_records":
            fields["offset"] = self._random.randrange(self.log_start, len(self.values) + 1)
        client.op = self.history.begin(kind, client.process, self.now(), **fields)
        client.applied = False

    def _end(self, client: _Client) -> None:
        assert client.op is not None
        outcome: Outcome = self._random.choice(("info", "fail"))
        if client.applied:
            outcome = "ok" if self._random.random() < 0.9 else "info"
        told = client.told if outcome == "ok" else {}
        self.history.end(client.op, outcome, self.now(), **told)
        if outcome == "ok" and client.op.kind == "poll":
            client.position = client.op.position
        client.op = None

    def _send(self, client: _Client, op: Op) -> dict[str, Any]:
        base = len(self.values)
        self.values += op.values
        self.epochs += [self.epoch] * len(op.values)
        self.times += op.times
        return {"offsets": list(range(base, len(self.values))), "epoch": self.epoch}

    def _poll(self, client: _Client, op: Op) -> dict[str, Any]:
        begin = client.position = max(client.position, self.log_start)
        end = min(begin + self._random.randrange(1, 6), len(self.values))
        client.position = end if op.process == FINAL_READER else client.position
        return {
            "offset": begin,
            "offsets": list(range(begin, end)),
            "values": self.values[begin:end],
            "epochs": self.epochs[begin:end],
            "high_watermark": len(self.values),
            "log_start": self.log_start,
        }

    def _commit(self, client: _Client, op: Op) -> dict[str, Any]:
        self.committed = op.offset
        return {}

    def _committed(self, client: _Client, op: Op) -> dict[str, Any]:
        return {"offset": self.committed}

    def _list_offsets(self, client: _Client, op: Op) -> dict[str, Any]:
        return {"log_start": self.log_start, "high_watermark": len(self.values)}

    def _offset_for_time(self, client: _Client, op: Op) -> dict[str, Any]:
        there = range(self.log_start, len(self.values))
        largest = max((self.times[at] for at in there), default=0)
        wanted = largest if op.time_ms == LARGEST_TIME else op.time_ms
        for at in there:
            if self.times[at] >= wanted:
                return {"offset": at, "found_ms": self.times[at], "epoch": self.epochs[at]}
        return {}

    def _epoch_end(self, client: _Client, op: Op) -> dict[str, Any]:
        newer = [at for at, epoch in enumerate(self.epochs) if epoch > op.wanted_epoch and at >= self.log_start]
        older = [epoch for epoch in self.epochs[self.log_start :] if epoch <= op.wanted_epoch]
        return {"offset": min(newer, default=len(self.values)), "epoch": max(older, default=op.wanted_epoch)}

    def _delete_records(self, client: _Client, op: Op) -> dict[str, Any]:
        self.log_start = max(self.log_start, op.offset)
        return {"log_start": self.log_start}


def generate(random: Random, steps: int) -> History:
    """A correct history of so many events, and the final read."""
    log = ReferenceLog(random)
    for _ in range(steps):
        log.step()
    return log.finish()


Mutation = Callable[[History, Random], bool]
"""Breaks a promise somewhere; False where the history has no place for it."""


def _ok(history: History, kind: str) -> list[Op]:
    return [op for op in history.ops if op.kind == kind and op.ok]


def forget(history: History, random: Random) -> bool:
    """An acknowledged record is in no poll any more, though the one behind it is."""
    start = max((op.log_start for op in history.ops), default=0)
    start = max(start, *(op.offset for op in history.ops if op.kind == "delete_records"), 0)
    high = max(op.high_watermark for op in history.ops)
    places = [at for op in _ok(history, "send") for at in op.offsets if start <= at < high - 1]
    if not places:
        return False
    lost = random.choice(places)
    for op in history.ops:
        if op.kind == "poll" and lost in op.offsets:
            at = op.offsets.index(lost)
            op.next_offset = op.position
            del op.offsets[at], op.values[at], op.epochs[at]
    return True


def repeat(history: History, random: Random) -> bool:
    """A record of an idempotent producer is read at the end once more."""
    polls = [op for op in _ok(history, "poll") if op.values and op.process == FINAL_READER]
    sent = [value for op in history.ops if op.kind == "send" and op.idempotent and op.ok for value in op.values]
    if not polls or not sent:
        return False
    polls[-1].offsets.append(polls[-1].offsets[-1] + 1)
    polls[-1].values.append(random.choice(sent))
    polls[-1].epochs.append(polls[-1].epochs[-1])
    return True


def exchange(history: History, random: Random) -> bool:
    """Two neighbours in one poll change places."""
    polls = [op for op in _ok(history, "poll") if len(op.offsets) > 1]
    if not polls:
        return False
    op = random.choice(polls)
    at = random.randrange(len(op.offsets) - 1)
    for column in (op.offsets, op.values, op.epochs):
        column[at], column[at + 1] = column[at + 1], column[at]
    return True


def replace(history: History, random: Random) -> bool:
    """Another value is read."""
    polls = [op for op in _ok(history, "poll") if op.values]
    if not polls:
        return False
    op = random.choice(polls)
    op.values[random.randrange(len(op.values))] = 1_000_000
    return True


def deny(history: History, random: Random) -> bool:
    """A producer is told that what was read had failed."""
    read = {value for op in _ok(history, "poll") for value in op.values}
    sends = [op for op in _ok(history, "send") if read.intersection(op.values)]
    if not sends:
        return False
    op = random.choice(sends)
    op.outcome, op.offsets = "fail", []
    return True


def misplace(history: History, random: Random) -> bool:
    """A producer is told other offsets."""
    read = {value for op in _ok(history, "poll") for value in op.values}
    sends = [op for op in _ok(history, "send") if op.idempotent and read.issuperset(op.values)]
    if not sends:
        return False
    op = random.choice(sends)
    op.offsets = [offset + 1 for offset in op.offsets]
    return True


def lower(history: History, random: Random) -> bool:
    """The last high watermark is one less than what is there."""
    op = _ok(history, "list_offsets")[-1]
    if op.high_watermark == 0:
        return False
    op.high_watermark -= 1
    return True


def revive(history: History, random: Random) -> bool:
    """The last log start is one less than what it was."""
    op = _ok(history, "list_offsets")[-1]
    told = [each.log_start for each in history.ops[: op.index] if each.ok and each.ended_us < op.began_us]
    if max(told, default=0) < 1:
        return False
    op.log_start = max(told) - 1
    return True


def forget_commit(history: History, random: Random) -> bool:
    """A group has no committed offset although one was acknowledged."""
    commits = _ok(history, "commit")
    asked = [op for op in _ok(history, "committed") if any(each.ended_us < op.began_us for each in commits)]
    if not asked:
        return False
    random.choice(asked).offset = -1
    return True


def age(history: History, random: Random) -> bool:
    """A record is read with an earlier leader epoch than others saw."""
    polls = [op for op in _ok(history, "poll") if op.epochs]
    if not polls:
        return False
    op = random.choice(polls)
    others = {at for each in polls if each is not op for at in each.offsets}
    places = [at for at, offset in enumerate(op.offsets) if offset in others]
    if not places:
        return False
    op.epochs[random.choice(places)] -= 1
    return True


def pass_over(history: History, random: Random) -> bool:
    """A lookup by time finds the record behind the one that it should find."""
    start = max((op.log_start for op in history.ops), default=0)
    start = max(start, *(op.offset for op in history.ops if op.kind == "delete_records"), 0)
    sends = [op for op in _ok(history, "send") if op.offsets and op.acks == -1]
    time_at = {at: time for op in sends for at, time in zip(op.offsets, op.times, strict=True)}
    lookups = [op for op in _ok(history, "offset_for_time") if op.offset >= start and op.offset + 1 in time_at]
    lookups = [op for op in lookups if op.time_ms != LARGEST_TIME and op.offset in time_at]
    if not lookups:
        return False
    op = random.choice(lookups)
    op.offset += 1
    op.found_ms = time_at[op.offset]
    return True


MUTATIONS: tuple[Mutation, ...] = (
    forget,
    repeat,
    exchange,
    replace,
    deny,
    misplace,
    lower,
    revive,
    forget_commit,
    age,
    pass_over,
)
