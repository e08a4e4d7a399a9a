"""The state machine of one transactional id (KIP-98, KIP-360, KIP-890, KIP-939). Sans-I/O.

Theory of operation. A call checks the state and returns a `TxnStep`. With `persist` set, a change is pending: the
caller writes that record, waits until it is confirmed, and calls `persisted`, whose step has the reply and the markers
to send. Until then every call that would change something is refused with CONCURRENT_TRANSACTIONS. A change whose write
failed has not happened. If nobody knows whether it has, the caller drops the object and loads the record again.

    state              left when
    EMPTY              partitions are added → ONGOING
    ONGOING            EndTxn → PREPARE_*; time-out or InitProducerId → PREPARE_ABORT, with a larger epoch
    PREPARE_*          every partition has its marker (or is no more) → COMPLETE_*
    COMPLETE_*         partitions are added → ONGOING; InitProducerId → EMPTY
    no value           InitProducerId → EMPTY; ids that are idle for the retention time get here, by a tombstone

A transaction without partitions needs no marker: it is complete in one record.

The pair of producer id and epoch that a client must bring is that of the record, or while a record has a *next* pair
that one: for a decided transaction whose epochs are used up, and for an open one that a client of KIP-939 has taken
over. Markers have the record's own pair in both cases.

Retries. `last_epoch` in the record is the epoch that a request brought when its answer was the current pair. That
request again is a retry and gets the same answer, from whichever broker. It is forgotten as soon as the new pair begins
a transaction, for then the answer has arrived, and who still has the old pair is another one (Kafka goes on and tells
it the new pair). A fence by another client remembers nothing: who had the old pair is told PRODUCER_FENCED.
A fence by time counts as the abort that the client would have asked for. An EndTxn v5 that aborts, or InitProducerId,
with the old pair gets the next one, which nobody else has: so Kafka's clients of `transaction.version` 2 go on after a
time-out. A commit with the old pair is refused, as PRODUCER_FENCED.
InitProducerId with a stale pair is refused before it can abort the transaction of the current one, which Kafka allows.

Losses. A record after which others of the id may have been lost (`is_behind`) has the last epoch that is known, and not
the last that was given. Clients with later ones may have written to partitions with it: who got the same pair would
have its records taken for repeats of theirs, and acknowledged. So the next pair has a new producer id.

Time. `now_ms` is the time since the Unix epoch by a clock that does not jump: the wall clock at the start of the shell
and the monotonic time since. Then a clock that is set while a broker leads ends no transaction. A record that a broker
with a faster clock wrote may have times in the future; they count as the time of loading, so that such a transaction
lives at most its time-out from then. A record with times in the past is judged by them, as Kafka does.

Invariants: a step has `persist` only if no other change is pending; a decision is never replaced by the other one;
epochs of a producer id never decrease; a Complete record follows only when each partition of the Prepare record is
marked or deleted; no pair with epoch 32,767 is told to anybody.

Entry: `TransactionalId`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.records import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    TxnPartition,
    TxnState,
    TxnValue,
)

EXHAUSTED_EPOCH = 32_766
"""The last epoch that a client gets; one more is left for a fence."""
LARGEST_EPOCH = 32_767
"""The epoch of a fence that no client has: one that comes with it has guessed it, and is refused."""
NO_TIMEOUT_MS = 0x7FFF_FFFF
"""Time-out of a transaction that time never ends (KIP-939)."""
EPOCH_BUMP_VERSION = 2
"""`transaction.version` from which on the end of a transaction bumps the epoch (KIP-890)."""

_FENCED = TxnError.PRODUCER_FENCED
_PREPARED = (TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT)
_COMMITS = (TxnState.PREPARE_COMMIT, TxnState.COMPLETE_COMMIT)
STATE_NAMES = {
    TxnState.EMPTY: "Empty",
    TxnState.ONGOING: "Ongoing",
    TxnState.PREPARE_COMMIT: "PrepareCommit",
    TxnState.PREPARE_ABORT: "PrepareAbort",
    TxnState.COMPLETE_COMMIT: "CompleteCommit",
    TxnState.COMPLETE_ABORT: "CompleteAbort",
    TxnState.DEAD: "Dead",
}
"""Kafka's names of the states."""


