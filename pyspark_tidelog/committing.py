"""The steps by which a streaming write is committed and aborted, once, whoever is killed when.

Nothing is kept between the steps but what the log and the transactions themselves say, and each step may be done again:
see docs/design/0026-spark-exactly-once.md. I/O is behind `DecisionLog` and `Transactions`.

Invariants: a transaction is committed only after a decision that names it; a transaction is aborted only if no decision
names it and none ever can; a transaction that is in a decision is not aborted.

Entry: `commit_batch` and `abort_batch` on the driver, `settle_attempt` in tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pyspark_tidelog.decisions import Attempt, Decision, Decisions, Fate, Pair, Query, decision_record, void_record
from tidelog.runtime.errors import Fenced

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A transaction that has all rows of a task, and awaits its end."""

    attempt: Attempt
    pair: Pair


class DecisionLog(Protocol):
    """The log of a query's decisions."""

    def append(self, record: bytes) -> Decisions:
        """Append a record; return what the log says up to it or a later one. Raises `Unavailable`: if it was appended
        is not known."""

    def read(self) -> Decisions:
        """Return what the log says; the newest records may be missing."""

    def trim(self, before: int) -> None:
        """Delete what is before an offset, as far as that is possible now."""


class Transactions(Protocol):
    """The transactions of a query's attempts."""

    def commit(self, attempt: Attempt, pair: Pair, *, is_again: bool) -> None:
        """Commit a prepared transaction; one that has been committed is success.

        `is_again`: it may have been committed so long ago that nobody knows it any more.
        """

    def abort(self, attempt: Attempt) -> None:
        """Abort the transaction of an attempt, if it is open, and fence its producer."""

    def open(self, query: Query) -> list[Attempt]:
        """Return the attempts of a query whose transactions are open."""


def commit_batch(
    query: Query, batch: int, writer: str, prepared: Sequence[Prepared], log: DecisionLog, transactions: Transactions
) -> bool:
    """Commit a micro-batch: by these transactions, or if it was decided before, by those of that decision.

    Return whether it was by these. Raises `Fenced` if a later batch was decided, `Unavailable`; then it may be decided
    all the same, and the next call for this batch finishes it.
    """
    proposed = {each.attempt.number: each.pair for each in prepared}
    decisions = log.append(decision_record(batch, writer, proposed))
    made = decisions.made(batch)
    if made is None or made != decisions.last:
        _abort(prepared, decisions, transactions)
        raise Fenced(
            f"micro-batch {batch} cannot be committed: {_reason(decisions, batch)}",
            hint="is the query running twice, was its checkpoint set back, or copied? see docs/spark.md",
        )
    is_mine = made.writer == writer
    _commit(query, made, transactions, is_again=not is_mine)
    _abort(prepared, decisions, transactions)
    for attempt in transactions.open(query):
        fate, its = decisions.fate(attempt), decisions.made(attempt.batch)
        if fate is Fate.COMMIT and its is not None:
            transactions.commit(attempt, its.transactions[attempt.number], is_again=True)
        elif fate is Fate.ABORT:
            logger.info("aborting %s, which nobody has committed", attempt.transactional_id)
            transactions.abort(attempt)
    log.trim(decisions.keep_from)
    return is_mine


def _reason(decisions: Decisions, batch: int) -> str:
    last = decisions.last
    return f"micro-batch {last.batch} was, before" if last and last.batch > batch else "it was aborted before"


def _commit(query: Query, made: Decision, transactions: Transactions, *, is_again: bool) -> None:
    for number, pair in made.transactions.items():
        transactions.commit(Attempt(query, made.batch, made.writer, number), pair, is_again=is_again)


def _abort(prepared: Sequence[Prepared], decisions: Decisions, transactions: Transactions) -> None:
    """Abort those of these transactions whose fate that is."""
    for each in prepared:
        if decisions.fate(each.attempt) is Fate.ABORT:
            transactions.abort(each.attempt)


def abort_batch(
    batch: int, writer: str, prepared: Sequence[Prepared], log: DecisionLog, transactions: Transactions
) -> bool:
    """Give a run of a micro-batch up, unless it is decided already; return whether it was given up.

    Raises `Unavailable`; the next commit of the query aborts then what was to be aborted.
    """
    decisions = log.append(void_record(batch, writer))
    _abort(prepared, decisions, transactions)
    made = decisions.made(batch)
    return made is None or made.writer != writer


def settle_attempt(attempt: Attempt, log: DecisionLog, transactions: Transactions) -> bool:
    """Call this when a task has prepared its transaction: if that can never be decided any more, it is aborted.

    Either this finds the decision, or the driver that made it finds the transaction. Return whether it awaits one; if
    not, nothing is wrong: the batch runs again though it was committed, or another attempt was faster.
    """
    if log.read().fate(attempt) is not Fate.ABORT:
        return True
    transactions.abort(attempt)
    return False
