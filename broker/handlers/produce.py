"""Produce (0): appends at once, answers when the WAL has confirmed.

`handle` is a plain function: when it returns, the batches have their offsets and their place in the WAL, and what it
returns is an `Answer`, given with the acknowledgement. So the next request of the connection may be appended while
this one waits for the disk (see `broker.connection`). Only under back-pressure is it a coroutine, which holds the
next request back: order matters to idempotent producers.

Rules: exactly one batch for a partition; acks 0, 1 and -1 (0: no reply, and an error closes the connection); acks 1
waits as long as -1 does, since with one member both mean "durable here". When the WAL or the log cache is at its bound
the append waits up to the request's time-out (rule 12) and then fails with KAFKA_STORAGE_ERROR, which producers retry.

Versions 0–2 cannot carry the v2 record format: refused with UNSUPPORTED_VERSION. v13 names topics by id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from broker.errors import (
    INVALID_REQUIRED_ACKS,
    INVALID_TOPIC_EXCEPTION,
    INVALID_TXN_STATE,
    KAFKA_STORAGE_ERROR,
    NOT_LEADER_OR_FOLLOWER,
    REQUEST_TIMED_OUT,
    UNSUPPORTED_COMPRESSION_TYPE,
    UNSUPPORTED_VERSION,
    CloseConnection,
    produce_code,
)
from broker.handlers.leaders import current_leader, endpoints
from broker.services import Answer, ApiHandler, RequestContext
from broker.topic_config import INTERNAL_TOPICS
from broker.wire.produce import (
    API_KEY,
    MAX_VERSION,
    MIN_VERSION,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from runtime.errors import Overloaded, TidelogError
from storage.record_batch import HEADER_BYTES, Compression, InvalidRecord
from stream.partition_log import PartitionLog

FIRST_SERVED = 3
_FIRST_WITH_ZSTD = 7
_FIRST_WITH_LEADERS = 10
_FIRST_WITH_TOPIC_ID = 13
_ATTRIBUTES_LOW = 22
"""Index of the attributes' low byte in a batch."""
_CODEC_MASK = 0x07
_TRANSACTIONAL = 0x10
_RETRY_PAUSE_S = 0.005
"""Between tries when the storage says that it is writable and then is not, for a batch of this size."""


