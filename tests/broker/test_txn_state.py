"""The rules of one transactional id, as tables: each call in each state (KIP-98, KIP-360, KIP-890, KIP-939)."""

from __future__ import annotations

import pytest

from tests.support.txn_driver import ID, ORDERS, PAID, TIMEOUT_MS, TxnDriver
from tidelog.broker.txn.errors import TxnError, append_failure, told_to_client
from tidelog.broker.txn.records import TxnState, TxnValue
from tidelog.broker.txn.state import (
    NO_TIMEOUT_MS,
    InitRequest,
    NeedsProducerId,
    ProducerPair,
    TransactionalId,
    TxnLimits,
    TxnReply,
    TxnStep,
    TxnTombstone,
)

E = TxnError
S = TxnState
DAY_MS = 86_400_000
TWO_PHASE = TxnLimits(two_phase_commit=True)
ALL_STATES = (S.EMPTY, S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT, S.COMPLETE_COMMIT, S.COMPLETE_ABORT)
WITH_PARTITIONS = (S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT)


def value_in(state: TxnState, epoch: int = 5, *, last_epoch: int = -1, version: int = 2) -> TxnValue:
    partitions = frozenset((ORDERS,)) if state in WITH_PARTITIONS else frozenset()
    started_ms = -1 if state is S.EMPTY else 500
    return TxnValue(
        7, epoch, TIMEOUT_MS, state, partitions, 900, started_ms, client_version=version, last_epoch=last_epoch
    )


def pair(epoch: int, producer_id: int = 7) -> ProducerPair:
    return ProducerPair(producer_id, epoch)


# --- InitProducerId ---


