"""Requests that reach a broker after its coordinator has moved: passed on once, repeated, or told to the client."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from tests.broker.test_txn_coordinator import DATA, INIT, TxnWorld
from tests.support.loops import VIRTUAL_LOOP, LoopClock
from tidelog.broker.coordinators.errors import CoordinatorNotAvailable, NotCoordinator
from tidelog.broker.txn.calls import REQUEST, AddCall, EndCall, InitCall, read_reply, read_request
from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.requests import FORWARD_S, TxnRequests
from tidelog.broker.txn.state import InitRequest, ProducerPair, TxnReply
from tidelog.controller.model.records import BrokerRecord
from tidelog.runtime.errors import InvalidInput, Unavailable

LOOPS = VIRTUAL_LOOP
HERE, THERE = 1, 2
PAIR = ProducerPair(7, 3)


class Elsewhere:
    """A coordinator that this broker has lost: it knows who leads now."""

    def __init__(self, leader: int | None = THERE) -> None:
        self.leader = leader
        self.asked = 0
        self.reply: TxnReply | None = None
        """What it answers itself; None: it is not the coordinator."""

    async def leader_of(self, _transactional_id: str) -> BrokerRecord:
        if self.leader is None:
            raise CoordinatorNotAvailable("no leader")
        return BrokerRecord(self.leader, "", "127.0.0.1", 9092, "", "", "", 1, True)

    async def _answer(self) -> TxnReply:
        self.asked += 1
        if self.reply is None:
            raise NotCoordinator("lost")
        return self.reply

    async def init_producer_id(self, _transactional_id: str, _request: InitRequest) -> TxnReply:
        return await self._answer()

    async def add_partitions(self, *_: Any) -> TxnError:
        return (await self._answer()).error

    async def end(self, _transactional_id: str, _producer: ProducerPair, *, commit: bool, version: int) -> TxnReply:
        return await self._answer()


class Peers:
    """Other brokers: `answers` in turn, the last one for ever."""

    def __init__(self, *answers: TxnReply | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[Any] = []

    async def call(self, broker_id: int, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        assert (broker_id, method) == (THERE, REQUEST)
        self.calls.append(read_request(msgspec.Raw(msgspec.msgpack.encode(params))))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return msgspec.Raw(msgspec.msgpack.encode(answer))


def requests(coordinator: Any, peers: Any) -> TxnRequests:
    return TxnRequests(HERE, coordinator, peers, LoopClock(), random.Random(1))


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_each_request_is_passed_on_as_it_is() -> None:
    peers = Peers(TxnReply(TxnError.NONE, 7, 4, 5, 6))
    routes = requests(Elsewhere(), peers)
    asked = InitRequest(60_000, 7, 3, enable_2pc=True, keep_prepared=True)
    assert await routes.init_producer_id("tx", asked) == TxnReply(TxnError.NONE, 7, 4, 5, 6)
    assert await routes.add_partitions("tx", PAIR, DATA, 2) is TxnError.NONE
    assert (await routes.end("tx", PAIR, commit=True, version=2)).error is TxnError.NONE
    assert peers.calls == [
        InitCall("tx", 60_000, 7, 3, True, True),
        AddCall("tx", 7, 3, DATA, 2),
        EndCall("tx", 7, 3, True, 2),
    ]
    assert routes.forwarded == 3


@pytest.mark.parametrize(
    "error", [TxnError.CONCURRENT_TRANSACTIONS, TxnError.PRODUCER_FENCED, TxnError.INVALID_TXN_STATE]
)
async def test_what_the_coordinator_refuses_is_the_answer(error: TxnError) -> None:
    peers = Peers(TxnReply(error))
    assert (await requests(Elsewhere(), peers).end("tx", PAIR, commit=True, version=2)).error is error
    assert len(peers.calls) == 1


async def test_it_is_asked_again_while_the_partition_is_between_two_brokers() -> None:
    lost = TxnReply(TxnError.NOT_COORDINATOR)
    peers = Peers(lost, lost, TxnReply(TxnError.NONE))
    assert (await requests(Elsewhere(), peers).end("tx", PAIR, commit=False, version=0)).error is TxnError.NONE
    assert len(peers.calls) == 3


async def test_a_client_is_told_to_look_when_no_broker_says_that_it_coordinates() -> None:
    peers = Peers(TxnReply(TxnError.NOT_COORDINATOR))
    since = now()
    assert (
        await requests(Elsewhere(), peers).end("tx", PAIR, commit=True, version=0)
    ).error is TxnError.NOT_COORDINATOR
    assert FORWARD_S <= now() - since < FORWARD_S + 0.2


@pytest.mark.parametrize("leader", [None, THERE])
async def test_a_client_is_told_at_once_to_look_when_nobody_can_be_asked(leader: int | None) -> None:
    peers = Peers(Unavailable("it does not answer"))
    since = now()
    reply = await requests(Elsewhere(leader), peers).end("tx", PAIR, commit=True, version=0)
    assert (reply.error, now()) == (TxnError.NOT_COORDINATOR, since)


async def test_a_partition_that_comes_back_is_answered_here() -> None:
    coordinator, peers = Elsewhere(), Peers(TxnReply(TxnError.NOT_COORDINATOR))
    ending = asyncio.create_task(requests(coordinator, peers).end("tx", PAIR, commit=True, version=0))
    await asyncio.sleep(0.05)
    coordinator.leader, coordinator.reply = HERE, TxnReply(TxnError.NONE)
    assert (await ending).error is TxnError.NONE


async def test_what_is_not_about_the_place_is_raised_as_before() -> None:
    class Broken(Elsewhere):
        async def end(self, *_: Any, **__: Any) -> TxnReply:
            raise CoordinatorNotAvailable("too few replicas")

    with pytest.raises(CoordinatorNotAvailable, match="too few"):
        await requests(Broken(), Peers(TxnReply(TxnError.NONE))).end("tx", PAIR, commit=True, version=0)


async def test_the_receiver_answers_for_itself_and_passes_nothing_on() -> None:
    async with TxnWorld() as world:
        routes = requests(world.coordinator, Peers(AssertionError("passed on")))

        async def ask(call: InitCall | AddCall | EndCall) -> TxnReply:
            return read_reply(msgspec.Raw(await routes.answer(msgspec.Raw(msgspec.msgpack.encode(call)))))

        made = await ask(InitCall("tx", INIT.timeout_ms, -1, -1, False, False))
        assert made.error is TxnError.NONE
        pair = (made.producer_id, made.epoch)
        assert (await ask(AddCall("tx", *pair, DATA, 0))).error is TxnError.NONE
        assert (await ask(AddCall("tx", 1, 1, DATA, 0))).error is TxnError.INVALID_PRODUCER_ID_MAPPING
        assert (await ask(EndCall("tx", *pair, True, 0))).error is TxnError.NONE
        assert (await ask(InitCall("t" * 70_000, 1, -1, -1, False, False))).error is TxnError.INVALID_REQUEST
        world.partitions.close(0)
        assert (await ask(EndCall("tx", *pair, True, 0))).error is TxnError.NOT_COORDINATOR


async def test_a_partition_that_is_not_known_here_yet_is_not_added_for_another_broker() -> None:
    """Its topic would count as deleted when the markers are sent: the transaction would stay open in it for ever."""
    async with TxnWorld() as world:
        routes = requests(world.coordinator, Peers(AssertionError("passed on")))
        pair = await world.producer()

        async def ask(call: AddCall | EndCall) -> TxnError:
            raw = await routes.answer(msgspec.Raw(msgspec.msgpack.encode(call)))
            return read_reply(msgspec.Raw(raw)).error

        made_elsewhere = AddCall("tx", *pair, [("data", 0), ("new", 0)], 0)
        assert await ask(made_elsewhere) is TxnError.COORDINATOR_NOT_AVAILABLE
        assert await world.state() == "Empty"
        world.controller.add_topic("new", 1)
        assert await ask(made_elsewhere) is TxnError.NONE
        assert await ask(EndCall("tx", *pair, True, 0)) is TxnError.NONE
        await world.until("CompleteCommit")
        marked = {partition for marker in world.markers for partition in marker.partitions}
        assert marked == {("data", 0), ("new", 0)}


def test_other_parameters_are_refused() -> None:
    for raw in (b"", b"\xc0", msgspec.msgpack.encode(["other", 1]), msgspec.msgpack.encode(["end", 1])):
        with pytest.raises(InvalidInput, match="no parameters of txn_request"):
            read_request(msgspec.Raw(raw))
    many = AddCall("tx", 1, 1, [("t", 0)] * 10_001, 2)
    with pytest.raises(InvalidInput, match="10001 partitions"):
        read_request(msgspec.Raw(msgspec.msgpack.encode(many)))
