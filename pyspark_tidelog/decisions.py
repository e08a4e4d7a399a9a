"""Which transactions of a streaming write are to be committed: the log of decisions, folded. Sans-I/O.

Theory of operation (docs/design/0026-spark-exactly-once.md). Each attempt of a task has a transactional id of its own.
A driver that commits a micro-batch appends a record to the query's log, which names the transactions that carry the
batch; the order of the log says whose record counts:

- of the records that decide a batch the first one, if no later batch was decided before it;
- none of a run that was made void before it.

Invariants: what `Decisions` says of a batch, once it says something, no later record changes; so each transaction has
one fate, whoever asks. A trimmed log (`keep_from`) gives the same fates to all transactions that are open.

Entry: `Query`, `Attempt`, `Decisions`, `decision_record`, `void_record`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tidelog.runtime.errors import CorruptData

_DECIDE, _VOID = "decide", "void"


class Pair(NamedTuple):
    """The producer id and the epoch with which a prepared transaction is ended."""

    producer_id: int
    epoch: int


class Query(NamedTuple):
    """A streaming query: what its transactions and its log are called."""

    prefix: str
    id: str
    """Of its checkpoint."""

    @property
    def topic(self) -> str:
        """The topic of its decisions."""
        return f"__{self.prefix}-{self.id}"

    @property
    def beginning(self) -> str:
        """What all its transactional ids begin with."""
        return f"{self.prefix}.{self.id}."


class Attempt(NamedTuple):
    """An attempt of a task."""

    query: Query
    batch: int
    writer: str
    """Drawn for each run of a micro-batch; without a dot."""
    number: int
    """Of the task's attempt, unique for the writer."""

    @property
    def transactional_id(self) -> str:
        """Its transactional id, which no other attempt has."""
        return f"{self.query.beginning}{self.batch}.{self.writer}.{self.number}"

    @classmethod
    def of(cls, query: Query, transactional_id: str) -> Attempt | None:
        """Return the attempt that has an id; None: it is none of this query."""
        if not transactional_id.startswith(query.beginning):
            return None
        parts = transactional_id[len(query.beginning) :].split(".")
        if len(parts) != 3 or not (parts[0].isdecimal() and parts[2].isdecimal()):
            return None
        return cls(query, int(parts[0]), parts[1], int(parts[2]))


class Fate(Enum):
    """What is to become of a transaction."""

    OPEN = "open"
    """Nothing was decided yet."""
    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True)
class Decision:
    """A micro-batch is carried by these transactions."""

    offset: int
    """Of its record."""
    batch: int
    writer: str
    transactions: Mapping[int, Pair]
    """By the numbers of the attempts."""


def decision_record(batch: int, writer: str, transactions: Mapping[int, Pair]) -> bytes:
    """Return the record that proposes this decision."""
    rows = [[number, *pair] for number, pair in sorted(transactions.items())]
    return _record({"kind": _DECIDE, "batch": batch, "writer": writer, "transactions": rows})


def void_record(batch: int, writer: str) -> bytes:
    """Return the record after which nothing of a run of a micro-batch can be decided any more."""
    return _record({"kind": _VOID, "batch": batch, "writer": writer})


def _record(fields: Mapping[str, object]) -> bytes:
    return json.dumps({"version": 1, **fields}, separators=(",", ":")).encode()


class Decisions:
    """What a query's log says."""

    def __init__(self, records: Iterable[tuple[int, bytes]] = ()) -> None:
        """`records` with their offsets, in order. Raises `CorruptData`."""
        self._made: dict[int, Decision] = {}
        self._void: dict[tuple[int, str], int] = {}
        self._last: Decision | None = None
        for offset, record in records:
            self._add(offset, record)

    def _add(self, offset: int, record: bytes) -> None:
        try:
            fields = json.loads(record)
            version, kind, batch, writer = (fields[name] for name in ("version", "kind", "batch", "writer"))
            if version != 1 or kind not in (_DECIDE, _VOID):
                raise ValueError(f"version {version}, kind {kind}")
            rows = {number: Pair(*pair) for number, *pair in fields.get("transactions", ())}
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptData(
                f"offset {offset} of the log of decisions has no decision: {error}",
                hint="does another program write to that topic, or a newer Tidelog?",
            ) from error
        if kind == _VOID:
            self._void.setdefault((batch, writer), offset)
        elif (self._last is None or batch > self._last.batch) and (batch, writer) not in self._void:
            self._last = self._made[batch] = Decision(offset, batch, writer, rows)

    @property
    def last(self) -> Decision | None:
        """The decision of the last batch that has one."""
        return self._last

    def made(self, batch: int) -> Decision | None:
        """Return the decision of a batch, as far as the log was not trimmed."""
        return self._made.get(batch)

    def fate(self, attempt: Attempt) -> Fate:
        """Return what is to become of an attempt's transaction, if that is open."""
        made = self._made.get(attempt.batch)
        if made is not None and made.writer == attempt.writer and attempt.number in made.transactions:
            return Fate.COMMIT
        is_past = self._last is not None and attempt.batch <= self._last.batch
        return Fate.ABORT if is_past or (attempt.batch, attempt.writer) in self._void else Fate.OPEN

    @property
    def keep_from(self) -> int:
        """The first record that is needed when all decided transactions have been ended."""
        if self._last is None:
            return 0
        needed = [offset for (batch, _), offset in self._void.items() if batch > self._last.batch]
        return min([self._last.offset, *needed])