class TxnLimits(NamedTuple):
    """Settings that apply to all transactional ids."""

    max_timeout_ms: int = 900_000
    """`transaction.max.timeout.ms`: largest time-out that a client may ask for."""
    retention_ms: int = 604_800_000
    """`transactional.id.expiration.ms`: how long an id may be idle."""
    two_phase_commit: bool = False
    """`transaction.two.phase.commit.enable`: whether InitProducerId may bring the flags of KIP-939."""


class ProducerPair(NamedTuple):
    """A producer id (int64) and its epoch (int16)."""

    producer_id: int
    epoch: int


class InitRequest(NamedTuple):
    """An InitProducerId request with a transactional id."""

    timeout_ms: int
    producer_id: int = NO_PRODUCER_ID
    """The pair that the client had (KIP-360); -1: none."""
    epoch: int = NO_EPOCH
    enable_2pc: bool = False
    keep_prepared: bool = False


class TxnReply(NamedTuple):
    """The answer to a call. The pairs are set where the answer of the API has them."""

    error: TxnError
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH
    ongoing_producer_id: int = NO_PRODUCER_ID
    ongoing_epoch: int = NO_EPOCH


class Markers(NamedTuple):
    """Markers to write, until each partition has confirmed its own."""

    number: int
    """Tells this decision from others of the same object; for `TransactionalId.marked`."""
    producer_id: int
    epoch: int
    commit: bool
    partitions: frozenset[TxnPartition]
    version: int
    """The transaction version: from 2 on the epoch is larger than that of the transaction's batches."""


@dataclass(frozen=True, slots=True)
class TxnTombstone:
    """The record to persist is a tombstone: the transactional id is forgotten."""


@dataclass(frozen=True, slots=True)
class NeedsProducerId:
    """The call needs a new producer id: allocate one and call again with it. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class TxnStep:
    """What to do after a call: answer, write, send. All three may be absent."""

    reply: TxnReply | None = None
    persist: TxnValue | TxnTombstone | None = None
    markers: Markers | None = None


class TxnDescription(NamedTuple):
    """A transactional id as DescribeTransactions and ListTransactions show it."""

    transactional_id: str
    state: str
    """Kafka's name, such as `PrepareCommit`."""
    timeout_ms: int
    started_ms: int
    """-1: no transaction is open or being ended."""
    producer_id: int
    epoch: int
    partitions: frozenset[TxnPartition]


class _Change(NamedTuple):
    """A change that is being written."""

    record: TxnValue | TxnTombstone
    reply: TxnReply | None
    """None: nobody waits for it."""


