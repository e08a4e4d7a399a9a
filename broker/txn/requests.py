"""Clients' requests to the coordinator of a transactional id, passed on where this broker no longer is it.

A client keeps to its coordinator until it is told NOT_COORDINATOR, and then may wait before it looks for the next one:
librdkafka's timer is half a second, six times what the move of a partition takes. So a broker that does not coordinate
an id asks the one that does, as the client would, over the brokers' own connections. In Kafka the client has to look.

Invariants: a request that was passed on is not passed on again: its receiver answers for itself. It is repeated only
while the answer is NOT_COORDINATOR, which is what a client does with a lost answer, and every call allows for that. A
client whose coordinator does not answer this broker within `FORWARD_S` is told NOT_COORDINATOR, and looks for itself.

Entry: `TxnRequests`.
"""

from __future__ import annotations

import random
from collections.abc import Collection

import msgspec

from tidelog.broker.coordinators.errors import CoordinatorNotAvailable, NotCoordinator
from tidelog.broker.txn.calls import (
    REQUEST,
    AddCall,
    EndCall,
    InitCall,
    TopicPartition,
    TxnRequest,
    read_reply,
    read_request,
)
from tidelog.broker.txn.coordinator import TxnCoordinator
from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.markers import CallsToPeers
from tidelog.broker.txn.state import InitRequest, ProducerPair, TxnReply
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, TidelogError, Unavailable

FORWARD_S = 2.0
"""How long a coordinator is looked for on behalf of a client."""
CALL_S = 10.0
"""Time-out of a call: the load of a partition and the write of a record fit into it."""
RETRY_BASE_S, RETRY_CAP_S = 0.01, 0.1
_LOST = TxnReply(TxnError.NOT_COORDINATOR)


class TxnRequests:
    """The way from a broker's clients to the coordinators."""

    def __init__(
        self, node_id: int, coordinator: TxnCoordinator, calls: CallsToPeers, clock: Clock, rng: random.Random
    ) -> None:
        self._node_id = node_id
        self._coordinator = coordinator
        self._calls = calls
        self._clock = clock
        self._rng = rng
        self.forwarded = 0
        """Requests that another broker has answered."""

    async def init_producer_id(self, transactional_id: str, request: InitRequest) -> TxnReply:
        """See `TxnCoordinator.init_producer_id`."""
        return await self._route(InitCall(transactional_id, *request))

    async def add_partitions(
        self, transactional_id: str, producer: ProducerPair, partitions: Collection[TopicPartition], version: int
    ) -> TxnError:
        """See `TxnCoordinator.add_partitions`."""
        return (await self._route(AddCall(transactional_id, *producer, list(partitions), version))).error

    async def end(self, transactional_id: str, producer: ProducerPair, *, commit: bool, version: int) -> TxnReply:
        """See `TxnCoordinator.end`."""
        return await self._route(EndCall(transactional_id, *producer, commit, version))

    async def answer(self, raw: msgspec.Raw) -> bytes:
        """Answer another broker's call; what is raised here is an error code there."""
        try:
            reply = await self._here(read_request(raw))
        except TidelogError as error:
            reply = TxnReply(_code_of(error))
        return msgspec.msgpack.encode(reply)

    async def _route(self, request: TxnRequest) -> TxnReply:
        try:
            reply = await self._here(request)
        except NotCoordinator:
            reply = _LOST
        deadline = self._clock.monotonic() + FORWARD_S
        backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)
        while reply.error is TxnError.NOT_COORDINATOR and self._clock.monotonic() < deadline:
            found = await self._elsewhere(request)
            if found is None:
                break
            reply = found
            if reply.error is TxnError.NOT_COORDINATOR:
                await self._clock.sleep(backoff.next_delay_s())
        return reply

    async def _elsewhere(self, request: TxnRequest) -> TxnReply | None:
        """The answer of who leads the id's partition by the metadata; None if it cannot be asked."""
        try:
            leader = await self._coordinator.leader_of(request.transactional_id)
        except (CoordinatorNotAvailable, NotCoordinator):
            return None
        if leader.id == self._node_id:
            try:
                return await self._here(request)
            except NotCoordinator:
                return _LOST
        try:
            reply = read_reply(await self._calls.call(leader.id, REQUEST, request, CALL_S))
        except (Unavailable, CorruptData):
            return None
        self.forwarded += reply.error is not TxnError.NOT_COORDINATOR
        return reply

    async def _here(self, request: TxnRequest) -> TxnReply:
        """Ask this broker's coordinator. Raises what it raises."""
        producer = ProducerPair(request.producer_id, request.epoch)
        if isinstance(request, InitCall):
            asked = InitRequest(
                request.timeout_ms, *producer, enable_2pc=request.enable_2pc, keep_prepared=request.keep_prepared
            )
            return await self._coordinator.init_producer_id(request.transactional_id, asked)
        if isinstance(request, EndCall):
            return await self._coordinator.end(
                request.transactional_id, producer, commit=request.commit, version=request.version
            )
        return TxnReply(
            await self._coordinator.add_partitions(
                request.transactional_id, producer, request.partitions, request.version
            )
        )


def _code_of(error: TidelogError) -> TxnError:
    """The code of an error as a client of the coordinator would get it."""
    try:
        return TxnError(error.kafka_code)
    except ValueError:
        return TxnError.COORDINATOR_NOT_AVAILABLE
