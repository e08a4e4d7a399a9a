"""The calls of two-phase commit (KIP-939), which librdkafka does not have: a small blocking client.

    prepare   InitProducerId v6 that keeps the open transaction, without a time-out from then on, and fences its writer
    commit    EndTxn v4, which may be repeated
    abort     InitProducerId v6 that aborts what is open
    open      ListTransactions v2, of all brokers

Each call is tried again, for `BUDGET_S` at most, while brokers are away or coordinators move; each is harmless when it
is done twice.

Entry: `TransactionCalls`.
"""

from __future__ import annotations

import re
import struct
from typing import NoReturn

from pyspark_tidelog.cluster import retried
from pyspark_tidelog.decisions import Attempt, Pair, Query
from pyspark_tidelog.kafka_calls import TAGS, KafkaAnswer, KafkaConnections, encode_length, encode_text, encode_texts
from tidelog.runtime.errors import ConfigError, Fenced, InvalidInput, Unavailable

BUDGET_S = 120.0
"""How long a call waits for brokers that are away, as in a failover (rule 11)."""
TIMEOUT_MS = 1
"""Of a transaction that `abort` could begin; it begins none. Any broker allows it."""
_METADATA, _FIND, _INIT, _END, _LIST = (3, 9), (10, 4), (22, 6), (26, 4), (66, 2)
"""API keys and versions, of which all are flexible (KIP-482)."""
_ONGOING = "Ongoing"
_NO_ID = -1
_INVALID_TXN_STATE, _UNKNOWN_ID, _INVALID_EPOCH, _FENCED, _NOT_ALLOWED = 48, 49, 47, 90, 53
_LATER = frozenset((-1, 6, 7, 14, 15, 16, 51, 56))
"""What another attempt may mend, after the coordinator was asked for again."""


class TransactionCalls:
    """The transactions of queries; not thread-safe. All methods raise `Unavailable` when the budget is spent."""

    def __init__(self, bootstrap: str, budget_s: float = BUDGET_S) -> None:
        self._bootstrap = [_address(each) for each in bootstrap.split(",")]
        self._budget_s = budget_s
        self._connections = KafkaConnections()

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def prepare(self, attempt: Attempt) -> Pair:
        """Keep the open transaction of an attempt until it is ended; return the pair that ends it.

        Raises `Unavailable` if there is none any more, `ConfigError` if the brokers do not allow it.
        """
        name = attempt.transactional_id

        def call() -> Pair:
            error, pair, ongoing = self._init(name, is_kept=True)
            if error:
                self._fail("InitProducerId", name, error)
            if ongoing == _NO_ID:
                raise InvalidInput(
                    f"the transaction {name} was aborted before all rows of its task were written",
                    hint="after kafka.transaction.timeout.ms that is done; raise it, or write less in one micro-batch",
                )
            return pair

        return retried(call, self._budget_s)

    def commit(self, attempt: Attempt, pair: Pair, *, is_again: bool) -> None:
        """See `Transactions.commit`. Raises `Fenced` if it was aborted, by whomever: its rows are lost."""
        name = attempt.transactional_id
        body = encode_text(name) + struct.pack(">qhb", *pair, 1) + TAGS

        def call() -> None:
            answer = self._ask_coordinator(name, _END, body)
            answer.int32()  # throttle time
            error = answer.int16()
            if error == 0 or (is_again and error == _UNKNOWN_ID):
                return
            if error in (_INVALID_TXN_STATE, _UNKNOWN_ID, _INVALID_EPOCH, _FENCED):
                raise Fenced(
                    f"the transaction {name} cannot be committed any more (error {error}): its rows are lost",
                    hint="has somebody aborted it?",
                )
            self._fail("EndTxn", name, error)

        retried(call, self._budget_s)

    def abort(self, attempt: Attempt) -> None:
        """See `Transactions.abort`."""
        name = attempt.transactional_id

        def call() -> None:
            error, _, _ = self._init(name, is_kept=False)
            if error:
                self._fail("InitProducerId", name, error)

        retried(call, self._budget_s)

    def open(self, query: Query) -> list[Attempt]:
        """See `Transactions.open`."""
        pattern = re.escape(query.beginning) + ".*"
        body = encode_texts([_ONGOING]) + encode_length(0) + struct.pack(">q", -1) + encode_text(pattern) + TAGS

        def call() -> list[Attempt]:
            found = []
            for address in self._brokers():
                answer = self._connections.ask(address, _LIST, body)
                answer.int32()
                error = answer.int16()
                if error:
                    self._fail("ListTransactions", f"{query.beginning}*", error)
                answer.texts()
                for _ in range(answer.length()):
                    name = answer.text()
                    answer.int64()
                    answer.text()
                    answer.tags()
                    attempt = Attempt.of(query, name)
                    if attempt is not None:
                        found.append(attempt)
            return found

        return retried(call, self._budget_s)

    def _init(self, name: str, *, is_kept: bool) -> tuple[int, Pair, int]:
        """Return error, pair and the producer id of the transaction that was kept."""
        body = encode_text(name) + struct.pack(">iqhbb", TIMEOUT_MS, -1, -1, is_kept, is_kept) + TAGS
        answer = self._ask_coordinator(name, _INIT, body)
        answer.int32()
        error = answer.int16()
        pair = Pair(answer.int64(), answer.int16())
        return error, pair, answer.int64()

    def _fail(self, call: str, name: str, error: int) -> NoReturn:
        if error in _LATER:
            raise Unavailable(f"{call} of {name} is answered with error {error}")
        if error == _NOT_ALLOWED:
            raise ConfigError(
                "the brokers do not allow two-phase commit, which exactlyOnce needs",
                hint="set group.transaction_two_phase_commit = true on all brokers",
            )
        raise InvalidInput(f"{call} of {name} is answered with error {error}")

    # --- where to ask ------------------------------------------------------------------------------------------

    def _ask_coordinator(self, name: str, api: tuple[int, int], body: bytes) -> KafkaAnswer:
        answer = self._ask_any(_FIND, struct.pack(">b", 1) + encode_texts([name]) + TAGS)
        answer.int32()
        if answer.length() != 1:
            raise Unavailable(f"no coordinator of {name} was told")
        answer.text()
        answer.int32()
        address = answer.text(), answer.int32()
        error = answer.int16()
        if error:
            self._fail("FindCoordinator", name, error)
        return self._connections.ask(address, api, body)

    def _brokers(self) -> list[tuple[str, int]]:
        answer = self._ask_any(_METADATA, encode_length(0) + b"\0\0\0" + TAGS)
        answer.int32()
        found = []
        for _ in range(answer.length()):
            answer.int32()
            found.append((answer.text(), answer.int32()))
            answer.text()  # rack
            answer.tags()
        return found

    def _ask_any(self, api: tuple[int, int], body: bytes) -> KafkaAnswer:
        """Ask a broker that answers: one with a connection, or of the bootstrap addresses."""
        problem: Unavailable | None = None
        for address in dict.fromkeys([*self._connections.addresses, *self._bootstrap]):
            try:
                return self._connections.ask(address, api, body)
            except Unavailable as error:
                problem = error
        raise problem or Unavailable("no broker is known")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"kafka.bootstrap.servers has {text.strip()!r}, which is no HOST:PORT")
    return host.strip("[]"), int(port)