class TransactionalId:
    """The state of one transactional id. Not thread-safe; see the module's docstring for the order of calls."""

    def __init__(self, transactional_id: str, limits: TxnLimits | None = None) -> None:
        self.transactional_id = transactional_id
        self._limits = limits or TxnLimits()
        self._value: TxnValue | None = None
        self._change: _Change | None = None
        self._unmarked: set[TxnPartition] = set()
        self._decisions = 0
        self._began_ms = 0
        self._idle_since_ms = 0

    @classmethod
    def load(
        cls, transactional_id: str, value: TxnValue, now_ms: int, limits: TxnLimits | None = None
    ) -> TransactionalId:
        """Make the object of a replayed record. Call `resume` next, once the newest record of the id is loaded."""
        loaded = cls(transactional_id, limits)
        loaded._apply(value, now_ms)
        return loaded

    @property
    def value(self) -> TxnValue | None:
        """The newest confirmed record; None: there is none, and the object may be dropped if nothing is pending."""
        return self._value

    @property
    def pending(self) -> bool:
        """Whether a change is being written."""
        return self._change is not None

    def resume(self, now_ms: int) -> TxnStep:
        """What is left to do of a loaded transaction: the markers of a decided one."""
        value = self._value
        if value is None or self._change is not None or value.state not in _PREPARED:
            return TxnStep()
        if not self._unmarked:
            return self._write(_completed(value, now_ms), None)
        return TxnStep(markers=self._markers(value))

    def persisted(self, error: TxnError, now_ms: int) -> TxnStep:
        """Finish the pending change: its record is confirmed (`NONE`), or surely not written.

        Raises `RuntimeError` if no change is pending.
        """
        change, self._change = self._change, None
        if change is None:
            raise RuntimeError(f"no change of transactional id {self.transactional_id!r} is being written")
        if error is not TxnError.NONE:
            return TxnStep(reply=None if change.reply is None else TxnReply(error))
        if isinstance(change.record, TxnTombstone):
            self._value = None
            self._unmarked.clear()
            return TxnStep(reply=change.reply)
        self._apply(change.record, now_ms)
        markers = self._markers(change.record) if change.record.state in _PREPARED else None
        return TxnStep(reply=change.reply, markers=markers)

    # --- InitProducerId ---

    def init_producer_id(
        self, request: InitRequest, now_ms: int, fresh_id: int | None = None
    ) -> TxnStep | NeedsProducerId:
        """Give the client a producer id and an epoch that fences all clients before it."""
        if (error := self._invalid(request)) is not TxnError.NONE:
            return _refuse(error)
        value = self._value
        if self._change is not None or (value is not None and value.state in _PREPARED):
            return _refuse(TxnError.CONCURRENT_TRANSACTIONS)
        timeout_ms = NO_TIMEOUT_MS if request.enable_2pc else request.timeout_ms
        given = ProducerPair(request.producer_id, request.epoch) if request.epoch != NO_EPOCH else None
        if value is None:
            return self._create(given, timeout_ms, now_ms, fresh_id)
        if given is not None and (given != _pair(value) or given.epoch >= LARGEST_EPOCH):
            kept = value.state is not TxnState.ONGOING or request.keep_prepared
            return self._repeat(value, timeout_ms) if kept and _is_last(value, given) else _refuse(_FENCED)
        last_epoch = NO_EPOCH if given is None else given.epoch
        if value.state is TxnState.ONGOING and not request.keep_prepared:
            return self._write(_fenced(value, now_ms, last_epoch), TxnReply(TxnError.CONCURRENT_TRANSACTIONS))
        next_pair = _successor(value, fresh_id)
        if next_pair is None:
            return NeedsProducerId()
        changed = _with_previous(value, next_pair)._replace(updated_ms=now_ms, last_epoch=last_epoch)
        if value.state is TxnState.ONGOING:
            changed = changed._replace(
                timeout_ms=NO_TIMEOUT_MS if request.enable_2pc else value.timeout_ms,
                started_ms=self._began_ms,
                next_producer_id=next_pair.producer_id,
                next_epoch=next_pair.epoch,
            )
        else:
            changed = changed._replace(
                producer_id=next_pair.producer_id,
                epoch=next_pair.epoch,
                timeout_ms=timeout_ms,
                state=TxnState.EMPTY,
                started_ms=NO_TIMESTAMP,
            )
        return self._write(changed, _reply_of(changed))

    def _invalid(self, request: InitRequest) -> TxnError:
        if not self.transactional_id or (request.producer_id == NO_PRODUCER_ID) != (request.epoch == NO_EPOCH):
            return TxnError.INVALID_REQUEST
        if (request.enable_2pc or request.keep_prepared) and not self._limits.two_phase_commit:
            return TxnError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        if not request.enable_2pc and not 0 < request.timeout_ms <= self._limits.max_timeout_ms:
            return TxnError.INVALID_TRANSACTION_TIMEOUT
        return TxnError.NONE

    def _create(
        self, given: ProducerPair | None, timeout_ms: int, now_ms: int, fresh_id: int | None
    ) -> TxnStep | NeedsProducerId:
        """A new id. A client that had a pair before the id was forgotten gets a new one, and so does its retry."""
        if fresh_id is None:
            return NeedsProducerId()
        created = TxnValue(fresh_id, 0, timeout_ms, TxnState.EMPTY, updated_ms=now_ms)
        if given is not None:
            created = created._replace(previous_producer_id=given.producer_id, last_epoch=given.epoch)
        return self._write(created, _reply_of(created))

    def _repeat(self, value: TxnValue, timeout_ms: int) -> TxnStep:
        """The answer again; written only if the client has another time-out by now."""
        if value.state is TxnState.ONGOING or value.timeout_ms == timeout_ms:
            return TxnStep(reply=_reply_of(value))
        return self._write(value._replace(timeout_ms=timeout_ms), _reply_of(value))

    # --- partitions ---

    def add_partitions(
        self, producer: ProducerPair, partitions: Collection[TxnPartition], now_ms: int, version: int
    ) -> TxnStep:
        """Add partitions to the transaction, and begin one if none is open.

        `version` is the client's transaction version (`transaction.version`), 0 to 2.
        """
        value = self._value
        if value is None:
            return _refuse(TxnError.INVALID_PRODUCER_ID_MAPPING)
        error = self._cannot_add(value, producer)
        if error is not TxnError.NONE:
            return _refuse(error)
        wanted = frozenset(partitions)
        if value.state is TxnState.ONGOING:
            if wanted <= value.partitions:
                return TxnStep(reply=TxnReply(TxnError.NONE))
            started_ms, wanted = self._began_ms, value.partitions | wanted
        elif not wanted:
            return TxnStep(reply=TxnReply(TxnError.NONE))
        else:
            started_ms = now_ms
        changed = value._replace(
            state=TxnState.ONGOING,
            partitions=wanted,
            updated_ms=now_ms,
            started_ms=started_ms,
            client_version=version,
            last_epoch=NO_EPOCH,
        )
        return self._write(changed, TxnReply(TxnError.NONE))

    def _cannot_add(self, value: TxnValue, producer: ProducerPair) -> TxnError:
        error = _mismatch(value, producer)
        if error is not TxnError.NONE:
            return error
        if self._change is not None or value.state in _PREPARED:
            return TxnError.CONCURRENT_TRANSACTIONS
        if value.state is TxnState.ONGOING and value.next_producer_id != NO_PRODUCER_ID:
            return TxnError.INVALID_TXN_STATE  # kept prepared: it can only be ended
        return TxnError.NONE

    def verify(self, producer: ProducerPair, partitions: Iterable[TxnPartition]) -> dict[TxnPartition, TxnError]:
        """Whether each partition is in the open transaction of `producer`; writes nothing.

        A partition that is in it is confirmed also while a change is pending: the partition's own guard decides whether
        the marker came first.
        """
        value = self._value
        error = TxnError.INVALID_PRODUCER_ID_MAPPING if value is None else _mismatch(value, producer)
        if value is None or error is not TxnError.NONE:
            return dict.fromkeys(partitions, error)
        if value.state in _PREPARED:
            return dict.fromkeys(partitions, TxnError.CONCURRENT_TRANSACTIONS)
        kept = value.state is TxnState.ONGOING and value.next_producer_id != NO_PRODUCER_ID
        here = value.partitions if value.state is TxnState.ONGOING and not kept else frozenset()
        missing = TxnError.TRANSACTION_ABORTABLE if self._change is None else TxnError.CONCURRENT_TRANSACTIONS
        return {each: TxnError.NONE if each in here else missing for each in partitions}

    # --- the end ---

    def end(
        self, producer: ProducerPair, commit: bool, version: int, now_ms: int, fresh_id: int | None = None
    ) -> TxnStep | NeedsProducerId:
        """Commit or abort the transaction (EndTxn).

        `version` is the transaction version: 2 for EndTxn v5 and later, whose answer has the pair of the next
        transaction, else 0 or 1.
        """
        value = self._value
        if value is None:
            return _refuse(TxnError.INVALID_PRODUCER_ID_MAPPING)
        bumps = version >= EPOCH_BUMP_VERSION
        if bumps and _is_last(value, producer):
            return self._end_again(value, commit)
        error = _mismatch(value, producer)
        if error is TxnError.NONE and (self._change is not None or (bumps and value.state in _PREPARED)):
            error = TxnError.CONCURRENT_TRANSACTIONS  # the next transaction ends before the last one is complete
        if error is not TxnError.NONE:
            return _refuse(error)
        if value.state is not TxnState.ONGOING:
            if not bumps:
                return _refuse(_end_of_ended(value, commit))
            if commit:
                return _refuse(TxnError.INVALID_TXN_STATE)
        return self._decide(value, commit, version, now_ms, fresh_id)

    def _end_again(self, value: TxnValue, commit: bool) -> TxnStep:
        """EndTxn v5 with the pair before the current one."""
        too_late = commit and value.state not in _COMMITS  # its time was over
        if too_late or value.state in (TxnState.EMPTY, TxnState.ONGOING):
            return _refuse(TxnError.PRODUCER_FENCED)
        if self._change is not None:
            return _refuse(TxnError.CONCURRENT_TRANSACTIONS)
        error = _end_of_ended(value, commit)
        return TxnStep(reply=_reply_of(value)) if error is TxnError.NONE else _refuse(error)

    def _decide(
        self, value: TxnValue, commit: bool, version: int, now_ms: int, fresh_id: int | None
    ) -> TxnStep | NeedsProducerId:
        changed = value._replace(
            state=TxnState.PREPARE_COMMIT if commit else TxnState.PREPARE_ABORT,
            updated_ms=now_ms,
            started_ms=value.started_ms if value.state is TxnState.ONGOING else now_ms,
            client_version=version,
        )
        if version >= EPOCH_BUMP_VERSION:
            next_pair = _successor(value, fresh_id)
            if next_pair is None:
                return NeedsProducerId()
            changed = _with_previous(changed, next_pair)._replace(
                epoch=min(value.epoch + 1, LARGEST_EPOCH), last_epoch=_pair(value).epoch
            )
            if next_pair != (changed.producer_id, changed.epoch):
                changed = changed._replace(next_producer_id=next_pair.producer_id, next_epoch=next_pair.epoch)
        reply = _reply_of(changed) if version >= EPOCH_BUMP_VERSION else TxnReply(TxnError.NONE)
        return self._write(changed if changed.partitions else _completed(changed, now_ms), reply)

    # --- markers and time ---

    def marked(self, markers: Markers, partitions: Iterable[TxnPartition], now_ms: int) -> TxnStep:
        """These partitions have confirmed their marker of `markers`, or exist no more.

        When none is left, the step has the Complete record. Markers of an earlier decision change nothing.
        """
        value = self._value
        if value is None or value.state not in _PREPARED or markers.number != self._decisions:
            return TxnStep()
        self._unmarked.difference_update(partitions)
        return self._complete(value, now_ms)

    def topics_deleted(self, topics: Collection[str], now_ms: int) -> TxnStep:
        """These topics exist no more: a decided transaction does not wait for their markers."""
        value = self._value
        if value is None or value.state not in _PREPARED:
            return TxnStep()
        self._unmarked = {each for each in self._unmarked if each[0] not in topics}
        return self._complete(value, now_ms)

    def tick(self, now_ms: int) -> TxnStep:
        """End what is over its time-out, forget what is idle, complete what could not be written before."""
        value = self._value
        if value is None or self._change is not None:
            return TxnStep()
        if value.state in _PREPARED:
            return self._complete(value, now_ms)
        if value.state is TxnState.ONGOING:
            if value.timeout_ms == NO_TIMEOUT_MS or self._began_ms + value.timeout_ms >= now_ms:
                return TxnStep()
            return self._write(_fenced(value, now_ms, _pair(value).epoch), None)
        if self._idle_since_ms + self._limits.retention_ms > now_ms:
            return TxnStep()
        return self._write(TxnTombstone(), None)

    def description(self) -> TxnDescription | None:
        """The confirmed state; None: the id is unknown."""
        value = self._value
        if value is None:
            return None
        open_now = value.state is TxnState.ONGOING or value.state in _PREPARED
        return TxnDescription(
            self.transactional_id,
            STATE_NAMES[value.state],
            value.timeout_ms,
            value.started_ms if open_now else NO_TIMESTAMP,
            value.producer_id,
            value.epoch,
            value.partitions,
        )

    # --- inside ---

    def _write(self, record: TxnValue | TxnTombstone, reply: TxnReply | None) -> TxnStep:
        self._change = _Change(record, reply)
        return TxnStep(persist=record)

    def _apply(self, value: TxnValue, now_ms: int) -> None:
        self._value = None if value.state is TxnState.DEAD else value
        self._began_ms = min(value.started_ms, now_ms) if value.started_ms >= 0 else now_ms
        self._idle_since_ms = min(value.updated_ms, now_ms) if value.updated_ms >= 0 else now_ms
        self._unmarked = set(value.partitions) if value.state in _PREPARED else set()
        self._decisions += value.state in _PREPARED

    def _markers(self, value: TxnValue) -> Markers:
        return Markers(
            self._decisions,
            value.producer_id,
            value.epoch,
            value.state in _COMMITS,
            frozenset(self._unmarked),
            value.client_version,
        )

    def _complete(self, value: TxnValue, now_ms: int) -> TxnStep:
        if self._unmarked or self._change is not None:
            return TxnStep()
        return self._write(_completed(value, now_ms), None)


