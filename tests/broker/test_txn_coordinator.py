"""The coordinator of transactions in virtual time, over a log in memory: decisions, markers, failovers, time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from tests.support.group_world import NODE, FakeController, FakeLog, FakePartitions, FakeStorage, check_passed
from tests.support.loops import VIRTUAL_LOOP, LoopClock
from tidelog.broker.coordinators.errors import CoordinatorLoading, CoordinatorNotAvailable, NotCoordinator
from tidelog.broker.coordinators.topic import TRANSACTION_TOPIC
from tidelog.broker.settings import GroupSettings
from tidelog.broker.txn.admission import TxnAdmission
from tidelog.broker.txn.calls import ADMIT, AdmitParams, MarkerParams, read_admit
from tidelog.broker.txn.coordinator import InvalidTransactionalId, TxnCoordinator
from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.markers import MarkerSender
from tidelog.broker.txn.state import InitRequest, ProducerPair, TxnLimits, TxnReply
from tidelog.broker.txn.store import TxnStore
from tidelog.controller.model.wal_notes import lost_at
from tidelog.runtime.errors import NotLeader, Overloaded, Unavailable

LOOPS = VIRTUAL_LOOP
INIT = InitRequest(60_000)
DATA = [("data", 0), ("data", 1)]


class NoPeers:
    async def call(self, broker_id: int, method: str, params: Any, timeout_s: float) -> Any:
        raise Unavailable(f"broker {broker_id} does not answer")


class TxnWorld:
    """One broker that leads `__transaction_state`, and data partitions whose markers are recorded."""

    def __init__(self) -> None:
        self.storage = FakeStorage()
        self.controller = FakeController()
        self.partitions = FakePartitions(self.storage)
        self.settings = GroupSettings(transaction_topic_partitions=1)
        self.markers: list[MarkerParams] = []
        self.refusing = 0
        """The code with which data partitions answer."""
        self.ids = iter(range(1_000, 2_000))
        self.ids_fail = False
        self.seed = 0
        self.data = self.controller.add_topic("data", 2)
        self.controller.add_topic(TRANSACTION_TOPIC, 1)
        self.partitions.logs[0] = FakeLog(0, self.storage, topic=TRANSACTION_TOPIC)
        self.coordinator = self._begin()

    def other_broker(self, controller: Any) -> TxnCoordinator:
        """The coordinator of another broker, which leads nothing, with metadata of its own."""
        return self._begin(controller)

    def _begin(self, other: Any = None) -> TxnCoordinator:
        self.seed += 1
        clock, rng = LoopClock(), random.Random(self.seed)
        controller: Any = other or self.controller
        partitions: Any = self.partitions
        sender = MarkerSender(
            node_id=NODE,
            image=lambda: controller.image,
            calls=NoPeers(),
            write_here=self._write_markers,
            clock=clock,
            rng=rng,
        )
        return TxnCoordinator(partitions, controller, sender, clock, self.settings, rng)

    async def _write_markers(self, markers: list[MarkerParams]) -> list[list[int]]:
        await asyncio.sleep(0.001)
        if self.refusing == 0:
            self.markers += markers
        return [[self.refusing] * len(marker.partitions) for marker in markers]

    async def _new_id(self) -> int:
        await asyncio.sleep(0.001)
        if self.ids_fail:
            raise Unavailable("no controller")
        return next(self.ids)

    async def __aenter__(self) -> TxnWorld:
        self.coordinator.start(self._new_id)
        await self._loaded()
        return self

    async def _loaded(self) -> None:
        async with asyncio.timeout(60):
            while self.coordinator.stats()["loading"]:  # noqa: ASYNC110  # virtual time: it waits for nobody
                await asyncio.sleep(0.001)

    async def __aexit__(self, *_: object) -> None:
        await self.coordinator.close()

    async def move(self) -> None:
        """To another broker, which gets the state, too."""
        await self.restart(confirmed_only=False, passes_on=True)

    async def restart(self, *, confirmed_only: bool = True, passes_on: bool = False) -> None:
        """kill -9: nothing is closed; a new process, of the next leader epoch, reads what is durable."""
        old, before = self.coordinator, self.partitions
        log = self.partitions.logs[0]
        self.storage = FakeStorage()
        self.partitions = FakePartitions(self.storage)
        again = log.reopened(self.storage, confirmed_only=confirmed_only)
        self.partitions.logs = {0: again}
        before.close(0)
        note = log.hint_note()
        lost = lost_at(self.controller.image.kv, TRANSACTION_TOPIC, 0)
        await check_passed(again, note, lambda: TxnStore(TxnLimits(), LoopClock().time_ms()), lost)
        if passes_on:
            assert note
            again.hint_note = lambda: note
        self.coordinator = self._begin()
        self.coordinator.start(self._new_id)
        await self._loaded()
        await old.close()  # only so that no task of it is left behind

    async def producer(self) -> ProducerPair:
        reply = await self.coordinator.init_producer_id("tx", INIT)
        assert reply.error is TxnError.NONE, reply
        return ProducerPair(reply.producer_id, reply.epoch)

    async def begin(self) -> ProducerPair:
        producer = await self.producer()
        assert await self.coordinator.add_partitions("tx", producer, DATA, 0) is TxnError.NONE
        return producer

    async def state(self) -> str | None:
        found = await self.coordinator.describe("tx")
        return None if found is None else found.state

    async def until(self, state: str) -> None:
        async with asyncio.timeout(60):
            while await self.state() != state:  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)


async def test_a_coordinator_that_was_never_started_tells_its_counts_and_closes() -> None:
    world = TxnWorld()
    assert world.coordinator.stats()["markers_waiting"] == 0
    await world.coordinator.close()


async def test_a_decision_is_answered_at_once_and_its_markers_follow() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.refusing = 6
        reply = await world.coordinator.end("tx", producer, commit=True, version=0)
        assert reply == TxnReply(TxnError.NONE)
        assert await world.state() == "PrepareCommit" and world.markers == []
        assert await world.coordinator.add_partitions("tx", producer, DATA, 0) is TxnError.CONCURRENT_TRANSACTIONS
        world.refusing = 0
        await world.until("CompleteCommit")
        assert sorted(each for marker in world.markers for each in marker.partitions) == DATA
        assert {(m.producer_id, m.producer_epoch, m.commit, m.coordinator_epoch) for m in world.markers} == {
            (*producer, True, 1)
        }


async def test_partitions_wait_a_little_for_the_end_of_the_transaction_before() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.NONE
        assert await world.state() == "PrepareCommit"
        assert await world.coordinator.add_partitions("tx", producer, DATA, 0) is TxnError.NONE
        assert await world.state() == "Ongoing"
        world.refusing = 6
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.NONE
        since = asyncio.get_running_loop().time()
        assert await world.coordinator.add_partitions("tx", producer, DATA, 0) is TxnError.CONCURRENT_TRANSACTIONS
        assert 0.09 < asyncio.get_running_loop().time() - since < 0.2


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("commit", [True, False])
async def test_a_new_leader_sends_the_markers_of_what_was_decided(commit: bool, moves: bool) -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.refusing = 6
        assert (await world.coordinator.end("tx", producer, commit=commit, version=0)).error is TxnError.NONE
        await (world.move() if moves else world.restart())
        assert world.partitions.logs[0].read_from == (-1 if moves else 0)
        world.refusing = 0
        await world.until("CompleteCommit" if commit else "CompleteAbort")
        assert {(marker.commit, marker.coordinator_epoch) for marker in world.markers} == {(commit, 2)}


async def test_what_is_not_confirmed_did_not_happen_for_the_next_leader() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.storage.auto_confirm = False
        ending = asyncio.create_task(world.coordinator.end("tx", producer, commit=True, version=0))
        await asyncio.sleep(1)
        assert not ending.done() and world.markers == []
        await world.restart()
        assert (await ending).error is TxnError.NOT_COORDINATOR
        assert await world.state() == "Ongoing"
        assert (await world.coordinator.end("tx", producer, commit=False, version=0)).error is TxnError.NONE
        await world.until("CompleteAbort")
        assert {marker.commit for marker in world.markers} == {False}


async def test_what_is_confirmed_but_not_yet_applied_when_a_partition_moves_is_read_from_the_log() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        before = world.partitions.logs[0].log_end_offset
        world.storage.auto_confirm = False
        ending = asyncio.create_task(world.coordinator.end("tx", producer, commit=True, version=0))
        await asyncio.sleep(1)
        await world.move()
        assert (await ending).error is TxnError.NOT_COORDINATOR
        assert world.partitions.logs[0].read_from == before
        await world.until("CompleteCommit")
        assert {(marker.commit, marker.coordinator_epoch) for marker in world.markers} == {(True, 2)}


async def test_a_client_that_waits_too_long_is_told_to_try_again_and_the_change_counts() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.storage.auto_confirm = False
        with pytest.raises(CoordinatorNotAvailable):
            await world.coordinator.end("tx", producer, commit=True, version=0)
        again = await world.coordinator.end("tx", producer, commit=True, version=0)
        assert again.error is TxnError.CONCURRENT_TRANSACTIONS
        world.storage.auto_confirm = True
        world.storage.confirm_all()
        await world.until("CompleteCommit")
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.NONE


async def test_a_refused_write_changes_nothing_and_a_complete_record_is_tried_again() -> None:
    async with TxnWorld() as world:
        log = world.partitions.logs[0]
        producer = await world.begin()
        log.too_few = [Unavailable("too few replicas")]
        refused = await world.coordinator.end("tx", producer, commit=True, version=0)
        assert refused.error is TxnError.COORDINATOR_NOT_AVAILABLE and await world.state() == "Ongoing"
        log.too_few = []
        log.errors = [None, Unavailable("too few replicas"), Unavailable("too few replicas")]
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.NONE
        await world.until("CompleteCommit")
        assert log.errors == [] and len(world.markers) == 1


async def test_a_lost_partition_answers_not_coordinator_and_sends_nothing_more() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.refusing = 6
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.NONE
        world.partitions.close(0)
        world.refusing = 0
        await asyncio.sleep(5)
        assert world.markers == [] and world.coordinator.stats()["markers_waiting"] == 0
        with pytest.raises(NotCoordinator):
            await world.coordinator.end("tx", producer, commit=True, version=0)


async def test_a_log_that_is_another_leaders_unloads_the_shard() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.partitions.logs[0].errors = [NotLeader("deposed")]
        reply = await world.coordinator.end("tx", producer, commit=True, version=0)
        assert reply.error is TxnError.NOT_COORDINATOR and world.markers == []


async def test_transactions_over_their_time_out_are_aborted_and_fenced() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        await asyncio.sleep(59)
        assert await world.state() == "Ongoing"
        await asyncio.sleep(12)
        await world.until("CompleteAbort")
        assert {(marker.commit, marker.producer_epoch) for marker in world.markers} == {(False, producer.epoch + 1)}
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.PRODUCER_FENCED


async def test_idle_ids_are_forgotten() -> None:
    async with TxnWorld() as world:
        await world.producer()
        await asyncio.sleep(world.settings.transactional_id_expiration_ms / 1000 + 20)
        assert await world.state() is None
        await world.restart()
        assert await world.state() is None


async def test_a_deleted_topic_ends_the_wait_for_its_markers() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.refusing = 3
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.NONE
        world.controller.delete_topic(world.data)
        await world.until("CompleteCommit")


async def test_the_retry_of_an_answer_that_a_failover_lost_gets_it_again() -> None:
    async with TxnWorld() as world:
        first = await world.producer()
        second = await world.coordinator.init_producer_id("tx", InitRequest(60_000, *first))
        await world.restart()
        assert await world.coordinator.init_producer_id("tx", InitRequest(60_000, *first)) == second


async def test_without_a_controller_there_is_no_id_and_nothing_is_left_behind() -> None:
    async with TxnWorld() as world:
        world.ids_fail = True
        with pytest.raises(CoordinatorLoading):
            await world.coordinator.init_producer_id("tx", INIT)
        assert world.coordinator.stats()["transactional_ids"] == 0 and await world.state() is None
        world.ids_fail = False
        await world.producer()


async def test_ids_that_no_record_can_hold_are_refused() -> None:
    async with TxnWorld() as world:
        with pytest.raises(InvalidTransactionalId):
            await world.coordinator.init_producer_id("x" * 40_000, INIT)
        assert (await world.coordinator.init_producer_id("", INIT)).error is TxnError.INVALID_REQUEST


async def test_brokers_ask_for_partitions_or_add_them() -> None:
    async with TxnWorld() as world:
        producer = await world.producer()
        admission = TxnAdmission(NODE, world.coordinator, NoPeers())

        async def ask(partitions: list[tuple[str, int]], *, add: bool, name: str = "tx") -> dict[Any, int]:
            return await admission.admit(name, *producer, partitions, add=add, timeout_s=5.0)

        assert await ask(DATA, add=False) == dict.fromkeys(DATA, TxnError.TRANSACTION_ABORTABLE)
        assert await ask(DATA, add=True) == dict.fromkeys(DATA, TxnError.NONE)
        assert await ask(DATA, add=False) == dict.fromkeys(DATA, TxnError.NONE)
        unknown = [("made a moment ago", 0)]
        assert await ask(unknown, add=True) == dict.fromkeys(unknown, TxnError.COORDINATOR_NOT_AVAILABLE)
        assert await ask(DATA, add=True, name="no such id") == dict.fromkeys(DATA, TxnError.INVALID_PRODUCER_ID_MAPPING)
        world.controller.give_all_to(2)
        assert await ask(DATA, add=False) == dict.fromkeys(DATA, TxnError.COORDINATOR_NOT_AVAILABLE)


async def test_the_topic_of_a_question_must_be_the_one_that_the_coordinator_has_under_its_name() -> None:
    """Where it was deleted and created again, and the coordinator was behind, that heard of the deletion after the
    end, and took it for one of the topic with the records: these got no marker, or that of the next transaction."""
    async with TxnWorld() as world:
        producer = await world.producer()
        ahead = FakeController()
        ahead.add_topic("another", 1)
        ahead.add_topic(TRANSACTION_TOPIC, 1)
        again = ahead.add_topic("data", 2)
        assert again.id != world.data.id

        class Calls:
            async def call(self, broker_id: int, method: str, params: Any, timeout_s: float) -> Any:
                assert (broker_id, method) == (NODE, ADMIT)
                codes = await world.coordinator.admit(read_admit(msgspec.Raw(msgspec.msgpack.encode(params))))
                return msgspec.Raw(msgspec.msgpack.encode(codes))

        admission = TxnAdmission(2, world.other_broker(ahead), Calls())

        async def ask(*, add: bool) -> dict[Any, int]:
            return await admission.admit("tx", *producer, DATA, add=add, timeout_s=5.0)

        assert await ask(add=True) == dict.fromkeys(DATA, TxnError.COORDINATOR_NOT_AVAILABLE)
        assert await world.coordinator.add_partitions("tx", producer, DATA, 0) is TxnError.NONE  # as its client asked
        assert await ask(add=False) == dict.fromkeys(DATA, TxnError.COORDINATOR_NOT_AVAILABLE)
        world.controller.delete_topic(world.data)
        assert await ask(add=False) == dict.fromkeys(DATA, TxnError.COORDINATOR_NOT_AVAILABLE)
        world.controller.add_again(again)
        assert await ask(add=False) == dict.fromkeys(DATA, TxnError.NONE)
        assert (await world.coordinator.end("tx", producer, commit=True, version=0)).error is TxnError.NONE
        await world.until("CompleteCommit")
        assert {each for marker in world.markers for each in marker.partitions} == set(DATA)


async def test_a_full_wal_delays_a_change_and_loses_none() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        world.partitions.logs[0].errors = [Overloaded("full")] * 3
        assert (await world.coordinator.end("tx", producer, commit=False, version=2)).error is TxnError.NONE
        await world.until("CompleteAbort")


async def test_a_question_to_an_id_that_is_loading_waits() -> None:
    async with TxnWorld() as world:
        producer = await world.begin()
        log = world.partitions.logs[0]
        world.partitions.close(0)
        world.partitions.opening.add(0)
        asking = asyncio.create_task(world.coordinator.admit(AdmitParams("tx", *producer, [("data", 0)], add=False)))
        await asyncio.sleep(1)
        assert not asking.done()
        world.partitions.opening.discard(0)
        world.partitions.open(log.reopened(world.storage))
        assert await asking == [TxnError.NONE]
