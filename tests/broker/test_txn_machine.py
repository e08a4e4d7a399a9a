"""Clients, failing brokers, markers and time meet one transactional id in any order; a model says what comes of it.

The model knows nothing of records: it has the pair that a client must bring, whose request made it, the open
transaction, and the decided one with the markers that are missing. Each answer of the core is the model's. Beside it,
from what is seen outside: a transaction is complete only when each of its partitions has confirmed its marker; all
markers of a transaction say the same, whichever broker sends them; epochs of a producer id never go back; a call whose
answer was lost gets the same answer again, also from another broker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from tests.support.txn_driver import ID, TIMEOUT_MS
from tidelog.broker.txn.errors import TxnError as E
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
    TxnTombstone,
)

LIMITS = TxnLimits(two_phase_commit=True)
PARTITIONS = st.frozensets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1)), min_size=1, max_size=3)
OUTCOMES = st.sampled_from(["confirmed"] * 6 + ["open", "failed", "lost", "written"])
"""Of a write: confirmed; still open when the next call comes; refused; the broker died before it, or just after it."""
COMPLETE = (TxnState.COMPLETE_COMMIT, TxnState.COMPLETE_ABORT)
PREPARED = (TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT)


@dataclass(frozen=True)
class Model:
    """What is known of the transactional id, apart from any record."""

    pair: ProducerPair
    """What a client must bring."""
    asked_with: ProducerPair | None = None
    """Who asks with this pair is who got `pair` for it."""
    batches: ProducerPair | None = None
    """The pair of the open transaction's batches, if another client has taken it over."""
    open: frozenset[TxnPartition] | None = None
    decided: bool | None = None
    """Whether the newest transaction was committed; None: there is none, or it is open."""
    marking: frozenset[TxnPartition] = frozenset()
    """The partitions of the decided transaction, until it is complete."""
    marks: ProducerPair | None = None
    """The pair that its markers have."""
    since_ms: int = 0
    """When the transaction began, or the id was changed."""
    forever: bool = False


Expected = tuple[TxnReply, Model | None]
"""The answer if the change is confirmed, and the change; None: nothing is written."""


def refuse(error: E) -> Expected:
    return TxnReply(error), None


TOLD_TO_NOBODY = 32_767
"""The epoch of a fence of a producer id that has no more epochs."""


def after(pair: ProducerPair, fresh_id: int) -> ProducerPair:
    return ProducerPair(fresh_id, 0) if pair.epoch >= 32_766 else pair._replace(epoch=pair.epoch + 1)


def one_more(pair: ProducerPair) -> ProducerPair:
    return pair._replace(epoch=pair.epoch + 1)


def expect_init(
    model: Model | None, given: ProducerPair | None, keep: bool, forever: bool, busy: bool, fresh_id: int, now_ms: int
) -> Expected:
    if busy or (model is not None and model.marking):
        return refuse(E.CONCURRENT_TRANSACTIONS)
    if model is None:
        pair = ProducerPair(fresh_id, 0)
        return TxnReply(E.NONE, *pair), Model(pair, given, since_ms=now_ms, forever=forever)
    kept = model.batches or ProducerPair(-1, -1)
    if given is not None and (given != model.pair or given.epoch == TOLD_TO_NOBODY):
        if given != model.asked_with or (model.open is not None and not keep):
            return refuse(E.PRODUCER_FENCED)
        again = model if model.open is not None or model.forever == forever else replace(model, forever=forever)
        return TxnReply(E.NONE, *model.pair, *kept), None if again is model else again
    if model.open is not None and not keep:
        return TxnReply(E.CONCURRENT_TRANSACTIONS), fence(model, given, now_ms)
    pair = after(model.pair, fresh_id)
    if model.open is None:
        changed = Model(pair, given, since_ms=now_ms, forever=forever)
        return TxnReply(E.NONE, *pair), changed
    batches = model.batches or model.pair
    changed = replace(model, pair=pair, asked_with=given, batches=batches, forever=model.forever or forever)
    return TxnReply(E.NONE, *pair, *batches), changed


def fence(model: Model, given: ProducerPair | None, now_ms: int) -> Model:
    pair = one_more(model.pair)
    asked_with = given if pair.epoch <= 32_766 else None
    assert model.open
    marks = one_more(model.batches or model.pair)
    return Model(
        pair, asked_with, decided=False, marking=model.open, marks=marks, since_ms=now_ms, forever=model.forever
    )


def identity(model: Model, given: ProducerPair) -> E:
    if given == model.pair and given.epoch != TOLD_TO_NOBODY:
        return E.NONE
    ids = {each.producer_id for each in (model.pair, model.batches, model.marks) if each is not None}
    return E.PRODUCER_FENCED if given.producer_id in ids else E.INVALID_PRODUCER_ID_MAPPING