def _refuse(error: TxnError) -> TxnStep:
    return TxnStep(reply=TxnReply(error))


def _pair(value: TxnValue) -> ProducerPair:
    """The pair that a client must bring."""
    if value.next_producer_id != NO_PRODUCER_ID:
        return ProducerPair(value.next_producer_id, max(value.next_epoch, 0))
    return ProducerPair(value.producer_id, value.epoch)


def _reply_of(value: TxnValue) -> TxnReply:
    """The pair of the client; with it that of an open transaction that was kept."""
    pair = _pair(value)
    if value.state is TxnState.ONGOING and value.next_producer_id != NO_PRODUCER_ID:
        return TxnReply(TxnError.NONE, *pair, value.producer_id, value.epoch)
    return TxnReply(TxnError.NONE, *pair)


def _is_last(value: TxnValue, given: ProducerPair) -> bool:
    """Whether `given` came with the request that made the current pair."""
    if value.last_epoch == NO_EPOCH or given.epoch != value.last_epoch:
        return False
    pair = _pair(value)
    if given.producer_id == pair.producer_id:
        return given.epoch == pair.epoch - 1
    return pair.epoch == 0 and given.producer_id == value.previous_producer_id


def _mismatch(value: TxnValue, producer: ProducerPair) -> TxnError:
    pair = _pair(value)
    if producer == pair and pair.epoch < LARGEST_EPOCH:
        return TxnError.NONE
    if producer.producer_id in (pair.producer_id, value.producer_id):
        return TxnError.PRODUCER_FENCED
    return TxnError.INVALID_PRODUCER_ID_MAPPING


