"""Transactional batches of a Produce request: which of them need the coordinator's word, and what it has said.

Only the first batch of a transaction in a partition does. Up to v11 the coordinator verifies that the transaction has
the partition, which AddPartitionsToTxn has added; from v12 on the question adds it (KIP-890). All partitions of a
request that need it are in one question. Before it is asked the partition log makes a guard, which it compares at the
append (`tidelog.stream.producer_state`): a yes that comes late lets nothing in behind the marker of its transaction.
Nor does room that comes late: a batch that has waited for it is of the transaction that was open when it came. If that
is decided by then, its sender has given it up, and the next transaction of the producer is not asked about.

A batch is checked whole before the question, so that one that would be refused adds nothing to the transaction.

The coordinator's errors become what producers expect in a Produce response (`produce_error`). CONCURRENT_TRANSACTIONS
comes while the markers of the transaction before are under way, mostly for a moment: from v12 on it is asked again for
`CONCURRENT_S`, before clients are told. Each question has a guard of its own, as such a marker may remove the one
before.

Entry: `TransactionalBatches`.
"""

from __future__ import annotations

import contextlib
from struct import Struct
from typing import NamedTuple

from tidelog.batch.batch import HEADER_BYTES, CorruptRecord, check_batch
from tidelog.broker.kafka.errors import (
    CONCURRENT_TRANSACTIONS,
    COORDINATOR_LOAD_IN_PROGRESS,
    COORDINATOR_NOT_AVAILABLE,
    INVALID_PRODUCER_EPOCH,
    INVALID_TXN_STATE,
    NETWORK_EXCEPTION,
    NOT_COORDINATOR,
    NOT_ENOUGH_REPLICAS,
    PRODUCER_FENCED,
    TRANSACTION_ABORTABLE,
)
from tidelog.broker.kafka.services import Services
from tidelog.broker.kafka.wire.produce import ProduceRequest
from tidelog.runtime.errors import Closed, Overloaded
from tidelog.stream.errors import InvalidProducerEpoch, TransactionNotVerified, VerificationLapsed
from tidelog.stream.partition_log import AppendResult, PartitionLog
from tidelog.stream.producer_state import VerificationGuard

FIRST_WITH_ABORTABLE = 11
"""The first version whose clients know TRANSACTION_ABORTABLE."""
FIRST_THAT_ADDS = 12
"""The first version that adds partitions to transactions."""
CONCURRENT_S = 0.1
"""How long CONCURRENT_TRANSACTIONS is asked again."""
CONCURRENT_PAUSE_S = 0.02
MAX_TOLD_CHARS = 100
"""Of the transactional id in an error message: each partition of a request has one."""
ATTRIBUTES_LOW = 22
"""Index of the attributes' low byte in a batch."""
TRANSACTIONAL = 0x10
_PRODUCER = Struct(">qh")
"""Producer id and epoch."""
_PRODUCER_AT = 43

_COORDINATOR_IS_AWAY = frozenset(
    {NETWORK_EXCEPTION, COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR}
)

_SENT_AGAIN = frozenset({NOT_ENOUGH_REPLICAS, CONCURRENT_TRANSACTIONS})
"""What producers are told where they send a batch again."""


def produce_error(code: int, version: int) -> int:
    """Return what the coordinator's error is in a Produce response of this version."""
    if code == PRODUCER_FENCED:
        return INVALID_PRODUCER_EPOCH
    if code == TRANSACTION_ABORTABLE and version < FIRST_WITH_ABORTABLE:
        return INVALID_TXN_STATE
    if code in _COORDINATOR_IS_AWAY or (code == CONCURRENT_TRANSACTIONS and version < FIRST_THAT_ADDS):
        return NOT_ENOUGH_REPLICAS
    return code


class MustAsk(Exception):
    """A batch waits for the coordinator: append it again after `TransactionalBatches.ask`."""


