"""A transactional id whose records are confirmed at once: what a shell does around the pure core, without its waits."""

from __future__ import annotations

from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.records import TxnPartition, TxnState, TxnValue, encode_txn_value, parse_txn_value
from tidelog.broker.txn.state import (
    InitRequest,
    Markers,
    NeedsProducerId,
    ProducerPair,
    TransactionalId,
    TxnLimits,
    TxnReply,
    TxnStep,
)

ID = "pay"
ORDERS = ("orders", 0)
PAID = ("paid", 1)
TIMEOUT_MS = 60_000


class TxnDriver:
    """Calls the core, confirms what it wants to persist, and keeps the markers until `mark`."""

    def __init__(self, value: TxnValue | None = None, limits: TxnLimits | None = None, now_ms: int = 1_000) -> None:
        self.now_ms = now_ms
        self.limits = limits
        self.next_id = 1_000
        self.markers: Markers | None = None
        self.written: list[object] = []
        self.core = TransactionalId(ID, limits)
        if value is not None:
            self.core = TransactionalId.load(ID, value, now_ms, limits)
            self.settle(self.core.resume(now_ms))

    @property
    def value(self) -> TxnValue:
        """The confirmed record, which exists."""
        assert self.core.value is not None
        return self.core.value

    @property
    def pair(self) -> ProducerPair:
        """Producer id and epoch of the record."""
        return ProducerPair(self.value.producer_id, self.value.epoch)

    def state(self) -> TxnState:
        """State of the record."""
        return self.value.state

    def settle(self, step: TxnStep, error: TxnError = TxnError.NONE) -> TxnReply | None:
        """Do what a step asks for, with records confirmed or failed as `error` says."""
        reply = step.reply
        while step.persist is not None:
            self.written.append(step.persist)
            step = self.core.persisted(error, self.now_ms)
            reply = reply or step.reply
            self.markers = step.markers or self.markers
        self.markers = step.markers or self.markers
        return reply

    def reload(self) -> None:
        """Another broker leads: a new object from the confirmed record, through its bytes."""
        value = parse_txn_value(encode_txn_value(self.value))
        assert value == self.value
        self.markers = None
        self.core = TransactionalId.load(ID, value, self.now_ms, self.limits)
        self.settle(self.core.resume(self.now_ms))

    def init(self, pair: ProducerPair | None = None, *, keep: bool = False, two_phase: bool = False) -> TxnReply:
        """InitProducerId."""
        request = InitRequest(TIMEOUT_MS, *(pair or (-1, -1)), enable_2pc=two_phase, keep_prepared=keep)
        step = self.core.init_producer_id(request, self.now_ms)
        if isinstance(step, NeedsProducerId):
            self.next_id += 1
            step = self.core.init_producer_id(request, self.now_ms, self.next_id)
        return self._answer(step)

    def add(self, pair: ProducerPair, *partitions: TxnPartition, version: int = 2) -> TxnError:
        """AddPartitionsToTxn, or what Produce v12 asks for."""
        return self._answer(self.core.add_partitions(pair, partitions or (ORDERS,), self.now_ms, version)).error

    def end(self, pair: ProducerPair, commit: bool = True, version: int = 2) -> TxnReply:
        """EndTxn."""
        step = self.core.end(pair, commit, version, self.now_ms)
        if isinstance(step, NeedsProducerId):
            self.next_id += 1
            step = self.core.end(pair, commit, version, self.now_ms, self.next_id)
        return self._answer(step)

    def mark(self, *partitions: TxnPartition) -> None:
        """The markers of these partitions are confirmed; without names all that are left."""
        assert self.markers is not None
        self.settle(self.core.marked(self.markers, partitions or self.markers.partitions, self.now_ms))

    def _answer(self, step: TxnStep | NeedsProducerId) -> TxnReply:
        assert isinstance(step, TxnStep)
        reply = self.settle(step)
        assert reply is not None
        return reply