def _successor(value: TxnValue, fresh_id: int | None) -> ProducerPair | None:
    """The pair after that of `value`; None: that needs a new producer id."""
    pair = _pair(value)
    if pair.epoch < EXHAUSTED_EPOCH and not value.is_behind:
        return ProducerPair(pair.producer_id, pair.epoch + 1)
    return None if fresh_id is None else ProducerPair(fresh_id, 0)


def _with_previous(value: TxnValue, next_pair: ProducerPair) -> TxnValue:
    """`value`, which remembers its producer id if the next pair has another one."""
    producer_id = _pair(value).producer_id
    if next_pair.producer_id == producer_id:
        return value
    return value._replace(previous_producer_id=producer_id, is_behind=False)


def _end_of_ended(value: TxnValue, commit: bool) -> TxnError:
    """The answer to EndTxn when no transaction is open: a repeat of what was decided, or a mistake."""
    if value.state is TxnState.EMPTY or commit != (value.state in _COMMITS):
        return TxnError.INVALID_TXN_STATE
    return TxnError.CONCURRENT_TRANSACTIONS if value.state in _PREPARED else TxnError.NONE


def _fenced(value: TxnValue, now_ms: int, last_epoch: int) -> TxnValue:
    """The open transaction aborted under a larger epoch, so that the client that had it is fenced.

    `last_epoch` is that of a client that asked for it with its own pair, or whose time was over: it gets the new pair
    when it asks next.
    """
    changed = value._replace(state=TxnState.PREPARE_ABORT, epoch=min(value.epoch + 1, LARGEST_EPOCH), updated_ms=now_ms)
    if value.next_producer_id != NO_PRODUCER_ID:
        changed = changed._replace(next_epoch=min(_pair(value).epoch + 1, LARGEST_EPOCH))
    exhausted = _pair(changed).epoch >= LARGEST_EPOCH
    is_nobodys = exhausted or value.is_behind
    changed = changed._replace(last_epoch=NO_EPOCH if is_nobodys else last_epoch)
    return changed if changed.partitions else _completed(changed, now_ms)


def _completed(value: TxnValue, now_ms: int) -> TxnValue:
    pair = _pair(value)
    return value._replace(
        producer_id=pair.producer_id,
        epoch=pair.epoch,
        state=TxnState.COMPLETE_COMMIT if value.state in _COMMITS else TxnState.COMPLETE_ABORT,
        partitions=frozenset(),
        updated_ms=now_ms,
        next_producer_id=NO_PRODUCER_ID,
        next_epoch=NO_EPOCH,
    )