class _Produce:
    """One Produce request on its way: what is done, what is left, and the WAL offset that confirms it."""

    __slots__ = (
        "_answer",
        "_appended",
        "_deadline",
        "_failed",
        "_next",
        "_slot",
        "_steps",
        "_wal_end",
        "context",
        "request",
        "topics",
    )

    def __init__(self, context: RequestContext, request: ProduceRequest) -> None:
        self.context = context
        self.request = request
        self.topics: list[TopicProduceResponse] = []
        self._steps: list[tuple[TopicProduceData, PartitionProduceData, PartitionProduceResponse]] = []
        self._next = 0
        self._wal_end = 0
        self._failed = False
        self._deadline = -1.0
        self._answer = Answer()
        self._appended: list[tuple[PartitionLog, int, int, bool]] = []
        self._slot: int | None = None
        for topic in request.topics:
            outcomes = []
            for data in topic.partitions:
                outcome = PartitionProduceResponse(data.index)
                outcomes.append(outcome)
                self._steps.append((topic, data, outcome))
            self.topics.append(TopicProduceResponse(topic.name, topic.topic_id, outcomes))

    def fail_rest(self, code: int, message: str) -> None:
        """Give all that was not tried the same error."""
        for _, _, outcome in self._steps[self._next :]:
            outcome.error_code = code
            outcome.error_message = message
        self._failed = self._failed or self._next < len(self._steps)
        self._next = len(self._steps)

    def append(self) -> bool:
        """Append what is left, in order. False if the storage is at its bound; call again when it has room."""
        steps = self._steps
        while self._next < len(steps):
            topic, data, outcome = steps[self._next]
            try:
                self._append_one(topic, data, outcome)
            except Overloaded:
                return False
            except TidelogError as error:
                self._note_error(topic, data, outcome, error)
            self._next += 1
        return True

    def _append_one(
        self, topic: TopicProduceData, data: PartitionProduceData, outcome: PartitionProduceResponse
    ) -> None:
        version = self.context.api_version
        partitions = self.context.services.partitions
        if version >= _FIRST_WITH_TOPIC_ID:
            log = partitions.get_by_id(topic.topic_id, data.index)
        else:
            log = partitions.get(topic.name, data.index)
        if log.topic in INTERNAL_TOPICS:  # a record that does not parse would keep its groups from loading
            self._refuse(outcome, INVALID_TOPIC_EXCEPTION, f"clients may not write to the internal topic {log.topic}")
            return
        records = data.records
        if records is None or len(records) < HEADER_BYTES:
            raise InvalidRecord("a Produce request must hold exactly one record batch for each partition")
        attributes = records[_ATTRIBUTES_LOW]
        if attributes & _TRANSACTIONAL:
            self._refuse(outcome, INVALID_TXN_STATE, "transactions are not supported by this broker yet")
            return
        if version < _FIRST_WITH_ZSTD and attributes & _CODEC_MASK == Compression.ZSTD:
            self._refuse(outcome, UNSUPPORTED_COMPRESSION_TYPE, f"Produce v{version} cannot carry zstd")
            return
        result = log.append(records)
        outcome.base_offset = result.base_offset
        outcome.log_append_time_ms = result.log_append_time_ms
        outcome.log_start_offset = result.log_start_offset
        if result.wal_end > self._wal_end:
            self._wal_end = result.wal_end
        count = result.last_offset - result.base_offset + 1
        self._appended.append((log, count, len(records), result.duplicate))

    def _refuse(self, outcome: PartitionProduceResponse, code: int, message: str) -> None:
        outcome.error_code = code
        outcome.error_message = message
        self._failed = True

    def _note_error(
        self,
        topic: TopicProduceData,
        data: PartitionProduceData,
        outcome: PartitionProduceResponse,
        error: TidelogError,
    ) -> None:
        self._refuse(outcome, produce_code(error), str(error))
        if isinstance(error, InvalidRecord):
            outcome.record_errors = error.record_errors
        if outcome.error_code == NOT_LEADER_OR_FOLLOWER and self.context.api_version >= _FIRST_WITH_LEADERS:
            services = self.context.services
            outcome.current_leader = current_leader(services, topic.name, topic.topic_id, data.index)

    def _response(self) -> ProduceResponse:
        response = ProduceResponse(self.topics)
        if self._failed and self.context.api_version >= _FIRST_WITH_LEADERS:
            leaders = [
                outcome.current_leader.leader_id
                for topic in self.topics
                for outcome in topic.partitions
                if outcome.current_leader is not None
            ]
            if leaders:
                response.node_endpoints = endpoints(self.context.services.controller.image, leaders)
        return response

    # --- acknowledging ---------------------------------------------------------------------------------------------

    def answer(self) -> Answer:
        """The response, once everything appended is confirmed or the request's time is over."""
        answer = self._answer
        if self.request.acks == 0:
            if self._failed:
                answer.fail(CloseConnection(f"Produce with acks=0 failed: {self._first_error()}"))
            else:
                answer.give(None)
            self._count()
            return answer
        self.context.services.partitions.storage.confirm.add_listener(self._wal_end, self._confirmed)
        if not answer.done:
            self._slot = self.context.services.deadlines.add(self._remaining_s(), self._timed_out)
        return answer

    def _confirmed(self) -> None:
        if self._slot is not None:
            self.context.services.deadlines.discard(self._slot, self._timed_out)
        if not self._answer.done:
            self._answer.give(self._response())
        self._count()

    def _count(self) -> None:
        """For the metrics, once: after the answer, which need not wait for it."""
        appended, self._appended = self._appended, []
        metrics = self.context.services.metrics
        for log, count, size_bytes, duplicate in appended:
            metrics.load.produced(log.first_stream, size_bytes)
            if not duplicate:
                metrics.produced(log.topic, count, size_bytes)

    def _timed_out(self) -> None:
        self._count()
        if self._answer.done:
            return
        for topic in self.topics:
            for outcome in topic.partitions:
                if outcome.error_code == 0:
                    outcome.error_code = REQUEST_TIMED_OUT
        self._answer.give(self._response())

    def _first_error(self) -> str:
        for topic in self.topics:
            for outcome in topic.partitions:
                if outcome.error_code != 0:
                    return f"{outcome.error_message} (error {outcome.error_code})"
        return "unknown"

    # --- back-pressure ---------------------------------------------------------------------------------------------

    def _remaining_s(self) -> float:
        if self._deadline < 0:
            return max(self.request.timeout_ms, 0) / 1000
        return max(self._deadline - self.context.services.clock.monotonic(), 0.0)

    async def wait_and_append(self) -> ProduceResponse | None:
        """Append the rest as the storage makes room, within the request's time."""
        services = self.context.services
        self._deadline = services.clock.monotonic() + self._remaining_s()
        try:
            async with asyncio.timeout(self._remaining_s()):
                await services.partitions.storage.writable()
                while not self.append():
                    await asyncio.sleep(_RETRY_PAUSE_S)
                    await services.partitions.storage.writable()
        except TimeoutError:
            self.fail_rest(KAFKA_STORAGE_ERROR, "the write-ahead log is at its bound: retry")
        except TidelogError as error:
            self.fail_rest(produce_code(error), str(error))
        response: ProduceResponse | None = await self.answer()
        return response


def handle(context: RequestContext, request: ProduceRequest) -> Awaitable[Any]:
    """Append now; the result is awaited for the acknowledgement."""
    produce = _Produce(context, request)
    if context.api_version < FIRST_SERVED:
        produce.fail_rest(UNSUPPORTED_VERSION, "Produce before v3 is not supported")
    elif request.acks not in (-1, 0, 1):
        produce.fail_rest(INVALID_REQUIRED_ACKS, f"acks must be -1, 0 or 1, not {request.acks}")
    elif request.transactional_id is not None:
        produce.fail_rest(INVALID_TXN_STATE, "transactions are not supported by this broker yet")
    if not produce.append():
        return produce.wait_and_append()
    return produce.answer()


APIS = [ApiHandler(API_KEY, MIN_VERSION, MAX_VERSION, handle)]