@pytest.mark.parametrize(
    ("name", "request_", "error"),
    [
        ("", InitRequest(1_000), E.INVALID_REQUEST),
        (ID, InitRequest(1_000, 7, -1), E.INVALID_REQUEST),
        (ID, InitRequest(1_000, -1, 5), E.INVALID_REQUEST),
        (ID, InitRequest(0), E.INVALID_TRANSACTION_TIMEOUT),
        (ID, InitRequest(-1), E.INVALID_TRANSACTION_TIMEOUT),
        (ID, InitRequest(900_001), E.INVALID_TRANSACTION_TIMEOUT),
        (ID, InitRequest(1_000, enable_2pc=True), E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (ID, InitRequest(1_000, keep_prepared=True), E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(name: str, request_: InitRequest, error: TxnError) -> None:
    assert TransactionalId(name).init_producer_id(request_, 0, 9) == TxnStep(TxnReply(error))


def test_an_unknown_id_needs_a_producer_id_and_begins_at_epoch_0() -> None:
    core = TransactionalId(ID)
    assert core.init_producer_id(InitRequest(900_000), 1_000) == NeedsProducerId()
    assert not core.pending
    step = core.init_producer_id(InitRequest(900_000), 1_000, 9)
    assert step == TxnStep(persist=TxnValue(9, 0, 900_000, S.EMPTY, updated_ms=1_000))
    assert core.value is None
    assert core.persisted(E.NONE, 1_000) == TxnStep(reply=TxnReply(E.NONE, 9, 0))
    assert core.value == TxnValue(9, 0, 900_000, S.EMPTY, updated_ms=1_000)


@pytest.mark.parametrize("state", ALL_STATES)
@pytest.mark.parametrize(
    ("given", "settled", "ongoing"),
    [
        (None, TxnReply(E.NONE, 7, 6), E.CONCURRENT_TRANSACTIONS),
        (pair(5), TxnReply(E.NONE, 7, 6), E.CONCURRENT_TRANSACTIONS),
        (pair(4), TxnReply(E.PRODUCER_FENCED), E.PRODUCER_FENCED),
        (pair(6), TxnReply(E.PRODUCER_FENCED), E.PRODUCER_FENCED),
        (pair(5, 8), TxnReply(E.PRODUCER_FENCED), E.PRODUCER_FENCED),
    ],
    ids=["none", "current", "older", "newer", "other-id"],
)
def test_init_producer_id_in_each_state(
    state: TxnState, given: ProducerPair | None, settled: TxnReply, ongoing: TxnError
) -> None:
    driver = TxnDriver(value_in(state))
    reply = driver.init(given)
    if state in (S.PREPARE_COMMIT, S.PREPARE_ABORT):
        assert reply.error is E.CONCURRENT_TRANSACTIONS and driver.state() is state
    elif state is not S.ONGOING:
        assert reply == settled
        assert driver.state() is (S.EMPTY if settled.error is E.NONE else state)
    else:
        assert reply == TxnReply(ongoing)
        aborts = ongoing is E.CONCURRENT_TRANSACTIONS
        assert (driver.state(), driver.value.epoch) == ((S.PREPARE_ABORT, 6) if aborts else (S.ONGOING, 5))
        assert (driver.markers is not None) is aborts


@pytest.mark.parametrize("version", [0, 2])
def test_a_new_client_fences_the_open_transaction_and_tells_the_epoch_to_nobody(version: int) -> None:
    driver = TxnDriver(value_in(S.ONGOING, version=version))
    assert driver.init() == TxnReply(E.CONCURRENT_TRANSACTIONS)
    assert driver.markers is not None
    assert driver.markers[1:] == (7, 6, False, frozenset((ORDERS,)), version)
    assert driver.init() == TxnReply(E.CONCURRENT_TRANSACTIONS)
    driver.mark()
    assert driver.state() is S.COMPLETE_ABORT
    assert driver.end(pair(5), commit=False).error is E.PRODUCER_FENCED
    assert driver.init(pair(5)).error is E.PRODUCER_FENCED
    assert driver.init() == TxnReply(E.NONE, 7, 7)


def test_a_client_that_aborts_its_own_transaction_by_its_pair_gets_the_next_one() -> None:
    driver = TxnDriver(value_in(S.ONGOING))
    assert driver.init(pair(5)) == TxnReply(E.CONCURRENT_TRANSACTIONS)
    driver.mark()
    driver.reload()
    assert driver.init(pair(5)) == TxnReply(E.NONE, 7, 6)


@pytest.mark.parametrize("reload", [False, True])
def test_a_retry_with_the_last_epoch_gets_the_same_answer(reload: bool) -> None:
    driver = TxnDriver(value_in(S.EMPTY))
    for _ in range(3):
        assert driver.init(pair(5)) == TxnReply(E.NONE, 7, 6)
        if reload:
            driver.reload()
    assert len(driver.written) == 1
    assert driver.add(pair(6)) is E.NONE
    assert driver.init(pair(5)).error is E.PRODUCER_FENCED  # who has 6 has begun, so this is somebody else
    assert driver.state() is S.ONGOING
    assert driver.end(pair(6), True, 0).error is E.NONE
    driver.mark()
    assert driver.init(pair(5)).error is E.PRODUCER_FENCED
    assert driver.end(pair(5), True).error is E.PRODUCER_FENCED


def test_after_another_client_came_the_last_epoch_is_fenced() -> None:
    driver = TxnDriver(value_in(S.EMPTY))
    assert driver.init(pair(5)) == TxnReply(E.NONE, 7, 6)
    assert driver.init() == TxnReply(E.NONE, 7, 7)
    assert driver.init(pair(5)).error is driver.init(pair(6)).error is E.PRODUCER_FENCED


def test_a_retry_with_another_time_out_is_written() -> None:
    driver = TxnDriver(value_in(S.EMPTY)._replace(timeout_ms=5_000, last_epoch=4))
    assert driver.init(pair(4)) == TxnReply(E.NONE, 7, 5)
    assert (driver.value.timeout_ms, driver.value.epoch) == (TIMEOUT_MS, 5)


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
@pytest.mark.parametrize("given", [None, pair(32_766)])
def test_an_exhausted_epoch_gets_a_new_producer_id(state: TxnState, given: ProducerPair | None, reload: bool) -> None:
    driver = TxnDriver(value_in(state, 32_765))
    assert driver.init() == TxnReply(E.NONE, 7, 32_766)
    assert driver.init(given) == TxnReply(E.NONE, 1_001, 0)
    assert driver.value.previous_producer_id == 7
    if reload:
        driver.reload()
    retried = driver.init(pair(32_766))
    assert retried == (TxnReply(E.PRODUCER_FENCED) if given is None else TxnReply(E.NONE, 1_001, 0))


def test_a_retry_at_the_last_epoch_of_an_id_is_a_retry() -> None:
    driver = TxnDriver(value_in(S.EMPTY, 32_765))
    for _ in range(2):
        assert driver.init(pair(32_765)) == TxnReply(E.NONE, 7, 32_766)


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_ABORT])
def test_the_epoch_of_a_fence_cannot_be_guessed(state: TxnState) -> None:
    driver = TxnDriver(value_in(state, 32_767))
    assert driver.add(pair(32_767)) is E.PRODUCER_FENCED
    assert driver.init(pair(32_767)).error is E.PRODUCER_FENCED
    for version in (0, 2):
        assert driver.end(pair(32_767), False, version).error is E.PRODUCER_FENCED
    assert driver.written == []


@pytest.mark.parametrize("given", [None, pair(32_766)])
def test_a_fence_at_the_last_epoch_leads_to_a_new_producer_id(given: ProducerPair | None) -> None:
    driver = TxnDriver(value_in(S.ONGOING, 32_766))
    assert driver.init(given) == TxnReply(E.CONCURRENT_TRANSACTIONS)
    assert driver.markers is not None and driver.markers.epoch == 32_767
    driver.mark()
    assert driver.init(pair(32_766)).error is E.PRODUCER_FENCED  # 32,767 is told to nobody
    assert driver.init() == TxnReply(E.NONE, 1_001, 0)


def test_a_client_whose_id_was_forgotten_gets_a_new_one_and_its_retry_the_same() -> None:
    driver = TxnDriver()
    for _ in range(2):
        assert driver.init(pair(41, 3)) == TxnReply(E.NONE, 1_001, 0)
        driver.reload()
    assert driver.init(pair(40, 3)).error is E.PRODUCER_FENCED


# --- adding ---


@pytest.mark.parametrize(
    ("state", "producer", "error"),
    [
        *((state, pair(5, 8), E.INVALID_PRODUCER_ID_MAPPING) for state in ALL_STATES),
        *((state, pair(4), E.PRODUCER_FENCED) for state in ALL_STATES),
        *((state, pair(6), E.PRODUCER_FENCED) for state in ALL_STATES),
        (S.PREPARE_COMMIT, pair(5), E.CONCURRENT_TRANSACTIONS),
        (S.PREPARE_ABORT, pair(5), E.CONCURRENT_TRANSACTIONS),
    ],
)
def test_partitions_that_cannot_be_added(state: TxnState, producer: ProducerPair, error: TxnError) -> None:
    driver = TxnDriver(value_in(state))
    assert driver.add(producer) is error
    assert driver.value == value_in(state)
    assert driver.core.verify(producer, [ORDERS]) == {ORDERS: error}


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_the_first_partition_begins_a_transaction(state: TxnState) -> None:
    driver = TxnDriver(value_in(state), now_ms=2_000)
    assert driver.add(pair(5)) is E.NONE
    assert driver.value == TxnValue(7, 5, TIMEOUT_MS, S.ONGOING, frozenset((ORDERS,)), 2_000, 2_000, client_version=2)
    driver.now_ms = 3_000
    assert driver.add(pair(5), ORDERS, PAID) is E.NONE
    assert driver.value.partitions == {ORDERS, PAID}
    assert (driver.value.started_ms, driver.value.updated_ms) == (2_000, 3_000)
    assert driver.add(pair(5), PAID) is E.NONE
    assert len(driver.written) == 2, "partitions that are there already are not written again"


def test_partitions_are_verified() -> None:
    driver = TxnDriver(value_in(S.ONGOING))
    assert driver.core.verify(pair(5), [ORDERS, PAID]) == {ORDERS: E.NONE, PAID: E.TRANSACTION_ABORTABLE}
    driver.core.add_partitions(pair(5), [PAID], 1_000, 0)
    assert driver.core.verify(pair(5), [ORDERS, PAID]) == {ORDERS: E.NONE, PAID: E.CONCURRENT_TRANSACTIONS}
    assert TxnDriver(value_in(S.EMPTY)).core.verify(pair(5), [PAID]) == {PAID: E.TRANSACTION_ABORTABLE}


def test_an_unknown_id_has_no_producer() -> None:
    driver = TxnDriver()
    assert driver.add(pair(5)) is E.INVALID_PRODUCER_ID_MAPPING
    assert driver.end(pair(5)).error is E.INVALID_PRODUCER_ID_MAPPING
    assert driver.core.verify(pair(5), [PAID]) == {PAID: E.INVALID_PRODUCER_ID_MAPPING}
    assert driver.core.description() is None
    assert driver.core.tick(1 << 60) == TxnStep()


# --- EndTxn ---

SAME, OTHER = E.CONCURRENT_TRANSACTIONS, E.INVALID_TXN_STATE


@pytest.mark.parametrize(
    ("state", "commit", "error"),
    [
        (S.EMPTY, True, E.INVALID_TXN_STATE),
        (S.EMPTY, False, E.INVALID_TXN_STATE),
        (S.ONGOING, True, E.NONE),
        (S.ONGOING, False, E.NONE),
        (S.PREPARE_COMMIT, True, SAME),
        (S.PREPARE_COMMIT, False, OTHER),
        (S.PREPARE_ABORT, True, OTHER),
        (S.PREPARE_ABORT, False, SAME),
        (S.COMPLETE_COMMIT, True, E.NONE),
        (S.COMPLETE_COMMIT, False, OTHER),
        (S.COMPLETE_ABORT, True, OTHER),
        (S.COMPLETE_ABORT, False, E.NONE),
    ],
)
def test_end_txn_before_version_5(state: TxnState, commit: bool, error: TxnError) -> None:
    start = value_in(state, last_epoch=4, version=0)
    driver = TxnDriver(start)
    loaded = driver.markers
    for stale in (pair(4), pair(6)):
        assert driver.end(stale, commit, 0) == TxnReply(E.PRODUCER_FENCED)
    assert driver.end(pair(5, 8), commit, 0) == TxnReply(E.INVALID_PRODUCER_ID_MAPPING)
    assert driver.end(pair(5), commit, 0) == TxnReply(error)
    if state is not S.ONGOING:
        assert driver.value == start and driver.markers is loaded
        return
    assert (driver.state(), driver.value.epoch) == (S.PREPARE_COMMIT if commit else S.PREPARE_ABORT, 5)
    assert (driver.value.started_ms, driver.value.updated_ms) == (500, 1_000)
    assert driver.markers is not None and driver.markers[1:] == (7, 5, commit, frozenset((ORDERS,)), 0)
    assert driver.end(pair(5), commit, 0) == TxnReply(E.CONCURRENT_TRANSACTIONS)
    driver.mark()
    assert driver.state() is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)
    assert driver.end(pair(5), commit, 0) == TxnReply(E.NONE)


BUMP = None
TV2 = [  # state, then what abort and commit get with the epoch before (of the same request) and with the current one
    (S.EMPTY, E.PRODUCER_FENCED, BUMP, E.PRODUCER_FENCED, OTHER),
    (S.ONGOING, E.PRODUCER_FENCED, BUMP, E.PRODUCER_FENCED, BUMP),
    (S.COMPLETE_ABORT, E.NONE, BUMP, E.PRODUCER_FENCED, OTHER),
    (S.COMPLETE_COMMIT, OTHER, BUMP, E.NONE, OTHER),
    (S.PREPARE_ABORT, SAME, E.CONCURRENT_TRANSACTIONS, E.PRODUCER_FENCED, E.CONCURRENT_TRANSACTIONS),
    (S.PREPARE_COMMIT, OTHER, E.CONCURRENT_TRANSACTIONS, SAME, E.CONCURRENT_TRANSACTIONS),
]


@pytest.mark.parametrize(
    ("state", "commit", "epoch", "expected"),
    [
        (state, commit, epoch, answers[2 * commit + (epoch == 5)])
        for state, *answers in TV2
        for commit in (False, True)
        for epoch in (4, 5)
    ],
)
def test_end_txn_version_5(state: TxnState, commit: bool, epoch: int, expected: TxnError | None) -> None:
    start = value_in(state, last_epoch=4)
    driver = TxnDriver(start)
    reply = driver.end(pair(epoch), commit)
    if expected is None:
        assert reply == TxnReply(E.NONE, 7, 6)
        complete = S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT
        prepared = S.PREPARE_COMMIT if commit else S.PREPARE_ABORT
        assert driver.state() is (prepared if state is S.ONGOING else complete)
        assert (driver.value.epoch, driver.value.last_epoch) == (6, 5)
    else:
        assert reply == (TxnReply(E.NONE, 7, 5) if expected is E.NONE else TxnReply(expected))
        assert driver.value == start


def test_an_abort_before_the_markers_of_the_transaction_before_waits_for_them() -> None:
    driver = TxnDriver(value_in(S.ONGOING))
    assert driver.end(pair(5), commit=True) == TxnReply(E.NONE, 7, 6)
    assert driver.end(pair(6), commit=False) == TxnReply(E.CONCURRENT_TRANSACTIONS)
    driver.mark()
    assert driver.end(pair(6), commit=False) == TxnReply(E.NONE, 7, 7)
    assert driver.state() is S.COMPLETE_ABORT


@pytest.mark.parametrize("state", ALL_STATES)
@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize(
    ("producer", "error"),
    [(pair(3), E.PRODUCER_FENCED), (pair(6), E.PRODUCER_FENCED), (pair(5, 8), E.INVALID_PRODUCER_ID_MAPPING)],
)
def test_end_txn_version_5_of_others(state: TxnState, commit: bool, producer: ProducerPair, error: TxnError) -> None:
    driver = TxnDriver(value_in(state, last_epoch=4))
    assert driver.end(producer, commit) == TxnReply(error)
    assert driver.written == []


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_a_whole_transaction_of_version_2(commit: bool, reload: bool) -> None:
    driver = TxnDriver()
    driver.init()
    first = driver.pair
    assert driver.add(first, ORDERS, PAID) is E.NONE
    assert driver.end(first, commit) == TxnReply(E.NONE, first.producer_id, 1)
    if reload:
        driver.reload()
    assert driver.markers is not None
    assert driver.markers[1:] == (first.producer_id, 1, commit, frozenset((ORDERS, PAID)), 2)
    assert driver.add(pair(1, first.producer_id)) is E.CONCURRENT_TRANSACTIONS
    driver.mark(ORDERS)
    assert driver.state() in (S.PREPARE_COMMIT, S.PREPARE_ABORT)
    driver.mark(ORDERS)
    assert driver.end(first, commit) == TxnReply(E.CONCURRENT_TRANSACTIONS)
    driver.mark(PAID)
    if reload:
        driver.reload()
    assert driver.state() is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)
    assert driver.end(first, commit) == TxnReply(E.NONE, first.producer_id, 1)
    assert driver.add(pair(1, first.producer_id)) is E.NONE


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_the_end_at_the_last_epoch_changes_the_producer_id(commit: bool, reload: bool) -> None:
    driver = TxnDriver(value_in(S.ONGOING, 32_766))
    assert driver.core.end(pair(32_766), commit, 2, 1_000) == NeedsProducerId()
    assert driver.end(pair(32_766), commit) == TxnReply(E.NONE, 1_001, 0)
    if reload:
        driver.reload()
    assert driver.markers is not None and driver.markers[1:3] == (7, 32_767)
    assert driver.add(pair(0, 1_001)) is E.CONCURRENT_TRANSACTIONS
    assert driver.end(pair(32_766), commit).error is SAME
    assert driver.end(pair(32_766), not commit).error is (OTHER if commit else E.PRODUCER_FENCED)
    driver.mark()
    if reload:
        driver.reload()
    assert (driver.pair, driver.value.previous_producer_id) == (pair(0, 1_001), 7)
    assert driver.end(pair(32_766), commit) == TxnReply(E.NONE, 1_001, 0)
    assert driver.end(pair(32_766), not commit).error is (OTHER if commit else E.PRODUCER_FENCED)
    assert driver.add(pair(0, 1_001)) is E.NONE
    assert driver.end(pair(32_766), commit).error is not E.NONE


