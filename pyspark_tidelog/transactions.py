"""The calls of two-phase commit (KIP-939), which librdkafka does not have: a small blocking client.

    prepare   InitProducerId v6 that keeps the open transaction, without a time-out from then on, and fences its writer
    commit    EndTxn v4, which may be repeated
    abort     InitProducerId v6 that aborts what is open
    open      ListTransactions v2, of all brokers

Each call is tried again, for `BUDGET_S` at most, while brokers are away or coordinators move; each is harmless when it
is done twice. Requests are encoded here: of the messages of a Kafka library four are needed, and the driver commits in
a new process for each micro-batch. Answers come from a broker that one has chosen; what is no answer is an error.

Entry: `TransactionCalls`.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn

from pyspark_tidelog.cluster import retried
from pyspark_tidelog.decisions import Attempt, Pair, Query
from tidelog.runtime.errors import ConfigError, Fenced, InvalidInput, Unavailable

BUDGET_S = 120.0
"""How long a call waits for brokers that are away, as in a failover (rule 11)."""
ANSWER_S = 30.0
MAX_ANSWER_BYTES = 64 << 20
"""Of ListTransactions, some hundred bytes for each open transaction."""
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
        self._connections: dict[tuple[str, int], _Connection] = {}

    def close(self) -> None:
        """Close the connections."""
        for each in self._connections.values():
            each.close()
        self._connections.clear()

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
        body = _text(name) + struct.pack(">qhb", *pair, 1) + _TAGS

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
        body = _texts([_ONGOING]) + _length(0) + struct.pack(">q", -1) + _text(pattern) + _TAGS

        def call() -> list[Attempt]:
            found = []
            for address in self._brokers():
                answer = self._ask(address, _LIST, body)
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
        body = _text(name) + struct.pack(">iqhbb", TIMEOUT_MS, -1, -1, is_kept, is_kept) + _TAGS
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

    def _ask_coordinator(self, name: str, api: tuple[int, int], body: bytes) -> _Answer:
        answer = self._ask_any(_FIND, struct.pack(">b", 1) + _texts([name]) + _TAGS)
        answer.int32()
        if answer.length() != 1:
            raise Unavailable(f"no coordinator of {name} was told")
        answer.text()
        answer.int32()
        address = answer.text(), answer.int32()
        error = answer.int16()
        if error:
            self._fail("FindCoordinator", name, error)
        return self._ask(address, api, body)

    def _brokers(self) -> list[tuple[str, int]]:
        answer = self._ask_any(_METADATA, _length(0) + b"\0\0\0" + _TAGS)
        answer.int32()
        found = []
        for _ in range(answer.length()):
            answer.int32()
            found.append((answer.text(), answer.int32()))
            answer.text()  # rack
            answer.tags()
        return found

    def _ask_any(self, api: tuple[int, int], body: bytes) -> _Answer:
        """Ask a broker that answers: one with a connection, or of the bootstrap addresses."""
        problem: Unavailable | None = None
        for address in dict.fromkeys([*self._connections, *self._bootstrap]):
            try:
                return self._ask(address, api, body)
            except Unavailable as error:
                problem = error
        raise problem or Unavailable("no broker is known")

    def _ask(self, address: tuple[str, int], api: tuple[int, int], body: bytes) -> _Answer:
        try:
            connection = self._connections.get(address)
            if connection is None:
                connection = self._connections[address] = _Connection(address)
            return connection.ask(api, body)
        except OSError as error:
            broken = self._connections.pop(address, None)
            if broken is not None:
                broken.close()
            raise Unavailable(f"the broker at {address[0]}:{address[1]} does not answer: {error}") from error


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"kafka.bootstrap.servers has {text.strip()!r}, which is no HOST:PORT")
    return host.strip("[]"), int(port)


class _Connection:
    """A connection to a broker, with one request at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._number = 0

    def ask(self, api: tuple[int, int], body: bytes) -> _Answer:
        """Send a request and return its answer. Raises `OSError`."""
        self._number += 1
        client = b"tidelog-spark"
        request = struct.pack(">hhih", *api, self._number, len(client)) + client + _TAGS + body
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", self._receive(4))
        if not 4 <= size <= MAX_ANSWER_BYTES:
            raise OSError(f"an answer of {size} bytes")
        answer = _Answer(self._receive(size))
        if answer.int32() != self._number:
            raise OSError("the answer to another request")
        answer.tags()
        return answer

    def _receive(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = self._socket.recv(size - len(found))
            if not piece:
                raise ConnectionError("the broker has closed the connection")
            found += piece
        return bytes(found)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


_TAGS = b"\0"
"""No tagged fields."""


def _length(count: int) -> bytes:
    """The length of a compact array or string, which is one more than it."""
    return _varint(count + 1)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _text(text: str) -> bytes:
    raw = text.encode()
    return _length(len(raw)) + raw


def _texts(texts: Sequence[str]) -> bytes:
    return _length(len(texts)) + b"".join(map(_text, texts))


class _Answer:
    """The fields of an answer, in order. Methods raise `OSError` where it is too short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise OSError("an answer ends too early")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big", signed=True)

    def int16(self) -> int:
        return self._number(2)

    def int32(self) -> int:
        return self._number(4)

    def int64(self) -> int:
        return self._number(8)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self._take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def length(self) -> int:
        """The length of a compact array; 0 where it is null."""
        return max(0, self._varint() - 1)

    def text(self) -> str:
        """A compact string; empty where it is null."""
        return self._take(self.length()).decode()

    def texts(self) -> list[str]:
        return [self.text() for _ in range(self.length())]

    def tags(self) -> None:
        """Skip tagged fields."""
        for _ in range(self._varint()):
            self._varint()
            self._take(self._varint())