def expect_add(model: Model | None, given: ProducerPair, wanted: frozenset[TxnPartition], busy: bool) -> Expected:
    error = E.INVALID_PRODUCER_ID_MAPPING if model is None else identity(model, given)
    if model is None or error is not E.NONE:
        return refuse(error)
    if busy or model.marking:
        return refuse(E.CONCURRENT_TRANSACTIONS)
    if model.batches is not None:
        return refuse(E.INVALID_TXN_STATE)
    if model.open is not None and wanted <= model.open:
        return refuse(E.NONE)
    changed = replace(model, asked_with=None, open=(model.open or frozenset()) | wanted, decided=None)
    return TxnReply(E.NONE), changed


def expect_end(
    model: Model | None,
    given: ProducerPair,
    commit: bool,
    bumps: bool,
    busy: bool,
    fresh_id: int,
) -> Expected:
    if model is None:
        return refuse(E.INVALID_PRODUCER_ID_MAPPING)
    settled = E.NONE if model.decided is commit else E.INVALID_TXN_STATE
    if settled is E.NONE and model.marking:
        settled = E.CONCURRENT_TRANSACTIONS
    if bumps and given == model.asked_with:
        if model.decided is None or (commit and not model.decided):
            return refuse(E.PRODUCER_FENCED)
        if busy or settled is not E.NONE:
            return refuse(E.CONCURRENT_TRANSACTIONS if busy else settled)
        return TxnReply(E.NONE, *model.pair), None
    error = identity(model, given)
    if error is E.NONE and bumps and model.marking:
        error = E.CONCURRENT_TRANSACTIONS
    if error is not E.NONE or busy:
        return refuse(error if error is not E.NONE else E.CONCURRENT_TRANSACTIONS)
    if model.open is None and not bumps:
        return refuse(settled)
    if model.open is None and commit:
        return refuse(E.INVALID_TXN_STATE)
    changed = replace(model, open=None, batches=None, decided=commit)
    if model.open is not None:
        batches = model.batches or model.pair
        changed = replace(changed, marking=model.open, marks=one_more(batches) if bumps else batches)
    if not bumps:
        return TxnReply(E.NONE), changed
    pair = after(model.pair, fresh_id)
    return TxnReply(E.NONE, *pair), replace(changed, pair=pair, asked_with=model.pair)