def test_an_abort_without_partitions_at_the_last_epoch_changes_the_producer_id() -> None:
    driver = TxnDriver(value_in(S.EMPTY, 32_766))
    for _ in range(2):
        assert driver.end(pair(32_766), commit=False) == TxnReply(E.NONE, 1_001, 0)
        assert driver.state() is S.COMPLETE_ABORT
    assert driver.markers is None


# --- one change at a time ---


@pytest.mark.parametrize("state", [S.EMPTY, S.ONGOING, S.COMPLETE_ABORT])
@pytest.mark.parametrize("error", [E.COORDINATOR_NOT_AVAILABLE, E.NOT_COORDINATOR])
def test_while_a_change_is_written_others_wait_and_if_it_fails_nothing_has_changed(
    state: TxnState, error: TxnError
) -> None:
    start = value_in(state)
    core = TransactionalId.load(ID, start, 1_000)
    core.add_partitions(pair(5), [PAID], 1_000, 0)
    assert (core.value, core.pending) == (start, True)
    busy = TxnStep(TxnReply(E.CONCURRENT_TRANSACTIONS))
    assert core.init_producer_id(InitRequest(1_000), 1_000) == busy
    assert core.add_partitions(pair(5), [("more", 1)], 1_000, 0) == busy
    assert core.end(pair(5), False, 0, 1_000) == core.end(pair(5), False, 2, 1_000) == busy
    assert core.tick(1 << 60) == TxnStep()
    assert core.persisted(error, 1_000) == TxnStep(TxnReply(error))
    assert (core.value, core.pending) == (start, False)
    with pytest.raises(RuntimeError, match="'pay'"):
        core.persisted(E.NONE, 1_000)