class NotAdmitted(Exception):
    """A batch is not part of a transaction. `code`: for the client."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _CoordinatorAnswer(NamedTuple):
    """A question about one partition, and the answer."""

    log: PartitionLog
    guard: VerificationGuard
    code: int


def producers_of(request: ProduceRequest) -> set[tuple[int, int]]:
    """Return the producer ids and epochs of all transactional batches. Batches without a header are left out."""
    found = set()
    for topic in request.topics:
        for data in topic.partitions:
            records = data.records
            if records is not None and len(records) >= HEADER_BYTES and records[ATTRIBUTES_LOW] & TRANSACTIONAL:
                found.add(_PRODUCER.unpack_from(records, _PRODUCER_AT))
    return found


class TransactionalBatches:
    """The transactional batches of one request, all of one producer."""

    __slots__ = ("_adds", "_answers", "_continued", "_services", "_to_ask", "_transactional_id", "_version")

    def __init__(self, services: Services, transactional_id: str, version: int) -> None:
        """`version`: of the Produce request."""
        self._services = services
        self._transactional_id = transactional_id
        self._version = version
        self._adds = version >= FIRST_THAT_ADDS
        self._to_ask: dict[tuple[str, int], tuple[PartitionLog, VerificationGuard, int, int]] = {}
        """Log, guard, producer id and epoch, by partition."""
        self._answers: dict[tuple[str, int], _CoordinatorAnswer] = {}
        self._continued: dict[tuple[str, int], PartitionLog] = {}
        """Where a batch found its transaction open, but no room."""

    @property
    def must_ask(self) -> bool:
        """Whether batches wait for `ask`."""
        return bool(self._to_ask)

    def append(self, log: PartitionLog, records: memoryview) -> AppendResult:
        """Append a transactional batch. Raises `MustAsk`, `NotAdmitted`, and as `PartitionLog.append`."""
        producer_id, producer_epoch = _PRODUCER.unpack_from(records, _PRODUCER_AT)
        key = log.topic, log.partition
        if log.has_open_transaction(producer_id, producer_epoch) or self._continued.get(key) is log:
            try:
                return self._admit(log, records, None)
            except Overloaded:
                self._continued[key] = log
                raise
        answer = self._answers.get(key)
        if answer is None or answer.log is not log:  # not asked yet, or the log was opened anew since
            try:
                check_batch(records, limit_bytes=log.config.max_message_bytes)
            except CorruptRecord:
                log.note_refused()
                raise
            self._to_ask[key] = log, log.begin_verification(producer_id, producer_epoch), producer_id, producer_epoch
            raise MustAsk
        if answer.code:
            code = produce_error(answer.code, self._version)
            if code in _SENT_AGAIN:
                log.note_refused()
            who = repr(self._transactional_id[:MAX_TOLD_CHARS])
            raise NotAdmitted(code, f"the coordinator of {who} answered with error {answer.code}")
        try:
            return self._admit(log, records, answer.guard)
        except VerificationLapsed:
            log.note_refused()
            raise

    def _admit(self, log: PartitionLog, records: memoryview, guard: VerificationGuard | None) -> AppendResult:
        try:
            return log.append(records, guard=guard, from_zero=self._adds)
        except TransactionNotVerified as error:
            raise NotAdmitted(produce_error(error.kafka_code, self._version), str(error)) from error

    async def ask(self, timeout_s: float) -> None:
        """Ask the coordinator about all batches that wait for it, once."""
        to_ask, self._to_ask = self._to_ask, {}
        clock = self._services.clock
        deadline, again_until = clock.monotonic() + timeout_s, -1.0
        producer_id, producer_epoch = next(iter(to_ask.values()))[2:]
        wanted = list(to_ask)
        while wanted:
            remaining_s = deadline - clock.monotonic()
            codes = await self._services.transactions.admit(
                self._transactional_id, producer_id, producer_epoch, wanted, add=self._adds, timeout_s=remaining_s
            )
            for key in wanted:
                self._answers[key] = _CoordinatorAnswer(*to_ask[key][:2], codes[key])
            wanted = [key for key in wanted if codes[key] == CONCURRENT_TRANSACTIONS]
            if again_until < 0:
                again_until = clock.monotonic() + CONCURRENT_S
            if not wanted or not self._adds or clock.monotonic() >= again_until:
                return
            await clock.sleep(CONCURRENT_PAUSE_S)
            for key in wanted:
                log = to_ask[key][0]
                with contextlib.suppress(InvalidProducerEpoch, Closed):  # the append says so
                    guard = log.begin_verification(producer_id, producer_epoch)
                    to_ask[key] = log, guard, producer_id, producer_epoch