class Transactions(RuleBasedStateMachine):
    @initialize(epoch=st.sampled_from([None, 0, 32_763]))
    def begin(self, epoch: int | None) -> None:
        self.now_ms = 1_000
        self.stored: TxnValue | None = None
        self.model: Model | None = None
        if epoch is not None:
            self.stored = TxnValue(7, epoch, TIMEOUT_MS, TxnState.EMPTY, updated_ms=self.now_ms)
            self.model = Model(ProducerPair(7, epoch), since_ms=self.now_ms)
        self.next_id = 100
        self.known = [ProducerPair(7, 0), ProducerPair(8, 3)]
        """Pairs that were told to somebody, and some that were not."""
        self.change: tuple[TxnReply | None, Model | None, TxnValue | TxnTombstone] | None = None
        self.markers: Markers | None = None
        self.first_markers: Markers | None = None
        """Of the decided transaction, as the broker that decided it has them."""
        self.acked: set[TxnPartition] = set()
        self.epochs: dict[int, int] = {}
        self.answered: tuple[Callable[[], Any], TxnReply] | None = None
        """The newest call that was answered without an error, if nothing has changed since."""
        self.core = TransactionalId(ID, LIMITS)
        self.load()

    # --- clients ---

    @rule(pick=st.integers(0, 30), with_pair=st.booleans(), keep=st.booleans(), forever=st.booleans(), outcome=OUTCOMES)
    def init(self, pick: int, with_pair: bool, keep: bool, forever: bool, outcome: str) -> None:
        given = self.pick(pick) if with_pair else None
        keep, forever = keep and pick % 2 == 0, forever and pick % 3 == 0
        self.next_id += 1
        request = InitRequest(TIMEOUT_MS, *(given or (-1, -1)), enable_2pc=forever, keep_prepared=keep)
        expected = expect_init(self.model, given, keep, forever, self.change is not None, self.next_id, self.now_ms)

        def call() -> TxnStep:
            step = self.core.init_producer_id(request, self.now_ms)
            if isinstance(step, NeedsProducerId):
                step = self.core.init_producer_id(request, self.now_ms, self.next_id)
            assert isinstance(step, TxnStep)
            return step

        self.check(call, expected, outcome, repeatable=given is not None)

    @rule(pick=st.integers(0, 30), wanted=PARTITIONS, version=st.sampled_from([0, 2]), outcome=OUTCOMES)
    def add(self, pick: int, wanted: frozenset[TxnPartition], version: int, outcome: str) -> None:
        given = self.pick(pick)
        reply, changed = expect_add(self.model, given, wanted, self.change is not None)
        if changed is not None and self.model is not None and self.model.open is None:
            changed = replace(changed, since_ms=self.now_ms)

        def call() -> TxnStep:
            return self.core.add_partitions(given, wanted, self.now_ms, version)

        self.check(call, (reply, changed), outcome)

    @rule(pick=st.integers(0, 30), commit=st.booleans(), version=st.sampled_from([0, 2]), outcome=OUTCOMES)
    def end(self, pick: int, commit: bool, version: int, outcome: str) -> None:
        given = self.pick(pick)
        self.next_id += 1
        reply, changed = expect_end(self.model, given, commit, version == 2, self.change is not None, self.next_id)
        if changed is not None:
            changed = replace(changed, since_ms=self.now_ms)

        def call() -> TxnStep:
            step = self.core.end(given, commit, version, self.now_ms)
            if isinstance(step, NeedsProducerId):
                step = self.core.end(given, commit, version, self.now_ms, self.next_id)
            assert isinstance(step, TxnStep)
            return step

        self.check(call, (reply, changed), outcome)

    @precondition(lambda self: self.answered is not None and self.change is None)
    @rule(elsewhere=st.booleans())
    def repeat(self, elsewhere: bool) -> None:
        """The answer was lost: the client asks again, maybe another broker."""
        if elsewhere:
            self.load()
        assert self.answered is not None
        call, reply = self.answered
        step = call()
        assert step.persist is None, "a retry was a new change"
        waits = self.model is not None and self.model.marking
        assert step.reply in (reply, TxnReply(E.CONCURRENT_TRANSACTIONS)) if waits else step.reply == reply

    @rule(pick=st.integers(0, 30), asked=PARTITIONS)
    def verify(self, pick: int, asked: frozenset[TxnPartition]) -> None:
        given, model = self.pick(pick), self.model
        found = self.core.verify(given, asked)
        error = E.INVALID_PRODUCER_ID_MAPPING if model is None else identity(model, given)
        if error is E.NONE and model is not None and model.marking:
            error = E.CONCURRENT_TRANSACTIONS
        missing = E.TRANSACTION_ABORTABLE if self.change is None else E.CONCURRENT_TRANSACTIONS
        here = model.open if model is not None and model.open is not None and model.batches is None else frozenset()
        assert found == {each: error or (E.NONE if each in here else missing) for each in asked}

    # --- markers and time ---

    @precondition(lambda self: self.markers is not None)
    @rule(some=PARTITIONS, everything=st.booleans(), deleted=st.booleans(), outcome=OUTCOMES)
    def mark(self, some: frozenset[TxnPartition], everything: bool, deleted: bool, outcome: str) -> None:
        assert self.markers is not None
        if self.change is not None or self.model is None or not self.model.marking:
            assert self.core.marked(self.markers, some, self.now_ms) == TxnStep()
            return
        if deleted:
            topics = {topic for topic, _ in some}
            some = frozenset(each for each in self.markers.partitions if each[0] in topics)
            step = self.core.topics_deleted(topics, self.now_ms)
        else:
            some = self.markers.partitions if everything else some
            step = self.core.marked(self.markers, some, self.now_ms)
        self.acked |= some
        left = self.model.marking - self.acked
        self.follow(step, None, None if left else self.completed(), outcome)

    @rule(wait_ms=st.sampled_from([1, 30_000, TIMEOUT_MS, 7 * 86_400_000]), outcome=OUTCOMES)
    def time(self, wait_ms: int, outcome: str) -> None:
        self.now_ms += wait_ms
        step = self.core.tick(self.now_ms)
        model = self.model
        if self.change is not None or model is None:
            assert step == TxnStep()
        elif model.marking:
            done = not model.marking - self.acked
            self.follow(step, None, self.completed() if done else None, outcome)
        elif model.open is not None:
            over = not model.forever and model.since_ms + TIMEOUT_MS < self.now_ms
            self.follow(step, None, fence(model, model.pair, self.now_ms) if over else None, outcome)
        else:
            assert (step.persist == TxnTombstone()) is (model.since_ms + LIMITS.retention_ms <= self.now_ms)
            self.follow(step, None, None, outcome)

    # --- the broker ---

    @precondition(lambda self: self.change is not None)
    @rule(outcome=st.sampled_from(["confirmed", "confirmed", "failed", "lost", "written"]))
    def write_ends(self, outcome: str) -> None:
        self.finish(outcome)

    @rule()
    def fail_over(self) -> None:
        self.load()

    def load(self) -> None:
        """Another broker begins with what is stored; a change that is being written is not."""
        self.change = self.markers = None
        self.core = TransactionalId(ID, LIMITS)
        self.acked.clear()
        if self.stored is not None:
            value = parse_txn_value(encode_txn_value(self.stored))
            assert value == self.stored
            self.core = TransactionalId.load(ID, value, self.now_ms, LIMITS)
        step = self.core.resume(self.now_ms)
        assert step.persist is None and step.reply is None
        self.send(step)

    def pick(self, number: int) -> ProducerPair:
        """A pair to come with: mostly the current one, the one before, or those that were told last."""
        if self.model is not None and number % 3 == 0:
            return self.model.pair
        if self.model is not None and number % 5 == 0:
            return self.model.asked_with or self.model.pair._replace(epoch=max(self.model.pair.epoch - 1, 0))
        recent = self.known[-3:] if number % 7 else self.known
        return recent[number % len(recent)]

    def completed(self) -> Model:
        assert self.model is not None
        return replace(self.model, marking=frozenset(), marks=None, since_ms=self.now_ms)

    def check(self, call: Callable[[], TxnStep], expected: Expected, outcome: str, repeatable: bool = True) -> None:
        step = call()
        reply, changed = expected
        assert step.markers is None
        if changed is None:
            assert step == TxnStep(reply), (step, reply)
            return
        assert step.reply is None and step.persist is not None, (step, expected)
        self.follow(step, reply, changed, outcome)
        done = self.change is None and self.model is not None and outcome in ("confirmed", "written")
        if done and reply.error is E.NONE and repeatable:
            self.answered = call, reply

    def follow(self, step: TxnStep, reply: TxnReply | None, changed: Model | None, outcome: str) -> None:
        """A change was begun: it ends as `outcome` says, now or later."""
        if step.persist is None:
            assert changed is None and step == TxnStep(), step
            return
        assert changed is not None or isinstance(step.persist, TxnTombstone)
        assert self.change is None, "two changes at once"
        self.change = reply, changed, step.persist
        if isinstance(step.persist, TxnValue) and step.persist.state in COMPLETE and self.first_markers is not None:
            assert self.first_markers.partitions <= self.acked, "complete before all partitions were marked"
        if outcome != "open":
            self.finish(outcome)

    def finish(self, outcome: str) -> None:
        assert self.change is not None
        reply, changed, record = self.change
        if outcome == "failed":
            self.change = None
            step = self.core.persisted(E.COORDINATOR_NOT_AVAILABLE, self.now_ms)
            assert step == TxnStep(None if reply is None else TxnReply(E.COORDINATOR_NOT_AVAILABLE))
        elif outcome == "lost":
            self.load()
        else:
            self.change, self.answered = None, None
            self.model = changed
            self.stored = record if isinstance(record, TxnValue) else None
            before, self.markers = self.first_markers, None
            self.first_markers = None
            self.acked.clear()
            if outcome == "written":
                self.load()
            else:
                step = self.core.persisted(E.NONE, self.now_ms)
                assert (step.reply, step.persist) == (reply, None)
                self.send(step)
            assert before is None or self.first_markers is None, "decided twice"
            if reply is not None and reply.producer_id >= 0:
                self.known.append(ProducerPair(reply.producer_id, reply.epoch))
                assert reply.epoch <= 32_766

    def send(self, step: TxnStep) -> None:
        self.markers = step.markers
        if step.markers is None:
            return
        self.first_markers = self.first_markers or step.markers
        assert step.markers[1:] == self.first_markers[1:], "another broker decided otherwise"
        assert self.model is not None
        assert (step.markers.commit, step.markers.partitions) == (self.model.decided, self.model.marking)
        assert (step.markers.producer_id, step.markers.epoch) == self.model.marks
        self.higher(step.markers.producer_id, step.markers.epoch)

    def higher(self, producer_id: int, epoch: int) -> None:
        assert epoch >= self.epochs.get(producer_id, 0), "an epoch went back"
        self.epochs[producer_id] = epoch

    @invariant()
    def the_record_is_the_model(self) -> None:
        value, model = self.core.value, self.model
        assert value == self.stored
        if value is None or model is None:
            assert value is None and model is None
            return
        assert (value.state is TxnState.ONGOING) is (model.open is not None)
        assert (value.state in PREPARED) is bool(model.marking) is (self.markers is not None)
        assert value.partitions == (model.open or model.marking)
        if value.next_producer_id < 0:
            assert (value.producer_id, value.epoch) == model.pair
        self.higher(value.producer_id, value.epoch)


Transactions.TestCase.settings = settings(max_examples=examples(400), stateful_step_count=60, deadline=None)
test_transactions = Transactions.TestCase