def test_a_complete_record_that_was_not_written_is_written_by_the_next_tick() -> None:
    driver = TxnDriver(value_in(S.PREPARE_COMMIT))
    assert driver.markers is not None
    step = driver.core.marked(driver.markers, [ORDERS], 1_000)
    assert driver.settle(step, E.COORDINATOR_NOT_AVAILABLE) is None
    assert driver.state() is S.PREPARE_COMMIT
    driver.settle(driver.core.tick(2_000))
    assert driver.state() is S.COMPLETE_COMMIT


def test_markers_of_an_earlier_transaction_complete_nothing() -> None:
    driver = TxnDriver(value_in(S.ONGOING, version=0))
    driver.end(pair(5), True, 0)
    first = driver.markers
    driver.mark()
    driver.add(pair(5), ORDERS, version=0)
    driver.end(pair(5), False, 0)
    assert first is not None and driver.markers is not None and first.number != driver.markers.number
    assert driver.core.marked(first, [ORDERS], 1_000) == TxnStep()
    assert driver.state() is S.PREPARE_ABORT


def test_partitions_of_deleted_topics_need_no_marker() -> None:
    driver = TxnDriver(value_in(S.PREPARE_COMMIT)._replace(partitions=frozenset((ORDERS, PAID))))
    driver.settle(driver.core.topics_deleted(["other", "orders"], 1_000))
    assert driver.state() is S.PREPARE_COMMIT
    driver.mark(PAID)
    assert driver.state() is S.COMPLETE_COMMIT
    ongoing = TxnDriver(value_in(S.ONGOING))
    assert ongoing.core.topics_deleted(["orders"], 1_000) == TxnStep()


