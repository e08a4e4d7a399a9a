"""What the coordinator of transactions gives out after records of its partition were lost with a WAL."""

from __future__ import annotations

import msgspec
import pytest

from tests.broker.test_txn_coordinator import DATA, INIT, TxnWorld
from tests.support.loops import VIRTUAL_LOOP
from tests.support.txn_driver import TIMEOUT_MS, TxnDriver
from tidelog.broker.coordinators.topic import TRANSACTION_TOPIC
from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.records import TxnState, TxnValue, encode_txn_value, parse_txn_value
from tidelog.broker.txn.state import NO_TIMEOUT_MS, ProducerPair, TxnLimits
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.wal_notes import StakeRange, WalLoss, loss_key, lost_at

LOOPS = VIRTUAL_LOOP


def lose(world: TxnWorld, at: int) -> None:
    """The controllers know that records of the partition from an offset on were given up."""
    loss = WalLoss(0, 1, 0, "a test", 0, -1, True, (StakeRange(TRANSACTION_TOPIC, 0, at, -1),))
    world.controller.apply(RowChange("kv", loss_key(loss), msgspec.msgpack.encode(loss)))


async def init(world: TxnWorld, name: str) -> ProducerPair:
    reply = await world.coordinator.init_producer_id(name, INIT)
    assert reply.error is TxnError.NONE, reply
    return ProducerPair(reply.producer_id, reply.epoch)


async def test_no_pair_that_may_have_been_given_is_given_again_after_a_loss() -> None:
    async with TxnWorld() as world:
        before = await init(world, "tx")
        other = await init(world, "other")
        lose(world, world.partitions.logs[0].log_end_offset)  # as if somebody had got (id, 1) since
        await world.restart()
        found = await init(world, "tx")
        assert found.producer_id not in {before.producer_id, other.producer_id} and found.epoch == 0
        assert await init(world, "tx") == (found.producer_id, 1), "this one is known"
        await world.restart()
        assert await init(world, "tx") == (found.producer_id, 2), "its record came after the loss"
        await world.move()  # the state is passed on, and the log not read
        assert await init(world, "tx") == (found.producer_id, 3)
        assert (await init(world, "other")).producer_id not in {before.producer_id, other.producer_id}


async def test_a_transaction_that_was_open_at_the_loss_can_be_ended_by_its_client() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        lose(world, world.partitions.logs[0].log_end_offset)
        await world.restart()
        reply = await world.coordinator.end("tx", producer, commit=True, version=2)
        assert reply.error is TxnError.NONE
        assert reply.producer_id != producer.producer_id and reply.epoch == 0
        await world.until("CompleteCommit")
        assert {(marker.producer_id, marker.producer_epoch) for marker in world.markers} == {(producer.producer_id, 1)}
        again = ProducerPair(reply.producer_id, reply.epoch)
        assert await world.coordinator.add_partitions("tx", again, DATA, 2) is TxnError.NONE
        reply = await world.coordinator.end("tx", again, commit=True, version=2)
        assert (reply.error, reply.producer_id, reply.epoch) == (TxnError.NONE, again.producer_id, 1)


def test_a_fence_after_a_loss_gives_its_pair_to_nobody() -> None:
    open_value = TxnValue(
        7, 3, TIMEOUT_MS, TxnState.ONGOING, frozenset({("orders", 0)}), 1_000, 1_000, is_behind=True
    )  # fmt: skip
    driver = TxnDriver(open_value)
    assert driver.init(ProducerPair(7, 3)).error is TxnError.CONCURRENT_TRANSACTIONS
    markers = driver.markers
    assert markers is not None and (markers.epoch, markers.commit) == (4, False)
    driver.settle(driver.core.marked(markers, markers.partitions, driver.now_ms))
    assert driver.pair == (7, 4) and driver.value.is_behind
    assert driver.init(ProducerPair(7, 3)).error is TxnError.PRODUCER_FENCED
    found = driver.init()
    assert found.error is TxnError.NONE and (found.producer_id, found.epoch) == (driver.next_id, 0)
    assert not driver.value.is_behind


def test_a_record_keeps_that_later_ones_may_be_lost() -> None:
    value = TxnValue(7, 3, TIMEOUT_MS, TxnState.EMPTY, is_behind=True)
    assert parse_txn_value(encode_txn_value(value)) == value


@pytest.mark.parametrize(("partition", "offset"), [(0, 9), (1, 5), (2, -1)])
def test_where_records_were_lost_last(partition: int, offset: int) -> None:
    losses = [
        WalLoss(0, 1, at, "a test", 0, -1, True, (StakeRange("t", 0, first), StakeRange("t", 1, 5)))
        for at, first in enumerate((3, 9, 4))
    ]
    rows = {loss_key(each): msgspec.msgpack.encode(each) for each in losses}
    assert lost_at(rows, "t", partition) == offset


def test_a_prepared_transaction_can_be_kept_after_a_loss() -> None:
    limits = TxnLimits(two_phase_commit=True)
    prepared = TxnValue(7, 3, NO_TIMEOUT_MS, TxnState.ONGOING, frozenset({("orders", 0)}), 1_000, 1_000, is_behind=True)
    driver = TxnDriver(prepared, limits)
    found = driver.init(keep=True, two_phase=True)
    assert (found.error, found.producer_id, found.epoch) == (TxnError.NONE, driver.next_id, 0)
    assert (found.ongoing_producer_id, found.ongoing_epoch) == (7, 3)
    assert driver.state() is TxnState.ONGOING and not driver.value.is_behind
    again = driver.init(keep=True, two_phase=True)
    assert (again.producer_id, again.epoch) == (driver.next_id, 1), "this one is known"
