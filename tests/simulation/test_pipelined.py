"""The pipelined producer keeps the order of its sequences whatever fails, and never has more than five on their way."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.batch.batch import parse_header
from tidelog.simulation.actors.client import Client, Lost
from tidelog.simulation.actors.kafka import FieldReader, Produced, Request
from tidelog.simulation.actors.pipelined import MAX_IN_FLIGHT, PipelinedProducer
from tidelog.simulation.actors.workload import Topic, Workload
from tidelog.simulation.checkers import check
from tidelog.simulation.checkers.history import History
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.simulation.world.network import SimNetwork
from tidelog.stream.errors import OutOfOrderSequence
from tidelog.stream.producer_state import ProducerStates

OUT_OF_ORDER, NOT_LEADER = 45, 6
WORK_S = 30.0


class FlakyBroker:
    """One partition, and the client's way to it: some requests are refused, some answers are lost."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, remembers: bool, gap: int) -> None:
        self.loop = loop
        self.rng = rng
        self.remembers = remembers
        self.gap = gap
        """The error of a batch behind one that was refused."""
        self.known = ProducerStates()
        self.end = 0
        self.most_on_their_way = 0
        self.lost = False
        self.transport = self
        self._waiting: list[asyncio.Future[Any]] = []

    async def ask_any(self, request: Request, timeout_s: float) -> tuple[int, int, int]:
        await asyncio.sleep(0.001)
        return 0, 1, 0  # InitProducerId

    async def leader(self, topic: str, partition: int) -> tuple[str, int]:
        return "b1", 9092

    async def connection(self, address: tuple[str, int]) -> FlakyBroker:
        return self

    def forget(self, topic: str, partition: int, told: object = None) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_exception(Lost("cut"))

    def send(self, request: Request) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        self._waiting = [one for one in self._waiting if not one.done()] + [future]
        self.most_on_their_way = max(self.most_on_their_way, len(self._waiting))
        answer = self._append(request)
        if self.rng.random() < 0.1:
            self.loop.call_later(0.005, self.abort)  # with it go the answers to those behind it
        else:
            self.loop.call_later(0.01, self._answer, future, answer)
        return future

    @staticmethod
    def _answer(future: asyncio.Future[Any], answer: Produced) -> None:
        if not future.done():
            future.set_result(answer)

    def _append(self, request: Request) -> Produced:
        body = FieldReader(request.body, 2 + 6 + 4)
        body.text()
        body.at += 4 + 4
        header = parse_header(body.blob())
        if self.rng.random() < 0.1 and (self.known.get(1) is not None or header.base_sequence > 0):
            return Produced(NOT_LEADER, -1, -1)
        try:
            original = self.known.check(header)
        except OutOfOrderSequence:
            return Produced(self.gap, -1, -1)
        if original is not None:
            return Produced(0 if self.remembers else OUT_OF_ORDER, original.base_offset, 0)
        base, self.end = self.end, self.end + header.count
        self.known.append(header, base, 0, 0)
        return Produced(0, base, 0)


class OneBroker(Workload):
    """A workload whose clients are the broker itself."""

    def __init__(self, loop: VirtualLoop, cluster: Any, rng: random.Random, broker: FlakyBroker) -> None:
        super().__init__(loop, cluster, rng, History())
        self.broker: Any = broker

    def client(self) -> Client:
        return cast("Client", self.broker)


def produce(seed: int, *, remembers: bool = True, gap: int = NOT_LEADER) -> tuple[Workload, FlakyBroker]:
    loop = VirtualLoop()
    network = SimNetwork(loop, random.Random(seed))
    cluster: Any = SimpleNamespace(network=network, bootstrap=[("b1", 9092)])
    broker = FlakyBroker(loop, random.Random(seed), remembers, gap)
    workload = OneBroker(loop, cluster, random.Random(seed), broker)
    workload.topics.append(Topic("t1", 1, False, exists=True))
    producer = PipelinedProducer(workload)

    async def work() -> None:
        workload.spawn(producer.run(), "producer")
        await asyncio.sleep(WORK_S)
        await workload.settle()

    loop.run_until_complete(work())
    loop.close()
    return workload, broker


@pytest.mark.parametrize("seed", range(12))
def test_what_is_sent_is_there_once_and_in_order(seed: int) -> None:
    workload, broker = produce(seed)
    sends = [op for op in workload.history.ops if op.kind == "send"]
    placed = [offset for op in sends if op.ok for offset in op.offsets]
    assert sum(op.ok for op in sends) > 20
    assert placed == sorted(set(placed))
    assert broker.most_on_their_way == MAX_IN_FLIGHT
    assert not check(workload.history)
    assert not workload.findings


def test_a_broker_that_does_not_know_what_it_took_is_found() -> None:
    workload, _ = produce(2, remembers=False)
    assert {finding.rule for finding in workload.findings} == {"sequence-refused"}


def test_a_broker_that_takes_the_batch_behind_a_refused_one_for_a_loss_is_found() -> None:
    workload, _ = produce(1, gap=OUT_OF_ORDER)
    assert {finding.rule for finding in workload.findings} == {"sequence-refused"}