def test_a_prepared_transaction_without_partitions_is_completed_when_it_is_loaded() -> None:
    driver = TxnDriver(value_in(S.PREPARE_ABORT)._replace(partitions=frozenset()))
    assert driver.state() is S.COMPLETE_ABORT


@pytest.mark.parametrize("state", [S.EMPTY, S.ONGOING, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_other_states_have_nothing_to_resume(state: TxnState) -> None:
    assert TransactionalId.load(ID, value_in(state), 1_000).resume(1_000) == TxnStep()


def test_a_dead_record_is_no_id() -> None:
    assert TransactionalId.load(ID, value_in(S.DEAD), 1_000).value is None


# --- time ---


def test_a_transaction_over_its_time_out_is_fenced_and_aborted() -> None:
    driver = TxnDriver(value_in(S.ONGOING))
    assert driver.core.tick(500 + TIMEOUT_MS) == TxnStep()
    driver.settle(driver.core.tick(500 + TIMEOUT_MS + 1))
    assert driver.markers is not None and driver.markers[1:] == (7, 6, False, frozenset((ORDERS,)), 2)
    assert driver.core.tick(1 << 60) == TxnStep()
    driver.mark()
    assert driver.state() is S.COMPLETE_ABORT
    assert driver.end(pair(5), commit=True) == TxnReply(E.PRODUCER_FENCED)
    for commit in (False, True):  # what clients of before EndTxn v5 are told, which do not get a pair
        assert driver.end(pair(5), commit, 0) == TxnReply(E.PRODUCER_FENCED)


@pytest.mark.parametrize("reload", [False, True])
def test_who_was_over_its_time_out_aborts_and_goes_on_with_the_next_epoch(reload: bool) -> None:
    driver = TxnDriver(value_in(S.ONGOING))
    driver.settle(driver.core.tick(500 + TIMEOUT_MS + 1))
    assert driver.end(pair(5), commit=False) == TxnReply(E.CONCURRENT_TRANSACTIONS)
    driver.mark()
    driver = TxnDriver(driver.value) if reload else driver
    assert driver.end(pair(5), commit=False) == TxnReply(E.NONE, 7, 6)
    assert driver.init(pair(5)) == TxnReply(E.NONE, 7, 6)
    driver.add(pair(6), PAID)
    assert driver.state() is S.ONGOING
    assert driver.end(pair(5), commit=False) == TxnReply(E.PRODUCER_FENCED)


def test_who_was_over_its_time_out_is_fenced_by_the_next_client() -> None:
    driver = TxnDriver(value_in(S.ONGOING))
    driver.settle(driver.core.tick(500 + TIMEOUT_MS + 1))
    driver.mark()
    assert driver.init() == TxnReply(E.NONE, 7, 7)
    for commit in (False, True):
        assert driver.end(pair(5), commit) == TxnReply(E.PRODUCER_FENCED)
    assert driver.init(pair(5)) == TxnReply(E.PRODUCER_FENCED)


def test_a_start_in_the_future_counts_from_loading_also_when_partitions_are_added() -> None:
    driver = TxnDriver(value_in(S.ONGOING)._replace(started_ms=9_000_000), now_ms=1_000)
    driver.now_ms = 50_000
    driver.add(pair(5), PAID)
    assert driver.core.tick(1_000 + TIMEOUT_MS) == TxnStep()
    assert driver.core.tick(1_000 + TIMEOUT_MS + 1).persist is not None


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_an_idle_id_is_forgotten_after_seven_days(state: TxnState) -> None:
    driver = TxnDriver(value_in(state))
    assert driver.core.tick(900 + 7 * DAY_MS - 1) == TxnStep()
    step = driver.core.tick(900 + 7 * DAY_MS)
    assert step == TxnStep(persist=TxnTombstone())
    assert driver.add(pair(5)) is E.CONCURRENT_TRANSACTIONS
    assert driver.core.persisted(E.NOT_COORDINATOR, 0) == TxnStep()
    assert driver.value == value_in(state)
    driver.settle(driver.core.tick(900 + 7 * DAY_MS))
    assert driver.core.value is None
    assert driver.add(pair(5)) is E.INVALID_PRODUCER_ID_MAPPING
    assert driver.init() == TxnReply(E.NONE, 1_001, 0)


# --- two-phase commit (KIP-939) ---


def test_two_phase_transactions_are_never_ended_by_time() -> None:
    driver = TxnDriver(limits=TWO_PHASE)
    driver.init(two_phase=True)
    assert driver.value.timeout_ms == NO_TIMEOUT_MS
    driver.add(driver.pair)
    assert driver.core.tick(1 << 60) == TxnStep()


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_a_prepared_transaction_is_kept_and_ended_with_the_next_pair(commit: bool, reload: bool) -> None:
    driver = TxnDriver(value_in(S.ONGOING), TWO_PHASE)
    assert driver.init(keep=True, two_phase=True) == TxnReply(E.NONE, 7, 6, 7, 5)
    if reload:
        driver.reload()
    assert driver.init(keep=True, two_phase=True) == TxnReply(E.NONE, 7, 7, 7, 5)
    if reload:
        driver.reload()
    for stale in (pair(5), pair(6)):
        assert driver.end(stale, commit).error is driver.add(stale, PAID) is E.PRODUCER_FENCED
        assert driver.core.verify(stale, [ORDERS]) == {ORDERS: E.PRODUCER_FENCED}
    assert driver.add(pair(7), PAID) is E.INVALID_TXN_STATE
    assert driver.end(pair(7), commit) == TxnReply(E.NONE, 7, 8)
    if reload:
        driver.reload()
    assert driver.markers is not None and driver.markers[1:4] == (7, 6, commit)
    assert driver.end(pair(7), commit).error is SAME
    driver.mark()
    if reload:
        driver.reload()
    assert driver.end(pair(7), commit) == TxnReply(E.NONE, 7, 8)
    assert driver.pair == pair(8)
    assert driver.add(pair(8)) is E.NONE


def test_a_kept_transaction_ended_by_an_old_version_has_markers_of_its_own_epoch() -> None:
    driver = TxnDriver(value_in(S.ONGOING, version=0), TWO_PHASE)
    driver.init(keep=True)
    assert driver.end(pair(6), True, 0) == TxnReply(E.NONE)
    assert driver.markers is not None and driver.markers[1:4] == (7, 5, True)
    driver.mark()
    assert driver.pair == pair(6)
    assert driver.end(pair(6), True, 0) == TxnReply(E.NONE)


def test_keeping_with_a_pair_is_retried_with_the_same_answer() -> None:
    driver = TxnDriver(value_in(S.ONGOING), TWO_PHASE)
    for _ in range(2):
        assert driver.init(pair(5), keep=True) == TxnReply(E.NONE, 7, 6, 7, 5)
        driver.reload()
    assert driver.init(pair(5)).error is E.PRODUCER_FENCED


def test_a_client_that_does_not_keep_aborts_and_fences_who_kept() -> None:
    driver = TxnDriver(value_in(S.ONGOING), TWO_PHASE)
    driver.init(keep=True)
    assert driver.init() == TxnReply(E.CONCURRENT_TRANSACTIONS)
    assert driver.markers is not None and driver.markers[1:4] == (7, 6, False)
    driver.mark()
    assert driver.end(pair(6), False).error is E.PRODUCER_FENCED
    assert driver.init() == TxnReply(E.NONE, 7, 8)


def test_epochs_of_a_kept_transaction_run_out() -> None:
    driver = TxnDriver(value_in(S.ONGOING, 32_765), TWO_PHASE)
    assert driver.init(keep=True) == TxnReply(E.NONE, 7, 32_766, 7, 32_765)
    assert driver.init(keep=True) == TxnReply(E.NONE, 1_001, 0, 7, 32_765)
    assert driver.end(pair(0, 1_001)) == TxnReply(E.NONE, 1_001, 1)
    assert driver.markers is not None and driver.markers[1:4] == (7, 32_766, True)
    driver.mark()
    assert driver.end(pair(0, 1_001)) == TxnReply(E.NONE, 1_001, 1)
    assert driver.pair == pair(1, 1_001)


@pytest.mark.parametrize(("two_phase", "timeout_ms"), [(False, 5_000), (True, NO_TIMEOUT_MS)])
def test_keeping_leaves_the_time_out_unless_it_is_to_have_none(two_phase: bool, timeout_ms: int) -> None:
    driver = TxnDriver(value_in(S.ONGOING)._replace(timeout_ms=5_000), TWO_PHASE)
    driver.init(keep=True, two_phase=two_phase)
    assert (driver.value.timeout_ms, driver.value.started_ms) == (timeout_ms, 500)


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_without_an_open_transaction_there_is_nothing_to_keep(state: TxnState) -> None:
    assert TxnDriver(value_in(state), TWO_PHASE).init(keep=True) == TxnReply(E.NONE, 7, 6)


# --- what is shown and told ---


def test_a_description_has_the_confirmed_state() -> None:
    described = TransactionalId.load(ID, value_in(S.ONGOING), 1_000).description()
    assert described == (ID, "Ongoing", TIMEOUT_MS, 500, 7, 5, frozenset((ORDERS,)))
    complete = TransactionalId.load(ID, value_in(S.COMPLETE_ABORT), 1_000).description()
    assert complete == (ID, "CompleteAbort", TIMEOUT_MS, -1, 7, 5, frozenset())


@pytest.mark.parametrize(
    ("api_key", "first"), [(22, 4), (24, 2), (25, 2), (26, 2), (28, 0)], ids=["init", "add", "offsets", "end", "other"]
)
def test_old_versions_do_not_know_producer_fenced(api_key: int, first: int) -> None:
    for version in range(6):
        told = told_to_client(E.PRODUCER_FENCED, api_key, version)
        assert told is (E.PRODUCER_FENCED if version >= first else E.INVALID_PRODUCER_EPOCH)
        assert told_to_client(E.INVALID_TXN_STATE, api_key, version) is E.INVALID_TXN_STATE


def test_failed_appends_are_told_as_the_coordinators_errors() -> None:
    told = {code: append_failure(code).value for code in (3, 7, 19, 20, 6, 56, 10)}
    assert told == {3: 15, 7: 15, 19: 15, 20: 15, 6: 16, 56: 16, 10: -1}
